"""NaN weights, loss spikes, corrupted weights, and memory that runs out on the device and in the machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.faults import hf_trainer
from tests.faults.context import (
    FaultContext,
    FaultResult,
    FaultRow,
    FaultSkipped,
    count_text,
    exit_codes,
    inject,
    require_root,
)
from tests.faults.fork_server import RemoteCall, events_of, run_fingerprint, steps_of

LONG: dict[str, Any] = {"max_steps": 30, "save_steps": 3, "eval_steps": 30}
"""Long enough for the guard to know what is usual."""
TOLERANCE = 0.05
"""How far from the clean run's loss a run may end."""


def nan_weight(context: FaultContext) -> FaultResult:
    """R10: a weight that turns into no number at a random step, and does so again after rolling back."""
    rng, count = context.rng("R10"), context.num_trials(4, 1)
    slowest, bad_files, opened, codes, notes = 0, 0, 0, [], []
    for _ in range(count):
        step, folder = rng.randint(4, 11), context.fresh_folder("nan")
        gate = ["--set", "gates={sft: {eval_loss: {at_most: 99}}}"]
        code, output = context.run(context.recipe(folder), *gate, first=[inject("poison_weight", step=step, times=99)])
        codes.append(code)
        skipped = [event["step"] for event in events_of(folder / "run", "step_skipped")]
        slowest = max(slowest, (skipped[0] - step + 1) if skipped else 999)
        bad_files += files_with_nan(context, folder / "run")
        opened += _is_open(folder / "run/gates/sft.json") or (folder / "run/best_model").exists()
        if code != 76:
            notes.append(f"seed {context.seed}, step {step}: exit {code}: {output.strip()[-200:]}")
    figure = f"noticed within {slowest} step (exit {exit_codes(codes)}); {bad_files} files with NaN"
    met = slowest <= 1 and not bad_files and not opened and set(codes) == {76}
    numbers = {"trials": count, "steps_to_react": slowest, "files_with_nan": bad_files, "gates_opened": opened}
    return FaultResult(figure, met, numbers, hf_trainer.nan_weight(context), tuple(notes))


def spikes(context: FaultContext) -> FaultResult:
    """R11: one outlier batch, or all weights × 30; the final loss compared with that of the reference run."""
    clean = context.reference(**LONG)["metrics"]["eval_loss"]
    rng, count = context.rng("R11"), context.num_trials(4, 1)
    kinds = [("one batch with 50 times the loss", "bad_batch"), ("all weights 30 times as large", "grow_weights")]
    good, of, farthest, notes = 0, 0, 0.0, []
    for kind, function in kinds:
        for _ in range(count):
            step, folder = rng.randint(18, 29), context.fresh_folder("spike")
            code, output = context.run(context.recipe(folder, **LONG), first=[inject(function, step=step)])
            of += 1
            loss = _eval_loss(folder / "run") if code == 0 else None
            distance = abs(loss - clean) / clean if loss is not None else 9.99
            farthest = max(farthest, distance)
            good += distance <= TOLERANCE
            if distance > TOLERANCE:
                notes.append(f"seed {context.seed}, {kind} at step {step}: exit {code}, loss {loss}: {output[-200:]}")
    figure = count_text(good, of, f"final losses within {TOLERANCE:.0%} of the fault-free loss")
    numbers = {"trials": of, "good": good, "farthest": round(farthest, 5)}
    return FaultResult(figure, good == of, numbers, None, tuple(notes))


def files_with_nan(context: FaultContext, run: Path) -> int:
    """Safetensors files of a run that hold a number that is none; read in another process, since it wants torch."""
    answer = run / "not-finite.json"
    call = RemoteCall("tests.faults.numerics", "write_nan_file_count", (str(run), str(answer)))
    process = context.fork_server.fork(call, run)
    if process.wait():
        raise RuntimeError(process.output)
    return int(json.loads(answer.read_text(encoding="utf-8")))


def write_nan_file_count(run: str, answer: str) -> None:
    """Count the files and write the number down."""
    import torch
    from safetensors.torch import load_file

    files = list(Path(run).rglob("*.safetensors"))
    bad = [path for path in files if not all(bool(torch.isfinite(t).all()) for t in load_file(path).values())]
    Path(answer).write_text(json.dumps(len(bad)), encoding="utf-8")


