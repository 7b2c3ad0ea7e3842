"""Rows as the model will see them, piece by piece, and which pieces it learns to say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data.chat import Encoded, encode
from modelwright.data.conversations import Conversation
from modelwright.data.preferences import Pair, encode_pair
from modelwright.data.shards import Shards
from modelwright.data.tokenizer import Encoder

Piece = tuple[str, bool]
"""Text, and whether it is trained."""


@dataclass(frozen=True)
class Sample:
    """One row, rendered."""

    where: str
    """Where the row was found."""
    pieces: list[Piece]
    """Its text in stretches that are trained or not."""
    tokens: int
    """How many tokens it has."""
    trained: int
    """How many of them are trained."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {"where": self.where, "tokens": self.tokens, "trained_tokens": self.trained,
                "pieces": [{"text": text, "trained": trained} for text, trained in self.pieces]}  # fmt: skip


def show_conversations(items: Sequence[Conversation], tokenizer: Any, assistant_only: bool) -> list[Sample]:
    """Each conversation as the chat template writes it."""
    return [_sample(item.where, row, tokenizer) for item in items for row in encode(item, tokenizer, assistant_only)]


def show_pairs(items: Sequence[Pair], tokenizer: Any) -> list[Sample]:
    """Each pair as two rows: the prompt with the better answer, and with the worse."""
    samples = []
    for item in items:
        pair = encode_pair(item, tokenizer)
        for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            tokens = np.concatenate([pair.prompt, answer.tokens])
            trained = np.concatenate([np.zeros(len(pair.prompt), dtype=np.bool_), answer.trained])
            samples.append(_sample(f"{item.where} ({name})", Encoded(tokens, trained), tokenizer))
    return samples


def show_shards(folder: Path, count: int) -> list[Sample]:
    """Rows of packed shards; the first word of a document is read, all others are learnt."""
    shards, encoder = Shards.open(folder), Encoder.open(folder / "tokenizer")
    rows = np.unique(np.linspace(0, shards.rows() - 1, count).astype(np.int64))
    tokens, positions = shards.read(rows)
    return [
        _pieces(f"{folder.name} row {row}", line, place != 0, lambda ids: str(encoder.backend.decode(ids, False)))
        for row, line, place in zip(rows, tokens, positions, strict=True)
    ]


def _sample(where: str, row: Encoded, tokenizer: Any) -> Sample:
    return _pieces(where, row.tokens, row.trained, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))


def _pieces(where: str, tokens: Any, trained: Any, decode: Any) -> Sample:
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(tokens)]
    pieces = [(decode(tokens[start:stop].tolist()), bool(trained[start]))
              for start, stop in itertools.pairwise(edges) if stop > start]  # fmt: skip
    return Sample(where, pieces, len(tokens), int(trained.sum()))
