"""The verb that looks at the machine: doctor."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from modelwright.cli.recipes import JsonOption, SetOption

UNFIT = 2
"""Exit code where something must be mended before the recipe can run."""


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("doctor")(doctor)


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Whether this recipe can run here; else the machine alone.")
    ] = None,
    sets: SetOption = None,
    nodes: Annotated[str | None, typer.Option(help="Look at so many nodes together; start it on all at once.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="With --nodes: this node's number, from 0.")] = None,
    main_address: Annotated[str | None, typer.Option(help="With --nodes: where the others reach node 0.")] = None,
    port: Annotated[int | None, typer.Option(help="With --nodes: a free port there; 29500 without it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine can do, and how to mend what it cannot. Exit 0 only if the recipe can run."""
    from modelwright.errors import UsageError
    from modelwright.launch.doctor import examine
    from modelwright.launch.nodes import Asked
    from modelwright.launch.patient import checks
    from modelwright.launch.preflight import WAIT, look_at_nodes
    from modelwright.recipe.load import load
    from modelwright.runs.caches import prepare_environment

    asked = Asked(nodes, node_rank, main_address, port)
    if not nodes and asked != Asked():
        raise UsageError(
            "--node-rank, --main-address and --port want --nodes too: how many nodes are looked at together"
        )
    loaded = load(recipe, sets or ()) if recipe else None
    prepare_environment()
    if nodes and asked.node is not None:
        typer.echo(f"node {asked.node} of {nodes}: they wait {WAIT.total_seconds():.0f} s for one another", err=True)
    found = look_at_nodes(asked, loaded) if nodes else examine(checks(loaded))
    failed = [check for check in found if check.state == "fail"]
    if as_json:
        told = {"ok": not failed, "recipe": loaded.recipe.name if loaded else None,
                "checks": [check.as_json() for check in found]}  # fmt: skip
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            typer.echo(f"{check.state:<4}  {check.name:<{width}}  {check.found}")
            if check.fix:
                typer.echo(f"{'':<4}  {'':<{width}}  → {check.fix}")
        whom = f"{loaded.recipe.name} " if loaded else "these nodes " if nodes else "this machine "
        typer.echo(f"\n{whom}{'cannot run yet: ' + ', '.join(c.name for c in failed) if failed else 'can run'}")
    if failed:
        raise typer.Exit(UNFIT)
