"""The cluster side of launch, and the verbs that look after a job there: job check, status, logs, cancel, pull."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from modelwright.launch.cluster import Client
    from modelwright.launch.manifests import Job
    from modelwright.launch.rehearsal import Disturbance
    from modelwright.launch.rules import Letter
    from modelwright.recipe.load import LoadedRecipe

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given often.")
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="trainjob or pytorchjob; without it, what the recipe says.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

job = typer.Typer(help="Look after a job on the cluster, and check manifests.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the group of verbs to the command."""
    app.add_typer(job, name="job")


@dataclass(frozen=True)
class Deeds:
    """What launch --on openshift is asked to do."""

    render: bool = False
    """Print the manifests."""
    check: bool = False
    """Check them."""
    rehearse: bool = False
    """Run them on this machine."""
    submit: bool = False
    """Send them."""
    target: str | None = None
    """Kind of job, where it is not the recipe's."""
    place: Path | None = None
    """Folder of a rehearsal."""
    disturb: tuple[str, ...] = ()
    """What happens on the way of a rehearsal."""
    clone_from: str | None = None
    """Repository of this machine that a rehearsal clones."""
    as_json: bool = False
    """One JSON object on stdout."""


def launch_there(loaded: LoadedRecipe, deeds: Deeds) -> None:
    """Render, check, rehearse or send a recipe as a cluster job; the check comes before everything else."""
    from modelwright.errors import ProblemsFound, UsageError
    from modelwright.launch.manifests import documents, render
    from modelwright.launch.rules import check
    from modelwright.launch.stream import read_text

    if sum((deeds.render, deeds.check, deeds.rehearse, deeds.submit)) != 1:
        raise UsageError("--on openshift wants one of --render, --check, --rehearse, --submit")
    order = _order(loaded, deeds.target)
    text = render(order)
    if deeds.render:
        print(
            json.dumps({"apiVersion": "v1", "kind": "List", "items": documents(order)}) if deeds.as_json else text,
            end="",
        )
        return
    letters = check(read_text(text, f"{order.name}.yaml"))
    serious = [letter for letter in letters if letter.serious]
    if deeds.check:
        _tell_check(letters, f"{order.name}: {order.target}", deeds.as_json)
    elif serious:
        raise ProblemsFound(serious)
    elif deeds.rehearse:
        _rehearse(order, text, deeds)
    else:
        _submit(order, text, deeds.as_json)


@job.command("check")
def check_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Manifests, yours or rendered.")],
    as_json: JsonOption = False,
) -> None:
    """Tell every mistake in manifests by file and line. Unknown fields, wrong types, and what fails only later."""
    from modelwright.launch.rules import check
    from modelwright.launch.stream import read

    manifests = [manifest for file in files for manifest in read(file)]
    _tell_check(check(manifests), ", ".join(map(str, files)), as_json)


@job.command("status")
def status(
    recipe: RecipeArgument, sets: SetOption = None, target: TargetOption = None, as_json: JsonOption = False
) -> None:
    """Say where a job stands: its phase, its pods, its progress."""
    from dataclasses import asdict

    from modelwright.launch import cluster as cluster_client

    client, order = _client(recipe, sets, target)
    found = cluster_client.status(client, order)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    print(f"{found.name}: {found.phase}" + (f" ({found.reason})" if found.reason else ""))
    for name, phase in found.pods.items():
        print(f"  {name}  {phase}")
    if found.progress:
        print(f"  progress  {json.dumps(found.progress)}")


@job.command("logs")
def logs(
    recipe: RecipeArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as more is written.")] = False,
    sets: SetOption = None,
    target: TargetOption = None,
) -> None:
    """Show what the first pod writes."""
    from modelwright.launch import cluster as cluster_client

    client, order = _client(recipe, sets, target)
    if code := cluster_client.logs(client, order, follow):
        raise typer.Exit(code)


@job.command("cancel")
def cancel(recipe: RecipeArgument, sets: SetOption = None, target: TargetOption = None) -> None:
    """Delete a job; its volumes, and the run on them, stay."""
    from modelwright.launch import cluster as cluster_client

    client, order = _client(recipe, sets, target)
    print(cluster_client.cancel(client, order) or f"there was no {order.target} {order.name}")


