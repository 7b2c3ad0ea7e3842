"""Stop when asked: once saves and stops, twice stops at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from modelwright.errors import Interrupted

AT_ONCE = "stopped; the same command continues from the last checkpoint"


class StopNow(BaseException):
    """Unwinds everything at once; no `except Exception` on the way takes it for a problem of its own."""

    exit_code = Interrupted.exit_code


class Stopper:
    """Hears SIGTERM and Ctrl-C: while training it waits for the step to end, elsewhere it stops at once."""

    def __init__(self) -> None:
        self._asked = False
        self._waits = False

    def asked(self) -> bool:
        """Whether somebody asked to stop."""
        return self._asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the signals inside the block; being stopped at once leaves it as an Interrupted."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except StopNow:
            raise Interrupted(AT_ONCE) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block, stop only between two steps, after a checkpoint."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def leave(self) -> None:
        """An error is on its way out: who asks to stop now must not take its place, unless asked twice."""
        self._waits, self._asked = True, False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._waits or self._asked:
            self._asked = True
            raise StopNow(AT_ONCE)
        self._asked = True
