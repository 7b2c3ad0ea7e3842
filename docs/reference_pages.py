"""Generate the pages of docs/reference from the code: recipe settings, commands, exit codes, files and metrics."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from docs.metric_descriptions import METRIC_DESCRIPTIONS, metric_names, stages_reporting
from modelwright import errors
from modelwright.cli.main import build_app
from modelwright.errors import ModelwrightError
from modelwright.recipe.explain import plain_default
from modelwright.recipe.fields import ConfigField, aliases_for, all_sections, child_fields, get_field
from modelwright.recipe.sections import LM_EVAL_METRICS
from modelwright.recipe.stage_specs import STAGES
from modelwright.runs.folder import RunFolder

GENERATED_NOTE = """\
<!-- Made from the code by {name}() in docs/reference_pages.py; a test compares them. To regenerate it:
     UPDATE_GOLDEN=1 pytest tests/recipe/test_reference.py -->
"""
RECIPE_HEAD = """\
# Recipe reference

{note}
Every setting a recipe may have. `base: NAME` at the top builds on another recipe, by path or by the name of a
shipped one. Names in the last column are those of other tools and of earlier versions: they are read with a one-line
note. A setting marked **required** has no default. For the values in your own recipe, and who set each:

```bash
modelwright explain quickstart
```
"""
FIXED_MEANINGS = {
    0: "Done.",
    1: "Unexpected error; rerun with `--debug` for the traceback. Or a rank that lost a peer.",
}
OTHER_FILES = {
    "stages/STAGE/checkpoints/step-00000012/": "One checkpoint: tensors as safetensors, the rest as JSON.",
    "tensorboard/": "Event files for TensorBoard.",
    "logs/rank-N.log": "stderr of rank N, under launch.",
    "exports/FORMAT/": "Output of export, with its model card and SHA-256 sums.",
}
"""Files whose names stand elsewhere in the code."""


def recipe() -> str:
    """Every setting of a recipe, section by section."""
    threshold, volume = get_field(("gates", "STAGE", "METRIC")), get_field(("cluster", "volumes", "NAME"))
    assert threshold is not None and volume is not None
    parts = [RECIPE_HEAD.format(note=GENERATED_NOTE.format(name="recipe"))]
    # the data of a stage have the settings of data
    sections = [section for key, section in all_sections().items() if not key.endswith(".data")]
    shared: dict[str, list[str]] = {}
    for section in sections:
        for setting in child_fields(section) if section.key in STAGES else ():
            shared.setdefault(_setting_row(setting), []).append(section.key)
    groups: dict[tuple[str, ...], list[str]] = {}
    for row, stages in shared.items():
        if len(stages) > 1:
            groups.setdefault(tuple(stages), []).append(row)
    for stages, rows in sorted(groups.items(), key=lambda each: -len(each[0])):
        title = "Every training stage" if len(stages) == len(STAGES) else ", ".join(f"`{name}`" for name in stages)
        note = "The same in each of them; what a stage has or sets otherwise is in its own table."
        parts.append(_section_text(title, note, rows))
    printed: dict[str, str] = {}
    for section in (*sections, threshold, volume):
        rows = [row for row in map(_setting_row, child_fields(section)) if len(shared.get(row, ())) < 2]
        title = f"`{section.key}`" if section.key else "The recipe"
        body = "\n".join(rows)
        if body in printed:
            parts.append(f"## {title}\n\n{section.description} The settings are those of {printed[body]}.\n")
        else:
            printed |= {body: title} if body else {}
            parts.append(_section_text(title, section.description, rows))
    return "\n".join(parts)


def _section_text(title: str, description: str, rows: list[str]) -> str:
    table = ["| setting | expected | default | meaning | also called |", "|---|---|---|---|---|", *rows, ""]
    return "\n".join([f"## {title}", "", description, "", *(table if rows else [])])


def commands() -> str:
    """Every command with its arguments and options."""
    head = "Every command, as in `--help`. Commands that report something take `--json`: one object on stdout."
    parts = ["# Commands", "", GENERATED_NOTE.format(name="commands"), f"{head}\n"]
    for path, command in _leaf_commands(get_command(build_app()), ()):
        parts += [f"## modelwright {' '.join(path)}", "", _one_line(command.help), ""]
        arguments = [each for each in command.params if each.param_type_name == "argument" and not each.hidden]
        options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
        if arguments or options:
            parts += ["| option | meaning | default |", "|---|---|---|"]
            parts += [_option_row((each.metavar or each.name or "").strip("[]").upper(), each) for each in arguments]
            parts += [_option_row(", ".join([*each.opts, *each.secondary_opts]), each) for each in options]
            parts += [""]
    return "\n".join(parts)


def exit_codes() -> str:
    """What each exit code means, by the errors that have it."""
    meanings: dict[int, list[str]] = {code: [text] for code, text in FIXED_MEANINGS.items()}
    for _, kind in sorted(inspect.getmembers(errors, inspect.isclass), key=lambda each: each[1].exit_code
                          if issubclass(each[1], ModelwrightError) else 0):  # fmt: skip
        if issubclass(kind, ModelwrightError) and kind is not ModelwrightError and kind.exit_code not in FIXED_MEANINGS:
            meanings.setdefault(kind.exit_code, []).append(_one_line(kind.__doc__))
    rows = [
        f"| {code} | {' '.join(dict.fromkeys(texts))} | {_retry_advice(code)} |"
        for code, texts in sorted(meanings.items())
    ]
    head = "They are part of the interface: restart rules of clusters rely on them."
    table = ["| code | meaning | retry? |", "|---|---|---|", *rows]
    return "\n".join(["# Exit codes", "", GENERATED_NOTE.format(name="exit_codes"), f"{head}\n", *table, ""])


def files() -> str:
    """What a run leaves, by the one place that knows every name in it."""
    run = RunFolder(Path("RUN"))
    rows = {}
    for name, member in vars(RunFolder).items():
        if isinstance(member, property):
            rows[getattr(run, name)] = inspect.getdoc(member)
        elif inspect.isfunction(member) and inspect.signature(member).return_annotation == "Path":
            placeholder = "NAME" if name in ("data", "evaluation") else "STAGE"
            rows[member(run, placeholder)] = inspect.getdoc(member)
    files_by_path = {str(path.relative_to("RUN")): text or "" for path, text in rows.items()} | OTHER_FILES
    table = [f"| `{path}` | {_one_line(text)} |" for path, text in sorted(files_by_path.items())]
    head = "In the run folder, `runs/NAME` unless `output_dir` says otherwise:"
    return "\n".join(
        ["# Files", "", GENERATED_NOTE.format(name="files"), f"{head}\n", "| file | is |", "|---|---|", *table, ""]
    )


def metrics() -> str:
    """What is measured, and what a gate may ask."""
    head = (
        "Metrics that a gate may use. With `base_` before it: the same before the stage's first step. With\n"
        "`parent_`: what the stage before it measured in the end. `evaluate.tasks` adds `TASK_METRIC` for lm-eval's\n"
        f"{', '.join(LM_EVAL_METRICS)}."
    )
    table = [
        f"| `{name}` | {METRIC_DESCRIPTIONS[name]} | {', '.join(stages_reporting(name))} |" for name in metric_names()
    ]
    titles = ["| metric | is | measured by |", "|---|---|---|"]
    return "\n".join(["# Metrics", "", GENERATED_NOTE.format(name="metrics"), f"{head}\n", *titles, *table, ""])


def _setting_row(setting: ConfigField) -> str:
    name = setting.key.rpartition(".")[2]
    expected = setting.expected + (", or null" if setting.optional else "")
    default = "" if setting.section else f"`{json.dumps(plain_default(setting), ensure_ascii=False)}`"
    default = "**required**" if setting.required else default
    others = ", ".join(f"`{other}`" for other in aliases_for(setting.key))
    cells = [f"`{name}`", expected, default, setting.description, others]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _leaf_commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, in the order of the help."""
    for name, subcommand in getattr(command, "commands", {}).items():
        if not subcommand.hidden:
            yield from _leaf_commands(subcommand, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


def _option_row(name: str, parameter: Any) -> str:
    text = _one_line(getattr(parameter, "help", "") or "")
    default = (
        "**required**" if parameter.required else "" if parameter.default in (None, False, ()) else parameter.default
    )
    default = f"`{default}`" if default not in ("", "**required**") else default
    return f"| `{name}` | {text} | {default} |".replace("||", "&#124;")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "&#124;")


def _retry_advice(code: int) -> str:
    return {
        0: "not needed: everything is done",
        1: "perhaps",
        75: "yes: it resumes",
        78: "once there is free space",
    }.get(code, "no")


PAGES = {
    "recipe.md": recipe,
    "commands.md": commands,
    "exit-codes.md": exit_codes,
    "files.md": files,
    "metrics.md": metrics,
}
"""The pages of docs/reference, and what makes each."""
