"""Capture parts of a training step as CUDA graphs and replay them.

Pretraining of a 0.5 B model with 8 × 512 tokens a step: 166 k instead of 122 k tokens/s (H200, 2026-11-17, `python -m
benchmarks.ablation --only cuda-graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from modelwright.plan.memory import MAX_GRAPH_SHAPES

WARMUP_CALLS = 3
"""Eager calls before capture, in which compilation and autotuning happen."""

StepFn = Callable[..., Tensor]
Signature = tuple[object, ...]


class GraphedCallable:
    """A function captured as one CUDA graph per set of input shapes, with static inputs and output.

    weights: parameters whose gradients the function creates. Each graph has its own gradient tensors, assigned to the
    parameters when it is replayed: none is zeroed, none accumulates into stale values.
    before_capture: called before each capture; its result is kept alive with the graph.
    """

    def __init__(
        self, fn: StepFn, weights: Sequence[Tensor] = (), before_capture: Callable[[], object] = lambda: None
    ) -> None:
        self._fn, self._weights, self._before_capture = fn, weights, before_capture
        self._max_graphs = MAX_GRAPH_SHAPES  # each has its own memory pool
        self._call_counts: dict[Signature, int] = {}
        self._graphs: dict[Signature, tuple[Any, dict[str, Tensor], Tensor, list[Tensor | None], object]] = {}
        self._grads_of: Signature | None = None
        self.last_graph: Signature | None = None
        """Signature of the last replayed graph; None if the last call ran eagerly."""

    def call_after(self, previous: Signature | None, **inputs: Tensor) -> Tensor:
        """Call after the graph `previous`, whose output memory is read; after an eager call (None) run eagerly."""
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
        """An eager call must not accumulate into a graph's gradients."""
        if self._grads_of is not None:
            for weight in self._weights:
                weight.grad = None
        self._grads_of = None

    def _capture(self, signature: Signature, inputs: dict[str, Tensor]) -> bool:
        """Capture without computing; a function that synchronizes cannot be captured and stays eager."""
        static_inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._grads_of = None
        for weight in self._weights:
            weight.grad = None
        torch.cuda.empty_cache()  # a graph has its own memory pool; free what the warm-up cached
        graph = torch.cuda.CUDAGraph()
        try:
            prepared = self._before_capture()
            # thread_local: other threads may pin memory for a checkpoint meanwhile
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
