"""Ranks, launchers, links and clocks: what happens to a run of several processes, on one machine and on two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import children_of, environment
from tests.faults import faults
from tests.faults.cluster import left_of
from tests.faults.fault import Bench, Fault, Outcome, Skipped, inject
from tests.faults.rig import steps_of, told, wait_for_step

OF_NODES = {
    "R12": ("rank_stopped", ("rank_stopped_found", "rank_stopped")),
    "R13": ("rank_killed", ("rank_killed",)),
    "R15": ("link_40", ("link_40",)),
    "R16": ("link_gone", ("link_gone",)),
    "R17": ("clock_skew", ("clock_skew",)),
    "R31": ("node_lost", ("node_lost",)),
}
"""By row: what is done to two nodes, and which of its figures belong here."""
MOST_DIFFERENCE = 1e-5


@dataclass
class Launch:
    """A launcher with everything below it, whose steps have a real length."""

    folder: Path
    """Where recipe and run are."""
    per_node: int
    """Ranks."""
    starts: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """The launchers, the latest last."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the launcher."""
        asked = json.dumps({"nnodes": "1", "node_rank": 0, "nproc_per_node": str(self.per_node)})
        words = [sys.executable, "-m", "tests.faults.node", str(self.folder / "recipe.yaml"), asked]
        log = (self.folder / f"launch-{len(self.starts)}.log").open("wb")
        place = environment({"TMPDIR": str(self.folder)})
        self.starts.append(subprocess.Popen(words, cwd=self.folder, env=place, stdout=log, stderr=subprocess.STDOUT))
        return self.starts[-1]

    def end(self) -> None:
        """End whatever is left."""
        for process in self.starts:
            if process.poll() is None:
                process.kill()
                process.wait()


def of_nodes(row: str, bench: Bench) -> Outcome:
    """One row of what is done to two nodes; all that were chosen are measured together, once."""
    chosen = [act for each, (act, _) in OF_NODES.items() if each in bench.chosen]
    found: dict[str, Any] = bench.once("two nodes", lambda: faults.measure(only=chosen))
    if "skipped" in found:
        raise Skipped(found["skipped"])
    rows = [found["faults"].get(name, {"failed": "it was not measured"}) for name in OF_NODES[row][1]]
    notes = tuple(each["failed"] for each in rows if "failed" in each)
    if notes:
        return Outcome("the trial failed", False, notes=notes)
    changed = sum(each.get("batches_changed", 0) for each in rows)
    numbers = {name: each["figure"] for name, each in zip(OF_NODES[row][1], rows, strict=True)}
    figure = SENTENCES[row].format(*(f"{each['figure']:g}" for each in rows))
    return Outcome(figure, all(each["met"] for each in rows) and not changed, {**numbers, "batches_changed": changed})


SENTENCES = {
    "R12": "found in {} s, training again in {} s",
    "R13": "training again in {} s",
    "R15": "training again {} s after it is back",
    "R16": "both sides out with a cause in {} s",
    "R17": "{} of 2 nodes refused",
    "R31": "training again in {} s",
}


def launcher_killed(bench: Bench) -> Outcome:
    """R14: SIGKILL to the launcher of two ranks; nothing may be left, and the same command goes on."""
    folder = bench.place("launcher")
    settings = {"max_steps": 200, "save_steps": 4, "eval_steps": 200, "global_batch_size": 4,
                "gradient_accumulation_steps": 1}  # fmt: skip
    bench.recipe(folder, **settings)
    launch = Launch(folder, per_node=2)
    try:
        process = launch.start()
        wait_for_step(launch.run, 9)
        below = children_of(process.pid)
        process.kill()
        process.wait()
        left = left_of(below, 10.0)
        began, moment = time.monotonic(), time.time()
        process = launch.start()
        while not [event for event in told(launch.run, "step") if event["time"] > moment]:
            if process.poll() is not None or time.monotonic() - began > 120:
                return Outcome("the same command does not go on", False)
            time.sleep(0.05)
        seconds = time.monotonic() - began
        resumed = [event["step"] for event in told(launch.run, "resumed")]
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    finally:
        launch.end()
    figure = f"{len(left)} orphans of {len(below)} after 10 s; training again {seconds:.1f} s after the same command"
    met = not left and seconds <= 15 and bool(resumed) and code == 75
    return Outcome(figure, met, {"orphans": len(left), "seconds": round(seconds, 1), "resumed_from": resumed})


