"""Save while training goes on: the tensors are copied, a thread writes and verifies what was copied.

Training stands still for the copy alone, and for the save before where that is still being written. A failure
comes to light at the next save, at the end, or when somebody looks, and always before anything depends on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from modelwright.engine.checkpoint import Checkpoints, Snapshot
from modelwright.engine.tensors import Lazy
from modelwright.engine.world import World
from modelwright.errors import ModelwrightError
from modelwright.plan.facts import free_memory

LARGEST_SHARE = 0.5
"""A copy may take so much of the free memory; a larger checkpoint is written while training waits."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written and verified."""

    step: int
    """The step it holds."""
    seconds: float
    """How long it took, copy, writing and verification."""
    waited: float
    """How long training stood still for it at the end."""
    background: bool
    """Whether training went on meanwhile."""


@dataclass
class _Work:
    """One save on its way."""

    step: int
    began: float
    thread: threading.Thread | None = None
    failure: BaseException | None = None
    ended: float = 0.0
    """When it was written; where another rank writes, when it began."""


class Saver:
    """Saves a stage's checkpoints, one at a time."""

    def __init__(self, checkpoints: Checkpoints, world: World, background: bool) -> None:
        self._checkpoints, self._world, self._background = checkpoints, world, background
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._work: _Work | None = None
        self._room: threading.Thread | None = None

    def make_room(self, snapshot: Callable[[], Snapshot]) -> None:
        """Make places for copies, once, while training goes on: pinning takes seconds, and the first save would wait.

        After the first step, that is: whoever pins holds up everybody else on the device.
        """
        if self._room is not None or not self._background or not self._world.is_main:
            return
        now = snapshot()
        wanted = [(file, lazy) for file, content in now.files.items() for lazy in content] if self._holds(now) else []

        def make() -> None:
            with suppress(RuntimeError):  # where they cannot be had, the first save says so
                for file, lazy in wanted:
                    self._place(file, lazy)

        # a process that ends waits for it: a thread that is cut off inside torch would end it with SIGABRT
        self._room = threading.Thread(target=make, name="room")
        self._room.start()

    def save(self, snapshot: Snapshot, best_step: int | None) -> bool:
        """Save, or begin to; returns whether it goes on in the background. The save before must be settled."""
        assert self._work is None
        now = time.monotonic()
        work = self._work = _Work(snapshot.step, now, ended=now)
        if self._world.first(lambda: self._background and self._holds(snapshot)):
            copied = self._copied(snapshot)
            if self._world.is_main:
                written = (work, copied, best_step)
                work.thread = threading.Thread(target=self._write, args=written, name="saving", daemon=True)
                work.thread.start()
            return True
        self._write(work, snapshot, best_step)
        return False

    def done(self) -> bool:
        """Whether a save has come to its end and may be settled without waiting; ranks among others do not know."""
        thread = self._work.thread if self._work is not None and self._world.size == 1 else None
        return thread is not None and not thread.is_alive()

    def settle(self) -> Saved | None:
        """Wait for the save under way, if there is one; all ranks hear its letter where it failed."""
        work, self._work = self._work, None
        if work is None:
            return None
        began = time.monotonic()
        if work.thread is not None:
            work.thread.join()
        if work.failure is not None and not isinstance(work.failure, ModelwrightError):
            raise work.failure
        self._world.first(lambda: _raise(work.failure))
        background = work.thread is not None
        waited = time.monotonic() - began if background else work.ended - work.began
        return Saved(work.step, work.ended - work.began, waited, background)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Let the save under way end, though something else went wrong; only an order to stop at once leaves it."""
        thread = self._work.thread if self._work is not None else None
        if thread is not None and (kind is None or issubclass(kind, Exception)):
            thread.join()

    def _write(self, work: _Work, snapshot: Snapshot, best_step: int | None) -> None:
        try:
            self._checkpoints.save(snapshot, self._world.is_main, best_step)
        except BaseException as error:
            work.failure = error
            if not isinstance(error, Exception):  # told to stop at once: nobody asks again how it went
                raise
        work.ended = time.monotonic()

    def _holds(self, snapshot: Snapshot) -> bool:
        """Whether memory holds a copy: one that was made already, or a new one, whose places are powers of two."""
        sizes = [lazy.size for file in snapshot.files.values() for lazy in file if lazy.size]
        needed = sum(1 << (size - 1).bit_length() for size in sizes)
        return bool(self._copies) or needed <= LARGEST_SHARE * free_memory()

    def _copied(self, snapshot: Snapshot) -> Snapshot:
        """The same from memory of its own; every rank fetches, the main one keeps. The places are used again."""
        if self._room is not None:
            self._room.join()
        files = {name: list(self._copies_of(name, file)) for name, file in snapshot.files.items()}
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # the copies are made when the device says so
        return replace(snapshot, files=files)

    def _copies_of(self, file: str, tensors: Iterable[Lazy]) -> Iterable[Lazy]:
        for lazy in tensors:
            tensor = lazy.fetch()
            if self._world.is_main:
                copy = self._place(file, lazy)
                copy.copy_(tensor, non_blocking=True)
                yield replace(lazy, fetch=partial(_same, copy))

    def _place(self, file: str, lazy: Lazy) -> Tensor:
        key = (file, lazy.name)
        if key not in self._copies:
            # a GPU copies into pinned memory at the link's speed, and into other memory at a tenth of it
            pinned = self._world.device.type == "cuda"
            self._copies[key] = torch.empty(lazy.shape, dtype=lazy.dtype, pin_memory=pinned)
        return self._copies[key]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
