"""Two real nodes on one machine: namespaces joined by a cable. They train together, or say why not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from modelwright.launch.admission import admission_errors, clock_skew, node_mismatches
from tests.faults import two_nodes

FACTS = {
    "node": 0, "address": "10.0.0.1", "modelwright": "1", "torch": "2", "transformers": "5", "python": "3.11",
    "recipe": "a", "nproc_per_node": 1, "device_info": {"kind": "cuda", "device": "NVIDIA L40S", "precision": "bf16"},
}  # fmt: skip


def test_a_node_with_another_clock_version_or_recipe_is_refused_with_the_reason() -> None:
    assert node_mismatches(FACTS, {**FACTS, "node": 1}, 0.5) == []
    (clock,) = node_mismatches(FACTS, {**FACTS, "node": 1}, -90.0)
    assert "node 1" in clock and "90.0 s behind" in clock and "time server" in clock
    version, recipe = node_mismatches(FACTS, {**FACTS, "node": 1, "torch": "3", "recipe": "b"}, 0.0)
    assert "has torch 3, node 0 2" in version and "another recipe" in recipe


@pytest.mark.parametrize(
    ("computes", "message"),
    [
        ({"kind": "cuda", "device": "Tesla T4", "precision": "fp16"}, "precision: fp16"),
        ({"kind": "cpu", "device": "8 CPU threads", "precision": "fp32"}, "one uses NCCL, the other gloo"),
    ],
)
def test_a_node_that_computes_otherwise_is_refused_before_it_trains(computes: dict[str, str], message: str) -> None:
    assert admission_errors(FACTS, {**FACTS, "node": 1}, 0.0) == []
    (error,) = admission_errors(FACTS, {**FACTS, "node": 1, "device_info": computes}, 0.0)
    assert message in error and "NVIDIA L40S" in error and computes["device"] in error


def test_a_slow_answer_is_not_taken_for_a_wrong_clock() -> None:
    assert clock_skew(sent_at=100.0, remote_time=103.0, received_at=110.0) == 0.0
    assert clock_skew(sent_at=100.0, remote_time=200.0, received_at=110.0) == 90.0
    assert clock_skew(sent_at=100.0, remote_time=10.0, received_at=110.0) == -90.0


@pytest.mark.root
@pytest.mark.slow
def test_a_rank_killed_on_one_node_changes_nothing_on_either(tmp_path: Path) -> None:
    if reason := two_nodes.unavailable():
        pytest.skip(reason)
    with two_nodes.netns_pair() as nodes:
        two = two_nodes.TwoNodeRun(nodes, two_nodes.write_run(tmp_path / "two"))
        both = two.start()
        two.wait_for_step(7)
        assert two_nodes.kill_rank(two)["rank_killed"] < two_nodes.TIMEOUT_SECONDS
        both[1].popen.send_signal(signal.SIGTERM)
        two.wait_for_exit(both, "both stop")
        assert [node.popen.returncode for node in both] == [75, 75], [node.output for node in both]
    steps = [event["step"] for event in two.events("step")]
    assert len({(event["step"], event["batch_hash"], event["loss"]) for event in two.events("step")}) == max(steps)


@pytest.mark.root
@pytest.mark.slow
def test_a_node_90_seconds_ahead_is_refused_and_so_is_the_world_without_it(tmp_path: Path) -> None:
    if reason := two_nodes.unavailable() or (None if two_nodes.wrong_clock(tmp_path, 90) else "needs a compiler"):
        pytest.skip(reason)
    with two_nodes.netns_pair() as nodes:
        run = two_nodes.TwoNodeRun(nodes, two_nodes.write_run(tmp_path / "skew"))
        assert two_nodes.skew_clock(run) == {"clock_skew": 2.0}


@pytest.mark.root
@pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="takes two minutes; NIGHTLY=1 runs it")
def test_two_nodes_end_quietly_on_a_link_with_200_ms_of_delay(tmp_path: Path) -> None:
    if reason := two_nodes.unavailable() or (None if Path("/dev/net/tun").exists() else "needs /dev/net/tun"):
        pytest.skip(reason)
    with two_nodes.netns_pair(delay_seconds=0.2) as nodes:
        assert two_nodes.round_trip_seconds(nodes) >= 0.4
        run = two_nodes.TwoNodeRun(nodes, two_nodes.write_run(tmp_path / "far", steps=3))
        both = run.start()
        run.wait_for_exit(both, "both end")
        assert two_nodes.round_trip_seconds(nodes) >= 0.4
        for node in both:
            assert node.popen.returncode == 0, node.output
            assert "terminate called" not in node.output and "Traceback" not in node.output
    assert [event["step"] for event in run.events("step")] == [1, 2, 3]
