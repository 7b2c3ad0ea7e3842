"""Watch over one node of a launch: start torch's agent, end ranks that hang, and leave nothing behind.

supervisor (this, without torch) → agent (torch's elastic agent) → fork server → ranks; each dies with the one before.
The agent starts ranks and starts them again; it may be deaf for minutes while a link is down, so that ending things is
the supervisor's own business.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from modelwright.errors import Interrupted
from modelwright.launch.signs import Signs
from modelwright.launch.watchdog import Finding, Pulses, Watchdog
from modelwright.launch.wish import Wish
from modelwright.runs.beat import is_gone, process_state, read_beats, wait_until_gone

LOOK_SECONDS = 0.5
STOP_SECONDS = 5.0
"""How long an agent without ranks may take to leave when it is asked to."""
EXIT_BARRIER_SECONDS = 330.0
"""How long a node that is done waits for the others to be."""
IMPORT_SECONDS = 300.0
"""How long the agent may take to load torch on a slow disk, besides the nodes' meeting."""
WAITING_SECONDS = 60.0
"""After so long without other nodes it is said who is waited for, and where."""
QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore:resource_tracker",  # an agent that is killed leaves names that the kernel forgets anyway
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that counting GPUs before the fork does not spoil them for the ranks
}


def supervise(wish: Wish) -> tuple[int, str | None]:
    """Run this node's part to its end; returns the exit code, and a letter where nobody has told it yet."""
    with tempfile.TemporaryDirectory(prefix="modelwright-") as place:
        return Supervisor(wish, Signs(Path(place))).run()


class Supervisor:
    """One node's launch while it lasts."""

    def __init__(self, wish: Wish, signs: Signs) -> None:
        self._wish, self._signs = wish, signs
        self._watchdog, self._pulses = Watchdog(), Pulses()
        self._lost: str | None = None
        self._times_asked, self._asked = 0, set[int]()
        self._idle_since, self._said_waiting = time.monotonic(), wish.nodes.most == 1
        self._known: dict[int, int] = {}
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(_threads(wish.per_node))}
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "modelwright.launch.agent", wish.as_text(), str(signs.folder), str(os.getpid())],
            env={**QUIET, **_interface(wish), **threads, **os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, and ranks are asked once
        )

    def run(self) -> tuple[int, str | None]:
        """Look after the agent until it has ended."""
        try:
            with self._listening():
                while self._agent.poll() is None:
                    if letter := self._look():
                        return self._signs.ending or (Interrupted.exit_code, letter)
                    time.sleep(LOOK_SECONDS)
        finally:
            self._end_everything()
        code, letter = self._signs.ending or (None, None)
        if code is None:
            code = Interrupted.exit_code if self._times_asked else 1
            letter = None if self._times_asked else f"the agent ended unexpectedly ({_ended(self._agent.returncode)})"
        return (code if code >= 0 else 1), letter

    def _look(self) -> str | None:
        """One look at everything; returns a letter where there is nothing left to wait for."""
        now, pids = time.monotonic(), self._signs.pids
        if pids != self._known:
            self._known = pids
            self._watchdog.forget()
        states = {pid: process_state(pid) for pid in pids.values()}
        beats = {rank: at for rank, at in read_beats(self._signs.folder).items() if pids.get(rank) == at.pid}
        for finding in self._watchdog.look(beats, states, now, self._signs.is_stopping):
            self._end_rank(finding)
        alive = [rank for rank, pid in pids.items() if states[pid] not in (None, "Z", "X")]
        if self._times_asked:
            self._ask([pids[rank] for rank in alive])  # also those that were being started when it came
        self._lost = self._pulses.lost(self._signs.last_pulse, now) or (None if alive else self._lost)
        if alive:
            self._idle_since = now
            for rank in alive if self._lost else ():
                self._end_rank(Finding(rank, pids[rank], f"cannot go on: {self._lost}"))
        return self._tired(now - self._idle_since)

    def _tired(self, idle: float) -> str | None:
        """Whether no rank has been there for longer than a meeting of the nodes may take."""
        wish = self._wish
        if self._signs.is_finished:
            return "other nodes did not finish; their output says why" if idle > EXIT_BARRIER_SECONDS else None
        if self._times_asked:
            return "stopped; the same command continues" if idle > STOP_SECONDS else None
        if not self._known:
            self._say_waiting(idle)
            late = f"the nodes did not meet within {wish.join_seconds} s; see: modelwright doctor --nodes"
            return late if idle > wish.join_seconds + IMPORT_SECONDS else None
        patience = wish.rejoin_seconds if self._lost else wish.join_seconds  # a busy machine is no lost one
        if idle > patience:
            who = "the other nodes" if wish.node == 0 else f"the main node, {wish.address}:{wish.port},"
            why = f"{self._lost}; " if self._lost else ""
            return f"{why}{who} could not be met again within {patience} s; the same command continues"
        return None

    def _say_waiting(self, idle: float) -> None:
        """Once: a person who has mistaken an address or forgotten a node learns it before the meeting fails."""
        if idle < WAITING_SECONDS or self._said_waiting:
            return
        wish, self._said_waiting = self._wish, True
        whom = "the other nodes" if wish.node == 0 else "node 0"
        where = f"{wish.address}:{wish.port}; this machine is {wish.local_address}"
        self._signs.tell(f"node {wish.node} waits for {whom} at {where}")

    def _end_rank(self, finding: Finding) -> None:
        self._signs.found(finding)
        self._signs.tell(f"rank {finding.rank} (process {finding.pid}) {finding.reason}; it is ended")
        with suppress(ProcessLookupError):
            os.kill(finding.pid, signal.SIGKILL)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Asked once, ranks save and stop; asked twice, everything ends."""
        self._times_asked += 1
        self._signs.ask_to_stop()
        alive = [pid for pid in self._signs.pids.values() if not is_gone(pid)]
        if self._times_asked > 1 or not alive:
            self._agent.kill()
        self._ask(alive)

    def _ask(self, pids: list[int]) -> None:
        """Ask ranks to save and stop, each once."""
        for pid in set(pids) - self._asked:
            self._asked.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _end_everything(self) -> None:
        """Whatever is left is killed; the kernel sees to what the fork server holds."""
        if self._agent.poll() is None:
            self._agent.kill()
        self._agent.wait()
        pids = list(self._signs.pids.values())
        for pid in wait_until_gone(pids, 2.0):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids, 10.0)


def _threads(per_node: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // per_node)


def python_path() -> str:
    """Where processes of ours find this very package, also where it is not installed, and whatever this one finds."""
    here = str(Path(__file__).resolve().parents[2])
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([here, *map(os.path.abspath, more)]))


def _interface(wish: Wish) -> dict[str, str]:
    """Where a node has several networks, the one that leads to the main node; both libraries would guess."""
    if wish.nodes.most == 1 or wish.interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": wish.interface, "NCCL_SOCKET_IFNAME": wish.interface}


def _ended(code: int | None) -> str:
    return f"code {code}" if code is None or code >= 0 else signal.Signals(-code).name
