"""Lay answers that share a prompt apart for attention alone, each in a row with the prompt before it, and back.

Attention computes the prompt once for each answer then, and is faster for it: rows of one length go through cuDNN,
which takes 1.02 ms forward and backward where documents of any length take 1.57 (8 pairs of 512 + 2 × 512 tokens, 32
heads, one H200). Everything else still sees the prompt once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

EVEN = 8
"""Rows are a multiple of this long, as the fastest kernels want it."""


class Spread(NamedTuple):
    """Where each token of the rows stands among the answers, and the other way round."""

    places: Tensor
    """[answers, length] int32, the token that stands there in the flattened rows; padding is any."""
    uses: Tensor
    """[2, tokens] int32, where a token of the flattened rows stands among the flattened answers, and where once more;
    -1 for nowhere."""
    firsts: Tensor
    """[answers × length] int32, places flattened where a token stands for the first time; -1 where none does."""


def spread_of(branches: Tensor) -> Spread:
    """Lay out rows of a prompt and two answers. branches: [rows, length] int64: 0, 1, 2, and 3 for padding."""
    rows, length = branches.shape
    prompts, chosen, rejected = ((branches == branch).sum(1).tolist() for branch in range(3))
    longest = max(prompt + max(two) for prompt, *two in zip(prompts, chosen, rejected, strict=True))
    longest = -(-longest // EVEN) * EVEN
    places = np.repeat(np.arange(rows) * length, 2)[:, None].repeat(longest, 1)
    uses = np.full((2, rows, length), -1)
    for row, (prompt, one, other) in enumerate(zip(prompts, chosen, rejected, strict=True)):
        begin, slot = row * length, 2 * row * longest
        together = np.arange(prompt + one)
        apart = np.concatenate([np.arange(prompt), prompt + one + np.arange(other)])
        places[2 * row, : len(together)] = begin + together
        places[2 * row + 1, : len(apart)] = begin + apart
        uses[0, row, together] = slot + together
        uses[0, row, apart[prompt:]] = slot + longest + prompt + np.arange(other)
        uses[1, row, :prompt] = slot + longest + np.arange(prompt)
    first, firsts = uses[0].flatten(), np.full(places.size, -1)
    firsts[first[first >= 0]] = np.flatnonzero(first >= 0)
    # every number of a tensor is fetched by an index, and half as wide costs a GPU half the arithmetic
    return Spread(*(torch.from_numpy(each.astype(np.int32)) for each in (places, uses.reshape(2, -1), firsts)))


def apart(part: Tensor, spread: Spread) -> Tensor:
    """Rows as answers: [rows, heads, length, depth] into [answers, heads, longest, depth]."""
    _, heads, _, depth = part.shape
    flat = part.transpose(1, 2).reshape(-1, heads, depth)
    taken: Tensor = _Apart.apply(flat, spread.places.flatten(), spread.uses)  # type: ignore[no-untyped-call]
    return taken.view(*spread.places.shape, heads, depth).transpose(1, 2)


def together(part: Tensor, spread: Spread, rows: int) -> Tensor:
    """Answers as rows: [answers, heads, longest, depth] into [rows, length, heads, depth]."""
    _, heads, _, depth = part.shape
    flat = part.transpose(1, 2).reshape(-1, heads, depth)
    taken: Tensor = _Together.apply(flat, spread.uses[0], spread.firsts)  # type: ignore[no-untyped-call]
    return taken.view(rows, -1, heads, depth)


class _Apart(torch.autograd.Function):
    """Tokens taken to where they are used; gradients are fetched from there, since adding them there is slow."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, places: Tensor, uses: Tensor) -> Tensor:
        ctx.save_for_backward(uses)
        return flat.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (uses,) = ctx.saved_tensors
        return _fetched(gradient, uses[0]) + _fetched(gradient, uses[1]), None, None


class _Together(torch.autograd.Function):
    """Tokens fetched from where they were first used."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, uses: Tensor, firsts: Tensor) -> Tensor:
        ctx.save_for_backward(firsts)
        return flat.index_select(0, uses.clamp(min=0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (firsts,) = ctx.saved_tensors
        return _fetched(gradient, firsts), None, None


def _fetched(values: Tensor, places: Tensor) -> Tensor:
    """Values from places, nothing from nowhere."""
    found = values.index_select(0, places.clamp(min=0))
    return torch.where((places >= 0)[:, None, None], found, torch.zeros((), dtype=found.dtype, device=found.device))
