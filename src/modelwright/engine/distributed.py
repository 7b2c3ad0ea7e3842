"""Rank and world size, the process group, collectives, and the channel by which a failing rank informs its peers."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
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
WAIT_NOTICE_SECONDS = 3.0
"""After so long a rank says whom it waits for."""


@dataclass(frozen=True)
class World:
    """The ranks that train together; a single process is a world too."""

    rank: int = 0
    size: int = 1
    """Number of ranks (WORLD_SIZE)."""
    device: torch.device = CPU
    """Device of this rank."""
    local_world_size: int = 1
    """Ranks per node; 1 if nodes have different numbers."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)
    """Reports this rank's phase and step to the launcher."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU and this rank's GPU."""
        torch.default_generator.manual_seed(seed)  # torch.manual_seed visits every device type: 0.37 ms instead of 0.02
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Sum of each number over all ranks."""
        if self.size == 1:
            return list(values)
        self.heartbeat.set_phase("waiting in all_reduce")
        return self.all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()

    def all_reduce_min(self, *values: float) -> list[float]:
        """Minimum of each number over all ranks."""
        if self.size == 1:
            return list(values)
        return self.all_reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MIN).tolist()

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a CPU tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op)
        return values

    def on_rank0_broadcast(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0; every rank returns its value (sent as JSON) or raises its error."""
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
        """Set the timeout of collectives, once the duration of a step is known."""
        if self.size > 1:
            set_group_timeout(timedelta(seconds=seconds), dist.group.WORLD)

    def _broadcast_json(self, value: dict[str, Any]) -> dict[str, Any]:
        """Broadcast JSON from rank 0 (broadcast_object_list would send pickles)."""
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
    """Join the process group of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        set_pdeathsig()  # if the launcher is killed, its ranks end too
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
                local_world_size = _common_local_world_size(local_world_size_from_env(os.environ, size))
                yield World(rank, size, device, local_world_size, heartbeat)
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
    # CPU tensors go through gloo, so that small messages never wait for the GPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    awaited = "the other ranks" if rank == 0 else "rank 0 and the others"
    message = f"rank {rank} of {size} waits for {awaited} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    notice = threading.Timer(WAIT_NOTICE_SECONDS, print, [message], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        store = next(iter(rendezvous("env://", rank, size, timeout=timeout)))[0]
        # the launcher's store outlives its ranks: keys of an earlier attempt must not be read
        store = PrefixStore(f"modelwright/{restart_attempt(os.environ)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, OSError) as error:
        reason = first_line(error)
        raise PeerLost(
            f"rank {rank} of {size}: rendezvous failed ({reason}); run modelwright doctor --nnodes"
        ) from None
    finally:
        notice.cancel()
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    channel = FailureChannel(store, rank, size, hosts_store)
    try:
        yield channel
    finally:
        _rank0_group.cache_clear()
        channel.close()
        dist.destroy_process_group()


def _common_local_world_size(count: int) -> int:
    """Ranks per node if equal on all nodes, else 1: all ranks must build the same mesh."""
    min_and_max = torch.tensor([count, -count])
    dist.all_reduce(min_and_max, dist.ReduceOp.MIN)
    return count if int(min_and_max[0]) == -int(min_and_max[1]) else 1


@cache
def _rank0_group() -> Any:
    """A process group with a long timeout: rank 0 may download or write for longer than a step takes."""
    return dist.new_group(backend="gloo", timeout=RANK0_TIMEOUT)


def visible_gpus() -> list[str]:
    """Indices or UUIDs of the GPUs that CUDA may use; empty for all."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def rank_from_env(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, world size and local rank from torchrun's variables, or a training operator's with one process per node."""
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
    """Start CUDA in a thread while Python imports libraries: both take seconds."""
    if torch.cuda.is_available():
        # no daemon: a thread cut off inside torch ends the process with SIGABRT
        threading.Thread(target=_run_matmul, name="warm-up-cuda").start()


def _run_matmul() -> None:
    """A matmul forward and backward, which loads cuBLAS and creates the CUDA context."""
    with suppress(Exception):  # errors are reported where the device is used
        device = torch.device("cuda", rank_from_env(os.environ)[2])
        matrix = torch.ones((256, 256), dtype=torch.bfloat16, device=device, requires_grad=True)
        (matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)


