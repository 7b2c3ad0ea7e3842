"""Collate tokenized examples into the tensors of one forward pass: padded or packed rows, or one shared prefix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.data.chat_tokens import TokenizedRow
from modelwright.data.packing import cu_seqlens_from_positions, pack_bfd
from modelwright.data.sampler import epoch_rows
from modelwright.engine import precision
from modelwright.engine.task import MicroBatch, Task
from modelwright.errors import DataError, Problem
from modelwright.models.prefix_sharing import shared_prefix_layout
from modelwright.plan.stage import TARGET_STEPS
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import TrainingConfig
from modelwright.tasks.losses import IGNORE_INDEX


class MixtureTask(Task):
    """A task whose rows may come from the sources of a mixture, one source after the other."""

    data_config: DataConfig | None
    """Where the rows come from."""
    row_sources: Sequence[str]
    """The source of each training row."""
    held_out_set: Any
    """The tokenized held-out rows."""

    @property
    def source_weights(self) -> tuple[tuple[int, float], ...]:
        counts, weights = Counter(self.row_sources), self.data_config.weights if self.data_config else {}
        if dropped := [name for name in weights if not counts[name]]:
            raise DataError([Problem(dropped[0], "no row of it has a trained token within max_length")])
        return tuple((counts[name], weight) for name, weight in weights.items())

    @property
    def epoch_rows(self) -> int:
        strategy = self.data_config.stopping_strategy if self.data_config else None
        return epoch_rows(self.source_weights, strategy) if strategy else self.rows

    @property
    def held_out_sources(self) -> Mapping[str, int]:
        counts = Counter(row.source for row in self.held_out_set.rows)
        return {} if "" in counts else counts


def collate_examples(groups: Sequence[Sequence[TokenizedRow]]) -> MicroBatch:
    """Collate examples in rows of equal length, one group per row (see `collate_rows`)."""
    examples = [example for group in groups for example in group]
    numbers, lengths = iter(range(len(examples))), [len(example) for example in examples]
    return collate_rows(layout_rows([[next(numbers) for _ in group] for group in groups], lengths), examples)


CPU_ALIGNMENT = 16
"""Row length multiple for partly frozen models on a CPU: attention adds up the tail of a row that fills no vector in
another order, and a cached hidden state must be the one that any batch would give."""
MIN_SHARED_PREFIX = 16
"""Shorter shared prefixes are not worth a mask."""
MAX_MASKED_ROW = 1536
"""Longest row with a shared prefix and a mask, which grows with the square of the length."""
MAX_PACKED_LENGTHS = 16
"""Number of different lengths of packed rows when layers are compiled: rows are nearly full, so that mostly it is one,
and recompiling for another takes twice the time of the first compilation."""
NO_ROW_LIMIT = math.inf
"""Longest row with varlen attention, which needs no mask: one row holds all examples."""


@dataclass(frozen=True)
class TokenSpan:
    """Tokens start:stop of an example, in a row."""

    example: int
    start: int
    stop: int


RowLayout = Sequence[Sequence[TokenSpan]]


def pack_by_source(examples: Sequence[TokenizedRow], length: int, data: DataConfig | None) -> list[list[int]]:
    """Packs of examples by index; of a mixture with weights each source by itself: its weight is of packed rows."""
    names = data.weights if data else {}
    sources = [[row for row, example in enumerate(examples) if example.source == name] for name in names]
    return [[rows[member] for member in pack] for rows in sources or [list(range(len(examples)))]
            for pack in pack_bfd([len(examples[row]) for row in rows], length)]  # fmt: skip


def row_multiple(settings: TrainingConfig) -> int:
    """Multiple of every row length that the precision needs."""
    return precision.FP8_ALIGNMENT if settings.precision == "fp8" else 1


def packed_row_multiple(settings: TrainingConfig, length: int, on_gpu: bool = False) -> int:
    """The same for packed rows; with layers that are or may be compiled only a few lengths occur."""
    alignment = row_multiple(settings)
    is_compiled = settings.torch_compile is True or settings.precision == "fp8" or on_gpu
    return alignment * math.ceil(length / (MAX_PACKED_LENGTHS * alignment)) if is_compiled else alignment


def shared_prefix_length(examples: Sequence[TokenizedRow]) -> int:
    """Tokens that all examples begin with, none of which predicts a trained token; 0 if sharing would not pay."""
    if len(examples) < 2:
        return 0
    first = examples[0].input_ids
    # the token before the first trained one predicts it; where the first token is trained, nothing is shared
    shared = max(0, min(len(first), min(int(np.flatnonzero(example.loss_mask)[0]) for example in examples) - 1))
    for example in examples[1:]:
        shared = min(shared, len(example))
        differ = np.flatnonzero(example.input_ids[:shared] != first[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared if shared >= MIN_SHARED_PREFIX else 0


def layout_rows(packs: Sequence[Sequence[int]], lengths: Sequence[int]) -> RowLayout:
    """Each pack of examples in one row, one after the other; lengths: of all examples."""
    return [[TokenSpan(number, 0, lengths[number]) for number in pack] for pack in packs]


def layout_shared_prefix(
    prefix_length: int, numbers: Sequence[int], lengths: Sequence[int], max_row_length: float = MAX_MASKED_ROW
) -> RowLayout:
    """Examples after their shared prefix, which stands once in each row; as few rows of even length as possible."""
    tokens = sum(lengths[number] - prefix_length for number in numbers)
    tokens_per_row = tokens / shared_prefix_rows(prefix_length, tokens, max_row_length)
    rows: list[list[TokenSpan]] = []
    filled = 0
    for number in numbers:
        if not rows or filled >= tokens_per_row:
            rows.append([TokenSpan(number, 0, prefix_length)])
            filled = 0
        rows[-1].append(TokenSpan(number, prefix_length, lengths[number]))
        filled += lengths[number] - prefix_length
    return rows


def layout_packs(
    packs: Sequence[Sequence[int]], lengths: Sequence[int], prefix_length: int, use_varlen_prefix: bool
) -> RowLayout:
    """Packs of examples as rows, or after their shared prefix if there is one."""
    if not prefix_length:
        return layout_rows(packs, lengths)
    numbers = [number for pack in packs for number in pack]
    return layout_shared_prefix(prefix_length, numbers, lengths, max_prefix_row(use_varlen_prefix))


def max_prefix_row(use_varlen_prefix: bool) -> float:
    """Longest row with a shared prefix."""
    return NO_ROW_LIMIT if use_varlen_prefix else MAX_MASKED_ROW


def shared_prefix_rows(prefix_length: int, tokens: float, max_row_length: float = MAX_MASKED_ROW) -> int:
    """Number of rows for this many tokens after a shared prefix."""
    return max(1, math.ceil(tokens / (max(max_row_length, 2 * prefix_length) - prefix_length)))


def collate_rows(
    rows: RowLayout,
    examples: Sequence[TokenizedRow],
    prefix_length: int = 0,
    multiple: int = 1,
    pad_loss_positions: bool = False,
) -> MicroBatch:
    """Tokens, position ids and loss positions of rows of equal length; cu_seqlens if packed, segment_ids with a prefix.

    Positions restart with each example, which separates packed examples; padding is on the right, where no real token
    attends to it, so no mask is needed. After a shared prefix (segment 0) each example is a segment, from which a mask
    is built. pad_loss_positions rounds their number up to `multiple` too: the extra ones predict IGNORE_INDEX, which
    only works if the model does not read the tokens (cached hidden states).
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
            predicting = np.flatnonzero(example.loss_mask[span.start + 1 : span.stop])
            positions_by_span.append(number * length + start + predicting)
            start = stop
        positions[number, start:] = np.arange(length - start)
        segment_ids[number, start:] = len(row)
    loss_positions = np.concatenate(positions_by_span) if positions_by_span else np.zeros(0, dtype=np.int64)
    trained_tokens = len(loss_positions)
    if pad_loss_positions:
        tokens[-1, -1] = IGNORE_INDEX
        extra = np.full(-trained_tokens % multiple, tokens.size - 2, dtype=np.int64)
        loss_positions = np.concatenate([loss_positions, extra])
    inputs = {"tokens": tokens, "positions": positions, "loss_positions": loss_positions}
    if prefix_length:
        inputs["segment_ids"] = segment_ids
    elif any(len(row) > 1 for row in rows):
        inputs["cu_seqlens"] = cu_seqlens_from_positions(positions)
    token_count = sum(span.stop for row in rows for span in row if span.start or not prefix_length)
    return MicroBatch(as_tensors(inputs), trained_tokens, token_count)


