"""Who is computing: this process's rank, how many there are, and its device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from modelwright import errors
from modelwright.errors import ModelwrightError, UsageError

T = TypeVar("T")
CPU = torch.device("cpu")
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class World:
    """The ranks that train together; one process alone is a world too."""

    rank: int = 0
    """This process's number."""
    size: int = 1
    """Processes in all."""
    device: torch.device = CPU
    """Where this process computes."""

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Add numbers over all ranks."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Add a tensor on the CPU over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def first(self, action: Callable[[], T]) -> T:
        """Let the main rank act and tell the others what came of it, be it a value (as JSON) or a letter."""
        if self.size == 1:
            return action()
        answer: dict[str, Any] = {}
        failure: ModelwrightError | None = None
        if self.is_main:
            try:
                answer = {"value": action()}
            except ModelwrightError as error:
                failure, answer = error, {"letter": str(error), "kind": type(error).__name__}
        answer = self._tell(answer)
        if failure:
            raise failure
        if "letter" in answer:
            raise OtherRankFailed(answer["letter"], getattr(errors, answer["kind"], UsageError).exit_code)
        return answer["value"]  # type: ignore[no-any-return]

    def _tell(self, value: dict[str, Any]) -> dict[str, Any]:
        """Send JSON from the main rank to all (the library's own way would send pickles)."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        dist.broadcast(length, 0, group=_patient())
        if not self.is_main:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, 0, group=_patient())
        told: dict[str, Any] = json.loads(bytes(text.tolist()))
        return told


class OtherRankFailed(ModelwrightError):
    """The main rank has written the letter; this one only leaves with the same code."""

    told_elsewhere = True

    def __init__(self, letter: str, exit_code: int) -> None:
        super().__init__(letter)
        self.exit_code = exit_code


@contextmanager
def joined(timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the world that the standard variables describe (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank = _number("LOCAL_RANK", rank if not torch.cuda.is_available() else 0)
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {size}; it wants a rank from 0 to {size - 1}")
    device = CPU
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UsageError(f"WORLD_SIZE is {size} but {name} is not set; start the ranks with torchrun")
    # small facts travel by gloo whatever the device, so that telling them never waits for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_seconds))
    try:
        yield World(rank, size, device)
    finally:
        _patient.cache_clear()
        dist.destroy_process_group()


@cache
def _patient() -> Any:
    """A group of all ranks for waiting on the main one, which may download or write for longer than any step takes."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it wants a whole number") from None