def _eval_loss(run: Path) -> float:
    result = json.loads((run / "stages/sft/result.json").read_text(encoding="utf-8"))
    return float(result["metrics"]["eval_loss"])


def _is_open(gate: Path) -> bool:
    return gate.exists() and bool(json.loads(gate.read_text(encoding="utf-8"))["open"])


CGROUPS = Path("/sys/fs/cgroup/memory")
MAX_LOSS_DIFFERENCE = 1e-4
"""How far losses may lie apart when the same batch is added up in smaller micro-batches."""


def device_memory(context: FaultContext) -> FaultResult:
    """R22: the device takes one row at once, though two were planned."""
    reference, folder = context.reference(), context.fresh_folder("low_memory")
    code, output = context.run(context.recipe(folder), first=[inject("memory_for", rows=1)])
    if code:
        return FaultResult(f"exit {code}", False, notes=(output[-300:],))
    steps = steps_of(folder / "run")
    same_batches = sum(steps[step]["batch_hash"] == batch for step, (_, batch, *_) in reference["steps"].items())
    largest = max(abs(steps[step]["loss"] - loss) for step, (loss, *_) in reference["steps"].items())
    reported = any("runs out of memory" in event["reason"] for event in events_of(folder / "run", "plan_revised"))
    lost = len(events_of(folder / "run", "step")) - len(reference["steps"])
    batches = f"{same_batches} of {len(reference['steps'])} batches unchanged"
    figure = f"{lost} steps lost; {batches}; losses differ by at most {largest:.1g}"
    met = lost == 0 and same_batches == len(reference["steps"]) and largest < MAX_LOSS_DIFFERENCE and reported
    return FaultResult(
        figure, met, {"steps_lost": lost, "batches_kept": same_batches, "largest_loss_difference": largest}
    )


def machine_memory(context: FaultContext) -> FaultResult:
    """R29: the kernel's OOM killer ends the run in a control group; the same command resumes."""
    reference, folder = context.reference(), context.fresh_folder("oom")
    recipe = context.recipe(folder)
    with memory_limit(1200) as group:
        first = [inject("join_cgroup", path=str(group)), inject("eat_memory", step=8, megabytes=3000)]
        code, output = context.run(recipe, first=first)
        killed = "oom_kill 0" not in (group / "memory.oom_control").read_text(encoding="utf-8")
    again, later = context.run(recipe)
    same = again == 0 and run_fingerprint(folder / "run") == reference
    by = "by the kernel" if killed else "not by the kernel"
    figure = f"killed {by} (exit {code}); {'bit-identical after resuming' if same else f'then exit {again}'}"
    met = code == -9 and killed and same
    return FaultResult(
        figure, met, {"killed_by_kernel": killed, "identical": same}, None, () if met else (output[-200:], later[-200:])
    )


@contextmanager
def memory_limit(megabytes: int) -> Iterator[Path]:
    """A control group with so much memory; skips where there can be none."""
    require_root("control groups")
    group = CGROUPS / f"modelwright-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(megabytes << 20), encoding="utf-8")
    except OSError as error:
        raise FaultSkipped(f"control groups cannot be made here ({error.strerror})") from None
    try:
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


FAULTS = (
    FaultRow("R10", "a weight turns into NaN", "one weight set to NaN before a random step, again after rolling back",
             "noticed within 1 step, 0 NaN checkpoints, no gate opens",
             "HF Trainer: never noticed, exit 0, all tensors NaN, a lower loss (measured Nov 2026)", nan_weight, 8),
    FaultRow("R11", "a loss spike, or all weights × 30", "loss × 50 in one batch; all weights × 30, at a random step",
             "100 % end within 5 % of the clean loss",
             "HF Trainer: final loss 70 times the fault-free loss (measured Nov 2026)", spikes, 25),
    FaultRow("R22", "out-of-memory error in a step (simulated)",
             "an out-of-memory error with more than one row at once", "0 steps lost, the global batch kept",
             "HF Trainer: the run ends with the error (measured Nov 2026)", device_memory, 3),
    FaultRow("R29", "the machine runs out of memory", "control group of 1.2 GB, 3 GB taken at step 8",
             "ended by the kernel, resumed bit-identical", "–", machine_memory, 5),
)  # fmt: skip
