"""The heartbeat file of a rank, which a supervisor on the same machine reads, and the state of processes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HEARTBEAT_INTERVAL = 0.5
FILE_BYTES, MAX_MESSAGE_CHARS = 4096, 600
"""Bytes of a heartbeat file (a write of fixed size is read in one piece); characters of the exit message in it."""
STEP_WINDOW = 32
PR_SET_PDEATHSIG = 1


def set_pdeathsig(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (PR_SET_PDEATHSIG)."""
    parent = parent or os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl was called
        os._exit(1)


@dataclass
class RankStatus:
    """The state of a rank, as in its heartbeat file."""

    rank: int
    """Its global rank."""
    pid: int
    """Its process id."""
    beats: int = 0
    """Heartbeats so far: a live process sends them."""
    phase_changes: int = 0
    """Phases entered so far: a process that makes progress changes them."""
    phase: str = "starting"
    """What it is doing."""
    step: int = 0
    """Steps done."""
    step_seconds: float | None = None
    """Median time of its recent steps."""
    exit_message: str | None = None
    """Its exit message, where it has ended by itself."""
    exit_time: float = 0.0
    """When it ended, by the monotonic clock of the machine."""
    exit_code: int = 0
    """Its exit code."""
    lost_peers: bool = False
    """Whether it ended because other ranks were gone."""


class Heartbeat:
    """Writes the state of this rank to its heartbeat file; without a folder it writes nothing."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._status = RankStatus(rank, os.getpid())
        self._step_seconds: deque[float] = deque(maxlen=STEP_WINDOW)
        self._stop, self._descriptor = threading.Event(), -1
        self._thread: threading.Thread | None = None
        if folder is not None:
            self._descriptor = os.open(folder / f"rank-{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._write()
            self._thread = threading.Thread(target=self._beat_loop, daemon=True, name="heartbeat")
            self._thread.start()

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """Set the current phase."""
        self._status.phase, self._status.phase_changes = phase, self._status.phase_changes + 1
        if step is not None:
            self._status.step = step

    def step_done(self, step: int, seconds: float) -> None:
        """Record a finished step and how long it took."""
        self._step_seconds.append(seconds)
        if len(self._step_seconds) > 1:  # the first steps are warm-up; two are enough for an estimate
            self._status.step_seconds = round(median(self._step_seconds), 4)
        self.set_phase("between steps", step)

    def report_exit(self, message: str, exit_code: int, lost_peers: bool) -> None:
        """Write the exit message and stop."""
        status = self._status
        status.exit_message, status.exit_time = message[:MAX_MESSAGE_CHARS] or None, time.monotonic()
        status.exit_code, status.lost_peers = exit_code, lost_peers
        self.close()

    def close(self) -> None:
        """Stop sending heartbeats."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._write()
            os.close(self._descriptor)
            self._thread = None

    def _beat_loop(self) -> None:
        parent = os.getppid()
        while not self._stop.wait(HEARTBEAT_INTERVAL):
            if os.getppid() != parent:  # where the kernel has no pdeathsig
                os._exit(1)
            self._status.beats += 1
            self._write()

    def _write(self) -> None:
        text = json.dumps(vars(self._status)).encode()
        try:
            os.pwrite(self._descriptor, text[:FILE_BYTES].ljust(FILE_BYTES), 0)
        except OSError:
            return  # training does not depend on the heartbeat file


def read_rank_statuses(folder: Path) -> dict[int, RankStatus]:
    """The state of each rank of this machine."""
    statuses: dict[int, RankStatus] = {}
    for path in folder.glob("rank-*.json"):
        try:
            status = RankStatus(**json.loads(path.read_bytes() or b"null"))
        except (OSError, ValueError, TypeError):
            continue  # not written yet
        statuses[status.rank] = status
    return statuses


def process_state(pid: int) -> str | None:
    """The kernel's state character of a process (R, S, D, T for stopped, Z for zombie); None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def has_exited(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    return process_state(pid) in (None, "Z", "X")


def wait_for_exit(pids: list[int], seconds: float) -> list[int]:
    """Wait for processes to end; returns those still running."""
    deadline = time.monotonic() + seconds
    left = pids
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if not has_exited(pid)]
        if left:
            time.sleep(0.05)
    return left
