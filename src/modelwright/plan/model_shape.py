"""Sizes, parameter counts and trainable counts of a model from its config.json alone, without torch and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import ModelError
from modelwright.recipe.schema import Recipe, TrainableConfig
from modelwright.recipe.sections import LlamaArchitecture
from modelwright.runs.caches import cache_dir, hf_hub_cache


@dataclass(frozen=True)
class ModelFamily:
    """What the models of one type have in common that their config does not say."""

    gated_mlp: bool = True
    """Whether the inner layer has a gate beside it: three matrices, not two."""
    norms_per_layer: int = 2
    """Norms in a layer."""
    layer_norm_bias: bool = False
    """Whether a norm has a bias too."""
    qk_norm: bool = False
    """Whether queries and keys are normed, each by one vector."""
    fused_qkv: bool = False
    """Whether queries, keys and values come out of one matrix."""
    fp32_norms: bool = False
    """Whether norms are computed and kept in fp32, whatever the weights are."""
    biases: tuple[str, ...] = ()
    """Matrices that always have a bias."""
    tie_word_embeddings: bool = False
    """Whether the head shares the embeddings where the config is silent."""
    silu_gated_mlp: bool = False
    """Whether its inner layer is down(silu(gate) · up) and nothing more, as `models.low_rank` knows it."""


ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
NEOX_LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
MODEL_FAMILIES = {
    "llama": ModelFamily(silu_gated_mlp=True),
    "mistral": ModelFamily(silu_gated_mlp=True),
    "smollm3": ModelFamily(tie_word_embeddings=True, silu_gated_mlp=True),
    "qwen2": ModelFamily(biases=ATTENTION_LINEARS[:3], silu_gated_mlp=True),
    "qwen3": ModelFamily(qk_norm=True, silu_gated_mlp=True),
    "gemma3_text": ModelFamily(norms_per_layer=4, qk_norm=True, fp32_norms=True, tie_word_embeddings=True),
    "gpt_neox": ModelFamily(gated_mlp=False, layer_norm_bias=True, fused_qkv=True, biases=NEOX_LINEARS),
}
"""Model types whose arithmetic is known exactly; others are counted as a Llama would be, and that is said."""
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
FUSED_LORA_RANKS = (16, 32, 64, 128)
"""Ranks whose products with gate and up are added as the gate is read."""


@dataclass(frozen=True)
class DecoderShape:
    """A decoder: so many equal layers between embeddings and a head."""

    name: str
    """What the model is called."""
    source: str
    """Where the shape was read."""
    family: str
    """Its model_type."""
    num_hidden_layers: int
    """Decoder layers."""
    hidden_size: int
    """Numbers that stand for a token."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """Numbers in a head."""
    intermediate_size: int
    """Width inside the feed-forward part."""
    vocab_size: int
    """Tokens in the vocabulary."""
    tie_word_embeddings: bool
    """Whether the head is the embeddings."""
    max_position_embeddings: int = 0
    """Positions it was made for."""
    attention_bias: bool = False
    """Whether the attention's matrices have biases by the config."""
    mlp_bias: bool = False
    """Whether the feed-forward's matrices have biases by the config."""
    hidden_act: str = "silu"
    """What opens the gate, by the config."""

    @property
    def traits(self) -> ModelFamily:
        """What its type implies."""
        return MODEL_FAMILIES.get(self.family, MODEL_FAMILIES["llama"])

    @property
    def exact(self) -> bool:
        """Whether its type is one we know; else it is counted as a Llama."""
        return self.family in MODEL_FAMILIES

    @property
    def query_width(self) -> int:
        """All query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """All key heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer by name: inputs and outputs."""
        if self.traits.fused_qkv:
            fused = (self.hidden_size, self.query_width + 2 * self.kv_width)
            sizes = (
                fused,
                (self.query_width, self.hidden_size),
                (self.hidden_size, self.intermediate_size),
                (self.intermediate_size, self.hidden_size),
            )
            return dict(zip(NEOX_LINEARS, sizes, strict=True))
        linears = {
            "q_proj": (self.hidden_size, self.query_width),
            "k_proj": (self.hidden_size, self.kv_width),
            "v_proj": (self.hidden_size, self.kv_width),
            "o_proj": (self.query_width, self.hidden_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
        }
        return (
            {**linears, "gate_proj": (self.hidden_size, self.intermediate_size)} if self.traits.gated_mlp else linears
        )

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of a layer: what every token is multiplied with."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def norm_vector(self) -> int:
        """Numbers in one norm."""
        return self.hidden_size * (2 if self.traits.layer_norm_bias else 1)

    @property
    def layer_norms(self) -> int:
        """Numbers in the norms of a layer."""
        return self.traits.norms_per_layer * self.norm_vector + (2 * self.head_dim if self.traits.qk_norm else 0)

    @property
    def layer_parameters(self) -> int:
        """Numbers in a layer."""
        biased = set(self.traits.biases)
        biased |= set(ATTENTION_LINEARS) if self.attention_bias else set()
        biased |= {"up_proj", "down_proj", "gate_proj"} if self.mlp_bias else set()
        return (
            self.layer_matrices
            + self.layer_norms
            + sum(outputs for name, (_, outputs) in self.linears.items() if name in biased)
        )

    @property
    def embedding(self) -> int:
        """Numbers in the embeddings, and in the head."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Numbers in all; a head that is the embeddings counts once."""
        return (
            self.num_hidden_layers * self.layer_parameters
            + self.embedding * (1 if self.tie_word_embeddings else 2)
            + self.norm_vector
        )


