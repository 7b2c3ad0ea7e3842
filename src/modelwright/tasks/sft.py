"""Supervised fine-tuning: next-token loss on the assistant's tokens, and the computation it can reuse (frozen layers, shared prefix)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelwright.data.chat import ConversationDataset, TokenizedDataset, TokenizedRow, tokenize_conversations
from modelwright.data.packing import pack_bfd
from modelwright.engine.task import MicroBatch
from modelwright.engine.trainer import Engine
from modelwright.models import attention
from modelwright.models.attention import SharedPrefixLayout, hidden_states, unwrap_peft
from modelwright.models.prefix_sharing import prefix_sharing_blocker, shared_prefix_mask, supports_layout
from modelwright.models.trainable import ParameterCount, decoder_layers
from modelwright.plan.stage import StagePlan
from modelwright.recipe.schema import SftConfig
from modelwright.tasks.batching import (
    CPU_ALIGNMENT,
    MAX_MASKED_ROW,
    NO_ROW_LIMIT,
    collate_rows,
    layout_rows,
    layout_shared_prefix,
    packed_row_multiple,
    row_multiple,
    shared_prefix_length,
    shared_prefix_rows,
    to_varlen,
)
from modelwright.tasks.frozen_cache import (
    CacheLocation,
    FrozenLayers,
    HiddenStateCache,
    dropout_setting,
    num_frozen_layers,
)
from modelwright.tasks.losses import lm_head_loss


class SftLoss(nn.Module):
    """A language model whose forward gives the loss summed over trained tokens.

    The head runs only where a token is trained: on a chat with short answers that is a third of the logits.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache: HiddenStateCache | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        loss_positions: Tensor,
        segment_ids: Tensor | None = None,
        cache_index: Tensor | None = None,
        states: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **prefix_layout: Tensor,
    ) -> Tensor:
        """tokens, positions: [rows, length] int64; learnt: [count] int64, flat places whose next token is trained.

        branches: [rows, length] int64, behind a shared beginning; paths: keys and starts, where attention needs no
        mask for that; documents: [count + 1] int32, where they begin in the
        flattened rows, if a row holds several. What the frozen layers say is taken from `states`,
        [rows, length, width], or from the kept ones by their `places`, [rows, length] int64, where they are given.
        """
        if cache_index is not None:
            assert self.cache is not None and self.cache.states is not None
            states = self.cache.states[cache_index]
        layout = (
            SharedPrefixLayout(prefix_layout["kv_index"], prefix_layout["cu_seqlens_qk"])
            if prefix_layout
            else cu_seqlens
        )
        if states is not None:
            assert self.cache is not None
            hidden = self.cache.frozen_layers.forward_rest(states, positions, segment_ids, layout)
        else:
            mask = None if segment_ids is None else shared_prefix_mask(self.model, positions, segment_ids)
            hidden = hidden_states(self.model, tokens, positions, mask, layout)
        return lm_head_loss(self.model, hidden.flatten(0, 1)[loss_positions], tokens.flatten()[loss_positions + 1])


