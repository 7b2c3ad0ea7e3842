"""What is done to two nodes, how long it takes until they train again, and whether anything changed by it.

Every fault is real: SIGKILL, SIGSTOP, a cable that is pulled, a clock that is wrong. Steps are given the length of a
real one (`pace`); in the end every run is finished and held against one to which nothing happened.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.bench.cluster import ADDRESSES, Cluster, Process, cluster, environment, left_of, missing, wrong_clock
from modelwright.runs import journal

STEPS, PATIENCE_SECONDS = 120, 240.0
GOALS: dict[str, tuple[str, str, float]] = {
    "rank_killed": ("rank killed, two nodes", "training again after 8.4 s", 10.0),
    "rank_stopped_found": ("rank stopped (SIGSTOP): found", "after 1,800 s by default", 30.0),
    "rank_stopped": ("rank stopped (SIGSTOP): training again", "about 57 s with a 20 s timeout", 45.0),
    "link_40": ("link down 40 s: training again after it is back", "20.9 s", 15.0),
    "link_gone": ("link down for ever: both sides out", "940 s, deaf to SIGTERM", 120.0),
    "launcher_killed": ("launcher killed: orphans after 10 s", "2, still training", 0.0),
    "node_lost": ("node lost, elastic 1:2: training again", "50.6 s", 45.0),
    "clock_skew": ("clock skew 90 s: nodes that refused", "one node trains alone, exit 0", 2.0),
}
"""By name: what is measured, what torchrun and Hugging Face did on such a machine, and the goal."""


@dataclass
class Scene:
    """A run on two nodes, and what can be done to it."""

    place: Cluster
    """The nodes."""
    folder: Path
    """Where recipe and run are; both nodes see it."""
    nodes: str = "2"
    """How many nodes it asks for."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def start(self, prefix_of_b: tuple[str, ...] = ()) -> list[Process]:
        """Start both nodes."""
        return [self.start_node(node, prefix_of_b if node else ()) for node in (0, 1)]

    def start_node(self, node: int, prefix: tuple[str, ...] = ()) -> Process:
        """Start one node's launcher."""
        asked = json.dumps({"nodes": self.nodes, "node": node, "address": ADDRESSES[0], "per_node": "1"})
        return self.place.start(
            node, ["modelwright.bench.node", str(self.folder / "recipe.yaml"), asked], self.folder, prefix
        )

    def events(self, name: str, after: float = 0.0) -> list[dict[str, Any]]:
        """What the journal tells of one kind of event after a moment."""
        path = self.run / "journal.jsonl"
        found = list(journal.read(path)) if path.exists() else []
        return [event for event in found if event["event"] == name and event["time"] > after]

    def reach(self, step: int) -> None:
        """Wait until a step is done."""
        wait_for(lambda: any(event["step"] >= step for event in self.events("step")), f"step {step}", self.place)

    def step_after(self, moment: float, anew: bool = True) -> float:
        """When the first step was done after a moment; `anew`: by ranks that were started after it."""

        def first() -> float | None:
            since = next((event["time"] for event in self.events("resumed", moment)), None) if anew else moment
            steps = self.events("step", since) if since else []
            return steps[0]["time"] if steps else None

        wait_for(lambda: first() is not None, "a step after the fault", self.place)
        found = first()
        assert found is not None
        return found

    def rank_on(self, node: int) -> int:
        """The process of the rank that runs on a node now."""
        signs = next((self.folder / f"node-{node}").glob("modelwright-*/ranks.json"))
        return int(next(iter(json.loads(signs.read_text(encoding="utf-8")).values())))


Fault = Callable[[Scene], dict[str, float]]


