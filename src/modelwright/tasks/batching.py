"""Collate tokenized examples into the tensors of one forward pass: packed rows, or rows with one shared prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from modelwright.data.chat import TokenizedRow
from modelwright.data.packing import cu_seqlens_from_positions
from modelwright.engine import precision
from modelwright.engine.task import MicroBatch
from modelwright.models.prefix_sharing import (
    shared_prefix_layout,
)
from modelwright.recipe.schema import TrainingConfig
from modelwright.tasks.losses import IGNORE_INDEX


def collate_examples(groups: Sequence[Sequence[TokenizedRow]]) -> MicroBatch:
    """Lay documents out in rows of equal length, each group in a row of its own (see `lay_out`)."""
    examples = [example for group in groups for example in group]
    numbers = iter(range(len(examples)))
    return collate_rows(layout_rows([[next(numbers) for _ in group] for group in groups], examples), examples)


CPU_ALIGNMENT = 16
"""Rows of frozen models are padded to a multiple of this: attention on a CPU adds up the tail of a row that fills no
whole vector in another order, and a kept state must be the one that any batch would give."""
MIN_SHARED_PREFIX = 16
"""A shared beginning of fewer tokens is not worth a mask."""
MAX_MASKED_ROW = 1536
"""Tokens in a row behind a shared beginning; its mask grows with the square."""
MAX_PACKED_LENGTHS = 16
"""Lengths in which packed rows come where layers are compiled: rows are nearly full, so that mostly it is one, and no
layer is compiled again for another, which takes twice the seconds of the first time."""
NO_ROW_LIMIT = math.inf
"""The same where attention needs no mask: then one row holds all."""


@dataclass(frozen=True)
class TokenSpan:
    """A part of a document in a row."""

    example: int
    """Which document."""
    start: int
    """Its first token here."""
    stop: int
    """The token after its last one here."""


RowLayout = Sequence[Sequence[TokenSpan]]


def row_multiple(settings: TrainingConfig) -> int:
    """What the length of every row must be a multiple of for the arithmetic that is asked for."""
    return precision.FP8_ALIGNMENT if settings.precision == "fp8" else 1


def packed_row_multiple(settings: TrainingConfig, length: int) -> int:
    """The same for rows that are packed up to a length; where layers are compiled, only few lengths come of it."""
    alignment = row_multiple(settings)
    is_compiled = settings.torch_compile or settings.precision == "fp8"
    return alignment * math.ceil(length / (MAX_PACKED_LENGTHS * alignment)) if is_compiled else alignment


def shared_prefix_length(examples: Sequence[TokenizedRow]) -> int:
    """How many tokens all documents begin with, none of which foretells a trained one; 0 where it would not pay."""
    if len(examples) < 2:
        return 0
    first = examples[0].input_ids
    shared = min(len(first), min(int(np.flatnonzero(example.loss_mask)[0]) for example in examples) - 1)
    for example in examples[1:]:
        shared = min(shared, len(example))
        differ = np.flatnonzero(example.input_ids[:shared] != first[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared if shared >= MIN_SHARED_PREFIX else 0


def layout_rows(groups: Sequence[Sequence[int]], examples: Sequence[TokenizedRow]) -> RowLayout:
    """Each group of documents in a row of its own, one document after the other."""
    return [[TokenSpan(number, 0, len(examples[number])) for number in group] for group in groups]


def layout_shared_prefix(
    prefix_length: int, numbers: Sequence[int], examples: Sequence[TokenizedRow], max_row_length: float = MAX_MASKED_ROW
) -> RowLayout:
    """Documents behind their shared beginning, which stands once in each of as few even rows as their lengths allow."""
    lengths = [len(examples[number]) - prefix_length for number in numbers]
    tokens_per_row = sum(lengths) / shared_prefix_rows(prefix_length, sum(lengths), max_row_length) if lengths else 0
    rows: list[list[TokenSpan]] = []
    filled = 0
    for number, length in zip(numbers, lengths, strict=True):
        if not rows or filled >= tokens_per_row:
            rows.append([TokenSpan(number, 0, prefix_length)])
            filled = 0
        rows[-1].append(TokenSpan(number, prefix_length, prefix_length + length))
        filled += length
    return rows


def shared_prefix_rows(prefix_length: int, tokens: float, max_row_length: float = MAX_MASKED_ROW) -> int:
    """Rows that so many tokens take behind a shared beginning."""
    return max(1, math.ceil(tokens / (max(max_row_length, 2 * prefix_length) - prefix_length)))


def collate_rows(
    rows: RowLayout,
    examples: Sequence[TokenizedRow],
    prefix_length: int = 0,
    multiple: int = 1,
    pad_loss_positions: bool = False,
) -> MicroBatch:
    """Rows of equal length: tokens, positions, learnt places, and branches where a beginning is shared.

    Positions begin anew with each document, which keeps packed documents apart; padding stands to the right, where
    no real token can see it, so that no mask is needed. Behind a shared beginning (branch 0) each document has its own
    branch, and a mask is made of the branches. With `spare`, the number of learnt places is such a multiple too: those
    that are too many are followed by no token, which only a model that is not given the tokens can take.
    """
    max_tokens = max((sum(span.stop - span.start for span in row) for row in rows), default=2)
    length = -(-(max_tokens + 2 * pad_loss_positions) // multiple) * multiple
    tokens = np.zeros((max(1, len(rows)), length), dtype=np.int64)
    positions, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    positions_by_span: list[np.ndarray[Any, Any]] = []
    for number, row in enumerate(rows):
        start = 0
        for segment, span in enumerate(row):
            example, stop = examples[span.example], start + span.stop - span.start
            tokens[number, start:stop] = example.input_ids[span.start : span.stop]
            positions[number, start:stop] = np.arange(span.start, span.stop)
            segment_ids[number, start:stop] = segment
            positions_by_span.append(
                number * length + start + np.flatnonzero(example.loss_mask[span.start + 1 : span.stop])
            )
            start = stop
        positions[number, start:] = np.arange(length - start)
        segment_ids[number, start:] = len(row)
    loss_positions = np.concatenate(positions_by_span) if positions_by_span else np.zeros(0, dtype=np.int64)
    trained_tokens = len(loss_positions)
    if pad_loss_positions:
        tokens[-1, -1] = IGNORE_INDEX
        loss_positions = np.concatenate(
            [loss_positions, np.full(-trained_tokens % multiple, tokens.size - 2, dtype=np.int64)]
        )
    inputs = {"tokens": tokens, "positions": positions, "loss_positions": loss_positions}
    if prefix_length:
        inputs["segment_ids"] = segment_ids
    elif any(len(row) > 1 for row in rows):
        inputs["cu_seqlens"] = cu_seqlens_from_positions(positions)
    token_count = sum(len(examples[span.example]) for row in rows for span in row if span.start or not prefix_length)
    return MicroBatch(
        inputs={name: torch.from_numpy(value) for name, value in inputs.items()},
        trained_tokens=trained_tokens,
        tokens=token_count,
    )


def to_varlen(batch: MicroBatch) -> MicroBatch:
    """The same batch for attention that is told by paths who sees whom."""
    inputs = dict(batch.inputs)
    kv_index, cu_seqlens_qk, _ = shared_prefix_layout(inputs.pop("segment_ids"))
    return replace(batch, inputs={**inputs, "kv_index": kv_index, "cu_seqlens_qk": cu_seqlens_qk})


def cache_index_of(
    rows: RowLayout, offsets: Sequence[int], shape: Sequence[int], prefix_length: int = 0
) -> np.ndarray[Any, Any]:
    """Where the state of each place is kept: [rows, length] int64; padding takes any.

    starts: for each document, where its first token would stand; a shared beginning stands before all of them.
    """
    cache_index = np.zeros(tuple(shape), dtype=np.int64)
    for number, row in enumerate(rows):
        start = 0
        for span in row:
            stop = start + span.stop - span.start
            first = 0 if prefix_length and not span.start else offsets[span.example] + span.start
            cache_index[number, start:stop] = np.arange(first, first + stop - start)
            start = stop
    return cache_index
