"""Estimate the row count and token lengths of a stage's data, and compute length histograms."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from modelwright.data import chat, images, sources
from modelwright.data.chat import Message
from modelwright.data.packing import pack_bfd
from modelwright.data.prepare.dedup import NDArray
from modelwright.errors import DataError, UsageError
from modelwright.recipe.schema import ClassifyConfig, DpoConfig, PretrainConfig, Recipe
from modelwright.recipe.sections import RowStats

LENGTH_BINS = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 62]
"""Edges of the length histogram, in tokens."""


def length_histogram(lengths: NDArray) -> dict[str, Any]:
    """How long documents are, in tokens."""
    counts, _ = np.histogram(lengths, bins=LENGTH_BINS)
    percentiles = np.percentile(lengths, [50, 90, 99]) if len(lengths) else [0, 0, 0]
    return {
        "bins": LENGTH_BINS[:-1],
        "counts": [int(count) for count in counts],
        **{name: int(value) for name, value in zip(("median", "p90", "p99"), percentiles, strict=True)},
        "longest": int(lengths.max()) if len(lengths) else 0,
    }


CHARS_PER_TOKEN = 4.4
"""Of English prose in a token, by the vocabularies of 49 to 128 thousand tokens we have counted."""
REFERENCE_VOCAB_SIZE = 49_152
"""The smallest of those vocabularies; the tokens of a smaller one are shorter by the ratio of their logarithms."""
SAMPLE_ROWS = 200
"""Messages that a tokenizer encodes to tell how many characters its tokens have."""
TEMPLATE_TOKENS = 5
"""Tokens that a chat template puts around a message."""
MAX_PLAN_READ_BYTES = 64 << 20
"""Bytes of a file that is read for a plan; a larger one is left alone, so that a plan stays quick."""
CIFAR10_TRAIN_ROWS = 50_000
CIFAR10_ROW_BYTES = 32 * 32 * 3


def estimate_row_stats(recipe: Recipe, stage: str, recipe_dir: Path, tokenizer: Path | None = None) -> RowStats:
    """Look at the rows of a stage where they are at hand and small; else take rows as long as they may be.

    The tokenizer is a folder, where one stands already; without it, tokens are as long as its vocabulary makes them.
    """
    settings, data = recipe.stages[stage], recipe.data_for(stage)
    name = data.dataset_name or data.train_file or ""
    if isinstance(settings, ClassifyConfig):
        known = {"CIFAR-10": CIFAR10_TRAIN_ROWS} if "cifar10" in name.lower().replace("-", "") else {}
        known = {images.SHAPES_NAME: images.SHAPES_TRAIN} if name == images.SHAPES_NAME else known
        basis, rows = next(iter(known.items()), (f"images of {name}, not counted", None))
        rows = data.max_rows or rows
        return RowStats(rows, 1, 1.0, 1.0, basis, (rows or CIFAR10_TRAIN_ROWS) * 6 // 5 * CIFAR10_ROW_BYTES)
    max_length = int(getattr(settings, "max_length", 1024))
    if isinstance(settings, PretrainConfig):
        return RowStats(None, max_length, float(max_length), 1.0, f"rows filled to {max_length} tokens")
    unknown = RowStats(None, max_length, float(max_length), 1.0, f"{name} was not read; rows of max_length are taken")
    if sources.is_hub_name(name, recipe_dir) or _too_large(name, recipe_dir):
        return unknown
    try:
        measure_lengths = _pair_lengths if isinstance(settings, DpoConfig) else _conversation_lengths
        lengths, trained_fraction = measure_lengths(recipe, stage, recipe_dir, tokenizer)
    except (DataError, UsageError):
        return unknown
    truncated_lengths = [min(length, max_length) for length in lengths]
    basis = f"{len(lengths):,} rows of {name}, tokens counted by their characters"
    if getattr(settings, "packing", False):
        packed = len(pack_bfd(truncated_lengths, max_length))
        return RowStats(packed, max_length, sum(truncated_lengths) / packed, trained_fraction, f"{basis}, packed")
    return RowStats(len(truncated_lengths), max(truncated_lengths), mean(truncated_lengths), trained_fraction, basis)


def _conversation_lengths(
    recipe: Recipe, stage: str, recipe_dir: Path, tokenizer: Path | None
) -> tuple[list[int], float]:
    train_rows = chat.load_conversations(recipe.data_for(stage), recipe.seed, recipe_dir).train
    chars_per_token = _chars_per_token(
        recipe, [message for item in train_rows[:SAMPLE_ROWS] for message in item.messages], tokenizer
    )
    lengths = [_estimate_tokens(item.messages, chars_per_token) for item in train_rows]
    if not getattr(recipe.stages[stage], "assistant_only_loss", True):
        return lengths, 1.0
    answers = [
        _estimate_tokens([m for m in item.messages if m["role"] == "assistant"], chars_per_token) for item in train_rows
    ]
    return lengths, sum(answers) / max(1, sum(lengths))


def _pair_lengths(recipe: Recipe, stage: str, recipe_dir: Path, tokenizer: Path | None) -> tuple[list[int], float]:
    from modelwright.data import preferences

    pairs = preferences.load_preferences(recipe.data_for(stage), recipe.seed, recipe_dir).train
    chars_per_token = _chars_per_token(
        recipe, [message for pair in pairs[:SAMPLE_ROWS] for message in pair.chosen], tokenizer
    )
    answers = [
        _estimate_tokens(pair.chosen, chars_per_token) + _estimate_tokens(pair.rejected, chars_per_token)
        for pair in pairs
    ]
    lengths = [
        _estimate_tokens(pair.prompt, chars_per_token) + answer for pair, answer in zip(pairs, answers, strict=True)
    ]
    return lengths, sum(answers) / max(1, sum(lengths))


def _chars_per_token(recipe: Recipe, sample: Sequence[Message], tokenizer: Path | None) -> float:
    """How many characters of these messages make a token."""
    prepare = recipe.prepare
    if tokenizer is not None:
        from tokenizers import Tokenizer

        encoder, texts = (
            Tokenizer.from_file(str(tokenizer / "tokenizer.json")),
            [message["content"] for message in sample],
        )
        tokens = sum(len(encoding.ids) for encoding in encoder.encode_batch(texts, add_special_tokens=False))
        return sum(map(len, texts)) / max(1, tokens)
    if prepare is not None and prepare.tokenizer == "train":
        return CHARS_PER_TOKEN * min(1.0, log(prepare.vocab_size) / log(REFERENCE_VOCAB_SIZE))
    return CHARS_PER_TOKEN


def _estimate_tokens(messages: Sequence[Message], chars_per_token: float) -> int:
    return round(sum(len(message["content"]) / chars_per_token + TEMPLATE_TOKENS for message in messages))


def _too_large(name: str, recipe_dir: Path) -> bool:
    path = sources.local_path(name, recipe_dir)
    return path is not None and path.is_file() and path.stat().st_size > MAX_PLAN_READ_BYTES
