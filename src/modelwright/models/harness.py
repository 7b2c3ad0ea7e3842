"""Tasks of EleutherAI's lm-eval, where the eval extra is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from modelwright.errors import ModelError

MISSING = "evaluate.tasks are measured by lm-eval, which is not installed: pip install 'modelwright[eval]'"


def run_tasks(folder: Path, tasks: Sequence[str], limit: int) -> dict[str, float | None]:
    """The metrics of each task as TASK_METRIC; a task that is unknown or cannot be fetched is one letter."""
    try:
        import lm_eval
    except ImportError:
        raise ModelError(MISSING) from None
    try:
        found = lm_eval.simple_evaluate(
            model="hf", model_args=f"pretrained={folder}", tasks=list(tasks), limit=limit, bootstrap_iters=0
        )
    except Exception as error:  # the harness raises many kinds; each becomes one letter
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"evaluate.tasks: lm-eval could not measure {', '.join(tasks)} ({reason})") from None
    metrics: dict[str, float | None] = {}
    for task, measured in found["results"].items():
        for name, value in measured.items():
            if isinstance(value, int | float) and "stderr" not in name and math.isfinite(value):
                metrics[f"{task}_{name.partition(',')[0]}"] = float(value)
    return metrics
