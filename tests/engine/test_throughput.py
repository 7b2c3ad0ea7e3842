"""The remaining time follows the machine, and includes what happens between steps."""

from __future__ import annotations

from typing import Any

import pytest

from modelwright.engine import throughput
from modelwright.engine.task import StepReport
from modelwright.engine.throughput import ThroughputMeter


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def eta_after(durations: list[float], monkeypatch: pytest.MonkeyPatch, between: float = 0.0) -> Any:
    """The remaining time of a run of 100 steps after steps of these seconds."""
    monkeypatch.setattr(throughput, "time", clock := Clock())
    meter = ThroughputMeter(100, 4, 1.0, None)
    for number, seconds in enumerate(durations, 1):
        clock.now += seconds + between
        meter.record(StepReport(number, 0.0, 1.0, 1.0, 1e-3, 10, "", seconds, 0.0, (seconds,), "ok", False))
    return meter.summary()["eta_seconds"]


def test_the_remaining_time_follows_a_machine_that_has_become_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    assert eta_after([1.0] * 40, monkeypatch) == pytest.approx(60)
    assert eta_after([1.0] * 40 + [4.0] * 6, monkeypatch) == pytest.approx(54 * 4)
    assert eta_after([1.0] * 40 + [9.0], monkeypatch) == pytest.approx(59), "one slow step is no slower machine"


def test_the_remaining_time_includes_evaluations_and_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert eta_after([1.0] * 40, monkeypatch, between=0.5) == pytest.approx(90)