def collate_flat(examples: Sequence[TokenizedRow], size: tuple[int, int], max_length: int) -> MicroBatch:
    """Examples end to end in one row of so many tokens and targets; padding is a further document, or several."""
    lengths = [len(example) for example in examples]
    padding = size[0] - sum(lengths)
    ends = np.cumsum([*lengths, *split_padding(padding, max_length)])
    tokens = np.concatenate([*(example.input_ids for example in examples), np.zeros(padding)]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    positions = np.arange(size[0]) - np.repeat(starts, np.diff(ends, prepend=0))
    predicting = [start + np.flatnonzero(each.loss_mask[1:]) for start, each in zip(starts, examples, strict=False)]
    inputs = {
        "tokens": tokens[None],
        "positions": positions[None],
        "loss_positions": np.concatenate(predicting),
        "cu_seqlens": np.concatenate([[0], ends]).astype(np.int32),
    }
    return pad_targets(MicroBatch(as_tensors(inputs), len(inputs["loss_positions"]), sum(lengths)), size[1])


def split_padding(padding: int, max_length: int) -> list[int]:
    """Padding as documents of at most this length."""
    return [*[max_length] * (padding // max_length), *([rest] if (rest := padding % max_length) else [])]


def pad_targets(batch: MicroBatch, count: int) -> MicroBatch:
    """The same batch with so many loss positions and their targets, which are IGNORE_INDEX at further positions."""
    tokens, positions = batch.inputs["tokens"].flatten(), batch.inputs["loss_positions"]
    further = count - len(positions)
    targets = torch.cat([tokens[positions + 1], tokens.new_full((further,), IGNORE_INDEX)])
    # each only once: the backward pass adds up what has the same position
    positions = torch.cat([positions, torch.arange(further) % len(tokens)])
    return replace(batch, inputs={**batch.inputs, "loss_positions": positions, "targets": targets})


def round_targets(batch: MicroBatch) -> MicroBatch:
    """The same batch with one of TARGET_STEPS numbers of targets."""
    multiple = -(-batch.inputs["tokens"].numel() // TARGET_STEPS)
    return pad_targets(batch, max(1, -(-len(batch.inputs["loss_positions"]) // multiple)) * multiple)


def as_tensors(inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Tensor]:
    """Arrays as tensors of the same memory."""
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


def has_next_token(positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where the next token belongs to the same document: [rows, length] bool."""
    mask = np.zeros(positions.shape, dtype=np.bool_)
    mask[:, :-1] = positions[:, 1:] != 0
    return mask


def to_varlen(batch: MicroBatch) -> MicroBatch:
    """The same batch for varlen attention (the tensors of a layout) instead of a mask."""
    inputs = dict(batch.inputs)
    layout = shared_prefix_layout(inputs.pop("segment_ids"))._asdict()
    return replace(
        batch, inputs={**inputs, **{name: each for name, each in layout.items() if isinstance(each, Tensor)}}
    )


def cache_index_of(
    rows: RowLayout, offsets: Sequence[int], shape: Sequence[int], prefix_length: int = 0
) -> np.ndarray[Any, Any]:
    """Index of each token's cached hidden state: [rows, length]; offsets: index of the first token of each example."""
    cache_index = np.zeros(tuple(shape), dtype=np.int64)
    for number, row in enumerate(rows):
        start = 0
        for span in row:
            stop = start + span.stop - span.start
            first = 0 if prefix_length and not span.start else offsets[span.example] + span.start
            cache_index[number, start:stop] = np.arange(first, first + stop - start)
            start = stop
    return cache_index
