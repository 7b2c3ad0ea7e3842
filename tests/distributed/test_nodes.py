"""Two real nodes on one machine: namespaces joined by a cable. They train together, or say why not."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from modelwright.bench import cluster, faults
from modelwright.launch.muster import objections

FACTS = {
    "node": 0, "address": "10.0.0.1", "modelwright": "1", "torch": "2", "transformers": "5", "python": "3.11",
    "recipe": "a", "per_node": 1,
}  # fmt: skip


def test_a_node_with_another_clock_version_or_recipe_is_told_so() -> None:
    assert objections(FACTS, {**FACTS, "node": 1}, 0.5) == []
    (clock,) = objections(FACTS, {**FACTS, "node": 1}, -90.0)
    assert "node 1" in clock and "90.0 s behind" in clock and "time server" in clock
    version, recipe = objections(FACTS, {**FACTS, "node": 1, "torch": "3", "recipe": "b"}, 0.0)
    assert "has torch 3, the main node 2" in version and "another recipe" in recipe


@pytest.mark.root
@pytest.mark.slow
def test_a_rank_killed_on_one_node_changes_nothing_on_either(tmp_path: Path) -> None:
    if reason := cluster.missing():
        pytest.skip(reason)
    folder = faults.prepare(tmp_path / "two")
    with cluster.cluster() as nodes:
        scene = faults.Scene(nodes, folder)
        both = scene.start()
        scene.reach(7)
        assert faults.kill_a_rank(scene)["rank_killed"] < 60
        both[1].popen.send_signal(signal.SIGTERM)
        faults.wait_for(lambda: all(node.popen.poll() is not None for node in both), "both stop", nodes)
        assert [node.popen.returncode for node in both] == [75, 75], [node.output for node in both]
    steps = [event["step"] for event in scene.events("step")]
    assert len({(event["step"], event["batch"], event["loss"]) for event in scene.events("step")}) == max(steps)


@pytest.mark.root
@pytest.mark.slow
def test_a_node_90_seconds_ahead_is_refused_and_so_is_the_world_without_it(tmp_path: Path) -> None:
    if reason := cluster.missing() or (None if cluster.wrong_clock(tmp_path, 90) else "needs a compiler"):
        pytest.skip(reason)
    began = time.monotonic()
    with cluster.cluster() as nodes:
        assert faults.skew_a_clock(faults.Scene(nodes, faults.prepare(tmp_path / "skew"))) == {"clock_skew": 2.0}
    assert time.monotonic() - began < 200
