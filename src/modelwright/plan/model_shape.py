"""Sizes, parameter counts and trainable counts of a model from its config.json alone, without weights.

Common model types are counted by formulas, without torch; others by transformers' class on torch's meta device.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from modelwright.errors import ModelError, first_line
from modelwright.recipe.schema import Recipe, check_sizes
from modelwright.recipe.sections import EMBEDDED_MODEL, FUSED_LORA_RANKS, MLP_LINEARS, LlamaArchitecture, ParameterCount
from modelwright.recipe.stage_specs import TrainableConfig
from modelwright.runs.caches import cache_dir, hf_hub_cache


@dataclass(frozen=True)
class ModelFamily:
    """Properties of a model_type that config.json does not contain."""

    gated_mlp: bool = True
    """Whether the MLP is gated: three matrices instead of two."""
    norms_per_layer: int = 2
    """Norms per layer."""
    layer_norm_bias: bool = False
    """Whether norms have a bias (LayerNorm)."""
    qk_norm: bool = False
    """Whether queries and keys are normalized."""
    fused_qkv: bool = False
    """Whether one matrix computes queries, keys and values."""
    fp32_norms: bool = False
    """Whether norms are computed and saved in fp32 for any weight dtype."""
    biases: tuple[str, ...] = ()
    """Linears that always have a bias."""
    tie_word_embeddings: bool = False
    """Whether LM head and embeddings are tied if the config does not say."""
    silu_gated_mlp: bool = False
    """Whether its MLP is exactly down(silu(gate) · up), as `models.trainable` fuses it with LoRA."""


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
"""Model types that are counted by formulas."""


@dataclass(frozen=True)
class MeasuredLayers:
    """What transformers' class of another model_type has."""

    traits: ModelFamily
    """Properties of its layers."""
    linears: tuple[tuple[str, int, int], ...]
    """Name, in and out features of each linear in the most frequent layer; of experts, those that compute one token."""
    parameters: int
    """Of the model."""
    layer_parameters: int
    """Of a layer, on average, as in the numbers below."""
    norm_parameters: int
    """Of the norms."""
    matrices: int
    """Of linears and experts."""
    active_matrices: int
    """Of linears and experts that compute one token."""
    linear_matrices: int
    """Of linears alone, which can be quantized."""


