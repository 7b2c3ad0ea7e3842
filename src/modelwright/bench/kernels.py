"""Where the time of a step goes: the device's kernels in the last steps of a training, by how long they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

Report = TypeVar("Report")
STEPS = 2
"""Steps that are watched; they are slower for it and not timed."""
MOST = 20
"""Kernels that are told."""


class Kernels:
    """Watches the last steps of a training where that is asked for."""

    def __init__(self, asked: bool) -> None:
        self._asked = asked
        self.table: list[dict[str, Any]] = []
        """The longest kernels: name, milliseconds and calls in a step; the first line is all of them together."""

    def during(self, steps: Iterator[Report], count: int) -> Iterator[Report]:
        """The same steps, `count` in all."""
        if not self._asked or count <= STEPS:
            yield from steps
            return
        for number, report in enumerate(steps, 1):
            yield report
            if number == count - STEPS:
                break
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watched:
            yield from steps
            if on_gpu:
                torch.cuda.synchronize()
        self.table = _table(watched.key_averages(), on_gpu)

    def lines(self) -> list[str]:
        """The table for people."""
        return [f"{row['milliseconds']:9.3f} ms {row['calls']:7.1f} × {row['name'][:120]}" for row in self.table]


def _table(events: Any, on_gpu: bool) -> list[dict[str, Any]]:
    found = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000, event.count)
        for event in events
        if (event.device_type.name == "CUDA") == on_gpu
    ]
    whole = ("all together", sum(spent for _, spent, _ in found), sum(calls for *_, calls in found))
    longest = sorted(found, key=lambda each: -each[1])[:MOST]
    return [
        {"name": name, "milliseconds": round(spent / STEPS, 3), "calls": round(calls / STEPS, 1)}
        for name, spent, calls in (whole, *longest)
    ]
