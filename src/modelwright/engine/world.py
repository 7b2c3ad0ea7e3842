"""Who is computing: this process's rank, how many there are, and its device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.rendezvous import rendezvous

from modelwright import errors
from modelwright.engine.exits import Exits, OtherRankFailed
from modelwright.engine.place import attempt_of, per_node, place_in_world
from modelwright.errors import ModelwrightError, PeerLost, UsageError, first_line
from modelwright.runs.beat import Beat, die_with_parent

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
    per_node: int = 1
    """Processes on each node; 1 where nodes have different numbers of them."""
    beat: Beat = field(default_factory=Beat, compare=False)
    """Tells whoever watches where this process stands."""

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def draw_from(self, seed: int) -> None:
        """Let random numbers on the processor and on this rank's device begin here."""
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for every kind of device: 0.37 ms, not 0.02
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def sum(self, *values: float) -> list[float]:
        """Add numbers over all ranks."""
        if self.size == 1:
            return list(values)
        self.beat.at("waiting for the others")
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def least(self, *values: float) -> list[float]:
        """The smallest of each number over all ranks."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
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
        else:
            self.beat.at("waiting for rank 0")
        answer = self._tell(answer)
        if failure:
            raise failure
        if "letter" in answer:
            raise OtherRankFailed(answer["letter"], getattr(errors, answer["kind"], UsageError).exit_code)
        return answer["value"]  # type: ignore[no-any-return]

    def wait_at_most(self, seconds: float) -> None:
        """Give up on a step's exchange after so long, now that the length of a step is known."""
        if self.size > 1:
            set_group_timeout(timedelta(seconds=seconds), dist.group.WORLD)

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


@contextmanager
def joined(timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the world that the standard variables describe (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # a launcher that is killed leaves no rank behind
    rank, size, local_rank = place_in_world(os.environ)
    device = CPU
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    beats = os.environ.get("MODELWRIGHT_BEATS")
    beat = Beat(Path(beats) if beats else None, rank)
    try:
        if size == 1:
            yield World(device=device, beat=beat)
        else:
            with _connected(rank, size, device, timeout_seconds) as exits, exits.heard():
                yield World(rank, size, device, _alike(per_node(os.environ, size)), beat)
    except BaseException as error:
        words = str(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {error}"
        beat.end(words, getattr(error, "exit_code", 1), isinstance(error, PeerLost | OtherRankFailed))
        raise
    finally:
        beat.close()


@contextmanager
def _connected(rank: int, size: int, device: torch.device, timeout_seconds: float) -> Iterator[Exits]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UsageError(f"WORLD_SIZE is {size} but {name} is not set; start the ranks with torchrun")
    # small facts travel by gloo whatever the device, so that telling them never waits for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = next(iter(rendezvous("env://", rank, size, timeout=timeout)))[0]
        # the launcher's store outlives its ranks: what an earlier start wrote there must not be taken for ours
        store = PrefixStore(f"modelwright/{attempt_of(os.environ)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, OSError) as error:
        reason = first_line(error)
        raise PeerLost(
            f"rank {rank} of {size} could not meet the others ({reason}); run modelwright doctor --nodes"
        ) from None
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    exits = Exits(store, rank, size, hosts)
    try:
        yield exits
    finally:
        _patient.cache_clear()
        exits.close()
        dist.destroy_process_group()


def _alike(count: int) -> int:
    """A number of processes that every node has, else 1: all ranks must see the same mesh."""
    found = torch.tensor([count, -count])
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return count if int(found[0]) == -int(found[1]) else 1


@cache
def _patient() -> Any:
    """A group of all ranks for waiting on the main one, which may download or write for longer than any step takes."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)
