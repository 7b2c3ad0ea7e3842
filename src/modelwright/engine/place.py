"""Where a process stands in the world, by the variables that launchers and operators set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread

import torch

from modelwright.errors import Refused, UsageError


def place_in_world(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, size and local rank by the standard variables, or by an operator's where one process makes a node."""
    per_node = environ.get("PET_NPROC_PER_NODE", "")
    if "LOCAL_RANK" not in environ and per_node.isdigit() and int(per_node) > 1:
        raise UsageError(
            f"PET_NPROC_PER_NODE is {per_node}, but a single process was started; "
            "start it as: torchrun -m modelwright run RECIPE"
        )
    if "RANK" not in environ and ":" in environ.get("PET_NNODES", ""):
        raise UsageError(f"PET_NNODES is {environ['PET_NNODES']}; start it as: torchrun -m modelwright run RECIPE")
    if "RANK" not in environ and _number(environ, "PET_NNODES", 1) > 1:
        environ = {**environ, "RANK": environ.get("PET_NODE_RANK", ""), "WORLD_SIZE": environ["PET_NNODES"]}
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.setdefault(name, environ.get(f"PET_{name}", ""))
    rank, size = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    local_rank = _number(environ, "LOCAL_RANK", rank if not torch.cuda.is_available() else 0)
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {size}; it wants a rank from 0 to {size - 1}")
    _assert_nodes(environ)
    return rank, size, local_rank


def wake() -> None:
    """Let this process's GPU begin while Python still reads its libraries: both take seconds, and neither waits."""
    if torch.cuda.is_available():
        # no daemon: a process that ends while one is inside torch would end with SIGABRT
        Thread(target=_use, name="wake").start()


def _use() -> None:
    """A product and its gradients, for which the device and what multiplies there have to be ready."""
    with suppress(Exception):  # whatever is wrong is told where the device is needed
        device = torch.device("cuda", place_in_world(os.environ)[2])
        numbers = torch.ones((256, 256), dtype=torch.bfloat16, device=device, requires_grad=True)
        (numbers @ numbers).sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)


def _assert_nodes(environ: Mapping[str, str]) -> None:
    """Refuse a world that is not the one asked for: a rendezvous gone wrong would train on one node alone."""
    asked, found = environ.get("MODELWRIGHT_NODES"), _number(environ, "GROUP_WORLD_SIZE", 1)
    if asked:
        fewest, most = (int(number) for number in asked.split(":"))
        if not fewest <= found <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            raise Refused(
                f"{wanted} nodes were asked for and {found} met; nothing is trained. See: modelwright doctor --nodes"
            )


def per_node(environ: Mapping[str, str], size: int) -> int:
    """Processes on this node, as the launcher says; without one, all are on this machine."""
    nodes = _number(environ, "PET_NNODES", 1) if environ.get("PET_NNODES", "1").isdigit() else 1
    return _number(environ, "LOCAL_WORLD_SIZE", size // nodes if nodes <= size else size)


def attempt_of(environ: Mapping[str, str]) -> str:
    """A name for this start of the ranks, the same on all of them and new at each restart."""
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "") if environ.get("GROUP_WORLD_SIZE") == "1" else ""
    return environ.get("MODELWRIGHT_ATTEMPT") or restarts or "0"  # on many nodes the counts differ from node to node


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it wants a whole number") from None
