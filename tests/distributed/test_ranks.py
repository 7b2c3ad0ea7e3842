"""Engine rules 2 and 3: two ranks equal one, and any number of ranks sees the same batches."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.fork_server import (
    ForkServer,
    events_of,
    hold_after,
    run_fingerprint,
    slow_after,
    steps_of,
    wait_for_step,
)
from tiny import tiny_recipe

TWO = ["--set", "sft.gradient_accumulation_steps=1"]
"""With two ranks, half the accumulation makes the same batch."""


def losses(run: Path) -> list[float]:
    return [record["loss"] for _, record in sorted(steps_of(run).items())]


def batches(run: Path) -> list[str]:
    return [record["batch_hash"] for _, record in sorted(steps_of(run).items())]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_equal_one_and_only_the_first_prints(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path, sharding: str
) -> None:
    # what is computed again in the backward pass is what it was, wherever its weights are
    recipe = tiny_recipe(tmp_path, model_folder, distributed_strategy=sharding, gradient_checkpointing="selective")
    ranks = fork_server.run_ranks(["run", str(recipe), *TWO], tmp_path, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert "sft step 12/12" in ranks[0][1]
    assert ranks[1][1].strip() == ""
    assert batches(tmp_path / "run") == batches(uninterrupted)
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), abs=1e-5)
    evaluations = [record["eval_loss"] for record in events_of(tmp_path / "run", "evaluation")]
    assert evaluations == pytest.approx([r["eval_loss"] for r in events_of(uninterrupted, "evaluation")], abs=1e-5)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_lion_runs_on_two_ranks_as_on_one_and_goes_on_with_one(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, sharding: str
) -> None:
    settings = {"optim": "lion", "global_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 6}
    one, two = tmp_path / "one", tmp_path / "two"
    code, output = fork_server.run(["run", str(tiny_recipe(one, model_folder, **settings))], one)
    assert code == 0, output
    recipe = tiny_recipe(two, model_folder, distributed_strategy=sharding, **settings)
    ranks = fork_server.start_ranks(["run", str(recipe)], two, 2, first=hold_after(4))
    wait_for_step(two / "run", 4)
    os.kill(ranks[-1].pid, signal.SIGKILL)
    (two / "go").touch()
    assert 0 not in [trial.wait() for trial in ranks]
    code, output = fork_server.run(["run", str(recipe)], two)
    assert code == 0, output
    assert [event["step"] for event in events_of(two / "run", "resumed")] == [3]
    assert batches(two / "run") == batches(one / "run")
    assert losses(two / "run") == pytest.approx(losses(one / "run"), abs=1e-5)


def test_two_ranks_equal_one_with_a_batch_that_two_do_not_divide(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    settings = {"global_batch_size": 5, "gradient_accumulation_steps": 1, "num_train_epochs": 1, "max_steps": None}
    one, two = tmp_path / "one", tmp_path / "two"
    code, output = fork_server.run(["run", str(tiny_recipe(one, model_folder, **settings))], one)
    assert code == 0, output
    ranks = fork_server.run_ranks(["run", str(tiny_recipe(two, model_folder, **settings))], two, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert batches(two / "run") == batches(one / "run")
    assert losses(two / "run") == pytest.approx(losses(one / "run"), abs=1e-5)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_run_goes_from_two_ranks_to_one_and_back_and_is_killed_each_time(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path, sharding: str
) -> None:
    settings = {"global_batch_size": 4, "gradient_accumulation_steps": 1, "distributed_strategy": sharding}
    recipe = tiny_recipe(tmp_path, model_folder, **settings)
    for size, step in ((2, 4), (1, 7)):
        ranks = fork_server.start_ranks(["run", str(recipe)], tmp_path, size, first=hold_after(step, f"go-{step}"))
        wait_for_step(tmp_path / "run", step)
        os.kill(ranks[-1].pid, signal.SIGKILL)
        (tmp_path / f"go-{step}").touch()
        assert 0 not in [trial.wait() for trial in ranks]
    rest = fork_server.run_ranks(["run", str(recipe)], tmp_path, 2)
    assert [code for code, _ in rest] == [0, 0], rest
    assert [event["step"] for event in events_of(tmp_path / "run", "resumed")] == [3, 6]
    assert batches(tmp_path / "run") == batches(uninterrupted)
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), abs=1e-5)


def test_two_nodes_of_two_ranks_with_hsdp_equal_one(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    settings = {"global_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4, "eval_steps": 4}
    one, four = tmp_path / "one", tmp_path / "four"
    two_a_node = "import os\nos.environ['LOCAL_WORLD_SIZE'] = '2'"
    recipe = tiny_recipe(four, model_folder, distributed_strategy="hsdp", **settings)
    ranks = fork_server.run_ranks(["run", str(recipe)], four, 4, first=two_a_node)
    assert [code for code, _ in ranks] == [0, 0, 0, 0], ranks
    code, output = fork_server.run(["run", str(tiny_recipe(one, model_folder, **settings))], one)
    assert code == 0, output
    assert losses(four / "run") == pytest.approx(losses(one / "run"), abs=1e-5)


def test_a_slow_rank_is_named(fork_server: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    drags = """
import os, time
from modelwright.engine.precision import MixedPrecision
quick, ended = MixedPrecision.autocast, time.monotonic()
def slow(self):
    global ended
    if os.environ["RANK"] == "1":  # three times what the last step took, so that it is the slow one on any machine
        time.sleep(max(0.2, 3 * min(2.0, time.monotonic() - ended)))
        ended = time.monotonic()
    return quick(self)
