"""Skip training steps whose loss or gradient norm spikes or is not finite."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, Literal

Health = Literal["ok", "non_finite", "spike", "overflow"]
"""Only an ok step updates the parameters; an overflow is normal while fp16's loss scale adapts."""
WINDOW = 64
"""Good steps in the history."""
MIN_HISTORY = 16
"""Good steps needed before spikes are detected."""
LOSS_RATIO_WITH_GRAD = 1.5
"""A large gradient norm is a spike only with a loss this many times the median."""
LOSS_RATIO = 4.0
"""A loss this many times the median is a spike whatever the gradient norm."""
BASELINE_FRACTION, MIN_BASELINE = 0.25, 1.0
"""The baseline is at least this fraction of the initial loss, or this: memorized data has a loss near zero."""
RECOVERED_AFTER = 4
"""This many good steps in a row show that a spike was a hard batch; as many bad ones roll back by default."""


def is_spike(loss: float, grad_norm: float, thresholds: tuple[float, float, float]) -> bool:
    """Whether a loss spikes, or rises with a large gradient norm."""
    max_loss, max_loss_with_grad, max_grad_norm = thresholds
    return loss > max_loss or (grad_norm > max_grad_norm and loss > max_loss_with_grad)


class SpikeGuard:
    """Keeps recent losses and gradient norms and detects steps that deviate.

    Once easy rows are memorized, a hard one spikes, and skipping it always would exclude it forever. So a loss no
    higher than the initial one is skipped once: if good steps follow, the next batch like it is trained on.
    """

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._grad_norms: deque[float] = deque(maxlen=WINDOW)
        self._initial_loss = 0.0
        """Median of the first losses."""
        self._suspect_loss, self._good_streak = 0.0, 0
        """Highest skipped loss that may be a hard batch, and good steps in a row since a spike."""
        self._hard_losses: deque[float] = deque(maxlen=WINDOW)
        """Parallel to the losses: the loss of a hard batch that was accepted or confirmed, else 0."""

    def check(self, loss: float, grad_norm: float, can_lower_loss_scale: bool = False) -> Health:
        """Whether to update the parameters; with can_lower_loss_scale a non-finite gradient is an overflow."""
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
        """Limits of the next step, the arguments of `is_spike`."""
        max_loss, max_loss_with_grad, max_grad_norm = self._base_thresholds()
        hardest = max(self._hard_losses, default=0.0)
        return max(max_loss, hardest), max(max_loss_with_grad, hardest), max_grad_norm

    def _base_thresholds(self) -> tuple[float, float, float]:
        """The same without hard batches."""
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
        """State for a checkpoint, so that a resumed run decides as the uninterrupted one would."""
        return {
            "losses": list(self._losses), "grad_norms": list(self._grad_norms), "hard_losses": list(self._hard_losses),
            "initial_loss": self._initial_loss, "suspect_loss": self._suspect_loss, "good_streak": self._good_streak,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._grad_norms = deque(state["grad_norms"], maxlen=WINDOW)
        self._hard_losses = deque(state.get("hard_losses", ()), maxlen=WINDOW)
        known_loss = median(self._losses) if len(self._losses) >= MIN_HISTORY else 0.0
        self._initial_loss = state.get("initial_loss", known_loss)
        self._suspect_loss, self._good_streak = state.get("suspect_loss", 0.0), state.get("good_streak", 0)