@dataclass(frozen=True)
class TrainableSummary:
    """Which of a shape's weights move, and how far the gradient has to travel for it."""

    trained: int
    """Parameters that move."""
    total: int
    """Parameters in all, with what was added."""
    trained_layers: int
    """Layers whose matrices move."""
    backward_layers: int
    """Layers the gradient passes, counted from the head."""
    lm_head: bool
    """Whether the head's matrix moves."""
    embeddings: bool
    """Whether the embeddings move."""
    tie_word_embeddings: bool
    """Whether head and embeddings are one matrix."""
    lora_parameters: int = 0
    """Numbers in low-rank matrices beside frozen ones."""
    fused_lora_mlp: bool = False
    """Whether a GPU may add the low-rank products of gate and up as it reads the gate."""

    def __str__(self) -> str:
        millions = f"{self.trained / 1e6:,.1f} M of {self.total / 1e6:,.1f} M"
        return f"{millions} parameters trainable ({self.trained / self.total:.2%})"


def count_trainable(shape: DecoderShape, parts: TrainableConfig) -> TrainableSummary:
    """Count what moves; the counterpart of `models.trainable`, without a model."""
    trainable = parts.trainable
    tied = shape.tie_word_embeddings and not trainable.untie_lm_head
    total = shape.parameters + (shape.embedding if shape.tie_word_embeddings and not tied else 0)
    if trainable.lora:
        added, fused = _lora_parameters(shape, parts), _can_fuse_lora_mlp(shape, parts)
        return TrainableSummary(added, total + added, 0, shape.num_hidden_layers, False, False, tied, added, fused)
    if not trainable.is_partial:
        return TrainableSummary(total, total, shape.num_hidden_layers, shape.num_hidden_layers, True, True, tied)
    last_layers = trainable.last_layers or 0
    if last_layers > shape.num_hidden_layers:
        raise ModelError(
            f"model: trainable.last_layers is {last_layers}, but the model has {shape.num_hidden_layers} layers"
        )
    norms = (shape.num_hidden_layers - last_layers) * shape.layer_norms + shape.norm_vector if trainable.norms else 0
    trained = last_layers * shape.layer_parameters + (shape.embedding if trainable.lm_head else 0) + norms
    through_all = trainable.norms or (trainable.lm_head and tied)
    return TrainableSummary(
        trained,
        total,
        last_layers,
        shape.num_hidden_layers if through_all else last_layers,
        trainable.lm_head,
        trainable.lm_head and tied,
        tied,
    )


def _lora_parameters(shape: DecoderShape, parts: TrainableConfig) -> int:
    """Numbers in the low-rank matrices: rank times inputs and outputs of each matrix they sit beside."""
    targets = _lora_targets(shape, parts)
    target_sizes = [size for name, size in shape.linears.items() if name in targets]
    if not target_sizes:
        raise ModelError(f"model: lora_target_modules names none of {', '.join(shape.linears)}")
    magnitudes = (
        sum(outputs for _, outputs in target_sizes) if parts.use_dora else 0
    )  # DoRA also learns how long each row is
    return shape.num_hidden_layers * (parts.lora_r * sum(map(sum, target_sizes)) + magnitudes)


def _can_fuse_lora_mlp(shape: DecoderShape, parts: TrainableConfig) -> bool:
    fusable = shape.exact and shape.traits.silu_gated_mlp and shape.hidden_act == "silu" and not shape.mlp_bias
    fusable = fusable and _lora_targets(shape, parts) >= set(MLP_LINEARS)
    return fusable and parts.lora_r in FUSED_LORA_RANKS and not parts.lora_dropout and not parts.use_dora


