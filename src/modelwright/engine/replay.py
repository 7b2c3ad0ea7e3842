"""Record work for the GPU once and replay it: for small models the host is slower than the device it feeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MOST = 4
"""Recordings kept by one piece of work: each has memory of its own."""
WARM_UP = 3
"""Times the work runs as it is before it is recorded: what compiles or tunes itself does so then."""

SMALL = 2_000_000_000
"""Weights below which a GPU waits for the host: 79 k tokens/s as they come, 140 k recorded, at half a billion."""

Work = Callable[..., Tensor]
Signature = tuple[object, ...]


class Replay:
    """A piece of work whose inputs and output keep their places in memory; one recording for each set of shapes.

    weights: those whose gradients the work makes anew. Each recording has gradients of its own, in its own memory,
    which become the weights' again whenever another was theirs: none is cleared, and none added to what was cleared.

    ready: called before each recording; what it gives is kept with it.
    """

    def __init__(self, work: Work, weights: Sequence[Tensor] = (), ready: Callable[[], object] = lambda: None) -> None:
        self._work, self._weights, self._ready = work, weights, ready
        self._most = MOST
        self._seen: dict[Signature, int] = {}
        self._recorded: dict[Signature, tuple[Any, dict[str, Tensor], Tensor, list[Tensor | None], object]] = {}
        self._lent: Signature | None = None
        self.last: Signature | None = None
        """What was replayed last; None where the work ran as it is."""

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Do the work."""
        return self.behind((), **inputs)

    def behind(self, before: Signature | None, **inputs: Tensor) -> Tensor:
        """The same, upon what another recording left in its places; without one there is nothing to record."""
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        signature = (before, *shapes)
        self.last = None
        if signature not in self._recorded:
            times = self._seen[shapes] = self._seen.get(shapes, 0) + 1
            may = before is not None and times > WARM_UP and len(self._recorded) < self._most
            if not may or not self._record(signature, inputs):
                self._take_back()
                return self._work(**inputs)
        graph, places, output, gradients, _ = self._recorded[signature]
        for name, place in places.items():
            place.copy_(inputs[name], non_blocking=True)
        graph.replay()
        if self._lent != signature:
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient
        self.last = self._lent = signature
        return output

    def _take_back(self) -> None:
        """Work that runs as it is must not add to a recording's gradients."""
        if self._lent is not None:
            for weight in self._weights:
                weight.grad = None
        self._lent = None

    def _record(self, signature: Signature, inputs: dict[str, Tensor]) -> bool:
        """Nothing is computed while it is recorded; work that waits for the device cannot be, and is left as it is."""
        places = {name: tensor.clone() for name, tensor in inputs.items()}
        self._lent = None
        for weight in self._weights:
            weight.grad = None
        torch.cuda.empty_cache()  # a recording has memory of its own; what the warm-up held is given back first
        graph = torch.cuda.CUDAGraph()
        try:
            ready = self._ready()
            # what other threads do meanwhile, such as pin memory for a checkpoint, is no part of it
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = self._work(**places)
        except RuntimeError:
            torch.cuda.synchronize()
            self._most = 0
            for weight in self._weights:
                weight.grad = None
            return False
        self._recorded[signature] = (graph, places, output, [weight.grad for weight in self._weights], ready)
        return True


def is_worth_recording(module: nn.Module, wish: str) -> bool:
    """Whether the device is done before the host has told it what to do; wish: the recipe's cuda_graphs."""
    if wish == "auto":
        return sum(weight.numel() for weight in module.parameters()) < SMALL
    return wish == "always"
