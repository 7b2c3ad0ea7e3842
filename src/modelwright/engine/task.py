"""What the engine asks of a task: a module that gives the summed loss, and batches by row number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """Tensors for one forward pass, and how much they hold."""

    inputs: dict[str, Tensor]
    """What the module's forward takes, by name."""
    trained: int
    """Tokens (or images) that count in the loss."""
    tokens: int
    """Tokens (or images) that are no padding."""

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on the device that computes, or on their way there."""
        return {name: sent(tensor, device) for name, tensor in self.inputs.items()}

    def sent(self, device: torch.device) -> Batch:
        """The same batch there, ahead of its use."""
        return replace(self, inputs=self.on(device))


@dataclass(frozen=True)
class Prepared:
    """A rank's share of one global batch, ready for the device."""

    step: int
    """Which batch."""
    rows_hash: str
    """Hash of the whole global batch's row numbers."""
    batches: list[Batch]
    """This rank's micro-batches."""

    @property
    def tokens(self) -> int:
        """Tokens in the share, padding not counted."""
        return sum(batch.tokens for batch in self.batches)

    @property
    def trained(self) -> int:
        """Tokens in the share that are learnt from."""
        return sum(batch.trained for batch in self.batches)


class Task(Protocol):
    """What is learnt: rows, batches and the loss. The loop knows nothing else."""

    module: nn.Module
    """Its forward takes a batch's inputs and returns sums over what is trained: the loss, then other measures."""
    measures: tuple[str, ...]
    """What those sums are called; the first is "loss". One called "b per c" is a mean over the sum c instead."""

    @property
    def rows(self) -> int:
        """Rows in one epoch."""

    @property
    def held_out_rows(self) -> int:
        """Rows that only measure."""

    def length(self, row: int) -> int:
        """How long a training row is: rows of like length share a micro-batch, which saves padding."""

    def batch(self, rows: Sequence[int], step: int) -> Batch:
        """The batch of these training rows at a step; no rows give a blank batch that trains nothing."""

    def held_out_batch(self, rows: Sequence[int]) -> Batch:
        """The batch of these held-out rows; no rows give a blank batch."""


def means(sums: Mapping[str, float], count: float) -> dict[str, float]:
    """Measures over the count, or where their name says so over another measure, which then is none itself."""
    over = {name: name.partition(" per ")[2] for name in sums}
    return {
        f"eval_{name.partition(' per ')[0]}": total / (sums[over[name]] if over[name] else count)
        for name, total in sums.items()
        if name not in over.values()
    }


class Coming:
    """Numbers on their way from a device, which goes on meanwhile with what it was given after them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._there = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._there = torch.cuda.current_stream().record_event()

    def __call__(self) -> list[float]:
        """Wait for them."""
        if self._there is not None:
            self._there.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, or on its way there, while the host goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # from other memory, 64 KB and more wait for all that the device was given before
    return tensor.to(device, non_blocking=True)
