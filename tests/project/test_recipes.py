"""Every shipped recipe loads, is found by name, and is written out as the same recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelwright.data.chat import Conversation
from modelwright.data.chat_tokens import tokenize_conversations
from modelwright.models.pretrained import load_tokenizer
from modelwright.recipe.load import builtin_recipes, dump_yaml, load
from modelwright.recipe.stage_specs import ChatConfig

ROOT = Path(__file__).parents[2]
NAMES = sorted(builtin_recipes())


def test_the_recipes_of_the_repository_are_the_shipped_ones() -> None:
    assert sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")) == NAMES
    assert NAMES, "nothing is shipped"


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_loads_without_a_note(name: str) -> None:
    loaded = load(name, environ={})
    assert loaded.recipe.name == name
    assert loaded.recipe.description
    assert loaded.notes == ()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_written_out_as_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load(name, environ={}).recipe
    written = tmp_path / "recipe.yaml"
    written.write_text(dump_yaml(recipe), encoding="utf-8")
    again = load(written, environ={}).recipe
    assert again == recipe.model_copy(update={"env_overrides": {}, "gates_file": None})
    assert dump_yaml(again) == dump_yaml(recipe)


def test_the_plain_vision_recipe_has_the_settings_of_the_document() -> None:
    classify = load("resnet18-cifar10-plain", environ={}).recipe.stages["classify"]
    expected = {
        "num_train_epochs": 10, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1,
        "learning_rate": 0.001, "optim": "adamw_torch", "weight_decay": 0, "lr_scheduler_type": "constant",
        "precision": "fp32", "max_grad_norm": 0, "label_smoothing_factor": 0, "ema_decay": 0,
        "random_crop_padding": 4, "horizontal_flip": True, "cutout_size": 0,
        "test_time_flip": False, "test_time_shift": 0,  # validation: normalise only
    }  # fmt: skip
    assert {name: getattr(classify, name) for name in expected} == expected


def test_the_survival_recipe_asks_about_topics_of_its_data() -> None:
    topics = {"Wilderness Survival Basics", "Essential Knots and Uses", "Common Unit Conversions",
              "Basic First Aid Procedures", "Simple Car Maintenance Checks"}  # fmt: skip
    for name in ("survival-smollm3", "survival-smollm3-tiny"):
        recipe = load(name, environ={}).recipe
        assert {prompt.removeprefix("For ").partition(",")[0] for prompt in recipe.compare.prompts} <= topics
        assert {"eval_loss", "answer_f1", "degenerate_answers"} == recipe.gates["sft"].keys()
    assert load("survival-smollm3", environ={}).recipe.model.chat_template_kwargs == {"enable_thinking": False}


def test_the_lyrics_recipe_separates_question_and_answer_for_a_model_without_a_chat_template(
    model_folder: Path, tmp_path: Path
) -> None:
    plain = load_tokenizer(model_folder)
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = load_tokenizer(tmp_path, load("lyrics-pythia", environ={}).recipe.model)
    turns = ({"role": "user", "content": "Who sings?"}, {"role": "assistant", "content": "A rope."})
    (row,) = tokenize_conversations([Conversation("a:1", turns, "song")], tokenizer, ChatConfig(max_length=64), []).rows
    assert tokenizer.decode(row.input_ids) == "Question: Who sings?\nAnswer: A rope.<|im_end|>\n"
    trained = tokenizer.decode([token for token, mask in zip(row.input_ids, row.loss_mask, strict=True) if mask])
    assert trained.strip() == "A rope.<|im_end|>"
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "Question: Who sings?\nAnswer:"
    assert load("lyrics-pythia-tiny", environ={}).recipe.model.chat_template is None
