"""Tiny models of several families, with weights large enough for a leak between documents to show."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

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


def by_documents(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, *lengths: int, scale: float, **more: Any
) -> Tensor:
    """What FlashAttention over documents of different lengths computes, written out."""
    assert max(lengths) >= max(int(starts.diff().max()) for starts in (queries, keys)), "one is longer than was told"
    parts = []
    for (first, last), (start, stop) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        seen = torch.ones(last - first, stop - start, dtype=torch.bool).tril(stop - start - (last - first))
        q, k, v = (part.transpose(0, 1) for part in (query[first:last], key[start:stop], value[start:stop]))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)
