"""The guard's verdict is the same wherever it is found: on the host afterwards, or on the device before."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from modelwright.engine.guard import FEWEST, Guard, is_bad

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
