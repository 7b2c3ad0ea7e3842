"""What was measured of a stage on its held-out rows, step by step, and which step was the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from modelwright.errors import Diverged


class Measurements:
    """Every measurement of a stage with its step; that of step 0 was taken before training."""

    def __init__(self, stage: str, metric: str | None) -> None:
        """`metric` decides which step is the best; without it none is."""
        self._stage, self._metric = stage, metric
        self.all: list[dict[str, Any]] = []

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Keep what was measured after a step; numbers that are none end the training."""
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            raise Diverged(
                f"{self._stage} diverged by step {step}: {bad[0]} is not finite; the last good checkpoint "
                "is kept. A lower learning_rate is the first thing to try"
            )
        self.all.append({"step": step, **values})
        return self.all[-1]

    def has(self, step: int) -> bool:
        """Whether the last measurement is of this step."""
        return bool(self.all) and self.last_step() == step

    def last_step(self) -> int:
        """The step measured last; 0 also where nothing was measured."""
        return int(self.all[-1]["step"]) if self.all else 0

    def best_step(self) -> int | None:
        """The step with the best measure, of those that training itself reached."""
        metric, reached = self._metric, [item for item in self.all if item["step"] > 0]
        if not reached or metric is None:
            return None
        sign = -1.0 if metric.endswith("accuracy") else 1.0
        return int(min(reached, key=lambda item: sign * item[metric])["step"])

    def forget(self, step: int) -> None:
        """Pass over a step whose weights are lost."""
        self.all = [item for item in self.all if item["step"] != step]

    def metrics(self, step: int) -> dict[str, float | None]:
        """What a step measured, and beside it what the model measured before, as base_…"""
        by_step = {item["step"]: item for item in self.all}
        return {
            f"{prefix}{name}": value
            for prefix, item in (("", by_step.get(step, {})), ("base_", by_step.get(0, {})))
            for name, value in item.items()
            if name != "step"
        }
