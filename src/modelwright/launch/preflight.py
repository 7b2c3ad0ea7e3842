"""Look at all nodes before they train: do they meet, agree, share a folder, compute alike, and talk fast."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError, first_line
from modelwright.launch.doctor import Check
from modelwright.launch.equipment import look_at_equipment
from modelwright.launch.muster import ahead, facts_of, objections
from modelwright.launch.network import address_towards, interface_of
from modelwright.launch.nodes import Asked, fingerprint, leaves_precision, number_among
from modelwright.launch.wish import PORT, Nodes, Wish, parse_nodes
from modelwright.recipe.load import LoadedRecipe

WAIT = timedelta(seconds=120)
MEGABYTES, TURNS = 16, 5
SLOW_BYTES = 50e6
"""Below this, in bytes a second, exchanging gradients takes longer than most steps."""


def look_at_nodes(asked: Asked, loaded: LoadedRecipe | None) -> list[Check]:
    """Every node runs this at the same time; each tells what it found about itself and the main node."""
    wish, shared = _wish(asked, loaded), Path(loaded.recipe.run_dir) if loaded else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what it would write is told as a finding
    try:
        store = _meet(wish)
    except RuntimeError as error:
        return [_unreachable(wish, first_line(error))]
    found = _absent(wish, store)
    if found:
        return found
    found.append(Check("meeting", "ok", f"node {wish.node} reaches {wish.address}:{wish.port} by {wish.interface}"))
    try:
        found += [*_agree(wish, store), _share(wish, store, shared)]
        found += look_at_equipment(wish, store, shared or Path())
        found.append(_bandwidth(wish, store))
    except RuntimeError as error:
        fix = "its own output says why; then start doctor on every node again"
        found.append(Check("the others", "fail", f"another node has gone ({first_line(error)})", fix))
    return found


def _wish(asked: Asked, loaded: LoadedRecipe | None) -> Wish:
    nodes = parse_nodes(asked.nodes or "2")
    if asked.node is None or asked.address is None:
        raise UsageError("doctor --nodes wants --node-rank and --main-address; start it on every node at the same time")
    node, port = number_among(nodes, asked.node), asked.port or PORT
    try:
        local = address_towards(asked.address, port)
    except OSError as error:
        raise UsageError(f"--main-address {asked.address} leads nowhere from here ({error})") from None
    return Wish(
        command=(), per_node=1, logs="", nodes=Nodes(nodes.most, nodes.most), node=node, address=asked.address,
        port=port, local_address=local, interface=interface_of(local), join_seconds=int(WAIT.total_seconds()),
        fingerprint=fingerprint(loaded) if loaded else "",
        leaves_precision=leaves_precision(loaded) if loaded else True,
    )  # fmt: skip


def _unreachable(wish: Wish, reason: str) -> Check:
    if wish.node == 0:
        return Check("meeting", "fail", f"port {wish.port} cannot be opened: {reason}", "choose another with --port")
    fix = "start node 0 too; open the port in its firewall; --main-address must be one that this node reaches"
    return Check("meeting", "fail", f"{wish.address}:{wish.port} does not answer: {reason}", fix)


def _meet(wish: Wish) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    main = wish.node == 0
    store = TCPStore(wish.address, wish.port, is_master=main, timeout=WAIT, wait_for_workers=False)
    store.set(f"facts/{wish.node}", json.dumps(facts_of(wish)))
    return store


def _absent(wish: Wish, store: Any) -> list[Check]:
    """On the main node: who did not come."""
    found, deadline = [], time.monotonic() + WAIT.total_seconds()
    for node in range(1, wish.nodes.most) if wish.node == 0 else ():
        try:
            store.wait([f"facts/{node}"], timedelta(seconds=max(1.0, deadline - time.monotonic())))
        except RuntimeError:
            told = f"node {node} did not come within {WAIT.total_seconds():.0f} s"
            fix = f"start doctor there too, with --node-rank {node}; from there {wish.address}:{wish.port} must answer"
            found.append(Check("meeting", "fail", told, fix))
    return found


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
        seconds = ahead(asked, told, time.time())
        found = objections(facts_of(wish), other, seconds)
        store.set(f"verdict/{node}", json.dumps({"ahead": seconds, "objections": found}))
        checks.append(_agreement(node, seconds, found))
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
    try:
        rate = _exchange(wish, store)
    except RuntimeError as error:
        found = f"the nodes meet, but cannot exchange gradients ({first_line(error)})"
        fix = f"open all ports between the nodes, not only {wish.port}; GLOO_SOCKET_IFNAME names the network to take"
        return Check("all-reduce", "fail", found, fix)
    fix = (
        "see that traffic goes by the fast network: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME" if rate < SLOW_BYTES else ""
    )
    state = "warn" if fix else "ok"
    return Check("all-reduce", state, f"{rate / 1e6:,.0f} MB/s", fix, {"bytes_per_second": rate})  # type: ignore[arg-type]


def _exchange(wish: Wish, store: Any) -> float:
    """Bytes a second."""
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
    return rate
