"""Measure a run as it goes: speed by the median of recent steps, shares of peak and of waiting, time left, memory."""

from __future__ import annotations

import resource
from collections import deque
from statistics import median

import torch

from modelwright.engine.step import StepReport

WINDOW = 32


class Meter:
    """Turns step reports into the numbers a person watches."""

    def __init__(self, steps: int, batch: int, flops_per_token: float, peak_flops: float | None) -> None:
        """batch: rows in a step."""
        self._steps, self._batch, self._flops, self._peak = steps, batch, flops_per_token, peak_flops
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._rates: deque[float] = deque(maxlen=WINDOW)
        self._waits: deque[float] = deque(maxlen=WINDOW)
        self._first, self._left = True, steps

    def record(self, report: StepReport) -> None:
        """Take note of a step; the first step of a process only warms up."""
        if not self._first or self._steps == 1:
            self._seconds.append(report.seconds)
            self._rates.append(report.tokens / max(report.seconds, 1e-9))
            self._waits.append(report.waited / max(report.seconds, 1e-9))
        self._first, self._left = False, self._steps - report.step

    def told(self) -> dict[str, float | int | None]:
        """The speed, time left and memory after the last step; asked for where it is told, not after every step.

        The GPU waits meanwhile: its memory alone takes a fifth of a millisecond to ask for.
        """
        rate = median(self._rates) if self._rates else None
        left = self._left * median(self._seconds) if self._seconds else None
        return {
            "tokens_per_second": round(rate, 1) if rate else None,
            "samples_per_second": round(self._batch / median(self._seconds), 2) if self._seconds else None,
            "mfu": round(rate * self._flops / self._peak, 4) if rate and self._peak else None,
            "waiting": round(median(self._waits), 4) if self._waits else None,
            "eta_seconds": round(left, 1) if left is not None else None,
            "memory_bytes": memory_in_use(),
        }


def memory_in_use() -> int:
    """The most memory this process has held: on the GPU where there is one, else in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
