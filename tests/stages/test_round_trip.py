"""What a stage leaves on disk is what was measured: adapters after adapters, grown embeddings, untied heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.data.chat import build_prompt_messages
from modelwright.data.preferences import load_preferences, tokenize_pairs
from modelwright.errors import ModelError
from modelwright.models import save
from modelwright.models.pretrained import load_model, load_tokenizer
from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder, read_json
from modelwright.serve.generate import TextGenerator
from modelwright.stages import export, pipeline, specs
from tests.faults.fork_server import events_of
from tiny import SFT, tiny_dpo_recipe, tiny_recipe

LORA = {"trainable": "lora", "lora_r": 4, "learning_rate": 1e-2}


def chosen_loss(recipe: Path, folder: Path) -> float:
    """Mean loss of the chosen answers in the held-out pairs, by the model's own forward pass."""
    model, tokenizer, loaded = load_model(folder).eval(), load_tokenizer(folder), load(recipe, (), {}).recipe
    data = load_preferences(loaded.data_for("dpo"), loaded.seed, recipe.parent)
    total, count = 0.0, 0
    for pair in tokenize_pairs(data.held_out, tokenizer, loaded.dpo, [tokenizer.eos_token_id]).rows:
        tokens = torch.tensor([*pair.prompt, *pair.chosen.input_ids])
        with torch.no_grad():
            logps = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        at = len(pair.prompt) + torch.from_numpy(pair.chosen.loss_mask).nonzero()[:, 0]
        total, count = total - float(logps[at - 1, tokens[at]].sum()), count + len(at)
    return total / count


def preferences_after_adapter(folder: Path, model: Path, **dpo: Any) -> Path:
    """A recipe of an sft stage with LoRA, then dpo."""
    tiny_recipe(folder, model)
    path = tiny_dpo_recipe(folder, model, max_steps=2, **dpo)
    sft = {**SFT, **LORA, "max_steps": 2, "data": {"train_file": "rows.jsonl", "test_size": 4,
           "columns": {"question": "prompt", "answer": "completion"}}}  # fmt: skip
    text = path.read_text(encoding="utf-8").partition("compare:")[0]
    compare = {"prompts": [], "num_held_out_prompts": 0}
    path.write_text(f"{text}sft: {json.dumps(sft)}\ncompare: {json.dumps(compare)}\n", encoding="utf-8")
    return path


def test_an_adapter_after_an_adapter_keeps_the_first_one(model_folder: Path, tmp_path: Path) -> None:
    recipe = preferences_after_adapter(tmp_path, model_folder, **LORA)
    folder = pipeline.run(load(recipe, (), {}))
    result = read_json(folder.result("dpo"))
    assert chosen_loss(recipe, folder.best_model) == pytest.approx(result["metrics"]["eval_sft_loss"], rel=1e-4)
    before = chosen_loss(recipe, folder.model("sft"))
    assert before == pytest.approx(result["metrics"]["base_eval_sft_loss"], rel=1e-4)
    assert result["round_trip"]["seconds"] < 200
    weights = folder.lora_base("dpo") / "model.safetensors"  # it is verified as the adapter is
    contents = weights.read_bytes()
    weights.write_bytes(contents[:-1] + b"\0")
    pipeline.run(load(recipe, (), {}))
    assert weights.read_bytes() == contents
    assert read_json(folder.result("dpo"))["files"] == result["files"]


@pytest.mark.parametrize("dpo", [{}, {"trainable": "lora", "lora_target_modules": ["lm_head", "q_proj"]}], ids=str)
def test_any_stage_after_an_adapter_on_a_tied_head_has_its_losses(model_folder: Path, tmp_path: Path, dpo: Any) -> None:
    recipe = preferences_after_adapter(tmp_path, model_folder, **dpo)
    folder = pipeline.run(load(recipe, ["sft.lora_target_modules=[lm_head, embed_tokens, v_proj]"], {}))
    measured = read_json(folder.result("dpo"))["metrics"]
    assert chosen_loss(recipe, folder.best_model) == pytest.approx(measured["eval_sft_loss"], rel=1e-4)
    assert chosen_loss(recipe, folder.model("sft")) == pytest.approx(measured["base_eval_sft_loss"], rel=1e-4)


@pytest.mark.parametrize("settings", [LORA, {**LORA, "trainable": {"lora": True, "untie_lm_head": True}}], ids=str)
def test_a_tokenizer_with_more_tokens_than_the_model(model_folder: Path, tmp_path: Path, settings: Any) -> None:
    grown = tmp_path / "grown"
    shutil.copytree(model_folder, grown)
    tokenizer = load_tokenizer(grown)
    tokenizer.add_tokens(["Count again."])
    tokenizer.save_pretrained(grown)
    folder = pipeline.run(load(tiny_recipe(tmp_path, grown, max_steps=3, **settings), (), {}))
    assert load_model(folder.best_model).get_input_embeddings().weight.shape[0] == len(tokenizer)
    round_trip = read_json(folder.result("sft"))["round_trip"]
    assert round_trip["loaded_loss"] == pytest.approx(round_trip["trained_loss"], rel=1e-4)


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_a_stage_fails_if_what_it_saved_is_not_what_it_trained(
    model_folder: Path, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_other(model: Any, tokenizer: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
        save.save_model(model, tokenizer, {name: value * 1.001 for name, value in weights.items()}, folder)

    monkeypatch.setattr(specs, "save_model", save_other)
    recipe = load(tiny_recipe(tmp_path, model_folder, max_steps=3, **settings), (), {})
    with pytest.raises(ModelError, match="the saved model is not the one that was trained"):
        pipeline.run(recipe)
    assert not RunFolder(tmp_path / "run").result("sft").exists()


def test_a_stage_fails_if_the_saved_model_has_another_loss(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are equal, but an adapter's scaling is a setting of its config."""

    def save_other(model: Any, tokenizer: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
        model.peft_config["default"].lora_alpha *= 4
        save.save_model(model, tokenizer, weights, folder)

    monkeypatch.setattr(specs, "save_model", save_other)
    with pytest.raises(ModelError, match=r"the saved model has a loss of .* on rows where the trained one has"):
        pipeline.run(load(tiny_recipe(tmp_path, model_folder, max_steps=8, **LORA), (), {}))


def test_a_run_folder_that_was_moved_is_loaded_asked_exported_and_continued(model_folder: Path, tmp_path: Path) -> None:
    """The adapter of dpo names its base, which is in the run folder, by the path of then."""
    recipe = preferences_after_adapter(tmp_path / "then", model_folder, **LORA)
    pipeline.run(load(recipe, (), {}))
    expected = chosen_loss(recipe, tmp_path / "then" / "run" / "best_model")
    (tmp_path / "then").rename(tmp_path / "now")
    recipe, folder = tmp_path / "now" / recipe.name, RunFolder(tmp_path / "now" / "run")
    assert chosen_loss(recipe, folder.best_model) == expected
    assert len(TextGenerator(folder.best_model, max_new_tokens=2).generate([build_prompt_messages("Why?", None)])) == 1
    result = export.export(export.check_export(str(folder.path), "merged", output=str(tmp_path / "merged")))
    assert chosen_loss(recipe, result.path) == pytest.approx(expected, rel=1e-5)
    text = recipe.read_text(encoding="utf-8").replace(str(tmp_path / "then"), str(tmp_path / "now"))
    recipe.write_text(text, encoding="utf-8")
    pipeline.run(load(recipe, (), {}))
    assert "dpo already complete and verified; skipped" in str(events_of(folder.path, "note"))
