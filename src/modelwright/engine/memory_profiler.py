"""Profile the memory of one training step by component over time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from modelwright.engine.optimizer import TrainerOptimizer

TIMELINE_POINTS = 240
"""Points of the timeline."""


@dataclass
class AllocationLog:
    """Allocations and frees of one step."""

    events: list[tuple[int, int]] = field(default_factory=list)
    """Storage id and bytes, negative for a free."""
    baseline: dict[str, int] = field(default_factory=dict)
    """Bytes allocated before the step, by component."""
    labels: dict[int, str] = field(default_factory=dict)
    """Component of a storage id, where known; all others are activations."""
    phases: list[tuple[int, str]] = field(default_factory=list)
    """Event index at which each phase of the step begins."""

    def start_phase(self, phase: str) -> None:

        self.phases.append((len(self.events), phase))

    def as_json(self) -> dict[str, Any]:
        """Components at the peak and over time."""
        current: dict[str, int] = dict(self.baseline)
        peak, peak_at, at_peak = sum(current.values()), 0, dict(current)
        interval = max(1, len(self.events) // TIMELINE_POINTS)
        timeline = [{"at": 0, **current}]
        for index, (storage, size) in enumerate(self.events):
            name = self.labels.get(storage, "activations")
            current[name] = current.get(name, 0) + size
            total = sum(current.values())
            if total > peak:
                peak, peak_at, at_peak = total, index, dict(current)
            if index % interval == 0:
                timeline.append({"at": index, **current})
        peak_phase = next((name for start, name in reversed(self.phases) if start <= peak_at), "")
        return {
            "peak_bytes": peak,
            "peak_phase": peak_phase,
            "components": {name: size for name, size in at_peak.items() if size},
            "baseline": self.baseline,
            "phases": [{"at": start, "phase": name} for start, name in self.phases],
            "timeline": timeline,
        }


class _AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs every storage that an operation allocates, and its free."""

    def __init__(self, log: AllocationLog, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._alive = log, dict.fromkeys(known, 0)
        self._allocation_ids: dict[int, int] = {}
        self._next_id = 1 << 62  # addresses are reused; each allocation gets its own id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and type(tensor) is Tensor:
                self._record(tensor)
        return output

    def _record(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        size, self._next_id = storage.nbytes(), self._next_id + 1
        self._alive[address] = size
        self._allocation_ids[address] = allocation_id = self._next_id
        self._log.events.append((allocation_id, size))
        weakref.finalize(storage, self._record_free, address, allocation_id, size)

    def _record_free(self, address: int, allocation_id: int, size: int) -> None:
        self._alive.pop(address, None)
        self._log.events.append((allocation_id, -size))

    def allocation_id(self, tensor: Tensor) -> int:
        """Id of a tensor's storage in the log."""
        return self._allocation_ids.get(tensor.untyped_storage()._cdata, 0)


class MemoryProfiler:
    """Profiles one step of a module and its optimizer."""

    def __init__(self, module: torch.nn.Module, optimizer: TrainerOptimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._weights, self._buffers = list(module.parameters()), list(module.buffers())
        self._states = list(optimizer.state_tensors().values())
        self._gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        self.log = AllocationLog(baseline={
            "weights": _bytes(self._weights), "optimizer": _bytes(self._states), "buffers": _bytes(self._buffers),
            "gradients": _bytes(self._gradients),
        })  # fmt: skip
        self._on_gpu = any(weight.is_cuda for weight in self._weights)
        self._tracker: _AllocationTracker | None = None
        self._phase_times: list[tuple[int, str]] = []
        self._grad_addresses: list[int] = []

    @contextmanager
    def profile_step(self) -> Iterator[AllocationLog]:
        """Profile the code inside, which must be one step."""
        hooks = [
            self._module.register_forward_pre_hook(lambda *_: self._start_phase("forward")),
            self._module.register_forward_hook(lambda *_: self._start_phase("backward")),
            self._optimizer.register_step_pre_hook(lambda *_: self._label_gradients()),
        ]
        try:
            with self._gpu_history() if self._on_gpu else self._cpu_history():
                yield self.log
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _cpu_history(self) -> Iterator[None]:
        tensors = [*self._weights, *self._buffers, *self._states, *self._gradients]
        self._tracker = _AllocationTracker(self.log, {tensor.untyped_storage()._cdata for tensor in tensors})
        with self._tracker:
            yield

    @contextmanager
    def _gpu_history(self) -> Iterator[None]:
        """The history of the CUDA caching allocator."""
        torch.cuda.synchronize()
        known = sum(self.log.baseline.values())
        self.log.baseline["workspaces"] = max(0, torch.cuda.memory_allocated() - known)  # cuBLAS workspaces and batches
        torch.cuda.memory._record_memory_history(context=None, max_entries=400_000)
        try:
            yield
            torch.cuda.synchronize()
            device = torch.cuda.current_device()
            self._read_history(torch.cuda.memory._snapshot()["device_traces"][device])
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _read_history(self, trace: list[dict[str, Any]]) -> None:
        live: dict[int, tuple[int, int]] = {}  # address: id and size
        allocation_ids: dict[int, int] = {}
        phase_times = list(self._phase_times)
        for entry in trace:
            while phase_times and entry.get("time_us", 0) >= phase_times[0][0]:
                self.log.start_phase(phase_times.pop(0)[1])
            if entry["action"] == "alloc":
                allocation_id = len(self.log.events) + 1
                live[entry["addr"]] = (allocation_id, entry["size"])
                allocation_ids[entry["addr"]] = allocation_id
                self.log.events.append((allocation_id, entry["size"]))
            elif entry["action"] == "free_completed" and entry["addr"] in live:
                allocation_id, size = live.pop(entry["addr"])
                self.log.events.append((allocation_id, -size))
        for address in self._grad_addresses:
            if address in allocation_ids:
                self.log.labels[allocation_ids[address]] = "gradients"

    def _start_phase(self, phase: str) -> None:
        if self._on_gpu:
            self._phase_times.append((time.time_ns() // 1000, phase))
        else:
            self.log.start_phase(phase)

    def _label_gradients(self) -> None:
        """Label the gradients' storages before the optimizer step, back to their allocation."""
        self._start_phase("optimizer")
        for weight in self._weights:
            if weight.grad is None:
                continue
            if self._tracker is None:
                self._grad_addresses.append(weight.grad.data_ptr())
            elif allocation_id := self._tracker.allocation_id(weight.grad):
                self.log.labels[allocation_id] = "gradients"


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct storages."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
