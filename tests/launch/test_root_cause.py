"""Of all the ranks that ended, one is the root cause, and only it is reported."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.launch.agent import find_root_cause
from modelwright.launch.supervisor import IpcDir, KillDecision
from modelwright.runs.heartbeat import RankStatus

LOST = RankStatus(
    rank=0, pid=100, beats=9, phase_changes=9, phase="training step", step=7, step_seconds=0.5,
    exit_message="rank 0 lost its peers", exit_time=5.0, exit_code=1, lost_peers=True,
)  # fmt: skip


@pytest.fixture
def ipc(tmp_path: Path) -> IpcDir:
    ipc_dir = IpcDir(tmp_path)
    ipc_dir.set_rank_pids({0: 100, 1: 101})
    return ipc_dir


REPORTED_ERROR = replace(LOST, exit_message="there is no folder", exit_code=2, lost_peers=False, exit_time=6.0)
STOPPED = replace(
    LOST, exit_message="stopped; rerun the same command to resume", exit_code=75, lost_peers=False, exit_time=4.0
)
CRASHED = replace(LOST, exit_message="ValueError: no", lost_peers=False)


def other(at: RankStatus) -> RankStatus:
    """The same end, but of rank 1."""
    return replace(at, rank=1, pid=101)


def test_a_killed_rank_is_the_cause_and_not_the_one_that_lost_it(ipc: IpcDir) -> None:
    cause = find_root_cause(ipc, {0: LOST, 1: other(replace(LOST, exit_message=None))}, {0: 1}, {0, 1})
    assert (cause.rank, cause.killed, cause.step) == (1, True, 7)
    assert "was killed by SIGKILL" in cause.summary


def test_a_rank_that_the_watchdog_ended_is_reported_with_the_watchdogs_reason(ipc: IpcDir) -> None:
    ipc.record_kill(KillDecision(1, 101, "has been stopped for 8 s (SIGSTOP)"))
    cause = find_root_cause(ipc, {0: LOST, 1: other(replace(LOST, exit_message=None))}, {1: -signal.SIGKILL}, {1})
    assert cause.summary == "rank 1 has been stopped for 8 s (SIGSTOP) after step 7"


@pytest.mark.parametrize("first", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("follows", [LOST, STOPPED, replace(REPORTED_ERROR, lost_peers=True), None], ids=repr)
def test_an_error_message_is_the_cause_whoever_exited_first_and_however_the_other_ended(
    ipc: IpcDir, follows: RankStatus | None, first: set[int]
) -> None:
    beats = {1: other(REPORTED_ERROR)} | ({0: follows} if follows else {})
    cause = find_root_cause(ipc, beats, {0: -signal.SIGKILL, 1: 2}, first)
    assert (cause.rank, cause.exit_code, cause.has_stderr) == (1, 2, True)


@pytest.mark.parametrize("origin", [STOPPED, replace(LOST, exit_message=None)], ids=["stopped", "killed"])
def test_an_error_that_another_rank_received_counts_where_its_sender_was_killed_while_exiting(
    ipc: IpcDir, origin: RankStatus, tmp_path: Path
) -> None:
    relayed = other(replace(REPORTED_ERROR, lost_peers=True))
    cause = find_root_cause(ipc, {0: origin, 1: relayed}, {0: -signal.SIGKILL, 1: 2}, {1})
    assert (cause.exit_code, cause.message(tmp_path)) == (2, "there is no folder")


def test_who_is_stopped_because_another_crashed_or_was_lost_is_never_the_cause(ipc: IpcDir) -> None:
    assert find_root_cause(ipc, {0: STOPPED, 1: other(CRASHED)}, {0: 75, 1: 1}, {1}).exit_code == 1
    assert find_root_cause(ipc, {0: STOPPED, 1: other(LOST)}, {0: 75, 1: 1}, {1}).lost_peers
    assert find_root_cause(ipc, {1: other(CRASHED)}, {0: -signal.SIGTERM, 1: 1}, {1}).rank == 1
    assert find_root_cause(ipc, {}, {0: -signal.SIGTERM, 1: 1}, {1}).reason == "exited with code 1 during start-up"


def test_a_rank_that_somebody_stopped_is_the_cause_of_what_the_other_lost(ipc: IpcDir) -> None:
    assert find_root_cause(ipc, {0: STOPPED, 1: other(LOST)}, {0: 75, 1: 1}, {0}).exit_code == 75
    ipc.request_stop()
    assert find_root_cause(ipc, {0: STOPPED, 1: other(LOST)}, {0: 75, 1: 1}, {0, 1}).exit_code == 75


def test_the_same_end_twice_in_the_same_place_is_no_accident_but_losing_others_twice_is(ipc: IpcDir) -> None:
    first, again = (find_root_cause(ipc, {0: CRASHED, 1: other(LOST)}, {}, {0, 1}) for _ in range(2))
    assert again.repeats(first)
    assert not find_root_cause(ipc, {0: replace(CRASHED, step=8), 1: other(LOST)}, {}, {0, 1}).repeats(first)
    lost = find_root_cause(ipc, {0: LOST, 1: other(LOST)}, {}, {0, 1})
    assert not lost.repeats(lost)
