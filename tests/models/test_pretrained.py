"""Models are found in folders before the hub, and a broken one is reported with a clear message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.errors import ModelError
from modelwright.models.pretrained import (
    ResolvedModel,
    embedded_model,
    eos_token_ids,
    load_model,
    load_tokenizer,
    prepare_model,
    resolve_model,
)
from modelwright.models.save import save_model
from modelwright.models.trainable import set_trainable
from modelwright.plan.model_shape import shape_from_config
from modelwright.recipe.schema import ModelConfig
from modelwright.recipe.stage_specs import TrainableConfig
from tiny import tiny_model


def named(name: str) -> ModelConfig:
    return ModelConfig(model_name_or_path=name)


@pytest.fixture
def copied(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model, free to be damaged."""
    return shutil.copytree(model_folder, tmp_path / "copied")


def set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def test_a_folder_is_found_by_its_path_and_next_to_the_recipe(copied: Path) -> None:
    assert resolve_model(named(str(copied)), Path("/nowhere")).path == copied
    assert resolve_model(named("copied"), copied.parent).path == copied


def test_a_folder_comes_before_the_hub(copied: Path) -> None:
    copied.rename(copied.parent / "name")
    (copied.parent / "owner").mkdir()
    (copied.parent / "name").rename(copied.parent / "owner" / "name")
    resolved = resolve_model(named("owner/name"), copied.parent)
    assert (resolved.path, resolved.revision) == (copied.parent / "owner" / "name", None)


def test_a_folder_without_config_is_reported(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    with pytest.raises(ModelError, match=r"half has no config.json; it wants a folder that from_pretrained reads"):
        resolve_model(named("half"), tmp_path)


def test_a_miss_is_answered_with_the_nearest_names(copied: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(named("copeid"), copied.parent)
    assert str(caught.value) == "model: there is no folder or embedded model 'copeid' (did you mean copied?)"
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m-instruct\?"):
        resolve_model(named("smollm2-135M-instruct"), copied.parent)


def test_a_miss_on_the_hub_is_one_message_with_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(named("nobody/nothing-of-that-name"), tmp_path)
    message = str(caught.value)
    assert message.startswith(
        "model: there is no folder or embedded model 'nobody/nothing-of-that-name', and the hub did"
    )
    assert message.endswith("check the name, the network, and HF_TOKEN for a gated model")
    assert "\n" not in message


def test_the_fingerprint_shows_one_changed_weight_setting_or_token(copied: Path) -> None:
    prints = [ResolvedModel("copied", copied).fingerprint()]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        data = bytearray((copied / name).read_bytes())
        data[-2] ^= 1
        (copied / name).write_bytes(data)
        prints.append(ResolvedModel("copied", copied).fingerprint())
    assert len(set(prints)) == 4


def test_weights_are_loaded_as_fp32_whatever_they_were_saved_as(model_folder: Path, tmp_path: Path) -> None:
    load_model(model_folder).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert {weight.dtype for weight in load_model(tmp_path / "half").parameters()} == {torch.float32}


def test_truncated_weights_are_reported(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"copied could not be loaded \(.*incomplete metadata"):
        load_model(copied)


def test_missing_weights_are_reported_and_never_initialised(copied: Path) -> None:
    set_config(copied, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"lacks 9 weights that its config.json asks for, such as model.layers.2."):
        load_model(copied)


def test_an_unknown_family_is_reported(copied: Path) -> None:
    set_config(copied, model_type="nonesuch")
    with pytest.raises(ModelError, match=r"could not be loaded .*nonesuch"):
        load_model(copied)


def test_a_broken_tokenizer_is_reported(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"the tokenizer of .*copied could not be loaded"):
        load_tokenizer(copied)


def test_every_token_that_ends_an_answer_is_known(model_folder: Path) -> None:
    model = load_model(model_folder)
    assert eos_token_ids(model) == [2]
    model.generation_config.eos_token_id = [2, 0]
    assert eos_token_ids(model) == [2, 0]
    model.generation_config.eos_token_id = None
    assert eos_token_ids(model) == []


def test_an_adapter_finds_its_base_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    base = resolve_model(named("base"), Path("elsewhere"))
    model = set_trainable(load_model(base.path), TrainableConfig(trainable="lora"))
    save_model(model, load_tokenizer(base.path), model.state_dict(), tmp_path / "adapter")
    monkeypatch.chdir("/")
    assert load_model(tmp_path / "adapter").get_base_model().config.num_hidden_layers == 2


def test_weights_that_are_a_fifo_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a regular file"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a regular file"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a regular file"):
        ResolvedModel("x", tmp_path).fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_the_embedded_model_is_accepted_with_any_number_of_threads(threads: int) -> None:
    """The rounding of its large activations is 1.7e-4 of the logits with one thread: it was refused."""
    try:
        model = load_model(embedded_model())
    except ModelError as error:
        pytest.skip(str(error))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prepare_model(model, torch.device("cpu"), "auto")
    finally:
        torch.set_num_threads(before)


ABSURD_SIZES: dict[str, object] = {
    "num_hidden_layers": -3,
    "hidden_size": 10**9,
    "num_attention_heads": 0,
    "num_key_value_heads": 3,
    "intermediate_size": "128",
    "vocab_size": True,
    "head_dim": 10**400,
    "max_position_embeddings": -7,
}


@pytest.mark.parametrize("field", ABSURD_SIZES)
def test_an_absurd_size_is_refused_by_name_before_anything_is_built(field: str, copied: Path) -> None:
    set_config(copied, **{field: ABSURD_SIZES[field]})
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelError, match=f"config.json has .*{field}"):
        load_model(copied)
    with pytest.raises(ModelError, match=f"config.json has .*{field}"):
        load_tokenizer(copied)  # transformers reads config.json with it
    with pytest.raises(ModelError, match=f"config.json has .*{field}"):
        shape_from_config(config, "tiny", "config.json")
    with pytest.raises(ModelError, match=field):
        shape_from_config({"model_type": "llava", "text_config": config}, "tiny", "config.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers 1000000000; it wants a whole number from 1 to 1,000"),
        ({"num_hidden_layers": 9}, "lacks 63 weights that its config.json asks for, such as model.layers.2."),
        ({"hidden_size": 100}, "its config.json has hidden_size 100, and no tensor of its weights has that size"),
        ({"num_key_value_heads": 4}, "the heads or layers in its config.json do not fit its weights"),
        ({"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float"),
        ({"hidden_act": "nope"}, "its config.json has hidden_act 'nope', which transformers does not have"),
        ({"rope_parameters": {"rope_type": "nope"}}, "its config.json has rope_type 'nope', which transformers"),
    ],
)
def test_sizes_that_do_not_fit_the_weights_are_named(copied: Path, values: dict[str, object], message: str) -> None:
    set_config(copied, **values)
    with pytest.raises(ModelError) as caught:
        load_model(copied)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_qk_norm", True),
        ("rope_interleaved", True),
        ("scale_emb", 12),
        ("logit_scale", 0.06),
        ("n_shared_experts", 2),
    ],
)
def test_a_key_of_a_config_that_would_change_the_model_and_is_not_read_is_refused(
    copied: Path, key: str, value: object
) -> None:
    set_config(copied, **{key: value})
    with pytest.raises(ModelError, match=f"config.json has {key} {value}, which transformers does not read for llama"):
        load_model(copied)


