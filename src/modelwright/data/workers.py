"""Who does the pieces of a preparation: this process, several, or one rank of many machines (by Ray: `by_ray`).

Pieces are named by step and number and lie on a disk that all can see, so a crew only has to see that each is done.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from modelwright.data import steps
from modelwright.data.plan import Plan, finished
from modelwright.errors import DataError, Interrupted, ModelwrightError, Problem, StorageError, UsageError

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 1800.0
"""How long one rank waits while nothing at all is finished by the others."""


LIVES = 3
"""Processes that may die over one piece before the preparation stops."""


class Crew(Protocol):
    """Those at work."""

    def do(self, plan: Plan, step: str, numbers: Sequence[int]) -> Iterator[int]:
        """Do these pieces, and yield the number of each that is done."""

    def first(self, plan: Plan, done: Callable[[], bool], make: Callable[[], None]) -> None:
        """Let one of all processes make something, while the others wait until it, or the end of all, is there."""

    def close(self) -> None:
        """Let everyone go."""


class Alone:
    """This process does everything."""

    def do(self, plan: Plan, step: str, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            steps.do(plan, step, number)
            yield number

    def first(self, plan: Plan, done: Callable[[], bool], make: Callable[[], None]) -> None:
        if not done():
            make()

    def close(self) -> None:
        pass


class Processes(Alone):
    """Several processes of this machine, told by lines of JSON; they end when this one does, however it ends."""

    def __init__(self, count: int) -> None:
        """Start so many, when there is work for more than one."""
        self._count = count
        self._workers: list[_Worker] = []

    def do(self, plan: Plan, step: str, numbers: Sequence[int]) -> Iterator[int]:
        left = [number for number in numbers if not plan.work.done(step, number)]
        if self._count == 1 or len(left) < 2:
            yield from super().do(plan, step, numbers)
            return
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        answers: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        for number in left:
            waiting.put(number)
        self._workers += [_Worker() for _ in range(len(self._workers), min(self._count, len(left)))]
        for worker in self._workers:
            task = (str(plan.folder), step, waiting, answers)
            threading.Thread(target=worker.work, args=task, daemon=True).start()
        for _ in left:
            answer = answers.get()
            if isinstance(answer, Exception):
                self.close()
                raise answer
            yield answer

    def close(self) -> None:
        """End the processes."""
        while self._workers:
            self._workers.pop().end()


class _Gone(Exception):
    """The process at the other end has ended."""


class _Worker:
    """One process at the other end of a pipe."""

    def __init__(self) -> None:
        self._over = False
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "modelwright.data.worker"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def work(
        self, folder: str, step: str, waiting: queue.SimpleQueue[int], answers: queue.SimpleQueue[int | Exception]
    ) -> None:
        """Take pieces from the line until it is empty; the first trouble ends it."""
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._have_done({"folder": folder, "step": step, "number": number})
                answers.put(number)
            except Exception as error:
                answers.put(error)
                return

    def _have_done(self, piece: dict[str, Any]) -> None:
        """Have a piece done; a process that dies over it is replaced, and the piece begun again."""
        for life in range(LIVES):
            try:
                return self._ask(piece)
            except _Gone:
                self._let_go()
                if not self._over and life + 1 < LIVES:
                    self._process = self._begin()
        raise Interrupted(
            f"a worker of the preparation ended {LIVES} times over one piece; the same command goes on where it stopped"
        )

    def _ask(self, piece: dict[str, Any]) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(piece) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            raise _Gone
        answer = json.loads(line)
        if not answer["done"]:
            raise letter_of(answer)

    def end(self) -> None:
        """Let it go, for good."""
        self._over = True
        self._let_go()

    def _let_go(self) -> None:
        with suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def letter_of(answer: dict[str, Any]) -> ModelwrightError:
    """A worker's error as our own."""
    if answer["kind"] == "DataError":
        return DataError([Problem(where, message) for where, message in answer["problems"]])
    kinds: dict[str, type[ModelwrightError]] = {"StorageError": StorageError, "UsageError": UsageError}
    return kinds.get(answer["kind"], ModelwrightError)(answer["message"])


@dataclass(frozen=True)
class Ranks:
    """One of several processes started by any launcher, on a disk they share: rank r does every n-th piece."""

    rank: int
    """Which one this is."""
    size: int
    """How many there are."""

    def do(self, plan: Plan, step: str, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers[self.rank :: self.size]:
            steps.do(plan, step, number)
            yield number
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (all(plan.work.done(step, number) for number in numbers) or finished(plan)):
            self._wait(deadline)

    def first(self, plan: Plan, done: Callable[[], bool], make: Callable[[], None]) -> None:
        if self.rank == 0:
            if not done():
                make()
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (done() or finished(plan)):  # the work folder goes when all is done, maybe before this one looks
            self._wait(deadline)

    def close(self) -> None:
        pass

    def _wait(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise Interrupted(
                f"rank {self.rank} waited {PATIENCE_SECONDS / 60:.0f} minutes for the others; start again"
            )
        time.sleep(POLL_SECONDS)
