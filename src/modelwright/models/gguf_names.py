"""What GGUF has names for, told from a model's small files alone, so that a refusal costs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The families whose layers GGUF knows and we have held against their source, by what GGUF calls them."""


def refusal(folder: Path) -> str | None:
    """Why a model folder cannot become GGUF, from its small files alone; None where it can."""
    config = _read(folder / "config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"its family is {family!r}; gguf is written for {', '.join(FAMILIES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"its positions are scaled ({rope.get('rope_type') or rope.get('type')}), which is not written yet"
    if config.get("attention_bias") and family == "llama":
        return "its attention has biases, which GGUF's llama does not"
    if pre_tokenizer(_read(folder / "tokenizer.json")) is None:
        return "its tokenizer is none of the byte-level kinds that GGUF has a name for"
    return None


def pre_tokenizer(stored: Mapping[str, Any]) -> str | None:
    """What GGUF calls this way of cutting text into words, where it has a name for it."""
    if (stored.get("model") or {}).get("type") != "BPE":
        return None
    first = stored.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    kinds = [step.get("type") for step in steps]
    if not kinds or kinds[-1] != "ByteLevel":
        return None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    pattern = json.dumps(steps[0].get("pattern", ""))
    if kinds == ["Split", "ByteLevel"] and "{1,3}" in pattern:
        return "llama-bpe"
    return "qwen2" if kinds == ["Split", "ByteLevel"] and "p{N}|" in pattern else None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
