"""A run can be killed at any moment: it goes on, and ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from modelwright.runs.beat import is_gone
from rig import HELD, SLOW, Rig, Trial, slow_after, steps_of, told, trace, wait_for_step
from tiny import tiny_recipe

KILLS = 36
KILLS_PER_RUN = 3
SEED = 20261115


def finish(rig: Rig, recipe: Path) -> str:
    """Run to the end; whatever happened before must not matter."""
    code, output = rig.run(["run", str(recipe)], recipe.parent)
    assert code == 0, output
    return output


@pytest.mark.slow
def test_36_random_kills_leave_no_trace(rig: Rig, uninterrupted: Path, model_folder: Path, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    landed = 0
    for number in range(KILLS // KILLS_PER_RUN):
        recipe = tiny_recipe(tmp_path / str(number), model_folder)
        moments = [draw.uniform(0.05, 1.1) for _ in range(KILLS_PER_RUN)]
        for moment in moments:
            trial = rig.start(["run", str(recipe)], recipe.parent, first=SLOW)
            time.sleep(moment)
            os.kill(trial.pid, signal.SIGKILL)
            landed += trial.wait() == -signal.SIGKILL
        finish(rig, recipe)
        assert trace(recipe.parent / "run") == trace(uninterrupted), f"seed {SEED}, run {number}, kills at {moments}"
    assert landed >= 30, f"only {landed} of {KILLS} kills hit a living process"


WATCHED = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
"""The calls that change what a power cut or a kill would find."""
AT_WRITE_STEP = """
import os, signal
from modelwright.engine.checkpoint import Checkpoints
seen, inside = 0, False
def watch(name):
    real = getattr(os, name)
    def call(*values, **named):
        global seen
        if inside:
            seen += 1
            if seen == {moment}:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*values, **named)
    setattr(os, name, call)
for name in {watched}:
    watch(name)
save = Checkpoints.save
def watched_save(self, snapshot, *rest):
    global inside
    inside = snapshot.step == {step}
    save(self, snapshot, *rest)
    if inside:
        print("write steps:", seen)
    inside = False
