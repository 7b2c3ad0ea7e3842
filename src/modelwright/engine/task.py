"""What the engine asks of a task: a module that gives the summed loss, and batches by row number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        """The inputs on the device that computes."""
        return {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}


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
