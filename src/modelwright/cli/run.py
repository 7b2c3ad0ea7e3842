"""Commands that train a recipe and predict its memory, time and cost: run, plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelwright.cli.recipe import JsonOption, SetOption

if TYPE_CHECKING:
    from modelwright.recipe.load import LoadedRecipe


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("run")(run)
    app.command("plan")(plan)


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a built-in recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set KEY=VALUE; repeatable.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--override", metavar="KEY", help="Resume although this setting changed.")
    ] = None,
    first_stage: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="First stage to run; earlier stages must be finished.")
    ] = None,
    last_stage: Annotated[str | None, typer.Option("--until", metavar="STAGE", help="Last stage to run.")] = None,
    accept_gate: Annotated[
        list[str] | None, typer.Option("--accept-gate", metavar="STAGE", help="Continue although its gate is closed.")
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for --accept-gate; recorded in the run.")] = None,
    fp8: Annotated[
        bool | None, typer.Option("--fp8/--no-fp8", help="Compute in fp8 without a trial, or in bf16.")
    ] = None,
    log_format: Annotated[
        str, typer.Option("--log-format", help="auto (a live panel on a terminal), plain, or json.")
    ] = "auto",
) -> None:
    """Train a recipe; an interrupted run resumes automatically."""
    from modelwright.cluster.progress import publish_progress
    from modelwright.errors import GateClosed, UsageError
    from modelwright.recipe.load import load
    from modelwright.report.console import console_watcher, run_summary
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import RunFolder

    if log_format not in ("auto", "plain", "json"):
        raise UsageError(f"--log-format is {log_format!r}; it wants auto, plain or json")
    loaded = load(recipe, overrides or ())
    if fp8 is not None:
        fp8_overrides = [f"{stage}.precision={'fp8' if fp8 else 'bf16'}" for stage in loaded.recipe.stages]
        fp8_overrides += [f"{stage}.fp8_validation=off" for stage in loaded.recipe.stages if fp8]
        loaded = load(recipe, [*(overrides or ()), *fp8_overrides])
    prepare_environment()
    from modelwright.engine.distributed import warm_up_cuda

    warm_up_cuda()
    from modelwright.stages import pipeline
    from modelwright.stages.context import RunOptions

    options = RunOptions(frozenset(override or ()), first_stage, last_stage, frozenset(accept_gate or ()), reason)
    closed: GateClosed | None = None
    try:
        with console_watcher(log_format) as console, publish_progress(console) as watch:  # type: ignore[arg-type]
            pipeline.run(loaded, watch, options)
    except GateClosed as error:
        closed = error
    if log_format != "json" and pipeline.is_rank_zero():
        print(run_summary(RunFolder(Path(loaded.recipe.run_dir))))
    if closed:
        raise closed


def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="MACHINES", help="Such as 1xH200,4xL40S,2x2xA40; default: this machine."),
    ] = None,
    overrides: SetOption = None,
    num_rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Number of rows, if the data is not on this machine.")
    ] = None,
    prices_file: Annotated[
        Path | None, typer.Option("--prices", help="JSON of dollars per GPU-hour by GPU name.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run a few steps of each stage: memory and time beside the prediction.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps of each stage, with --measure.")] = 10,
    stages: Annotated[
        list[str] | None, typer.Option("--stage", help="Only this stage, with --measure; may be given often.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine and keep the factors for later plans.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict memory, time and cost, and whether the recipe fits."""
    from modelwright.errors import UsageError
    from modelwright.recipe.load import load

    if calibrate:
        if recipe or measure:
            raise UsageError("plan --calibrate measures the machine, not a recipe; leave RECIPE and --measure out")
        _calibrate(as_json)
        return
    if recipe is None:
        raise UsageError("plan wants a RECIPE, or --calibrate")
    if measure and on:
        raise UsageError("plan --measure runs on this machine; leave --on out")
    loaded = load(recipe, overrides or ())
    for note in loaded.notes:
        print(note, file=sys.stderr)
    if measure:
        _measure(loaded, steps, stages or (), as_json)
    else:
        _predict(loaded, on, num_rows, prices_file, as_json)


def _predict(loaded: LoadedRecipe, on: str | None, count: int | None, own_prices: Path | None, as_json: bool) -> None:
    from modelwright.data.lengths import estimate_row_stats
    from modelwright.plan import choose
    from modelwright.plan.hardware import detect_hardware, parse_hardware
    from modelwright.plan.model_shape import shape_of_recipe
    from modelwright.report.formatting import strip_control_chars

    places = tuple(parse_hardware(each) for each in on.split(",")) if on else (detect_hardware(),)
    shape = shape_of_recipe(loaded.recipe, loaded.path.parent)
    sheets = []
    for stage in loaded.recipe.stages:
        rows = estimate_row_stats(loaded.recipe, stage, loaded.path.parent)
        rows = replace(rows, count=count or rows.count)
        sheets.append(choose.plan_table(loaded.recipe, stage, shape, rows, places, own_prices))
    if as_json:
        told = {"recipe": loaded.recipe.name, "stages": [each.as_json() for each in sheets]}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    typer.echo(strip_control_chars("\n\n".join("\n".join(choose.format_table(each)) for each in sheets)))


def _measure(loaded: LoadedRecipe, steps: int, stages: Sequence[str], as_json: bool) -> None:
    """The memory profiler: real steps of each stage on this machine."""
    from modelwright.report.formatting import strip_control_chars
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    from modelwright.stages import measure

    figures = measure.measure_recipe(
        loaded, steps, stages, lambda line: print(strip_control_chars(line), file=sys.stderr)
    )
    typer.echo(
        json.dumps(figures, ensure_ascii=False) if as_json else strip_control_chars("\n".join(measure.lines(figures)))
    )
    if all("failed" in row for row in figures["stages"]):
        raise typer.Exit(1)


def _calibrate(as_json: bool) -> None:
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    from modelwright.stages import measure

    figures, path = measure.calibrate(lambda line: print(line, file=sys.stderr))
    (name, fitted), *_ = figures["calibration"].items()
    off = f"tokens/s within {fitted['spread']:.0%}, memory within {fitted['memory_spread']:.0%} of them"
    typer.echo(
        json.dumps({**figures, "file": str(path)}, ensure_ascii=False)
        if as_json
        else f"{name}: fitted to {fitted['runs']} measured cases, {off}; kept in {path}"
    )