def _check_node_count(environ: Mapping[str, str]) -> None:
    """Refuse a wrong number of nodes: after a failed rendezvous one node alone would train."""
    requested, joined_nodes = environ.get("MODELWRIGHT_NNODES"), _int_from_env(environ, "GROUP_WORLD_SIZE", 1)
    if requested:
        min_nodes, max_nodes = (int(number) for number in requested.split(":"))
        if not min_nodes <= joined_nodes <= max_nodes:
            expected = f"{min_nodes}" if min_nodes == max_nodes else f"{min_nodes} to {max_nodes}"
            raise Refused(
                f"{expected} nodes were asked for and {joined_nodes} met; nothing is trained. "
                "See: modelwright doctor --nnodes"
            )


def local_world_size_from_env(environ: Mapping[str, str], size: int) -> int:
    """Ranks on this node by the launcher's variables; without a launcher, all ranks."""
    nodes = _int_from_env(environ, "PET_NNODES", 1) if environ.get("PET_NNODES", "1").isdigit() else 1
    return _int_from_env(environ, "LOCAL_WORLD_SIZE", size // nodes if nodes <= size else size)


def restart_attempt(environ: Mapping[str, str]) -> str:
    """An id of this start of the ranks, equal on all ranks and new at each restart."""
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "") if environ.get("GROUP_WORLD_SIZE") == "1" else ""
    return environ.get("MODELWRIGHT_RESTART_ID") or restarts or "0"  # restart counts differ between nodes


def _int_from_env(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it wants a whole number") from None


POLL_SECONDS = 0.3
STORE_LINGER_SECONDS = 5.0
"""How long the rank that hosts the store stays after a failure, so that others can read the reason."""


class OtherRankFailed(ModelwrightError):
    """Another rank failed and reported it; this rank exits with the same code."""

    already_printed = True

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FailureChannel:
    """A failing rank publishes its reason in the store, which the others poll: collectives cannot carry it."""

    def __init__(self, store: Store, rank: int, size: int, hosts_store: bool) -> None:
        self._store, self._rank, self._size, self._hosts_store = store, rank, size, hosts_store
        self._peer_failure: dict[str, Any] | None = None
        self._published = False
        self._closed, self._wake_event = False, threading.Event()
        self._poll_thread = threading.Thread(target=self._poll, daemon=True, name="failure-channel")
        self._poll_thread.start()

    @contextmanager
    def propagating(self) -> Iterator[None]:
        """Publish errors of this rank; turn a lost connection into the error its peer published."""
        try:
            yield
        except (PeerLost, OtherRankFailed):
            raise
        except RuntimeError as error:
            if not _is_lost_connection(error):
                raise
            raise self._peer_error(error) from None
        except BaseException as error:
            if hasattr(error, "exit_code"):  # an error of ours, or a request to stop
                self._publish(str(error), error.exit_code)
            raise

    def close(self) -> None:
        """Stop polling; the rank that hosts the store waits until the others have read its failure."""
        self._closed = True
        self._wake_event.set()
        self._poll_thread.join(STORE_LINGER_SECONDS)
        deadline = time.monotonic() + (STORE_LINGER_SECONDS if self._hosts_store and self._published else 0)
        with suppress(RuntimeError):
            while time.monotonic() < deadline and self._store.add("failure_acks", 0) < self._size - 1:
                time.sleep(0.05)

    def _poll(self) -> None:
        """Poll for a failure of a peer; once more after the wake event."""
        last = False
        with suppress(RuntimeError):  # the store is gone, and the rank that hosted it
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
        self._wake_event.set()  # a failing rank publishes before it disconnects: one more poll is enough
        self._poll_thread.join(STORE_LINGER_SECONDS)
        if self._peer_failure is not None:
            return OtherRankFailed(self._peer_failure["message"], self._peer_failure["exit_code"])
        reason = first_line(error).rpartition("] ")[2].partition(". ")[0]
        return PeerLost(f"rank {self._rank} lost its peers ({reason}); rerun the same command to resume")


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because a peer is gone or timed out."""
    patterns = ("onnection", "ocket", "imed out", "imeout", "NCCL", "Broken pipe", "Application timeout")
    is_gloo = "gloo" in str(error) and any(pattern in str(error) for pattern in patterns)
    return is_gloo or isinstance(error, dist.DistError)
