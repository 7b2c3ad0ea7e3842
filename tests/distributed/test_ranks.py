"""Engine rules 2 and 3: two ranks equal one, and any number of ranks sees the same batches."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rig import SLOW, Rig, steps_of, told, trace, wait_for_step
from tiny import tiny_recipe

TWO = ["--set", "sft.gradient_accumulation_steps=1"]
"""With two ranks, half the accumulation makes the same batch."""


def losses(run: Path) -> list[float]:
    return [record["loss"] for _, record in sorted(steps_of(run).items())]


def batches(run: Path) -> list[str]:
    return [record["batch"] for _, record in sorted(steps_of(run).items())]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_equal_one(rig: Rig, uninterrupted: Path, model_folder: Path, tmp_path: Path, sharding: str) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, sharding=sharding)
    ranks = rig.run_ranks(["run", str(recipe), *TWO], tmp_path, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert batches(tmp_path / "run") == batches(uninterrupted)
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), abs=1e-5)
    evaluations = [record["eval_loss"] for record in told(tmp_path / "run", "evaluation")]
    assert evaluations == pytest.approx([r["eval_loss"] for r in told(uninterrupted, "evaluation")], abs=1e-5)


def test_two_ranks_equal_one_with_a_batch_that_two_do_not_divide(rig: Rig, model_folder: Path, tmp_path: Path) -> None:
    settings = {"global_batch_size": 5, "gradient_accumulation_steps": 1, "num_train_epochs": 1, "max_steps": None}
    one, two = tmp_path / "one", tmp_path / "two"
    code, output = rig.run(["run", str(tiny_recipe(one, model_folder, **settings))], one)
    assert code == 0, output
    ranks = rig.run_ranks(["run", str(tiny_recipe(two, model_folder, **settings))], two, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert batches(two / "run") == batches(one / "run")
    assert losses(two / "run") == pytest.approx(losses(one / "run"), abs=1e-5)


def test_only_the_first_rank_prints(rig: Rig, model_folder: Path, tmp_path: Path) -> None:
    ranks = rig.run_ranks(["run", str(tiny_recipe(tmp_path, model_folder)), *TWO], tmp_path, 2)
    assert "sft step 12/12" in ranks[0][1]
    assert ranks[1][1].strip() == ""


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks_and_sees_the_same_batches(
    rig: Rig, uninterrupted: Path, model_folder: Path, tmp_path: Path, before: int, after: int
) -> None:
    # the batch is written as a whole, so that it is the recipe's and not the world's
    recipe = tiny_recipe(tmp_path, model_folder, global_batch_size=4, gradient_accumulation_steps=1)
    ranks = rig.start_ranks(["run", str(recipe)], tmp_path, before, first=SLOW)
    wait_for_step(tmp_path / "run", 5)
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert [trial.wait() for trial in ranks] == [75] * before, [trial.output for trial in ranks]
    rest = rig.run_ranks(["run", str(recipe)], tmp_path, after)
    assert [code for code, _ in rest] == [0] * after, rest
    assert batches(tmp_path / "run") == batches(uninterrupted)
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), abs=1e-5)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["sft"]
    assert (
        plan["arithmetic"] == f"batch 4 = 2 per device × {after} device{'s' * (after > 1)} × {2 // after} accumulation"
    )


def test_a_killed_rank_ends_the_other_and_the_run_goes_on_bit_for_bit(
    rig: Rig, model_folder: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rig.run_ranks(["run", str(tiny_recipe(whole, model_folder)), *TWO], whole, 2)
    recipe = tiny_recipe(broken, model_folder)
    ranks = rig.start_ranks(["run", str(recipe), *TWO], broken, 2, first=SLOW)
    wait_for_step(broken / "run", 7)
    os.kill(ranks[1].pid, signal.SIGKILL)
    began = time.monotonic()
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait() not in (0, 75)
    assert time.monotonic() - began < 10
    again = rig.run_ranks(["run", str(recipe), *TWO], broken, 2)
    assert [code for code, _ in again] == [0, 0], again
    assert trace(broken / "run") == trace(whole / "run")


def test_a_letter_of_the_first_rank_ends_all_with_its_code(rig: Rig, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    ranks = rig.run_ranks(["run", str(recipe), "--set", "model.model_name_or_path=/nowhere"], tmp_path, 2)
    assert [code for code, _ in ranks] == [2, 2], ranks
    assert "no folder" in ranks[0][1]
    assert ranks[1][1].strip() == ""
