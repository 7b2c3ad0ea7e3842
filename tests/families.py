"""Tiny models of several families, with weights large enough for a leak between documents to show."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

FAMILIES = ("llama", "gpt_neox", "gemma3_text", "smollm3")
BACKENDS = ("sdpa", "eager")
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "max_position_embeddings": 128}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt_neox": {"num_hidden_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma3_text": {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "smollm3": {"num_hidden_layers": 4, "num_key_value_heads": 2, "no_rope_layer_interval": 2, "pad_token_id": 0},
}  # gemma's sixth layer sees everything, the others eight tokens; every second layer of smollm3 has no positions


@cache
def family(name: str, backend: str = "sdpa") -> Any:
    """A tiny model of a family with random weights large enough for a leak to show."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **SIZES, **MORE[name], initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config, attn_implementation=backend).eval()
