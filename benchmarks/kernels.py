"""Where the time of a step goes: the device's kernels in the last steps of a training, by how long they take, and the
moments in which it does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

Report = TypeVar("Report")
STEPS = 2
"""Steps that are watched; they are slower for it and not timed."""
MOST = 30
"""Kernels that are told."""
PAUSES = 5
"""Moments without work that are told."""


class Span(NamedTuple):
    """One piece of work of the device."""

    start: float
    end: float
    """Microseconds."""
    name: str


class Kernels:
    """Watches the last steps of a training where that is asked for."""

    def __init__(self, asked: bool) -> None:
        self._asked = asked
        self.table: list[dict[str, Any]] = []
        """The longest kernels: name, milliseconds and calls in a step; before them all together, and the moments
        without any."""

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
        if on_gpu:
            spans = [
                Span(event.time_range.start, event.time_range.end, event.name)
                for event in watched.events()
                if event.device_type.name == "CUDA"
            ]
            self.table[1:1] = pauses(spans)

    def lines(self) -> list[str]:
        """The table for people."""
        return [f"{row['milliseconds']:9.3f} ms {row['calls']:7.1f} × {row['name'][:120]}" for row in self.table]


def pauses(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """How long a step the device stood still, and the longest times it did: each between which kernels.

    Work of several streams overlaps; what stands still is between the end of all that began before and the next.
    """
    found: list[tuple[float, str]] = []
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and span.start > last.end:
            found.append((span.start - last.end, f"{last.name[:50]} and {span.name[:50]}"))
        last = span if last is None or span.end > last.end else last
    told = [("standing still", sum(length for length, _ in found), len(found))]
    told += [(f"standing still between {names}", length, 1) for length, names in sorted(found, reverse=True)[:PAUSES]]
    return [_row(*each) for each in told]


def _row(name: str, microseconds: float, calls: float) -> dict[str, Any]:
    return {"name": name, "milliseconds": round(microseconds / 1000 / STEPS, 3), "calls": round(calls / STEPS, 1)}


def _table(events: Any, on_gpu: bool) -> list[dict[str, Any]]:
    found = [
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in events
        if (event.device_type.name == "CUDA") == on_gpu
    ]
    whole = ("all together", sum(spent for _, spent, _ in found), sum(calls for *_, calls in found))
    longest = sorted(found, key=lambda each: -each[1])[:MOST]
    return [_row(*each) for each in (whole, *longest)]
