"""Explaining: every setting is there, with its value, who set it, and a sentence."""

from __future__ import annotations

import json

import pytest

from modelwright.errors import UsageError
from modelwright.recipe.explain import explain_setting, is_section, json_schema, list_settings, resolve_key
from modelwright.recipe.fields import all_sections, child_fields, example_value
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import SftConfig


def test_every_setting_has_a_sentence_that_ends_and_says_what_it_wants() -> None:
    for section in all_sections().values():
        for setting in child_fields(section):
            assert setting.description.endswith("."), setting.key
            assert setting.expected, setting.key


def test_some_value_of_every_setting_would_do() -> None:
    for setting in child_fields(all_sections()["sft"]):
        SftConfig.model_validate({"trainable": "lora", setting.key.partition(".")[2]: example_value(setting)})


def test_every_setting_of_a_recipe_is_shown_once_with_who_set_it() -> None:
    loaded = load("quickstart", ("sft.max_length=128",), {"EPOCHS": "2"})
    shown = {row.key: row for row in list_settings(loaded)}
    assert len(shown) == len(list_settings(loaded))
    assert {f"sft.{name}" for name in SftConfig.model_fields if name != "trainable"} <= set(shown)
    assert (shown["sft.max_length"].value, str(shown["sft.max_length"].origin)) == (128, "--set")
    assert str(shown["sft.num_train_epochs"].origin) == "environment EPOCHS"
    assert str(shown["sft.weight_decay"].origin) == "default"
    assert str(shown["gates.sft.answers.exact_match.at_least"].origin).startswith("quickstart.yaml:")
    json.dumps([row.value for row in shown.values()])


def test_one_word_for_a_section_sets_all_of_it() -> None:
    shown = {row.key: row for row in list_settings(load("quickstart", ("sft.trainable=lora",), {}), "sft.trainable")}
    assert shown["sft.trainable.lora"].value is True
    assert {str(row.origin) for row in shown.values()} == {"--set"}


def test_one_setting_is_explained_at_length() -> None:
    explanation = explain_setting(load("quickstart", (), {}), "sft.precision")
    assert explanation.choices == ("auto", "fp32", "bf16", "fp16", "fp8")
    assert explanation.expected == "one of auto, fp32, bf16, fp16, fp8"
    assert {"bf16", "fp16"} <= set(explanation.aliases)
    assert (explanation.default, explanation.required) == ("auto", False)
    assert explain_setting(load("quickstart", (), {}), "sft.save_steps").default == "25%"
    assert explain_setting(load("quickstart", (), {}), "name").required


def test_a_default_that_depends_on_another_setting_is_that_of_the_recipe() -> None:
    for optim, beta2 in (("adamw_torch", 0.999), ("lion", 0.99)):
        explanation = explain_setting(load("quickstart", (f"sft.optim={optim}",), {}), "sft.adam_beta2")
        assert explanation.default == explanation.setting.value == beta2


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("sft.learning_rate", "sft.learning_rate"),
        ("learning_rate", "sft.learning_rate"),
        ("lr", "sft.learning_rate"),
        ("sft.max_seq_length", "sft.max_length"),
        ("out_dir", "output_dir"),
        ("sft", "sft"),
        ("gates.sft.eval_loss.at_most", "gates.sft.eval_loss.at_most"),
    ],
)
def test_a_key_may_be_bare_or_another_tools(name: str, key: str) -> None:
    assert resolve_key(name) == key


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"^sft.learnin_rate is not a setting; did you mean sft.learning_rate\?$"):
        resolve_key("sft.learnin_rate")
    with pytest.raises(UsageError, match=r"did you mean sft.learning_rate\?"):
        resolve_key("lerning_rate")
    with pytest.raises(UsageError, match="sections are model, data, sft"):
        resolve_key("zzzzzz")


def test_sections_are_distinguished_from_settings() -> None:
    assert [is_section(key) for key in ("sft", "gates", "sft.trainable", "sft.lora_r", "name")] == [True] * 3 + [
        False
    ] * 2


def test_the_schema_for_editors_knows_base_words_and_every_section() -> None:
    schema = json_schema()
    assert {"base", "name", "model", "data", "sft", "gates"} <= set(schema["properties"])
    assert {"required": ["base"]} in schema["anyOf"]
    assert schema["additionalProperties"] is False
    assert {"enum": ["all", "lora"]} in schema["$defs"]["TrainableParts"]["anyOf"]
    assert schema["$defs"]["SftConfig"]["properties"]["learning_rate"]["description"].startswith("Peak learning rate")