def _lora_targets(shape: DecoderShape, parts: TrainableConfig) -> set[str]:
    """The matrices that low-rank ones sit beside."""
    target_modules = parts.lora_target_modules
    return (
        set(shape.linears)
        if target_modules == "all-linear"
        else {target_modules}
        if isinstance(target_modules, str)
        else set(target_modules)
    )


def shape_from_config(config: Mapping[str, Any], name: str, source: str) -> DecoderShape:
    """The shape that a Hugging Face config.json describes, or an architecture with the same keys."""
    values = {**config.get("text_config", {}), **{key: value for key, value in config.items() if key != "text_config"}}
    if "text_config" in config:
        values.update(config["text_config"])
    family = str(values.get("model_type", "llama"))
    try:
        hidden_size, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        traits = MODEL_FAMILIES.get(family, MODEL_FAMILIES["llama"])
        return DecoderShape(
            name=name,
            source=source,
            family=family,
            num_hidden_layers=int(values["num_hidden_layers"]),
            hidden_size=hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=heads if traits.fused_qkv else int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden_size // heads),
            intermediate_size=int(values["intermediate_size"]),
            vocab_size=int(values["vocab_size"]),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", traits.tie_word_embeddings)),
            max_position_embeddings=int(values.get("max_position_embeddings") or 0),
            attention_bias=bool(values.get("attention_bias")) and not traits.fused_qkv,
            mlp_bias=bool(values.get("mlp_bias")),
            hidden_act=str(values.get("hidden_act") or "silu"),
        )
    except KeyError as missing:
        raise ModelError(f"model: {source} says nothing of {missing}; it wants a decoder's config.json") from None
    except TypeError:  # a list, a size for each layer
        raise ModelError(f"model: {source} has layers of several sizes, which are not counted") from None


FUSED_NORM_TRAFFIC = 0.6
"""Of what passes through memory around a batch norm, the share that does so by the kernels of a GPU."""


