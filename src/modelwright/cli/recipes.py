"""The verbs that look at recipes and train nothing: recipes, check, explain, schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.errors import Problem, RecipeError, UsageError

if TYPE_CHECKING:
    from modelwright.recipe.explain import Explanation, Row
    from modelwright.recipe.load import LoadedRecipe

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given often.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

WIDEST_VALUE = 44
"""Characters of a value in a table; --json has all of it."""


def register(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command("recipes")(recipes)
    app.command("check")(check)
    app.command("explain")(explain)
    app.command("schema")(schema)


def recipes(as_json: JsonOption = False) -> None:
    """List the shipped recipes, one line each."""
    from modelwright.recipe.load import load, shipped

    found = []
    for name, path in shipped().items():
        try:
            description, problem = load(path, environ={}).recipe.description, None
        except RecipeError as error:
            description, problem = "cannot be read; modelwright check tells why", str(error.problems[0])
        found.append({"name": name, "description": description, "path": str(path), "problem": problem})
    if as_json:
        _print_json({"recipes": found})
        return
    width = max((len(str(each["name"])) for each in found), default=0)
    for each in found:
        typer.echo(f"{each['name']!s:<{width}}  {each['description']}")


def check(recipe: RecipeArgument, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """Tell every problem of a recipe and its data, by line."""
    from modelwright.recipe.load import load

    try:
        loaded = load(recipe, sets or ())
        problems = [*data_problems(loaded), *_missing(loaded)]
        if problems:
            raise RecipeError(problems)
    except RecipeError as error:
        if not as_json:
            raise
        _print_json({"ok": False, "problems": [_problem_fields(problem) for problem in error.problems]})
        raise typer.Exit(error.exit_code) from None
    _tell_notes(loaded)
    if as_json:
        _print_json({"ok": True, **_summary(loaded), "notes": list(loaded.notes), "problems": []})
        return
    summary = _summary(loaded)
    gates = f"; gates on {', '.join(summary['gates'])}" if summary["gates"] else "; no gate"
    stages = " then ".join(summary["stages"])
    typer.echo(_quiet(f"ok  {summary['name']}: {summary['model']} learns {summary['data']} by {stages}{gates}"))


def explain(
    recipe: RecipeArgument,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="One setting or section, at length.")] = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every setting, its value, who set it and what it means."""
    from modelwright.recipe.explain import explanation, is_section, resolve_key, rows
    from modelwright.recipe.load import load

    full_key = resolve_key(key) if key else ""
    loaded = load(recipe, sets or ())
    _tell_notes(loaded)
    if full_key and not is_section(full_key):
        told = explanation(loaded, full_key)
        _print_json(_explanation_fields(told)) if as_json else _print_explanation(told)
        return
    found = rows(loaded, full_key)
    if not found:
        raise UsageError(f"{full_key} is not in this recipe; modelwright explain {recipe} shows what is")
    _print_json({"settings": [_row_fields(row) for row in found]}) if as_json else _print_rows(found)


def schema() -> None:
    """Print the JSON Schema of recipes, for editors and agents."""
    from modelwright.recipe.explain import editor_schema

    _print_json(editor_schema())


def data_problems(loaded: LoadedRecipe) -> list[Problem]:
    """Everything wrong with the data a recipe names; a hub data set is not fetched for a check."""
    from modelwright.data import conversations, preferences, sources, texts
    from modelwright.errors import DataError
    from modelwright.recipe.columns import name_lines

    problems: dict[tuple[str, str], Problem] = {}
    for stage, section in loaded.recipe.stages.items():
        data = loaded.recipe.data_of(stage)
        key = f"{stage}.data" if section.data else "data"
        key = f"{key}.dataset_name" if data.dataset_name else f"{key}.train_file"
        read = {"sft": conversations.load, "lora": conversations.load, "dpo": preferences.load}.get(stage)
        if stage == "pretrain" and loaded.recipe.prepare is None:
            read = texts.look
        if read is None or sources.is_hub_name(data.source, loaded.path.parent):
            continue
        try:
            read(data, loaded.recipe.seed, loaded.path.parent)
        except DataError as error:
            named = name_lines(error.problems, loaded, stage)
            problems |= {(each.where, each.message): each for each in named}
        except UsageError as error:
            if data.validation_file and repr(data.validation_file) in str(error):
                key = f"{key.rpartition('.')[0]}.validation_file"
            problem = Problem(loaded.origins[key].where, str(error))
            problems[problem.where, problem.message] = problem
    return list(problems.values())


