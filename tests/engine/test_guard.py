"""The guard's verdict is the same wherever it is found: on the host afterwards, or on the device before."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from modelwright.engine.guard import FEWEST, WINDOW, Guard, is_bad

NUMBERS = st.floats(width=32) | st.sampled_from([float("inf"), float("nan"), 4.0, 8.0, 12.0, 40.0])


@given(NUMBERS, NUMBERS, st.integers(1, 5000), st.integers(0, 2 * FEWEST))
@example(4.0 * 300, 1.0, 300, FEWEST)
@example(float("-inf"), float("inf"), 1, 0)
def test_a_step_is_judged_the_same_where_it_is_computed(summed: float, norm: float, trained: int, known: int) -> None:
    guard = Guard(spike_factor=4.0)
    guard.restore({"losses": [1.0] * known, "norms": [2.0] * known})
    limits = torch.tensor((trained, *guard.limits()), dtype=torch.float64)
    told = torch.tensor((summed, norm)).double()
    found = bool(is_bad(told[0], told[1], limits))
    assert found == (guard.judge(told[0].item() / trained, told[1].item()) != "ok")


def used_to(loss: float, first: float = 6.0) -> Guard:
    guard = Guard(spike_factor=10.0)
    for value in [first] * FEWEST + [loss] * WINDOW:
        assert guard.judge(value, 1.0) == "ok"
    return guard


def test_a_hard_batch_is_skipped_once_and_an_illness_every_time() -> None:
    guard = used_to(2.0)
    assert guard.judge(5.0, 20.0) == "spike"
    assert guard.judge(5.0, 20.0) == "spike", "nothing good came between: the weights may be spoilt"
    assert guard.judge(2.0, 1.0) == "ok"
    assert guard.judge(5.0, 20.0) == "ok", "the weights are well, so it was the batch"
    assert guard.judge(5.1, 20.0) == "spike"


def test_a_loss_that_was_never_learnt_from_stays_a_spike() -> None:
    guard = used_to(2.0)
    for _ in range(3):
        assert guard.judge(100.0, 1.0) == "spike"
        assert guard.judge(2.0, 1.0) == "ok"


def test_a_hard_batch_is_forgotten_with_the_steps_around_it() -> None:
    guard = used_to(2.0)
    assert [guard.judge(loss, 20.0) for loss in (5.0, 2.0, 5.0)] == ["spike", "ok", "ok"]
    assert {guard.judge(2.0, 1.0) for _ in range(WINDOW)} == {"ok"}
    assert guard.judge(5.0, 20.0) == "spike"


def test_a_loss_that_is_small_is_no_spike_though_all_others_are_nothing() -> None:
    guard = used_to(0.001)
    assert guard.judge(0.9, 1000.0) == "ok"
    assert guard.judge(5.0, 1000.0) == "spike"


def test_a_guard_that_goes_on_judges_as_before() -> None:
    guard, resumed = used_to(2.0), Guard(spike_factor=10.0)
    resumed.restore(guard.state())
    for loss in (5.0, 2.0, 5.0, 2.0, 100.0, 2.0, 100.0):
        assert guard.judge(loss, 20.0) == resumed.judge(loss, 20.0)
        assert guard.limits() == resumed.limits()