@dataclass(frozen=True)
class DecoderShape:
    """A decoder-only language model with equal layers; fields are named as in config.json."""

    name: str
    """Name of the model."""
    source: str
    """Where the shape was read."""
    family: str
    """Its model_type."""
    num_hidden_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    intermediate_size: int
    """Inner width of the MLP."""
    vocab_size: int
    """Tokens in the vocabulary."""
    tie_word_embeddings: bool
    """Whether LM head and embeddings are one matrix."""
    attention_bias: bool = False
    """Whether the attention linears have biases."""
    mlp_bias: bool = False
    """Whether the MLP linears have biases."""
    hidden_act: str = "silu"
    """Activation of the MLP."""
    layer_kinds: int = 1
    """Kinds of layers, by their attention and RoPE: torch.compile compiles each."""
    measured: MeasuredLayers | None = None
    """Its layers, if its model_type is not in MODEL_FAMILIES."""
    config: str = ""
    """The config that it was counted by, as JSON."""

    @property
    def traits(self) -> ModelFamily:
        """Properties of its model_type; a type that transformers does not know is counted as a Llama."""
        return self.measured.traits if self.measured else MODEL_FAMILIES.get(self.family, MODEL_FAMILIES["llama"])

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """In and out features of the linears of a layer, by name; of experts, those that compute one token."""
        if self.measured:
            return {name: (inputs, outputs) for name, inputs, outputs in self.measured.linears}
        hidden, inner, query, kv = self.hidden_size, self.intermediate_size, self.query_width, self.kv_width
        if self.traits.fused_qkv:
            sizes = ((hidden, query + 2 * kv), (query, hidden), (hidden, inner), (inner, hidden))
            return dict(zip(NEOX_LINEARS, sizes, strict=True))
        linears = {"q_proj": (hidden, query), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (query, hidden),
                   "up_proj": (hidden, inner), "down_proj": (inner, hidden)}  # fmt: skip
        return {**linears, "gate_proj": (hidden, inner)} if self.traits.gated_mlp else linears

    @property
    def active_matrices(self) -> int:
        """Parameters in the linears of a layer that compute one token."""
        if self.measured:
            return self.measured.active_matrices
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def layer_matrices(self) -> int:
        """Parameters in the linears and experts of a layer."""
        return self.measured.matrices if self.measured else self.active_matrices

    @property
    def quantizable_parameters(self) -> int:
        """Parameters of the layers that bitsandbytes quantizes: those of linears, not of experts."""
        return self.num_hidden_layers * (self.measured.linear_matrices if self.measured else self.layer_matrices)

    @property
    def norm_vector(self) -> int:
        """Parameters of one norm."""
        return self.hidden_size * (2 if self.traits.layer_norm_bias else 1)

    @property
    def layer_norms(self) -> int:
        """Parameters in the norms of a layer."""
        if self.measured:
            return self.measured.norm_parameters
        return self.traits.norms_per_layer * self.norm_vector + (2 * self.head_dim if self.traits.qk_norm else 0)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        if self.measured:
            return self.measured.layer_parameters
        biased = set(self.traits.biases)
        biased |= set(ATTENTION_LINEARS) if self.attention_bias else set()
        biased |= set(MLP_LINEARS) if self.mlp_bias else set()
        biases = sum(outputs for name, (_, outputs) in self.linears.items() if name in biased)
        return self.layer_matrices + self.layer_norms + biases

    @property
    def embedding(self) -> int:
        """Parameters of the embeddings, and of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters in total; tied embeddings count once."""
        if self.measured:
            return self.measured.parameters
        ends = self.embedding * (1 if self.tie_word_embeddings else 2) + self.norm_vector
        return self.num_hidden_layers * self.layer_parameters + ends


@dataclass(frozen=True)
class TrainableSummary(ParameterCount):
    """Which parameters of a shape are trained, and through how many layers the backward pass goes."""

    trained_layers: int
    """Layers whose linears are trained."""
    backward_layers: int
    """Layers in the backward pass, counted from the LM head."""
    lm_head: bool
    """Whether the LM head is trained."""
    embeddings: bool
    """Whether the embeddings are trained."""
    tie_word_embeddings: bool
    """Whether LM head and embeddings are one matrix."""
    lora_parameters: int = 0
    """Parameters of LoRA."""
    fused_lora_mlp: bool = False
    """Whether a GPU can use the fused LoRA MLP."""


def count_trainable(shape: DecoderShape, parts: TrainableConfig) -> TrainableSummary:
    """Count trainable parameters as `models.trainable` selects them, without a model."""
    trainable = parts.trainable
    tied = shape.tie_word_embeddings and not trainable.untie_lm_head
    total = shape.parameters + (shape.embedding if shape.tie_word_embeddings and not tied else 0)
    if trainable.lora:
        added, fused = _lora_parameters(shape, parts), _can_fuse_lora_mlp(shape, parts)
        return TrainableSummary(added, total + added, 0, shape.num_hidden_layers, False, False, tied, added, fused)
    if not trainable.is_partial:
        return TrainableSummary(total, total, shape.num_hidden_layers, shape.num_hidden_layers, True, True, tied)
    last_layers = trainable.last_layers or 0
    if last_layers > (layers := shape.num_hidden_layers):
        raise ModelError(f"model: trainable.last_layers is {last_layers}, but the model has {layers} layers")
    norms = (layers - last_layers) * shape.layer_norms + shape.norm_vector if trainable.norms else 0
    trained = last_layers * shape.layer_parameters + (shape.embedding if trainable.lm_head else 0) + norms
    embeddings = trainable.lm_head and tied
    backward_layers = layers if trainable.norms or embeddings else last_layers
    return TrainableSummary(trained, total, last_layers, backward_layers, trainable.lm_head, embeddings, tied)


