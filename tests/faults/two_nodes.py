"""Faults of several ranks and nodes: R12 to R17, R19, R31.

Two nodes on one machine are network namespaces joined by a veth pair; that needs root and `ip`. Every fault is real:
SIGKILL, SIGSTOP, a link that is set down, a wrong clock. Each is injected into a run of its own, whose steps have the
length of real ones; then the run is finished and compared with the reference run.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import children_of, environment
from modelwright.errors import first_line
from modelwright.runs.heartbeat import process_state
from tests.faults.context import FaultContext, FaultResult, FaultRow, FaultSkipped, inject
from tests.faults.fork_server import events_of, steps_of, wait_for_step

ADDRESSES = ("10.77.0.1", "10.77.0.2")
STEPS, TIMEOUT_SECONDS = 240, 240.0
MAX_LOSS_DIFFERENCE = 1e-5
Figures = dict[str, float]


def unavailable() -> str | None:
    """What this machine lacks for network namespaces, or None."""
    if os.geteuid() != 0:
        return "needs root: network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip"
    name = f"mw-try-{os.getpid()}"
    attempt = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if attempt.returncode:
        return f"network namespaces are not allowed here: {attempt.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


@dataclass
class Launcher:
    """One node's launcher, and its descendants."""

    popen: subprocess.Popen[bytes]
    """The launcher."""
    log: Path
    """The file its output goes to."""

    @property
    def output(self) -> str:
        """Everything it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> list[int]:
        """SIGKILL to the launcher alone; returns the descendants it had."""
        descendants = children_of(self.popen.pid)
        self.popen.kill()
        self.popen.wait()
        return descendants


def start_launcher(
    recipe: Path, options: dict[str, Any], temporary: Path, log: Path, prefix: Sequence[str] = ()
) -> Launcher:
    """Start a node's launcher with the options of `NodeOptions`; `prefix` stands before the command."""
    temporary.mkdir(exist_ok=True)
    command = [*prefix, sys.executable, "-m", "tests.faults.injections", str(recipe), json.dumps(options)]
    variables = environment({"TMPDIR": str(temporary)})
    with log.open("wb") as output:
        popen = subprocess.Popen(command, cwd=recipe.parent, env=variables, stdout=output, stderr=subprocess.STDOUT)
    return Launcher(popen, log)


@dataclass
class NetnsPair:
    """Two network namespaces and the launchers in them."""

    names: tuple[str, str]
    """The two nodes."""
    launchers: list[Launcher] = field(default_factory=list)
    """What was started in them."""

    def set_link(self, state: str) -> None:
        """Set the link between the nodes `down` or `up`."""
        subprocess.run(["ip", "-n", self.names[0], "link", "set", "mw0", state], check=True)


@contextmanager
def netns_pair(delay_seconds: float = 0.0) -> Iterator[NetnsPair]:
    """Two nodes for the length of the block; whatever was started in them ends with it."""
    names = (f"mw-a-{os.getpid()}", f"mw-b-{os.getpid()}")
    pair, link = NetnsPair(names), ExitStack()
    try:
        for name in names:
            _ip("netns", "add", name)
        if delay_seconds:
            link.enter_context(_delayed_link(names, delay_seconds))
        else:
            _ip("link", "add", "mw0", "netns", names[0], "type", "veth", "peer", "name", "mw0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "mw0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "mw0", "up")
        yield pair
    finally:
        for launcher in pair.launchers:
            if launcher.popen.poll() is None:
                launcher.kill()
        link.close()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""From linux/if_tun.h."""


@contextmanager
def _delayed_link(names: tuple[str, str], seconds: float) -> Iterator[None]:
    """A TUN device in each node; a thread passes every packet on to the other one after the delay."""
    devices: list[int] = []
    done = threading.Event()
    relay = threading.Thread(target=_pass_packets_on, args=(devices, seconds, done))
    try:
        for number, name in enumerate(names):
            devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            device = f"mw{number}-{os.getpid()}"
            fcntl.ioctl(devices[-1], TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
            _ip("link", "set", device, "netns", name, "name", "mw0")
        relay.start()
        yield
    finally:
        done.set()
        if relay.ident is not None:
            relay.join()
        for each in devices:
            os.close(each)


def _pass_packets_on(devices: list[int], seconds: float, done: threading.Event) -> None:
    waiting: deque[tuple[float, int, bytes]] = deque()
    while not done.is_set():
        patience = waiting[0][0] - time.monotonic() if waiting else 0.1
        for device in select.select(devices, [], [], min(max(patience, 0.0), 0.1))[0]:
            with suppress(OSError):  # a device that is not up yet
                packet = os.read(device, 1 << 16)
                waiting.append((time.monotonic() + seconds, devices[1 - devices.index(device)], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, packet = waiting.popleft()
            with suppress(OSError):  # lost, as on any link; TCP sends it again
                os.write(device, packet)


ROUND_TRIP = """
import socket, sys, time
begin = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9), timeout=60).close()
except ConnectionRefusedError:
    print(time.monotonic() - begin)
