"""How much text a stage will see, by the characters of its rows: enough to plan with, before anything is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from modelwright.data import conversations, shapes, sources
from modelwright.data.conversations import Message
from modelwright.errors import DataError, UsageError
from modelwright.recipe.schema import Classify, Dpo, Pretrain, Recipe

CHARACTERS = 4.4
"""Of English prose in a token, by the vocabularies of 49 to 128 thousand tokens we have counted."""
AROUND = 5
"""Tokens that a chat template puts around a message."""
LARGEST = 64 << 20
"""Bytes of a file that is read for a plan; a larger one is left alone, so that a plan stays quick."""
CIFAR10 = 50_000
PIXELS = 32 * 32 * 3


@dataclass(frozen=True)
class Size:
    """What is known of a stage's rows."""

    rows: int | None
    """Rows to train on in an epoch; None where nobody has looked."""
    longest: int
    """Tokens in the longest row, cut to max_length; 1 for images."""
    mean: float
    """Tokens in a row on average."""
    learnt: float
    """Share of tokens that are trained."""
    source: str
    """How that is known."""
    resident: int = 0
    """Bytes of rows that live on the device."""


def size(recipe: Recipe, stage: str, beside: Path) -> Size:
    """Look at the rows of a stage where they are at hand and small; else take rows as long as they may be."""
    settings, data = recipe.stages[stage], recipe.data_of(stage)
    name = data.dataset_name or data.train_file or ""
    if isinstance(settings, Classify):
        known = {"CIFAR-10": CIFAR10} if "cifar10" in name.lower().replace("-", "") else {}
        known = {shapes.NAME: shapes.TRAIN} if name == shapes.NAME else known
        told, rows = next(iter(known.items()), (f"images of {name}, not counted", None))
        rows = data.max_rows or rows
        return Size(rows, 1, 1.0, 1.0, told, (rows or CIFAR10) * 6 // 5 * PIXELS)
    longest = int(getattr(settings, "max_length", 1024))
    if isinstance(settings, Pretrain):
        return Size(None, longest, float(longest), 1.0, f"rows filled to {longest} tokens")
    unknown = Size(None, longest, float(longest), 1.0, f"{name} was not read; rows of max_length are taken")
    if sources.is_hub_name(name, beside) or _too_large(name, beside):
        return unknown
    try:
        lengths, learnt = _pairs(recipe, stage, beside) if isinstance(settings, Dpo) else _rows(recipe, stage, beside)
    except (DataError, UsageError):
        return unknown
    cut = [min(length, longest) for length in lengths]
    told = f"{len(lengths):,} rows of {name}, tokens counted by their characters"
    if getattr(settings, "packing", False):
        packed = -(-sum(cut) // longest)
        return Size(packed, longest, float(longest), learnt, f"{told}, packed")
    return Size(len(cut), max(cut), mean(cut), learnt, told)


def _rows(recipe: Recipe, stage: str, beside: Path) -> tuple[list[int], float]:
    found = conversations.load(recipe.data_of(stage), recipe.seed, beside).train
    lengths = [_tokens(item.messages) for item in found]
    if not getattr(recipe.stages[stage], "assistant_only_loss", True):
        return lengths, 1.0
    answers = [_tokens([m for m in item.messages if m["role"] == "assistant"]) for item in found]
    return lengths, sum(answers) / max(1, sum(lengths))


def _pairs(recipe: Recipe, stage: str, beside: Path) -> tuple[list[int], float]:
    from modelwright.data import preferences

    found = preferences.load(recipe.data_of(stage), recipe.seed, beside).train
    answers = [_tokens(pair.chosen) + _tokens(pair.rejected) for pair in found]
    lengths = [_tokens(pair.prompt) + answer for pair, answer in zip(found, answers, strict=True)]
    return lengths, sum(answers) / max(1, sum(lengths))


def _tokens(messages: Sequence[Message]) -> int:
    return round(sum(len(message["content"]) / CHARACTERS + AROUND for message in messages))


def _too_large(name: str, beside: Path) -> bool:
    path = sources.local_path(name, beside)
    return path is not None and path.is_file() and path.stat().st_size > LARGEST
