"""The interface between the engine and a task: micro-batches, the Task protocol, the cursor, the step report, and host-device copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from modelwright.engine.spike_guard import Health


@dataclass(frozen=True)
class MicroBatch:
    """Tensors for one forward pass, and how much they hold."""

    inputs: dict[str, Tensor]
    """What the module's forward takes, by name."""
    trained_tokens: int
    """Tokens (or images) that count in the loss."""
    tokens: int
    """Tokens (or images) that are no padding."""

    def inputs_on(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on the device that computes, or on their way there."""
        return {name: to_device(tensor, device) for name, tensor in self.inputs.items()}

    def to_device(self, device: torch.device) -> MicroBatch:
        """The same batch there, ahead of its use."""
        return replace(self, inputs=self.inputs_on(device))


@dataclass(frozen=True)
class RankBatch:
    """A rank's share of one global batch, ready for the device."""

    step: int
    """Which batch."""
    rows_hash: str
    """Hash of the whole global batch's row numbers."""
    micro_batches: list[MicroBatch]
    """This rank's micro-batches."""

    @property
    def tokens(self) -> int:
        """Tokens in the share, padding not counted."""
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)

    @property
    def trained_tokens(self) -> int:
        """Tokens in the share that are learnt from."""
        return sum(micro_batch.trained_tokens for micro_batch in self.micro_batches)


class Task(Protocol):
    """What is learnt: rows, batches and the loss. The loop knows nothing else."""

    module: nn.Module
    """Its forward takes a batch's inputs and returns sums over what is trained: the loss, then other measures."""
    metric_names: tuple[str, ...]
    """What those sums are called; the first is "loss". One called "b per c" is a mean over the sum c instead."""

    @property
    def rows(self) -> int:
        """Rows in one epoch."""

    @property
    def held_out_rows(self) -> int:
        """Rows that only measure."""

    def row_length(self, row: int) -> int:
        """How long a training row is: rows of like length share a micro-batch, which saves padding."""

    def batch(self, rows: Sequence[int], step: int) -> MicroBatch:
        """The batch of these training rows at a step; no rows give a blank batch that trains nothing."""

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        """The batch of these held-out rows; no rows give a blank batch."""


def eval_metrics(sums: Mapping[str, float], count: float) -> dict[str, float]:
    """Measures over the count, or where their name says so over another measure, which then is none itself."""
    denominators = {name: name.partition(" per ")[2] for name in sums}
    return {
        f"eval_{name.partition(' per ')[0]}": total / (sums[denominators[name]] if denominators[name] else count)
        for name, total in sums.items()
        if name not in denominators.values()
    }


class AsyncCopy:
    """Numbers on their way from a device, which goes on meanwhile with what it was given after them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._copied_event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._copied_event = torch.cuda.current_stream().record_event()

    def __call__(self) -> list[float]:
        """Wait for them."""
        if self._copied_event is not None:
            self._copied_event.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, or on its way there, while the host goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # from other memory, 64 KB and more wait for all that the device was given before
    return tensor.to(device, non_blocking=True)


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
    batch_hash: str
    """Hash of the row numbers in the global batch: two runs with equal hashes saw equal data."""
    step_seconds: float
    """Time it took."""
    data_wait_seconds: float
    """Of that, how long the device stood still until the next batch was prepared."""
    compute_seconds_by_rank: tuple[float, ...]
    """For each rank, the time it worked before it had to wait for others."""
    health: Health
    """Whether the weights moved, and if not, why."""
    stop_requested: bool
    """Whether some rank was asked to stop."""
