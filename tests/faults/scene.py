"""A run on two nodes that something can be done to, and the run to which nothing happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from modelwright.runs import journal
from tests.faults.cluster import ADDRESSES, Cluster, Process

STEPS, PATIENCE_SECONDS = 240, 240.0


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
        asked = json.dumps(
            {"nnodes": self.nodes, "node_rank": node, "master_addr": ADDRESSES[0], "nproc_per_node": "1"}
        )
        return self.place.start(
            node, ["tests.faults.node", str(self.folder / "recipe.yaml"), asked], self.folder, prefix
        )

    def stop(self) -> None:
        """Ask every node that is still there to stop, and wait until they have."""
        there = [node for node in self.place.processes if node.popen.poll() is None]
        for node in there:
            node.popen.send_signal(signal.SIGTERM)
        self.wait_for(lambda: all(node.popen.poll() is not None for node in there), "all nodes stop")

    def events(self, name: str, after: float = 0.0) -> list[dict[str, Any]]:
        """What the journal tells of one kind of event after a moment."""
        path = self.run / "journal.jsonl"
        found = list(journal.read(path)) if path.exists() else []
        return [event for event in found if event["event"] == name and event["time"] > after]

    def reach(self, step: int) -> None:
        """Wait until a step is done."""
        self.wait_for(lambda: any(event["step"] >= step for event in self.events("step")), f"step {step}")

    def step_after(self, moment: float, anew: bool = True) -> float:
        """When the first step was done after a moment; `anew`: by ranks that were started after it."""

        def first() -> float | None:
            since = next((event["time"] for event in self.events("resumed", moment)), None) if anew else moment
            steps = self.events("step", since) if since else []
            return steps[0]["time"] if steps else None

        self.wait_for(lambda: first() is not None, "a step after the fault")
        found = first()
        assert found is not None
        return found

    def rank_on(self, node: int) -> int:
        """The process of the rank that runs on a node now."""
        signs = next((self.folder / f"node-{node}").glob("modelwright-*/ranks.json"))
        return int(next(iter(json.loads(signs.read_text(encoding="utf-8")).values())))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, or say what the nodes printed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.05)
        printed = "\n".join(f"{each.log.name}: {each.output[-1500:]}" for each in self.place.processes)
        raise TimeoutError(f"never came: {what}\n{printed}")


def prepare(folder: Path) -> Path:
    """A tiny model and a recipe that tunes it, in a folder."""
    from benchmarks.workloads import make_model
    from modelwright.data.sources import EMBEDDED_DATASETS

    folder.mkdir(parents=True)
    make_model(
        folder / "model", EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines(), layers=2, width=64
    )
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
    """Batches that differ from the untouched run's, and the largest difference in loss, over all that was trained.

    What was trained twice, before and after a fault, counts both times.
    """
    told = [event for event in journal.read(run / "journal.jsonl") if event["event"] == "step"]
    other = {event["step"]: event for event in journal.read(reference / "journal.jsonl") if event["event"] == "step"}
    changed = {event["step"] for event in told if event["batch_hash"] != other[event["step"]]["batch_hash"]}
    absent = other.keys() - {event["step"] for event in told}
    return {
        "steps": len(other),
        "batches_changed": len(changed | absent),
        "largest_loss_difference": max(abs(event["loss"] - other[event["step"]]["loss"]) for event in told),
    }
