"""Time fp8 against bf16 on the first batches and keep fp8 only where it is faster and its loss agrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from modelwright.engine.trainer import Engine
from modelwright.errors import first_line

MIN_SPEEDUP = 1.05
"""How many times as fast as bf16 it must be at least: less is not worth the digits."""
MAX_LOSS_DIFFERENCE = 0.005
"""How far its loss may be off, as a share of that of bf16: what we ask of every arithmetic over 300 steps."""
SCALING_NAMES = {"tensorwise": "fp8", "rowwise": "fp8 rowwise"}


@dataclass(frozen=True)
class Fp8Trial:
    """What came of it."""

    use_fp8: bool
    """Whether fp8 is computed in."""
    reason: str
    """The reason in a line."""
    speedup: float | None = None
    """How many times as fast as bf16 it was."""
    loss_difference: float | None = None
    """How far its loss was off, as a share of that of bf16."""
    scaling: str = "tensorwise"
    """What had a scale of its own: each matrix, or each row of it."""


@dataclass(frozen=True)
class TimedPass:
    """How one arithmetic did."""

    seconds: float
    """Of the fastest time through the batches, added up over the ranks."""
    loss: float
    """Summed over them."""


def decide(bf16: TimedPass, fp8: TimedPass, scaling: str) -> Fp8Trial:
    """Hold fp8 against bf16."""
    speedup, loss_difference = bf16.seconds / fp8.seconds, abs(fp8.loss / bf16.loss - 1) if bf16.loss else math.nan
    is_faster, is_close = speedup >= MIN_SPEEDUP, loss_difference <= MAX_LOSS_DIFFERENCE
    result = f"{SCALING_NAMES[scaling]} is {speedup:.2f} × as fast as bf16 here (needs {MIN_SPEEDUP:g})"
    result += (
        f", its loss {loss_difference:.2%} off (at most {MAX_LOSS_DIFFERENCE:.1%})"
        if math.isfinite(loss_difference)
        else ", its loss is no number"
    )
    reason = f"fp8 is kept: {result}" if is_faster and is_close else f"bf16 instead of fp8: {result}"
    return Fp8Trial(
        is_faster and is_close,
        reason,
        round(speedup, 3),
        loss_difference if math.isfinite(loss_difference) else None,
        scaling,
    )


def run_fp8_trial(engine: Engine, scalings: Sequence[str]) -> Fp8Trial:
    """Go through a few batches in both, and leave the engine in the better one, as if it had never known the other.

    A scale for each row is closer and slower than one for each matrix: a scaling is followed by the next where it is
    fast and not close enough.
    """
    first = scalings[0]
    bf16 = time_precision(engine, "bf16", first)
    trial = _try_scaling(engine, bf16, first)
    for scaling in scalings[1:]:
        if not trial.use_fp8 and (trial.speedup or 0.0) >= MIN_SPEEDUP:
            trial = _try_scaling(engine, bf16, scaling)
            trial = replace(trial, reason=f"{trial.reason}; with tensorwise scaling its loss was too far off")
    if not trial.use_fp8:  # else it computes so already, and no layer need be compiled once more
        engine.set_precision("bf16", first)
    return trial


def _try_scaling(engine: Engine, bf16: TimedPass, scaling: str) -> Fp8Trial:
    try:
        fp8 = time_precision(engine, "fp8", scaling)
    except Exception as error:  # what the card, torchao or the compiler does not know; bf16 has just been seen to go
        if engine.world.size > 1 or isinstance(error, torch.OutOfMemoryError):
            raise
        engine.reset_step_state()  # half-made gradients are no part of the first step
        return Fp8Trial(False, f"bf16 instead of fp8: fp8 failed here ({first_line(error)[:160]})", scaling=scaling)
    return Fp8Trial(**engine.world.on_rank0_broadcast(lambda: asdict(decide(bf16, fp8, scaling))))


def time_precision(engine: Engine, precision: str, scaling: str) -> TimedPass:
    """How an arithmetic does on the first batches, the same on every rank."""
    engine.set_precision(precision, scaling)
    sums, seconds = engine.time_trial()
    metric_names = engine.task.metric_names
    loss = sums[metric_names.index(getattr(engine.task, "fp8_check_metric", metric_names[0]))]
    return TimedPass(*engine.world.all_reduce_sum(seconds, loss))
