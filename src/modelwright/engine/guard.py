"""Judge every step before the weights move: a bad one is skipped, and never reaches a checkpoint."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from torch import Tensor

Health = Literal["ok", "not finite", "spike", "overflow"]
"""Only an ok step moves the weights; an overflow is fp16's loss scale finding its size, and no illness."""

WINDOW = 64
"""Good steps remembered."""
FEWEST = 16
"""Good steps needed before a spike can be told from the noise of the start."""
LOSS_RISE = 1.5
"""A large gradient counts as a spike only with a loss so many times the usual one, the median."""
LOSS_LEAP = 4.0
"""A loss so many times the usual one is a spike whatever the gradient."""
LEAST_SHARE, LEAST_LOSS = 0.25, 1.0
"""The usual loss is at least this share of that of the beginning, or this: what is learnt by heart has next to none."""
WELL = 4
"""So many good steps in a row show that a spike was a hard batch; by default as many bad ones send the run back."""


def is_spike(loss: Any, norm: Any, limits: Any) -> Any:
    """Whether a loss leaps, or rises with a gradient that is too long; of numbers or of tensors, in the same words."""
    leap, rise, longest = limits
    return (loss > leap) | ((norm > longest) & (loss > rise))


def is_bad(summed: Tensor, norm: Tensor, limits: Tensor) -> Tensor:
    """What the guard will find of a step, found where it is computed; limits: how much is trained, then the guard's."""
    loss = summed / limits[0]
    spike: Tensor = is_spike(loss, norm, limits[1:])
    return ~(loss + norm).isfinite() | spike


class Guard:
    """Remembers what loss and gradient are like, and says when a step is not like that.

    Where easy rows are known by heart, a hard one leaps, and to skip it would keep it out for ever. So a loss no higher
    than those of the beginning is skipped once: when good steps follow, the next batch like it is learnt from.
    """

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._began = 0.0
        """The median of the first losses."""
        self._doubted, self._good = 0.0, 0
        """The highest loss that may have been a hard batch's, and good steps in a row since a spike."""
        self._hard: deque[float] = deque(maxlen=WINDOW)
        """Beside the losses: what a hard batch's was, where one was learnt from or good steps have shown it, else 0."""

    def judge(self, loss: float, norm: float, scaled: bool = False) -> Health:
        """Say whether the weights may move; `scaled` says that the loss scale can still shrink."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._good = 0
            return "overflow" if scaled and math.isfinite(loss) else "not finite"
        if is_spike(loss, norm, self.limits()):
            self._good = 0
            if loss <= LOSS_RISE * self._began:
                self._doubted = max(self._doubted, loss)
            return "spike"
        self._remember(loss, norm)
        return "ok"

    def limits(self) -> tuple[float, float, float]:
        """What the next step is held against: see `is_spike`."""
        leap, rise, longest = self._usual_limits()
        known = max(self._hard, default=0.0)
        return max(leap, known), max(rise, known), longest

    def _usual_limits(self) -> tuple[float, float, float]:
        """The same where no batch is hard."""
        if len(self._losses) < FEWEST:
            return math.inf, math.inf, math.inf
        usual = max(median(self._losses), min(LEAST_SHARE * self._began, LEAST_LOSS))
        return LOSS_LEAP * usual, LOSS_RISE * usual, self._factor * median(self._norms)

    def _remember(self, loss: float, norm: float) -> None:
        hard = loss if is_spike(loss, norm, self._usual_limits()) else 0.0
        self._good += 1
        if self._good == WELL:
            hard, self._doubted = max(hard, self._doubted), 0.0
        self._losses.append(loss)
        self._norms.append(norm)
        self._hard.append(hard)
        if len(self._losses) == FEWEST and not self._began:
            self._began = median(self._losses)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run judges as the uninterrupted one would."""
        return {
            "losses": list(self._losses), "norms": list(self._norms), "hard": list(self._hard),
            "began": self._began, "doubted": self._doubted, "good": self._good,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Remember what the checkpoint remembers."""
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self._hard = deque(state.get("hard", ()), maxlen=WINDOW)
        self._began = state.get("began", median(self._losses) if len(self._losses) >= FEWEST else 0.0)
        self._doubted, self._good = state.get("doubted", 0.0), state.get("good", 0)
