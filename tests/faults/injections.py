"""Faults injected from inside a process: each function is called in the process before it starts.

Real faults come from outside (signals, full disks, a network link that goes down). What can only happen inside, such as
a kill between two system calls or a weight that becomes NaN, is injected by these.

`python -m tests.faults.injections RECIPE NODE_OPTIONS` launches one node whose steps have the length of real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

STEP_SECONDS = "FAULTS_STEP_SECONDS"
"""Environment variable: a process that imports this module with it set makes every step that much longer."""
WRITES = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
"""System calls that change what is on disk after a power cut or a kill."""
EVERY_TENSOR = 12
"""Inside a file, every so many tensors count as one more moment."""


def slow_steps(seconds: float, after: int = 0, before: float = 0.0) -> None:
    """Make steps long enough to be interrupted, from some step on; those before take `before` seconds longer."""

    def slow(engine: Any, step: Callable[[], Any]) -> Any:
        time.sleep(seconds if engine.cursor.step >= after else before)
        return step()

    wrap_step(slow)


def hold_after_step(step: int, path: str) -> None:
    """Wait after a step until a file exists."""

    def hold(engine: Any, next_step: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 240
        while engine.cursor.step >= step and not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return next_step()

    wrap_step(hold)


def kill_in_save(step: int, moment: int, signals: tuple[int, ...] = (signal.SIGKILL,)) -> None:
    """Be killed at one moment of the save after a step; moment 0 only counts them and prints how many there are."""
    from modelwright.engine.checkpoint import CheckpointManager

    count, inside = 0, False

    def at_moment() -> None:
        nonlocal count
        count += inside
        if inside and count == moment:
            for number in signals:
                os.kill(os.getpid(), number)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            at_moment()
            return real(*args, **kwargs)

        return call

    for name in WRITES:
        setattr(os, name, watched(getattr(os, name)))
    save = CheckpointManager.save

    def watched_save(self: Any, snapshot: Any, *rest: Any) -> None:
        nonlocal inside
        inside = snapshot.step == step
        for file in snapshot.files.values() if inside else ():
            for index, tensor in enumerate(file):
                if index % EVERY_TENSOR == EVERY_TENSOR // 2:
                    object.__setattr__(tensor, "materialize", watched(tensor.materialize))
        save(self, snapshot, *rest)
        if inside:
            print("moments:", count)
        inside = False

    CheckpointManager.save = watched_save  # type: ignore[method-assign,assignment]


def save_in_place() -> None:
    """A worse engine: checkpoints are written under their final name and never verified."""
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
    """A worse engine: no spike guard, and NaN weights are saved."""
    import torch

    from modelwright.engine.spike_guard import SpikeGuard

    SpikeGuard.check = lambda *args, **kwargs: "ok"  # type: ignore[method-assign]
    torch.isfinite = lambda tensor: torch.ones((), dtype=torch.bool)  # type: ignore[assignment]


def poison_weight(step: int, times: int = 1) -> None:
    """Set one weight to NaN before a step."""

    def poison(engine: Any) -> None:
        next(iter(engine.trainable_params.values())).data.view(-1)[0] = float("nan")

    _before_step(step, times, poison)


def grow_weights(step: int, factor: float = 30.0) -> None:
    """Multiply every weight before a step, as corrupted memory or a corrupted all-reduce would."""

    def grow(engine: Any) -> None:
        for weight in engine.trainable_params.values():
            weight.data.mul_(factor)

    _before_step(step, 1, grow)


def bad_batch(step: int, factor: float = 50.0) -> None:
    """Multiply the loss of one step, and its gradient with it: an outlier batch."""
    remaining = 1

    def spoil(engine: Any, next_step: Callable[[], Any]) -> Any:
        nonlocal remaining
        if engine.cursor.step + 1 != step or not remaining:
            return next_step()
        remaining -= 1
        healthy = engine._parallel_module
        engine._parallel_module = _scaled_loss(healthy, factor)
        try:
            return next_step()
        finally:
            engine._parallel_module = healthy

    wrap_step(spoil)


def die_at_step(step: int) -> None:
    """Be killed when a step begins."""
    _before_step(step, 1, lambda engine: os.kill(os.getpid(), signal.SIGKILL))


def memory_for(rows: int) -> None:
    """Raise an out-of-memory error in micro-batches of more rows than this."""
    import torch

    from modelwright.tasks.sft import SftLoss

    forward = SftLoss.forward

    def limited(self: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and len(tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, *args, **kwargs)

    SftLoss.forward = limited  # type: ignore[method-assign]


def eat_memory(step: int, megabytes: int) -> None:
    """Allocate so much memory when a step begins, and touch all of it."""
    blocks: list[bytearray] = []
    _before_step(step, 1, lambda engine: blocks.append(bytearray(os.urandom(1) * (megabytes << 20))))


def blind_to_full_disk() -> None:
    """Hide a full disk from the check before a save, so that the write itself fails."""
    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: type(usage)(1 << 40, 0, 1 << 40)


def join_cgroup(path: str) -> None:
    """Enter a control group with its limits."""
    Path(path, "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")


def drop_capabilities() -> None:
    """Drop all capabilities of root, so that file permissions apply."""
    import ctypes

    version_3 = 0x20080522
    header, nothing = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None, use_errno=True).capset(header, nothing)


def wait_for_file(path: str) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _scaled_loss(inner: Any, factor: float) -> Any:
    """A module that multiplies the loss of another."""
    from torch import nn

    class ScaledLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs) * factor

    return ScaledLoss()


def _before_step(step: int, times: int, act: Callable[[Any], None]) -> None:
    """Act before a step, so many times: a run that rolls back does that step again."""
    remaining = times

    def acting(engine: Any, next_step: Callable[[], Any]) -> Any:
        nonlocal remaining
        if engine.cursor.step + 1 == step and remaining > 0:
            remaining -= 1
            act(engine)
        return next_step()

    wrap_step(acting)


def wrap_step(around: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Replace `Engine._step` by `around(engine, step)`."""
    from modelwright.engine.trainer import Engine

    inner = Engine._step

    def outer(self: Any, stop_requested: bool) -> Any:
        return around(self, lambda: inner(self, stop_requested))

    Engine._step = outer  # type: ignore[method-assign]


Damage = Callable[[Path], None]


def flip_at(position: float) -> Damage:
    """Flip one bit of the byte at a relative position between 0 and 1."""

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(len(data) - 1, int(len(data) * position))] ^= 1
        path.write_bytes(data)

    return flip


def truncate(path: Path) -> None:
    """Cut off the second half."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Truncate to no bytes."""
    os.truncate(path, 0)


def delete(path: Path) -> None:
    """Delete the file."""
    path.unlink()


def launch_node() -> None:
    """Start this node's launcher with slow steps and leave with its exit code."""
    from modelwright.launch.config import NodeOptions, build_launch_config
    from modelwright.launch.supervisor import supervise
    from modelwright.recipe.load import load

    recipe, options = sys.argv[1], NodeOptions(**json.loads(sys.argv[2]))
    os.environ[STEP_SECONDS] = "0.25"
    config = build_launch_config(load(recipe), ("run", recipe, "--log-format", "plain"), options, 3)
    code, message = supervise(
        replace(config, forkserver_preload=(*config.forkserver_preload, "tests.faults.injections"))
    )
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    launch_node()
elif os.environ.get(STEP_SECONDS):
    slow_steps(float(os.environ[STEP_SECONDS]))
