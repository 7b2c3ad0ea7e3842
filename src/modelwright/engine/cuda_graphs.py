"""Capture parts of a training step as CUDA graphs and replay them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MAX_GRAPHS = 4
"""Recordings kept by one piece of work: each has memory of its own."""
WARMUP_CALLS = 3
"""Times the work runs as it is before it is recorded: what compiles or tunes itself does so then."""
AUTO_MAX_PARAMS = 2_000_000_000
"""Weights below which a GPU waits for the host: 79 k tokens/s as they come, 140 k recorded, at half a billion."""
StepFn = Callable[..., Tensor]
Signature = tuple[object, ...]


class GraphedCallable:
    """A piece of work whose inputs and output keep their places in memory; one recording for each set of shapes.

    weights: those whose gradients the work makes anew. Each recording has gradients of its own, in its own memory,
    which become the weights' again whenever another was theirs: none is cleared, and none added to what was cleared.

    ready: called before each recording; what it gives is kept with it.
    """

    def __init__(
        self, fn: StepFn, weights: Sequence[Tensor] = (), before_capture: Callable[[], object] = lambda: None
    ) -> None:
        self._fn, self._weights, self._before_capture = fn, weights, before_capture
        self._max_graphs = MAX_GRAPHS
        self._call_counts: dict[Signature, int] = {}
        self._graphs: dict[Signature, tuple[Any, dict[str, Tensor], Tensor, list[Tensor | None], object]] = {}
        self._grads_of: Signature | None = None
        self.last_graph: Signature | None = None
        """What was replayed last; None where the work ran as it is."""

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Do the work."""
        return self.call_after((), **inputs)

    def call_after(self, previous: Signature | None, **inputs: Tensor) -> Tensor:
        """The same, upon what another recording left in its places; without one there is nothing to record."""
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        signature = (previous, *shapes)
        self.last_graph = None
        if signature not in self._graphs:
            calls = self._call_counts[shapes] = self._call_counts.get(shapes, 0) + 1
            can_capture = previous is not None and calls > WARMUP_CALLS and len(self._graphs) < self._max_graphs
            if not can_capture or not self._capture(signature, inputs):
                self._release_grads()
                return self._fn(**inputs)
        graph, static_inputs, output, gradients, _ = self._graphs[signature]
        for name, static_input in static_inputs.items():
            static_input.copy_(inputs[name], non_blocking=True)
        graph.replay()
        if self._grads_of != signature:
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient
        self.last_graph = self._grads_of = signature
        return output

    def _release_grads(self) -> None:
        """Work that runs as it is must not add to a recording's gradients."""
        if self._grads_of is not None:
            for weight in self._weights:
                weight.grad = None
        self._grads_of = None

    def _capture(self, signature: Signature, inputs: dict[str, Tensor]) -> bool:
        """Nothing is computed while it is recorded; work that waits for the device cannot be, and is left as it is."""
        static_inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._grads_of = None
        for weight in self._weights:
            weight.grad = None
        torch.cuda.empty_cache()  # a recording has memory of its own; what the warm-up held is given back first
        graph = torch.cuda.CUDAGraph()
        try:
            prepared = self._before_capture()
            # what other threads do meanwhile, such as pin memory for a checkpoint, is no part of it
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = self._fn(**static_inputs)
        except RuntimeError:
            torch.cuda.synchronize()
            self._max_graphs = 0
            for weight in self._weights:
                weight.grad = None
            return False
        self._graphs[signature] = (graph, static_inputs, output, [weight.grad for weight in self._weights], prepared)
        return True


def use_cuda_graphs(module: nn.Module, setting: str) -> bool:
    """Whether the device is done before the host has told it what to do; wish: the recipe's cuda_graphs."""
    if setting == "auto":
        return sum(weight.numel() for weight in module.parameters()) < AUTO_MAX_PARAMS
    return setting == "always"
