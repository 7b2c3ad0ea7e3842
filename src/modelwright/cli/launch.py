"""The verb that starts a recipe on many processes: launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelwright.cli import openshift
from modelwright.cli.openshift import Deeds, TargetOption, launch_there

if TYPE_CHECKING:
    from modelwright.launch.nodes import Asked
    from modelwright.recipe.load import LoadedRecipe


def register(app: typer.Typer) -> None:
    """Add the verb, and those that look after what it sent to a cluster."""
    app.command("launch")(launch)
    openshift.register(app)


def launch(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    more: Annotated[list[str] | None, typer.Argument(help="After --, anything else that run takes.")] = None,
    on: Annotated[str, typer.Option("--on", help="local (this machine), nodes (several), or openshift.")] = "local",
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one setting.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--override", metavar="KEY", help="Go on although this setting changed.")
    ] = None,
    per_node: Annotated[
        str | None, typer.Option(help="Processes on a node, or on each (4,2); without it one for each GPU, or one.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="nodes: how many in all; 1:2 lets the second come and go.")] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(help="nodes: start this one, from 0; without it each one's command is printed."),
    ] = None,
    main_address: Annotated[str | None, typer.Option(help="nodes: where the others reach node 0.")] = None,
    port: Annotated[int | None, typer.Option(help="nodes: a free port there; 29500 without it.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Failures met with a restart before any step in between.")] = 3,
    log_format: Annotated[
        str, typer.Option("--log-format", help="auto (a live panel on a terminal), plain, or json.")
    ] = "auto",
    render: Annotated[bool, typer.Option("--render", help="openshift: print the manifests.")] = False,
    check: Annotated[bool, typer.Option("--check", help="openshift: check them.")] = False,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="openshift: run them on this machine.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="openshift: send them.")] = False,
    target: TargetOption = None,
    place: Annotated[Path | None, typer.Option("--place", help="openshift: folder of a rehearsal.")] = None,
    disturb: Annotated[
        list[str] | None, typer.Option("--disturb", metavar="KIND:POD@STEP", help="openshift: such as kill:1@5.")
    ] = None,
    clone_from: Annotated[str | None, typer.Option(metavar="PATH", help="openshift: what a rehearsal clones.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Start a recipe on all GPUs here, on many nodes or on a cluster. It is started again when something dies."""
    from modelwright.launch.nodes import Asked, operator_variables
    from modelwright.recipe.load import load

    there = Asked(nodes, node_rank, main_address, port, per_node)
    deeds = Deeds(render, check, rehearse, submit, target, place, tuple(disturb or ()), clone_from, as_json)
    _refuse_idle_words(on, there, deeds)
    loaded = load(recipe, sets or ())
    if on == "openshift":
        launch_there(loaded, deeds)
        return
    asked = Asked(per_node=per_node) if on == "local" else there
    settings = [word for setting in sets or () for word in ("--set", setting)]
    overrides = [word for key in override or () for word in ("--override", key)]
    rest = (*settings, *overrides, *(more or ()))
    if on == "nodes":
        variables = operator_variables()
        asked = asked.or_operator(variables)
        if asked.node is None:
            _print_commands(recipe, rest, asked, as_json)
            return
    command = ("run", recipe, *rest, "--log-format", log_format)
    _start(loaded, command, asked, max_restarts)


def _refuse_idle_words(on: str, there: Asked, deeds: Deeds) -> None:
    """Words that mean nothing where the recipe is to run: `--nodes 2` without `--on nodes` would be one node."""
    from modelwright.errors import UsageError

    if on not in ("local", "nodes", "openshift"):
        raise UsageError(f"--on is {on!r}; it wants local, nodes or openshift")
    meeting = {"--nodes": there.nodes, "--node-rank": there.node, "--main-address": there.address, "--port": there.port}
    cluster = {"--render": deeds.render, "--check": deeds.check, "--rehearse": deeds.rehearse,
               "--submit": deeds.submit}  # fmt: skip
    for place, words in (("nodes", meeting), ("openshift", cluster)):
        idle = [name for name, value in words.items() if value is not None and value is not False]
        if idle and on != place:
            raise UsageError(
                f"{', '.join(idle)} with --on {on} would change nothing; say --on {place}, or leave it out"
            )


def _print_commands(recipe: str, rest: tuple[str, ...], asked: Asked, as_json: bool) -> None:
    """One command for each node."""
    import json

    from modelwright.launch.nodes import commands, operator_variables

    found = commands(recipe, rest, asked, operator_variables())
    if as_json:
        print(json.dumps({"nodes": found}))
        return
    if asked.address is None:
        print("# MAIN_ADDRESS: the address of node 0, as the other nodes reach it (hostname -I says it there)")
    for node in found:
        print(f"# node {node['node']}\n{node['command']}")
    print(f"# the same with torchrun, on node 0 for instance\n{found[0]['torchrun']}")


def _start(loaded: LoadedRecipe, command: tuple[str, ...], asked: Asked, max_restarts: int) -> None:
    """Run this node's part, and leave with its ranks' exit code."""
    import sys

    from modelwright.launch.nodes import wish_for
    from modelwright.launch.supervisor import supervise
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    code, letter = supervise(wish_for(loaded, command, asked, max_restarts))
    if letter:
        print(letter, file=sys.stderr)
    if code:
        raise typer.Exit(code)