class SftTask:
    """Conversations as rows, packed or padded, or behind the beginning that all of them share."""

    metric_names: tuple[str, ...] = ("loss",)

    def __init__(
        self, model: Any, tokenizer: Any, data: ConversationDataset, settings: SftConfig, stops: Collection[int]
    ) -> None:
        self.loss_module = SftLoss(model)
        self.module: nn.Module = self.loss_module
        self.train_set = self._tokenize(data.train, tokenizer, settings, stops)
        self.held_out_set = (
            self._tokenize(data.held_out, tokenizer, settings, stops) if data.held_out else TokenizedDataset()
        )
        self.examples: list[TokenizedRow] = [*self.train_set.rows, *self.held_out_set.rows]
        lengths = [len(row) for row in self.train_set.rows]
        self._packs = (
            pack_bfd(lengths, settings.max_length) if settings.packing else [[row] for row in range(len(lengths))]
        )
        self.prefix_length = shared_prefix_length(self.examples) if settings.share_prefix else 0
        if self.prefix_length and prefix_sharing_blocker(model):
            self.prefix_length = 0
        self.use_varlen_prefix = self.prefix_length > 0 and _supports_varlen_prefix(model, settings)
        alignment = packed_row_multiple(settings, settings.max_length) if settings.packing else row_multiple(settings)
        self._row_multiple = CPU_ALIGNMENT if settings.trainable.is_partial else alignment

    @staticmethod
    def _tokenize(conversations: Any, tokenizer: Any, settings: SftConfig, stops: Collection[int]) -> TokenizedDataset:
        return tokenize_conversations(conversations, tokenizer, settings, stops)

    @property
    def rows(self) -> int:
        return len(self._packs)

    @property
    def held_out_rows(self) -> int:
        return len(self.held_out_set.rows)

    def enable_cache(self, frozen_layers: FrozenLayers, device: torch.device) -> HiddenStateCache:
        """From now on take what the trunk says from kept states, which the caller fills."""
        self.loss_module.cache = HiddenStateCache(
            frozen_layers, self.examples, self.prefix_length, device, self.use_varlen_prefix
        )
        return self.loss_module.cache

    def batch(self, rows: Sequence[int], step: int = 0) -> MicroBatch:
        return self._collate([self._packs[row] for row in rows])

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        return self._collate([[len(self.train_set.rows) + row] for row in rows])

    def row_length(self, row: int) -> int:
        """Tokens in a row, all its documents counted."""
        return sum(len(self.train_set.rows[member]) for member in self._packs[row])

    def _collate(self, packs: Sequence[Sequence[int]]) -> MicroBatch:
        if self.prefix_length:
            max_row_length = NO_ROW_LIMIT if self.use_varlen_prefix else MAX_MASKED_ROW
            rows = layout_shared_prefix(
                self.prefix_length, [member for pack in packs for member in pack], self.examples, max_row_length
            )
        else:
            rows = layout_rows(packs, self.examples)
        if self.loss_module.cache is not None:
            return self.loss_module.cache.batch(rows)
        micro_batch = collate_rows(rows, self.examples, self.prefix_length, self._row_multiple)
        return to_varlen(micro_batch) if self.use_varlen_prefix else micro_batch


def _supports_varlen_prefix(model: Any, settings: SftConfig) -> bool:
    """Whether attention may be told by paths what rows share; on a processor our own is taken on for that."""
    inner = unwrap_peft(model)
    if next(inner.parameters()).is_cuda:
        return settings.precision != "fp32" and supports_layout(model)
    if inner.config._attn_implementation != "sdpa" or settings.torch_compile:
        return False
    attention.register_attention(inner)
    if supports_layout(model):
        return True
    inner.set_attn_implementation("sdpa")
    return False