def wait_for(condition: Callable[[], bool], what: str, place: Cluster) -> None:
    """Wait, or say what the nodes printed."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    printed = "\n".join(f"{each.log.name}: {each.output[-1500:]}" for each in place.processes)
    raise TimeoutError(f"never came: {what}\n{printed}")


def kill_a_rank(scene: Scene) -> dict[str, float]:
    """SIGKILL to the rank on the second node."""
    moment = time.time()
    os.kill(scene.rank_on(1), signal.SIGKILL)
    return {"rank_killed": scene.step_after(moment) - moment}


def stop_a_rank(scene: Scene) -> dict[str, float]:
    """SIGSTOP to the rank on the second node."""
    moment, node = time.time(), scene.place.processes[1]
    os.kill(scene.rank_on(1), signal.SIGSTOP)
    wait_for(lambda: "has been stopped" in node.output, "the stopped rank is told", scene.place)
    found = time.time()
    return {"rank_stopped_found": found - moment, "rank_stopped": scene.step_after(moment) - moment}


def cut_for_40_seconds(scene: Scene) -> dict[str, float]:
    """Pull the cable, wait, put it back."""
    scene.place.link("down")
    time.sleep(40)
    scene.place.link("up")
    moment = time.time()
    return {"link_40": scene.step_after(moment, anew=False) - moment}


def cut_for_ever(scene: Scene) -> dict[str, float]:
    """Pull the cable and leave it so."""
    scene.place.link("down")
    moment = time.time()
    both = scene.place.processes[-2:]
    wait_for(lambda: all(node.popen.poll() is not None for node in both), "both sides are out", scene.place)
    seconds = time.time() - moment
    scene.place.link("up")
    assert all("silent" in node.output or "answered" in node.output for node in both), "a side leaves without the cause"
    return {"link_gone": seconds}


def lose_a_node(scene: Scene) -> dict[str, float]:
    """SIGKILL to the launcher of the second node: its processes must go with it, and the first goes on alone."""
    moment = time.time()
    below = scene.place.processes[-1].kill()
    again = scene.step_after(moment) - moment
    return {"node_lost": again, "launcher_killed": float(len(left_of(below, 10.0 - min(10.0, time.time() - moment))))}


def skew_a_clock(scene: Scene) -> dict[str, float]:
    """Start the second node 90 s ahead of its time."""
    prefix = wrong_clock(scene.folder, 90)
    assert prefix is not None
    both = scene.start(prefix)
    wait_for(lambda: all(node.popen.poll() is not None for node in both), "both are refused", scene.place)
    refused = [node for node in both if node.popen.returncode == 77 and "clock" in node.output]
    return {"clock_skew": float(len(refused))}


def measure(only: Sequence[str] = ()) -> dict[str, Any]:
    """Do everything to two nodes; where this machine cannot, say why."""
    if reason := missing():
        return {"skipped": reason}
    chosen = set(only or GOALS)
    found: dict[str, float] = {}
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        reference = prepare(Path(place) / "reference")
        finish(reference)
        long = [("rank_killed", kill_a_rank), ("rank_stopped", stop_a_rank), ("link_40", cut_for_40_seconds),
                ("link_gone", cut_for_ever)]  # fmt: skip
        faults = [act for name, act in long if name in chosen]
        if faults:
            found |= _scene(Path(place) / "two", reference, faults, kept)
        if {"node_lost", "launcher_killed"} & chosen:
            found |= _scene(Path(place) / "elastic", reference, [lose_a_node], kept, nodes="1:2")
        if "clock_skew" in chosen and (shutil.which("cc") or shutil.which("gcc")):
            with cluster() as nodes:
                found |= skew_a_clock(Scene(nodes, prepare(Path(place) / "skew")))
    return {"faults": {name: _judged(name, figure) for name, figure in found.items()}, "unchanged": kept}


def _scene(
    folder: Path, reference: Path, faults: Sequence[Fault], kept: dict[str, Any], nodes: str = "2"
) -> dict[str, float]:
    """Start a run, do one thing after the other to it, finish it and compare."""
    found: dict[str, float] = {}
    with cluster() as place:
        scene = Scene(place, prepare(folder), nodes)
        both = scene.start()
        step = 0
        for act in faults:
            scene.reach(step + 12)
            found |= act(scene)
            step = max(event["step"] for event in scene.events("step"))
        for node in both:
            if node.popen.poll() is None:
                node.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: all(node.popen.poll() is not None for node in both), "both stop", place)
    finish(folder)
    kept[folder.name] = difference(folder / "run", reference / "run")
    return found


def prepare(folder: Path) -> Path:
    """A tiny model and a recipe that tunes it, in a folder."""
    from modelwright.bench.sft import make_model
    from modelwright.data.sources import EMBEDDED

    folder.mkdir(parents=True)
    make_model(folder / "model", EMBEDDED["field-guide"].read_text(encoding="utf-8").splitlines(), layers=2, width=64)
    (folder / "recipe.yaml").write_text(f"""\
name: faults
output_dir: {folder / "run"}
model: {{model_name_or_path: {folder / "model"}}}
data: {{dataset_name: field-guide, columns: {{question: prompt, answer: completion}}, max_rows: 60, test_size: 4}}
sft: {{max_steps: {STEPS}, global_batch_size: 4, per_device_train_batch_size: 2, learning_rate: 1e-3, max_length: 64,
  precision: fp32, save_steps: 5, save_total_limit: 2, eval_steps: {STEPS}}}
compare: {{max_new_tokens: 1}}
""", encoding="utf-8")  # fmt: skip
    return folder


def finish(folder: Path) -> None:
    """Run the recipe to its end with two ranks of this machine."""
    words = ["launch", str(folder / "recipe.yaml"), "--per-node", "2", "--log-format", "plain"]
    command = [sys.executable, "-m", "modelwright", *words]
    done = subprocess.run(command, cwd=folder, env=environment({}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run could not be finished: {done.stdout[-1000:]}{done.stderr[-1000:]}")


def difference(run: Path, reference: Path) -> dict[str, Any]:
    """Batches that differ from the untouched run's, and the largest difference in loss."""
    one, other = (
        {event["step"]: event for event in journal.read(path / "journal.jsonl") if event["event"] == "step"}
        for path in (run, reference)
    )
    batches = (
        sum(one[step]["batch"] != other[step]["batch"] for step in other) if one.keys() == other.keys() else len(other)
    )
    return {
        "steps": len(other),
        "batches_changed": batches,
        "largest_loss_difference": max(abs(one[step]["loss"] - other[step]["loss"]) for step in other if step in one),
    }


def _judged(name: str, figure: float) -> dict[str, Any]:
    what, peer, goal = GOALS[name]
    met = figure >= goal if name == "clock_skew" else figure <= goal
    return {"what": what, "torchrun": peer, "goal": goal, "figure": round(figure, 1), "met": met}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as a table."""
    if "skipped" in figures:
        return [f"skipped: {figures['skipped']}"]
    told = [f"{'fault':<52} {'torchrun':<34} {'goal':>6} {'here':>6}"]
    for each in figures["faults"].values():
        verdict = "" if each["met"] else "  missed"
        told.append(f"{each['what']:<52} {each['torchrun']:<34} {each['goal']:>6g} {each['figure']:>6g}{verdict}")
    for name, each in figures["unchanged"].items():
        told.append(
            f"{name}: {each['batches_changed']} of {each['steps']} batches changed, "
            f"largest difference in loss {each['largest_loss_difference']:.2g}"
        )
    return told
