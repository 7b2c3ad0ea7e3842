"""Faults that a trial carries in itself: each is called in the trial's own process before it begins.

Real faults come from outside (signals, full disks, pulled cables). What can only happen inside, such as a kill between
two system calls or a number that turns into none, is put there by these.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
"""The calls that change what a power cut or a kill would find."""
EVERY_TENSOR = 12
"""In the middle of a file every so many tensors count as a moment of their own."""


def slow_steps(seconds: float, after: int = 0) -> None:
    """Make steps long enough to be met on the way, from some step on."""

    def slow(engine: Any, step: Callable[[], Any]) -> Any:
        time.sleep(seconds if engine.cursor.step >= after else 0.0)
        return step()

    _around_steps(slow)


def kill_in_save(step: int, moment: int) -> None:
    """Be killed at one moment of the save after a step; moment 0 only counts them and prints how many there are."""
    from modelwright.engine.checkpoint import CheckpointManager

    seen, inside = 0, False

    def pass_by() -> None:
        nonlocal seen
        seen += inside
        if inside and seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            pass_by()
            return real(*words, **named)

        return call

    for name in WRITES:
        setattr(os, name, watched(getattr(os, name)))
    save = CheckpointManager.save

    def watched_save(self: Any, snapshot: Any, *rest: Any) -> None:
        nonlocal inside
        inside = snapshot.step == step
        for file in snapshot.files.values() if inside else ():
            for place, tensor in enumerate(file):
                if place % EVERY_TENSOR == EVERY_TENSOR // 2:
                    object.__setattr__(tensor, "fetch", watched(tensor.fetch))
        save(self, snapshot, *rest)
        if inside:
            print("moments:", seen)
        inside = False

    CheckpointManager.save = watched_save  # type: ignore[method-assign,assignment]


def save_in_place() -> None:
    """A worse engine: checkpoints are written under their final name, without a manifest of hashes."""
    from modelwright.engine import checkpoint

    def write_in_place(self: Any, snapshot: Any, best_step: int | None) -> None:
        folder = self._folder / f"step-{snapshot.step:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write(folder, snapshot)

    def trusting(folder: Path) -> str | None:
        return None

    checkpoint.CheckpointManager._save = write_in_place  # type: ignore[method-assign]
    checkpoint.verify = trusting


def unguarded() -> None:
    """A worse engine: no step is judged, and what is no number is written."""
    import torch

    from modelwright.engine import trainer
    from modelwright.engine.spike_guard import SpikeGuard

    SpikeGuard.check = lambda *words, **named: "ok"  # type: ignore[method-assign]
    trainer.is_bad = lambda summed, norm, limits: torch.zeros_like(summed, dtype=torch.bool)  # type: ignore[attr-defined]
    torch.isfinite = lambda tensor: torch.ones((), dtype=torch.bool)  # type: ignore[assignment]


def poison_weight(step: int, times: int = 1) -> None:
    """Turn one weight into no number before a step."""

    def poison(engine: Any) -> None:
        next(iter(engine.weights.values())).data.view(-1)[0] = float("nan")

    _before_step(step, times, poison)


def grow_weights(step: int, factor: float = 30.0) -> None:
    """Multiply every weight before a step, as a bad memory chip or a bad exchange would."""

    def grow(engine: Any) -> None:
        for weight in engine.weights.values():
            weight.data.mul_(factor)

    _before_step(step, 1, grow)


def bad_batch(step: int, factor: float = 50.0) -> None:
    """Multiply the loss of one step, and its gradient with it: a batch unlike all others."""
    left = 1

    def spoilt(engine: Any, do: Callable[[], Any]) -> Any:
        nonlocal left
        if engine.cursor.step + 1 != step or not left:
            return do()
        left -= 1
        healthy = engine._forward
        engine._forward = _Louder(healthy, factor)
        try:
            return do()
        finally:
            engine._forward = healthy

    _around_steps(spoilt)


def die_at_step(step: int) -> None:
    """Be killed when a step begins."""
    _before_step(step, 1, lambda engine: os.kill(os.getpid(), signal.SIGKILL))


def memory_for(rows: int) -> None:
    """Run out of the device's memory with more rows than these at once."""
    import torch

    from modelwright.tasks.sft import SftLoss

    forward = SftLoss.forward

    def cramped(self: Any, tokens: Any, *others: Any, **more: Any) -> Any:
        if self.training and len(tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, *others, **more)

    SftLoss.forward = cramped  # type: ignore[method-assign]


def eat_memory(step: int, megabytes: int) -> None:
    """Take so much memory when a step begins, and touch all of it."""
    held: list[bytearray] = []
    _before_step(step, 1, lambda engine: held.append(bytearray(os.urandom(1) * (megabytes << 20))))


def blind_to_full_disk() -> None:
    """Hide a full disk from the look before a save, so that the write itself meets it."""
    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: type(usage)(1 << 40, 0, 1 << 40)


def join_cgroup(path: str) -> None:
    """Enter a control group, whose limits then hold."""
    Path(path, "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")


def without_powers() -> None:
    """Stay the same user without root's powers, so that a folder that may not be written cannot be."""
    import ctypes

    version_3 = 0x20080522
    header, nothing = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None, use_errno=True).capset(header, nothing)


def wait_for_file(path: str) -> None:
    """Begin only once a file is there."""
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _Louder(inner: Any, factor: float) -> Any:
    """A module whose loss is so many times as large."""
    from torch import nn

    class Louder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs) * factor

    return Louder()


def _before_step(step: int, times: int, act: Callable[[Any], None]) -> None:
    """Act before a step, so many times: a run that goes back meets it again."""
    left = times

    def acting(engine: Any, do: Callable[[], Any]) -> Any:
        nonlocal left
        if engine.cursor.step + 1 == step and left > 0:
            left -= 1
            act(engine)
        return do()

    _around_steps(acting)


def _around_steps(around: Callable[[Any, Callable[[], Any]], Any]) -> None:
    from modelwright.engine.trainer import Engine

    inner = Engine._step

    def outer(self: Any, stop_requested: bool) -> Any:
        return around(self, lambda: inner(self, stop_requested))

    Engine._step = outer  # type: ignore[method-assign]
