"""Our learning rates are those of Hugging Face's schedules, at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from modelwright.engine.optimizer import build_schedule
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import SftConfig

LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)
PEAK = 3e-4


def theirs(name: str, steps: int, warmup: int, decay: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    more: dict[str, Any] = {"num_decay_steps": decay} if name == "warmup_stable_decay" else {}
    scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=more)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"),
    [(1, 0, 1), (2, 1, 1), (37, 0, 9), (37, 10, 6), (100, 10, 20), (20, 10, 15), (5, 10, 1)],
)
@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay"])
def test_every_schedule_is_hugging_face_s_at_every_step(name: Any, steps: int, warmup: int, decay: int) -> None:
    lengths: dict[str, Any] = {"max_steps": steps, "warmup_steps": warmup, "decay_steps": decay}
    settings = SftConfig(learning_rate=PEAK, lr_scheduler_type=name, **lengths)
    ours = build_schedule(settings, plan_stage(settings, 1000, 1, LAPTOP))
    wanted = theirs(name, steps, warmup, decay)
    assert [ours(step) for step in range(steps)] == pytest.approx(wanted, rel=1e-12, abs=1e-18)
