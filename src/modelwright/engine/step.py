"""Where training stands, and what one step did: the words in which the loop speaks to its caller."""

from __future__ import annotations

from dataclasses import dataclass

from modelwright.engine.guard import Health


@dataclass(frozen=True)
class Cursor:
    """Where training stands."""

    step: int = 0
    """Global batches taken."""
    tokens: int = 0
    """Tokens seen, padding not counted."""
    trained_tokens: int = 0
    """Tokens learnt from."""


@dataclass(frozen=True)
class StepReport:
    """What one step did."""

    step: int
    """Steps done, this one counted."""
    epoch: float
    """Times the rows have been seen."""
    loss: float
    """Mean loss over the trained tokens of the global batch."""
    grad_norm: float
    """Length of the gradient before clipping."""
    learning_rate: float
    """The rate used."""
    tokens: int
    """Tokens in the global batch, padding not counted."""
    batch: str
    """Hash of the row numbers in the global batch: two runs with equal hashes saw equal data."""
    seconds: float
    """Time it took."""
    waited: float
    """Of that, how long the device stood still until the next batch was prepared."""
    seconds_alone: tuple[float, ...]
    """For each rank, the time it worked before it had to wait for others."""
    health: Health
    """Whether the weights moved, and if not, why."""
    stop_asked: bool
    """Whether some rank was asked to stop."""
