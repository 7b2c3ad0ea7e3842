"""Rank and world size, the process group, collectives over all ranks, and the channel by which a failing rank tells its peers why."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.rendezvous import rendezvous

from modelwright import errors
from modelwright.errors import ModelwrightError, PeerLost, Refused, UsageError, first_line
from modelwright.runs.heartbeat import Heartbeat, set_pdeathsig

T = TypeVar("T")
CPU = torch.device("cpu")
RANK0_TIMEOUT = timedelta(hours=24)


@dataclass(frozen=True)
class World:
    """The ranks that train together; one process alone is a world too."""

    rank: int = 0
    """This process's number."""
    size: int = 1
    """Processes in all."""
    device: torch.device = CPU
    """Where this process computes."""
    local_world_size: int = 1
    """Processes on each node; 1 where nodes have different numbers of them."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)
    """Tells whoever watches where this process stands."""

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def manual_seed(self, seed: int) -> None:
        """Let random numbers on the processor and on this rank's device begin here."""
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for every kind of device: 0.37 ms, not 0.02
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Add numbers over all ranks."""
        if self.size == 1:
            return list(values)
        self.heartbeat.set_phase("waiting in all_reduce")
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def all_reduce_min(self, *values: float) -> list[float]:
        """The smallest of each number over all ranks."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return [float(value) for value in tensor.tolist()]

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Add a tensor on the CPU over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def on_rank0_broadcast(self, action: Callable[[], T]) -> T:
        """Let the main rank act and tell the others what came of it, be it a value (as JSON) or a letter."""
        if self.size == 1:
            return action()
        reply: dict[str, Any] = {}
        failure: ModelwrightError | None = None
        if self.is_main:
            try:
                reply = {"value": action()}
            except ModelwrightError as error:
                failure, reply = error, {"message": str(error), "error_class": type(error).__name__}
        else:
            self.heartbeat.set_phase("waiting for rank 0")
        reply = self._broadcast_json(reply)
        if failure:
            raise failure
        if "message" in reply:
            raise OtherRankFailed(reply["message"], getattr(errors, reply["error_class"], UsageError).exit_code)
        return reply["value"]  # type: ignore[no-any-return]

    def set_collective_timeout(self, seconds: float) -> None:
        """Give up on a step's exchange after so long, now that the length of a step is known."""
        if self.size > 1:
            set_group_timeout(timedelta(seconds=seconds), dist.group.WORLD)

    def _broadcast_json(self, value: dict[str, Any]) -> dict[str, Any]:
        """Send JSON from the main rank to all (the library's own way would send pickles)."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        dist.broadcast(length, 0, group=_rank0_group())
        if not self.is_main:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, 0, group=_rank0_group())
        received: dict[str, Any] = json.loads(bytes(text.tolist()))
        return received


@contextmanager
def init_distributed(timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the world that the standard variables describe (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        set_pdeathsig()  # a launcher that is killed leaves no rank behind
    rank, size, local_rank = rank_from_env(os.environ)
    device = CPU
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    heartbeat_dir = os.environ.get("MODELWRIGHT_HEARTBEAT_DIR")
    heartbeat = Heartbeat(Path(heartbeat_dir) if heartbeat_dir else None, rank)
    try:
        if size == 1:
            yield World(device=device, heartbeat=heartbeat)
        else:
            with _process_group(rank, size, device, timeout_seconds) as channel, channel.propagating():
                yield World(
                    rank, size, device, _common_local_world_size(local_world_size_from_env(os.environ, size)), heartbeat
                )
    except BaseException as error:
        message = str(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {error}"
        heartbeat.report_exit(message, getattr(error, "exit_code", 1), isinstance(error, PeerLost | OtherRankFailed))
        raise
    finally:
        heartbeat.close()


@contextmanager
def _process_group(rank: int, size: int, device: torch.device, timeout_seconds: float) -> Iterator[FailureChannel]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UsageError(f"WORLD_SIZE is {size} but {name} is not set; start the ranks with torchrun")
    # small facts travel by gloo whatever the device, so that telling them never waits for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = next(iter(rendezvous("env://", rank, size, timeout=timeout)))[0]
        # the launcher's store outlives its ranks: what an earlier start wrote there must not be taken for ours
        store = PrefixStore(f"modelwright/{restart_attempt(os.environ)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, OSError) as error:
        reason = first_line(error)
        raise PeerLost(f"rank {rank} of {size}: rendezvous failed ({reason}); run modelwright doctor --nodes") from None
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    channel = FailureChannel(store, rank, size, hosts_store)
    try:
        yield channel
    finally:
        _rank0_group.cache_clear()
        channel.close()
        dist.destroy_process_group()


def _common_local_world_size(count: int) -> int:
    """A number of processes that every node has, else 1: all ranks must see the same mesh."""
    min_and_max = torch.tensor([count, -count])
    dist.all_reduce(min_and_max, dist.ReduceOp.MIN)
    return count if int(min_and_max[0]) == -int(min_and_max[1]) else 1


@cache
def _rank0_group() -> Any:
    """A group of all ranks for waiting on the main one, which may download or write for longer than any step takes."""
    return dist.new_group(backend="gloo", timeout=RANK0_TIMEOUT)


def rank_from_env(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, size and local rank by the standard variables, or by an operator's where one process makes a node."""
    nproc_per_node = environ.get("PET_NPROC_PER_NODE", "")
    if "LOCAL_RANK" not in environ and nproc_per_node.isdigit() and int(nproc_per_node) > 1:
        raise UsageError(
            f"PET_NPROC_PER_NODE is {nproc_per_node}, but a single process was started; "
            "start it as: torchrun -m modelwright run RECIPE"
        )
    if "RANK" not in environ and ":" in environ.get("PET_NNODES", ""):
        raise UsageError(f"PET_NNODES is {environ['PET_NNODES']}; start it as: torchrun -m modelwright run RECIPE")
    if "RANK" not in environ and _int_from_env(environ, "PET_NNODES", 1) > 1:
        environ = {**environ, "RANK": environ.get("PET_NODE_RANK", ""), "WORLD_SIZE": environ["PET_NNODES"]}
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.setdefault(name, environ.get(f"PET_{name}", ""))
    rank, size = _int_from_env(environ, "RANK", 0), _int_from_env(environ, "WORLD_SIZE", 1)
    local_rank = _int_from_env(environ, "LOCAL_RANK", rank if not torch.cuda.is_available() else 0)
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {size}; it wants a rank from 0 to {size - 1}")
    _check_node_count(environ)
    return rank, size, local_rank