@job.command("pull")
def pull(
    recipe: RecipeArgument,
    into: Annotated[Path | None, typer.Option("--into", help="Folder; without it, runs/NAME.")] = None,
    sets: SetOption = None,
    target: TargetOption = None,
) -> None:
    """Bring the run folder of a job home."""
    from modelwright.launch import cluster as cluster_client

    client, order = _client(recipe, sets, target)
    folder = cluster_client.pull(client, order, into or Path("runs") / order.parcel.recipe.name)
    print(f"{order.run_folder} is now {folder}")


def _order(loaded: LoadedRecipe, target: str | None) -> Job:
    """The recipe as a cluster job, with the grace that its last run's saves ask for."""
    from modelwright.errors import UsageError
    from modelwright.launch.manifests import job_of, measured_save

    if target not in (None, "trainjob", "pytorchjob"):
        raise UsageError(f"--target is {target!r}; it wants trainjob or pytorchjob")
    save = measured_save(Path(loaded.recipe.run_dir))
    return job_of(loaded.recipe, loaded.path.parent, target, save)  # type: ignore[arg-type]


def _client(recipe: str, sets: list[str] | None, target: str | None) -> tuple[Client, Job]:
    from modelwright.launch.cluster import client
    from modelwright.recipe.load import load

    order = _order(load(recipe, sets or ()), target)
    return client(order.cluster.namespace), order


def _tell_check(letters: list[Letter], subject: str, as_json: bool) -> None:
    """Problems on stdout's object or on stderr; notes never fail the check."""
    serious = [letter for letter in letters if letter.serious]
    if as_json:
        rows = [
            {"where": each.where, "field": each.field, "message": each.message, "serious": each.serious}
            for each in letters
        ]
        print(json.dumps({"ok": not serious, "problems": rows}, ensure_ascii=False))
    else:
        for letter in letters:
            print(letter if letter.serious else f"{letter.where}: note: {letter.message}", file=sys.stderr)
        if not serious:
            print(f"ok  {subject}: nothing that a cluster would refuse")
    if serious:
        raise typer.Exit(2)


def _rehearse(order: Job, text: str, deeds: Deeds) -> None:
    from modelwright.launch.rehearsal import Wish, rehearse
    from modelwright.launch.stream import read_text

    place = deeds.place or Path("runs") / f"{order.parcel.recipe.name}-rehearsal"
    disturbances = tuple(_disturbance(each) for each in deeds.disturb)
    wish = Wish(place, {"HF_TOKEN": "no-token-in-a-rehearsal"}, disturbances, clone_from=deeds.clone_from)
    outcome = rehearse(
        read_text(text, f"{order.name}.yaml"), wish, lambda line: print(line, file=sys.stderr, flush=True)
    )
    if deeds.as_json:
        facts: dict[str, Any] = {"succeeded": outcome.succeeded, "reason": outcome.reason, "events": outcome.events}
        paths = {name: str(path) for name, path in outcome.logs.items()}
        print(json.dumps({**facts, "logs": paths, "not_shown": outcome.not_shown, "place": str(place)}))
    else:
        print(f"{'Succeeded' if outcome.succeeded else 'Failed'}: {outcome.reason}; logs are in {place / 'logs'}")
        for line in outcome.not_shown:
            print(f"not shown: {line}")
    if not outcome.succeeded:
        raise typer.Exit(1)


def _disturbance(text: str) -> Disturbance:
    """`kill:1@5` is: kill pod 1 once step 5 is told."""
    import re

    from modelwright.errors import UsageError
    from modelwright.launch.rehearsal import Disturbance

    found = re.fullmatch(r"(kill|evict|lose):(\d+)@(\d+)", text)
    if found is None:
        raise UsageError(f"--disturb is {text!r}; it wants kill, evict or lose, a pod and a step, such as kill:1@5")
    return Disturbance(found[1], int(found[2]), int(found[3]))  # type: ignore[arg-type]


def _submit(order: Job, text: str, as_json: bool) -> None:
    from modelwright.launch import cluster as cluster_client

    said = cluster_client.submit(cluster_client.client(order.cluster.namespace), text, order)
    if as_json:
        print(
            json.dumps({"job": order.name, "target": order.target, "namespace": order.cluster.namespace, "said": said})
        )
        return
    print("\n".join(said))
    print(f"sent; modelwright job status {order.parcel.recipe.name} tells where it stands")
