"""The verb that foresees: plan, on machines one has or has not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelwright.cli.recipes import JsonOption, SetOption

if TYPE_CHECKING:
    from modelwright.recipe.load import LoadedRecipe


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("plan")(plan)


def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="MACHINES", help="Such as 1xH200,4xL40S,2x2xA40; else this machine.")
    ] = None,
    sets: SetOption = None,
    count: Annotated[int | None, typer.Option("--rows", min=1, help="Rows of the data, where it is not here.")] = None,
    own_prices: Annotated[Path | None, typer.Option("--prices", help="JSON of dollars per GPU-hour by card.")] = None,
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
    """Foresee memory, time and cost of a recipe. It fits or not, and what would."""
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
    loaded = load(recipe, sets or ())
    for note in loaded.notes:
        print(note, file=sys.stderr)
    if measure:
        _measure(loaded, steps, stages or (), as_json)
    else:
        _predict(loaded, on, count, own_prices, as_json)


def _predict(loaded: LoadedRecipe, on: str | None, count: int | None, own_prices: Path | None, as_json: bool) -> None:
    from modelwright.data.size import size
    from modelwright.plan import sheet
    from modelwright.plan.estimate import Rows
    from modelwright.plan.facts import here
    from modelwright.plan.gpus import machines
    from modelwright.plan.shapes import find_shape
    from modelwright.report.lines import quiet

    places = tuple(machines(each) for each in on.split(",")) if on else (here(),)
    shape = find_shape(loaded.recipe, loaded.path.parent)
    sheets = []
    for stage in loaded.recipe.stages:
        seen = size(loaded.recipe, stage, loaded.path.parent)
        rows = Rows(count or seen.rows, seen.longest, seen.mean, seen.learnt, seen.source, seen.resident)
        sheets.append(sheet.stage_sheet(loaded.recipe, stage, shape, rows, places, own_prices))
    if as_json:
        told = {"recipe": loaded.recipe.name, "stages": [each.as_json() for each in sheets]}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    typer.echo(quiet("\n\n".join("\n".join(sheet.lines(each)) for each in sheets)))


def _measure(loaded: LoadedRecipe, steps: int, stages: Sequence[str], as_json: bool) -> None:
    """The memory profiler: real steps of each stage on this machine."""
    from modelwright.report.lines import quiet
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    from modelwright.stages import measure

    figures = measure.measure_recipe(loaded, steps, stages, lambda line: print(quiet(line), file=sys.stderr))
    typer.echo(json.dumps(figures, ensure_ascii=False) if as_json else quiet("\n".join(measure.lines(figures))))
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