def warm_up_cuda() -> None:
    """Let this process's GPU begin while Python still reads its libraries: both take seconds, and neither waits."""
    if torch.cuda.is_available():
        # no daemon: a process that ends while one is inside torch would end with SIGABRT
        Thread(target=_run_matmul, name="warm-up-cuda").start()


def _run_matmul() -> None:
    """A product and its gradients, for which the device and what multiplies there have to be ready."""
    with suppress(Exception):  # whatever is wrong is told where the device is needed
        device = torch.device("cuda", rank_from_env(os.environ)[2])
        matrix = torch.ones((256, 256), dtype=torch.bfloat16, device=device, requires_grad=True)
        (matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)


def _check_node_count(environ: Mapping[str, str]) -> None:
    """Refuse a world that is not the one asked for: a rendezvous gone wrong would train on one node alone."""
    requested, joined_nodes = environ.get("MODELWRIGHT_NNODES"), _int_from_env(environ, "GROUP_WORLD_SIZE", 1)
    if requested:
        min_nodes, max_nodes = (int(number) for number in requested.split(":"))
        if not min_nodes <= joined_nodes <= max_nodes:
            expected = f"{min_nodes}" if min_nodes == max_nodes else f"{min_nodes} to {max_nodes}"
            raise Refused(
                f"{expected} nodes were asked for and {joined_nodes} met; nothing is trained. See: modelwright doctor --nodes"
            )


