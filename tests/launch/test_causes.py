"""Of all the ranks that ended, one is the cause, and it alone is told."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.launch.causes import find_cause
from modelwright.launch.signs import Signs
from modelwright.launch.watchdog import Finding
from modelwright.runs.beat import Standing

ENDED = Standing(
    rank=0, pid=100, count=9, moves=9, doing="computing", step=7, step_seconds=0.5, ending="rank 0 lost the others",
    ended_at=5.0, exit_code=1, lost_others=True,
)  # fmt: skip


@pytest.fixture
def signs(tmp_path: Path) -> Signs:
    made = Signs(tmp_path)
    made.started({0: 100, 1: 101})
    return made


def test_a_killed_rank_is_the_cause_and_not_the_one_that_lost_it(signs: Signs) -> None:
    alive = replace(ENDED, rank=1, pid=101, ending=None)
    cause = find_cause(signs, {0: ENDED, 1: alive}, {0: 1})
    assert (cause.rank, cause.killed, cause.step) == (1, True, 7)
    assert "was killed by SIGKILL" in cause.told


def test_a_rank_that_the_watchdog_ended_is_told_with_the_watchdogs_reason(signs: Signs) -> None:
    signs.found(Finding(1, 101, "has been stopped for 8 s (SIGSTOP)"))
    cause = find_cause(signs, {0: ENDED, 1: replace(ENDED, rank=1, pid=101, ending=None)}, {1: -signal.SIGKILL})
    assert cause.told == "rank 1 has been stopped for 8 s (SIGSTOP) after step 7"


def test_the_first_with_a_reason_of_its_own_goes_before_those_that_were_only_asked_to_stop(signs: Signs) -> None:
    crashed = replace(ENDED, rank=1, pid=101, ending="ValueError: no", ended_at=4.0, lost_others=False)
    asked = replace(ENDED, ending="stopped", ended_at=4.5, exit_code=75, lost_others=False)
    cause = find_cause(signs, {0: asked, 1: crashed}, {1: 1})
    assert (cause.rank, cause.exit_code, cause.wrote) == (1, 1, True)


def test_the_same_end_twice_in_the_same_place_is_no_accident(signs: Signs) -> None:
    crashed = replace(ENDED, ending="ValueError: no", lost_others=False)
    first, again = (find_cause(signs, {0: crashed, 1: replace(ENDED, rank=1)}, {}) for _ in range(2))
    assert again.repeats(first)
    assert not find_cause(signs, {0: replace(crashed, step=8), 1: replace(ENDED, rank=1)}, {}).repeats(first)
