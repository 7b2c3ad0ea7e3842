"""Find the shape of the model a recipe names: its own config.json where one is at hand, else the table below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelwright.errors import ModelError
from modelwright.plan.architecture import Shape, TextShape, VisionShape, shape_of
from modelwright.recipe.architecture import Architecture
from modelwright.recipe.schema import Recipe
from modelwright.runs.caches import cache_dir, hub_cache

RESNET = "resnet18"
EMBEDDED = "smollm2-135m-instruct"
GPT2_WORDS = 50304


def _llama(layers: int, width: int, inner: int, heads: tuple[int, int], words: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": words,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, **more,
    }  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(30, 576, 1536, (9, 3), 49152, tie_word_embeddings=True, max_position_embeddings=8192),
    "smollm2-360m": _llama(32, 960, 2560, (15, 5), 49152, tie_word_embeddings=True, max_position_embeddings=8192),
    "smollm2-1.7b": _llama(24, 2048, 8192, (32, 32), 49152, tie_word_embeddings=True, max_position_embeddings=8192),
    "smollm3-3b": _llama(36, 2048, 11008, (16, 4), 128256, tie_word_embeddings=True, max_position_embeddings=65536)
    | {"model_type": "smollm3"},
    "pythia-410m": _llama(24, 1024, 4096, (16, 16), 50304) | {"model_type": "gpt_neox"},
    "gemma-3-270m": _llama(18, 640, 2048, (4, 1), 262144, head_dim=256, max_position_embeddings=32768)
    | {"model_type": "gemma3_text", "tie_word_embeddings": True},
    "llama-6b": _llama(32, 4096, 11008, (32, 8), 50304, max_position_embeddings=4096),
    "llama-7b": _llama(32, 4096, 14336, (32, 8), 50304, max_position_embeddings=4096),
}
"""Public shapes by their plain name, as their config.json on the hub states them; the two Llamas are those of the
production pipeline: 32 layers of 4096, 8 key-value heads, 50,304 tokens, with an inner width of 11,008 or 14,336."""
ALSO = {"gemma-270m": "gemma-3-270m"}
"""Other names people write."""


def find_shape(recipe: Recipe, beside: Path) -> Shape:
    """The shape of a recipe's model, without fetching anything."""
    if recipe.model.architecture is not None:
        prepare = recipe.prepare
        words = prepare.vocab_size if prepare is not None and prepare.tokenizer == "train" else None
        return made_shape(recipe.model.architecture, recipe.name, words)
    name = recipe.model.model_name_or_path or ""
    if name == RESNET:
        width = recipe.model.width
        return VisionShape(RESNET, "our own ResNet-18, from scratch", width=width)
    for folder in _folders(name, beside):
        if (folder / "config.json").is_file():
            return shape_of(_read(folder / "config.json"), name, str(folder / "config.json"))
    plain = Path(name).name.lower()
    for known in (plain, ALSO.get(plain, ""), plain.removesuffix("-instruct"), plain.removesuffix("-it")):
        if known in KNOWN:
            return shape_of(KNOWN[known], name, f"the shape of {known} that is shipped with modelwright")
    raise ModelError(
        f"model: no config.json of {name!r} is at hand, and its shape is not among the shipped ones "
        f"({', '.join(KNOWN)}); a folder with its config.json alone is enough to plan"
    )


def at_hand(name: str, beside: Path) -> bool:
    """Whether a model lies on this machine, weights and all."""
    return name in (RESNET, EMBEDDED) or any(
        (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) for folder in _folders(name, beside)
    )


def made_shape(wish: Architecture, name: str, words: int | None = None) -> TextShape:
    """The shape of a model that a recipe makes from scratch; a vocabulary it leaves open is taken for GPT-2's.

    words: tokens of a tokenizer that the recipe itself trains.
    """
    told = {**wish.model_dump(), "intermediate_size": wish.feed_forward, "num_key_value_heads": wish.key_value_heads}
    told["vocab_size"] = wish.vocab_size or words or GPT2_WORDS
    known = wish.vocab_size or words
    source = "the recipe's architecture" + ("" if known else f", with {GPT2_WORDS:,} tokens taken for granted")
    return shape_of(told, name, source)


def _folders(name: str, beside: Path) -> list[Path]:
    """Where a model may lie on this machine: its path, our own cache, the hub's cache."""
    found = [Path(name), beside / name]
    if name == EMBEDDED:
        found += sorted(cache_dir().glob(f"{EMBEDDED}*"))
    if name.count("/") == 1:
        found += sorted((hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {path} could not be read ({error})") from None
    if not isinstance(told, dict):
        raise ModelError(f"model: {path} holds no object; it wants a decoder's config.json")
    return told
