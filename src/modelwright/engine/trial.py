"""Try fp8 against bf16 on real batches before the first step: it stays only where it is faster and says the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from modelwright.engine.loop import Engine
from modelwright.errors import first_line

GAIN = 1.05
"""How many times as fast as bf16 it must be at least: less is not worth the digits."""
TOLERANCE = 0.005
"""How far its loss may be off, as a share of that of bf16: what we ask of every arithmetic over 300 steps."""
NAMES = {"tensorwise": "fp8", "rowwise": "fp8 with a scale for each row"}


@dataclass(frozen=True)
class Trial:
    """What came of it."""

    kept: bool
    """Whether fp8 is computed in."""
    why: str
    """The reason in a line."""
    speedup: float | None = None
    """How many times as fast as bf16 it was."""
    gap: float | None = None
    """How far its loss was off, as a share of that of bf16."""
    scaling: str = "tensorwise"
    """What had a scale of its own: each matrix, or each row of it."""


@dataclass(frozen=True)
class Way:
    """How one arithmetic did."""

    seconds: float
    """Of the fastest time through the batches, added up over the ranks."""
    loss: float
    """Summed over them."""


def judge(plain: Way, eight: Way, scaling: str) -> Trial:
    """Hold fp8 against bf16."""
    speedup, gap = plain.seconds / eight.seconds, abs(eight.loss / plain.loss - 1) if plain.loss else math.nan
    fast, close = speedup >= GAIN, gap <= TOLERANCE
    found = f"{NAMES[scaling]} is {speedup:.2f} × as fast as bf16 here (needs {GAIN:g})"
    found += f", its loss {gap:.2%} off (at most {TOLERANCE:.1%})" if math.isfinite(gap) else ", its loss is no number"
    why = f"fp8 is kept: {found}" if fast and close else f"bf16 instead of fp8: {found}"
    return Trial(fast and close, why, round(speedup, 3), gap if math.isfinite(gap) else None, scaling)


def try_fp8(engine: Engine, scalings: Sequence[str]) -> Trial:
    """Go through a few batches in both, and leave the engine in the better one, as if it had never known the other.

    A scale for each row is closer and slower than one for each matrix: a scaling is followed by the next where it is
    fast and not close enough.
    """
    first = scalings[0]
    plain = measured(engine, "bf16", first)
    found = _tried(engine, plain, first)
    for scaling in scalings[1:]:
        if not found.kept and (found.speedup or 0.0) >= GAIN:
            found = _tried(engine, plain, scaling)
            found = replace(found, why=f"{found.why}; with a scale for each matrix its loss was too far off")
    if not found.kept:  # else it computes so already, and no layer need be compiled once more
        engine.compute_in("bf16", first)
    return found


def _tried(engine: Engine, plain: Way, scaling: str) -> Trial:
    try:
        eight = measured(engine, "fp8", scaling)
    except Exception as error:  # what the card, torchao or the compiler does not know; bf16 has just been seen to go
        if engine.world.size > 1 or isinstance(error, torch.OutOfMemoryError):
            raise
        engine.begin_anew()  # half-made gradients are no part of the first step
        return Trial(False, f"bf16 instead of fp8: fp8 failed here ({first_line(error)[:160]})", scaling=scaling)
    return Trial(**engine.world.first(lambda: asdict(judge(plain, eight, scaling))))


def measured(engine: Engine, precision: str, scaling: str) -> Way:
    """How an arithmetic does on the first batches, the same on every rank."""
    engine.compute_in(precision, scaling)
    sums, seconds = engine.rehearse()
    names = engine.task.measures
    loss = sums[names.index(getattr(engine.task, "compared", names[0]))]
    return Way(*engine.world.sum(seconds, loss))
