"""The shape of a model from its config.json alone: what it weighs, and how much of it moves. No torch, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelwright.errors import ModelError
from modelwright.recipe.training import Parts


@dataclass(frozen=True)
class Family:
    """What the models of one type have in common that their config does not say."""

    gated: bool = True
    """Whether the inner layer has a gate beside it: three matrices, not two."""
    norms: int = 2
    """Norms in a layer."""
    centred: bool = False
    """Whether a norm has a bias too."""
    head_norms: bool = False
    """Whether queries and keys are normed, each by one vector."""
    fused_query: bool = False
    """Whether queries, keys and values come out of one matrix."""
    wide_norms: bool = False
    """Whether norms are computed and kept in fp32, whatever the weights are."""
    biases: tuple[str, ...] = ()
    """Matrices that always have a bias."""
    tied: bool = False
    """Whether the head shares the embeddings where the config is silent."""
    plain_gate: bool = False
    """Whether its inner layer is down(silu(gate) · up) and nothing more, as `models.low_rank` knows it."""


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
FAMILIES = {
    "llama": Family(plain_gate=True),
    "mistral": Family(plain_gate=True),
    "smollm3": Family(tied=True, plain_gate=True),
    "qwen2": Family(biases=ATTENTION[:3], plain_gate=True),
    "qwen3": Family(head_norms=True, plain_gate=True),
    "gemma3_text": Family(norms=4, head_norms=True, wide_norms=True, tied=True),
    "gpt_neox": Family(gated=False, centred=True, fused_query=True, biases=NEOX),
}
"""Model types whose arithmetic is known exactly; others are counted as a Llama would be, and that is said."""
GATED = ("gate_proj", "up_proj", "down_proj")
SHORT_RANKS = (16, 32, 64, 128)
"""Ranks whose products with gate and up are added as the gate is read."""


@dataclass(frozen=True)
class TextShape:
    """A decoder: so many equal layers between embeddings and a head."""

    name: str
    """What the model is called."""
    source: str
    """Where the shape was read."""
    family: str
    """Its model_type."""
    layers: int
    """Decoder layers."""
    width: int
    """Numbers that stand for a token."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_width: int
    """Numbers in a head."""
    inner: int
    """Width inside the feed-forward part."""
    words: int
    """Tokens in the vocabulary."""
    tied: bool
    """Whether the head is the embeddings."""
    longest: int = 0
    """Positions it was made for."""
    attention_bias: bool = False
    """Whether the attention's matrices have biases by the config."""
    mlp_bias: bool = False
    """Whether the feed-forward's matrices have biases by the config."""
    activation: str = "silu"
    """What opens the gate, by the config."""

    @property
    def traits(self) -> Family:
        """What its type implies."""
        return FAMILIES.get(self.family, FAMILIES["llama"])

    @property
    def exact(self) -> bool:
        """Whether its type is one we know; else it is counted as a Llama."""
        return self.family in FAMILIES

    @property
    def query_width(self) -> int:
        """All query heads together."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """All key heads together."""
        return self.kv_heads * self.head_width

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer by name: inputs and outputs."""
        if self.traits.fused_query:
            fused = (self.width, self.query_width + 2 * self.kv_width)
            sizes = (fused, (self.query_width, self.width), (self.width, self.inner), (self.inner, self.width))
            return dict(zip(NEOX, sizes, strict=True))
        found = {
            "q_proj": (self.width, self.query_width),
            "k_proj": (self.width, self.kv_width),
            "v_proj": (self.width, self.kv_width),
            "o_proj": (self.query_width, self.width),
            "up_proj": (self.width, self.inner),
            "down_proj": (self.inner, self.width),
        }
        return {**found, "gate_proj": (self.width, self.inner)} if self.traits.gated else found

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of a layer: what every token is multiplied with."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def norm_vector(self) -> int:
        """Numbers in one norm."""
        return self.width * (2 if self.traits.centred else 1)

    @property
    def layer_norms(self) -> int:
        """Numbers in the norms of a layer."""
        return self.traits.norms * self.norm_vector + (2 * self.head_width if self.traits.head_norms else 0)

    @property
    def layer_parameters(self) -> int:
        """Numbers in a layer."""
        biased = set(self.traits.biases)
        biased |= set(ATTENTION) if self.attention_bias else set()
        biased |= {"up_proj", "down_proj", "gate_proj"} if self.mlp_bias else set()
        return (
            self.layer_matrices
            + self.layer_norms
            + sum(outputs for name, (_, outputs) in self.linears.items() if name in biased)
        )

    @property
    def embedding(self) -> int:
        """Numbers in the embeddings, and in the head."""
        return self.words * self.width

    @property
    def parameters(self) -> int:
        """Numbers in all; a head that is the embeddings counts once."""
        return self.layers * self.layer_parameters + self.embedding * (1 if self.tied else 2) + self.norm_vector


