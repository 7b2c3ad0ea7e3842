"""Estimate the row count and token lengths of a stage's data, and compute length histograms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from modelwright.data import chat, images, sources
from modelwright.data.chat import Message
from modelwright.data.packing import NDArray, pack_bfd
from modelwright.errors import DataError, UsageError
from modelwright.recipe.schema import Recipe
from modelwright.recipe.sections import RowStats
from modelwright.recipe.stage_specs import ClassifyConfig, DpoConfig, PretrainConfig

LENGTH_BINS = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 62]
"""Edges of the length histogram, in tokens."""


def length_histogram(lengths: NDArray) -> dict[str, Any]:
    """Histogram and percentiles of document lengths, in tokens."""
    counts, _ = np.histogram(lengths, bins=LENGTH_BINS)
    percentiles = np.percentile(lengths, [50, 90, 99]) if len(lengths) else [0, 0, 0]
    return {
        "bins": LENGTH_BINS[:-1],
        "counts": [int(count) for count in counts],
        **{name: int(value) for name, value in zip(("median", "p90", "p99"), percentiles, strict=True)},
        "longest": int(lengths.max()) if len(lengths) else 0,
    }


CHARS_PER_TOKEN = 4.4
"""Characters of English prose per token, measured with vocabularies of 49k to 128k tokens."""
REFERENCE_VOCAB_SIZE = 49_152
"""The smallest of those vocabularies; tokens of a smaller one are shorter by the ratio of the logarithms."""
SAMPLE_ROWS = 200
"""Messages tokenized to measure the characters per token."""
TEMPLATE_TOKENS = 5
"""Tokens that a chat template adds per message."""
MAX_PLAN_READ_BYTES = 64 << 20
"""Larger files are not read for a plan, so that planning stays fast."""
CIFAR10_TRAIN_ROWS = 50_000
CIFAR10_ROW_BYTES = 32 * 32 * 3
Lengths = tuple[list[int], float]
"""Tokens of each row, and the fraction of tokens that are trained."""


def estimate_row_stats(recipe: Recipe, stage: str, recipe_dir: Path, tokenizer: Path | None = None) -> RowStats:
    """Estimate from the rows of a stage if they are local and small; else assume rows of max_length.

    With the folder of a tokenizer, characters per token are measured; else they are estimated from the vocabulary size.
    """
    settings, data = recipe.stages[stage], recipe.data_for(stage)
    name = data.source
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
    path = sources.local_path(name, recipe_dir)
    too_large = path is not None and path.is_file() and path.stat().st_size > MAX_PLAN_READ_BYTES
    if too_large or sources.is_hub_name(name, recipe_dir):
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


def _conversation_lengths(recipe: Recipe, stage: str, recipe_dir: Path, tokenizer: Path | None) -> Lengths:
    rows = chat.load_conversations(recipe.data_for(stage), recipe.seed, recipe_dir).train
    sample = [message for item in rows[:SAMPLE_ROWS] for message in item.messages]
    chars_per_token = _chars_per_token(recipe, sample, tokenizer)
    lengths = [_estimate_tokens(item.messages, chars_per_token) for item in rows]
    if not getattr(recipe.stages[stage], "assistant_only_loss", True):
        return lengths, 1.0
    answers = [[message for message in item.messages if message["role"] == "assistant"] for item in rows]
    trained = sum(_estimate_tokens(messages, chars_per_token) for messages in answers)
    return lengths, trained / max(1, sum(lengths))


def _pair_lengths(recipe: Recipe, stage: str, recipe_dir: Path, tokenizer: Path | None) -> Lengths:
    from modelwright.data import preferences

    pairs = preferences.load_preferences(recipe.data_for(stage), recipe.seed, recipe_dir).train
    sample = [message for pair in pairs[:SAMPLE_ROWS] for message in pair.chosen]
    count = partial(_estimate_tokens, chars_per_token=_chars_per_token(recipe, sample, tokenizer))
    answers = [count(pair.chosen) + count(pair.rejected) for pair in pairs]
    lengths = [count(pair.prompt) + answer for pair, answer in zip(pairs, answers, strict=True)]
    return lengths, sum(answers) / max(1, sum(lengths))


def _chars_per_token(recipe: Recipe, sample: Sequence[Message], tokenizer: Path | None) -> float:
    """Characters per token of these messages."""
    prepare = recipe.prepare
    if tokenizer is not None:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        texts = [message["content"] for message in sample]
        tokens = sum(len(encoding.ids) for encoding in encoder.encode_batch(texts, add_special_tokens=False))
        return sum(map(len, texts)) / max(1, tokens)
    if prepare is not None and prepare.tokenizer == "train":
        return CHARS_PER_TOKEN * min(1.0, log(prepare.vocab_size) / log(REFERENCE_VOCAB_SIZE))
    return CHARS_PER_TOKEN


def _estimate_tokens(messages: Sequence[Message], chars_per_token: float) -> int:
    return round(sum(len(message["content"]) / chars_per_token + TEMPLATE_TOKENS for message in messages))
