"""An orpo stage learns the chosen answers and to prefer them, and its gate can ask for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelwright.data.row_formats import estimate_row_stats
from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder, read_json
from modelwright.stages import pipeline
from modelwright.stages.specs import render_samples
from tests.faults.fork_server import steps_of
from tiny import tiny_orpo_recipe


def run(folder: Path, model: Path, **orpo: Any) -> RunFolder:
    return pipeline.run(load(tiny_orpo_recipe(folder, model, **orpo), (), {}))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> RunFolder:
    return run(tmp_path_factory.mktemp("orpo"), model_folder)


def test_the_gate_asks_for_what_the_first_model_has_not(done: RunFolder) -> None:
    verdict = read_json(done.gate("orpo"))
    metrics = verdict["metrics"]
    assert verdict["open"] and len(verdict["checks"]) == 2
    assert metrics["base_eval_reward_accuracy"] < 0.5 < 0.9 < metrics["eval_reward_accuracy"]
    assert metrics["base_eval_reward_margin"] < 0 < metrics["eval_reward_margin"]
    assert metrics["base_eval_log_odds"] < 0 < metrics["eval_log_odds"]
    assert metrics["eval_nll_loss"] < metrics["base_eval_nll_loss"]
    assert metrics["eval_nll_loss"] < metrics["eval_loss"] < metrics["eval_nll_loss"] + 0.1


def test_nothing_depends_on_the_micro_batch_or_on_sharing_the_prompt(
    done: RunFolder, model_folder: Path, tmp_path: Path
) -> None:
    other = run(
        tmp_path, model_folder, share_prompt=False, per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    assert read_json(done.data_manifest("orpo"))["shared_prompt"] is True
    assert read_json(other.data_manifest("orpo"))["shared_prompt"] is False
    one, two = ([step["loss"] for step in steps_of(folder.path, "orpo").values()] for folder in (done, other))
    assert one == pytest.approx(two, abs=1e-5)
    first, second = (read_json(folder.gate("orpo"))["metrics"] for folder in (done, other))
    assert first["eval_loss"] == pytest.approx(second["eval_loss"], abs=1e-5)


def test_adapters_are_trained_too(model_folder: Path, tmp_path: Path) -> None:
    folder = run(tmp_path, model_folder, trainable="lora", lora_r=4, learning_rate=2e-2)
    assert read_json(folder.gate("orpo"))["open"]
    assert (folder.model("orpo") / "adapter_model.safetensors").exists()


def test_prompts_and_chosen_answers_are_trained_and_the_planner_knows_it(done: RunFolder) -> None:
    loaded = load(done.recipe, environ={})
    chosen, rejected = render_samples(loaded, 1)[0]["orpo"]
    assert [trained for _, trained in chosen.spans] == [True]
    assert [trained for _, trained in rejected.spans] == [False, True]
    train = read_json(done.data_manifest("orpo"))["train"]
    assert train["trained_tokens"] == train["tokens"]
    assert estimate_row_stats(loaded.recipe, "orpo", loaded.path.parent).trained_fraction == 1.0
