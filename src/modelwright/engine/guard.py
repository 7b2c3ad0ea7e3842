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
"""A large gradient counts as a spike only with a loss so many times its median."""
LOSS_LEAP = 4.0
"""A loss so many times its median is a spike whatever the gradient."""
LEAST_LOSS = 1.0
"""A median below counts as this: where rows are learnt by heart, one that is not yet learnt leaps and is no illness."""


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
    """Remembers what loss and gradient are like, and says when a step is not like that."""

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._highest = 0.0
        """The highest loss that was ever learnt from."""
        self._doubted: list[float] = []
        """Losses no higher than that, skipped since the last good step."""

    def judge(self, loss: float, norm: float, scaled: bool = False) -> Health:
        """Say whether the weights may move; `scaled` says that the loss scale can still shrink.

        Good steps are remembered. So is a loss that was skipped, once a good step follows: that was a hard batch, and
        the next one like it is learnt from. Otherwise easy rows would keep hard ones out for ever.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "overflow" if scaled and math.isfinite(loss) else "not finite"
        if is_spike(loss, norm, self.limits()):
            if loss <= self._highest:
                self._doubted.append(loss)
            return "spike"
        self._highest = max(self._highest, loss)
        self._losses.extend((*self._doubted, loss))
        self._doubted.clear()
        self._norms.append(norm)
        return "ok"

    def limits(self) -> tuple[float, float, float]:
        """What the next step is held against: see `is_spike`."""
        if len(self._losses) < FEWEST:
            return math.inf, math.inf, math.inf
        usual_loss, usual_norm = max(median(self._losses), LEAST_LOSS), median(self._norms)
        known = max(self._losses)  # what was as high of late was no illness
        return max(LOSS_LEAP * usual_loss, known), max(LOSS_RISE * usual_loss, known), self._factor * usual_norm

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run judges as the uninterrupted one would."""
        return {"losses": list(self._losses), "norms": list(self._norms), "highest": self._highest}

    def restore(self, state: dict[str, Any]) -> None:
        """Remember what the checkpoint remembers."""
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self._highest = state.get("highest", max(self._losses, default=0.0))
        self._doubted.clear()
