"""Node 0 admits the other nodes (clock, versions, recipe, device) before they train together; then all send heartbeats.

Everything goes through the TCPStore on node 0's port, the same that the rendezvous uses. Torch's rendezvous compares
wall clocks of different machines: with 90 s between them one node would train alone and report success."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from modelwright import __version__
from modelwright.errors import Refused, UsageError, first_line
from modelwright.launch import doctor
from modelwright.launch.config import JOIN_TIMEOUT, LaunchConfig
from modelwright.launch.doctor import CheckResult, run_checks
from modelwright.launch.supervisor import IpcDir

MAX_CLOCK_SKEW = 2.0
"""Largest difference of clocks: the rendezvous drops a node after 12 s without keep-alive, by its own clock."""
REPLY_TIMEOUT = 60.0
NODE_HEARTBEAT_INTERVAL = 2.0
NodeInfo = Mapping[str, Any]


def node_info(config: LaunchConfig) -> dict[str, Any]:
    """Versions, recipe hash and address of this node."""
    return {
        "node": config.node_rank,
        "address": config.local_addr,
        "modelwright": __version__,
        "torch": doctor.installed_version("torch"),
        "transformers": doctor.installed_version("transformers"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "recipe": config.recipe_hash,
    }


def node_mismatches(node0: NodeInfo, other: NodeInfo, skew_seconds: float) -> list[str]:
    """Why a node may not join, each with its fix."""
    who = f"node {other['node']} ({other['address']})"
    errors = []
    if abs(skew_seconds) > MAX_CLOCK_SKEW:
        direction = "ahead of" if skew_seconds > 0 else "behind"
        errors.append(
            f"the clock of {who} is {abs(skew_seconds):.1f} s {direction} node 0's; "
            "set both by a time server (chronyc makestep)"
        )
    for package in ("modelwright", "torch", "transformers", "python"):
        if node0[package] != other[package]:
            errors.append(f"{who} has {package} {other[package]}, node 0 {node0[package]}; install the same")
    if node0["recipe"] != other["recipe"]:
        errors.append(f"{who} was started with another recipe or different --set options than node 0")
    return errors


def admission_errors(node0: NodeInfo, other: NodeInfo, skew_seconds: float) -> list[str]:
    """Why a node may not train with node 0: what `node_mismatches` reports, or a device that differs."""
    comparison = compare_devices(node0["device_info"], other["device_info"], int(other["node"]))
    device_errors = [f"{comparison.detail}; {comparison.fix}"] if comparison.status == "fail" else []
    return [*node_mismatches(node0, other, skew_seconds), *device_errors]


class NodeAdmission:
    """One node's side of the store: node 0 admits, the others request; all send heartbeats."""

    def __init__(self, config: LaunchConfig, ipc: IpcDir) -> None:
        self._config, self._ipc = config, ipc
        self._store = connect_store(config, is_master=config.node_rank == 0)
        self._members: tuple[int, ...] = ()
        self._last_changes: dict[int, tuple[bytes, float]] = {}
        self._heartbeat_count = 0

    def join(self) -> None:
        """Be admitted by node 0 or refused with its errors; then send heartbeats."""
        if self._config.node_rank == 0:
            self._in_background(self._serve_requests)
        else:
            self._request_admission()
        self._in_background(self._send_heartbeats)

    def set_members(self, members: tuple[int, ...]) -> None:
        """Nodes that train together from now on; earlier heartbeat ages are reset."""
        self._members, self._last_changes = members, {}
        self._ipc.write_node_heartbeats(self._heartbeat_count, dict.fromkeys(members, 0.0))

    def _request_admission(self) -> None:
        store = self._store
        ticket = store.add("admission/tickets", 1)
        info = {**node_info(self._config), "device_info": device_info(self._config)}
        store.set(f"admission/{ticket}/node_info", json.dumps(info))
        try:
            send_clock(store, f"admission/{ticket}", REPLY_TIMEOUT)
            errors = json.loads(store.get(f"admission/{ticket}/errors"))
            store.set(f"admission/{ticket}/read", "")
        except RuntimeError as error:
            raise UsageError(f"cannot connect to node 0 ({first_line(error)})") from None
        if errors:
            raise Refused("\n".join(errors))

    def _serve_requests(self) -> None:
        store, served = connect_store(self._config, is_master=False), 0
        node0 = {**node_info(self._config), "device_info": device_info(self._config)}
        while True:
            while served < store.add("admission/tickets", 0):
                served += 1
                with suppress(RuntimeError):  # it disconnected during the exchange
                    self._admit(store, served, node0)
            time.sleep(0.2)

    def _admit(self, store: Any, ticket: int, node0: NodeInfo) -> None:
        key = f"admission/{ticket}"
        store.wait([f"{key}/node_info"], timedelta(seconds=REPLY_TIMEOUT))
        other = json.loads(store.get(f"{key}/node_info"))
        errors = admission_errors(node0, other, measure_clock_skew(store, key, REPLY_TIMEOUT))
        store.set(f"{key}/errors", json.dumps(errors))
        if errors and not self._config.nnodes.elastic:
            with suppress(RuntimeError):  # it disconnected before it read them
                store.wait([f"{key}/read"], timedelta(seconds=REPLY_TIMEOUT))  # the store closes with this process
            self._ipc.set_result(Refused.exit_code, "\n".join(errors))
            os._exit(Refused.exit_code)

    def _send_heartbeats(self) -> None:
        """Send this node's heartbeat, and record the heartbeat age of the others."""
        store = connect_store(self._config, is_master=False)
        while True:
            self._heartbeat_count += 1
            with suppress(RuntimeError):
                store.set(f"heartbeat/{self._config.node_rank}", str(self._heartbeat_count))
                members = self._members
                ages = {node: self._heartbeat_age(store, node) for node in members}
                if members is self._members:
                    self._ipc.write_node_heartbeats(self._heartbeat_count, ages)
            time.sleep(NODE_HEARTBEAT_INTERVAL)

    def _heartbeat_age(self, store: Any, node: int) -> float:
        now, last_changes = time.monotonic(), self._last_changes
        last_change = last_changes.get(node)
        if node == self._config.node_rank:
            return 0.0
        value = store.get(f"heartbeat/{node}") if store.check([f"heartbeat/{node}"]) else b""
        if last_change is None or last_change[0] != value:
            last_changes[node] = (value, now)
        return now - last_changes[node][1]

    def _in_background(self, action: Callable[[], None]) -> None:
        threading.Thread(target=action, daemon=True, name=action.__name__.strip("_")).start()


