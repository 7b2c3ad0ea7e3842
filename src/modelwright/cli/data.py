"""The verbs that look at data before training on it: data prepare, audit, show, convert."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.cli.recipes import SetOption
from modelwright.errors import UsageError

if TYPE_CHECKING:
    from modelwright.data.workers import Crew

NameArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe, or data: a file, a folder, a set.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    data = typer.Typer(help="Look at data, and prepare it, before training on it.", no_args_is_help=True)
    for verb in (audit, show, prepare, convert):
        data.command(verb.__name__)(verb)
    app.add_typer(data, name="data")


def audit(
    recipe: NameArgument,
    sets: SetOption = None,
    quarantine: Annotated[
        str, typer.Option("--quarantine", help="Where unusable rows are listed.")
    ] = "quarantine.jsonl",
    max_bad_share: Annotated[
        float, typer.Option("--max-bad-share", help="Share of unusable rows from which the audit fails.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Tell every problem of the data by file and line. Then what its numbers foretell."""
    from modelwright.cli.data_words import audit_lines
    from modelwright.data.auditing import audits
    from modelwright.data.quarantine import write
    from modelwright.report.lines import quiet

    bad = False
    told: dict[str, Any] = {}
    for name, found in audits(recipe, sets or ()):
        bad = bad or found.bad_share > max_bad_share or not found.facts
        told[name] = found.as_json()
        if found.faults:
            write(Path(quarantine), found.faults)
        if not as_json:
            typer.echo(quiet("\n".join(audit_lines(name, told[name], quarantine))))
    if as_json:
        print(json.dumps({"ok": not bad, "data": told}, ensure_ascii=False))
    if bad:
        raise typer.Exit(2)


def show(
    recipe: NameArgument,
    sets: SetOption = None,
    count: Annotated[int, typer.Option("--count", min=1, help="How many samples.")] = 3,
    as_json: Json = False,
) -> None:
    """Render a few samples as the model sees them. What it learns is coloured."""
    from modelwright.cli.data_words import coloured
    from modelwright.data.named import load_named
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    loaded = load_named(recipe, sets or ())
    from modelwright.stages.show import samples

    found = samples(loaded, count)
    if as_json:
        told = {stage: [sample.as_json() for sample in some] for stage, some in found.items()}
        print(json.dumps({"samples": told}, ensure_ascii=False))
        return
    for stage, some in found.items():
        for sample in some:
            head = f"{stage}: {sample.where}, {sample.trained} of {sample.tokens} tokens are learnt"
            typer.echo(f"{head}\n{coloured(sample.pieces, sys.stdout.isatty())}\n")


def convert(
    source: Annotated[str, typer.Argument(help="A JSONL, JSON, CSV or Parquet file, or a recipe.")],
    target: Annotated[str, typer.Argument(help="A .parquet file; for a recipe, a folder for load_from_disk.")],
    full_question: Annotated[
        str | None, typer.Option("--full-question", help='Makes that column, as in "For {topic}, {question}".')
    ] = None,
    as_json: Json = False,
) -> None:
    """Write rows as Parquet, or a recipe's rows as a folder. That folder is for load_from_disk."""
    from modelwright.data.auditing import write_sets
    from modelwright.data.files import SUFFIXES
    from modelwright.data.sets import convert as write_parquet

    if Path(source).suffix in SUFFIXES:
        if not Path(source).is_file():
            raise UsageError(f"{source}: there is no such file")
        rows: Any = write_parquet(Path(source), Path(target), full_question)
    else:
        rows = write_sets(source, Path(target))
    print(json.dumps({"target": target, "rows": rows}) if as_json else f"{target}: {rows} rows")


def prepare(
    recipe: NameArgument,
    sets: SetOption = None,
    output: Annotated[str | None, typer.Option("--output", help="The folder; without it, RUN/data/packed.")] = None,
    share: Annotated[
        str | None, typer.Option("--rank", metavar="R/N", help="Do every N-th piece, on a disk all ranks see.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Let a Ray cluster do the pieces.")] = False,
    as_json: Json = False,
) -> None:
    """Clean, deduplicate, tokenize and pack text. Stopped anywhere, it goes on."""
    from modelwright.data.named import load_named
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    loaded = load_named(recipe, sets or (), preparing=True)
    from modelwright.data.prepare import REPORT
    from modelwright.runs.lock import hold
    from modelwright.runs.folder import RunFolder, read_json
    from modelwright.stages import prepare as stage

    folder = Path(output) if output else RunFolder(Path(loaded.recipe.run_dir)).packed
    crew = _crew(loaded.recipe.prepare, share, ray)
    folder.mkdir(parents=True, exist_ok=True)
    plan = stage.plan_of(loaded, folder)
    with hold(folder / f".lock{share.replace('/', '-') if share else ''}"):
        try:
            for told in stage.prepare_shards(plan, crew, loaded):
                print(f"\r{told.step}: {told.done} of {told.of} pieces  ", end="", file=sys.stderr, flush=True)
        finally:
            print(file=sys.stderr)  # a letter begins on a line of its own
    report = read_json(folder / REPORT)
    print(json.dumps({"folder": str(folder), **report}, ensure_ascii=False) if as_json else
          f"{stage.sentence(report)}\n{folder}/report.html tells more")  # fmt: skip


def _crew(settings: Any, share: str | None, ray: bool) -> Crew:
    """Who does the work, as the options say."""
    from modelwright.data.by_ray import Ray
    from modelwright.data.workers import Ranks
    from modelwright.stages.prepare import processes

    if share is None:
        return Ray(settings.workers if settings else None) if ray else processes(settings)
    rank, slash, size = share.partition("/")
    if not (slash and rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        raise UsageError(f"--rank is {share!r}; it wants a rank and their number, such as 0/4")
    return Ranks(int(rank), int(size))
