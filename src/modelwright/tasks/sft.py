"""Supervised fine-tuning: the model learns to say what the assistant said, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelwright.data.chat import Encoded, EncodedSet, encode_all
from modelwright.data.conversations import Conversations
from modelwright.data.pack import pack
from modelwright.engine.task import Batch
from modelwright.models.text import hidden_states, logits_of
from modelwright.recipe.schema import Sft
from modelwright.tasks.losses import summed_cross_entropy


class AnswerLoss(nn.Module):
    """A language model whose forward gives the loss summed over trained tokens.

    The head runs only where a token is trained: on a chat with short answers that is a third of the logits.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, learnt: Tensor) -> Tensor:
        """tokens, positions: [rows, length] int64; learnt: [count] int64, flat places whose next token is trained."""
        hidden = hidden_states(self.model, tokens, positions)
        logits = logits_of(self.model, hidden.flatten(0, 1)[learnt])
        return summed_cross_entropy(logits, tokens.flatten()[learnt + 1])


class SftTask:
    """Conversations as rows, packed or padded."""

    measures: tuple[str, ...] = ("loss",)

    def __init__(self, model: Any, tokenizer: Any, data: Conversations, settings: Sft, stops: Collection[int]) -> None:
        self.module: nn.Module = AnswerLoss(model)
        self.train_set = self._encode(data.train, tokenizer, settings, stops)
        self.held_out_set = self._encode(data.held_out, tokenizer, settings, stops) if data.held_out else EncodedSet()
        lengths = [len(row) for row in self.train_set.rows]
        self._groups = (
            pack(lengths, settings.max_length) if settings.packing else [[row] for row in range(len(lengths))]
        )

    @staticmethod
    def _encode(conversations: Any, tokenizer: Any, settings: Sft, stops: Collection[int]) -> EncodedSet:
        return encode_all(conversations, tokenizer, settings.max_length, settings.assistant_only_loss, stops)

    @property
    def rows(self) -> int:
        return len(self._groups)

    @property
    def held_out_rows(self) -> int:
        return len(self.held_out_set.rows)

    def batch(self, rows: Sequence[int], step: int = 0) -> Batch:
        return collate([[self.train_set.rows[member] for member in self._groups[row]] for row in rows])

    def held_out_batch(self, rows: Sequence[int]) -> Batch:
        return collate([[self.held_out_set.rows[row]] for row in rows])

    def length(self, row: int) -> int:
        """Tokens in a row, all its documents counted."""
        return sum(len(self.train_set.rows[member]) for member in self._groups[row])


def collate(groups: Sequence[Sequence[Encoded]]) -> Batch:
    """Lay documents out in rows of equal length: [rows, length].

    Positions begin anew with each document, which keeps packed documents apart; padding stands to the right, where
    no real token can see it, so that no mask is needed.
    """
    length = max((sum(len(document) for document in group) for group in groups), default=2)
    tokens = np.zeros((max(1, len(groups)), length), dtype=np.int64)
    positions = np.zeros_like(tokens)
    learnt: list[np.ndarray[Any, Any]] = []
    for row, group in enumerate(groups):
        start = 0
        for document in group:
            stop = start + len(document)
            tokens[row, start:stop] = document.tokens
            positions[row, start:stop] = np.arange(len(document))
            learnt.append(row * length + start + np.flatnonzero(document.trained[1:]))
            start = stop
        positions[row, start:] = np.arange(length - start)
    places = np.concatenate(learnt) if learnt else np.zeros(0, dtype=np.int64)
    return Batch(
        inputs={
            name: torch.from_numpy(value)
            for name, value in (("tokens", tokens), ("positions", positions), ("learnt", places))
        },
        trained=len(places),
        tokens=sum(len(document) for group in groups for document in group),
    )