def send_clock(store: Any, key: str, timeout: float) -> None:
    """Answer node 0's request for this node's time."""
    store.wait([f"{key}/clock_request"], timedelta(seconds=timeout))
    store.set(f"{key}/clock", repr(time.time()))


def measure_clock_skew(store: Any, key: str, timeout: float) -> float:
    """On node 0: how many seconds the clock of the node that answers under the key is ahead."""
    sent_at = time.time()
    store.set(f"{key}/clock_request", "")
    store.wait([f"{key}/clock"], timedelta(seconds=timeout))
    return clock_skew(sent_at, float(store.get(f"{key}/clock")), time.time())


def clock_skew(sent_at: float, remote_time: float, received_at: float) -> float:
    """Seconds that the other clock is certainly ahead: its reading lies between two readings of this one."""
    if remote_time < sent_at:
        return remote_time - sent_at
    return max(0.0, remote_time - received_at)


def connect_store(config: LaunchConfig, is_master: bool, timeout: float = JOIN_TIMEOUT) -> Any:
    """Connect to the TCPStore; node 0 hosts it, the others wait until it is up."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=timeout)
    return TCPStore(config.master_addr, config.master_port, is_master=is_master, multi_tenant=True, timeout=limit)


def check_node_devices(config: LaunchConfig, store: Any, folder: Path) -> list[CheckResult]:
    """Devices of this node compared with those of node 0; node 0 reports all nodes."""

    def disk() -> CheckResult:
        return doctor.check_disk(folder)

    own_results = run_checks([doctor.check_devices, doctor.check_bf16, disk])
    info = {**device_info(config), "checks": [check.as_json() for check in own_results]}
    store.set(f"device/{config.node_rank}", json.dumps(info))
    node0 = json.loads(store.get("device/0"))
    results: list[CheckResult] = []
    for node in range(config.nnodes.max_nodes) if config.node_rank == 0 else (config.node_rank,):
        other = json.loads(store.get(f"device/{node}"))
        checks = [CheckResult(**check) for check in other["checks"]]
        results += [replace(check, name=f"node {node}: {check.name}") for check in checks]
        results += [compare_devices(node0, other, node)] if node else []
    return results


def compare_devices(node0: Mapping[str, Any], other: Mapping[str, Any], node: int) -> CheckResult:
    """Whether ranks on both nodes would use the same backend and precision, and be as fast."""
    name, data = f"node {node}: like node 0", {"node0": node0["device"], "node": other["device"]}
    both = f"node 0 has {node0['device']}, node {node} {other['device']}"
    if node0["kind"] != other["kind"]:
        fix = "give every node a GPU, or hide those that are there with CUDA_VISIBLE_DEVICES="
        return CheckResult(name, "fail", f"{both}: one uses NCCL, the other gloo", fix, data)
    if node0["precision"] != other["precision"]:
        detail = f"{both}: precision auto is {node0['precision']} there and {other['precision']} here"
        slower = "fp16" if "fp16" in (node0["precision"], other["precision"]) else "fp32"
        return CheckResult(name, "fail", detail, f"write it in the recipe, such as precision: {slower}", data)
    if node0["device"] != other["device"] and node0["kind"] == "cuda":
        return CheckResult(name, "warn", both, "every step waits for the slowest: use equal GPUs", data)
    return CheckResult(name, "ok", both, data=data)


def device_info(config: LaunchConfig) -> dict[str, str]:
    """The device of a rank here, and what precision auto would mean where the recipe leaves it to the device."""
    import torch

    from modelwright.plan.hardware import detect_hardware, device_info_of, probe_device
    from modelwright.plan.stage import choose_precision

    # the driver's answer is enough, and creates no CUDA context in a process that does not train
    machine = device_info_of(detect_hardware()) if torch.cuda.is_available() else probe_device()
    precision = choose_precision(machine)[0] if config.auto_precision else "as the recipe says"
    return {"kind": machine.device, "device": machine.name, "precision": precision}
