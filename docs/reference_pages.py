"""Generate the pages of docs/reference from the code: recipe settings, commands, exit codes, files and metrics."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from typer.main import get_command

from docs.metric_descriptions import METRIC_DESCRIPTIONS, metric_names, stages_reporting
from modelwright import errors
from modelwright.cli.main import build_app
from modelwright.errors import ModelwrightError, ProblemsError
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
Every setting. In brackets stands its default, in `this font`, then other values or the type; a *count or share* is a
number such as 500 or a share such as 5%. An *alias* is another tool's name for it, which is accepted with a note.
`base: NAME` at the top of a recipe builds on another one, by path or by the name of a shipped one. The values of your
recipe, and where each comes from:

```bash
modelwright explain quickstart
```
"""
FIXED_MEANINGS = {
    0: "Done.",
    1: "Unexpected error; rerun with `--debug` for the traceback. Or a rank that lost a peer.",
}
SHORT_TYPES = {
    "^one of ": "",
    "a count such as 500, or a share such as 5%": "count or share",
    ", or a mapping such as .*": " or a section",
    r"^a number of at least (\S+) and at most (\S+)$": r"\1 to \2",
    "a whole number": "integer",
    "a number": "number",
    r" and at most [\d,]{7,}$": "",
    " above ": " > ",
    " of at least ": " ≥ ",
    " and at most ": ", ≤ ",
    " and below ": ", < ",
    "true or false": "true, false",
    "a mapping of settings": "section",
    "^a (mapping|list)": r"\1",
    "an amount such as 16Gi": "amount",
    "^lower-case .*": "text",
}
"""What an error message says of a type, and the page."""
LONG_DEFAULT = 100
"""Characters of a default that only `explain` shows."""
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
        parts.append(_section_text(title, rows))
    printed: set[str] = set()
    for section in (*sections, threshold, volume):
        rows = [row for row in map(_setting_row, child_fields(section)) if len(shared.get(row, ())) < 2]
        if rows and rows[0] not in printed:  # trainable is the same in every stage
            parts.append(_section_text(f"`{section.key}`" if section.key else "The recipe", rows))
        printed.update(rows[:1])
    return "\n".join(parts)


def _section_text(title: str, rows: list[str]) -> str:
    return "\n".join([f"## {title}", "", *rows, ""])


def commands() -> str:
    """Every command with its arguments and options; what several commands have is described once."""
    leaves = list(_leaf_commands(get_command(build_app()), ()))
    counts = Counter(row for _, command in leaves for row in _option_rows(command))
    shared = {name: text for (name, text), count in reversed(counts.items()) if count > 2}
    of_run = next(_option_rows(command) for path, command in leaves if path == ("run",))
    head = "Every command, as in `--help`. These arguments and options belong to several commands:"
    parts = ["# Commands", "", GENERATED_NOTE.format(name="commands"), f"{head}\n"]
    parts += _option_list(reversed(shared.items()))
    for path, command in leaves:
        rows = _option_rows(command)
        own = [(name, text) for name, text in rows if shared.get(name) != text]
        also = [name for name, text in rows if shared.get(name) == text and name.startswith("`-")]
        if path == ("launch",):
            own = [row for row in own if row not in of_run]
            also = ["the options of `run`", *(name for name in also if name not in dict(of_run))]
        text = _one_line(command.help) + (f" Also: {', '.join(also)}." if also else "")
        usage = " ".join([*path, *map(_argument_name, _arguments(command))])
        parts += [f"## modelwright {usage}", "", text, "", *(_option_list(own) if own else ())]
    return "\n".join(parts)


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "argument" and not each.hidden]


