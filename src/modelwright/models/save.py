"""Write model folders atomically: trained weights, an initialized Llama, a merged LoRA adapter; write .pth files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from modelwright.errors import ModelError, StorageError, UsageError, is_storage_failure
from modelwright.models.pretrained import load_model, load_tokenizer, silence_transformers
from modelwright.models.trainable import LORA_PREFIX, merge_lora
from modelwright.recipe.sections import LlamaArchitecture, round_up
from modelwright.runs.folder import fsync_path


def save_model(model: Any, tokenizer: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a language model as a folder that from_pretrained reads; `weights` are full tensors."""
    with atomic_model_folder(folder) as partial:
        model.save_pretrained(partial, state_dict=dict(weights))  # it removes tied weights from it
        tokenizer.save_pretrained(partial)


def merge_adapter(adapter: Path, folder: Path) -> None:
    """Merge a LoRA adapter into its base model and write a folder that needs no peft."""
    if not (adapter / "adapter_config.json").exists():
        raise UsageError(f"{adapter} is no adapter folder (no adapter_config.json); there is nothing to merge")
    merged = merge_lora(load_model(adapter))
    save_model(merged, load_tokenizer(adapter), dict(merged.state_dict()), folder)


def cast_weights(folder: Path, dtype: str) -> None:
    """Rewrite the floating-point weights of a model folder in a dtype, such as bfloat16, and name it in its config."""
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        weights = {
            name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(weights, path, metadata)
    config = folder / "config.json"
    if config.exists():
        settings = {key: value for key, value in json.loads(config.read_text("utf-8")).items() if key != "torch_dtype"}
        config.write_text(json.dumps({**settings, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def check_weight_files(folder: Path, weights: Mapping[str, Tensor]) -> bool:
    """Compare the weights on disk bit for bit with those in memory; False if the files use other names for them."""
    files: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    saved = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no dict)
    if not saved.keys() <= weights.keys():
        return False
    for name in weights.keys() - saved.keys():  # a tied weight is saved once
        if not any(torch.equal(weights[name], weights[other]) for other in saved):
            return False
    for name in saved:
        _check_equal(folder, name, saved[name].get_tensor(name), weights[name])
    return True


def load_and_check(folder: Path, weights: Mapping[str, Tensor], quantization: str, device: torch.device) -> Any:
    """Load a saved model and compare its weights bit for bit with those in memory, of a quantized one LoRA's."""
    try:
        model = load_model(folder, "auto", quantization, device)
    except torch.OutOfMemoryError:  # of the trained model and this one
        if quantization != "none":
            raise
        model = load_model(folder)
    loaded = model.state_dict()
    if quantization == "none" and (missing := sorted(weights.keys() ^ loaded.keys())):
        raise ModelError(f"{folder}: the saved model differs from the one in memory: {missing[0]} is in only one")
    for name, tensor in weights.items():
        if quantization == "none" or LORA_PREFIX in name:
            _check_equal(folder, name, loaded[name], tensor)
    for name, parameter in model.named_parameters() if quantization == "none" else ():
        parameter.data = parameter.data.to(weights[name].dtype)  # as in training: bf16 where it computed so
    return model


def _check_equal(folder: Path, name: str, saved: Tensor, trained: Tensor) -> None:
    if saved.shape != trained.shape or not torch.equal(saved.to(trained.device, trained.dtype), trained):
        raise ModelError(f"{folder}: the saved model is not the one that was trained: {name} differs; please report it")


@contextmanager
def atomic_model_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is synced and renamed to `folder` at the end."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            # safetensors writes with mode 0600, which other users of a shared volume cannot read
            path.chmod(0o755 if path.is_dir() else 0o644)
            fsync_path(path)
        fsync_path(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        fsync_path(folder.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_storage_failure(error):
            message = f"{folder}: the model could not be written ({error}); the checkpoints are unharmed"
            raise StorageError(message) from None
        raise


def save_pth(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a .pth file, load it with weights_only=True and compare its tensors."""
    torch.save(dict(contents), path)
    loaded = torch.load(path, weights_only=True, map_location="cpu")
    for name, value in contents.items():
        if isinstance(value, Tensor):
            _check_equal(path, name, loaded[name], value)


TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""Linears that write to the residual stream; a smaller initial std keeps its variance the same at any depth."""


def llama_config(architecture: LlamaArchitecture, tokenizer: Any) -> Any:
    """The transformers config of an architecture and a tokenizer."""
    from transformers import LlamaConfig

    needed = max(tokenizer.get_vocab().values()) + 1
    vocab_size = architecture.vocab_size or round_up(needed)
    if vocab_size < needed:
        raise ModelError(f"model: architecture.vocab_size is {vocab_size}, but the tokenizer has {needed} tokens")
    if tokenizer.eos_token_id is None:
        raise ModelError("model: the tokenizer has no end token (eos_token), which must end each document")
    resolved = {"vocab_size", "intermediate_size", "num_key_value_heads", "rope_theta"}
    return LlamaConfig(
        **architecture.model_dump(exclude=resolved),
        vocab_size=vocab_size,
        intermediate_size=architecture.ffn_size,
        num_key_value_heads=architecture.kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def init_llama(config: Any, seed: int) -> Any:
    """A Llama in fp32 whose weights are drawn here in order, so that they do not depend on library versions."""
    from transformers import LlamaForCausalLM
    from transformers.initialization import no_init_weights

    silence_transformers()
    with no_init_weights():  # skip the initialization of transformers
        model = LlamaForCausalLM(config)
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                std = residual_std if name.endswith(RESIDUAL_OUTPUTS) else config.initializer_range
                weight.normal_(0.0, std, generator=generator)
            else:
                weight.fill_(1.0)
    return model


def write_initial_model(architecture: LlamaArchitecture, tokenizer_folder: Path, seed: int, folder: Path) -> int:
    """Write an initialized model with its tokenizer as a model folder; returns the parameter count."""
    tokenizer = load_tokenizer(tokenizer_folder)
    model = init_llama(llama_config(architecture, tokenizer), seed)
    with atomic_model_folder(folder) as partial:
        model.save_pretrained(partial)
        for pattern in TOKENIZER_FILES:  # byte for byte: shards identify their tokenizer by its hash
            for file in tokenizer_folder.glob(pattern):
                if file.name not in ("config.json", "generation_config.json", "model.safetensors.index.json"):
                    shutil.copyfile(file, partial / file.name)
    return sum(weight.numel() for weight in model.parameters())