def _missing(loaded: LoadedRecipe) -> list[Problem]:
    """Models and unread data that a recipe names by a path that leads nowhere; what is on the hub is not looked for."""
    recipe = loaded.recipe
    named = {"model.model_name_or_path": recipe.model.model_name_or_path}
    for stage, section in recipe.stages.items():
        if stage == "classify" or (stage == "pretrain" and recipe.prepare is not None):
            data, key = recipe.data_of(stage), f"{stage}.data" if section.data else "data"
            named |= {f"{key}.dataset_name": data.dataset_name, f"{key}.train_file": data.train_file}
    return [
        Problem(loaded.origins[key].where, f"{key}: there is no file or folder {name!r}")
        for key, name in named.items()
        if name and key in loaded.origins and str(name).startswith((".", "/", "~"))
        if not any((folder / Path(name).expanduser()).exists() for folder in (Path(), loaded.path.parent))
    ]


def _tell_notes(loaded: LoadedRecipe) -> None:
    for note in loaded.notes:
        print(_quiet(note), file=sys.stderr)


def _quiet(text: str) -> str:
    """A recipe may come from others, and may hold what a terminal acts upon."""
    from modelwright.report.lines import quiet

    return quiet(text)


def _summary(loaded: LoadedRecipe) -> dict[str, Any]:
    recipe = loaded.recipe
    return {
        "name": recipe.name,
        "model": recipe.model.name,
        "data": ", ".join(dict.fromkeys(recipe.data_of(stage).source for stage in recipe.stages)),
        "stages": list(recipe.stages),
        "gates": [metric for metrics in recipe.gates.values() for metric in metrics],
        "run_dir": recipe.run_dir,
        "path": str(loaded.path),
    }


def _problem_fields(problem: Problem) -> dict[str, Any]:
    """A problem for machines; one that is not about a setting has a place and a message only."""
    origin = getattr(problem, "origin", None)
    return {
        "where": problem.where,
        "file": origin.name if origin is not None and origin.kind in ("recipe", "base") else None,
        "line": origin.line if origin is not None else None,
        "key": getattr(problem, "key", "") or None,
        "message": problem.message,
    }


def _row_fields(row: Row) -> dict[str, Any]:
    return {
        "key": row.key,
        "value": row.value,
        "set_by": str(row.origin),
        "line": row.origin.line,
        "meaning": row.sentence,
    }


def _explanation_fields(told: Explanation) -> dict[str, Any]:
    return {
        **_row_fields(told.row),
        "wants": told.wants,
        "default": told.default,
        "required": told.required,
        "choices": list(told.choices),
        "aliases": list(told.aliases),
    }


def _print_rows(found: tuple[Row, ...]) -> None:
    cells = [(_quiet(row.key), _shown(row.value), str(row.origin), row.sentence) for row in found]
    if not sys.stdout.isatty():  # a pipe has no width: one line for each setting, so that grep and awk work
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        for row in cells:
            typer.echo("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "set by", "meaning", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def _print_explanation(told: Explanation) -> None:
    lines = {
        "value": json.dumps(told.row.value, ensure_ascii=False),
        "set by": str(told.row.origin),
        "wants": told.wants,
        "default": "none; a recipe must say it" if told.required else json.dumps(told.default, ensure_ascii=False),
        "also called": ", ".join(told.aliases),
    }
    typer.echo(f"{told.row.key}\n  {told.row.sentence}\n")
    for title, text in lines.items():
        if text:
            typer.echo(_quiet(f"  {title:<11} {text}"))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    first = _quiet(text.splitlines()[0])
    return first if len(first) <= WIDEST_VALUE and first == text else f"{first[: WIDEST_VALUE - 1]}…"


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
