"""The script that compares bits on a GPU, tried on a CPU with a tiny model."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.faults import gpu

SHORT = {"max_steps": 3, "per_device_train_batch_size": 4}


@pytest.fixture
def work(tmp_path: Path) -> gpu.Workspace:
    return gpu.Workspace(tmp_path, "cpu", SHORT)


def test_two_runs_are_equal_and_other_weights_are_found(work: gpu.Workspace) -> None:
    trial = gpu.Trial("tiny", "shared prefix", "20")
    first, second = (gpu.train(work.recipe(trial), work.folder / "run") for _ in range(2))
    assert gpu.compare(first, second) == "equal"
    assert second["deterministic"]
    assert gpu.compare(first, {**second, "weights": "other"}) == "weights"
    assert gpu.compare(first, {**second, "losses": [*second["losses"][:-1], 0.0]}) == "loss of step 3"


def test_the_cost_is_the_faster_of_two_runs_each(work: gpu.Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((1.0, 1.25, 1.1, 1.5))
    monkeypatch.setattr(gpu, "train", lambda *_: {"seconds": next(seconds)})
    assert gpu.cost(work, gpu.Trial("tiny", "vision", "20")) == {"result": "+10.0%", "false, s": 1.0, "true, s": 1.1}


def test_a_killed_run_is_compared_step_by_step() -> None:
    steps = {1: {(2.5,)}, 2: {(2.0,)}}
    expected: dict[str, Any] = {"exit": 0, "revisions": [], "files": {"model": "a"}, "steps": steps}
    assert gpu._compare_runs(expected, expected) == "equal"
    repeated_otherwise = {**expected, "steps": {1: {(2.5,)}, 2: {(2.0,), (2.1,)}}}
    assert gpu._compare_runs(expected, repeated_otherwise) == "step 2"
    assert gpu._compare_runs(expected, {**expected, "files": {"model": "b"}}) == "weights"
    assert gpu._compare_runs(expected, {**expected, "exit": 1}) == "exit 0 and 1, 1 files"
    assert gpu._compare_runs(expected, {**repeated_otherwise, "revisions": ["no memory"]}) == "plan: no memory"


def test_a_command_is_killed_after_its_first_new_step(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"event": "step", "stage": "sft", "step": 1}\n')
    journal = tmp_path / "journal.jsonl"
    code = f"import time; print('{{\"event\": \"step\"}}', file=open({str(journal)!r}, 'a')); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    assert gpu._kill_after_a_step(process, tmp_path, delay=0.1) < 30
    assert process.returncode == -signal.SIGKILL


def test_the_trials_cover_every_model_setting_and_prefix() -> None:
    models = list(gpu.SHAPES)[:3]
    trials = gpu.all_trials(models, list(gpu.SETTINGS), list(gpu.PREFIXES))
    text_settings = len(gpu.SETTINGS) - 1
    assert len(trials) == 3 * 3 * text_settings + 1, "images depend on neither model nor prefix"
    assert {trial.prefix for trial in trials[: 3 * text_settings]} == {"20"}


def test_what_does_not_fit_in_the_time_is_left_to_the_next_call() -> None:
    trials = gpu.all_trials(["tiny"], ["padded", "packed", "DPO"], ["20"])
    figures = gpu.run_trials(trials, 2, -1.0, lambda trial: {"result": "equal"})
    assert figures == {"not run": {"result": "2 of 3 trials did not fit in -1 s: continue with --first 2"}}
    figures = gpu.run_trials(trials, 3, 60.0, lambda trial: {"result": "equal"})
    assert "\n".join(gpu.table(figures)).endswith("1 of 1 equal")


def test_a_trial_that_fails_does_not_end_the_others() -> None:
    trials = gpu.all_trials(["tiny"], ["padded", "packed"], ["20"])

    def measure(trial: gpu.Trial) -> dict[str, Any]:
        if trial.setting == "padded":
            raise RuntimeError("no kernel\nfor this")
        return {"result": "equal"}

    figures = gpu.run_trials(trials, 1, 60.0, measure)
    assert [figure["result"] for figure in figures.values()] == ["RuntimeError: no kernel", "equal"]


def test_the_command_says_what_it_does_and_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(gpu.main)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "160")
    text = CliRunner().invoke(app, ["repeat", "--help"]).output
    assert all(name in text for name in ("repeat", "kills", "cost", "--seconds", "--first", "--device"))
    monkeypatch.setattr(gpu, "repeat", lambda work, trial: {"result": "equal"})
    output = (
        CliRunner().invoke(app, ["repeat", "--device", "cpu", "--settings", "padded,fp8", "--prefixes", "300"]).output
    )
    assert "| tiny, padded, prefix 300 | equal |" in output
    assert "| fp8 | left out: needs a GPU |" in output
