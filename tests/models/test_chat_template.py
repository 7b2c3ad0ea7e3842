"""A recipe's chat template, its variables and its date are used everywhere, and saved with the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import ModelError, RecipeError
from modelwright.models.pretrained import chat_template_fingerprint, describe_chat_template, load_tokenizer
from modelwright.recipe.load import dump_yaml, load
from modelwright.recipe.schema import ModelConfig
from modelwright.serve.generate import TextGenerator
from tiny import CHATML, tiny_recipe

THINKING = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}" + CHATML
DATED = "{%- if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% endif %}{{ today }}\n" + CHATML
CHAT = [{"role": "user", "content": "Why?"}]


def config(**settings: Any) -> ModelConfig:
    return ModelConfig(model_name_or_path="tiny", **settings)


def rendered(tokenizer: Any, **variables: Any) -> str:
    return str(tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **variables))


def test_a_variable_of_the_template_is_set_and_saved_with_the_tokenizer(model_folder: Path, tmp_path: Path) -> None:
    thinking = load_tokenizer(model_folder, config(chat_template=THINKING))
    silent = load_tokenizer(
        model_folder, config(chat_template=THINKING, chat_template_kwargs={"enable_thinking": False})
    )
    plain = rendered(load_tokenizer(model_folder))
    assert (rendered(thinking), rendered(silent)) == ("<think>" + plain, plain)
    silent.save_pretrained(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert rendered(saved) == plain
    assert rendered(saved, enable_thinking=True) == "<think>" + plain, "whoever serves it may still choose"
    again = load_tokenizer(tmp_path, config(chat_template_kwargs={"enable_thinking": False}))
    assert again.chat_template == saved.chat_template, "a later stage adds nothing"


def test_texts_of_a_variable_reach_the_template_unchanged(model_folder: Path) -> None:
    text = 'a "quoted" {{ brace }} \\ ü\n%}'
    tokenizer = load_tokenizer(
        model_folder, config(chat_template="{{ x }}{{ n }}", chat_template_kwargs={"x": text, "n": 2})
    )
    assert rendered(tokenizer) == f"{text}2"


def test_a_template_that_asks_for_todays_date_renders_the_same_on_every_day(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder, config(chat_template=DATED))
    assert rendered(tokenizer).startswith("26 Jul 2024\n<|im_start|>")
    other = load_tokenizer(model_folder, config(chat_template=DATED, chat_template_date="2026-01-02"))
    assert rendered(other).startswith("02 Jan 2026\n<|im_start|>")


def test_a_date_in_a_format_that_is_computed_is_refused(model_folder: Path) -> None:
    with pytest.raises(ModelError, match="asks for today's date in a format that is no constant"):
        load_tokenizer(model_folder, config(chat_template="{{ strftime_now(format) }}"))


def test_the_date_of_every_named_template_is_fixed(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = load_tokenizer(model_folder)
    tokenizer.chat_template = {"default": DATED.replace("now(", "now ("), "tool_use": DATED}
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model", config(chat_template_date="2026-01-02"))
    for name in ("default", "tool_use"):
        text = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=name, tokenize=False)
        assert "02 Jan 2026" in text, name


def test_variables_without_a_template_are_refused(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="chat_template_kwargs wants a chat template"):
        load_tokenizer(tmp_path, config(chat_template_kwargs={"enable_thinking": False}))


def test_the_recipe_takes_in_the_text_of_a_file(tmp_path: Path, model_folder: Path) -> None:
    path = tiny_recipe(tmp_path, model_folder)
    (tmp_path / "chat.jinja").write_text(THINKING, encoding="utf-8")
    loaded = load(path, ["model.chat_template=chat.jinja"], {})
    assert loaded.recipe.model.chat_template == THINKING
    (tmp_path / "run.yaml").write_text(dump_yaml(loaded.recipe), encoding="utf-8")
    (tmp_path / "chat.jinja").unlink()
    assert load(tmp_path / "run.yaml", (), {}).recipe.model.chat_template == THINKING
    with pytest.raises(RecipeError, match="it wants Jinja text, or a file of it next to the recipe"):
        load(path, ["model.chat_template=chat.jinja"], {})
    with pytest.raises(RecipeError, match="it wants a date such as 2024-07-26"):
        load(path, ["model.chat_template_date=yesterday"], {})


def test_a_changed_template_is_another_model(model_folder: Path) -> None:
    settings: list[dict[str, Any]] = [
        {}, {"chat_template": THINKING}, {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_date": "2026-01-02"},
    ]  # fmt: skip
    hashes = [chat_template_fingerprint(config(**setting)) for setting in settings]
    assert hashes[0] == "", "runs of earlier versions resume"
    assert len(set(hashes)) == len(hashes)


def test_an_untrained_model_answers_with_the_recipes_template(model_folder: Path) -> None:
    changed = config(chat_template=THINKING, chat_template_kwargs={"enable_thinking": True})
    generator = TextGenerator(model_folder, max_new_tokens=2, config=changed)
    tokens = generator._tokenize(CHAT)
    assert load_tokenizer(model_folder).decode(tokens).startswith("<think><|im_start|>user")


def test_one_line_says_which_template_is_used(model_folder: Path) -> None:
    plain = load_tokenizer(model_folder)
    assert describe_chat_template(plain, config()).startswith("chat template of the model (")
    changed = config(chat_template=THINKING, chat_template_kwargs=json.loads('{"enable_thinking": false}'))
    assert "of the recipe with enable_thinking=false" in describe_chat_template(plain, changed)