def test_keys_of_a_config_that_are_read_or_change_nothing_are_accepted(copied: Path) -> None:
    set_config(copied, is_llama_config=True, rope_interleaved=False, n_ctx=256, temperature=0.7, rope_theta=10000.0,
               logit_scale=1.0, attention_softmax_in_fp32=True, _sliding_window_pattern=6, unsloth_fixed=True,
               torch_dtype="bfloat16", task_specific_params={"a": 1}, quantization_config=None)  # fmt: skip
    load_model(copied)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "missing.safetensors", "", "a\0b", 7])
def test_an_index_names_only_files_of_its_folder(copied: Path, name: object) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="it wants safetensors files of its own folder"):
        load_model(copied)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": 5}])
def test_an_index_without_weights_is_refused(copied: Path, index: dict[str, object]) -> None:
    (copied / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="has no weight_map; it wants the file of each weight"):
        load_model(copied)


@pytest.mark.parametrize("rank", [0, -1, 10**9, "8", None])
def test_an_absurd_rank_of_an_adapter_is_refused(tmp_path: Path, rank: object) -> None:
    model = set_trainable(load_model(tiny_model(tmp_path / "base")), TrainableConfig(trainable="lora"))
    save_model(model, load_tokenizer(tmp_path / "base"), model.state_dict(), tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "r": rank}), encoding="utf-8")
    with pytest.raises(ModelError, match="it wants a rank from 1 to"):
        load_model(tmp_path / "adapter")


def test_weights_are_read_straight_to_the_device(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    sound, device_maps = AutoModelForCausalLM.from_pretrained, []

    def from_pretrained(*args: Any, device_map: Any = None, **kwargs: Any) -> Any:
        device_maps.append(device_map)
        return sound(*args, **kwargs, device_map=device_map and {"": torch.device("cpu")})

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    gpu = torch.device("cuda", 0)
    weights = [load_model(model_folder, device=device).state_dict() for device in (torch.device("cpu"), gpu)]
    assert device_maps == [None, {"": gpu}]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_device_without_room_is_no_broken_model(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(model_folder)


def test_loading_a_model_imports_neither_scipy_nor_the_list_of_models_twice(model_folder: Path, tmp_path: Path) -> None:
    for name in ("scipy", "sklearn"):  # packages that transformers would import
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError(__name__)\n", encoding="utf-8")
        (tmp_path / f"{name}-9.0.dist-info").mkdir()
        (tmp_path / f"{name}-9.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 9.0\n", encoding="utf-8")
    program = f"""
from pathlib import Path
from modelwright.models.pretrained import load_model, load_tokenizer
load_tokenizer(Path({str(model_folder)!r}))
load_model(Path({str(model_folder)!r}))
from transformers.utils import import_utils, is_scipy_available
folders = [path for path in (Path(import_utils.__file__).parents[1] / "models").rglob("*") if path.is_dir()]
print(import_utils.create_import_structure_from_path.cache_info().misses <= len(folders) + 1, is_scipy_available())
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "True True\n", done.stderr
