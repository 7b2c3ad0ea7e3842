"""One writer per run: a second is refused at once, a dead one's lock is taken over, other hosts are watched."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelwright.errors import Refused, StorageError
from modelwright.runs import folder
from modelwright.runs.folder import STALE_LOCK_SECONDS, run_lock

HOLDS = """
import sys, time
from pathlib import Path
from modelwright.runs.folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""
BEATS_ELSEWHERE = """
import json, os, sys, time
descriptor, beat = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), 0
while True:
    os.pwrite(descriptor, json.dumps({"host": "elsewhere", "pid": 7, "beats": beat}).ljust(256).encode(), 0)
    if beat == 0:
        print("held", flush=True)
    beat += 1
    time.sleep(0.5)
"""


@contextmanager
def started(program: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, in its own way."""
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_free_run_is_held_and_left_without_a_trace_of_the_holder(tmp_path: Path) -> None:
    with run_lock(tmp_path / ".lock") as note:
        assert note is None
        holder = json.loads((tmp_path / ".lock").read_text(encoding="utf-8"))
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
    assert (tmp_path / ".lock").read_bytes() == b""
    with run_lock(tmp_path / ".lock") as note:
        assert note is None


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a beat of the holder fails."""

    def fail(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(folder, "time", SimpleNamespace(monotonic=time.monotonic, sleep=fail))


def test_a_second_process_is_refused_fast_and_the_holder_is_named(tmp_path: Path, no_waiting: None) -> None:
    with started(HOLDS, tmp_path / ".lock") as holder:
        with pytest.raises(Refused) as caught, run_lock(tmp_path / ".lock"):
            pass
        assert str(caught.value) == (
            f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}; "
            "wait for it, stop it, or choose another output_dir"
        )
        assert caught.value.exit_code == 77


def test_a_refused_process_leaves_the_holder_s_lock_alone(tmp_path: Path) -> None:
    with started(HOLDS, tmp_path / ".lock"):
        for _ in range(2):
            with pytest.raises(Refused), run_lock(tmp_path / ".lock"):
                pass


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path, no_waiting: None) -> None:
    with started(HOLDS, tmp_path / ".lock") as holder:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with run_lock(tmp_path / ".lock") as note:
            assert note == (
                f"process {holder.pid} on {socket.gethostname()} died without finishing; taking over its lock"
            )


def test_a_holder_on_another_machine_whose_heartbeat_stopped_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 7, "beats": 3}), encoding="utf-8")
    began = time.monotonic()
    with run_lock(tmp_path / ".lock") as note:
        assert note == "process 7 on elsewhere died without finishing; taking over its lock"
    assert time.monotonic() - began >= STALE_LOCK_SECONDS


def test_a_holder_on_another_machine_whose_beat_moves_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "STALE_LOCK_SECONDS", 200.0)  # a busy machine may run the holder every few seconds
    message = "in use by process 7 on elsewhere"
    with started(BEATS_ELSEWHERE, tmp_path / ".lock"), pytest.raises(Refused, match=message):
        run_lock(tmp_path / ".lock").__enter__()


def test_where_the_file_system_has_no_locks_a_living_holder_is_still_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder, "STALE_LOCK_SECONDS", 200.0)
    with started(HOLDS, tmp_path / ".lock") as holder:
        monkeypatch.setattr(fcntl, "flock", no_locks)  # no such file system can be mounted everywhere tests run
        with pytest.raises(Refused, match=f"process {holder.pid}"), run_lock(tmp_path / ".lock"):
            pass


def test_a_lock_that_holds_rubbish_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b"\xff\xfe{")
    with run_lock(tmp_path / ".lock") as note:
        assert note is None


def test_a_lock_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the lock cannot be written"), run_lock(tmp_path / "missing" / ".lock"):
        pass
