"""Commands that train a recipe and predict its memory, time and cost: run, plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelwright.cli.options import (
    AcceptGateOption,
    AllowChangedOption,
    Fp8Option,
    FromStageOption,
    JsonOption,
    LogFormatOption,
    ReasonOption,
    RecipeArgument,
    SetOption,
    TrustFileOption,
    UntilStageOption,
    add_commands,
    print_json,
    print_notes,
)
from modelwright.errors import UsageError
from modelwright.report.formatting import strip_control_chars

if TYPE_CHECKING:
    from modelwright.recipe.load import LoadedRecipe


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    add_commands(app, {"run": run, "plan": plan})
    add_commands(app, {"train": run}, hidden=True)


def run(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    allow_changed: AllowChangedOption = None,
    from_stage: FromStageOption = None,
    until_stage: UntilStageOption = None,
    accept_gate: AcceptGateOption = None,
    reason: ReasonOption = None,
    trust_file: TrustFileOption = None,
    fp8: Fp8Option = None,
    log_format: LogFormatOption = "auto",
) -> None:
    """Train a recipe; an interrupted run resumes automatically.

    --output FOLDER is the run folder (default: runs/NAME); flags of Transformers scripts such as --learning_rate work.
    """
    from modelwright.cluster.progress import publish_progress
    from modelwright.errors import GateClosed
    from modelwright.plan.model_shape import model_folders
    from modelwright.recipe.load import load
    from modelwright.report.console import console_watcher, run_summary
    from modelwright.runs.caches import importing, prepare_environment
    from modelwright.runs.folder import RunFolder, hash_weights_ahead

    if log_format not in ("auto", "plain", "json"):
        raise UsageError(f"--log-format is {log_format!r}; it wants auto, plain or json")
    loaded = load(recipe, overrides or ())
    if fp8 is not None:
        fp8_overrides = [f"{stage}.precision={'fp8' if fp8 else 'bf16'}" for stage in loaded.recipe.stages]
        fp8_overrides += [f"{stage}.fp8_validation=off" for stage in loaded.recipe.stages if fp8]
        loaded = load(recipe, [*(overrides or ()), *fp8_overrides])
    loaded = replace(loaded, notes=(*loaded.notes, *_notes_on_run_folder(loaded)))
    closed: GateClosed | None = None
    try:
        with console_watcher(log_format) as console, publish_progress(console) as watch:  # type: ignore[arg-type]
            prepare_environment()
            if model := loaded.recipe.model.model_name_or_path:
                hash_weights_ahead(lambda: model_folders(model, loaded.path.parent))
            with importing():
                from modelwright.engine.distributed import warm_up_cuda

                warm_up_cuda()
                from modelwright.stages import pipeline
                from modelwright.stages.context import RunOptions

            changed, accepted, trusted = (frozenset(names or ()) for names in (allow_changed, accept_gate, trust_file))
            options = RunOptions(changed, from_stage, until_stage, accepted, reason, trusted, is_command=True)
            pipeline.run(loaded, watch, options)
    except GateClosed as error:
        closed = error
    if log_format != "json" and pipeline.is_rank_zero():
        print(run_summary(RunFolder(Path(loaded.recipe.run_dir))))
    if closed and loaded.recipe.closed_gate_exit_code:
        raise closed


def _notes_on_run_folder(loaded: LoadedRecipe) -> list[str]:
    """That a new run does not go on from the checkpoints of Transformers' Trainer in its folder."""
    folder, model = Path(loaded.recipe.run_dir), loaded.recipe.model.model_name_or_path
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda file: (len(file.parent.name), file))
    if not states or (folder / "journal.jsonl").exists() or Path(model or "").absolute().parent == folder.absolute():
        return []
    start = f"its weights are a start, without its optimizer: --model_name_or_path {states[-1].parent}"
    return [f"{states[-1].parent}: Transformers' Trainer wrote it, and this run does not resume it; {start}"]


def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="MACHINES", help="Such as 1xH200,4xL40S,2x2xA40; default: this machine."),
    ] = None,
    overrides: SetOption = None,
    num_rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Number of rows, if the data is not on this machine.")
    ] = None,
    prices_file: Annotated[
        Path | None, typer.Option("--prices", help="JSON of dollars per GPU-hour by GPU name.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run a few steps of each stage; compare memory and time with the prediction."),
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps of each stage, with --measure.")] = 10,
    stages: Annotated[
        list[str] | None, typer.Option("--stage", help="Only this stage, with --measure; repeatable.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine and keep the factors for later plans.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict memory, time and cost, and whether the recipe fits."""
    from modelwright.recipe.load import load

    if calibrate:
        if recipe or measure:
            raise UsageError("plan --calibrate measures the machine, not a recipe; leave RECIPE and --measure out")
        _calibrate(as_json)
        return
    if recipe is None:
        raise UsageError("plan wants a RECIPE, or --calibrate")
    if measure and gpus:
        raise UsageError("plan --measure runs on this machine; leave --gpus out")
    loaded = load(recipe, overrides or ())
    print_notes(loaded)
    if measure:
        _measure(loaded, steps, stages or (), as_json)
    else:
        _predict(loaded, gpus, num_rows, prices_file, as_json)


def _predict(loaded: LoadedRecipe, gpus: str | None, num_rows: int | None, prices: Path | None, as_json: bool) -> None:
    from modelwright.data.row_formats import estimate_row_stats, require_data_files
    from modelwright.plan.hardware import detect_hardware, parse_hardware
    from modelwright.plan.model_shape import shape_of_recipe
    from modelwright.plan.table import format_table, plan_table

    machines = tuple(parse_hardware(text) for text in gpus.split(",")) if gpus else (detect_hardware(),)
    shape = shape_of_recipe(loaded.recipe, loaded.path.parent)
    tables = []
    for stage in loaded.recipe.stages:
        try:
            require_data_files(loaded.recipe, stage, loaded.path.parent)
        except UsageError as error:
            if num_rows is None:
                raise UsageError(f"{error}; --rows NUMBER plans without it") from None
        rows = estimate_row_stats(loaded.recipe, stage, loaded.path.parent)
        rows = replace(rows, count=num_rows or rows.count)
        tables.append(plan_table(loaded.recipe, stage, shape, rows, machines, prices))
    if as_json:
        print_json({"recipe": loaded.recipe.name, "stages": [table.as_json() for table in tables]})
    else:
        typer.echo(strip_control_chars("\n\n".join("\n".join(format_table(table)) for table in tables)))


def _measure(loaded: LoadedRecipe, steps: int, stages: Sequence[str], as_json: bool) -> None:
    """Memory profiler: real steps of each stage on this machine."""
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    from modelwright.stages import measure

    result = measure.measure_recipe(loaded, steps, stages, _print_progress)
    print_json(result) if as_json else typer.echo(strip_control_chars("\n".join(measure.lines(result))))
    if all("failed" in row for row in result["stages"]):
        raise typer.Exit(1)


def _calibrate(as_json: bool) -> None:
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    from modelwright.stages import measure

    result, path = measure.calibrate(_print_progress)
    if as_json:
        print_json({**result, "file": str(path)})
        return
    (name, fitted), *_ = result["calibration"].items()
    errors = f"tokens/s within {fitted['max_rate_error']:.0%}, memory within {fitted['max_memory_error']:.0%} of them"
    typer.echo(f"{name}: fitted to {fitted['runs']} measured cases, {errors}; kept in {path}")


def _print_progress(line: str) -> None:
    print(strip_control_chars(line), file=sys.stderr)
