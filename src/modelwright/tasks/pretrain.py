"""Pretraining: next-token prediction over rows of packed shards, with an optional sequence-length curriculum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelwright.data.packing import cu_seqlens_from_positions
from modelwright.data.shards import PackedDataset
from modelwright.engine.task import MicroBatch, Task
from modelwright.models.attention import base_outputs
from modelwright.recipe.stage_specs import PretrainConfig
from modelwright.tasks.batching import as_tensors, has_next_token, row_multiple
from modelwright.tasks.losses import IGNORE_INDEX, RouterLoss, lm_head_loss


class PretrainLoss(nn.Module):
    """A language model whose forward returns the loss summed over tokens, and the same in bits per byte of text."""

    def __init__(self, model: Any, tokens_per_byte: float, router_aux_loss_coef: float | None = 0.0) -> None:
        super().__init__()
        self.model, self.router_loss = model, RouterLoss(model, router_aux_loss_coef)
        self._bits = tokens_per_byte / math.log(2.0)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """tokens, positions, targets: [rows, length] int64. Returns [loss, loss in bits times tokens per byte].

        targets: the next token, or IGNORE_INDEX, which keeps shapes the same from step to step; cu_seqlens: starts of
        the documents in the flattened rows, if a row holds several.
        """
        outputs = base_outputs(self.model, tokens, positions, cu_seqlens=cu_seqlens, **self.router_loss.options)
        loss_sum = lm_head_loss(self.model, outputs[0].flatten(0, 1), targets.flatten())
        sums = torch.stack((loss_sum, loss_sum.detach() * self._bits))
        if not self.router_loss.coef:
            return sums
        # rows are full but for the padding of fp8
        return self.router_loss.add(sums, outputs, torch.ones_like(tokens), (targets != IGNORE_INDEX).sum())


class PretrainTask(Task):
    """Rows of packed shards.

    Rows are numbered at max_length: while the sequence-length curriculum asks for shorter rows, each is split into
    several, so that a step holds the same tokens in the same order at any length.
    """

    metric_names: tuple[str, ...] = ("loss", "bits_per_byte")

    def __init__(self, model: Any, train: PackedDataset, held_out: PackedDataset, settings: PretrainConfig) -> None:
        self._train, self._held_out, self._settings = train, held_out, settings
        eval_shards = held_out if held_out.tokens else train
        tokens_per_byte = eval_shards.tokens / max(1, eval_shards.text_bytes)
        loss_module = PretrainLoss(model, tokens_per_byte, settings.router_aux_loss_coef)
        self.module: nn.Module = loss_module
        self.metric_names = (*self.metric_names, *loss_module.router_loss.metric_names)
        self._steps = 0

    def set_total_steps(self, steps: int) -> None:
        """They decide when the rows grow."""
        self._steps = steps

    @property
    def rows(self) -> int:
        return self._train.rows(self._settings.max_length)

    @property
    def held_out_rows(self) -> int:
        return self._held_out.rows(self._settings.max_length)

    @property
    def source_weights(self) -> tuple[tuple[int, float], ...]:
        weights: dict[str, float] = self._train.manifest.get("weights") or {}
        sources = self._train.sources(self._settings.max_length) if weights else []
        return tuple((source.rows, weights[source.name]) for source in sources)

    def row_length(self, row: int) -> int:
        """All rows are full."""
        return self._settings.max_length

    def batch(self, rows: Sequence[int], step: int = 0) -> MicroBatch:
        return self._read(self._train, rows, self._settings.sequence_length_at(step, self._steps))

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        return self._read(self._held_out, rows, self._settings.max_length)

    def _read(self, shards: PackedDataset, rows: Sequence[int], length: int) -> MicroBatch:
        parts = self._settings.max_length // length
        numbers = (np.asarray(rows, dtype=np.int64)[:, None] * parts + np.arange(parts)).ravel()
        blank = np.zeros((1, length), dtype=np.int64)
        tokens, positions = shards.get_rows(numbers, length) if len(numbers) else (blank, blank)
        return collate_packed(tokens, positions, numbers.size * length, row_multiple(self._settings))


def collate_packed(
    tokens: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], count: int, multiple: int = 1
) -> MicroBatch:
    """Next-token targets within each document of [rows, length] tokens, padded to a multiple of this length."""
    if padding := -tokens.shape[1] % multiple:
        tokens, positions = (np.pad(each, ((0, 0), (0, padding))) for each in (tokens, positions))
    has_next = has_next_token(positions)
    targets = np.where(has_next, np.roll(tokens, -1, axis=1), IGNORE_INDEX)
    inputs = {"tokens": tokens, "positions": positions, "targets": targets}
    if (positions[:, 1:] == 0).any():
        inputs["cu_seqlens"] = cu_seqlens_from_positions(positions)
    return MicroBatch(as_tensors(inputs), int(has_next.sum()), count)