"""


def round_trip_seconds(pair: NetnsPair) -> float:
    """How long the first node takes to refuse a connection of the second."""
    command = ["ip", "netns", "exec", pair.names[1], sys.executable, "-c", ROUND_TRIP, ADDRESSES[0]]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, at);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += SECONDS;
    return code;
}
"""
"""A preloaded library: a wall clock that is wrong for one process."""


def wrong_clock(folder: Path, seconds: int) -> tuple[str, ...] | None:
    """Words before a command which put its wall clock ahead; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK.replace("SECONDS", str(seconds)), encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return ("env", f"LD_PRELOAD={library}")


def surviving_pids(pids: list[int], seconds: float) -> list[int]:
    """Which of these processes still run after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process_state(pid) not in (None, "Z", "X") for pid in pids):
        time.sleep(0.1)
    return [pid for pid in pids if process_state(pid) not in (None, "Z", "X")]


@dataclass
class TwoNodeRun:
    """A run on two nodes."""

    pair: NetnsPair
    """The nodes."""
    folder: Path
    """Where recipe and run are; both nodes see it."""
    nodes: str = "2"
    """How many nodes it wants."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def start(self, prefix_of_node_1: tuple[str, ...] = ()) -> list[Launcher]:
        """Start both nodes."""
        return [self.start_node(node, prefix_of_node_1 if node else ()) for node in (0, 1)]

    def start_node(self, node: int, prefix: tuple[str, ...] = ()) -> Launcher:
        """Start one node's launcher."""
        options = {"nnodes": self.nodes, "node_rank": node, "master_addr": ADDRESSES[0], "nproc_per_node": "1"}
        log = self.folder / f"node-{node}-{len(self.pair.launchers)}.log"
        launcher = start_launcher(
            self.folder / "recipe.yaml", options, self.folder / f"node-{node}", log,
            ("ip", "netns", "exec", self.pair.names[node], *prefix),
        )  # fmt: skip
        self.pair.launchers.append(launcher)
        return launcher

    def stop(self) -> None:
        """SIGTERM to every node that still runs, and wait for its end."""
        running = [node for node in self.pair.launchers if node.popen.poll() is None]
        for node in running:
            node.popen.send_signal(signal.SIGTERM)
        self.wait_for_exit(running, "all nodes stop")

    def events(self, name: str, after: float = 0.0) -> list[dict[str, Any]]:
        """The journal's events of one kind after a time."""
        return [event for event in events_of(self.run, name) if event["time"] > after]

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done."""
        self.wait_for(lambda: any(event["step"] >= step for event in self.events("step")), f"step {step}")

    def step_after(self, moment: float, restarted: bool = True) -> float:
        """When the first step was done after a moment; `restarted`: by ranks that were started after it."""

        def first() -> float | None:
            since = next((event["time"] for event in self.events("resumed", moment)), None) if restarted else moment
            steps = self.events("step", since) if since else []
            return steps[0]["time"] if steps else None

        self.wait_for(lambda: first() is not None, "a step after the fault")
        done = first()
        assert done is not None
        return done

    def rank_pid(self, node: int) -> int:
        """The process of the rank that runs on a node now."""
        return next(iter(rank_pids(self.folder / f"node-{node}")))

    def wait_for_exit(self, launchers: list[Launcher], what: str) -> None:
        """Wait until the launchers have ended."""
        self.wait_for(lambda: all(node.popen.poll() is not None for node in launchers), what)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; after the timeout raise with the output of the nodes."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.05)
        printed = "\n".join(f"{each.log.name}: {each.output[-1500:]}" for each in self.pair.launchers)
        raise TimeoutError(f"never came: {what}\n{printed}")


def rank_pids(folder: Path) -> list[int]:
    """The processes of the ranks of a launcher whose TMPDIR is this folder."""
    path = next(folder.glob("modelwright-*/ranks.json"))
    return [int(pid) for pid in json.loads(path.read_text(encoding="utf-8")).values()]


def write_run(folder: Path, steps: int = STEPS) -> Path:
    """A tiny model and a recipe that tunes it, in a folder."""
    from benchmarks.workloads import save_small_model
    from modelwright.data.sources import EMBEDDED_DATASETS

    folder.mkdir(parents=True)
    texts = EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines()
    save_small_model(folder / "model", texts, layers=2, width=64)
    (folder / "recipe.yaml").write_text(f"""\
