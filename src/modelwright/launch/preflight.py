"""Look at all nodes before they train: do they meet, agree, share a folder, compute alike, and talk fast."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError
from modelwright.launch.doctor import Check
from modelwright.launch.equipment import look_at_equipment
from modelwright.launch.muster import facts_of, objections
from modelwright.launch.network import address_towards, interface_of
from modelwright.launch.nodes import Asked
from modelwright.launch.wish import PORT, Nodes, Wish, parse_nodes

WAIT = timedelta(seconds=120)
MEGABYTES, TURNS = 16, 5
SLOW_BYTES = 50e6
"""Below this, in bytes a second, exchanging gradients takes longer than most steps."""


def look_at_nodes(asked: Asked, shared: Path | None) -> list[Check]:
    """Every node runs this at the same time; each tells what it found about itself and the main node."""
    wish = _wish(asked)
    try:
        store = _meet(wish)
    except RuntimeError as error:
        return [_unreachable(wish, str(error).splitlines()[0])]
    reach = Check("meeting", "ok", f"node {wish.node} reaches {wish.address}:{wish.port} by {wish.interface}")
    met = [reach, *_agree(wish, store), _share(wish, store, shared)]
    return [*met, *look_at_equipment(wish, store, shared or Path()), _bandwidth(wish, store)]


def _wish(asked: Asked) -> Wish:
    nodes = parse_nodes(asked.nodes or "2")
    if asked.node is None or asked.address is None:
        raise UsageError("doctor --nodes wants --node-rank and --main-address; start it on every node at the same time")
    port = asked.port or PORT
    try:
        local = address_towards(asked.address, port)
    except OSError as error:
        raise UsageError(f"--main-address {asked.address} leads nowhere from here ({error})") from None
    return Wish(
        command=(), per_node=1, logs="", nodes=Nodes(nodes.most, nodes.most), node=asked.node, address=asked.address,
        port=port, local_address=local, interface=interface_of(local), join_seconds=int(WAIT.total_seconds()),
    )  # fmt: skip


def _unreachable(wish: Wish, reason: str) -> Check:
    if wish.node == 0:
        return Check("meeting", "fail", f"port {wish.port} cannot be opened: {reason}", "choose another with --port")
    fix = "start node 0 too; open the port in its firewall; --main-address must be one that this node reaches"
    return Check("meeting", "fail", f"{wish.address}:{wish.port} does not answer: {reason}", fix)


def _meet(wish: Wish) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(wish.address, wish.port, wish.nodes.most, is_master=wish.node == 0, timeout=WAIT)
    store.set(f"facts/{wish.node}", json.dumps(facts_of(wish)))
    return store


def _agree(wish: Wish, store: Any) -> list[Check]:
    """Clocks by asking and answering in turn, versions by comparing; the main node judges all."""
    if wish.node:
        store.wait([f"ask/{wish.node}"], WAIT)
        store.set(f"answer/{wish.node}", repr(time.time()))
        found = json.loads(store.get(f"verdict/{wish.node}"))
        return [_agreement(wish.node, found["ahead"], found["objections"])]
    checks = []
    for node in range(1, wish.nodes.most):
        other = json.loads(store.get(f"facts/{node}"))
        asked = time.time()
        store.set(f"ask/{node}", "")
        told = float(store.get(f"answer/{node}"))
        ahead = told - (asked + time.time()) / 2
        found = objections(facts_of(wish), other, ahead)
        store.set(f"verdict/{node}", json.dumps({"ahead": ahead, "objections": found}))
        checks.append(_agreement(node, ahead, found))
    return checks


def _agreement(node: int, ahead: float, found: list[str]) -> Check:
    told = f"node {node}: clock {ahead:+.3f} s, same versions" if not found else "; ".join(found)
    return Check("clock and versions", "fail" if found else "ok", told, facts={"node": node, "ahead_seconds": ahead})


def _share(wish: Wish, store: Any, shared: Path | None) -> Check:
    """Whether all nodes see the folder where the run will be."""
    if shared is None:
        return Check("shared folder", "skip", "no recipe was named, so there is no run folder to look at")
    token = shared / ".modelwright-preflight"
    if wish.node == 0:
        shared.mkdir(parents=True, exist_ok=True)
        token.write_text("here", encoding="utf-8")
        store.set("token", "written")
    store.get("token")
    seen = token.exists()
    store.add("looked", 1)
    while wish.node == 0 and store.add("looked", 0) < wish.nodes.most:
        time.sleep(0.05)
    if wish.node == 0:
        token.unlink(missing_ok=True)
    fix = "" if seen else "mount the same folder on every node: a stopped run goes on from the checkpoints in it"
    return Check("shared folder", "ok" if seen else "fail", f"{shared}{'' if seen else ' is not the same here'}", fix)


def _bandwidth(wish: Wish, store: Any) -> Check:
    """How many bytes of gradients a second the nodes can add up, over gloo."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if wish.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", wish.interface)
    dist.init_process_group(
        "gloo", store=PrefixStore("bandwidth", store), rank=wish.node, world_size=wish.nodes.most, timeout=WAIT
    )
    tensor = torch.ones(MEGABYTES * 250_000)
    dist.all_reduce(tensor)
    began = time.perf_counter()
    for _ in range(TURNS):
        dist.all_reduce(tensor)
    rate = TURNS * tensor.numel() * 4 / (time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    fix = (
        "see that traffic goes by the fast network: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME" if rate < SLOW_BYTES else ""
    )
    state = "warn" if fix else "ok"
    return Check("all-reduce", state, f"{rate / 1e6:,.0f} MB/s", fix, {"bytes_per_second": rate})  # type: ignore[arg-type]