Checkpoints.save = watched_save
"""


@pytest.mark.slow
def test_a_kill_at_each_write_step_of_a_save_leaves_no_trace(
    rig: Rig, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    # the third save: it also rotates the first one away
    first = AT_WRITE_STEP.replace("{watched}", repr(WATCHED)).replace("{step}", "9")
    recipe = tiny_recipe(tmp_path / "count", model_folder)
    code, output = rig.run(["run", str(recipe)], recipe.parent, first=first.replace("{moment}", "0"))
    assert code == 0, output
    moments = int(output.split("write steps: ")[1].split()[0])
    assert moments >= 10
    for moment in range(1, moments + 1):
        recipe = tiny_recipe(tmp_path / str(moment), model_folder)
        code, output = rig.run(["run", str(recipe)], recipe.parent, first=first.replace("{moment}", str(moment)))
        assert code == -signal.SIGKILL, output
        finish(rig, recipe)
        assert trace(recipe.parent / "run") == trace(uninterrupted), f"killed before write step {moment} of {moments}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_stops_with_75_and_loses_no_step(
    rig: Rig, uninterrupted: Path, model_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, save_steps=100)
    trial = rig.start(["run", str(recipe)], tmp_path, first=slow_after(5))
    wait_for_step(tmp_path / "run", 5)
    os.kill(trial.pid, number)
    assert trial.wait() == 75, trial.output
    done = max(steps_of(tmp_path / "run"))
    assert f"stopped after step {done} of 12; the same command continues" in trial.output
    assert told(tmp_path / "run", "saved")[-1]["step"] == done
    finish(rig, recipe)
    assert told(tmp_path / "run", "resumed")[-1]["step"] == done
    assert trace(tmp_path / "run")["steps"] == trace(uninterrupted)["steps"]
    assert trace(tmp_path / "run")["files"] == trace(uninterrupted)["files"]


def test_ctrl_c_twice_stops_at_once(rig: Rig, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=400)
    trial = rig.start(["run", str(recipe)], tmp_path, first=slow_after(1, after=300.0))
    wait_for_step(tmp_path / "run", 1)
    began = time.monotonic()
    while not is_gone(trial.pid):  # two signals at once count as one, and a busy machine may not tell them apart
        os.kill(trial.pid, signal.SIGINT)
        time.sleep(0.5)
    assert trial.wait() == 75, trial.output
    assert time.monotonic() - began < 120, "it waited for the step to end"


def test_a_finished_run_is_a_no_op(rig: Rig, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    finish(rig, recipe)
    before = trace(tmp_path / "run")
    steps = len(told(tmp_path / "run", "step"))
    assert "finished and verified" in finish(rig, recipe)
    assert trace(tmp_path / "run") == before
    assert len(told(tmp_path / "run", "step")) == steps


def test_a_second_process_is_refused_at_once_and_the_first_unharmed(
    rig: Rig, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    running: Trial = rig.start(["run", str(recipe)], tmp_path, first=HELD)
    wait_for_step(tmp_path / "run", 2)
    code, output = rig.run(["run", str(recipe)], tmp_path)
    assert code == 77, output
    assert f"is in use by process {running.pid} on" in output
    (tmp_path / "go").touch()
    assert running.wait() == 0, running.output
    assert trace(tmp_path / "run") == trace(uninterrupted)


def test_a_changed_setting_is_refused_by_name_unless_told(rig: Rig, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    trial = rig.start(["run", str(recipe)], tmp_path, first=slow_after(5))
    wait_for_step(tmp_path / "run", 5)
    os.kill(trial.pid, signal.SIGTERM)
    assert trial.wait() == 75
    changed = ["run", str(recipe), "--set", "sft.learning_rate=5e-4", "--set", "sft.max_steps=13"]
    code, output = rig.run(changed, tmp_path)
    assert code == 77, output
    assert "sft.learning_rate was 0.001, now 0.0005" in output
    assert "sft.max_steps was 12, now 13" in output
    code, output = rig.run([*changed, "--override", "sft.learning_rate", "--override", "sft.max_steps"], tmp_path)
    assert code == 0, output
    assert "goes on although sft.learning_rate was 0.001, now 0.0005" in output


def test_changed_data_is_refused(rig: Rig, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    finish(rig, recipe)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"question": "One more?", "answer": "One more."}\n')
    code, output = rig.run(["run", str(recipe)], tmp_path)
    assert code == 77, output
    assert "data.contents changed" in output


def test_the_saved_recipe_runs_from_anywhere_and_a_refused_one_does_not_replace_it(
    rig: Rig, model_folder: Path, tmp_path: Path
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    recipe = tiny_recipe(home, model_folder)
    finish(rig, recipe)
    saved = (home / "run/recipe.yaml").read_text()
    assert rig.run(["run", str(recipe), "--set", "sft.learning_rate=1e-4"], home)[0] == 77
    assert (home / "run/recipe.yaml").read_text() == saved
    code, output = rig.run(["run", str(home / "run/recipe.yaml")], elsewhere)
    assert (code, "finished and verified" in output) == (0, True), output
    code, output = rig.run(["ask", str(home / "run"), "What is 3 and 4?", "--both", "--json"], elsewhere)
    assert code == 0, output


def test_a_gate_that_closes_later_takes_the_title_back_and_is_told_once(
    rig: Rig, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    finish(rig, recipe)
    assert (tmp_path / "run/best_model").exists()
    strict = ["run", str(recipe), "--set", "gates={sft: {eval_loss: {at_most: 0.1}}}"]
    code, output = rig.run(strict, tmp_path)
    assert code == 3, output
    assert output.count("gate sft is closed") == 1
    assert "verdict          closed" in output
    assert not (tmp_path / "run/best_model").exists()


def test_a_lora_run_killed_before_its_first_checkpoint_begins_again_with_the_same_weights(
    rig: Rig, model_folder: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(rig, tiny_recipe(whole, model_folder, trainable="lora", lora_dropout=0.1))
    recipe = tiny_recipe(killed, model_folder, trainable="lora", lora_dropout=0.1)
    trial = rig.start(["run", str(recipe)], killed, first=slow_after(2))
    wait_for_step(killed / "run", 2)
    os.kill(trial.pid, signal.SIGKILL)
    trial.wait()
    finish(rig, recipe)
    assert trace(killed / "run") == trace(whole / "run")


def test_a_signal_while_the_model_is_looked_for_is_a_stop_and_no_mistake(
    rig: Rig, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    slow_hub = "import huggingface_hub, time\nhuggingface_hub.snapshot_download = lambda *a, **k: time.sleep(60)"
    trial = rig.start(["run", str(recipe), "--set", "model.model_name_or_path=a/model"], tmp_path, first=slow_hub)
    deadline = time.monotonic() + 120
    while not told_of(tmp_path / "run", "gathering") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(trial.pid, signal.SIGTERM)
    assert trial.wait() == 75, trial.output


def told_of(run: Path, event: str) -> bool:
    return (run / "journal.jsonl").exists() and bool(told(run, event))