def _lora_parameters(shape: DecoderShape, parts: TrainableConfig) -> int:
    """Parameters of LoRA: rank × (in + out features) of each target linear."""
    targets = _lora_targets(shape, parts)
    if targets is None:
        try:
            return _count_adapters(shape.config, parts.model_dump_json(include={"trainable", *parts.LORA_KEYS}))
        except ModelError as error:
            names = dict.fromkeys(name.rpartition(".")[2] for name in shape.linears)
            raise ModelError(f"{error}; a layer has {', '.join(names)}") from None
    target_sizes = [size for name, size in shape.linears.items() if name in targets]
    magnitudes = sum(outputs for _, outputs in target_sizes) if parts.use_dora else 0
    return shape.num_hidden_layers * (parts.lora_r * sum(map(sum, target_sizes)) + magnitudes)


@cache
def _count_adapters(config: str, lora: str) -> int:
    """Parameters of LoRA as peft adds it to the model of a config, with settings as JSON."""
    import torch
    from peft import LoraConfig, get_peft_model

    parts = TrainableConfig.model_validate_json(lora)
    try:
        model = _model_of_config(json.loads(config))
        with warnings.catch_warnings(action="ignore"), torch.device("meta"):  # renamed weights are warned of
            adapted = get_peft_model(model, LoraConfig(**parts.peft_settings(model)))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"model: LoRA could not be added ({first_line(error)})") from None
    parts.require_target_layers(adapted)
    return sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)


def _can_fuse_lora_mlp(shape: DecoderShape, parts: TrainableConfig) -> bool:
    fusable = shape.traits.silu_gated_mlp and shape.hidden_act == "silu" and not shape.mlp_bias
    fusable = fusable and (_lora_targets(shape, parts) or set()) >= set(MLP_LINEARS)
    return fusable and parts.lora_r in FUSED_LORA_RANKS and not parts.lora_dropout and not parts.use_dora


def _lora_targets(shape: DecoderShape, parts: TrainableConfig) -> set[str] | None:
    """The linears of a layer that get LoRA; None where peft must be asked."""
    linears, targets = set(shape.linears), parts.lora_target_modules
    if shape.measured or targets == "all-linear":
        return None if shape.measured else linears
    return set(targets) if isinstance(targets, list) and set(targets) <= linears else None


def shape_from_config(config: Mapping[str, Any], name: str, source: str) -> DecoderShape:
    """The shape in a Hugging Face config.json, or in a mapping with the same keys."""
    check_sizes(config, source)
    text = config.get("text_config")
    settings = {**config, **(text if isinstance(text, dict) else {})}
    settings = {key: value for key, value in settings.items() if not NOT_SHAPES.fullmatch(key)}
    values = {key: value for key, value in settings.items() if value is not None}
    family = str(values.get("model_type", "llama"))
    if family not in MODEL_FAMILIES and _is_transformers_type(family):
        return _shape_of_class(settings, name, source)
    try:
        hidden_size, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        traits = MODEL_FAMILIES.get(family, MODEL_FAMILIES["llama"])
        kinds = [values[key] for key in ("layer_types", "no_rope_layers") if isinstance(values.get(key), list)]
        return DecoderShape(
            name=name,
            source=source if family in MODEL_FAMILIES else f"{source}, counted as a Llama",
            family=family,
            num_hidden_layers=int(values["num_hidden_layers"]),
            hidden_size=hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=heads if traits.fused_qkv else int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden_size // heads),
            intermediate_size=int(values["intermediate_size"]),
            vocab_size=int(values["vocab_size"]),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", traits.tie_word_embeddings)),
            attention_bias=bool(values.get("attention_bias")) and not traits.fused_qkv,
            mlp_bias=bool(values.get("mlp_bias")),
            hidden_act=str(values.get("hidden_act") or "silu"),
            layer_kinds=len(set(zip(*kinds, strict=False))) if kinds else 1,
            config=json.dumps(settings),
        )
    except KeyError as missing:
        if isinstance(text, dict) and "model_type" in text:  # public ones leave out sizes that their class knows
            return _shape_of_class(settings, name, source)
        raise ModelError(f"model: {source} has no {missing}; it wants a decoder's config.json") from None
    except TypeError:  # a list, a size for each layer
        raise ModelError(f"model: {source} has layers of several sizes, which are not counted") from None