def _argument_name(argument: Any) -> str:
    """Its name as in a usage line, in brackets where it may be left out."""
    name = (argument.metavar or argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option_rows(command: Any) -> list[tuple[str, str]]:
    """Arguments and options of a command: name and meaning."""
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    rows = [(re.sub(r"[][.]", "", _argument_name(each)), each) for each in _arguments(command)]
    rows += [(", ".join([*each.opts, *each.secondary_opts]), each) for each in options]
    return [(f"`{name}`", _option_text(parameter)) for name, parameter in rows]


def _option_list(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [*(f"- {name}: {text}" for name, text in rows), ""]


def exit_codes() -> str:
    """What each exit code means, by the errors that have it."""
    meanings: dict[int, list[str]] = {code: [text] for code, text in FIXED_MEANINGS.items()}
    for _, kind in sorted(inspect.getmembers(errors, inspect.isclass), key=lambda each: each[1].exit_code
                          if issubclass(each[1], ModelwrightError) else 0):  # fmt: skip
        is_base = kind in (ModelwrightError, ProblemsError)  # which others derive from
        if issubclass(kind, ModelwrightError) and not is_base and kind.exit_code not in FIXED_MEANINGS:
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
    rows = [f"- `{path}`: {_one_line(text)}" for path, text in sorted(files_by_path.items())]
    head = "In the run folder, `runs/NAME` unless `output_dir` says otherwise:"
    return "\n".join(["# Files", "", GENERATED_NOTE.format(name="files"), f"{head}\n", *rows, ""])


def metrics() -> str:
    """What is measured, and what a gate may ask."""
    head = (
        "Metrics that a gate may use. With `base_` before it: the same before the stage's first step. With\n"
        "`parent_`: what the stage before it measured in the end. `evaluate.tasks` adds `TASK_METRIC` for lm-eval's\n"
        f"{', '.join(LM_EVAL_METRICS)}."
    )
    parts = ["# Metrics", "", GENERATED_NOTE.format(name="metrics"), head]
    for stages, names in groupby(metric_names(), key=lambda name: tuple(stages_reporting(name))):
        title = "every training stage" if set(stages) >= set(STAGES) else ", ".join(stages)
        parts += ["", f"Measured by {title}:", "", *(f"- `{name}`: {METRIC_DESCRIPTIONS[name]}" for name in names)]
    return "\n".join([*parts, ""])


def _setting_row(setting: ConfigField) -> str:
    name = setting.key.rpartition(".")[2]
    others = ", ".join(f"`{other}`" for other in aliases_for(setting.key))
    text = setting.description + (f" Alias: {others}." if others else "")
    return f"- **`{name}`** ({_values(setting)}): {text}"


def _values(setting: ConfigField) -> str:
    """The default, then the other values or the type, in fewer words than an error message has."""
    default = _default(setting)
    choices = [choice for choice in setting.choices if f"`{choice}`" != default]
    text = ", ".join(choices) if setting.choices else setting.expected
    for pattern, short in SHORT_TYPES.items():
        text = re.sub(pattern, short, text)
    if default and not setting.choices and set(text.replace(",", "").split()) <= {"true", "false", "auto"}:
        text = ", ".join(value for value in text.split(", ") if f"`{value}`" != default)
    return ", ".join(part for part in ("**required**" if setting.required else default, text) if part)


def _default(setting: ConfigField) -> str:
    value = None if setting.section or setting.required else plain_default(setting)
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, dict):  # the settings of each entry are in a list of their own
        return ", ".join(f"`{name}`" for name in value)
    text = json.dumps(value, ensure_ascii=False).strip('"')
    return f"`{text}`" if len(text) < LONG_DEFAULT else ""


def _leaf_commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, in the order of the help."""
    for name, subcommand in getattr(command, "commands", {}).items():
        if not subcommand.hidden:
            yield from _leaf_commands(subcommand, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


def _option_text(parameter: Any) -> str:
    text = _one_line(getattr(parameter, "help", "") or "")
    has_default = parameter.default not in (None, False, (), "") and not parameter.required
    return f"{text.rstrip('.')}; default: `{parameter.default}`." if has_default else text


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