name: faults
output_dir: {folder / "run"}
model: {{model_name_or_path: {folder / "model"}}}
data: {{dataset_name: field-guide, columns: {{question: prompt, answer: completion}}, max_rows: 60, test_size: 4}}
sft: {{max_steps: {steps}, global_batch_size: 4, per_device_train_batch_size: 2, learning_rate: 1e-3, max_length: 64,
  precision: fp32, save_steps: 5, save_total_limit: 2, eval_steps: {steps}}}
compare: {{max_new_tokens: 1}}
""", encoding="utf-8")  # fmt: skip
    return folder


def finish_run(folder: Path) -> None:
    """Run the recipe to its end with two ranks of this machine."""
    arguments = ["launch", str(folder / "recipe.yaml"), "--nproc-per-node", "2", "--log-format", "plain"]
    command = [sys.executable, "-m", "modelwright", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment({}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run could not be finished: {done.stdout[-1000:]}{done.stderr[-1000:]}")


def difference(run: Path, reference: Path) -> dict[str, Any]:
    """Batches that differ from the reference run's, and the largest difference in loss, over all steps done.

    A step that was done twice, before and after a fault, counts both times.
    """
    steps = events_of(run, "step")
    expected = {event["step"]: event for event in events_of(reference, "step")}
    changed = {event["step"] for event in steps if event["batch_hash"] != expected[event["step"]]["batch_hash"]}
    missing = expected.keys() - {event["step"] for event in steps}
    return {
        "steps": len(expected),
        "batches_changed": len(changed | missing),
        "largest_loss_difference": max(abs(event["loss"] - expected[event["step"]]["loss"]) for event in steps),
    }


def kill_rank(run: TwoNodeRun) -> Figures:
    """SIGKILL to the rank on the second node."""
    moment = time.time()
    os.kill(run.rank_pid(1), signal.SIGKILL)
    return {"rank_killed": run.step_after(moment) - moment}


def stop_rank(run: TwoNodeRun) -> Figures:
    """SIGSTOP to the rank on the second node."""
    moment, node = time.time(), run.pair.launchers[1]
    os.kill(run.rank_pid(1), signal.SIGSTOP)
    run.wait_for(lambda: "has been stopped" in node.output, "the stopped rank is reported")
    detected = time.time()
    return {"rank_stopped_found": detected - moment, "rank_stopped": run.step_after(moment) - moment}


def cut_link_40_s(run: TwoNodeRun) -> Figures:
    """Set the link down for 40 s."""
    run.pair.set_link("down")
    time.sleep(40)
    run.pair.set_link("up")
    moment = time.time()
    return {"link_40": run.step_after(moment, restarted=False) - moment}


def cut_link(run: TwoNodeRun) -> Figures:
    """Set the link down for good."""
    run.pair.set_link("down")
    moment, both = time.time(), run.pair.launchers
    run.wait_for_exit(both, "both sides exit")
    seconds = time.time() - moment
    for node in both:
        reported = "no heartbeat" in node.output or "answered" in node.output
        assert reported, f"a side exits without the cause: {node.output}"
        assert node.popen.returncode == 75, f"a side exits with {node.popen.returncode}: {node.output}"
    return {"link_gone": seconds}


def lose_node(run: TwoNodeRun) -> Figures:
    """SIGKILL to the second node's launcher: its processes end with it, the first trains alone; then it comes back."""
    moment = time.time()
    orphans = surviving_pids(run.pair.launchers[-1].kill(), 10.0)
    lost = run.step_after(moment) - moment
    returned = time.time()
    run.start_node(1)
    back = run.step_after(returned) - returned
    return {"node_lost": lost, "launcher_killed": float(len(orphans)), "node_back": back}


def skew_clock(run: TwoNodeRun) -> Figures:
    """Start the second node with a clock that is 90 s ahead."""
    prefix = wrong_clock(run.folder, 90)
    if prefix is None:
        raise RuntimeError("needs a C compiler, for a clock that is wrong for one process alone")
    both = run.start(prefix)
    run.wait_for_exit(both, "both are refused")
    refused = [node for node in both if node.popen.returncode == 77 and "clock" in node.output]
    return {"clock_skew": float(len(refused))}


@dataclass(frozen=True)
class FaultCase:
    """One row of the scorecard on two nodes."""

    inject: Callable[[TwoNodeRun], Figures]
    """Injects the fault; returns what was measured."""
    goals: dict[str, float]
    """Largest allowed value of each figure; for `clock_skew` the smallest."""
    sentence: str
    """The figures, for people: those of `goals` in order."""
    nodes: str = "2"
    """How many nodes the run wants; a range lets it train with one."""
    trains: bool = True
    """Whether the run is started before, and finished after."""


