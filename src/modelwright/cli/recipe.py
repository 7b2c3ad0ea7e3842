"""Commands on recipes, which train nothing: recipes, check, explain, schema, convert."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.cli.options import (
    JsonOption,
    RecipeArgument,
    SetOption,
    add_commands,
    find_template_problems,
    print_json,
    print_notes,
)
from modelwright.errors import ModelError, Problem, RecipeError, UsageError, redact_secrets
from modelwright.report.formatting import strip_control_chars

if TYPE_CHECKING:
    from modelwright.recipe.explain import Explanation, SettingValue
    from modelwright.recipe.load import LoadedRecipe
    from modelwright.recipe.sections import DataConfig

EXAMPLE_RECIPE = "quickstart"
"""The recipe whose values `explain KEY` shows."""
MAX_VALUE_WIDTH = 44
"""Characters of a value in a table; --json has all of it."""


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    add_commands(app, {"recipes": recipes, "check": check, "explain": explain, "schema": schema, "convert": convert})


def recipes(as_json: JsonOption = False) -> None:
    """List the built-in recipes, one line each."""
    from modelwright.recipe.load import builtin_recipes, load

    entries = []
    for name, path in builtin_recipes().items():
        try:
            description, problem = load(path, environ={}).recipe.description, None
        except RecipeError as error:
            description, problem = "cannot be read; run modelwright check for the reason", str(error.problems[0])
        entries.append({"name": name, "description": description, "path": str(path), "problem": problem})
    if as_json:
        print_json({"recipes": entries})
        return
    width = max((len(str(entry["name"])) for entry in entries), default=0)
    for entry in entries:
        typer.echo(f"{entry['name']!s:<{width}}  {entry['description']}")


def check(recipe: RecipeArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Report every problem of a recipe and its data, by line."""
    from modelwright.recipe.load import load

    try:
        loaded = load(recipe, overrides or ())
        problems, data_lines, advice = check_data(loaded)
        problems += _missing_paths(loaded)
        if problems:
            raise RecipeError(problems)
        _check_model_folder(loaded)
        if loaded.recipe.lora_stages:
            from modelwright.stages.planning import describe_adapters  # imports torch

            data_lines += describe_adapters(loaded.recipe, loaded.path.parent)
    except (RecipeError, ModelError) as error:
        if not as_json:
            raise
        problems = [*error.problems] if isinstance(error, RecipeError) else [Problem(recipe, str(error))]
        print_json({"ok": False, "problems": [_problem_fields(problem) for problem in problems]})
        raise typer.Exit(error.exit_code) from None
    loaded = replace(loaded, notes=(*loaded.notes, *advice))
    print_notes(loaded)
    summary = _summary(loaded)
    if as_json:
        print_json({"ok": True, **summary, "notes": list(loaded.notes), "read_as": data_lines, "problems": []})
        return
    gates = f", gates on {', '.join(summary['gates'])}" if summary["gates"] else ", no gates"
    stages = " → ".join(summary["stages"])
    line = f"ok  {summary['name']}: {summary['model']} on {summary['data']}, stages {stages}{gates}"
    for text in (line, *(f"  {each}" for each in data_lines)):
        typer.echo(strip_control_chars(text))


