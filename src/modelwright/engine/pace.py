"""How fast each rank is by itself, so that the one all others wait for can be named."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

import torch

STEPS = 8
"""Steps that are looked at before anybody is called slow."""
TIMES = 1.6
"""A rank is slow when it takes so many times as long as the median of the others."""
LEAST_SECONDS = 0.005
KNOWN_AFTER = 8
"""Steps after which the length of a step is known."""
HANGS_SECONDS, TIMES_A_STEP = 300.0, 20.0
"""An exchange that takes so long, and so many times a step, never comes."""


class Stopwatch:
    """The time from start to stop, on the device where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[Any] = []
        if self._on_gpu:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._began = self._ended = 0.0

    def start(self) -> None:
        """Begin."""
        self._began = self._ended = time.perf_counter()
        if self._on_gpu:
            self._events[0].record()

    def stop(self) -> None:
        """End; a GPU's time is read when it has caught up."""
        self._ended = time.perf_counter()
        if self._on_gpu:
            self._events[1].record()

    def in_my_place(self, rank: int, size: int) -> list[float]:
        """The seconds in this rank's place and nothing in the others', so that a sum over ranks holds them all."""
        seconds = max(self._ended - self._began, self.seconds)
        return [seconds if place == rank else 0.0 for place in range(size)]

    @property
    def seconds(self) -> float:
        """The time that passed on the device: next to nothing where a GPU was still at work on what came before."""
        if self._on_gpu and self._ended > self._began:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._ended - self._began


class Stragglers:
    """Names ranks that hold the others up, once each time it begins."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=STEPS)
        self._named: set[int] = set()

    def look(self, seconds: tuple[float, ...]) -> list[str]:
        """What is to be said after a step."""
        self._recent.append(seconds)
        if len(seconds) < 2 or len(self._recent) < STEPS:
            return []
        usual = [median(rank) for rank in zip(*self._recent, strict=True)]
        lines = []
        for rank, mine in enumerate(usual):
            others = median(usual[:rank] + usual[rank + 1 :])
            slow = mine > max(LEAST_SECONDS, TIMES * others)
            if slow and rank not in self._named:
                lines.append(f"rank {rank} is slow: {mine:.2g} s a step by itself, and {others:.2g} s the others")
            self._named = self._named | {rank} if slow else self._named - {rank}
        return lines
