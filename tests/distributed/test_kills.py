"""Signals, changed settings and gates that close later; random kills are in tests/faults/test_reliability.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from modelwright.runs.heartbeat import has_exited
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


def finish(fork_server: ForkServer, recipe: Path) -> str:
    """Run to the end; whatever happened before must not matter."""
    code, output = fork_server.run(["run", str(recipe)], recipe.parent)
    assert code == 0, output
    return output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_stops_with_75_and_loses_no_step(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, save_steps=100)
    trial = fork_server.start(["run", str(recipe)], tmp_path, first=slow_after(5))
    wait_for_step(tmp_path / "run", 5)
    os.kill(trial.pid, number)
    assert trial.wait() == 75, trial.output
    done = max(steps_of(tmp_path / "run"))
    assert f"stopped after step {done} of 12; rerun the same command to resume" in trial.output
    assert events_of(tmp_path / "run", "checkpoint_saved")[-1]["step"] == done
    finish(fork_server, recipe)
    assert events_of(tmp_path / "run", "resumed")[-1]["step"] == done
    assert run_fingerprint(tmp_path / "run")["steps"] == run_fingerprint(uninterrupted)["steps"]
    assert run_fingerprint(tmp_path / "run")["files"] == run_fingerprint(uninterrupted)["files"]


def test_ctrl_c_twice_stops_at_once(fork_server: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=400)
    trial = fork_server.start(["run", str(recipe)], tmp_path, first=slow_after(1, after=1000.0))
    wait_for_step(tmp_path / "run", 1)
    began = time.monotonic()
    while not has_exited(trial.pid):  # two signals at once count as one, and a busy machine may not tell them apart
        os.kill(trial.pid, signal.SIGINT)
        time.sleep(0.5)
    assert trial.wait() == 75, trial.output
    assert time.monotonic() - began < 240, "it waited for the step to end"


def test_a_changed_setting_is_refused_by_name_unless_allowed(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    trial = fork_server.start(["run", str(recipe)], tmp_path, first=slow_after(5))
    wait_for_step(tmp_path / "run", 5)
    os.kill(trial.pid, signal.SIGTERM)
    assert trial.wait() == 75
    changed = ["run", str(recipe), "--set", "sft.learning_rate=5e-4", "--set", "sft.max_steps=13"]
    code, output = fork_server.run(changed, tmp_path)
    assert code == 77, output
    assert "sft.learning_rate was 0.001, now 0.0005" in output
    assert "sft.max_steps was 12, now 13" in output
    code, output = fork_server.run(
        [*changed, "--allow-changed", "sft.learning_rate", "--allow-changed", "sft.max_steps"], tmp_path
    )
    assert code == 0, output
    assert "resuming although sft.learning_rate was 0.001, now 0.0005" in output


def test_the_saved_recipe_runs_from_anywhere_and_a_refused_one_does_not_replace_it(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    recipe = tiny_recipe(home, model_folder)
    finish(fork_server, recipe)
    saved = (home / "run/recipe.yaml").read_text()
    assert fork_server.run(["run", str(recipe), "--set", "sft.learning_rate=1e-4"], home)[0] == 77
    assert (home / "run/recipe.yaml").read_text() == saved
    code, output = fork_server.run(["run", str(home / "run/recipe.yaml")], elsewhere)
    assert (code, "already complete and verified" in output) == (0, True), output
    code, output = fork_server.run(["ask", str(home / "run"), "What is 3 and 4?", "--both", "--json"], elsewhere)
    assert code == 0, output


def test_a_gate_that_closes_later_withdraws_the_promotion_and_is_reported_once(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    finish(fork_server, recipe)
    assert (tmp_path / "run/best_model").exists()
    strict = ["run", str(recipe), "--set", "gates={sft: {eval_loss: {at_most: 0.1}}}"]
    code, output = fork_server.run(strict, tmp_path)
    assert code == 3, output
    assert output.count("gate sft is closed") == 1
    assert "verdict          closed" in output
    assert not (tmp_path / "run/best_model").exists()


def test_a_lora_run_killed_before_its_first_checkpoint_begins_again_with_the_same_weights(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    finish(fork_server, tiny_recipe(uninterrupted, model_folder, trainable="lora", lora_dropout=0.1))
    recipe = tiny_recipe(killed, model_folder, trainable="lora", lora_dropout=0.1)
    trial = fork_server.start(["run", str(recipe)], killed, first=hold_after(2))
    wait_for_step(killed / "run", 2)
    os.kill(trial.pid, signal.SIGKILL)
    trial.wait()
    finish(fork_server, recipe)
    assert run_fingerprint(killed / "run") == run_fingerprint(uninterrupted / "run")


def test_a_signal_while_the_model_is_looked_for_is_a_stop_and_no_mistake(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    slow_hub = "import huggingface_hub, time\nhuggingface_hub.snapshot_download = lambda *a, **k: time.sleep(60)"
    trial = fork_server.start(
        ["run", str(recipe), "--set", "model.model_name_or_path=a/model"], tmp_path, first=slow_hub
    )
    deadline = time.monotonic() + 240
    while not has_event(tmp_path / "run", "loading") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(trial.pid, signal.SIGTERM)
    assert trial.wait() == 75, trial.output


def has_event(run: Path, event: str) -> bool:
    return (run / "journal.jsonl").exists() and bool(events_of(run, event))
