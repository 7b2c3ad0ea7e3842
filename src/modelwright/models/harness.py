"""Tasks of EleutherAI's lm-eval, where the eval extra is installed."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelwright.errors import ModelError, first_line
from modelwright.recipe.evaluation import FILES

BATCH = 8
"""Requests computed together."""
MISSING = "evaluate.tasks are measured by lm-eval, which is not installed: pip install 'modelwright[eval]'"


def require() -> None:
    """Say what is missing, where lm-eval is not there."""
    if find_spec("lm_eval") is None:
        raise ModelError(MISSING)


def run_tasks(model: Any, tokenizer: Any, tasks: Sequence[str], limit: int, beside: Path) -> dict[str, float | None]:
    """The metrics of each task as TASK_METRIC; a task that is unknown or cannot be fetched is one letter.

    A task is a name that lm-eval knows, or a YAML file of its form, found from where we stand or beside the recipe.
    """
    require()
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    files = {task: task_file(task, beside) for task in tasks if task.endswith(FILES)}
    names = [files[task].stem if task in files else task for task in tasks]
    try:
        with redirect_stdout(sys.stderr):  # it prints, and our output may be read by a program
            known = TaskManager(
                include_path=[str(path.parent) for path in files.values()] or None,
                include_defaults=len(files) < len(tasks),  # reading its own list takes as long as a small task
            )
            asked = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)
            found = lm_eval.simple_evaluate(
                model=asked, tasks=names, limit=limit, bootstrap_iters=0, task_manager=known, log_samples=False
            )
    except Exception as error:  # the harness raises many kinds; each becomes one letter
        raise ModelError(
            f"evaluate.tasks: lm-eval could not measure {', '.join(tasks)} ({first_line(error)})"
        ) from None
    metrics: dict[str, float | None] = {}
    for task, measured in found["results"].items():
        for name, value in measured.items():
            if isinstance(value, int | float) and "stderr" not in name and math.isfinite(value):
                metrics[f"{task}_{name.partition(',')[0]}"] = float(value)
    return metrics


def task_file(task: str, beside: Path) -> Path:
    """A task file; it is not parsed, since it may hold tags of lm-eval's own, and is known by its name."""
    path = next((place for place in (Path(task), beside / task) if place.is_file()), None)
    if path is None:
        raise ModelError(f"evaluate.tasks: {task} is not there; it wants a task file of lm-eval, or a name it knows")
    found = re.search(r"^task:\s*[\"']?([^\s\"'#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None or found[1] != path.stem:
        raise ModelError(f"evaluate.tasks: {task} wants a line `task: {path.stem}`, as the file is called")
    return path.resolve()
