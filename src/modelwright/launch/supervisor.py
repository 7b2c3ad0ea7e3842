"""The torch-free parent process of one node: starts the elastic agent, kills ranks that hang, cleans up at the end.

supervisor (no torch) → agent (torch's elastic agent) → fork server → ranks; each dies with its parent. The agent starts
and restarts ranks. It can block for minutes while a link is down, so killing processes is the supervisor's job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from modelwright.errors import Interrupted
from modelwright.launch.config import JOIN_TIMEOUT, REJOIN_TIMEOUT, LaunchConfig
from modelwright.runs.heartbeat import RankStatus, has_exited, process_state, read_rank_statuses, wait_for_exit

POLL_INTERVAL = 0.5
AGENT_STOP_TIMEOUT = 5.0
"""Time for an agent without ranks to exit after a stop request."""
EXIT_BARRIER_TIMEOUT = 330.0
"""How long a node that is done waits for the others."""
TORCH_IMPORT_TIMEOUT = 300.0
"""Time for the agent to import torch from a slow disk, besides the rendezvous."""
FIRST_WAIT_LOG, WAIT_LOG_INTERVAL = 8.0, 30.0
"""So often, while there are no other nodes, a line says which node is awaited, and where."""
AGENT_ENV = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore:resource_tracker",  # of a killed agent; the kernel frees its names anyway
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs creates no CUDA context before the fork
}


def supervise(config: LaunchConfig) -> tuple[int, str | None]:
    """Run this node's part; returns the exit code, and a message where none was printed yet."""
    with tempfile.TemporaryDirectory(prefix="modelwright-") as ipc_dir:
        return Supervisor(config, IpcDir(Path(ipc_dir))).run()


