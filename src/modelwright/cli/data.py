"""Commands on data before training: data audit, show, download, prepare, convert."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.cli.options import (
    DataArgument,
    JsonOption,
    SetOption,
    add_commands,
    find_template_problems,
    print_json,
)
from modelwright.errors import UsageError
from modelwright.report.formatting import strip_control_chars

if TYPE_CHECKING:
    from modelwright.data.prepare.executors import Executor


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    data = typer.Typer(help="Inspect and prepare data before training.", no_args_is_help=True)
    add_commands(data, {"audit": audit, "show": show, "download": download, "prepare": prepare, "convert": convert})
    app.add_typer(data, name="data")


def audit(
    recipe: DataArgument,
    overrides: SetOption = None,
    quarantine: Annotated[
        str, typer.Option("--quarantine", help="Where unusable rows are listed.")
    ] = "quarantine.jsonl",
    max_invalid_fraction: Annotated[
        float | None,
        typer.Option("--max-invalid-fraction", help="The audit fails above this fraction; default: the recipe's."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report every problem of the data, and its token statistics."""
    from modelwright.data.audit import audit_recipe
    from modelwright.data.readers import write_quarantine

    failed = False
    audits_json: dict[str, Any] = {}
    progress = partial(typer.echo, err=True)
    for name, result in audit_recipe(recipe, overrides or (), progress, find_template_problems):
        limit = result.quarantine.max_invalid_fraction if max_invalid_fraction is None else max_invalid_fraction
        failed = failed or result.is_refused or result.invalid_fraction > limit or not result.stats
        audits_json[name] = result.as_json()
        if result.invalid_rows:
            write_quarantine(Path(quarantine), result.invalid_rows)
        if not as_json:
            text = "\n".join(audit_lines(name, audits_json[name], quarantine, result.lines()))
            typer.echo(strip_control_chars(text))
    if as_json:
        print_json({"ok": not failed, "data": audits_json})
    if failed:
        raise typer.Exit(2)


