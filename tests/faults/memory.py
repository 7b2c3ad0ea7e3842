"""Memory that runs out: of the device, and of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.fault import Bench, Fault, Outcome, Skipped, inject, need_root
from tests.faults.rig import steps_of, told, trace

LIMIT = Path("/sys/fs/cgroup/memory")
MOST_DIFFERENCE = 1e-4
"""How far losses may lie apart when the same batch is added up in smaller bites."""


def device_memory(bench: Bench) -> Outcome:
    """R22: the device takes one row at once, though two were planned."""
    whole, folder = bench.reference(), bench.place("cramped")
    code, output = bench.run(bench.recipe(folder), first=[inject("memory_for", rows=1)])
    if code:
        return Outcome(f"exit {code}", False, notes=(output[-300:],))
    steps = steps_of(folder / "run")
    kept = sum(steps[step]["batch_hash"] == batch for step, (_, batch, *_) in whole["steps"].items())
    apart = max(abs(steps[step]["loss"] - loss) for step, (loss, *_) in whole["steps"].items())
    said = any("do not fit the memory" in note["message"] for note in told(folder / "run", "note"))
    lost = len(told(folder / "run", "step")) - len(whole["steps"])
    figure = f"{lost} steps lost, {kept} of {len(whole['steps'])} batches kept, losses {apart:.1g} apart"
    met = lost == 0 and kept == len(whole["steps"]) and apart < MOST_DIFFERENCE and said
    return Outcome(figure, met, {"steps_lost": lost, "batches_kept": kept, "largest_loss_difference": apart})


def machine_memory(bench: Bench) -> Outcome:
    """R29: the kernel ends the run in a control group whose memory is full; the same command goes on."""
    whole, folder = bench.reference(), bench.place("oom")
    recipe = bench.recipe(folder)
    with limited(1200) as group:
        first = [inject("join_cgroup", path=str(group)), inject("eat_memory", step=8, megabytes=3000)]
        code, output = bench.run(recipe, first=first)
        killed = "oom_kill 0" not in (group / "memory.oom_control").read_text(encoding="utf-8")
    again, later = bench.run(recipe)
    same = again == 0 and trace(folder / "run") == whole
    by = "by the kernel" if killed else "not by the kernel"
    figure = f"ended with {code} {by}, then {'finished bit-identical' if same else f'exit {again}'}"
    met = code == -9 and killed and same
    return Outcome(
        figure, met, {"killed_by_kernel": killed, "identical": same}, None, () if met else (output[-200:], later[-200:])
    )


@contextmanager
def limited(megabytes: int) -> Iterator[Path]:
    """A control group with so much memory; skips where there can be none."""
    need_root("control groups")
    group = LIMIT / f"modelwright-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(megabytes << 20), encoding="utf-8")
    except OSError as error:
        raise Skipped(f"control groups cannot be made here ({error.strerror})") from None
    try:
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


FAULTS = (
    Fault("R22", "the device runs out of memory", "an out-of-memory error with more than one row at once",
          "0 steps lost, the global batch kept", "HF Trainer: the run dies (measured Nov 2026)", device_memory, 3),
    Fault("R29", "the machine runs out of memory", "control group of 1.2 GB, 3 GB taken at step 8",
          "ended by the kernel, resumed bit-identical", "–", machine_memory, 5),
)  # fmt: skip