class Supervisor:
    """Supervises one node's launch."""

    def __init__(self, config: LaunchConfig, ipc: IpcDir) -> None:
        self._config, self._ipc = config, ipc
        self._watchdog, self._node_monitor = Watchdog(), NodeHeartbeatMonitor()
        self._lost_node: str | None = None
        self._stop_signals, self._terminated_pids = 0, set[int]()
        self._idle_since, self._next_wait_notice = time.monotonic(), FIRST_WAIT_LOG
        self._rank_pids: dict[int, int] = {}
        threads = max(1, len(os.sched_getaffinity(0)) // config.nproc_per_node)
        defaults = {**AGENT_ENV, **_socket_ifname_env(config), "OMP_NUM_THREADS": str(threads)}
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "modelwright.launch.agent", config.to_json(), str(ipc.folder), str(os.getpid())],
            env={**defaults, **os.environ, "PYTHONPATH": package_pythonpath()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, and ranks get one SIGTERM
        )

    def run(self) -> tuple[int, str | None]:
        """Poll until the agent has exited."""
        try:
            with self._signal_handlers():
                while self._agent.poll() is None:
                    if message := self._poll():
                        return self._ipc.result or (Interrupted.exit_code, message)
                    time.sleep(POLL_INTERVAL)
        finally:
            self._kill_all()
        code, message = self._ipc.result or (None, None)
        if code is None:
            code = Interrupted.exit_code if self._stop_signals else 1
            status = exit_status(self._agent.returncode)
            message = None if self._stop_signals else f"the agent ended unexpectedly ({status})"
        return (code if code >= 0 else 1), message

    def _poll(self) -> str | None:
        """Check everything once; returns a message where there is nothing left to wait for."""
        now, pids = time.monotonic(), self._ipc.rank_pids
        if pids != self._rank_pids:
            self._rank_pids = pids
            self._watchdog.reset()
        states = {pid: process_state(pid) for pid in pids.values()}
        statuses = read_rank_statuses(self._ipc.folder)
        statuses = {rank: status for rank, status in statuses.items() if pids.get(rank) == status.pid}
        for decision in self._watchdog.check(statuses, states, now, self._ipc.is_stopping):
            self._kill_rank(decision)
        alive = [rank for rank, pid in pids.items() if states[pid] not in (None, "Z", "X")]
        if self._stop_signals:
            self._terminate_ranks([pids[rank] for rank in alive])  # also those that were starting when the signal came
        lost_node = self._node_monitor.lost_node(self._ipc.node_heartbeats, now)
        self._lost_node = lost_node or (None if alive else self._lost_node)
        if alive:
            self._idle_since = now
            for rank in alive if self._lost_node else ():
                self._kill_rank(KillDecision(rank, pids[rank], f"cannot continue: {self._lost_node}"))
        return self._timeout_message(now - self._idle_since)

    def _timeout_message(self, idle: float) -> str | None:
        """The error message if no rank has run for longer than a rendezvous may take."""
        config = self._config
        if self._ipc.is_finished:
            return "other nodes did not finish; see their output" if idle > EXIT_BARRIER_TIMEOUT else None
        if self._stop_signals:
            return "stopped; rerun the same command to resume" if idle > AGENT_STOP_TIMEOUT else None
        if not self._rank_pids:
            self._print_wait_notice(idle)
            timeout_message = f"rendezvous timed out after {JOIN_TIMEOUT} s; see: modelwright doctor --nnodes"
            return timeout_message if idle > JOIN_TIMEOUT + TORCH_IMPORT_TIMEOUT else None
        timeout = REJOIN_TIMEOUT if self._lost_node else JOIN_TIMEOUT  # a busy node is not a lost one
        if idle > timeout:
            who = "the other nodes" if config.node_rank == 0 else f"node 0, {config.master_addr}:{config.master_port},"
            why = f"{self._lost_node}; " if self._lost_node else ""
            return f"{why}{who} did not rejoin within {timeout} s; rerun the same command to resume"
        return None

    def _print_wait_notice(self, idle: float) -> None:
        """Print which node is awaited, so that a wrong address shows before the timeout."""
        if idle < self._next_wait_notice or self._config.nnodes.max_nodes == 1:
            return
        config, self._next_wait_notice = self._config, idle + WAIT_LOG_INTERVAL
        whom = "the other nodes" if config.node_rank == 0 else "node 0"
        where = f"{config.master_addr}:{config.master_port}; local address {config.local_addr}"
        self._ipc.log(f"node {config.node_rank} is waiting for {whom} at {where}")

    def _kill_rank(self, decision: KillDecision) -> None:
        self._ipc.record_kill(decision)
        self._ipc.log(f"rank {decision.rank} (process {decision.pid}) {decision.reason}; killing it")
        with suppress(ProcessLookupError):
            os.kill(decision.pid, signal.SIGKILL)

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        signums = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        previous_handlers = {signum: signal.signal(signum, self._on_signal) for signum in signums}
        try:
            yield
        finally:
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """First signal: ranks save and stop; second signal: everything is killed."""
        self._stop_signals += 1
        self._ipc.request_stop()
        alive = [pid for pid in self._ipc.rank_pids.values() if not has_exited(pid)]
        if self._stop_signals > 1 or not alive:
            self._agent.kill()
        self._terminate_ranks(alive)

    def _terminate_ranks(self, pids: list[int]) -> None:
        """Send SIGTERM to ranks, once each."""
        for pid in set(pids) - self._terminated_pids:
            self._terminated_pids.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _kill_all(self) -> None:
        """Kill whatever is left; children of the fork server die with it."""
        if self._agent.poll() is None:
            self._agent.kill()
        self._agent.wait()
        pids = list(self._ipc.rank_pids.values())
        for pid in wait_for_exit(pids, 2.0):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for_exit(pids, 10.0)


def package_pythonpath() -> str:
    """PYTHONPATH with which a child process finds this package, also if it is not installed, and all this one finds."""
    source_root = str(Path(__file__).resolve().parents[2])
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([source_root, *map(os.path.abspath, inherited)]))


def _socket_ifname_env(config: LaunchConfig) -> dict[str, str]:
    """The network interface that leads to node 0; with several, gloo and NCCL would guess."""
    if config.nnodes.max_nodes == 1 or config.socket_ifname is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": config.socket_ifname, "NCCL_SOCKET_IFNAME": config.socket_ifname}


def exit_status(code: int) -> str:
    """An exit code, or the name of the signal that killed a process."""
    return f"code {code}" if code >= 0 else signal.Signals(-code).name


