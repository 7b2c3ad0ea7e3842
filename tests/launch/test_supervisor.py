"""The watchdog distinguishes stopped, hanging, orphaned and busy ranks by their heartbeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelwright.launch.supervisor import STARTUP_TIMEOUT, Watchdog, step_timeout
from modelwright.runs.heartbeat import RankStatus

AT_WORK = RankStatus(
    rank=0, pid=100, beats=1, phase_changes=1, phase="waiting in all_reduce", step=7, step_seconds=0.5,
    exit_message=None, exit_time=0.0, exit_code=0, lost_peers=False,
)  # fmt: skip
OTHER = replace(AT_WORK, rank=1, pid=101)


def watch(seconds: float, *ranks: RankStatus, states: dict[int, str | None] | None = None, moving: bool = False) -> str:
    """What the watchdog says first of ranks that beat for some seconds without moving, and when."""
    dog, now = Watchdog(), 0.0
    known = {100: "S", 101: "S"} | (states or {})
    while now < seconds:
        beat = int(now * 2)
        beats = {at.rank: replace(at, beats=beat, phase_changes=beat if moving else at.phase_changes) for at in ranks}
        for finding in dog.check(beats, known, now):
            return f"{now:.0f} s: rank {finding.rank} {finding.reason}"
        now += 0.5
    return "nothing"


def test_a_rank_that_moves_is_left_alone() -> None:
    assert watch(7200, AT_WORK, OTHER, moving=True) == "nothing"


def test_a_rank_that_hangs_is_found_after_three_minutes_where_steps_are_short() -> None:
    assert watch(600, AT_WORK).startswith(
        "180 s: rank 0 made no progress: waiting in all_reduce after step 7 for 180 s"
    )


def test_long_steps_are_given_twenty_times_their_median() -> None:
    assert step_timeout(replace(AT_WORK, step_seconds=30.0)) == 600.0


@pytest.mark.parametrize("doing", ["loading model", "saving", "waiting for rank 0", "loading data"])
def test_what_may_take_long_is_given_half_an_hour(doing: str) -> None:
    assert step_timeout(replace(AT_WORK, phase=doing)) == STARTUP_TIMEOUT


def test_a_stopped_rank_is_found_in_seconds_and_the_one_that_waits_for_it_is_not_blamed() -> None:
    assert watch(60, AT_WORK, OTHER, states={101: "T"}) == "8 s: rank 1 has been stopped for 8 s (SIGSTOP)"


def test_a_rank_left_waiting_for_one_that_died_is_ended_after_ten_seconds() -> None:
    ended = watch(60, AT_WORK, OTHER, states={101: None})
    assert ended == "10 s: rank 0 is blocked, waiting in all_reduce, since other ranks have exited"


def test_a_rank_that_saves_while_another_died_may_finish() -> None:
    assert watch(60, replace(AT_WORK, phase="saving"), OTHER, states={101: None}) == "nothing"


def test_nobody_is_blamed_for_the_time_in_which_the_watcher_itself_was_stopped() -> None:
    dog = Watchdog()
    assert dog.check({0: AT_WORK}, {100: "S"}, 0.0) == []
    assert dog.check({0: AT_WORK}, {100: "S"}, 3600.0) == []
    assert dog.check({0: AT_WORK}, {100: "S"}, 3601.0) == []
