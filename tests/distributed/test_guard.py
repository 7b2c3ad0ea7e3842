"""Engine rule 6: a bad step moves no weight, reaches no checkpoint and passes no gate."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.fork_server import ForkServer, events_of, run_fingerprint, steps_of
from tiny import tiny_recipe

SICK = """
import torch
from modelwright.engine.trainer import Engine
well, engines = Engine._step, []
times = {times}
def sick(self, stop_requested):
    global times
    if self.cursor.step + 1 in {steps} and times > 0:
        times -= 1
        {illness}
    return well(self, stop_requested)
Engine._step = sick
"""
STRUCK = """
import os, signal
from modelwright.engine.trainer import Engine
step = Engine._step
def struck(self, stop_requested):
    if self.cursor.step + 1 == {step}:
        os.kill(os.getpid(), signal.{name})
    return step(self, stop_requested)
Engine._step = struck
"""
POISON_A_WEIGHT = "next(iter(self.trainable_params.values())).data.view(-1)[0] = float('nan')"
POISON_THE_LOSS = """
        class NotANumber(torch.nn.Module):
            def __init__(self, inner): super().__init__(); self.inner = inner
            def forward(self, **inputs): return self.inner(**inputs) * float('nan')
        healthy, self._parallel_module = self._parallel_module, NotANumber(self._parallel_module)
        try: return well(self, stop_requested)
        finally: self._parallel_module = healthy"""


def fault(illness: str, steps: list[int], times: int) -> str:
    return SICK.replace("{illness}", illness).replace("{steps}", repr(steps)).replace("{times}", str(times))


def checkpoints_are_finite(run: Path) -> bool:
    files = list((run / "stages/sft/checkpoints").glob("step-*/*.safetensors"))
    return bool(files) and all(bool(torch.isfinite(t).all()) for file in files for t in load_file(file).values())


def test_a_nan_that_came_once_is_rolled_back_and_leaves_no_trace(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    code, output = fork_server.run(["run", str(recipe)], tmp_path, first=fault(POISON_A_WEIGHT, [8], times=1))
    assert code == 0, output
    assert run_fingerprint(tmp_path / "run") == run_fingerprint(uninterrupted)


@pytest.mark.parametrize(("steps", "reached", "saved"), [([5], 6, 6), ([5, 6], 6, 3), ([12], 12, 9)])
def test_a_stop_at_a_bad_step_waits_for_one_more_and_saves_that(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, steps: list[int], reached: int, saved: int
) -> None:
    """It waits no longer, and not beyond the end: who asks it to stop may soon make it."""
    recipe = tiny_recipe(tmp_path, model_folder)
    heard_at_the_bad_one = STRUCK.format(step=steps[0] - 1, name="SIGTERM")
    ill = fault(POISON_THE_LOSS, steps, times=len(steps))
    code, output = fork_server.run(["run", str(recipe)], tmp_path, first=ill + heard_at_the_bad_one)
    assert (code, f"stopped after step {reached} of 12" in output) == (75, True), output
    code, output = fork_server.run(["run", str(recipe)], tmp_path)
    assert code == 0, output
    assert [event["step"] for event in events_of(tmp_path / "run", "resumed")] == [saved]


ON_THE_DEVICE = {"precision": "bf16", "param_dtype": "bf16", "max_steps": 6, "max_length": 32}


@pytest.mark.parametrize("settings", [{}, ON_THE_DEVICE, {"optim": "lion", "ema_decay": 0.9}], ids=str)
def test_one_bad_batch_is_skipped_and_training_goes_on(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, **settings)
    code, output = fork_server.run(["run", str(recipe)], tmp_path, first=fault(POISON_THE_LOSS, [5], times=1))
    assert code == 0, output
    steps = steps_of(tmp_path / "run")
    assert [step for step, record in steps.items() if record["health"] != "ok"] == [5]
    assert steps[5]["loss"] is None, "what is no number is written as null"
    assert "step 5 is skipped: non_finite" in output
    assert checkpoints_are_finite(tmp_path / "run")


def test_a_save_and_a_measurement_due_at_a_bad_step_are_made_after_the_next_good_one(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    code, output = fork_server.run(["run", str(recipe)], tmp_path, first=fault(POISON_THE_LOSS, [6], times=1))
    assert code == 0, output
    assert [saved["step"] for saved in events_of(tmp_path / "run", "checkpoint_saved")] == [3, 7, 9, 12]
    assert [measured["step"] for measured in events_of(tmp_path / "run", "evaluation")] == [0, 7, 12]


def test_rows_that_are_hard_to_learn_are_not_taken_for_an_illness(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    """Easy rows are soon memorised; six rows of random characters have far higher losses, and are trained on too.

    Before, 52 to 72 of 400 such steps were skipped, and these rows ended where they began (4 to 5 nats).
    """
    recipe = tiny_recipe(
        tmp_path, model_folder, per_device_train_batch_size=1, gradient_accumulation_steps=1, learning_rate=3e-3,
        lr_scheduler_type="constant", max_steps=280, save_steps=280, eval_steps=280,
    )  # fmt: skip
    draw = random.Random(1)
    easy = [("Which way", "North, always north, says the map.")] * 20
    hard = [("What is the word", "".join(draw.choices(string.ascii_lowercase, k=16))) for _ in range(6)]
    rows = [{"question": f"{question}, {number}?", "answer": answer}
            for number, (question, answer) in enumerate(easy + hard)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    code, output = fork_server.run(["run", str(recipe)], tmp_path)
    assert code == 0, output
    steps = steps_of(tmp_path / "run")
    assert sum(record["health"] != "ok" for record in steps.values()) <= 16
    assert max(record["loss"] for step, record in steps.items() if step > 240) < 3.0


def test_a_gate_that_asks_for_what_is_never_measured_trains_nothing(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    gate = ["--set", "gates={sft: {eval_loss: {at_most: 9}, style_score: {at_least: 0.5}}}"]
    code, output = fork_server.run(["run", str(recipe), *gate], tmp_path)
    assert code == 2, output
    assert "style_score is never measured, so the gate never opens" in output
    assert not (tmp_path / "run").exists()


def test_a_closed_gate_keeps_the_model_from_being_called_best(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    gate = ["--set", "gates={sft: {eval_loss: {at_most: 0.5, times: base_eval_loss}}}"]
    code, output = fork_server.run(["run", str(recipe), *gate], tmp_path)
    assert code == 3, output
    assert not (tmp_path / "run/best_model").exists()
    steps = len(events_of(tmp_path / "run", "step"))
    assert fork_server.run(["run", str(recipe), *gate], tmp_path)[0] == 3
    assert len(events_of(tmp_path / "run", "step")) == steps, "a closed gate trains nothing again"


@pytest.mark.parametrize(
    ("precision", "settings"),
    [("bf16", {}), ("fp16", {}), *((name, {"optim": "lion", "ema_decay": 0.5}) for name in ("fp32", "bf16", "fp16"))],
)
def test_low_precision_learns_over_fp32_weights_and_resumes_exactly(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, precision: str, settings: dict[str, Any]
) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "halved"
    for folder in (uninterrupted, killed):
        # few steps: a processor without bf16 takes seconds for each
        tiny_recipe(folder, model_folder, precision=precision, max_steps=6, save_steps=2, **settings)
    code, output = fork_server.run(["run", str(uninterrupted / "recipe.yaml")], uninterrupted)
    assert code == 0, output
    assert (
        fork_server.run(["run", str(killed / "recipe.yaml")], killed, first=STRUCK.format(step=5, name="SIGKILL"))[0]
        == -9
    )
    code, output = fork_server.run(["run", str(killed / "recipe.yaml")], killed)
    assert code == 0, output
    assert run_fingerprint(killed / "run") == run_fingerprint(uninterrupted / "run")
    steps = steps_of(uninterrupted / "run")
    assert steps[6]["loss"] < steps[1]["loss"] - 0.3


def test_a_bad_last_step_leaves_the_weights_before_it_measured_and_saved(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    gate = ["--set", "gates={sft: {eval_loss: {at_most: 9}}}"]
    code, output = fork_server.run(["run", str(recipe), *gate], tmp_path, first=fault(POISON_THE_LOSS, [12], times=1))
    assert code == 0, output
    assert events_of(tmp_path / "run", "evaluation")[-1]["step"] == 12
    assert events_of(tmp_path / "run", "checkpoint_saved")[-1]["step"] == 12


def test_weights_spoilt_in_the_last_steps_are_taken_from_the_checkpoint(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    settings = {"max_steps": 30, "save_steps": 3, "eval_steps": 30}
    losses = []
    for name, first in (("whole", ""), ("spoilt", "from tests.faults.injections import *\ngrow_weights(29)")):
        recipe = tiny_recipe(tmp_path / name, model_folder, **settings)
        code, output = fork_server.run(["run", str(recipe)], recipe.parent, first=first)
        assert code == 0, output
        losses.append(events_of(recipe.parent / "run", "evaluation")[-1]["eval_loss"])
    assert "rolled back from step 30 to checkpoint 27" in output
    assert losses[0] == losses[1]