def explain(
    recipe: RecipeArgument,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="One setting or section, in detail.")] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every setting: value, origin and meaning. A KEY alone shows what it means, without a recipe."""
    from modelwright.recipe.explain import explain_setting, is_section, list_settings, resolve_key
    from modelwright.recipe.load import load

    if key is None and (full_key := _key_without_recipe(recipe)):
        recipe, key = EXAMPLE_RECIPE, full_key
        print(f"values are those of {recipe}", file=sys.stderr)
    full_key = resolve_key(key) if key else ""
    loaded = load(recipe, overrides or ())
    print_notes(loaded)
    if full_key and not is_section(full_key):
        details = explain_setting(loaded, full_key)
        print_json(_explanation_fields(details)) if as_json else _print_explanation(details)
        return
    settings = list_settings(loaded, full_key)
    if not settings:
        raise UsageError(f"{full_key} is not in this recipe; modelwright explain {recipe} shows what is")
    print_json({"settings": [_setting_fields(row) for row in settings]}) if as_json else _print_settings(settings)


def _key_without_recipe(name: str) -> str | None:
    """The setting that was named where a recipe belongs."""
    from modelwright.recipe.explain import resolve_key
    from modelwright.recipe.load import find_recipe

    try:
        find_recipe(name)
    except RecipeError:
        with suppress(UsageError):
            return resolve_key(name)
    return None


def schema() -> None:
    """Print the JSON Schema of recipes, for editors and agents."""
    from modelwright.recipe.explain import json_schema

    print_json(json_schema())


def check_data(loaded: LoadedRecipe) -> tuple[list[Problem], list[str], list[str]]:
    """All problems of a recipe's data, how it is read, and advice; a data set on the hub is not downloaded."""
    from modelwright.data import sources
    from modelwright.data.row_formats import ROW_FORMATS, estimate_truncation, require_data_files
    from modelwright.errors import DataError
    from modelwright.plan.model_shape import model_folders
    from modelwright.recipe.load import add_recipe_location

    folders = model_folders(loaded.recipe.model.model_name_or_path or "", loaded.path.parent)
    tokenizer = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
    problems: dict[tuple[str, str], Problem] = {}
    lines: dict[str, None] = {}
    notes: list[str] = []
    for stage, section in loaded.recipe.stages.items():
        data = loaded.recipe.data_for(stage)
        key = f"{stage}.data" if section.data else "data"
        key = next(f"{key}.{name}" for name in ("dataset_name", "train_file", "mix") if getattr(data, name))
        row_format = ROW_FORMATS[section.spec.row_format]
        on_hub = [part.source for part in data.parts.values() if sources.is_hub_name(part.source, loaded.path.parent)]
        lines |= dict.fromkeys(f"{name}: there is no such file here; a run reads it from the hub" for name in on_hub)
        try:
            if section.spec.row_format == "images":
                lines |= dict.fromkeys(_missing_images(data, loaded.path.parent))
            if on_hub or not row_format.is_checked(loaded.recipe):
                require_data_files(loaded.recipe, stage, loaded.path.parent)
                continue
            dataset = row_format.load(data, loaded.recipe.seed, loaded.path.parent)
            lines |= dict.fromkeys(f"{data.source}: {line}" for line in dataset.quarantine.lines())
            if advice := estimate_truncation(loaded.recipe, stage, dataset, tokenizer):
                where = loaded.origins[f"{stage}.max_length"].location
                notes.append(f"{where}: {stage}.max_length is {getattr(section, 'max_length', 0)}; it {advice}")
            rows = row_format.rows_to_render([*dataset.train, *dataset.held_out]) if row_format.render else ()
            if template_problems := find_template_problems(loaded, stage, rows):
                raise DataError(template_problems)
        except DataError as error:
            located = add_recipe_location(error.problems, loaded, stage)
            problems |= {(each.where, each.message): each for each in located}
        except UsageError as error:
            if data.validation_file and repr(data.validation_file) in str(error):
                key = f"{key.rpartition('.')[0]}.validation_file"
            elif data.data_dir:
                key = f"{key.rpartition('.')[0]}.data_dir"
            origin = next(origin for name, origin in loaded.origins.items() if name.startswith(key))
            problem = Problem(origin.location, str(error))
            problems[problem.where, problem.message] = problem
    return list(problems.values()), list(lines), notes


def _missing_images(data: DataConfig, recipe_dir: Path) -> list[str]:
    """What a run downloads before it reads the images; raises as a run does where there are none."""
    from modelwright.data.images import Cifar10Download, find_images

    source = find_images(data.source, recipe_dir, data.data_dir)
    if not isinstance(source, Cifar10Download):
        return []
    source.require_network()
    return [str(source)]


def _check_model_folder(loaded: LoadedRecipe) -> None:
    """Refuse a model that is on this machine and that a run would refuse by its files: sizes, paths, code."""
    from modelwright.models.trust import check_model
    from modelwright.plan.model_shape import model_folders

    folders = model_folders(loaded.recipe.model.model_name_or_path or "", loaded.path.parent)
    if folder := next((folder for folder in folders if (folder / "config.json").exists()), None):
        check_model(folder)


def _missing_paths(loaded: LoadedRecipe) -> list[Problem]:
    """Paths of models and data in a recipe that do not exist; names on the hub are not looked up."""
    from modelwright.data.row_formats import ROW_FORMATS

    recipe = loaded.recipe
    paths = {"model.model_name_or_path": recipe.model.model_name_or_path}
    for stage, section in recipe.stages.items():
        if section.spec.row_format != "images" and not ROW_FORMATS[section.spec.row_format].is_checked(recipe):
            data, key = recipe.data_for(stage), f"{stage}.data" if section.data else "data"
            paths |= {f"{key}.dataset_name": data.dataset_name, f"{key}.train_file": data.train_file}
    return [
        Problem(loaded.origins[key].location, f"{key}: there is no file or folder {name!r}")
        for key, name in paths.items()
        if name and key in loaded.origins and str(name).startswith((".", "/", "~"))
        if not any((folder / Path(name).expanduser()).exists() for folder in (Path(), loaded.path.parent))
    ]


