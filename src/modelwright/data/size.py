"""How much text a stage will see, by the characters of its rows: enough to plan with, before all of it is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import mean

from modelwright.data import conversations, shapes, sources
from modelwright.data.conversations import Message
from modelwright.data.pack import pack
from modelwright.errors import DataError, UsageError
from modelwright.recipe.schema import Classify, Dpo, Pretrain, Recipe

CHARACTERS = 4.4
"""Of English prose in a token, by the vocabularies of 49 to 128 thousand tokens we have counted."""
WORDS = 49_152
"""The smallest of those vocabularies; the tokens of a smaller one are shorter by the ratio of their logarithms."""
SAMPLE = 200
"""Messages that a tokenizer encodes to tell how many characters its tokens have."""
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


def size(recipe: Recipe, stage: str, beside: Path, tokenizer: Path | None = None) -> Size:
    """Look at the rows of a stage where they are at hand and small; else take rows as long as they may be.

    The tokenizer is a folder, where one stands already; without it, tokens are as long as its vocabulary makes them.
    """
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
        look = _pairs if isinstance(settings, Dpo) else _rows
        lengths, learnt = look(recipe, stage, beside, tokenizer)
    except (DataError, UsageError):
        return unknown
    cut = [min(length, longest) for length in lengths]
    told = f"{len(lengths):,} rows of {name}, tokens counted by their characters"
    if getattr(settings, "packing", False):
        packed = len(pack(cut, longest))
        return Size(packed, longest, sum(cut) / packed, learnt, f"{told}, packed")
    return Size(len(cut), max(cut), mean(cut), learnt, told)


def _rows(recipe: Recipe, stage: str, beside: Path, tokenizer: Path | None) -> tuple[list[int], float]:
    found = conversations.load(recipe.data_of(stage), recipe.seed, beside).train
    each = _characters(recipe, [message for item in found[:SAMPLE] for message in item.messages], tokenizer)
    lengths = [_tokens(item.messages, each) for item in found]
    if not getattr(recipe.stages[stage], "assistant_only_loss", True):
        return lengths, 1.0
    answers = [_tokens([m for m in item.messages if m["role"] == "assistant"], each) for item in found]
    return lengths, sum(answers) / max(1, sum(lengths))


def _pairs(recipe: Recipe, stage: str, beside: Path, tokenizer: Path | None) -> tuple[list[int], float]:
    from modelwright.data import preferences

    found = preferences.load(recipe.data_of(stage), recipe.seed, beside).train
    each = _characters(recipe, [message for pair in found[:SAMPLE] for message in pair.chosen], tokenizer)
    answers = [_tokens(pair.chosen, each) + _tokens(pair.rejected, each) for pair in found]
    lengths = [_tokens(pair.prompt, each) + answer for pair, answer in zip(found, answers, strict=True)]
    return lengths, sum(answers) / max(1, sum(lengths))


def _characters(recipe: Recipe, sample: Sequence[Message], tokenizer: Path | None) -> float:
    """How many characters of these messages make a token."""
    prepare = recipe.prepare
    if tokenizer is not None:
        from tokenizers import Tokenizer

        encoder, texts = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), [each["content"] for each in sample]
        tokens = sum(len(found.ids) for found in encoder.encode_batch(texts, add_special_tokens=False))
        return sum(map(len, texts)) / max(1, tokens)
    if prepare is not None and prepare.tokenizer == "train":
        return CHARACTERS * min(1.0, log(prepare.vocab_size) / log(WORDS))
    return CHARACTERS


def _tokens(messages: Sequence[Message], characters: float) -> int:
    return round(sum(len(message["content"]) / characters + AROUND for message in messages))


def _too_large(name: str, beside: Path) -> bool:
    path = sources.local_path(name, beside)
    return path is not None and path.is_file() and path.stat().st_size > LARGEST
