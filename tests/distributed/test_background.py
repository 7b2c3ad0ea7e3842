"""A checkpoint written while training goes on is worth what one written while it waits is."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.fork_server import SLOW_STEPS, ForkServer, events_of, run_fingerprint
from tiny import tiny_recipe

ALWAYS = {"async_save": "always"}
SLOW_DISK = """
import time
from modelwright.engine import checkpoint
verify = checkpoint.verify
def slow(folder):
    time.sleep(0.4)
    return verify(folder)
checkpoint.verify = slow
"""
"""Put first in a trial, this makes a save take as long as several steps."""
SAVE_DURING_A_STEP = """
import re, time
from pathlib import Path
from modelwright.engine import checkpoint
verify = checkpoint.verify
def slow(folder):
    step, deadline = int(re.search(r"step-(\\d+)", str(folder))[1]), time.monotonic() + 60
    while step < 12 and f'"step": {step + 1},' not in Path("run/journal.jsonl").read_text():
        assert time.monotonic() < deadline, "training waits for the save"
        time.sleep(0.02)
    return verify(folder)
checkpoint.verify = slow
"""
"""Put first in a trial, this ends a save only when the next step is in the journal."""
FULL_DISK = """
from modelwright.engine import checkpoint
from modelwright.engine.checkpoint import CheckpointManager
save, write, full = CheckpointManager.save, checkpoint.write_safetensors, False
def watched(self, snapshot, *rest):
    global full
    full = snapshot.step == 6
    return save(self, snapshot, *rest)
def filling(path, content):
    if full:
        raise OSError(28, "No space left on device")
    return write(path, content)
CheckpointManager.save, checkpoint.write_safetensors = watched, filling
"""
"""Put first in a trial, this leaves no room for the second checkpoint."""


def test_training_goes_on_while_a_checkpoint_is_written_and_ends_the_same(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, **ALWAYS)
    code, output = fork_server.run(["run", str(recipe)], tmp_path, first=SAVE_DURING_A_STEP)
    assert code == 0, output
    assert run_fingerprint(tmp_path / "run") == run_fingerprint(uninterrupted)
    begun = {event["step"]: event for event in events_of(tmp_path / "run", "checkpoint_started")}
    for saved in events_of(tmp_path / "run", "checkpoint_saved"):
        assert saved["async_save"]
        meanwhile = [
            e for e in events_of(tmp_path / "run", "step") if begun[saved["step"]]["time"] <= e["time"] < saved["time"]
        ]
        assert meanwhile or saved["step"] == 12, saved
    assert [event["step"] for event in events_of(tmp_path / "run", "checkpoint_saved")] == [3, 6, 9, 12]


@pytest.mark.slow
def test_kills_while_checkpoints_are_written_in_the_background_leave_no_trace(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    draw, landed = random.Random(20261115), 0
    for number in range(3):
        recipe = tiny_recipe(tmp_path / str(number), model_folder, **ALWAYS)
        for _ in range(3):
            trial = fork_server.start(["run", str(recipe)], recipe.parent, first=SLOW_STEPS + SLOW_DISK)
            time.sleep(draw.uniform(0.4, 1.6))
            os.kill(trial.pid, signal.SIGKILL)
            landed += trial.wait() == -signal.SIGKILL
        code, output = fork_server.run(["run", str(recipe)], recipe.parent)
        assert code == 0, output
        assert run_fingerprint(recipe.parent / "run") == run_fingerprint(uninterrupted)
    assert landed >= 3


def test_a_failed_background_save_is_reported_and_the_run_resumes_from_the_one_before(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, **ALWAYS)
    code, output = fork_server.run(["run", str(recipe)], tmp_path, first=FULL_DISK)
    assert code == 78, output
    assert "checkpoint step-00000006 could not be written (No space left on device)" in output
    assert "Traceback" not in output
    code, output = fork_server.run(["run", str(recipe)], tmp_path)
    assert code == 0, output
    assert events_of(tmp_path / "run", "resumed")[-1]["step"] == 3
    assert run_fingerprint(tmp_path / "run") == run_fingerprint(uninterrupted)


def test_two_ranks_save_in_the_background_and_both_get_a_failure(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, per_device_train_batch_size=2, **ALWAYS)
    ends = fork_server.run_ranks(["run", str(recipe)], tmp_path, 2, first=FULL_DISK)
    assert [code for code, _ in ends] == [78, 78], ends
    assert sum("could not be written" in output for _, output in ends) == 1
    ends = fork_server.run_ranks(["run", str(recipe)], tmp_path, 2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert events_of(tmp_path / "run", "checkpoint_saved")[-1]["async_save"]


def test_a_signal_waits_for_what_is_being_written(fork_server: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=400, **ALWAYS)
    trial = fork_server.start(["run", str(recipe)], tmp_path, first=SLOW_STEPS + SLOW_DISK)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (
        (tmp_path / "run/journal.jsonl").exists() and events_of(tmp_path / "run", "checkpoint_started")
    ):
        time.sleep(0.01)
    os.kill(trial.pid, signal.SIGTERM)
    assert trial.wait() == 75, trial.output
    assert events_of(tmp_path / "run", "checkpoint_saved")[-1]["step"] == max(
        e["step"] for e in events_of(tmp_path / "run", "step")
    )
