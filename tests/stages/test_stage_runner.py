"""Evaluation while training: a non-finite loss is divergence, and a signal does not wait for its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelwright.engine.trainer import Engine
from modelwright.errors import Diverged, Interrupted
from modelwright.recipe.load import load
from modelwright.runs import journal
from modelwright.runs.folder import hash_file
from modelwright.stages import pipeline, stage_runner
from tiny import tiny_recipe


def test_a_held_out_loss_that_is_no_number_is_divergence(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Engine.evaluate

    def evaluate(self: Engine, stop_requested: Callable[[], bool]) -> dict[str, float] | None:
        return {"eval_loss": float("nan")} if self.cursor.step == 6 else sound(self, stop_requested)

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    with pytest.raises(Diverged, match="sft diverged by step 6: eval_loss is not finite"):
        pipeline.run(load(tiny_recipe(tmp_path, model_folder), environ={}))
    assert not (tmp_path / "run/best_model").exists()
    assert not (tmp_path / "run/stages/sft/result.json").exists()


@pytest.mark.parametrize("step", [6, 12])
def test_a_signal_stops_an_evaluation_which_the_resumed_run_makes_up_for(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, eval_steps=3, per_device_eval_batch_size=1)
    plain = load(tiny_recipe(tmp_path / "plain", model_folder, eval_steps=3, per_device_eval_batch_size=1), environ={})
    sound = Engine._forward
    batches: list[int] = []

    def forward(self: Engine, micro_batch: Any) -> Any:
        if self.cursor.step == step:
            batches.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return sound(self, micro_batch)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_forward", forward)
        with pytest.raises(Interrupted, match=f"stopped after step {step} of 12; rerun the same command to resume"):
            pipeline.run(load(recipe, environ={}))
    assert len(batches) == 1, "the rest of the evaluation is left out"
    pipeline.run(load(recipe, environ={}))
    pipeline.run(plain)
    runs = [tmp_path / "run", tmp_path / "plain/run"]
    records = [
        {
            event["step"]: event["eval_loss"]
            for event in journal.read(run / "journal.jsonl")
            if event["event"] == "evaluation"
        }
        for run in runs
    ]
    assert records[0] == records[1]
    assert hash_file(runs[0] / "best_model/model.safetensors") == hash_file(runs[1] / "best_model/model.safetensors")


def test_an_evaluation_takes_the_same_rows_of_the_number_that_is_set(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, eval_steps=6, max_eval_samples=3)
    sound = Engine._held_out_sums
    eval_rows: list[list[int]] = []

    def held_out_sums(self: Engine, stop_requested: Callable[[], bool]) -> Any:
        eval_rows.append(list(self.eval_rows))
        return sound(self, stop_requested)

    monkeypatch.setattr(Engine, "_held_out_sums", held_out_sums)
    monkeypatch.setattr(stage_runner, "EVALUATION_LOG_SECONDS", 0.0)
    pipeline.run(load(recipe, ["sft.max_steps=6"], environ={}))
    events = list(journal.read(tmp_path / "run/journal.jsonl"))
    assert len(eval_rows) >= 2
    assert all(rows == eval_rows[0] for rows in eval_rows)
    assert len(eval_rows[0]) == 3 and sorted({*eval_rows[0]}) == eval_rows[0] and {*eval_rows[0]} < {*range(4)}
    notes = [event["message"] for event in events if event["event"] == "note"]
    assert "evaluations take 3 of 4 held-out rows, chosen by the seed (max_eval_samples)" in notes
    assert [event["fraction"] for event in events if event["event"] == "evaluating"][:1] == [0.0]
