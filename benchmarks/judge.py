"""The edge of the memory and accelerate's estimate, beside the planner's own prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelwright.plan.calibration import Calibration
from modelwright.plan.fit import PlanCase, Run, compare_with_measured, fit, work_of
from modelwright.plan.gpus import Gpu
from modelwright.plan.memory import memory


def leave_one_out(runs: Sequence[Run], seen: Sequence[Run], gpu: Gpu, fitted: Calibration) -> list[Run]:
    """Each run judged by coefficients fitted to what was seen of other settings; `fitted` are those of all seen."""
    found = []
    for run in runs:
        others = [other for other in seen if other["setting"]["name"] != run["setting"]["name"]]
        found += compare_with_measured([run], gpu, fit(others, gpu, fitted) if 0 < len(others) < len(seen) else fitted)
    return found


def max_batch_rows(case: PlanCase, plan: dict[str, Any], gpu: Gpu, fitted: Calibration) -> int:
    """The most rows at once that the planner says fit: training with them must not run out of memory."""
    rows = 1
    while memory(work_of(case, {**plan, "per_device": rows + 1}, True), fitted.memory).needed <= gpu.memory:
        rows += 1
    return rows


def accelerate_bytes(case: PlanCase, precision: str) -> int | None:
    """What accelerate's estimator says that training takes; None where it is not installed or knows no such model."""
    try:
        import torch
        from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
        from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]

        if case.stage == "classify":
            return None
        from transformers import AutoModelForCausalLM

        from modelwright.stages.random_task import config_of

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(case))
        total, _ = calculate_maximum_sizes(model)
        said = estimate_training_usage(
            total, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(precision, precision)
        )
        return int(max(said.values()))
    except (ImportError, KeyError, ValueError, TypeError):
        return None
