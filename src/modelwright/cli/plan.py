"""The verb that foresees: plan, on machines one has or has not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from modelwright.cli.recipes import JsonOption, RecipeArgument, SetOption


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("plan")(plan)


def plan(
    recipe: RecipeArgument,
    on: Annotated[
        str | None, typer.Option("--on", metavar="MACHINES", help="Such as 1xH200,4xL40S,2x2xA40; else this machine.")
    ] = None,
    sets: SetOption = None,
    count: Annotated[int | None, typer.Option("--rows", min=1, help="Rows of the data, where it is not here.")] = None,
    own_prices: Annotated[Path | None, typer.Option("--prices", help="JSON of dollars per GPU-hour by card.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Foresee memory, time and cost of a recipe. It fits or not, and what would."""
    from modelwright.data.size import size
    from modelwright.plan import sheet
    from modelwright.plan.estimate import Rows
    from modelwright.plan.facts import here
    from modelwright.plan.gpus import machines
    from modelwright.plan.shapes import find_shape
    from modelwright.recipe.load import load
    from modelwright.report.lines import quiet

    loaded = load(recipe, sets or ())
    for note in loaded.notes:
        print(note, file=sys.stderr)
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
