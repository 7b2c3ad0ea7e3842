"""The reference pages that are made from the code: commands, exit codes, files and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from modelwright import errors
from modelwright.cli.main import command as whole_command
from modelwright.errors import ModelwrightError
from modelwright.recipe.evaluation import TASK_METRICS
from modelwright.recipe.metrics import MEANINGS, known, measured_by
from modelwright.runs.folder import RunFolder

MADE = """\
<!-- Made from the code by {name}() in src/modelwright/cli/reference.py; a test holds it to that. To make it anew:
     UPDATE_GOLDEN=1 pytest tests/recipe/test_reference.py -->
"""
PLAIN = {
    0: "Done.",
    1: "Something that was not foreseen; `--debug` shows where. Or a rank whose peer was lost.",
}
BESIDE = {
    "stages/STAGE/checkpoints/step-00000012/": "One checkpoint: tensors as safetensors, the rest as JSON.",
    "tensorboard/": "Event files, for those who look with TensorBoard.",
    "logs/rank-N.log": "What rank N wrote on stderr, under launch.",
    "exports/FORMAT/": "What export wrote, with its card and the sha256 of each file.",
}
"""Files whose names stand elsewhere in the code."""


def commands() -> str:
    """Every command with its arguments and options."""
    head = "Every command, as `--help` tells it. What reports takes `--json`: one object on standard output."
    parts = ["# Commands", "", MADE.format(name="commands"), f"{head}\n"]
    for words, found in _leaves(get_command(whole_command()), ()):
        parts += [f"## modelwright {' '.join(words)}", "", _sentence(found.help), ""]
        arguments = [each for each in found.params if each.param_type_name == "argument"]
        options = [each for each in found.params if each.param_type_name == "option" and each.name != "help"]
        if arguments or options:
            parts += ["| word | meaning | default |", "|---|---|---|"]
            parts += [_row((each.metavar or each.name or "").strip("[]").upper(), each) for each in arguments]
            parts += [_row(", ".join([*each.opts, *each.secondary_opts]), each) for each in options]
            parts += [""]
    return "\n".join(parts)


def exit_codes() -> str:
    """What each exit code means, by the errors that have it."""
    found: dict[int, list[str]] = {code: [text] for code, text in PLAIN.items()}
    for _, kind in sorted(inspect.getmembers(errors, inspect.isclass), key=lambda each: each[1].exit_code
                          if issubclass(each[1], ModelwrightError) else 0):  # fmt: skip
        if issubclass(kind, ModelwrightError) and kind is not ModelwrightError and kind.exit_code not in PLAIN:
            found.setdefault(kind.exit_code, []).append(_sentence(kind.__doc__))
    rows = [f"| {code} | {' '.join(dict.fromkeys(texts))} | {_again(code)} |" for code, texts in sorted(found.items())]
    head = "They are part of the interface: restart rules of clusters are written for them."
    table = ["| code | meaning | is another start of use? |", "|---|---|---|", *rows]
    return "\n".join(["# Exit codes", "", MADE.format(name="exit_codes"), f"{head}\n", *table, ""])


def files() -> str:
    """What a run leaves, by the one place that knows every name in it."""
    run = RunFolder(Path("RUN"))
    rows = {}
    for name, member in vars(RunFolder).items():
        if isinstance(member, property):
            rows[getattr(run, name)] = inspect.getdoc(member)
        elif inspect.isfunction(member) and inspect.signature(member).return_annotation == "Path":
            word = "NAME" if name in ("data", "evaluation") else "STAGE"
            rows[member(run, word)] = inspect.getdoc(member)
    told = {str(path.relative_to("RUN")): text or "" for path, text in rows.items()} | BESIDE
    table = [f"| `{path}` | {_sentence(text)} |" for path, text in sorted(told.items())]
    head = "In the run folder, `runs/NAME` unless `output_dir` says otherwise:"
    return "\n".join(["# Files", "", MADE.format(name="files"), f"{head}\n", "| file | is |", "|---|---|", *table, ""])


def metrics() -> str:
    """What is measured, and what a gate may ask."""
    head = (
        "What a gate may ask of a stage. With `base_` before it: the same before the stage's first step. With\n"
        "`parent_`: what the stage before it measured in the end. `evaluate.tasks` adds `TASK_METRIC` for lm-eval's\n"
        f"{', '.join(TASK_METRICS)}."
    )
    table = [f"| `{name}` | {MEANINGS[name]} | {', '.join(measured_by(name))} |" for name in known()]
    titles = ["| metric | is | measured by |", "|---|---|---|"]
    return "\n".join(["# Metrics", "", MADE.format(name="metrics"), f"{head}\n", *titles, *table, ""])


def _leaves(found: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, in the order of the help."""
    for name, below in getattr(found, "commands", {}).items():
        yield from _leaves(below, (*words, name))
    if not hasattr(found, "commands"):
        yield words, found


def _row(name: str, parameter: Any) -> str:
    text = _sentence(getattr(parameter, "help", "") or "")
    default = (
        "**required**" if parameter.required else "" if parameter.default in (None, False, ()) else parameter.default
    )
    default = f"`{default}`" if default not in ("", "**required**") else default
    return f"| `{name}` | {text} | {default} |".replace("||", "&#124;")


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "&#124;")


def _again(code: int) -> str:
    return {0: "it finds everything done", 1: "perhaps", 75: "yes: it goes on", 78: "once there is room"}.get(
        code, "no"
    )


PAGES = {"commands.md": commands, "exit-codes.md": exit_codes, "files.md": files, "metrics.md": metrics}
"""The pages of docs/reference, and what makes each."""