@dataclass(frozen=True)
class Movement:
    """Which of a shape's weights move, and how far the gradient has to travel for it."""

    trained: int
    """Parameters that move."""
    total: int
    """Parameters in all, with what was added."""
    trained_layers: int
    """Layers whose matrices move."""
    crossed_layers: int
    """Layers the gradient passes, counted from the head."""
    head: bool
    """Whether the head's matrix moves."""
    embeddings: bool
    """Whether the embeddings move."""
    tied: bool
    """Whether head and embeddings are one matrix."""
    low_rank: int = 0
    """Numbers in low-rank matrices beside frozen ones."""
    short: bool = False
    """Whether a GPU may add the low-rank products of gate and up as it reads the gate."""

    def __str__(self) -> str:
        millions = f"{self.trained / 1e6:,.1f} M of {self.total / 1e6:,.1f} M"
        return f"{millions} parameters move ({self.trained / self.total:.2%})"


def movement(shape: TextShape, parts: Parts) -> Movement:
    """Count what moves; the counterpart of `models.trainable`, without a model."""
    wish = parts.trainable
    tied = shape.tied and not wish.untie_head
    total = shape.parameters + (shape.embedding if shape.tied and not tied else 0)
    if wish.lora:
        added, short = _low_rank(shape, parts), _is_short(shape, parts)
        return Movement(added, total + added, 0, shape.layers, False, False, tied, added, short)
    if not wish.partial:
        return Movement(total, total, shape.layers, shape.layers, True, True, tied)
    last = wish.last_layers or 0
    if last > shape.layers:
        raise ModelError(f"model: trainable.last_layers is {last}, but the model has {shape.layers} layers")
    norms = (shape.layers - last) * shape.layer_norms + shape.norm_vector if wish.norms else 0
    trained = last * shape.layer_parameters + (shape.embedding if wish.head else 0) + norms
    through_all = wish.norms or (wish.head and tied)
    return Movement(trained, total, last, shape.layers if through_all else last, wish.head, wish.head and tied, tied)


def _low_rank(shape: TextShape, parts: Parts) -> int:
    """Numbers in the low-rank matrices: rank times inputs and outputs of each matrix they sit beside."""
    names = _beside(shape, parts)
    beside = [size for name, size in shape.linears.items() if name in names]
    if not beside:
        raise ModelError(f"model: lora_target_modules names none of {', '.join(shape.linears)}")
    lengths = sum(outputs for _, outputs in beside) if parts.use_dora else 0  # DoRA also learns how long each row is
    return shape.layers * (parts.lora_r * sum(map(sum, beside)) + lengths)


def _is_short(shape: TextShape, parts: Parts) -> bool:
    plain = shape.exact and shape.traits.plain_gate and shape.activation == "silu" and not shape.mlp_bias
    plain = plain and _beside(shape, parts) >= set(GATED)
    return plain and parts.lora_r in SHORT_RANKS and not parts.lora_dropout and not parts.use_dora


def _beside(shape: TextShape, parts: Parts) -> set[str]:
    """The matrices that low-rank ones sit beside."""
    wanted = parts.lora_target_modules
    return set(shape.linears) if wanted == "all-linear" else {wanted} if isinstance(wanted, str) else set(wanted)