MixedPrecision.autocast = slow
"""
    ranks = fork_server.run_ranks(["run", str(tiny_recipe(tmp_path, model_folder)), *TWO], tmp_path, 2, first=drags)
    assert [code for code, _ in ranks] == [0, 0], ranks
    notes = [note["message"] for note in events_of(tmp_path / "run", "note") if "straggler" in note["message"]]
    assert any(note.startswith("rank 1 is a straggler") for note in notes), notes


def test_a_full_disk_under_the_journal_ends_both_ranks_with_78(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    full = """
import errno, os
from modelwright.runs import journal
real = journal.Journal.add
def add(self, event, **facts):
    if event == "step" and facts["step"] == 5 and os.environ["RANK"] == "0":
        def write(descriptor, line):
            raise OSError(errno.ENOSPC, "No space left on device")
        journal.os = type("full", (), {**vars(os), "write": staticmethod(write)})
    real(self, event, **facts)
journal.Journal.add = add
"""
    recipe = tiny_recipe(tmp_path, model_folder)
    ranks = fork_server.run_ranks(["run", str(recipe), *TWO], tmp_path, 2, first=full)
    assert [code for code, _ in ranks] == [78, 78], ranks
    assert "journal.jsonl: No space left on device" in ranks[0][1]
    assert ranks[1][1].strip() == ""


def test_a_run_goes_on_with_another_number_of_ranks_and_sees_the_same_batches(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    # the batch is written as a whole, so that it is the recipe's and not the world's
    recipe = tiny_recipe(tmp_path, model_folder, global_batch_size=4, gradient_accumulation_steps=1)
    ranks = fork_server.start_ranks(["run", str(recipe)], tmp_path, 2, first=slow_after(5))
    wait_for_step(tmp_path / "run", 5)
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert [trial.wait() for trial in ranks] == [75, 75], [trial.output for trial in ranks]
    code, output = fork_server.run(["run", str(recipe)], tmp_path)
    assert code == 0, output
    assert batches(tmp_path / "run") == batches(uninterrupted)
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), abs=1e-5)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["sft"]
    assert plan["batch_arithmetic"] == "batch 4 = 2 per device × 1 device × 2 accumulation"


def test_a_killed_rank_ends_the_other_and_the_run_goes_on_bit_for_bit(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "broken"
    fork_server.run_ranks(["run", str(tiny_recipe(uninterrupted, model_folder)), *TWO], uninterrupted, 2)
    recipe = tiny_recipe(killed, model_folder)
    ranks = fork_server.start_ranks(["run", str(recipe), *TWO], killed, 2, first=hold_after(7))
    wait_for_step(killed / "run", 7)
    os.kill(ranks[1].pid, signal.SIGKILL)
    (killed / "go").touch()
    began = time.monotonic()
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait() == 1
    assert "rank 0 lost its peers (" in ranks[0].output
    assert time.monotonic() - began < 240, "left to itself it would wait for ten minutes"
    again = fork_server.run_ranks(["run", str(recipe), *TWO], killed, 2)
    assert [code for code, _ in again] == [0, 0], again
    assert run_fingerprint(killed / "run") == run_fingerprint(uninterrupted / "run")


def test_an_error_of_the_first_rank_ends_all_with_its_code(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    ranks = fork_server.run_ranks(["run", str(recipe), "--set", "model.model_name_or_path=/nowhere"], tmp_path, 2)
    assert [code for code, _ in ranks] == [2, 2], ranks
    assert "no folder" in ranks[0][1]
    assert ranks[1][1].strip() == ""