def _summary(loaded: LoadedRecipe) -> dict[str, Any]:
    recipe = loaded.recipe
    return {
        "name": recipe.name,
        "model": recipe.model.display_name,
        "data": ", ".join(dict.fromkeys(recipe.data_for(stage).source for stage in recipe.stages)),
        "stages": list(recipe.stages),
        "gates": [metric for metrics in recipe.gates.values() for metric in metrics],
        "run_dir": recipe.run_dir,
        "path": str(loaded.path),
    }


def _problem_fields(problem: Problem) -> dict[str, Any]:
    """A problem as JSON; without a setting it has only `where` and `message`."""
    origin = getattr(problem, "origin", None)
    return {
        "where": problem.where,
        "file": origin.name if origin is not None and origin.kind in ("recipe", "base") else None,
        "line": origin.line if origin is not None else None,
        "key": getattr(problem, "key", "") or None,
        "message": problem.message,
    }


def _setting_fields(row: SettingValue) -> dict[str, Any]:
    return {"key": row.key, "value": row.value, "set_by": str(row.origin), "line": row.origin.line,
            "meaning": row.description}  # fmt: skip


def _explanation_fields(details: Explanation) -> dict[str, Any]:
    return {
        **_setting_fields(details.setting), "expected": details.expected, "default": details.default,
        "required": details.required, "choices": list(details.choices), "aliases": list(details.aliases),
    }  # fmt: skip


def _print_settings(settings: tuple[SettingValue, ...]) -> None:
    cells = [
        (strip_control_chars(row.key), _format_value(row.value), str(row.origin), row.description) for row in settings
    ]
    if not sys.stdout.isatty():  # into a pipe: one line per setting, for grep and awk
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


def _print_explanation(details: Explanation) -> None:
    lines = {
        "value": json.dumps(details.setting.value, ensure_ascii=False),
        "set by": str(details.setting.origin),
        "expected": details.expected,
        "default": "none; required" if details.required else json.dumps(details.default, ensure_ascii=False),
        "also called": ", ".join(details.aliases),
    }
    typer.echo(f"{details.setting.key}\n  {details.setting.description}\n")
    for title, text in lines.items():
        if text:
            typer.echo(strip_control_chars(f"  {title:<11} {text}"))


def _format_value(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    first = strip_control_chars(text.splitlines()[0])
    return first if len(first) <= MAX_VALUE_WIDTH and first == text else f"{first[: MAX_VALUE_WIDTH - 1]}…"


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML or JSON file of one of these tools.")],
    tool: Annotated[
        str | None,
        typer.Option("--from", help="trl, axolotl, llamafactory or handbook; default: detected from its keys."),
    ] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="Stage of the recipe, such as dpo; default: detected from its keys.")
    ] = None,
    accelerate: Annotated[
        str, typer.Option("--accelerate", help="The configuration of accelerate that the file is launched with.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Recipe file to write, which also names the recipe; default: stdout."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a configuration of another tool to a recipe.

    Reads files of TRL, axolotl, LLaMA-Factory and alignment-handbook; what is lost is named.
    """
    from modelwright.recipe.convert import conversion_json, convert_config

    if not file.is_file():
        raise UsageError(f"{file}: there is no such file")
    if output is not None and output.exists():
        kind = "folder" if output.is_dir() else "file"
        raise UsageError(f"{output}: there is such a {kind} already; name another file with -o")
    name = re.sub(r"\.ya?ml$", "", output.name) if output is not None else None
    if accelerate and not Path(accelerate).is_file():
        raise UsageError(f"{accelerate}: there is no such file")
    converted = convert_config(file, tool, stage, name, accelerate)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(redact_secrets(converted.text), encoding="utf-8")
    if as_json:
        typer.echo(redact_secrets(json.dumps(conversion_json(converted), indent=2, ensure_ascii=False)))
        raise typer.Exit(2 if converted.problems else 0)
    if output is None:
        typer.echo(redact_secrets(converted.text), nl=False)
    titles = {"unsupported": "was not converted", "approximated": "was approximated"}
    for entry in converted.unconverted:
        if entry.kind in titles and entry.key:
            location = f"{file}:{entry.line}" if entry.line else str(file)
            what = f"{entry.key}: {entry.display}" if entry.display else entry.key
            print(redact_secrets(f"{location}: {what} {titles[entry.kind]}; {entry.advice}"), file=sys.stderr)
    where = f"{output}: " if output is not None else ""
    print(
        f"{where}{converted.stage} from {converted.tool}; {len(converted.converted)} settings converted",
        file=sys.stderr,
    )
    if converted.problems:
        raise RecipeError(converted.problems)
    if output is not None:
        print(f"next:\n  modelwright check {output}\n  modelwright plan {output} --gpus 1xH100", file=sys.stderr)
