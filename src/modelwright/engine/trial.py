"""Try fp8 against bf16 on real batches before the first step: it stays only where it is faster and says the same."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from modelwright.engine.loop import Engine

GAIN = 1.05
"""How many times as fast as bf16 it must be at least: less is not worth the digits."""
TOLERANCE = 0.005
"""How far its loss may be off, as a share of that of bf16: what we ask of every arithmetic over 300 steps."""


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


@dataclass(frozen=True)
class Way:
    """How one arithmetic did."""

    seconds: float
    """Of the fastest time through the batches, added up over the ranks."""
    loss: float
    """Summed over them."""


def judge(plain: Way, eight: Way) -> Trial:
    """Hold fp8 against bf16."""
    speedup, gap = plain.seconds / eight.seconds, abs(eight.loss / plain.loss - 1) if plain.loss else math.nan
    fast, close = speedup >= GAIN, gap <= TOLERANCE
    found = f"fp8 is {speedup:.2f} × as fast as bf16 here (needs {GAIN:g})"
    found += f", its loss {gap:.2%} off (at most {TOLERANCE:.1%})" if math.isfinite(gap) else ", its loss is no number"
    why = f"fp8 is kept: {found}" if fast and close else f"bf16 instead of fp8: {found}"
    return Trial(fast and close, why, round(speedup, 3), gap if math.isfinite(gap) else None)


def try_fp8(engine: Engine) -> Trial:
    """Go through a few batches in both, and leave the engine in the better one, as if it had never known the other."""
    plain = measured(engine, "bf16")
    try:
        eight = measured(engine, "fp8")
    except Exception as error:  # what the card, torchao or the compiler does not know; bf16 has just been seen to go
        if engine.world.size > 1 or isinstance(error, torch.OutOfMemoryError):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        found = Trial(False, f"bf16 instead of fp8: fp8 failed here ({first})")
    else:
        found = Trial(**engine.world.first(lambda: asdict(judge(plain, eight))))
    if not found.kept:  # else it computes so already, and no layer need be compiled a third time
        engine.compute_in("bf16")
    return found


def measured(engine: Engine, precision: str) -> Way:
    """How an arithmetic does on the first batches, the same on every rank."""
    engine.compute_in(precision)
    sums, seconds = engine.rehearse()
    names = engine.task.measures
    loss = sums[names.index(getattr(engine.task, "compared", names[0]))]
    return Way(*engine.world.sum(seconds, loss))