@dataclass(frozen=True)
class ResNetShape:
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
    image_size: int = 32
    """Pixels along an image's side."""

    @property
    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Every convolution: channels in and out, window, and pixels along the side of what comes out."""
        convolutions = [(self.channels, self.width, 3, self.image_size)]
        before, side = self.width, self.image_size
        for factor in (1, 2, 4, 8):
            after = self.width * factor
            side = side if factor == 1 else -(-side // 2)
            convolutions += [(before, after, 3, side), (after, after, 3, side)]
            convolutions += [(before, after, 1, side)] if factor > 1 else []
            convolutions += [(after, after, 3, side), (after, after, 3, side)]
            before = after
        return convolutions

    @property
    def parameters(self) -> int:
        """Weights, and two numbers per channel for each batch norm."""
        weights = sum(inputs * outputs * window**2 + 2 * outputs for inputs, outputs, window, _ in self.convolutions)
        return weights + 8 * self.width * self.classes + self.classes

    @property
    def multiplications(self) -> int:
        """Multiplications for one image forward."""
        return sum(i * o * window**2 * side**2 for i, o, window, side in self.convolutions) + 80 * self.width

    def activation_traffic(self, on_gpu: bool) -> float:
        """Numbers that come out of all convolutions for one image; those of a GPU's own norms pass memory less often.

        Of 512 images, on an H200, the norms took 4.4 ms of a step before they had kernels of their own, then 2.5.
        """
        return sum(
            o * side**2 * (FUSED_NORM_TRAFFIC if on_gpu and o % 64 == 0 else 1.0) for _, o, _, side in self.convolutions
        )

    def saved_activations(self, on_gpu: bool) -> int:
        """Numbers kept for the backward pass of one image: what goes into each batch norm, and what comes out.

        What comes out of the norm past a block is added to and forgotten, but for the kernels of a GPU.
        """
        return sum(
            o * side**2 * (2 if window > 1 or (on_gpu and o % 64 == 0) else 1)
            for _, o, window, side in self.convolutions
        )


ModelShape = DecoderShape | ResNetShape
RESNET = "resnet18"
EMBEDDED_MODEL = "smollm2-135m-instruct"
DEFAULT_VOCAB_SIZE = 50304


def _llama_config(
    layers: int, width: int, inner: int, heads: tuple[int, int], vocab_size: int, **overrides: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab_size,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, **overrides,
    }  # fmt: skip


SHIPPED_CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama_config(30, 576, 1536, (9, 3), 49152, tie_word_embeddings=True, max_position_embeddings=8192),
    "smollm2-360m": _llama_config(
        32, 960, 2560, (15, 5), 49152, tie_word_embeddings=True, max_position_embeddings=8192
    ),
    "smollm2-1.7b": _llama_config(
        24, 2048, 8192, (32, 32), 49152, tie_word_embeddings=True, max_position_embeddings=8192
    ),
    "smollm3-3b": _llama_config(
        36, 2048, 11008, (16, 4), 128256, tie_word_embeddings=True, max_position_embeddings=65536
    )
    | {"model_type": "smollm3"},
    "pythia-410m": _llama_config(24, 1024, 4096, (16, 16), 50304) | {"model_type": "gpt_neox"},
    "gemma-3-270m": _llama_config(18, 640, 2048, (4, 1), 262144, head_dim=256, max_position_embeddings=32768)
    | {"model_type": "gemma3_text", "tie_word_embeddings": True},
    "llama-6b": _llama_config(32, 4096, 11008, (32, 8), 50304, max_position_embeddings=4096),
    "llama-7b": _llama_config(32, 4096, 14336, (32, 8), 50304, max_position_embeddings=4096),
}
"""Public shapes by their plain name, as their config.json on the hub states them; the two Llamas are those of the
production pipeline: 32 layers of 4096, 8 key-value heads, 50,304 tokens, with an inner width of 11,008 or 14,336."""
NAME_ALIASES = {"gemma-270m": "gemma-3-270m"}
"""Other names people write."""


def shape_of_recipe(recipe: Recipe, recipe_dir: Path) -> ModelShape:
    """The shape of a recipe's model, without fetching anything."""
    if recipe.model.architecture is not None:
        prepare = recipe.prepare
        vocab_size = prepare.vocab_size if prepare is not None and prepare.tokenizer == "train" else None
        return shape_of_architecture(recipe.model.architecture, recipe.name, vocab_size)
    name = recipe.model.model_name_or_path or ""
    if name == RESNET:
        width = recipe.model.resnet_width
        return ResNetShape(RESNET, "our own ResNet-18, from scratch", width=width)
    for folder in _model_folders(name, recipe_dir):
        if (folder / "config.json").is_file():
            return shape_from_config(_read_config(folder / "config.json"), name, str(folder / "config.json"))
    plain = Path(name).name.lower()
    for candidate in (plain, NAME_ALIASES.get(plain, ""), plain.removesuffix("-instruct"), plain.removesuffix("-it")):
        if candidate in SHIPPED_CONFIGS:
            return shape_from_config(
                SHIPPED_CONFIGS[candidate], name, f"the shape of {candidate} that is shipped with modelwright"
            )
    raise ModelError(
        f"model: no config.json of {name!r} is at hand, and its shape is not among the shipped ones "
        f"({', '.join(SHIPPED_CONFIGS)}); a folder with its config.json alone is enough to plan"
    )


def is_downloaded(name: str, recipe_dir: Path) -> bool:
    """Whether a model lies on this machine, weights and all."""
    return name in (RESNET, EMBEDDED_MODEL) or any(
        (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        for folder in _model_folders(name, recipe_dir)
    )


def shape_of_architecture(architecture: LlamaArchitecture, name: str, vocab_size: int | None = None) -> DecoderShape:
    """The shape of a model that a recipe makes from scratch; a vocabulary it leaves open is taken for GPT-2's.

    words: tokens of a tokenizer that the recipe itself trains.
    """
    config = {
        **architecture.model_dump(),
        "intermediate_size": architecture.ffn_size,
        "num_key_value_heads": architecture.kv_heads,
    }
    config["vocab_size"] = architecture.vocab_size or vocab_size or DEFAULT_VOCAB_SIZE
    known = architecture.vocab_size or vocab_size
    source = "the recipe's architecture" + ("" if known else f", with {DEFAULT_VOCAB_SIZE:,} tokens taken for granted")
    return shape_from_config(config, name, source)


def _model_folders(name: str, recipe_dir: Path) -> list[Path]:
    """Where a model may lie on this machine: its path, our own cache, the hub's cache."""
    folders = [Path(name), recipe_dir / name]
    if name == EMBEDDED_MODEL:
        folders += sorted(cache_dir().glob(f"{EMBEDDED_MODEL}*"))
    if name.count("/") == 1:
        folders += sorted((hf_hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    return folders


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {path} could not be read ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"model: {path} holds no object; it wants a decoder's config.json")
    return config
