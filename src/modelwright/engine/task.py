"""The interface between engine and task: micro-batches, Task protocol, Cursor, StepReport, host-device copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from modelwright.engine.spike_guard import Health


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass, and how many tokens they hold."""

    inputs: dict[str, Tensor]
    """Keyword arguments of the module's forward."""
    trained_tokens: int
    """Tokens (or images) in the loss."""
    tokens: int
    """Tokens (or images) without padding."""
    is_short: bool = False
    """Whether it has fewer rows than all others, in a last global batch of fewer rows."""

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the tokens or images, not of the numbers that describe them."""
        return [tensor.shape for tensor in self.inputs.values() if tensor.dim() > 1]

    def inputs_on(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on a device, or being copied there."""
        return {name: to_device(tensor, device) for name, tensor in self.inputs.items()}

    def to_device(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on a device, ahead of its use."""
        return replace(self, inputs=self.inputs_on(device))


@dataclass(frozen=True)
class RankBatch:
    """The micro-batches of one rank for one global batch."""

    step: int
    rows_hash: str
    """Hash of the row numbers of the global batch."""
    micro_batches: list[MicroBatch]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss."""
        return sum(micro_batch.trained_tokens for micro_batch in self.micro_batches)


class Task(Protocol):
    """Rows, batches and the loss of a training stage: all the engine knows about it; some of it has a default."""

    module: nn.Module
    """Its forward takes a micro-batch's inputs and returns sums over it: the loss, then other metrics."""
    metric_names: tuple[str, ...]
    """Names of those sums; the first is "loss". One named "b per c" is averaged over the sum c."""
    prefix_length: int = 0
    """Tokens that all rows begin with and that a micro-batch computes once."""
    padding_free: bool = False
    """Whether rows of any lengths share a micro-batch without padding; else those of similar length do."""

    @property
    def rows(self) -> int:
        """Training rows."""

    @property
    def held_out_rows(self) -> int:
        """Rows for evaluation."""

    def row_length(self, row: int) -> int:
        """Length of a training row: rows of similar length share a micro-batch, which saves padding."""

    def batch(self, rows: Sequence[int], step: int) -> MicroBatch:
        """Micro-batch of these training rows at a step; no rows give a blank one with no trained tokens."""

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Micro-batch of these held-out rows; no rows give a blank one."""

    @property
    def source_weights(self) -> tuple[tuple[int, float], ...]:
        """Rows and weight of each source where rows are drawn from several by weight."""
        return ()

    @property
    def epoch_rows(self) -> int:
        """Rows in one epoch, which a mixture may end before or after all its rows have come once."""
        return self.rows

    @property
    def held_out_sources(self) -> Mapping[str, int]:
        """Held-out rows of each source of a mixture, in the order of the rows; each is evaluated by itself too."""
        return {}

    def set_total_steps(self, steps: int) -> None:
        """Called with the number of steps before the first batch, for what depends on the progress."""
        return

    def set_global_batch(self, rows: Sequence[int]) -> None:
        """Called with all rows of a step before its micro-batches, for a loss with means over different counts."""
        return

    def time_trial_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Micro-batch for a time trial, which comes before anything is precomputed."""
        return self.batch(rows, 0)

    @property
    def fp8_check_metric(self) -> str:
        """The metric by which a time trial compares fp8 with bf16."""
        return self.metric_names[0]


def eval_metrics(sums: Mapping[str, float], count: float) -> dict[str, float]:
    """Metrics as means over the count; "b per c" is divided by the sum c, which is then no metric itself."""
    denominators = {name: name.partition(" per ")[2] for name in sums}
    return {
        f"eval_{name.partition(' per ')[0]}": total / (sums[denominators[name]] if denominators[name] else count)
        for name, total in sums.items()
        if name not in denominators.values()
    }


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, copied without blocking the host."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # copies of 64 KB and more from pageable memory synchronize with the device
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Cursor:
    """Progress of training."""

    step: int = 0
    """Global batches done."""
    tokens: int = 0
    """Tokens without padding."""
    trained_tokens: int = 0
    """Tokens in the loss."""


@dataclass(frozen=True)
class StepReport:
    """Metrics of one step."""

    step: int
    """Steps done, including this one."""
    epoch: float
    """Epochs done."""
    loss: float
    """Mean loss over the trained tokens of the global batch."""
    grad_norm: float
    """Gradient norm before clipping."""
    learning_rate: float
    """Learning rate of the step."""
    tokens: int
    """Tokens in the global batch, without padding."""
    batch_hash: str
    """Hash of the row numbers in the global batch: equal hashes mean equal data."""
    step_seconds: float
    """Wall-clock time."""
    data_wait_seconds: float
    """Part of it in which the device waited for the next batch."""
    compute_seconds_by_rank: tuple[float, ...]
    """Compute time of each rank before it waited for others."""
    health: Health
    """Whether the parameters were updated, and if not, why."""
    stop_requested: bool
    """Whether a rank was asked to stop."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The other sums of the task over the global batch, divided by its trained tokens."""