def shape_of(config: Mapping[str, Any], name: str, source: str) -> TextShape:
    """The shape that a Hugging Face config.json describes, or an architecture with the same keys."""
    told = {**config.get("text_config", {}), **{key: value for key, value in config.items() if key != "text_config"}}
    if "text_config" in config:
        told.update(config["text_config"])
    family = str(told.get("model_type", "llama"))
    try:
        width, heads = int(told["hidden_size"]), int(told["num_attention_heads"])
        traits = FAMILIES.get(family, FAMILIES["llama"])
        return TextShape(
            name=name,
            source=source,
            family=family,
            layers=int(told["num_hidden_layers"]),
            width=width,
            heads=heads,
            kv_heads=heads if traits.fused_query else int(told.get("num_key_value_heads") or heads),
            head_width=int(told.get("head_dim") or width // heads),
            inner=int(told["intermediate_size"]),
            words=int(told["vocab_size"]),
            tied=bool(told.get("tie_word_embeddings", traits.tied)),
            longest=int(told.get("max_position_embeddings") or 0),
            attention_bias=bool(told.get("attention_bias")) and not traits.fused_query,
            mlp_bias=bool(told.get("mlp_bias")),
            activation=str(told.get("hidden_act") or "silu"),
        )
    except KeyError as missing:
        raise ModelError(f"model: {source} says nothing of {missing}; it wants a decoder's config.json") from None
    except TypeError:  # a list, a size for each layer
        raise ModelError(f"model: {source} tells of layers of several sizes, which are not counted") from None


OWN_NORMS = 0.6
"""Of what passes through memory around a batch norm, the share that does so by the kernels of a GPU."""


@dataclass(frozen=True)
class VisionShape:
    """ResNet-18 for small images."""

    name: str
    """What the model is called."""
    source: str
    """Where the shape comes from."""
    width: int = 64
    """Channels of its first layers."""
    channels: int = 3
    """Channels of an image."""
    classes: int = 10
    """Answers it may give."""
    side: int = 32
    """Pixels along an image's side."""

    @property
    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Every convolution: channels in and out, window, and pixels along the side of what comes out."""
        found = [(self.channels, self.width, 3, self.side)]
        before, side = self.width, self.side
        for factor in (1, 2, 4, 8):
            after = self.width * factor
            side = side if factor == 1 else -(-side // 2)
            found += [(before, after, 3, side), (after, after, 3, side)]
            found += [(before, after, 1, side)] if factor > 1 else []
            found += [(after, after, 3, side), (after, after, 3, side)]
            before = after
        return found

    @property
    def parameters(self) -> int:
        """Weights, and two numbers per channel for each batch norm."""
        weights = sum(inputs * outputs * window**2 + 2 * outputs for inputs, outputs, window, _ in self.convolutions)
        return weights + 8 * self.width * self.classes + self.classes

    @property
    def multiplications(self) -> int:
        """Multiplications for one image forward."""
        return sum(i * o * window**2 * side**2 for i, o, window, side in self.convolutions) + 80 * self.width

    def passed(self, on_gpu: bool) -> float:
        """Numbers that come out of all convolutions for one image; those of a GPU's own norms pass memory less often.

        Of 512 images, on an H200, the norms took 4.4 ms of a step before they had kernels of their own, then 2.5.
        """
        return sum(o * side**2 * (OWN_NORMS if on_gpu and o % 64 == 0 else 1.0) for _, o, _, side in self.convolutions)

    def kept(self, on_gpu: bool) -> int:
        """Numbers kept for the backward pass of one image: what goes into each batch norm, and what comes out.

        What comes out of the norm past a block is added to and forgotten, but for the kernels of a GPU.
        """
        return sum(
            o * side**2 * (2 if window > 1 or (on_gpu and o % 64 == 0) else 1)
            for _, o, window, side in self.convolutions
        )


Shape = TextShape | VisionShape
