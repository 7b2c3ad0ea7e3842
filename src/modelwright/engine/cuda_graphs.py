"""Capture parts of a training step as CUDA graphs and replay them.

Pretraining of a 0.5 B model with 8 × 512 tokens a step: 166 k instead of 122 k tokens/s (H200, 2026-11-17, `python -m
benchmarks.ablation --only cuda-graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from modelwright.errors import first_line
from modelwright.plan.memory import MAX_GRAPH_SHAPES

WARMUP_CALLS, WARMUP_OF_OTHERS = 3, 1
"""Eager calls before the first capture, in which compilation and autotuning happen, and before those of others."""

StepFn = Callable[..., Tensor]
Shapes = tuple[object, ...]


class GraphPool:
    """What the graphs of a step share: one memory pool, and the gradients that they write.

    A step replays one graph after the other, so that their transient tensors may lie in the same memory. The gradients
    are those of the first graph that creates them; later ones copy theirs there, so that clipping and the optimizer
    step are captured once.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.gradients: list[Tensor | None] | None = None
        """Of the first graph that creates them."""
        self._are_set = False
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """The memory pool."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def keep_gradients(self) -> None:
        """While a graph is captured: keep its gradients, or copy them to those that are kept."""
        new = [weight.grad for weight in self.weights]
        if self.gradients is None:
            self.gradients, self._are_set = new, True
            return
        static_grads = [gradient for gradient in self.gradients if gradient is not None]
        torch._foreach_copy_(static_grads, [gradient for gradient in new if gradient is not None])
        self.set_gradients()

    def set_gradients(self) -> None:
        """Give the weights the gradients of the graphs."""
        if not self._are_set:
            for weight, gradient in zip(self.weights, self.gradients or [], strict=True):
                weight.grad = gradient
        self._are_set = True

    def release_gradients(self) -> None:
        """Take them away: an eager call must not accumulate into them."""
        if self._are_set:
            self.clear()

    def end_failed_capture(self) -> None:
        """Undo what torch leaves of a failed capture: its stream, its allocations in the pool and its random numbers,
        with which dropout or LoRA's new weights would fail. The next capture gets another pool: torch 2.11 still
        records host memory for this one.
        """
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())
        pool, self._handle = self.handle, None
        with suppress(RuntimeError):  # torch 2.13 has ended it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
            torch.zeros(1, device="cuda")  # the end of a capture resets the random numbers
        torch.cuda.set_stream(torch.cuda.default_stream())  # again: a capture that does not begin leaves its own

    def clear(self) -> None:
        """Leave the weights without gradients."""
        for weight in self.weights:
            weight.grad = None
        self._are_set = False


class GraphedCallable:
    """A function captured as one CUDA graph per set of input shapes, with static inputs and output.

    creates_gradients: whether it begins a step; a function that does not follows one that was replayed.
    before_capture: called before each capture; its result is kept alive with the graph.
    log: called with the reason where it cannot be captured.
    """

    def __init__(
        self,
        fn: StepFn,
        pool: GraphPool,
        creates_gradients: bool = False,
        before_capture: Callable[[], object] = lambda: None,
        log: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._fn, self._pool, self._creates_gradients, self._log = fn, pool, creates_gradients, log
        self._before_capture, self._max_graphs = before_capture, MAX_GRAPH_SHAPES
        self._call_counts: dict[Shapes, int] = {}
        self._graphs: dict[Shapes, tuple[Any, dict[str, Tensor], Tensor, object]] = {}
        self.replayed = False
        """Whether the last call was replayed."""

    def __call__(self, may_replay: bool, **inputs: Tensor) -> Tensor:
        """Replay if the call before it in this step was replayed; else run eagerly."""
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        calls = self._call_counts[shapes] = self._call_counts.get(shapes, 0) + 1
        self.replayed = may_replay and (shapes in self._graphs or self._capture_if_warm(calls, shapes, inputs))
        if not self.replayed:
            if self._creates_gradients:
                self._pool.release_gradients()
            return self._fn(**inputs)
        graph, static_inputs, output, _ = self._graphs[shapes]
        for name, static_input in static_inputs.items():
            static_input.copy_(inputs[name], non_blocking=True)
        graph.replay()
        if self._creates_gradients:
            self._pool.set_gradients()
        return output

    def _capture_if_warm(self, calls: int, shapes: Shapes, inputs: dict[str, Tensor]) -> bool:
        """Capture this shape after its warm-up, if there are not too many; whether it was captured."""
        warm = calls > (WARMUP_OF_OTHERS if self._graphs else WARMUP_CALLS)
        return warm and len(self._graphs) < self._max_graphs and self._capture(shapes, inputs)

    def _capture(self, shapes: Shapes, inputs: dict[str, Tensor]) -> bool:
        """Capture without computing; a function that synchronizes cannot be captured and stays eager."""
        static_inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        if self._creates_gradients:
            self._pool.clear()
        torch.cuda.empty_cache()  # graphs have their own memory pool; free what the warm-up cached
        graph = torch.cuda.CUDAGraph()
        try:
            prepared = self._before_capture()
            # relaxed: other threads may pin memory for a checkpoint meanwhile, and an older graph may be freed
            with torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="relaxed"):
                output = self._fn(**static_inputs)
                if self._creates_gradients:
                    self._pool.keep_gradients()
        except RuntimeError as error:
            self._pool.end_failed_capture()
            self._log(f"steps are not replayed as CUDA graphs, which is slower: {first_line(error)}")
            self._max_graphs = 0
            if self._creates_gradients:
                self._pool.clear()
            return False
        self._graphs[shapes] = (graph, static_inputs, output, prepared)
        return True