CASES = {
    "R12": FaultCase(stop_rank, {"rank_stopped_found": 30.0, "rank_stopped": 45.0},
                     "detected after {} s, training again after {} s"),
    "R13": FaultCase(kill_rank, {"rank_killed": 10.0}, "training again after {} s"),
    "R15": FaultCase(cut_link_40_s, {"link_40": 15.0}, "training again {} s after the link is back"),
    "R16": FaultCase(cut_link, {"link_gone": 120.0}, "both nodes exit with a message after {} s"),
    "R17": FaultCase(skew_clock, {"clock_skew": 2.0}, "{} of 2 nodes refuse to start", trains=False),
    "R31": FaultCase(lose_node, {"node_lost": 45.0, "launcher_killed": 0.0, "node_back": 45.0},
                     "training again after {} s", nodes="1:2"),
}  # fmt: skip


def two_node_row(row: str, context: FaultContext) -> FaultResult:
    """One row on two nodes, compared with a reference run that is made once."""
    if reason := context.cached("netns", unavailable):
        raise FaultSkipped(reason)
    case = CASES[row]
    folder = Path(context.cached("two nodes", lambda: tempfile.mkdtemp(prefix="faults-", dir=context.folder)))

    def reference() -> Path:
        finish_run(write_run(folder / "reference"))
        return folder / "reference"

    try:
        figures, changes = run_case(case, folder / row, context.cached("two-node reference", reference))
    except (RuntimeError, AssertionError, OSError, LookupError, StopIteration) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return FaultResult("the trial failed", False, notes=(first_line(error),))
    within = [
        figures[name] >= goal if name == "clock_skew" else figures[name] <= goal for name, goal in case.goals.items()
    ]
    changed = changes.get("batches_changed", 0)
    same_losses = case.nodes != "2" or changes.get("largest_loss_difference", 0.0) == 0.0
    numbers = {name: round(figures[name], 1) for name in case.goals}
    sentence = case.sentence.format(*(f"{value:g}" for value in numbers.values()))
    met = all(within) and not changed and same_losses
    return FaultResult(sentence, met, {**numbers, "batches_changed": changed})


def run_case(case: FaultCase, folder: Path, reference: Path) -> tuple[Figures, dict[str, Any]]:
    """Inject one fault into a run of its own: the figures, and how the finished run differs from the reference."""
    with netns_pair() as pair:
        run = TwoNodeRun(pair, write_run(folder), case.nodes)
        if case.trains:
            run.start()
            run.wait_for_step(12)
        figures = case.inject(run)
        pair.set_link("up")
        run.stop()
    if case.trains:
        finish_run(folder)
        return figures, difference(folder / "run", reference / "run")
    if events_of(folder / "run", "step"):
        raise RuntimeError("steps were trained all the same")
    return figures, {}


@dataclass
class Launch:
    """A launcher of this machine's ranks, whose steps have a real length."""

    folder: Path
    """Where recipe and run are."""
    per_node: int
    """Ranks."""
    launchers: list[Launcher] = field(default_factory=list)
    """The launchers, the latest last."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the launcher."""
        options = {"nnodes": "1", "node_rank": 0, "nproc_per_node": str(self.per_node)}
        log = self.folder / f"launch-{len(self.launchers)}.log"
        self.launchers.append(start_launcher(self.folder / "recipe.yaml", options, self.folder, log))
        return self.launchers[-1].popen

    def close(self) -> None:
        """Kill whatever still runs."""
        for launcher in self.launchers:
            if launcher.popen.poll() is None:
                launcher.kill()


def launcher_killed(context: FaultContext) -> FaultResult:
    """R14: SIGKILL to the launcher of two ranks; no process may survive, and the same command resumes."""
    folder = context.fresh_folder("launcher")
    settings = {"max_steps": 200, "save_steps": 4, "eval_steps": 200, "global_batch_size": 4,
                "gradient_accumulation_steps": 1}  # fmt: skip
    context.recipe(folder, **settings)
    launch = Launch(folder, per_node=2)
    try:
        launch.start()
        wait_for_step(launch.run, 9)
        descendants = launch.launchers[-1].kill()
        orphans = surviving_pids(descendants, 10.0)
        began, moment = time.monotonic(), time.time()
        process = launch.start()
        while not [event for event in events_of(launch.run, "step") if event["time"] > moment]:
            if process.poll() is not None or time.monotonic() - began > 120:
                return FaultResult("the same command does not resume", False)
            time.sleep(0.05)
        seconds = time.monotonic() - began
        resumed = [event["step"] for event in events_of(launch.run, "resumed")]
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    finally:
        launch.close()
    left = f"{len(orphans)} of {len(descendants)} processes left after 10 s"
    figure = f"{left}; training again {seconds:.1f} s after the next launch"
    met = not orphans and seconds <= 15 and bool(resumed) and code == 75
    return FaultResult(figure, met, {"orphans": len(orphans), "seconds": round(seconds, 1), "resumed_from": resumed})