NOT_SHAPES = re.compile(r"auto_map|(attn|experts)_implementation(_internal)?|.*_config")
"""Keys of a config.json that name code, or how a model is loaded, or that belong to other models than the decoder."""
QKV_NAMES = ("qkv", "query_key_value", "c_attn")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


def _is_transformers_type(family: str) -> bool:
    from transformers import CONFIG_MAPPING

    return family in CONFIG_MAPPING


def _shape_of_class(config: dict[str, Any], name: str, source: str) -> DecoderShape:
    """The shape of the model that transformers makes of a config, on torch's meta device."""
    try:
        model = _model_of_config(config)
        for layers in model.modules():
            if type(layers).__name__ == "ModuleList" and len(layers) == model.config.num_hidden_layers:
                return _measured_shape(model, layers, json.dumps(config), name, source)
        reason = "its layers were not found"
    except Exception as error:  # whatever a class raises for a config that it was not made for
        reason = first_line(error)
    raise ModelError(f"model: {source} is a {config['model_type']}, whose sizes could not be counted ({reason})")


def _model_of_config(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")


def _measured_shape(model: Any, layers: Any, config: str, name: str, source: str) -> DecoderShape:
    """The shape of a model by its modules."""
    hidden, heads = int(model.config.hidden_size), int(model.config.num_attention_heads)
    sizes = [sum(each.numel() for each in layer.parameters()) for layer in layers]
    matrices = [_matrices(layer, hidden, _read(model.config, *EXPERTS_PER_TOKEN) or 1) for layer in layers]
    typical = sizes.index(Counter(sizes).most_common(1)[0][0])
    linears = {path: (inputs, outputs) for path, inputs, outputs, _, _ in matrices[typical]}
    norms = [[each for each in layer.modules() if _is_norm(each)] for layer in layers]
    wide_norms = [each for each in norms[typical] if each.weight.numel() == hidden]
    inner = max((inputs for inputs, outputs in linears.values() if outputs == hidden), default=4 * hidden)
    inner_widths = [outputs for inputs, outputs in linears.values() if inputs == hidden]
    head_dim = int(_read(model.config, "qk_head_dim", "head_dim") or hidden // heads)
    fused = [size for path, (_, size) in linears.items() if any(part in path for part in QKV_NAMES)]
    keys = [size for path, (_, size) in linears.items() if path.endswith("k_proj")]
    key_heads = (keys[0] if keys else (fused[0] - heads * head_dim) // 2 if fused else 0) // head_dim
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    traits = ModelFamily(
        gated_mlp=2 * inner in inner_widths or inner_widths.count(inner) > 1,
        norms_per_layer=len(wide_norms),
        layer_norm_bias=any(getattr(each, "bias", None) is not None for each in wide_norms),
        qk_norm=len(norms[typical]) > len(wide_norms),
        fused_qkv=bool(fused) and not hasattr(model.config, "rms_norm_eps"),
    )
    every = [each for layer in matrices for each in layer]
    return DecoderShape(
        name=name,
        source=source,
        family=str(model.config.model_type),
        num_hidden_layers=len(layers),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=key_heads or int(_read(model.config, "num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=int(model.config.vocab_size),
        tie_word_embeddings=head is not None and head.weight is embeddings.weight,
        hidden_act=str(_read(model.config, "hidden_activation", "hidden_act", "activation_function") or "silu"),
        layer_kinds=len(set(sizes)),
        config=config,
        measured=MeasuredLayers(
            traits=traits,
            linears=tuple((path, *size) for path, size in linears.items()),
            parameters=sum(each.numel() for each in model.parameters()),
            layer_parameters=sum(sizes) // len(layers),
            norm_parameters=sum(each.numel() for layer in norms for norm in layer for each in norm.parameters())
            // len(layers),
            matrices=sum(stored for *_, stored, _ in every) // len(layers),
            active_matrices=sum(inputs * outputs for _, inputs, outputs, _, _ in every) // len(layers),
            linear_matrices=sum(stored for *_, stored, is_linear in every if is_linear) // len(layers),
        ),
    )


def _read(config: Any, *names: str) -> Any:
    """The first of these settings that a config has; a class may raise for one that differs between layers."""
    for name in names:
        with suppress(Exception):
            if (value := getattr(config, name, None)) is not None:
                return value
    return None


def _is_norm(module: Any) -> bool:
    return "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None


def _matrices(layer: Any, hidden: int, experts_per_token: int) -> list[tuple[str, int, int, int, bool]]:
    """Of each matrix of a layer: name, in and out features that compute one token, parameters, whether it is a linear
    and not a tensor of experts."""
    matrices = []
    for path, weight in layer.named_parameters():
        kind = type(layer.get_submodule(path.rpartition(".")[0])).__name__
        name, is_linear = path.removesuffix(".weight"), kind in ("Linear", "Conv1D")
        if weight.dim() == 2:
            inputs, outputs = weight.shape if kind == "Conv1D" else reversed(weight.shape)
            matrices.append((name, inputs, outputs, weight.numel(), is_linear))
        elif weight.dim() == 3:  # [experts, …]: classes differ in the order of the other two
            inner = weight.numel() // len(weight) // hidden * min(experts_per_token, len(weight))
            inputs, outputs = (inner, hidden) if "down" in path else (hidden, inner)
            matrices.append((name, inputs, outputs, weight.numel(), False))
    return matrices


FUSED_NORM_TRAFFIC = 0.6
"""Memory traffic of a batch norm with our GPU kernels, as a fraction of torch's."""


@dataclass(frozen=True)
class ResNetShape:
    """ResNet-18 for small images."""

    name: str
    """Name of the model."""
    source: str
    """Where the shape comes from."""
    width: int = 64
    """Channels of the first stage."""
    channels: int = 3
    """Channels of an image."""
    classes: int = 10
    """Number of classes."""
    image_size: int = 32
    """Height and width in pixels."""

    @property
    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Every convolution: input channels, output channels, kernel size, output side in pixels."""
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
        """Parameters, with two per channel for each batch norm."""
        weights = sum(inputs * outputs * window**2 + 2 * outputs for inputs, outputs, window, _ in self.convolutions)
        return weights + 8 * self.width * self.classes + self.classes

    @property
    def multiplications(self) -> int:
        """Multiplications of the forward pass of one image."""
        return sum(i * o * window**2 * side**2 for i, o, window, side in self.convolutions) + 80 * self.width

    def activation_traffic(self, on_gpu: bool) -> float:
        """Convolution outputs of one image, weighted by their memory traffic: with 512 images on an H200 the norms of a
        step took 4.4 ms, and 2.5 ms with our kernels."""
        factors = {True: FUSED_NORM_TRAFFIC, False: 1.0}
        return sum(o * side**2 * factors[on_gpu and o % 64 == 0] for _, o, _, side in self.convolutions)

    def saved_activations(self, on_gpu: bool) -> int:
        """Activations saved for one image: inputs and outputs of the batch norms; with fused GPU kernels also the
        outputs of downsampling norms."""
        tensors = [2 if window > 1 or (on_gpu and o % 64 == 0) else 1 for _, o, window, _ in self.convolutions]
        return sum(o * side**2 * n for (_, o, _, side), n in zip(self.convolutions, tensors, strict=True))


ModelShape = DecoderShape | ResNetShape
RESNET = "resnet18"
DEFAULT_VOCAB_SIZE = 50304


def _config(sizes: tuple[int, int, int, int, int], vocab_size: int, model_type: str = "llama", tied: bool = False,
            **overrides: int) -> dict[str, Any]:  # fmt: skip
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {"model_type": model_type, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    return {**config, **dict(zip(names, sizes, strict=True)), **overrides}


SHIPPED_CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config((30, 576, 1536, 9, 3), 49152, tied=True),
    "smollm2-360m": _config((32, 960, 2560, 15, 5), 49152, tied=True),
    "smollm2-1.7b": _config((24, 2048, 8192, 32, 32), 49152, tied=True),
    "smollm3-3b": _config((36, 2048, 11008, 16, 4), 128256, "smollm3", tied=True),
    "pythia-410m": _config((24, 1024, 4096, 16, 16), 50304, "gpt_neox"),
    "gemma-3-270m": _config((18, 640, 2048, 4, 1), 262144, "gemma3_text", tied=True, head_dim=256),
    "llama-6b": _config((32, 4096, 11008, 32, 8), 50304),
    "llama-7b": _config((32, 4096, 14336, 32, 8), 50304),
}
"""Shapes of public models by lower-case name, as in their config.json on the hub; the two Llamas are those of the
production pipeline."""
NAME_ALIASES = {"gemma-270m": "gemma-3-270m"}
"""Other spellings of these names."""


def shape_of_recipe(recipe: Recipe, recipe_dir: Path) -> ModelShape:
    """The shape of a recipe's model, without a download."""
    if recipe.model.architecture is not None:
        prepare = recipe.prepare
        vocab_size = prepare.vocab_size if prepare is not None and prepare.tokenizer == "train" else None
        return shape_of_architecture(recipe.model.architecture, recipe.name, vocab_size)
    name = recipe.model.model_name_or_path or ""
    if name == RESNET:
        return ResNetShape(RESNET, "our own ResNet-18, from scratch", width=recipe.model.resnet_width)
    for folder in model_folders(name, recipe_dir):
        if (folder / "config.json").is_file():
            return shape_from_config(_read_config(folder / "config.json"), name, str(folder / "config.json"))
    plain = Path(name).name.lower()
    for candidate in (plain, NAME_ALIASES.get(plain, ""), plain.removesuffix("-instruct"), plain.removesuffix("-it")):
        if candidate in SHIPPED_CONFIGS:
            source = f"the shape of {candidate} that is shipped with modelwright"
            return shape_from_config(SHIPPED_CONFIGS[candidate], name, source)
    raise ModelError(
        f"model: no config.json of {name!r} is at hand, and its shape is not among the shipped ones "
        f"({', '.join(SHIPPED_CONFIGS)}); a folder with its config.json alone is enough to plan"
    )


def is_downloaded(name: str, recipe_dir: Path) -> bool:
    """Whether a model with its weights is on this machine."""
    folders = [folder for folder in model_folders(name, recipe_dir) if (folder / "config.json").is_file()]
    return name in (RESNET, EMBEDDED_MODEL) or any(any(folder.glob("*.safetensors")) for folder in folders)


def shape_of_architecture(architecture: LlamaArchitecture, name: str, vocab_size: int | None = None) -> DecoderShape:
    """The shape of a model that is trained from scratch; an open vocabulary size counts as GPT-2's.

    vocab_size: of a tokenizer that the recipe trains.
    """
    known = architecture.vocab_size or vocab_size
    sizes = {"intermediate_size": architecture.ffn_size, "num_key_value_heads": architecture.kv_heads}
    config = {**architecture.model_dump(), **sizes, "vocab_size": known or DEFAULT_VOCAB_SIZE}
    source = "the recipe's architecture" + (
        "" if known else f", with an assumed vocabulary of {DEFAULT_VOCAB_SIZE:,} tokens"
    )
    return shape_from_config(config, name, source)


def model_folders(name: str, recipe_dir: Path) -> list[Path]:
    """Folders where a model may be: its path, our cache, the hub cache."""
    folders = [Path(name), recipe_dir / name]
    if name == EMBEDDED_MODEL:
        folders += sorted(cache_dir().glob(f"{EMBEDDED_MODEL}*"))
    if name.count("/") == 1:
        folders += sorted((hf_hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    return folders


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model: {path} could not be read ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"model: {path} is not a JSON object; it wants a decoder's config.json")
    return config