def local_world_size_from_env(environ: Mapping[str, str], size: int) -> int:
    """Processes on this node, as the launcher says; without one, all are on this machine."""
    nodes = _int_from_env(environ, "PET_NNODES", 1) if environ.get("PET_NNODES", "1").isdigit() else 1
    return _int_from_env(environ, "LOCAL_WORLD_SIZE", size // nodes if nodes <= size else size)


def restart_attempt(environ: Mapping[str, str]) -> str:
    """A name for this start of the ranks, the same on all of them and new at each restart."""
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "") if environ.get("GROUP_WORLD_SIZE") == "1" else ""
    return environ.get("MODELWRIGHT_RESTART_ID") or restarts or "0"  # on many nodes the counts differ from node to node


def _int_from_env(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it wants a whole number") from None


POLL_SECONDS = 0.3
STORE_LINGER_SECONDS = 5.0
"""How long a rank that keeps the store stays after a failure, so that the others can read why."""


class OtherRankFailed(ModelwrightError):
    """The main rank has written the letter; this one only leaves with the same code."""

    already_printed = True

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FailureChannel:
    """Why a rank leaves is left in the store, where the others listen: in the middle of an exchange nobody can ask."""

    def __init__(self, store: Store, rank: int, size: int, hosts_store: bool) -> None:
        self._store, self._rank, self._size, self._hosts_store = store, rank, size, hosts_store
        self._peer_failure: dict[str, Any] | None = None
        self._published = False
        self._closed, self._wake_event = False, threading.Event()
        self._poll_thread = threading.Thread(target=self._poll, daemon=True, name="failure-channel")
        self._poll_thread.start()

    @contextmanager
    def propagating(self) -> Iterator[None]:
        """Leave word of a failure; take a lost connection for what its other end has left word of."""
        try:
            yield
        except (PeerLost, OtherRankFailed):
            raise
        except RuntimeError as error:
            if not _is_lost_connection(error):
                raise
            raise self._peer_error(error) from None
        except BaseException as error:
            if hasattr(error, "exit_code"):  # a letter, or an order to stop
                self._publish(str(error), error.exit_code)
            raise

    def close(self) -> None:
        """Stop listening; where this rank keeps the store and has said something, stay until the others heard it."""
        self._closed = True
        self._wake_event.set()
        self._poll_thread.join(STORE_LINGER_SECONDS)
        deadline = time.monotonic() + (STORE_LINGER_SECONDS if self._hosts_store and self._published else 0)
        with suppress(RuntimeError):
            while time.monotonic() < deadline and self._store.add("failure_acks", 0) < self._size - 1:
                time.sleep(0.05)

    def _poll(self) -> None:
        """Look for word from time to time; woken up, once more."""
        last = False
        with suppress(RuntimeError):  # the store is gone, and its keeper with it
            while not last and self._peer_failure is None:
                last = self._wake_event.wait(POLL_SECONDS)
                if not self._closed and not self._published and self._store.check(["failure"]):
                    self._peer_failure = json.loads(self._store.get("failure"))
                    self._store.add("failure_acks", 1)

    def _publish(self, message: str, exit_code: int) -> None:
        self._published = True
        with suppress(RuntimeError):
            self._store.set("failure", json.dumps({"rank": self._rank, "message": message, "exit_code": exit_code}))

    def _peer_error(self, error: RuntimeError) -> ModelwrightError:
        self._wake_event.set()  # who leaves says so before it hangs up, so that one look is enough
        self._poll_thread.join(STORE_LINGER_SECONDS)
        if self._peer_failure is not None:
            return OtherRankFailed(self._peer_failure["message"], self._peer_failure["exit_code"])
        reason = first_line(error).rpartition("] ")[2].partition(". ")[0]
        return PeerLost(f"rank {self._rank} lost its peers ({reason}); rerun the same command to resume")


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because its other end is gone or silent."""
    patterns = ("onnection", "ocket", "imed out", "imeout", "NCCL", "Broken pipe", "Application timeout")
    return isinstance(error, dist.DistError) or (
        "gloo" in str(error) and any(pattern in str(error) for pattern in patterns)
    )
