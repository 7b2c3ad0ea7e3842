"""The spike guard skips steps that would spoil the weights, and no others."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelwright.engine.spike_guard import MIN_HISTORY, RECOVERED_AFTER, WINDOW, SpikeGuard


def guard_at_loss(loss: float, first: float = 6.0) -> SpikeGuard:
    """A guard that has seen a run begin, and come to a loss."""
    guard = SpikeGuard(spike_factor=10.0)
    assert {guard.check(value, 1.0) for value in [first] * MIN_HISTORY + [loss] * WINDOW} == {"ok"}
    return guard


def verdicts(guard: SpikeGuard, losses: list[float], norm: float = 20.0) -> list[str]:
    return [guard.check(loss, norm if loss > 2.0 else 1.0) for loss in losses]


def test_a_hard_batch_is_skipped_once_and_an_illness_every_time() -> None:
    guard = guard_at_loss(2.0)
    assert verdicts(guard, [5.0, 2.0, 2.0, 5.0]) == ["spike", "ok", "ok", "spike"], "the weights may be spoilt"
    assert verdicts(guard, [2.0] * RECOVERED_AFTER + [5.0] * 4) == ["ok"] * (RECOVERED_AFTER + 4), (
        "the weights are well: it was the batch"
    )
    assert guard.check(5.1, 20.0) == "spike"


def test_a_loss_higher_than_those_of_the_beginning_stays_a_spike() -> None:
    for guard in (guard_at_loss(2.0), guard_at_loss(2.0, first=3.0)):
        for _ in range(3):
            assert verdicts(guard, [100.0, *[2.0] * RECOVERED_AFTER]) == ["spike"] + ["ok"] * RECOVERED_AFTER
    one_was_absurd = SpikeGuard(spike_factor=10.0)
    assert set(verdicts(one_was_absurd, [400.0] + [2.0] * 2 * WINDOW)) == {"ok"}
    assert verdicts(one_was_absurd, [300.0, *[2.0] * RECOVERED_AFTER, 290.0]) == ["spike"] + [
        "ok"
    ] * RECOVERED_AFTER + ["spike"]


def test_a_hard_batch_is_forgotten_when_none_has_come_for_long() -> None:
    guard = guard_at_loss(2.0)
    assert verdicts(guard, [5.0, *[2.0] * RECOVERED_AFTER, 5.0])[-1] == "ok"
    assert set(verdicts(guard, [2.0] * WINDOW)) == {"ok"}
    assert guard.check(5.0, 20.0) == "spike"


def test_what_was_high_at_the_beginning_is_a_spike_soon_after_it() -> None:
    guard = SpikeGuard(spike_factor=10.0)
    falling = [max(2.5, 10.8 * 0.96**step) for step in range(60)]
    assert {guard.check(loss, 1.0) for loss in falling} == {"ok"}
    assert guard.check(10.5, 500.0) == "spike"


def test_a_small_loss_is_no_spike_though_all_others_are_nothing() -> None:
    guard = guard_at_loss(0.001)
    assert guard.check(1.4, 1000.0) == "ok"
    assert guard.check(1.6, 1000.0) == "spike"
    pairs = guard_at_loss(0.001, first=0.69)
    assert pairs.check(0.2, 1000.0) == "ok"
    assert pairs.check(0.69, 1000.0) == "spike", "back where it began"


@given(st.lists(st.sampled_from([2.0, 2.0, 2.0, 5.0, 100.0, float("nan")]), max_size=40), st.integers(0, 40))
def test_a_guard_that_goes_on_judges_as_before_wherever_it_was_stopped(losses: list[float], stop: int) -> None:
    guard, resumed = guard_at_loss(2.0), SpikeGuard(spike_factor=10.0)
    verdicts(guard, losses[:stop])
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert verdicts(guard, losses[stop:]) == verdicts(resumed, losses[stop:])
    assert guard.state_dict() == resumed.state_dict()


@pytest.mark.parametrize("lucky", [0.1, 0.3])
def test_spoilt_weights_are_not_taken_for_hard_batches_by_a_lucky_one(lucky: float) -> None:
    """Four bad steps in a row, which sends a run back, come soon, though some batches still look well."""
    noticed = 0
    for seed in range(50):
        draw, guard = random.Random(seed), guard_at_loss(2.5, first=10.0)
        is_bad = [guard.check(3.0 if draw.random() < lucky else draw.uniform(5.0, 9.9), 30.0) for _ in range(200)]
        noticed += any(set(is_bad[start : start + 4]) == {"spike"} for start in range(len(is_bad)))
    assert noticed >= 45
