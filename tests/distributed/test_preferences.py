"""Preferences keep the rules of the engine: killed anywhere they end the same, and two ranks equal one."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

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
from tiny import tiny_dpo_recipe

ADAPTERS = {"trainable": "lora", "lora_r": 4, "lora_dropout": 0.1, "use_dora": True, "learning_rate": 1e-2}
SEED = 20261115


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing happened to."""
    return uninterrupted_run(fork_server, tmp_path_factory.mktemp("undisturbed"), model_folder)


def uninterrupted_run(fork_server: ForkServer, folder: Path, model: Path, **settings: Any) -> Path:
    code, output = fork_server.run(["run", str(tiny_dpo_recipe(folder, model, **settings))], folder)
    assert code == 0, output
    return folder / "run"


def killed_run(fork_server: ForkServer, folder: Path, model: Path, **settings: Any) -> Path:
    """A run that was killed while it measured its reference, or loaded, and twice in the middle."""
    recipe = tiny_dpo_recipe(folder, model, **settings)
    draw, landed = random.Random(SEED), 0
    for step in (0, 4, 8):
        trial = fork_server.start(["run", str(recipe)], folder, first=slow_after(min(step + 3, 11), 0.08, 100.0))
        if step:
            wait_for_step(folder / "run", step)
        time.sleep(draw.uniform(0.0, 0.3))
        os.kill(trial.pid, signal.SIGKILL)
        landed += trial.wait() == -signal.SIGKILL
    assert landed == 3
    return uninterrupted_run(fork_server, folder, model, **settings)


def test_a_run_killed_at_random_moments_ends_as_the_undisturbed_one(
    fork_server: ForkServer, undisturbed: Path, model_folder: Path, tmp_path: Path
) -> None:
    assert run_fingerprint(killed_run(fork_server, tmp_path, model_folder), "dpo") == run_fingerprint(
        undisturbed, "dpo"
    )


def test_adapters_killed_at_random_moments_end_as_undisturbed_ones(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    uninterrupted = uninterrupted_run(fork_server, tmp_path / "whole", model_folder, **ADAPTERS)
    assert run_fingerprint(
        killed_run(fork_server, tmp_path / "killed", model_folder, **ADAPTERS), "dpo"
    ) == run_fingerprint(uninterrupted, "dpo")


def test_a_reference_that_was_lost_on_the_way_is_measured_again_from_the_first_weights(
    fork_server: ForkServer, undisturbed: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_dpo_recipe(tmp_path, model_folder)
    trial = fork_server.start(["run", str(recipe)], tmp_path, first=hold_after(7))
    wait_for_step(tmp_path / "run", 7)
    os.kill(trial.pid, signal.SIGKILL)
    trial.wait()
    ref_log_probs = tmp_path / "run/stages/dpo/ref_log_probs/reference.safetensors"
    ref_log_probs.write_bytes(ref_log_probs.read_bytes()[:-1] + b"\1")
    code, output = fork_server.run(["run", str(recipe)], tmp_path)
    assert code == 0, output
    assert "cached reference log-probs not used (reference.safetensors is damaged)" in output
    assert run_fingerprint(tmp_path / "run", "dpo") == run_fingerprint(undisturbed, "dpo")


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_equal_one(
    fork_server: ForkServer, undisturbed: Path, model_folder: Path, tmp_path: Path, sharding: str
) -> None:
    recipe = tiny_dpo_recipe(tmp_path, model_folder, distributed_strategy=sharding, gradient_accumulation_steps=1)
    ranks = fork_server.run_ranks(["run", str(recipe)], tmp_path, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    runs = (undisturbed, tmp_path / "run")
    curves = [[(r["loss"], r["batch_hash"]) for _, r in sorted(steps_of(run, "dpo").items())] for run in runs]
    assert [batch for _, batch in curves[0]] == [batch for _, batch in curves[1]]
    assert [loss for loss, _ in curves[0]] == pytest.approx([loss for loss, _ in curves[1]], abs=1e-5)
    ends = [events_of(run, "evaluation")[-1] for run in runs]
    names = [name for name in ends[0] if name.startswith("eval_")]
    assert len(names) == 7
    assert [ends[1][name] for name in names] == pytest.approx([ends[0][name] for name in names], rel=1e-3, abs=1e-4)


def test_bf16_weights_that_two_ranks_share_learn_as_those_of_one(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    settings = {"precision": "bf16", "param_dtype": "bf16", "max_steps": 4}
    halves = {**settings, "gradient_accumulation_steps": 1, "distributed_strategy": "fsdp"}
    one, two = tmp_path / "one", tmp_path / "two"
    code, output = fork_server.run(["run", str(tiny_dpo_recipe(one, model_folder, **settings))], one)
    assert code == 0, output
    ranks = fork_server.run_ranks(["run", str(tiny_dpo_recipe(two, model_folder, **halves))], two, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    alone, shared = ([r["loss"] for _, r in sorted(steps_of(run / "run", "dpo").items())] for run in (one, two))
    assert shared[0] == pytest.approx(math.log(2), abs=1e-4), "the reference is of the same arithmetic"
    assert shared == pytest.approx(alone, abs=5e-3)


def test_a_recipe_of_pairs_is_checked_before_anything_is_loaded(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_dpo_recipe(tmp_path, model_folder)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": ""}) + "\n")
    code, output = fork_server.run(["check", str(recipe)], tmp_path)
    assert (code, "pairs.jsonl:1: 'rejected' is empty; it wants text" in output) == (2, True), output