@dataclass(frozen=True)
class ComputeReuse:
    """What a fine-tune saves, and what it says about it."""

    task: SftTask
    """The fine-tune."""
    settings: SftConfig
    """As the recipe wishes it."""
    frozen_layers: FrozenLayers | None
    """The frozen layers that are kept."""
    cache_blocker: str | None
    """Why none are, where some parts of the model are frozen."""

    def describe(self, plan: StagePlan) -> tuple[str, ...]:
        """What is computed once, and the gain to expect, a line each."""
        lines = [self.cache_blocker] if self.cache_blocker else []
        if self.frozen_layers is not None:
            speedup = self._cache_speedup(plan)
            lines.append(
                f"{self.frozen_layers.num_layers} of {self.frozen_layers.total_layers} layers frozen: outputs "
                f"cached, about {speedup:.1f}× less compute over {plan.total_samples / plan.train_rows:.3g} epochs (cache_frozen_layers)"
            )
        if self.task.prefix_length:
            lines.append(
                f"{self.task.prefix_length}-token shared prefix computed once per batch, about "
                f"{self._prefix_speedup(plan):.1f}× fewer tokens per step (share_prefix)"
            )
        return tuple(lines)

    def precompute(self, engine: Engine, folder: Path, fingerprint: str) -> str | None:
        """Fill the kept states before the first step; returns a line about it."""
        if self.frozen_layers is None:
            return None
        if engine.plan.sharding in ("fsdp", "hsdp"):
            return "frozen layers are recomputed every step: with fsdp no device holds all of their weights"
        cache = self.task.enable_cache(self.frozen_layers, engine.world.device)
        location = CacheLocation(
            self.settings.cache_frozen_layers, folder, f"{fingerprint}:{engine.precision.matmul_precision}"
        )
        return cache.fill(engine.world, engine.precision.autocast, location)

    def flops_per_token(self, parameter_count: ParameterCount) -> float:
        """Operations for one token, forward and backward; attention, padding and what is saved are not counted."""
        if self.frozen_layers is None:
            return 4.0 * parameter_count.total + 2.0 * parameter_count.trained
        return 6.0 * parameter_count.trained

    def _cache_speedup(self, plan: StagePlan) -> float:
        assert self.frozen_layers is not None
        layers = decoder_layers(unwrap_peft(self.frozen_layers.model))
        frozen = sum(map(_num_params, layers[: self.frozen_layers.num_layers]))
        trainable = float(sum(map(_num_params, layers[self.frozen_layers.num_layers :])))
        head = unwrap_peft(self.frozen_layers.model).get_output_embeddings()
        stats = self.task.train_set.stats()
        trainable += _num_params(head) * stats["trained_tokens"] / stats["tokens"] if head is not None else 0
        epochs = plan.total_samples / plan.train_rows
        return float(epochs * (2 * frozen + 6 * trainable) / (2 * frozen + epochs * 6 * trainable))

    def _prefix_speedup(self, plan: StagePlan) -> float:
        examples = len(self.task.train_set.rows) / self.task.rows * plan.micro_batch_size
        tokens = self.task.train_set.stats()["tokens"] / self.task.rows * plan.micro_batch_size
        suffix_tokens = tokens - examples * self.task.prefix_length
        rows = shared_prefix_rows(
            self.task.prefix_length, suffix_tokens, NO_ROW_LIMIT if self.task.use_varlen_prefix else MAX_MASKED_ROW
        )
        return float(tokens / (rows * self.task.prefix_length + suffix_tokens))


def find_compute_reuse(task: SftTask, model: Any, settings: SftConfig) -> ComputeReuse:
    """What can be saved in this fine-tune without changing what is learnt."""
    if settings.cache_frozen_layers == "off" or not settings.trainable.is_partial:
        return ComputeReuse(task, settings, None, None)
    num_frozen, dropout = num_frozen_layers(model), dropout_setting(model)
    frozen_layers = FrozenLayers(model, num_frozen) if num_frozen and not dropout else None
    blocker = None
    if _trains_embeddings(model):
        size = _num_params(unwrap_peft(model).get_output_embeddings()) / 1e6
        blocker = (
            "the head shares its weights with the embeddings, so training it changes what every layer is given and "
            f"sends gradients through all of them; untie_lm_head: true gives it a copy of its own ({size:,.1f} M weights "
            "more to hold) and lets the frozen layers be computed once"
        )
    elif dropout:
        blocker = f"frozen layers are recomputed every step: the model uses dropout ({dropout})"
    elif frozen_layers is not None and not frozen_layers.is_exact():
        frozen_layers, blocker = None, "frozen layers are recomputed every step: this family cannot be split exactly"
    return ComputeReuse(task, settings, frozen_layers, blocker)


def _trains_embeddings(model: Any) -> bool:
    return any(weight.requires_grad for weight in unwrap_peft(model).get_input_embeddings().parameters())


def _num_params(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