@dataclass(frozen=True)
class IpcDir:
    """Small files in a local folder, each with one writer: IPC between supervisor, agent and ranks."""

    folder: Path
    """The folder, which also has the ranks' heartbeat files."""

    def log(self, line: str) -> None:
        """Print a line to stderr: stdout belongs to rank 0."""
        print(f"launch: {line}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the files of the previous ranks, before new ones start."""
        for path in (*self.folder.glob("rank-*.json"), *self.folder.glob("kill-*.json"), self.folder / "stopping"):
            path.unlink(missing_ok=True)

    def set_rank_pids(self, pids: dict[int, int]) -> None:
        """Record the processes of the ranks."""
        self._write("ranks.json", {str(rank): pid for rank, pid in pids.items()})

    @property
    def rank_pids(self) -> dict[int, int]:
        """Process ids of the current ranks, by rank."""
        return {int(rank): pid for rank, pid in (self._read("ranks.json") or {}).items()}

    def mark_stopping(self) -> None:
        """Mark that the agent is stopping its ranks."""
        (self.folder / "stopping").touch()

    @property
    def is_stopping(self) -> bool:
        return (self.folder / "stopping").exists()

    def mark_finished(self) -> None:
        """Mark that every rank of this node is done; only other nodes are awaited."""
        (self.folder / "finished").touch()

    @property
    def is_finished(self) -> bool:
        return (self.folder / "finished").exists()

    def request_stop(self) -> None:
        """Record that this node was asked to stop."""
        (self.folder / "stop_requested").touch()

    @property
    def stop_requested(self) -> bool:
        return (self.folder / "stop_requested").exists()

    def record_kill(self, decision: KillDecision) -> None:
        """Record why the supervisor kills a rank."""
        self._write(f"kill-{decision.pid}.json", asdict(decision))

    def kill_reason(self, pid: int) -> str | None:
        """Why the supervisor killed a process, if it did."""
        value = self._read(f"kill-{pid}.json")
        return value["reason"] if value else None

    def write_node_heartbeats(self, count: int, ages: dict[int, float]) -> None:
        """Record a successful exchange with node 0, and the heartbeat ages of the other nodes."""
        self._write("node_heartbeats.json", {"count": count, "ages": {str(node): age for node, age in ages.items()}})

    @property
    def node_heartbeats(self) -> tuple[int, dict[int, float]] | None:
        """The last successful exchange with node 0."""
        value = self._read("node_heartbeats.json")
        return (value["count"], {int(node): age for node, age in value["ages"].items()}) if value else None

    def set_result(self, exit_code: int, message: str | None) -> None:
        """Record the agent's exit code and message."""
        self._write("result.json", {"exit_code": exit_code, "message": message})

    @property
    def result(self) -> tuple[int, str | None] | None:
        """Exit code and message of the agent, if it wrote them."""
        value = self._read("result.json")
        return (value["exit_code"], value["message"]) if value else None

    def _write(self, name: str, value: dict[str, Any]) -> None:
        partial = self.folder / f".{name}.{threading.get_ident()}"
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(self.folder / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            value = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None


SIGSTOP_TIMEOUT = 8.0
"""Longest time in the kernel's stopped state (T), so that a short debugger stop is tolerated."""
BLOCKED_RANK_TIMEOUT = 10.0
"""A rank without progress for so long after another has exited is blocked by it."""
HEARTBEAT_TIMEOUT = 180.0
"""No heartbeat: something holds the GIL, or the kernel blocks the process."""
MIN_STEP_TIMEOUT, STEP_TIMEOUT_FACTOR = 180.0, 20.0
"""A step may take so many times the median, and never less than this: recompiling for longer rows takes minutes."""
NODE_TIMEOUT = 60.0
"""A node without heartbeat for so long is lost: a link down for 40 s is tolerated."""
STARTUP_TIMEOUT = 1800.0
"""What has no median yet: loading, compiling, the first steps, waiting for a download or a checkpoint."""
SLOW_PHASES = ("starting", "waiting for rank 0", "loading data", "loading model", "saving", "comparing")


@dataclass(frozen=True)
class KillDecision:
    """A rank to kill, and why."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    reason: str
    """The reason, as the rest of a sentence that begins with the rank."""


@dataclass
class _RankTimes:
    """Last status of a rank, and the times of its last heartbeat and progress."""

    status: RankStatus
    heartbeat_since: float
    progress_since: float
    stopped_since: float | None = None


class NodeHeartbeatMonitor:
    """Finds nodes whose heartbeats stopped, from what the agent records."""

    def __init__(self) -> None:
        self._count = -1
        self._since: float | None = None

    def lost_node(self, heartbeats: tuple[int, Mapping[int, float]] | None, now: float) -> str | None:
        """The lost node, as part of a sentence; node 0 if the agent itself cannot reach it."""
        if heartbeats is None:
            return None
        count, ages = heartbeats
        if count != self._count:
            self._count, self._since = count, now
        silent = [node for node, seconds in ages.items() if seconds >= NODE_TIMEOUT]
        if silent:
            return f"node {silent[0]} sent no heartbeat for {ages[silent[0]]:.0f} s"
        if ages and self._since is not None and now - self._since >= NODE_TIMEOUT:
            return f"node 0 has not answered for {now - self._since:.0f} s"
        return None


class Watchdog:
    """Tracks how long each rank has been in its current state."""

    def __init__(self) -> None:
        self._times: dict[int, _RankTimes] = {}
        self._exited_since: float | None = None
        self._last_check: float | None = None

    def check(
        self, statuses: Mapping[int, RankStatus], states: Mapping[int, str | None], now: float, stopping: bool = False
    ) -> list[KillDecision]:
        """Ranks to kill now; `states` are the kernel's process states by pid, `now` a monotonic clock."""
        if self._last_check is not None and now - self._last_check > SIGSTOP_TIMEOUT / 2:
            self._shift_deadlines(now - self._last_check)  # the supervisor itself was stopped: that time does not count
        self._last_check = now
        for rank, status in statuses.items():
            self._update(rank, status, states.get(status.pid), now)
        running = {pid for pid, state in states.items() if state not in (None, "Z", "X")}
        alive = {rank for rank, status in statuses.items() if status.pid in running and not status.exit_message}
        self._exited_since = (self._exited_since or now) if stopping or len(alive) < len(statuses) else None
        decisions = [self._decide(self._times[rank], now) for rank in sorted(alive)]
        return [decision for decision in decisions if decision is not None]

    def reset(self) -> None:
        """Reset: new processes run the ranks."""
        self._times.clear()
        self._exited_since = None

    def _update(self, rank: int, status: RankStatus, state: str | None, now: float) -> None:
        times = self._times.get(rank)
        if times is None or times.status.pid != status.pid:
            self._times[rank] = _RankTimes(status, now, now)
            return
        if times.status.beats != status.beats:
            times.heartbeat_since = now
        if times.status.phase_changes != status.phase_changes:
            times.progress_since = now
        times.stopped_since = (times.stopped_since or now) if state == "T" else None
        times.status = status

    def _decide(self, times: _RankTimes, now: float) -> KillDecision | None:
        status = times.status
        decide = partial(KillDecision, status.rank, status.pid)
        stalled, silent = now - times.progress_since, now - times.heartbeat_since
        if times.stopped_since is not None and now - times.stopped_since >= SIGSTOP_TIMEOUT:
            return decide(f"has been stopped for {now - times.stopped_since:.0f} s (SIGSTOP)")
        blocked = self._exited_since is not None and min(stalled, now - self._exited_since) >= BLOCKED_RANK_TIMEOUT
        if blocked and status.phase != "saving":
            return decide(f"is blocked, {status.phase}, since other ranks have exited")
        if silent >= HEARTBEAT_TIMEOUT:
            return decide(f"sent no heartbeat for {silent:.0f} s, {status.phase}")
        if stalled >= step_timeout(status):
            usual = f" (a step usually takes {status.step_seconds:.2g} s)" if status.step_seconds else ""
            return decide(f"made no progress: {status.phase} after step {status.step} for {stalled:.0f} s{usual}")
        return None

    def _shift_deadlines(self, seconds: float) -> None:
        for times in self._times.values():
            times.heartbeat_since += seconds
            times.progress_since += seconds
            times.stopped_since = None


def step_timeout(status: RankStatus) -> float:
    """How long a rank may stay in its current phase."""
    if status.phase in SLOW_PHASES or status.step_seconds is None:
        return STARTUP_TIMEOUT
    return max(MIN_STEP_TIMEOUT, STEP_TIMEOUT_FACTOR * status.step_seconds)
