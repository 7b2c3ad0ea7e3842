"""Parameter counts from a config equal those of the models that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import ModelError
from modelwright.plan.model_shape import (
    SHIPPED_CONFIGS,
    DecoderShape,
    ResNetShape,
    count_trainable,
    shape_from_config,
    shape_of_recipe,
)
from modelwright.recipe.load import load
from modelwright.recipe.schema import Recipe
from modelwright.recipe.stage_specs import SftConfig

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
SELECTIONS: list[Any] = [
    "all", "lora", {"last_layers": 2}, {"last_layers": 2, "lm_head": True}, {"lm_head": True, "norms": True},
    {"last_layers": 1, "lm_head": True, "untie_lm_head": True}, {"last_layers": 1, "norms": True},
]  # fmt: skip


def recipe(name: str, **more: Any) -> Recipe:
    values = {"name": "r", "model": {"model_name_or_path": name}, "data": {"dataset_name": "x"}, "sft": {}, **more}
    return Recipe.model_validate(values)


def shape(name: str) -> DecoderShape:
    return shape_from_config(SHIPPED_CONFIGS[name], name, "the table")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("smollm3-3b", 3_075_098_624),
        ("pythia-410m", 405_334_016),
        ("gemma-3-270m", 268_098_176),
        ("llama-6b", 6_083_055_616),
        ("llama-7b", 7_391_678_464),
    ],
)
def test_the_shipped_shapes_weigh_what_the_public_models_weigh(name: str, parameters: int) -> None:
    assert shape(name).parameters == parameters


def test_the_last_two_layers_and_the_head_of_smollm3_are_13_62_percent() -> None:
    summary = count_trainable(
        shape("smollm3-3b"), SftConfig.model_validate({"trainable": {"last_layers": 2, "lm_head": True}})
    )
    assert str(summary) == "418.9 M of 3,075.1 M parameters trainable (13.62%)"
    assert summary.backward_layers == 36, "a tied head sends the gradient through every layer"
    untied = {"last_layers": 2, "lm_head": True, "untie_lm_head": True}
    assert count_trainable(shape("smollm3-3b"), SftConfig.model_validate({"trainable": untied})).backward_layers == 2


FAMILIES = ["llama", "smollm3", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "mistral"]
OTHERS = ["bloom", "falcon", "gemma2", "gpt2", "granite", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2_moe"]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
@pytest.mark.parametrize("trainable", SELECTIONS, ids=str)
def test_trainable_parameters_are_counted_as_in_the_real_model(family: str, trainable: Any) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from modelwright.models.trainable import count_parameters, set_trainable

    values = {**SMALL, "head_dim": 16, "tie_word_embeddings": family != "gpt_neox"}
    if family in ("gpt_neox", "falcon"):
        values = {key: value for key, value in values.items() if key not in ("num_key_value_heads", "head_dim")}
    values |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = CONFIG_MAPPING[family](**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    settings = SftConfig.model_validate({"trainable": trainable, **({"lora_r": 4} if trainable == "lora" else {})})
    counted = count_parameters(set_trainable(model, settings))
    summary = count_trainable(shape_from_config({**values, "model_type": family}, family, "a test"), settings)
    if family in OTHERS and trainable not in ("all", "lora", {"last_layers": 2}):  # without the bias of a head
        assert summary.trained == pytest.approx(counted.trained, rel=0.06)
    else:
        assert (summary.trained, summary.total) == (counted.trained, counted.total)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [("gpt2", 124_439_808), ("opt", 125_239_296), ("phi", 1_418_270_720), ("mixtral", 46_702_792_704)],
)
def test_types_without_a_formula_are_counted_by_the_class_of_transformers(
    family: str, parameters: int, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path / family)  # its defaults are the public model
    counted = shape_of_recipe(recipe(family), tmp_path)
    assert isinstance(counted, DecoderShape) and counted.parameters == parameters
    if family == "mixtral":  # two of eight experts compute a token
        assert counted.active_matrices / counted.layer_matrices == pytest.approx(0.27, abs=0.01)


@pytest.mark.parametrize(
    ("family", "values", "parameters"),
    [
        ("llama4", {}, 107_769_861_120),  # its text and vision sizes are in configs of their own
        ("mixtral", {"attn_implementation": "flash_attention_2"}, 46_702_792_704),  # a package that is not here
        ("mixtral", {"attn_implementation": "someone/kernel"}, 46_702_792_704),  # code from a hub: never loaded
        ("gemma3", {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}, None),
        ("deepseek_v2", {"q_lora_rank": None, "hidden_size": 2048, "num_hidden_layers": 2}, None),
    ],
)  # fmt: skip
def test_a_public_config_is_counted_by_its_text_model(family: str, values: dict[str, Any], parameters: int) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    config = {**CONFIG_MAPPING[family]().to_dict(), **values, "model_type": family}
    if family in ("gemma3", "deepseek_v2"):
        config = {**values, "model_type": family}  # without the sizes that its class knows
    counted = shape_from_config(config, family, "config.json").parameters
    text = {**config, **config.get("text_config", {})}
    decoder = {key: value for key, value in text.items() if not key.endswith(("_config", "_implementation"))}
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**decoder))
    assert counted == sum(weight.numel() for weight in built.parameters())
    assert parameters is None or counted == parameters


def test_layers_of_several_kinds_are_counted_each() -> None:
    values = {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 1, "hidden_size": 256}
    jamba = shape_from_config({**values, "model_type": "jamba", "intermediate_size": 512}, "jamba", "config.json")
    assert jamba.num_hidden_layers * jamba.layer_matrices < jamba.parameters
    assert jamba.quantizable_parameters < jamba.num_hidden_layers * jamba.layer_matrices, "experts are not quantized"
    lora = SftConfig.model_validate({"trainable": "lora", "lora_target_modules": ["q_proj", "v_proj"]})
    assert count_trainable(jamba, lora).trained == 2 * 16 * (256 + 256 + 256 + 64)  # two layers have attention


@pytest.mark.parametrize(
    ("family", "targets"),
    [("mixtral", "all-linear"), ("mixtral", ["gate_up_proj", "down_proj"]), ("mixtral", ["experts.down_proj"]),
     ("llama", ["self_attn.q_proj", "lm_head"]), ("llama", ".*q_proj"), ("gpt2", ["c_attn"])],
)  # fmt: skip
def test_lora_of_any_names_is_counted_as_it_is_added(family: str, targets: Any) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from modelwright.models.trainable import count_parameters, set_trainable

    values = {**SMALL, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**values))
    lora = SftConfig.model_validate({"trainable": "lora", "lora_target_modules": targets, "lora_r": 4})
    summary = count_trainable(shape_from_config({**values, "model_type": family}, family, "a test"), lora)
    assert summary.trained == count_parameters(set_trainable(model, lora)).trained


def test_a_name_that_no_layer_has_is_refused() -> None:
    lora = SftConfig.model_validate({"trainable": "lora", "lora_target_modules": ["q_proj", "nosuch"]})
    with pytest.raises(ModelError, match="lora_target_modules names nosuch, which no layer is called"):
        count_trainable(shape_from_config({**SMALL, "model_type": "llama"}, "it", "config.json"), lora)


def test_a_type_that_transformers_does_not_know_is_counted_as_a_llama_and_this_is_said() -> None:
    counted = shape_from_config({**SMALL, "model_type": "llamaesque"}, "it", "config.json")
    assert counted.source == "config.json, counted as a Llama"
    assert counted.parameters == shape_from_config({**SMALL, "model_type": "llama"}, "it", "config.json").parameters


def test_dora_learns_a_length_for_each_output_too() -> None:
    plain, dora = (
        count_trainable(shape("smollm3-3b"), SftConfig.model_validate({"trainable": "lora", "use_dora": use_dora}))
        for use_dora in (False, True)
    )
    outputs = sum(size for _, size in shape("smollm3-3b").linears.values())
    assert dora.trained - plain.trained == 36 * outputs


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match="last_layers is 40, but the model has 36 layers"):
        count_trainable(shape("smollm3-3b"), SftConfig.model_validate({"trainable": {"last_layers": 40}}))


def test_a_folder_with_a_config_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    result = shape_of_recipe(recipe("mine"), tmp_path)
    assert isinstance(result, DecoderShape)
    assert (result.num_hidden_layers, result.vocab_size) == (3, 128)
    assert result.source.endswith("config.json")


def test_a_hub_model_in_the_cache_is_read_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM3-3B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**SMALL, "model_type": "smollm3"}))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert shape_of_recipe(recipe("HuggingFaceTB/SmolLM3-3B"), tmp_path).num_hidden_layers == 3  # type: ignore[union-attr]


def test_a_shape_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "shipped with modelwright" in shape_of_recipe(recipe("EleutherAI/pythia-410m"), tmp_path).source
    assert "shipped with modelwright" in shape_of_recipe(recipe("google/gemma-270m"), tmp_path).source


def test_an_unknown_model_is_answered_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json of 'some/thing'.*config\.json alone is enough"):
        shape_of_recipe(recipe("some/thing"), tmp_path)


def test_a_config_of_something_else_names_what_it_lacks() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 9}
    with pytest.raises(ModelError, match="layers of several sizes"):
        shape_from_config({**sizes, "intermediate_size": [16, 32]}, "gemma3n", "config.json")
    with pytest.raises(ModelError, match="has no 'num_attention_heads'"):
        shape_from_config({"model_type": "llama", "hidden_size": 64}, "x", "x/config.json")


@pytest.mark.parametrize("width", [16, 64])
def test_a_resnet_is_counted_as_it_is_built(width: int) -> None:
    from modelwright.models.vision import resnet18

    built = sum(weight.numel() for weight in resnet18(10, width, 3).parameters())
    assert ResNetShape("resnet18", "test", width=width).parameters == built
    assert ResNetShape("resnet18", "test").multiplications == pytest.approx(555.4e6, rel=0.01)


def test_a_tokenizer_that_the_recipe_trains_says_how_many_tokens_there_are() -> None:
    loaded = load("llama-tiny", ())
    result = shape_of_recipe(loaded.recipe, loaded.path.parent)
    assert isinstance(result, DecoderShape) and result.vocab_size == 1536
    assert result.source == "the recipe's architecture"
