"""Skip training steps whose loss or gradient norm spikes or is not finite."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from torch import Tensor

Health = Literal["ok", "non_finite", "spike", "overflow"]
"""Only an ok step moves the weights; an overflow is fp16's loss scale finding its size, and no illness."""
WINDOW = 64
"""Good steps remembered."""
MIN_HISTORY = 16
"""Good steps needed before a spike can be told from the noise of the start."""
LOSS_RATIO_WITH_GRAD = 1.5
"""A large gradient counts as a spike only with a loss so many times the usual one, the median."""
LOSS_RATIO = 4.0
"""A loss so many times the usual one is a spike whatever the gradient."""
BASELINE_FRACTION, MIN_BASELINE = 0.25, 1.0
"""The usual loss is at least this share of that of the beginning, or this: what is learnt by heart has next to none."""
RECOVERED_AFTER = 4
"""So many good steps in a row show that a spike was a hard batch; by default as many bad ones send the run back."""


def is_spike(loss: Any, grad_norm: Any, thresholds: Any) -> Any:
    """Whether a loss leaps, or rises with a gradient that is too long; of numbers or of tensors, in the same words."""
    max_loss, max_loss_with_grad, max_grad_norm = thresholds
    return (loss > max_loss) | ((grad_norm > max_grad_norm) & (loss > max_loss_with_grad))


def is_bad_step(loss_sum: Tensor, grad_norm: Tensor, thresholds: Tensor) -> Tensor:
    """What the guard will find of a step, found where it is computed; limits: how much is trained, then the guard's."""
    loss = loss_sum / thresholds[0]
    spike: Tensor = is_spike(loss, grad_norm, thresholds[1:])
    return ~(loss + grad_norm).isfinite() | spike


class SpikeGuard:
    """Remembers what loss and gradient are like, and says when a step is not like that.

    Where easy rows are known by heart, a hard one leaps, and to skip it would keep it out for ever. So a loss no higher
    than those of the beginning is skipped once: when good steps follow, the next batch like it is learnt from.
    """

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._grad_norms: deque[float] = deque(maxlen=WINDOW)
        self._initial_loss = 0.0
        """The median of the first losses."""
        self._suspect_loss, self._good_streak = 0.0, 0
        """The highest loss that may have been a hard batch's, and good steps in a row since a spike."""
        self._hard_losses: deque[float] = deque(maxlen=WINDOW)
        """Beside the losses: what a hard batch's was, where one was learnt from or good steps have shown it, else 0."""

    def check(self, loss: float, grad_norm: float, can_lower_loss_scale: bool = False) -> Health:
        """Say whether the weights may move; `scaled` says that the loss scale can still shrink."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._good_streak = 0
            return "overflow" if can_lower_loss_scale and math.isfinite(loss) else "non_finite"
        if is_spike(loss, grad_norm, self.thresholds()):
            self._good_streak = 0
            if loss <= LOSS_RATIO_WITH_GRAD * self._initial_loss:
                self._suspect_loss = max(self._suspect_loss, loss)
            return "spike"
        self._remember(loss, grad_norm)
        return "ok"

    def thresholds(self) -> tuple[float, float, float]:
        """What the next step is held against: see `is_spike`."""
        max_loss, max_loss_with_grad, max_grad_norm = self._base_thresholds()
        hardest = max(self._hard_losses, default=0.0)
        return max(max_loss, hardest), max(max_loss_with_grad, hardest), max_grad_norm

    def _base_thresholds(self) -> tuple[float, float, float]:
        """The same where no batch is hard."""
        if len(self._losses) < MIN_HISTORY:
            return math.inf, math.inf, math.inf
        baseline = max(median(self._losses), min(BASELINE_FRACTION * self._initial_loss, MIN_BASELINE))
        return LOSS_RATIO * baseline, LOSS_RATIO_WITH_GRAD * baseline, self._factor * median(self._grad_norms)

    def _remember(self, loss: float, grad_norm: float) -> None:
        hard_loss = loss if is_spike(loss, grad_norm, self._base_thresholds()) else 0.0
        self._good_streak += 1
        if self._good_streak == RECOVERED_AFTER:
            hard_loss, self._suspect_loss = max(hard_loss, self._suspect_loss), 0.0
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        self._hard_losses.append(hard_loss)
        if len(self._losses) == MIN_HISTORY and not self._initial_loss:
            self._initial_loss = median(self._losses)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run judges as the uninterrupted one would."""
        return {
            "losses": list(self._losses), "grad_norms": list(self._grad_norms), "hard_losses": list(self._hard_losses),
            "initial_loss": self._initial_loss, "suspect_loss": self._suspect_loss, "good_streak": self._good_streak,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what the checkpoint remembers."""
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._grad_norms = deque(state["grad_norms"], maxlen=WINDOW)
        self._hard_losses = deque(state.get("hard_losses", ()), maxlen=WINDOW)
        self._initial_loss = state.get(
            "initial_loss", median(self._losses) if len(self._losses) >= MIN_HISTORY else 0.0
        )
        self._suspect_loss, self._good_streak = state.get("suspect_loss", 0.0), state.get("good_streak", 0)
