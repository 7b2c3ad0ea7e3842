"""The heartbeat of a rank: it dies with whoever started it, and tells twice a second where it stands.

A supervisor on the same machine reads the beats. It watches them change rather than compare clocks, so that a rank that
is stopped, one that hangs and one that only has much to do look different from outside.
"""

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

BEAT_SECONDS = 0.5
WIDTH, WORDS = 4096, 600
"""Bytes of a beat file, since one write of a fixed width is never seen by halves; characters of last words in it."""
WINDOW = 32
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent ends, whatever ended that one."""
    parent = parent or os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


@dataclass(frozen=True)
class Standing:
    """Where a rank stands, as read from its beat."""

    rank: int
    """The rank's number in the world."""
    pid: int
    """Its process."""
    count: int
    """Beats so far: a live process beats."""
    moves: int
    """Times it went on to something else: a process that gets anywhere moves."""
    doing: str
    """What it is at."""
    step: int
    """Steps done."""
    step_seconds: float | None
    """Median time of its recent steps."""
    ending: str | None
    """Its last words, where it has ended by itself."""
    ended_at: float
    """When, on the clock that all processes of a machine share."""
    exit_code: int
    """With which code."""
    lost_others: bool
    """Whether it ended because others were gone."""


class Beat:
    """Tells where this process stands; without a folder it tells nobody."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._rank, self._step, self._doing = rank, 0, "starting"
        self._count, self._moves = 0, 0
        self._ending: str | None = None
        self._ended_at, self._exit_code, self._lost_others = 0.0, 0, False
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._stop, self._descriptor = threading.Event(), -1
        self._thread: threading.Thread | None = None
        if folder is not None:
            self._descriptor = os.open(folder / f"rank-{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._write()
            self._thread = threading.Thread(target=self._go_on, daemon=True, name="beat")
            self._thread.start()

    def at(self, doing: str, step: int | None = None) -> None:
        """Say what begins now."""
        self._doing, self._moves = doing, self._moves + 1
        if step is not None:
            self._step = step

    def stepped(self, step: int, seconds: float) -> None:
        """Say that a step is done, and how long it took."""
        self._seconds.append(seconds)
        self.at("between steps", step)

    def end(self, words: str, exit_code: int, lost_others: bool) -> None:
        """Leave last words and fall silent."""
        self._ending, self._ended_at = words, time.monotonic()
        self._exit_code, self._lost_others = exit_code, lost_others
        self.close()

    def close(self) -> None:
        """Fall silent."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._write()
            os.close(self._descriptor)
            self._thread = None

    def _go_on(self) -> None:
        parent = os.getppid()
        while not self._stop.wait(BEAT_SECONDS):
            if os.getppid() != parent:  # where the kernel does not see to it
                os._exit(1)
            self._count += 1
            self._write()

    def _write(self) -> None:
        # the first steps of a process warm up; two are enough for a guess
        seconds = list(self._seconds)
        standing = Standing(
            self._rank, os.getpid(), self._count, self._moves, self._doing, self._step,
            round(median(seconds), 4) if len(seconds) > 1 else None, (self._ending or "")[:WORDS] or None,
            self._ended_at, self._exit_code, self._lost_others,
        )  # fmt: skip
        text = json.dumps(standing.__dict__).encode()
        try:
            os.pwrite(self._descriptor, text[:WIDTH].ljust(WIDTH), 0)
        except OSError:
            return  # nobody can read it then; training does not depend on being watched


def read_beats(folder: Path) -> dict[int, Standing]:
    """Where the ranks of this machine stand, by rank."""
    found: dict[int, Standing] = {}
    for path in folder.glob("rank-*.json"):
        try:
            standing = Standing(**json.loads(path.read_bytes() or b"null"))
        except (OSError, ValueError, TypeError):
            continue  # not written yet
        found[standing.rank] = standing
    return found


def process_state(pid: int) -> str | None:
    """The kernel's letter for a process (R, S, D, T for stopped, Z for dead); None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has taken note yet."""
    return process_state(pid) in (None, "Z", "X")


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Wait for processes to end; returns those still there."""
    deadline = time.monotonic() + seconds
    left = pids
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if not is_gone(pid)]
        if left:
            time.sleep(0.05)
    return left
