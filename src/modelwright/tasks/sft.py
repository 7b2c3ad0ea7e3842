"""Supervised fine-tuning: the model learns to say what the assistant said, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelwright.data.chat import Encoded, EncodedSet, encode_all
from modelwright.data.conversations import Conversations
from modelwright.data.pack import pack
from modelwright.engine.task import Batch
from modelwright.models import attention
from modelwright.models.attention import Paths
from modelwright.models.branches import branch_mask, takes_paths, why_not
from modelwright.models.text import bare, hidden_states, logits_of, plain_head
from modelwright.models.trunk import Trunk
from modelwright.recipe.schema import Sft
from modelwright.tasks.head_loss import summed_head_loss
from modelwright.tasks.kept import KeptStates
from modelwright.tasks.layout import (
    ALIGNED,
    LONGEST_SHARED_ROW,
    UNMASKED,
    behind,
    lay_out,
    multiple_of,
    packed_multiple_of,
    shared_beginning,
    side_by_side,
    without_mask,
)
from modelwright.tasks.losses import summed_cross_entropy


class AnswerLoss(nn.Module):
    """A language model whose forward gives the loss summed over trained tokens.

    The head runs only where a token is trained: on a chat with short answers that is a third of the logits.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.kept: KeptStates | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        learnt: Tensor,
        branches: Tensor | None = None,
        places: Tensor | None = None,
        states: Tensor | None = None,
        documents: Tensor | None = None,
        **paths: Tensor,
    ) -> Tensor:
        """tokens, positions: [rows, length] int64; learnt: [count] int64, flat places whose next token is trained.

        branches: [rows, length] int64, behind a shared beginning; paths: keys and starts, where attention needs no
        mask for that; documents: [count + 1] int32, where they begin in the
        flattened rows, if a row holds several. What the frozen layers say is taken from `states`,
        [rows, length, width], or from the kept ones by their `places`, [rows, length] int64, where they are given.
        """
        if places is not None:
            assert self.kept is not None and self.kept.states is not None
            states = self.kept.states[places]
        between = Paths(paths["keys"], paths["starts"]) if paths else documents
        if states is not None:
            assert self.kept is not None
            hidden = self.kept.trunk.above(states, positions, branches, between)
        else:
            mask = None if branches is None else branch_mask(self.model, positions, branches)
            hidden = hidden_states(self.model, tokens, positions, mask, between)
        return answer_loss(self.model, hidden.flatten(0, 1)[learnt], tokens.flatten()[learnt + 1])


def answer_loss(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss summed over places. hidden: [places, width]; targets: [places] int64, the token that comes next."""
    head = plain_head(model)
    if head is not None:
        return summed_head_loss(hidden, head, targets)
    return summed_cross_entropy(logits_of(model, hidden), targets)


class SftTask:
    """Conversations as rows, packed or padded, or behind the beginning that all of them share."""

    measures: tuple[str, ...] = ("loss",)

    def __init__(self, model: Any, tokenizer: Any, data: Conversations, settings: Sft, stops: Collection[int]) -> None:
        self.answers = AnswerLoss(model)
        self.module: nn.Module = self.answers
        self.train_set = self._encode(data.train, tokenizer, settings, stops)
        self.held_out_set = self._encode(data.held_out, tokenizer, settings, stops) if data.held_out else EncodedSet()
        self.documents: list[Encoded] = [*self.train_set.rows, *self.held_out_set.rows]
        lengths = [len(row) for row in self.train_set.rows]
        self._groups = (
            pack(lengths, settings.max_length) if settings.packing else [[row] for row in range(len(lengths))]
        )
        self.beginning = shared_beginning(self.documents) if settings.share_prefix else 0
        if self.beginning and why_not(model):
            self.beginning = 0
        self.paths = self.beginning > 0 and _needs_no_mask(model, settings)
        least = packed_multiple_of(settings, settings.max_length) if settings.packing else multiple_of(settings)
        self._multiple = ALIGNED if settings.trainable.partial else least

    @staticmethod
    def _encode(conversations: Any, tokenizer: Any, settings: Sft, stops: Collection[int]) -> EncodedSet:
        return encode_all(conversations, tokenizer, settings, stops)

    @property
    def rows(self) -> int:
        return len(self._groups)

    @property
    def held_out_rows(self) -> int:
        return len(self.held_out_set.rows)

    def keep(self, trunk: Trunk, device: torch.device) -> KeptStates:
        """From now on take what the trunk says from kept states, which the caller fills."""
        self.answers.kept = KeptStates(trunk, self.documents, self.beginning, device, self.paths)
        return self.answers.kept

    def batch(self, rows: Sequence[int], step: int = 0) -> Batch:
        return self._lay_out([self._groups[row] for row in rows])

    def held_out_batch(self, rows: Sequence[int]) -> Batch:
        return self._lay_out([[len(self.train_set.rows) + row] for row in rows])

    def length(self, row: int) -> int:
        """Tokens in a row, all its documents counted."""
        return sum(len(self.train_set.rows[member]) for member in self._groups[row])

    def _lay_out(self, groups: Sequence[Sequence[int]]) -> Batch:
        if self.beginning:
            longest = UNMASKED if self.paths else LONGEST_SHARED_ROW
            rows = behind(self.beginning, [member for group in groups for member in group], self.documents, longest)
        else:
            rows = side_by_side(groups, self.documents)
        if self.answers.kept is not None:
            return self.answers.kept.batch(rows)
        batch = lay_out(rows, self.documents, self.beginning, self._multiple)
        return without_mask(batch) if self.paths else batch


def _needs_no_mask(model: Any, settings: Sft) -> bool:
    """Whether attention may be told by paths what rows share; on a processor our own is taken on for that."""
    inner = bare(model)
    if next(inner.parameters()).is_cuda:
        return settings.precision != "fp32" and takes_paths(model)
    if inner.config._attn_implementation != "sdpa" or settings.torch_compile:
        return False
    attention.install(inner)
    if takes_paths(model):
        return True
    inner.set_attn_implementation("sdpa")
    return False


def collate(groups: Sequence[Sequence[Encoded]]) -> Batch:
    """Lay documents out in rows of equal length, each group in a row of its own (see `lay_out`)."""
    documents = [document for group in groups for document in group]
    numbers = iter(range(len(documents)))
    return lay_out(side_by_side([[next(numbers) for _ in group] for group in groups], documents), documents)
