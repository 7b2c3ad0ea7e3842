"""One launch that never hangs and leaves no orphans, whatever is done to its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelwright.runs.heartbeat import wait_for_exit
from tests.faults.fork_server import ForkServer, events_of, free_port, run_fingerprint, steps_of
from tiny import tiny_recipe

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(Path(__file__).parent)])
GENEROUS = 240.0
"""Seconds to wait for what takes a few on a quiet machine."""
LONG = {"max_steps": 40, "save_steps": 5, "eval_steps": 40, "global_batch_size": 4, "gradient_accumulation_steps": 1}


class Launched:
    """A launch in a process of its own."""

    def __init__(self, words: list[str], folder: Path, **variables: str) -> None:
        self.log = folder / "launch.log"
        environ = {**os.environ, "PYTHONPATH": PATHS, "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, env=environ, stdout=self.log.open("w"), stderr=subprocess.STDOUT
        )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def descendants(self) -> list[int]:
        """Every process below the launcher."""
        pids, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            below = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
            waiting += [int(word) for word in below.split() if int(word) not in pids]
            pids += [int(word) for word in below.split()]
        return pids

    def wait(self) -> int:
        return self.process.wait(timeout=GENEROUS)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[Launched]]:
    """Launches that end with the test, whatever becomes of it."""
    started: list[Launched] = []
    yield started
    for launch in started:
        launch.end()


def wait_until(condition: object, what: str, launch: Launched) -> None:
    deadline = time.monotonic() + GENEROUS
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return
        assert launch.process.poll() is None, launch.output
        time.sleep(0.1)
    raise AssertionError(f"never: {what}\n{launch.output}")


def reach(run: Path, step: int, launch: Launched) -> None:
    there = run / "journal.jsonl"
    wait_until(lambda: there.exists() and max(steps_of(run), default=0) >= step, f"step {step}", launch)


def ranks_of(launch: Launched, folder: Path) -> dict[str, int]:
    """The processes of the ranks that were started last."""
    import json

    path = next(folder.glob("modelwright-*/ranks.json"))
    return dict(json.loads(path.read_text()))


@pytest.mark.slow
def test_a_killed_rank_a_stopped_rank_and_a_killed_launcher_change_nothing_and_leave_nobody(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, launched: list[Launched]
) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "broken"
    ranks = fork_server.run_ranks(["run", str(tiny_recipe(uninterrupted, model_folder, **LONG))], uninterrupted, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    recipe = tiny_recipe(killed, model_folder, **LONG)
    launch = Launched(["tests.faults.injections", str(recipe), '{"nproc_per_node": "2"}'], killed)
    launched.append(launch)
    reach(killed / "run", 7, launch)
    os.kill(ranks_of(launch, killed)["1"], signal.SIGKILL)
    reach(killed / "run", 14, launch)
    assert launch.output.count("rank 1 was killed by SIGKILL") == 1
    os.kill(ranks_of(launch, killed)["1"], signal.SIGSTOP)
    reach(killed / "run", 21, launch)
    assert "rank 1" in launch.output and "has been stopped for" in launch.output
    below = launch.descendants()
    assert len(below) >= 4, "agent, fork server and two ranks"
    launch.process.kill()
    launch.process.wait()
    assert wait_for_exit(below, 60) == []
    assert len(events_of(killed / "run", "resumed")) == 2
    again = fork_server.run_ranks(["run", str(recipe)], killed, 2)
    assert [code for code, _ in again] == [0, 0], again
    assert run_fingerprint(killed / "run") == run_fingerprint(uninterrupted / "run")


@pytest.mark.slow
def test_node_0_prints_the_log_whichever_node_was_started_first(
    model_folder: Path, tmp_path: Path, launched: list[Launched]
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, **{**LONG, "max_steps": 2, "save_steps": 2, "eval_steps": 2})
    words = ["modelwright", "launch", str(recipe), "--on", "nodes", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    words += ["--master-port", str(free_port()), "--nproc-per-node", "1", "--log-format", "plain"]
    for node in ("1", "0"):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        launched.append(Launched([*words, "--node-rank", node], folder))
    first, main = launched
    assert (first.wait(), main.wait()) == (0, 0), first.output + main.output
    assert "step 2/2" in main.output and "2 devices" in main.output
    assert "step" not in first.output


@pytest.mark.slow
def test_ranks_with_gpus_are_started_afresh_as_cuda_does_not_outlive_a_fork(
    model_folder: Path, tmp_path: Path, launched: list[Launched]
) -> None:
    steps = 60
    recipe = tiny_recipe(tmp_path, model_folder, **{**LONG, "max_steps": steps, "eval_steps": steps})
    words = ["modelwright", "launch", str(recipe), "--log-format", "plain"]
    launch = Launched(words, tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    launched.append(launch)
    reach(tmp_path / "run", 7, launch)
    ranks = ranks_of(launch, tmp_path)
    parents = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in ranks.values()}
    agent = Path(f"/proc/{parents.pop()}/cmdline").read_text()
    assert len(ranks) == 2 and not parents and "modelwright.launch.agent" in agent, "no fork server between them"
    os.kill(ranks["1"], signal.SIGKILL)
    assert launch.wait() == 0, launch.output
    assert launch.output.count("rank 1 was killed by SIGKILL") == 1
    assert max(steps_of(tmp_path / "run")) == steps


@pytest.mark.slow
@pytest.mark.parametrize("delayed_rank", ["0", "1"])
def test_an_error_is_printed_once_with_its_code_whoever_exits_first_and_nothing_is_retried(
    model_folder: Path, tmp_path: Path, launched: list[Launched], delayed_rank: str
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, **LONG)
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace(str(model_folder), "/nowhere"), encoding="utf-8")
    launch = Launched(["delayed_exit", str(recipe), delayed_rank], tmp_path)
    launched.append(launch)
    assert launch.wait() == 2, launch.output
    assert launch.output.count("no folder") == 1, launch.output
    assert "restarting" not in launch.output
    assert "Traceback" not in launch.output and "ChildFailedError" not in launch.output


def test_ranks_whose_memory_is_full_restart_with_smaller_micro_batches(
    uninterrupted: Path, model_folder: Path, tmp_path: Path, launched: list[Launched]
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, gradient_accumulation_steps=1)
    launched.append(Launched(["low_memory", str(recipe)], tmp_path))
    assert launched[0].wait() == 0, launched[0].output
    assert "micro-batch 2 runs out of memory; the next start takes 1 and keeps the batch" in launched[0].output
    plans = [
        (plan["micro_batch_size"], plan["gradient_accumulation_steps"]) for plan in events_of(tmp_path / "run", "plan")
    ]
    assert plans == [(2, 1), (1, 2)]
    steps, expected = steps_of(tmp_path / "run"), steps_of(uninterrupted)
    assert {step: record["batch_hash"] for step, record in steps.items()} == {
        s: r["batch_hash"] for s, r in expected.items()
    }
    assert [steps[step]["loss"] for step in expected] == pytest.approx([r["loss"] for r in expected.values()], abs=1e-5)