def other_world_size(context: FaultContext) -> FaultResult:
    """R19: a run resumes with half or twice the ranks after a SIGTERM, and after a SIGKILL."""
    settings = {"global_batch_size": 4, "gradient_accumulation_steps": 1}
    reference = context.reference(**settings)["steps"]
    changes = [(2, 1, signal.SIGTERM), (1, 2, signal.SIGKILL)]
    same, of, largest, notes = 0, 0, 0.0, []
    for before, after, number in changes:
        folder = context.fresh_folder("world")
        recipe = context.recipe(folder, **settings)
        slowed = (*context.extra_injections, inject("slow_steps", seconds=0.08))
        ranks = context.fork_server.start_ranks(["run", str(recipe)], folder, before, first=slowed)
        wait_for_step(folder / "run", 5)
        os.kill(ranks[-1].pid, number)
        codes = [process.wait() for process in ranks]
        rest = context.fork_server.run_ranks(["run", str(recipe)], folder, after, first=context.extra_injections)
        steps = steps_of(folder / "run")
        of += len(reference)
        if any(code for code, _ in rest) or len(steps) != len(reference):
            notes.append(f"{before} → {after}: {codes}, then {[code for code, _ in rest]}: {rest[0][1][-200:]}")
            continue
        same += sum(steps[step]["batch_hash"] == batch for step, (_, batch, *_) in reference.items())
        largest = max(largest, *(abs(steps[step]["loss"] - loss) for step, (loss, *_) in reference.items()))
    figure = f"{same} of {of} global batches identical; losses differ by at most {largest:.1g}"
    met = same == of and largest <= MAX_LOSS_DIFFERENCE and not notes
    numbers = {"batches": of, "identical": same, "largest_loss_difference": largest}
    return FaultResult(figure, met, numbers, None, tuple(notes))


def _row(name: str) -> Callable[[FaultContext], FaultResult]:
    return lambda context: two_node_row(name, context)


HOW = "two network namespaces joined by a cable, "
FAULTS = (
    FaultRow("R12", "a rank hangs (SIGSTOP)", f"{HOW}SIGSTOP", "found in 30 s, training again in 45 s",
             "torchrun: training again after 57 s with a timeout of 20 s (default: 1,800 s) (measured Nov 2026)",
             _row("R12"), 60),
    FaultRow("R13", "a rank is killed", f"{HOW}SIGKILL", "training again in 10 s",
             "torchrun: training again after 8.4 s (measured Nov 2026)", _row("R13"), 40),
    FaultRow("R14", "the launcher is killed", "SIGKILL to a launcher of two ranks, then the same command",
             "0 orphans after 10 s, training again in 15 s",
             "torchrun: 2 processes continue to train (measured Nov 2026)", launcher_killed, 45),
    FaultRow("R15", "network link down for 40 s", f"{HOW}pulled and put back", "training again 15 s after it is back",
             "torchrun: training again 20.9 s after the link is back (measured Nov 2026)", _row("R15"), 70),
    FaultRow("R16", "network link down forever", f"{HOW}pulled", "both nodes end with a message in 120 s",
             "torchrun: exits after 940 s and ignores SIGTERM (measured Nov 2026)", _row("R16"), 90),
    FaultRow("R17", "one node's clock 90 s ahead", f"{HOW}a preloaded clock on one", "the world as asked, or refused",
             "torchrun: one node trains alone and exits with 0 (measured Nov 2026)", _row("R17"), 40),
    FaultRow("R19", "resumed with another number of ranks", "2 → 1 after SIGTERM, 1 → 2 after SIGKILL, gloo",
             "100 % of the global batches identical, losses within 1e-5",
             "HF Trainer: batches identical; with dropout, losses differ by 0.0036 (measured Nov 2026)",
             other_world_size, 15),
    FaultRow("R31", "one of two nodes is lost (--nnodes 1:2)", f"{HOW}the launcher of one killed, nodes 1:2",
             "training again in 45 s", "torchrun: training again after 50.6 s (measured Nov 2026)", _row("R31"), 60),
)  # fmt: skip
