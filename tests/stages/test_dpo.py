"""A dpo stage is evaluated by its preference metrics, and its gate can use them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder, read_json
from modelwright.stages import pipeline
from tests.faults.fork_server import events_of
from tiny import tiny_dpo_recipe


def run(folder: Path, model: Path, **dpo: Any) -> RunFolder:
    return pipeline.run(load(tiny_dpo_recipe(folder, model, **dpo), (), {}))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> RunFolder:
    return run(tmp_path_factory.mktemp("dpo"), model_folder)


def test_a_stage_learns_to_prefer_and_its_gate_asks_for_that(done: RunFolder) -> None:
    verdict = read_json(done.gate("dpo"))
    metrics = verdict["metrics"]
    assert verdict["open"]
    assert metrics["base_eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["eval_reward_accuracy"] > 0.9 and metrics["eval_reward_margin"] > 0.1
    assert metrics["base_eval_kl"] < 1e-5 < metrics["eval_kl"]
    assert "eval_sft_loss" in metrics and "base_eval_sft_loss" in metrics
    assert read_json(done.data_manifest("dpo"))["shared_prompt"] is True


def test_the_reference_is_kept_in_the_run_and_vouched_for(done: RunFolder) -> None:
    folder = done.stage("dpo") / "ref_log_probs"
    assert sorted(path.name for path in folder.iterdir()) == ["reference.json", "reference.safetensors"]
    facts = read_json(folder / "reference.json")
    assert facts["train_tokens"] == read_json(done.data_manifest("dpo"))["train"]["trained_tokens"]


def test_adapters_are_trained_on_preferences_too(model_folder: Path, tmp_path: Path) -> None:
    folder = run(tmp_path, model_folder, trainable="lora", lora_r=4, learning_rate=1e-2)
    metrics = read_json(folder.gate("dpo"))["metrics"]
    assert metrics["base_eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["eval_reward_accuracy"] > 0.9
    assert (folder.model("dpo") / "adapter_model.safetensors").exists()


def test_skipped_and_truncated_rows_are_reported(model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_dpo_recipe(tmp_path, model_folder, max_length=40, max_truncated_rows="100%", max_steps=2)
    with (tmp_path / "pairs.jsonl").open("a", encoding="utf-8") as rows:
        rows.write(json.dumps({"prompt": "Same?", "chosen": "Yes.", "rejected": "Yes."}) + "\n")
    folder = pipeline.run(load(recipe, (), {}))
    notes = [note["message"] for note in events_of(folder.path, "note")]
    assert "1 rows are left out: their two answers are the same" in notes
    [cut] = [note for note in notes if "rows are cut to max_length 40" in note]
    number, of = re.match(r"(\d+) of (\d+) rows", cut).groups()  # type: ignore[union-attr]
    assert f"none dropped; max_length cuts {int(number) / int(of):.0%} of the rows, which lose " in cut
    manifest = read_json(folder.data_manifest("dpo"))
    longest = max(manifest[split]["longest_row"] for split in ("train", "held_out"))
    assert cut.endswith(f"; raise it: the longest row has {longest} tokens")


def test_the_history_has_the_metrics_of_pairs(done: RunFolder) -> None:
    evaluated = [row for row in read_json(done.history)["steps"] if "eval_loss" in row]
    assert evaluated and all({"eval_reward_accuracy", "eval_kl"} <= row.keys() for row in evaluated)
