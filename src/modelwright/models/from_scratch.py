"""Initialize a Llama from its sizes and a seed, and write it as a model folder."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from modelwright.errors import ModelError
from modelwright.models.pretrained import load_tokenizer, silence_transformers
from modelwright.models.save import atomic_model_folder
from modelwright.recipe.sections import LlamaArchitecture, round_up

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
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.ffn_size,
        num_hidden_layers=architecture.num_hidden_layers,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.kv_heads,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        tie_word_embeddings=architecture.tie_word_embeddings,
        initializer_range=architecture.initializer_range,
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
