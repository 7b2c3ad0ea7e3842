"""Pretraining: the model learns to go on with any text, in rows that may be short at first and grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelwright.data.pack import document_starts
from modelwright.data.shards import Shards
from modelwright.engine.task import Batch
from modelwright.models.text import hidden_states
from modelwright.recipe.schema import Pretrain
from modelwright.tasks.layout import multiple_of
from modelwright.tasks.losses import IGNORED
from modelwright.tasks.sft import answer_loss


class TextLoss(nn.Module):
    """A language model whose forward gives the loss summed over tokens, and the same in bits per byte of text."""

    def __init__(self, model: Any, tokens_per_byte: float) -> None:
        super().__init__()
        self.model = model
        self._bits = tokens_per_byte / math.log(2.0)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens, positions, targets: [rows, length] int64. Returns [loss, loss in bits times tokens per byte].

        targets: the token that comes next, IGNORED where none does: the shapes stay the same from step to step.
        documents: where documents begin in the flattened rows, where some row holds several.
        """
        hidden = hidden_states(self.model, tokens, positions, documents=documents)
        summed = answer_loss(self.model, hidden.flatten(0, 1), targets.flatten())
        return torch.stack((summed, summed.detach() * self._bits))


class PretrainTask:
    """Rows of packed shards.

    A row is numbered at max_length whatever length it is shown at: while the curriculum asks for shorter rows, each
    is laid out as several, so that a step holds the same tokens in the same order at any length.
    """

    measures: tuple[str, ...] = ("loss", "bits_per_byte")

    def __init__(self, model: Any, train: Shards, held_out: Shards, settings: Pretrain) -> None:
        self._train, self._held_out, self._settings = train, held_out, settings
        measured = held_out if held_out.tokens else train
        self.module: nn.Module = TextLoss(model, measured.tokens / max(1, measured.text_bytes))
        self._steps = 0

    def planned(self, steps: int) -> None:
        """How many steps there will be, which decides when the rows grow."""
        self._steps = steps

    @property
    def rows(self) -> int:
        return self._train.rows(self._settings.max_length)

    @property
    def held_out_rows(self) -> int:
        return self._held_out.rows(self._settings.max_length)

    @property
    def mixture(self) -> list[tuple[int, float]]:
        """Rows and weight of each source, where the recipe mixes several."""
        weights: dict[str, float] = self._train.manifest.get("weights") or {}
        sources = self._train.sources(self._settings.max_length) if weights else []
        return [(source.rows, weights[source.name]) for source in sources]

    def length(self, row: int) -> int:
        """Every row is full."""
        return self._settings.max_length

    def batch(self, rows: Sequence[int], step: int = 0) -> Batch:
        return self._read(self._train, rows, self._settings.length_at(step, self._steps))

    def held_out_batch(self, rows: Sequence[int]) -> Batch:
        return self._read(self._held_out, rows, self._settings.max_length)

    def _read(self, shards: Shards, rows: Sequence[int], length: int) -> Batch:
        parts = self._settings.max_length // length
        numbers = (np.asarray(rows, dtype=np.int64)[:, None] * parts + np.arange(parts)).ravel()
        blank = np.zeros((1, length), dtype=np.int64)
        tokens, positions = shards.read(numbers, length) if len(numbers) else (blank, blank)
        return lay_out(tokens, positions, numbers.size * length, multiple_of(self._settings))


def lay_out(tokens: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], count: int, multiple: int = 1) -> Batch:
    """A batch in which each token is foretold from those before it in its document. tokens: [rows, length].

    Rows are padded to a multiple of this length by documents of one token, of which nothing is foretold.
    """
    if short := -tokens.shape[1] % multiple:
        tokens, positions = (np.pad(each, ((0, 0), (0, short))) for each in (tokens, positions))
    # the first word of a document has nothing before it, and the last place of a row nothing after it
    follows = np.zeros(tokens.shape, dtype=np.bool_)
    follows[:, :-1] = positions[:, 1:] != 0
    targets = np.full_like(tokens, IGNORED)
    targets[:, :-1][follows[:, :-1]] = tokens[:, 1:][follows[:, :-1]]
    inputs = {"tokens": tokens, "positions": positions, "targets": targets}
    if (positions[:, 1:] == 0).any():
        inputs["documents"] = document_starts(positions)
    return Batch({name: torch.from_numpy(value) for name, value in inputs.items()}, int(follows.sum()), count)
