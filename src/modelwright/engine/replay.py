"""Record work for the GPU once and replay it: for small models the host is slower than the device it feeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 4
"""Recordings kept by one piece of work: each has memory of its own."""
WARM_UP = 3
"""Times the work runs as it is before it is recorded: what compiles or tunes itself does so then."""

Work = Callable[..., Tensor]
Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Replay:
    """A piece of work whose inputs and output keep their places in memory; one recording for each set of shapes."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._most = MOST
        self._seen: dict[Signature, int] = {}
        self._recorded: dict[Signature, tuple[Any, dict[str, Tensor], Tensor]] = {}

    def __call__(self, **inputs: Tensor) -> Tensor:
        signature = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        if signature not in self._recorded:
            times = self._seen[signature] = self._seen.get(signature, 0) + 1
            if times <= WARM_UP or len(self._recorded) >= self._most or not self._record(signature, inputs):
                return self._work(**inputs)
        graph, places, output = self._recorded[signature]
        for name, place in places.items():
            place.copy_(inputs[name], non_blocking=True)
        graph.replay()
        return output

    def _record(self, signature: Signature, inputs: dict[str, Tensor]) -> bool:
        """Nothing is computed while it is recorded; work that waits for the device cannot be, and is left as it is."""
        places = {name: tensor.clone() for name, tensor in inputs.items()}
        torch.cuda.empty_cache()  # a recording has memory of its own; what the warm-up held is given back first
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                output = self._work(**places)
        except RuntimeError:
            torch.cuda.synchronize()
            self._most = 0
            return False
        self._recorded[signature] = (graph, places, output)
        return True
