"""What is done to two nodes, how long it takes until they train again, and whether anything changed by it.

Every fault is real: SIGKILL, SIGSTOP, a cable that is pulled, a clock that is wrong. Each meets a run of its own, whose
steps have the length of real ones (`pace`); in the end the run is finished and held against one that nothing happened
to.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common
from modelwright.errors import UsageError, first_line
from tests.faults.cluster import cluster, left_of, missing, wrong_clock
from tests.faults.scene import Scene, difference, finish, prepare

Figures = dict[str, float]
GOALS: dict[str, tuple[str, str, float]] = {
    "rank_killed": ("rank killed, two nodes: training again, s", "8.4 s", 10.0),
    "rank_stopped_found": ("rank stopped (SIGSTOP): found, s", "1,800 s by default", 30.0),
    "rank_stopped": ("rank stopped (SIGSTOP): training again, s", "57 s with a 20 s timeout", 45.0),
    "launcher_killed": ("launcher killed: orphans after 10 s", "2, still training", 0.0),
    "link_40": ("link down 40 s: training again after it is back, s", "20.9 s", 15.0),
    "link_gone": ("link down for ever: both sides out, s", "940 s, deaf to SIGTERM", 120.0),
    "clock_skew": ("clock skew 90 s: nodes that refused, of 2", "0; one trains alone, exit 0", 2.0),
    "node_lost": ("node lost, elastic 1:2: training again, s", "50.6 s", 45.0),
    "node_back": ("node back, elastic 1:2: training with both, s", "not measured", 45.0),
}
"""By name: what is measured, what torchrun and Hugging Face did on such a machine, and the goal."""


def kill_a_rank(scene: Scene) -> Figures:
    """SIGKILL to the rank on the second node."""
    moment = time.time()
    os.kill(scene.rank_on(1), signal.SIGKILL)
    return {"rank_killed": scene.step_after(moment) - moment}


def stop_a_rank(scene: Scene) -> Figures:
    """SIGSTOP to the rank on the second node."""
    moment, node = time.time(), scene.place.processes[1]
    os.kill(scene.rank_on(1), signal.SIGSTOP)
    scene.wait_for(lambda: "has been stopped" in node.output, "the stopped rank is told")
    found = time.time()
    return {"rank_stopped_found": found - moment, "rank_stopped": scene.step_after(moment) - moment}


def cut_for_40_seconds(scene: Scene) -> Figures:
    """Pull the cable, wait, put it back."""
    scene.place.link("down")
    time.sleep(40)
    scene.place.link("up")
    moment = time.time()
    return {"link_40": scene.step_after(moment, anew=False) - moment}


def cut_for_ever(scene: Scene) -> Figures:
    """Pull the cable and leave it so."""
    scene.place.link("down")
    moment = time.time()
    both = scene.place.processes
    scene.wait_for(lambda: all(node.popen.poll() is not None for node in both), "both sides are out")
    seconds = time.time() - moment
    for node in both:
        assert "no heartbeat" in node.output or "answered" in node.output, (
            f"a side leaves without the cause: {node.output}"
        )
        assert node.popen.returncode == 75, f"a side leaves with {node.popen.returncode}: {node.output}"
    return {"link_gone": seconds}


def lose_a_node(scene: Scene) -> Figures:
    """SIGKILL to the second node's launcher: its processes go with it, the first goes on alone; then it comes back."""
    moment = time.time()
    below = scene.place.processes[-1].kill()
    orphans = left_of(below, 10.0)
    lost = scene.step_after(moment) - moment
    returned = time.time()
    scene.start_node(1)
    back = scene.step_after(returned) - returned
    return {"node_lost": lost, "launcher_killed": float(len(orphans)), "node_back": back}


def skew_a_clock(scene: Scene) -> Figures:
    """Start the second node 90 s ahead of its time."""
    prefix = wrong_clock(scene.folder, 90)
    if prefix is None:
        raise RuntimeError("needs a C compiler, for a clock that is wrong for one process alone")
    both = scene.start(prefix)
    scene.wait_for(lambda: all(node.popen.poll() is not None for node in both), "both are refused")
    refused = [node for node in both if node.popen.returncode == 77 and "clock" in node.output]
    return {"clock_skew": float(len(refused))}


@dataclass(frozen=True)
class Trial:
    """One thing that is done to a run."""

    act: Callable[[Scene], Figures]
    """What is done; returns what was measured."""
    figures: tuple[str, ...]
    """What it measures."""
    nodes: str = "2"
    """How many nodes the run asks for; a range lets it go on alone."""
    trains: bool = True
    """Whether the run is started before, and finished after."""


