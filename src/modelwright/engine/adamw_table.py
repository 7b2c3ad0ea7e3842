"""What an AdamW step is given, and where many tensors are, laid out for one kernel that reads them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What moves a weight: itself, its gradient, rest, mean and square, all of one shape."""
Now = tuple[Tensor, Tensor, Tensor]
"""On the device: learning rate, corrections of the two means, share of the gradient to read, below 0 to stay."""
Settings = tuple[float, float, float, float]
"""The two betas, epsilon and weight decay."""
ALIGNED = 16
"""Bytes that a thread reads at once, where all addresses are multiples of them and no count leaves a part of them."""


@dataclass(frozen=True)
class Table:
    """What a kernel has to know of many tensors."""

    rows: Tensor
    """[tensors, columns] int64: the addresses of its parts, how many numbers a tensor has, which program begins it."""
    owners: Tensor
    """[programs] int32: the tensor that each program takes a block of."""
    aligned: int
    """What every address and count is a multiple of: ALIGNED or 1."""


def lay_out(tensors: Sequence[tuple[Tensor, ...]], block: int) -> Table:
    """The table of tensors of some parts each, of which each program takes one block of numbers."""
    counts = np.array([parts[0].numel() for parts in tensors])
    programs = -(-counts // block)
    addresses = np.array([part.data_ptr() for parts in tensors for part in parts]).reshape(len(tensors), -1)
    rows = np.column_stack((addresses, counts, programs.cumsum() - programs))
    owners = np.repeat(np.arange(len(tensors), dtype=np.int32), programs)
    return Table(torch.from_numpy(rows), torch.from_numpy(owners), 1 if (rows[:, :-1] % ALIGNED).any() else ALIGNED)