def other_world(bench: Bench) -> Outcome:
    """R19: a run goes on with half or twice the ranks after a SIGTERM, and after a SIGKILL."""
    settings = {"global_batch_size": 4, "gradient_accumulation_steps": 1}
    whole = bench.reference(**settings)
    ways = [(2, 1, signal.SIGTERM), (1, 2, signal.SIGKILL)]
    same, of, apart, notes = 0, 0, 0.0, []
    for before, after, number in ways:
        folder = bench.place("world")
        recipe = bench.recipe(folder, **settings)
        slowed = (*bench.worse, inject("slow_steps", seconds=0.08))
        ranks = bench.rig.start_ranks(["run", str(recipe)], folder, before, first=slowed)
        wait_for_step(folder / "run", 5)
        os.kill(ranks[-1].pid, number)
        codes = [trial.wait() for trial in ranks]
        rest = bench.rig.run_ranks(["run", str(recipe)], folder, after, first=bench.worse)
        steps = steps_of(folder / "run")
        of += len(whole["steps"])
        if any(code for code, _ in rest) or len(steps) != len(whole["steps"]):
            notes.append(f"{before} → {after}: {codes}, then {[code for code, _ in rest]}: {rest[0][1][-200:]}")
            continue
        same += sum(steps[step]["batch_hash"] == batch for step, (_, batch, *_) in whole["steps"].items())
        apart = max(apart, *(abs(steps[step]["loss"] - loss) for step, (loss, *_) in whole["steps"].items()))
    figure = f"{same} of {of} global batches identical, losses at most {apart:.1g} apart"
    met = same == of and apart <= MOST_DIFFERENCE and not notes
    numbers = {"batches": of, "identical": same, "largest_loss_difference": apart}
    return Outcome(figure, met, numbers, None, tuple(notes))


def _row(name: str) -> Any:
    return lambda bench: of_nodes(name, bench)


HOW = "two network namespaces joined by a cable, "
FAULTS = (
    Fault("R12", "a rank stopped", f"{HOW}SIGSTOP", "found in 30 s, training again in 45 s",
          "torchrun: 1,800 s by default, 20 and 57 s with a 20 s timeout (measured Nov 2026)", _row("R12"), 60),
    Fault("R13", "a rank killed", f"{HOW}SIGKILL", "training again in 10 s",
          "torchrun: 8.4 s (measured Nov 2026)", _row("R13"), 40),
    Fault("R14", "the launcher killed", "SIGKILL to a launcher of two ranks, then the same command",
          "0 orphans after 10 s, training again in 15 s",
          "torchrun: 2 orphans, still training (measured Nov 2026)", launcher_killed, 45),
    Fault("R15", "link down for 40 s", f"{HOW}pulled and put back", "training again 15 s after it is back",
          "torchrun: 20.9 s (measured Nov 2026)", _row("R15"), 70),
    Fault("R16", "link down for ever", f"{HOW}pulled", "both sides out with a cause in 120 s",
          "torchrun: 940 s, deaf to SIGTERM (measured Nov 2026)", _row("R16"), 90),
    Fault("R17", "a clock 90 s ahead", f"{HOW}a preloaded clock on one", "the world as asked, or refused",
          "torchrun: one node trains alone and exits 0, 2 of 2 (measured Nov 2026)", _row("R17"), 40),
    Fault("R19", "another number of ranks", "2 → 1 after SIGTERM, 1 → 2 after SIGKILL, gloo",
          "100 % of the global batches identical, losses within 1e-5",
          "HF Trainer: 100 % for 2 → 1, losses 0.0036 apart with dropout (measured Nov 2026)", other_world, 15),
    Fault("R31", "a node lost, one is enough", f"{HOW}the launcher of one killed, nodes 1:2",
          "training again in 45 s", "torchrun: 50.6 s (measured Nov 2026)", _row("R31"), 60),
)  # fmt: skip
