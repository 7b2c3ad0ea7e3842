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

LOST = Standing(
    rank=0, pid=100, count=9, moves=9, doing="computing", step=7, step_seconds=0.5, ending="rank 0 lost the others",
    ended_at=5.0, exit_code=1, lost_others=True,
)  # fmt: skip


@pytest.fixture
def signs(tmp_path: Path) -> Signs:
    made = Signs(tmp_path)
    made.started({0: 100, 1: 101})
    return made


LETTER = replace(LOST, ending="there is no folder", exit_code=2, lost_others=False, ended_at=6.0)
STOPPED = replace(LOST, ending="stopped; the same command continues", exit_code=75, lost_others=False, ended_at=4.0)
CRASHED = replace(LOST, ending="ValueError: no", lost_others=False)


def other(at: Standing) -> Standing:
    """The same end, but of rank 1."""
    return replace(at, rank=1, pid=101)


def test_a_killed_rank_is_the_cause_and_not_the_one_that_lost_it(signs: Signs) -> None:
    cause = find_cause(signs, {0: LOST, 1: other(replace(LOST, ending=None))}, {0: 1}, {0, 1})
    assert (cause.rank, cause.killed, cause.step) == (1, True, 7)
    assert "was killed by SIGKILL" in cause.told


def test_a_rank_that_the_watchdog_ended_is_told_with_the_watchdogs_reason(signs: Signs) -> None:
    signs.found(Finding(1, 101, "has been stopped for 8 s (SIGSTOP)"))
    cause = find_cause(signs, {0: LOST, 1: other(replace(LOST, ending=None))}, {1: -signal.SIGKILL}, {1})
    assert cause.told == "rank 1 has been stopped for 8 s (SIGSTOP) after step 7"


@pytest.mark.parametrize("first", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("follows", [LOST, STOPPED, replace(LETTER, lost_others=True), None], ids=repr)
def test_a_letter_is_the_cause_whoever_left_first_and_however_the_other_ended(
    signs: Signs, follows: Standing | None, first: set[int]
) -> None:
    beats = {1: other(LETTER)} | ({0: follows} if follows else {})
    cause = find_cause(signs, beats, {0: -signal.SIGKILL, 1: 2}, first)
    assert (cause.rank, cause.exit_code, cause.wrote) == (1, 2, True)


@pytest.mark.parametrize("origin", [STOPPED, replace(LOST, ending=None)], ids=["stopped", "killed"])
def test_a_letter_that_another_rank_was_told_counts_where_its_writer_was_ended_on_the_way_out(
    signs: Signs, origin: Standing, tmp_path: Path
) -> None:
    told = other(replace(LETTER, lost_others=True))
    cause = find_cause(signs, {0: origin, 1: told}, {0: -signal.SIGKILL, 1: 2}, {1})
    assert (cause.exit_code, cause.letter(tmp_path)) == (2, "there is no folder")


def test_who_is_stopped_because_another_crashed_or_was_lost_is_never_the_cause(signs: Signs) -> None:
    assert find_cause(signs, {0: STOPPED, 1: other(CRASHED)}, {0: 75, 1: 1}, {1}).exit_code == 1
    assert find_cause(signs, {0: STOPPED, 1: other(LOST)}, {0: 75, 1: 1}, {1}).lost
    assert find_cause(signs, {1: other(CRASHED)}, {0: -signal.SIGTERM, 1: 1}, {1}).rank == 1
    assert find_cause(signs, {}, {0: -signal.SIGTERM, 1: 1}, {1}).reason == "ended with code 1 before it began"


def test_a_rank_that_somebody_stopped_is_the_cause_of_what_the_other_lost(signs: Signs) -> None:
    assert find_cause(signs, {0: STOPPED, 1: other(LOST)}, {0: 75, 1: 1}, {0}).exit_code == 75
    signs.ask_to_stop()
    assert find_cause(signs, {0: STOPPED, 1: other(LOST)}, {0: 75, 1: 1}, {0, 1}).exit_code == 75


def test_the_same_end_twice_in_the_same_place_is_no_accident_but_losing_others_twice_is(signs: Signs) -> None:
    first, again = (find_cause(signs, {0: CRASHED, 1: other(LOST)}, {}, {0, 1}) for _ in range(2))
    assert again.repeats(first)
    assert not find_cause(signs, {0: replace(CRASHED, step=8), 1: other(LOST)}, {}, {0, 1}).repeats(first)
    lost = find_cause(signs, {0: LOST, 1: other(LOST)}, {}, {0, 1})
    assert not lost.repeats(lost)
