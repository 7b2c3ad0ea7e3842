"""A running mean of the weights, measured and kept in their place: it generalises better than where they end up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Average:
    """The mean of some tensors over the recent steps; holds nothing where none is asked for."""

    def __init__(self, tensors: dict[str, Tensor], decay: float) -> None:
        """decay: how much of the mean each step keeps, once it has seen enough of them; 0 asks for no mean."""
        self._decay = decay
        self._tensors = {name: tensor for name, tensor in tensors.items() if decay and tensor.is_floating_point()}
        self.held = {name: tensor.detach().float().clone() for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take in the weights after a step; the first steps count for more, since there are few of them."""
        kept = min(self._decay, (1 + step) / (10 + step))
        if self.held:
            latest = [self._tensors[name].detach().float() for name in self.held]
            torch._foreach_lerp_(list(self.held.values()), latest, 1 - kept)  # one kernel for a hundred tensors

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the mean stand in for the weights for a while."""
        before = {name: self._tensors[name].detach().clone() for name in self.held}
        self.settle()
        try:
            yield
        finally:
            self._take(before)

    def settle(self) -> None:
        """Put the mean in the weights' place for good."""
        self._take(self.held)

    @torch.no_grad()
    def _take(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._tensors[name].copy_(value)