TRIALS = {
    "rank_killed": Trial(kill_a_rank, ("rank_killed",)),
    "rank_stopped": Trial(stop_a_rank, ("rank_stopped_found", "rank_stopped")),
    "node_lost": Trial(lose_a_node, ("launcher_killed", "node_lost", "node_back"), nodes="1:2"),
    "link_40": Trial(cut_for_40_seconds, ("link_40",)),
    "link_gone": Trial(cut_for_ever, ("link_gone",)),
    "clock_skew": Trial(skew_a_clock, ("clock_skew",), trains=False),
}
"""By the name that --only takes."""


def measure(only: Sequence[str] = ()) -> dict[str, Any]:
    """Do everything to two nodes; where this machine cannot, say why."""
    if unknown := [name for name in only if name not in TRIALS]:
        raise UsageError(f"--only {unknown[0]}: it wants one of {', '.join(TRIALS)}")
    if reason := missing():
        return {"skipped": reason}
    began = time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        reference = prepare(Path(place) / "reference")
        finish(reference)
        for name in only or TRIALS:
            found |= _tried(TRIALS[name], Path(place) / name, reference)
    ordered = {name: found[name] for name in GOALS if name in found}
    return {"faults": ordered, "seconds": round(time.monotonic() - began, 1)}


def _tried(trial: Trial, folder: Path, reference: Path) -> dict[str, Any]:
    """Do one thing to a run of its own; what goes wrong is told in its place, and the others go on."""
    began = time.monotonic()
    try:
        with cluster() as place:
            scene = Scene(place, prepare(folder), trial.nodes)
            if trial.trains:
                scene.start()
                scene.reach(12)
            figures = trial.act(scene)
            scene.place.link("up")
            scene.stop()
        kept = _kept(trial, folder, reference)
    except (RuntimeError, AssertionError, OSError, LookupError, StopIteration) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return {name: {**_row(name), "failed": first_line(error), "met": False} for name in trial.figures}
    rows = {name: _judged(name, figures[name], kept, trial.nodes == "2") for name in trial.figures}
    for row in rows.values():
        print(f"{row['what']}: {row['figure']:g} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return rows


def _kept(trial: Trial, folder: Path, reference: Path) -> dict[str, Any] | None:
    """How the finished run differs from the untouched one; None where nothing was to be trained and nothing was."""
    if trial.trains:
        finish(folder)
        return difference(folder / "run", reference / "run")
    journal = folder / "run" / "journal.jsonl"
    if journal.exists() and '"step"' in journal.read_text(encoding="utf-8"):
        raise RuntimeError("steps were trained all the same")
    return None


def _row(name: str) -> dict[str, Any]:
    what, peer, goal = GOALS[name]
    return {"what": what, "torchrun": peer, "goal": goal}


def _judged(name: str, figure: float, kept: dict[str, Any] | None, same_world: bool) -> dict[str, Any]:
    """Against the goal; and the curve: the same losses where the world was the same, else the same batches."""
    goal = GOALS[name][2]
    within = figure >= goal if name == "clock_skew" else figure <= goal
    same = kept is None or (kept["batches_changed"] == 0 and (not same_world or kept["largest_loss_difference"] == 0.0))
    return {**_row(name), "figure": round(figure, 1), "met": within and same, "unchanged": same, **(kept or {})}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as a table."""
    if "skipped" in figures:
        return [f"skipped: {figures['skipped']}"]
    told = [f"{'fault':<52} {'torchrun':<28} {'goal':>6} {'here':>6}  {'against a run that nothing happened to'}"]
    for each in figures["faults"].values():
        here = f"{each['figure']:g}" if "figure" in each else "–"
        verdict = "" if each["met"] else "  MISSED"
        told.append(f"{each['what']:<52} {each['torchrun']:<28} {each['goal']:>6g} {here:>6}  {_curve(each)}{verdict}")
    met = sum(each["met"] for each in figures["faults"].values())
    return [*told, "", f"{met} of {len(figures['faults'])} goals met, in {figures['seconds']:.0f} s"]


def _curve(each: dict[str, Any]) -> str:
    """What became of batches and losses, in a few words."""
    if "failed" in each:
        return f"failed: {each['failed']}"
    if "steps" not in each:
        return "nothing was trained"
    losses = each["largest_loss_difference"]
    told = "equal losses" if losses == 0 else f"losses within {losses:.2g}"
    return f"{each['batches_changed']} of {each['steps']} batches changed, {told}"


def main(
    only: Annotated[list[str] | None, typer.Option("--only", help="One fault, such as rank_killed.")] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """What is done to two nodes, and how long until they train again, beside torchrun; needs root."""
    common.report("faults", lambda: measure(only or ()), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
