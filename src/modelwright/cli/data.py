"""The verbs that look at data before training on it: data prepare, audit, show, convert."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.cli.recipes import RecipeArgument, SetOption
from modelwright.errors import UsageError

if TYPE_CHECKING:
    from modelwright.data.workers import Crew

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    data = typer.Typer(help="Look at data, and prepare it, before training on it.", no_args_is_help=True)
    for verb in (prepare,):
        data.command(verb.__name__)(verb)
    app.add_typer(data, name="data")


def prepare(
    recipe: RecipeArgument,
    sets: SetOption = None,
    output: Annotated[str | None, typer.Option("--output", help="The folder; without it, RUN/data/packed.")] = None,
    share: Annotated[
        str | None, typer.Option("--rank", metavar="R/N", help="Do every N-th piece, on a disk all ranks see.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Let a Ray cluster do the pieces.")] = False,
    as_json: Json = False,
) -> None:
    """Clean, deduplicate, tokenize and pack the recipe's text; stopped anywhere, it goes on."""
    from modelwright.recipe.load import load
    from modelwright.runs.caches import prepare_environment

    loaded = load(recipe, sets or ())
    prepare_environment()
    from modelwright.data.prepare import REPORT
    from modelwright.runs import lock
    from modelwright.runs.folder import RunFolder, read_json
    from modelwright.stages import prepare as stage

    folder = Path(output) if output else RunFolder(Path(loaded.recipe.run_dir)).packed
    crew = _crew(loaded.recipe.prepare, share, ray)
    folder.mkdir(parents=True, exist_ok=True)
    plan = stage.plan_of(loaded, folder)
    with lock.hold(folder / f".lock{share.replace('/', '-') if share else ''}"):
        for told in stage.prepare_shards(plan, crew, loaded):
            print(f"\r{told.step}: {told.done} of {told.of} pieces  ", end="", file=sys.stderr, flush=True)
    report = read_json(folder / REPORT)
    print(file=sys.stderr)
    print(json.dumps({"folder": str(folder), **report}, ensure_ascii=False) if as_json else
          f"{stage.sentence(report)}\n{folder}/report.html tells more")  # fmt: skip


def _crew(settings: Any, share: str | None, ray: bool) -> Crew:
    """Who does the work, as the options say."""
    from modelwright.data.workers import Ranks, Ray
    from modelwright.stages.prepare import processes

    if share is None:
        return Ray(settings.workers if settings else None) if ray else processes(settings)
    rank, slash, size = share.partition("/")
    if not (slash and rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        raise UsageError(f"--rank is {share!r}; it wants a rank and their number, such as 0/4")
    return Ranks(int(rank), int(size))
