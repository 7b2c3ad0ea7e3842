"""Where the memory of a step goes: every tensor that comes and goes, by component, over time.

The same log is kept from two sources: on a CPU each operation's new storages are watched, on a GPU the allocator
writes its own history. What a storage was for is decided afterwards, when it is known who held it.
"""

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

POINTS = 240
"""Moments that the picture is drawn from."""


@dataclass
class MemoryLog:
    """What came and went in one step."""

    events: list[tuple[int, int]] = field(default_factory=list)
    """Storage and bytes, negative where it went."""
    steady: dict[str, int] = field(default_factory=dict)
    """Bytes that were there before, by component."""
    labels: dict[int, str] = field(default_factory=dict)
    """What storages were for, where known; the others held activations."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Where in the events each part of the step begins."""

    def mark(self, part: str) -> None:
        """A part of the step begins here."""
        self.marks.append((len(self.events), part))

    def as_json(self) -> dict[str, Any]:
        """The components at the fullest moment and over time."""
        now: dict[str, int] = dict(self.steady)
        peak, peak_at, at_peak = sum(now.values()), 0, dict(now)
        every = max(1, len(self.events) // POINTS)
        timeline = [{"at": 0, **now}]
        for place, (storage, size) in enumerate(self.events):
            name = self.labels.get(storage, "activations")
            now[name] = now.get(name, 0) + size
            total = sum(now.values())
            if total > peak:
                peak, peak_at, at_peak = total, place, dict(now)
            if place % every == 0:
                timeline.append({"at": place, **now})
        part = next((name for start, name in reversed(self.marks) if start <= peak_at), "")
        return {
            "peak_bytes": peak,
            "peak_in": part,
            "parts": {name: size for name, size in at_peak.items() if size},
            "steady": self.steady,
            "marks": [{"at": start, "part": name} for start, name in self.marks],
            "timeline": timeline,
        }


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every storage that an operation makes, and when it goes."""

    def __init__(self, log: MemoryLog, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._alive = log, dict.fromkeys(known, 0)
        self._numbers: dict[int, int] = {}
        self._next = 1 << 62  # storages come back at the same address; each life has a number of its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and type(tensor) is Tensor:
                self._see(tensor)
        return made

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        size, self._next = storage.nbytes(), self._next + 1
        self._alive[address] = size
        self._numbers[address] = number = self._next
        self._log.events.append((number, size))
        weakref.finalize(storage, self._gone, address, number, size)

    def _gone(self, address: int, number: int, size: int) -> None:
        self._alive.pop(address, None)
        self._log.events.append((number, -size))

    def number_of(self, tensor: Tensor) -> int:
        """The life of a tensor's storage in the log."""
        return self._numbers.get(tensor.untyped_storage()._cdata, 0)


class Profiler:
    """Watches one step of a module and its optimizer."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._weights, self._buffers = list(module.parameters()), list(module.buffers())
        self._states = [
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        self._gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        self.log = MemoryLog(steady={
            "weights": _bytes(self._weights), "optimizer": _bytes(self._states), "buffers": _bytes(self._buffers),
            "gradients": _bytes(self._gradients),
        })  # fmt: skip
        self._on_gpu = any(weight.is_cuda for weight in self._weights)
        self._watch: _Watch | None = None
        self._times: list[tuple[int, str]] = []
        self._places: list[int] = []

    @contextmanager
    def watching(self) -> Iterator[MemoryLog]:
        """Watch what happens inside, which is one step."""
        hooks = [
            self._module.register_forward_pre_hook(lambda *_: self._mark("forward")),
            self._module.register_forward_hook(lambda *_: self._mark("backward")),
            self._optimizer.register_step_pre_hook(lambda *_: self._backward_done()),
        ]
        try:
            with self._gpu_history() if self._on_gpu else self._cpu_history():
                yield self.log
        finally:
            for hook in hooks:
                hook.remove()

    def as_json(self) -> dict[str, Any]:
        """The components at the fullest moment and over time."""
        return self.log.as_json()

    @contextmanager
    def _cpu_history(self) -> Iterator[None]:
        held = [*self._weights, *self._buffers, *self._states, *self._gradients]
        self._watch = _Watch(self.log, {tensor.untyped_storage()._cdata for tensor in held})
        with self._watch:
            yield

    @contextmanager
    def _gpu_history(self) -> Iterator[None]:
        """The allocator's own list of what it gave and took back."""
        torch.cuda.synchronize()
        known = sum(self.log.steady.values())
        self.log.steady["workspaces"] = max(0, torch.cuda.memory_allocated() - known)  # of libraries, and batches
        torch.cuda.memory._record_memory_history(context=None, max_entries=400_000)
        try:
            yield
            torch.cuda.synchronize()
            device = torch.cuda.current_device()
            self._read_history(torch.cuda.memory._snapshot()["device_traces"][device])
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _read_history(self, trace: list[dict[str, Any]]) -> None:
        lives: dict[int, tuple[int, int]] = {}  # of the storage at an address: its number and size
        numbers: dict[int, int] = {}
        marks = list(self._times)
        for entry in trace:
            while marks and entry.get("time_us", 0) >= marks[0][0]:
                self.log.mark(marks.pop(0)[1])
            if entry["action"] == "alloc":
                number = len(self.log.events) + 1
                lives[entry["addr"]] = (number, entry["size"])
                numbers[entry["addr"]] = number
                self.log.events.append((number, entry["size"]))
            elif entry["action"] == "free_completed" and entry["addr"] in lives:
                number, size = lives.pop(entry["addr"])
                self.log.events.append((number, -size))
        for place in self._places:
            if place in numbers:
                self.log.labels[numbers[place]] = "gradients"

    def _mark(self, part: str) -> None:
        if self._on_gpu:
            self._times.append((time.time_ns() // 1000, part))
        else:
            self.log.mark(part)

    def _backward_done(self) -> None:
        """The gradients stand now: what holds them is called so, back to when it was made."""
        self._mark("optimizer")
        for weight in self._weights:
            if weight.grad is None:
                continue
            if self._watch is None:
                self._places.append(weight.grad.data_ptr())
            elif number := self._watch.number_of(weight.grad):
                self.log.labels[number] = "gradients"


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct storages."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
