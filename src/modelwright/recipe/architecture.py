"""A model made from nothing: the sizes of a Llama, and how many parameters they come to."""

from __future__ import annotations

from typing import Self

from pydantic import PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from modelwright.recipe.values import Frozen

TILE = 64
"""Sizes that are chosen for a person are multiples of this, which fit a GPU's tiles."""


def padded(size: float) -> int:
    """The next multiple of 64."""
    return int(-(-size // TILE) * TILE)


class Architecture(Frozen):
    """The sizes of a Llama that is made from scratch; names are those of Hugging Face's LlamaConfig."""

    num_hidden_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the stream between the layers."""
    num_attention_heads: PositiveInt
    """Heads of attention in a layer."""
    num_key_value_heads: PositiveInt | None = None
    """Heads of keys and values, shared by groups of the others; without it, one for each."""
    intermediate_size: PositiveInt | None = None
    """Width inside a layer's feed-forward part; without it, 8/3 of hidden_size, rounded up to a multiple of 64."""
    vocab_size: PositiveInt | None = None
    """Tokens in the vocabulary, padding included; without it, the tokenizer's, rounded up to a multiple of 64."""
    max_position_embeddings: PositiveInt = 4096
    """Longest context."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions."""
    tie_word_embeddings: bool = False
    """Whether the head shares its weights with the embeddings."""
    initializer_range: PositiveFloat = 0.02
    """Spread of the first weights; where they write into the stream, divided by the root of twice the layers."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            sizes = {"hidden": self.hidden_size, "heads": self.num_attention_heads}
            found = "has hidden_size {hidden}, which num_attention_heads {heads} do not divide"
            raise PydanticCustomError("heads", found, sizes)
        if self.num_attention_heads % self.key_value_heads:
            sizes = {"heads": self.num_attention_heads, "kv": self.key_value_heads}
            found = "has num_attention_heads {heads}, which num_key_value_heads {kv} do not divide"
            raise PydanticCustomError("kv_heads", found, sizes)
        return self

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def feed_forward(self) -> int:
        """Width inside a layer's feed-forward part."""
        return self.intermediate_size or padded(self.hidden_size * 8 / 3)

    def parameters(self, vocab_size: int) -> int:
        """Weights in all, by arithmetic alone."""
        narrow = self.hidden_size * self.key_value_heads // self.num_attention_heads
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * narrow
        layer = attention + 3 * self.hidden_size * self.feed_forward + 2 * self.hidden_size
        words = vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + self.hidden_size + words