def show(
    recipe: DataArgument,
    overrides: SetOption = None,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="How many samples.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Render a few samples as the model sees them. Trained tokens are highlighted."""
    from modelwright.data.audit import load_recipe_or_data
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    loaded = load_recipe_or_data(recipe, overrides or ())
    from modelwright.stages.specs import render_samples

    by_stage, lines = render_samples(loaded, num_samples)
    if as_json:
        print_json(
            {"samples": {stage: [sample.as_json() for sample in samples] for stage, samples in by_stage.items()}}
        )
        return
    for line in lines:
        typer.echo(strip_control_chars(line))
    for stage, stage_samples in by_stage.items():
        for sample in stage_samples:
            head = f"{stage}: {sample.where}, {sample.trained_tokens} of {sample.tokens} tokens trained"
            typer.echo(f"{head}\n{highlight_trained(sample.spans, sys.stdout.isatty())}\n")


def download(
    corpus: Annotated[str, typer.Argument(help="fineweb-edu, wikitext-103, tinystories, or OWNER/NAME on the hub.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder that is filled.")] = "data/raw",
    max_files: Annotated[int | None, typer.Option("--max-files", min=1, help="Only the first files.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fill a folder with an open corpus for pretraining. Resumes, and checks every file by its checksum."""
    from modelwright.data.download import download_corpus
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    manifest = download_corpus(corpus, Path(output), max_files, lambda line: typer.echo(line, err=True))
    size = sum(file["bytes"] for file in manifest["files"].values())
    summary = f"{output}: {len(manifest['files'])} files of {manifest['repository']}, {size / 1e9:,.2f} GB"
    print_json({"folder": output, **manifest}) if as_json else print(summary)


def convert(
    source: Annotated[str, typer.Argument(help="A JSONL, JSON, CSV or Parquet file, or a recipe.")],
    target: Annotated[str | None, typer.Argument(hidden=True)] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="A .parquet file; for a recipe, a folder for load_from_disk. Required."),
    ] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option("--prompt-template", help='Adds a full-question column, such as "For {topic}, {question}".'),
    ] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="Of a recipe: the stage whose rows are written; default: the first.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write rows as Parquet, or a recipe's as a data set on disk."""
    from modelwright.data.audit import convert_to_parquet as write_parquet
    from modelwright.data.audit import export_datasets
    from modelwright.data.readers import row_suffix

    path = output or target  # version 0.1 took the target as a second argument
    if path is None:
        raise UsageError("data convert wants --output: a .parquet file, or a folder for a recipe")
    if row_suffix(Path(source)):
        if not Path(source).is_file():
            raise UsageError(f"{source}: there is no such file")
        if stage:
            raise UsageError(f"--stage is {stage!r}; it wants a recipe, and {source} is a file of rows")
        rows: Any = write_parquet(Path(source), Path(path), prompt_template)
    else:
        rows, others = export_datasets(source, Path(path), stage)
        if others:
            typer.echo(f"rows of other stages are not written; --stage writes them: {', '.join(others)}", err=True)
    print_json({"target": path, "rows": rows}) if as_json else print(f"{path}: {rows} rows")


def prepare(
    recipe: DataArgument,
    overrides: SetOption = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Folder; default: RUN/data/packed.")] = None,
    rank_of: Annotated[
        str | None, typer.Option("--rank", metavar="R/N", help="Run every N-th task, on a disk all ranks see.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run the tasks on a Ray cluster.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Clean, deduplicate, tokenize and pack text. Resumes after an interruption."""
    from modelwright.data.audit import load_recipe_or_data
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    loaded = load_recipe_or_data(recipe, overrides or (), for_prepare=True)
    from modelwright.data.prepare.pipeline import REPORT_FILE
    from modelwright.runs.folder import RunFolder, read_json, run_lock
    from modelwright.stages import prepare as stage

    folder = Path(output) if output else RunFolder(Path(loaded.recipe.run_dir)).packed
    executor = _executor(loaded.recipe.prepare, rank_of, ray)
    folder.mkdir(parents=True, exist_ok=True)
    plan = stage.build_prepare_job(loaded, folder)
    for note in stage.unread_files(plan):
        typer.echo(strip_control_chars(note), err=True)
    with run_lock(folder / f".lock{rank_of.replace('/', '-') if rank_of else ''}"):
        try:
            for progress in stage.run_prepare(plan, executor, loaded):
                line = f"\r{progress.step}: {progress.done}/{progress.total} tasks  "
                print(line, end="", file=sys.stderr, flush=True)
        finally:
            print(file=sys.stderr)  # an error message starts on a new line
    report = read_json(folder / REPORT_FILE)
    if as_json:
        print_json({"folder": str(folder), **report})
    else:
        print(f"{stage.report_line(report)}\n{folder}/report.html has the details")


def _executor(settings: Any, rank_of: str | None, ray: bool) -> Executor:
    """The executor that the options ask for."""
    from modelwright.data.prepare.executors import RankExecutor, RayExecutor
    from modelwright.stages.prepare import process_executor

    if rank_of is None:
        return RayExecutor(settings.workers if settings else None) if ray else process_executor(settings)
    rank, slash, num_ranks = rank_of.partition("/")
    if not (slash and rank.isdigit() and num_ranks.isdigit() and int(rank) < int(num_ranks)):
        raise UsageError(f"--rank is {rank_of!r}; it wants a rank and the number of ranks, such as 0/4")
    return RankExecutor(int(rank), int(num_ranks))


GREEN, RESET = "\x1b[32m", "\x1b[0m"


def audit_lines(name: str, audit: dict[str, Any], quarantine: str, lines: Sequence[str] = ()) -> Iterator[str]:
    """An audit as lines, problems first."""
    yield from audit["grouped"]
    all_valid = "all usable" if audit["rows"] else "no rows"
    invalid = f"{audit['invalid']:,} unusable, listed in {quarantine}" if audit["invalid"] else all_valid
    yield f"{name}: {audit['rows']:,} rows, {invalid}"
    yield from (f"  {line}" for line in lines)
    if "lengths" not in audit:
        return
    lengths, truncated, duplicates, split = audit["lengths"], audit["truncated"], audit["duplicates"], audit["split"]
    yield (
        f"  tokens      {audit['tokens']:,} (by {audit['tokens_counted_by']}); median {lengths['median']:,}, "
        f"p99 {lengths['p99']:,}, max {lengths['longest']:,}"
    )
    yield f"  lengths     {_sparkline(lengths['counts'])}  {lengths['bins'][0]} to {lengths['longest']:,} tokens"
    lost = f"{truncated['truncated_tokens']:,} tokens at max_length {audit['max_length']}"
    yield f"  truncated   {truncated['rows']:,} rows ({truncated['fraction']:.1%}) lose {lost}"
    most_frequent = ""
    if duplicates["exact"]:
        most_frequent = f"; the most frequent occurs {duplicates['max_copies']} times: {duplicates['example']}"
    yield f"  duplicates  {duplicates['exact']:,} exact, {duplicates['near']:,} near duplicates{most_frequent}"
    yield (
        f"  split       {split['train_rows']:,} training rows, {split['held_out_rows']:,} held out; "
        f"{split['prompts_in_both_splits']} prompts in both splits; a split by rows alone would leak "
        f"{split['random_split_leakage']:.0%}"
    )
    padding = audit["padding"]
    yield f"  padding     {padding['padded']:.1%} of a batch as rows come, {padding['packed']:.1%} packed"


def _sparkline(counts: Sequence[int]) -> str:
    """A histogram on one line."""
    bars, top = " ▁▂▃▄▅▆▇█", max([*counts, 1])
    return "".join(bars[-(-count * 8 // top)] for count in counts)


def highlight_trained(pieces: Sequence[tuple[str, bool]], use_color: bool) -> str:
    """Trained text in green, or between ⟦ and ⟧ without colors; control characters are replaced."""
    before, after = (GREEN, RESET) if use_color else ("⟦", "⟧")
    return "".join(
        f"{before}{_replace_control_chars(text)}{after}" if trained else _replace_control_chars(text)
        for text, trained in pieces
    )


def _replace_control_chars(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
