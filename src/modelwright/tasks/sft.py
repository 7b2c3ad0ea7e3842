"""Supervised fine-tuning: loss on the assistant's tokens; reuse of frozen layers and of a shared prefix."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelwright.data.chat import ConversationDataset
from modelwright.data.chat_tokens import TokenizedRow, tokenize_conversations
from modelwright.engine.task import MicroBatch
from modelwright.engine.trainer import Engine
from modelwright.errors import ModelError
from modelwright.models import attention
from modelwright.models.attention import (
    FlatLayout,
    Layout,
    SharedPrefixLayout,
    UnsharedLayout,
    base_outputs,
    unwrap_peft,
)
from modelwright.models.prefix_sharing import prefix_sharing_blocker, shared_prefix_mask, supports_layout
from modelwright.models.trainable import decoder_layers
from modelwright.plan.stage import BatchShapes, StagePlan, batch_shapes, is_padding_free
from modelwright.recipe.sections import ParameterCount
from modelwright.recipe.stage_specs import SftConfig
from modelwright.tasks.batching import (
    CPU_ALIGNMENT,
    MixtureTask,
    collate_flat,
    collate_rows,
    layout_packs,
    max_prefix_row,
    pack_by_source,
    packed_row_multiple,
    pad_targets,
    round_targets,
    row_multiple,
    shared_prefix_length,
    shared_prefix_rows,
    to_varlen,
)
from modelwright.tasks.frozen_cache import CacheLocation, FrozenLayers, HiddenStateCache, num_frozen_layers
from modelwright.tasks.losses import RouterLoss, lm_head_loss


class SftLoss(nn.Module):
    """A language model whose forward returns the summed loss; the LM head runs at loss positions only."""

    def __init__(self, model: Any, router_aux_loss_coef: float | None = 0.0) -> None:
        super().__init__()
        self.model, self.router_loss = model, RouterLoss(model, router_aux_loss_coef)
        self.cache: HiddenStateCache | None = None
        self.max_seqlen: int | None = None
        """Tokens that no document of a flat micro-batch exceeds."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        loss_positions: Tensor,
        segment_ids: Tensor | None = None,
        cache_index: Tensor | None = None,
        states: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        targets: Tensor | None = None,
        **prefix_layout: Tensor,
    ) -> Tensor:
        """tokens, positions: [rows, length] int64; loss_positions: [count], flat indices whose next token is trained.

        segment_ids: [rows, length], for a mask after a shared prefix; prefix_layout: the fields of a layout, for
        varlen attention instead; cu_seqlens: [count + 1] int32, starts of packed examples in the flattened rows. The
        frozen layers' outputs come from `states`, [rows, length, width], or from the cache by `cache_index`.
        attention_mask: [rows, length], the tokens that a router's load-balancing loss counts. targets: [count], the
        tokens after loss_positions, where these are padded.
        """
        if cache_index is not None:
            assert self.cache is not None and self.cache.states is not None
            states = self.cache.states[cache_index]
        layout: Layout | None = cu_seqlens
        if cu_seqlens is not None and self.max_seqlen is not None:
            layout = FlatLayout(cu_seqlens, self.max_seqlen)
        if prefix_layout:
            layout = SharedPrefixLayout.of(prefix_layout)
        if states is not None:
            assert self.cache is not None and not isinstance(layout, FlatLayout | UnsharedLayout)
            hidden, outputs = self.cache.frozen_layers.forward_rest(states, positions, segment_ids, layout), None
        else:
            mask = None if segment_ids is None else shared_prefix_mask(self.model, positions, segment_ids)
            outputs = base_outputs(self.model, tokens, positions, mask, layout, **self.router_loss.options)
            hidden = outputs[0]
        targets = tokens.flatten()[loss_positions + 1] if targets is None else targets
        loss_sum = lm_head_loss(self.model, hidden.flatten(0, 1)[loss_positions], targets)
        return self.router_loss.add(loss_sum, outputs, attention_mask, len(loss_positions))


class SftTask(MixtureTask):
    """Conversations as rows: padded, packed, or after their shared prefix."""

    def __init__(
        self, model: Any, tokenizer: Any, data: ConversationDataset, settings: SftConfig, stops: Collection[int]
    ) -> None:
        self.loss_module = SftLoss(model, settings.router_aux_loss_coef)
        self.module: nn.Module = self.loss_module
        self.router_loss = self.loss_module.router_loss
        self.metric_names: tuple[str, ...] = ("loss", *self.router_loss.metric_names)
        self.train_set, self.held_out_set = (
            tokenize_conversations(rows, tokenizer, settings, stops, data.cache_key(split))
            for split, rows in (("train", data.train), ("held_out", data.held_out))
        )
        self.examples: list[TokenizedRow] = [*self.train_set.rows, *self.held_out_set.rows]
        self.lengths = [len(example) for example in self.examples]
        singles = [[row] for row in range(len(self.train_set.rows))]
        rows, self.data_config = self.train_set.rows, data.config
        self._packs = pack_by_source(rows, settings.max_length, data.config) if settings.packing else singles
        self.row_sources = [rows[pack[0]].source for pack in self._packs]
        self.prefix_length = shared_prefix_length(self.examples) if settings.share_prefix else 0
        # a router's loss counts each token of each row
        if self.prefix_length and (self.router_loss.coef or prefix_sharing_blocker(model)):
            self.prefix_length = 0
        self.use_varlen_prefix = self.prefix_length > 0 and _supports_varlen_prefix(model, settings)
        on_gpu, alignment = next(model.parameters()).is_cuda, row_multiple(settings)
        if settings.packing:
            alignment = packed_row_multiple(settings, settings.max_length, on_gpu)
        # packed rows have one length: with few numbers of targets a captured step can be replayed
        has_varlen = attention.has_varlen(model, settings.precision) and not self.router_loss.coef
        self._rounds_targets = settings.packing and has_varlen
        self._row_multiple = CPU_ALIGNMENT if settings.trainable.is_partial else alignment
        self.padding_free = self._can_be_flat(model, settings)
        if self.padding_free:
            self.loss_module.max_seqlen = max(self.lengths)
            self._target_counts = [int(example.loss_mask[1:].sum()) for example in self.examples]
            self._shapes: dict[int, BatchShapes] = {}

    @property
    def rows(self) -> int:
        return len(self._packs)

    @property
    def held_out_rows(self) -> int:
        return len(self.held_out_set.rows)

    def enable_cache(self, frozen_layers: FrozenLayers, device: torch.device) -> HiddenStateCache:
        """Use cached outputs of the frozen layers from now on; the caller fills the cache."""
        args = (self.examples, self.prefix_length, device, self.use_varlen_prefix)
        self.loss_module.cache = HiddenStateCache(frozen_layers, *args)
        return self.loss_module.cache

    def batch(self, rows: Sequence[int], step: int = 0) -> MicroBatch:
        return self._collate([self._packs[row] for row in rows])

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        return self._collate([[len(self.train_set.rows) + row] for row in rows])

    def row_length(self, row: int) -> int:
        """Tokens in a row, over all its examples."""
        return sum(self.lengths[member] for member in self._packs[row])

    def _can_be_flat(self, model: Any, settings: SftConfig) -> bool:
        """Whether the rows of a micro-batch are laid end to end: packed ones, which attention keeps apart, would be."""
        if settings.padding_free is True and self.router_loss.coef:
            raise ModelError("padding_free: true wants router_aux_loss_coef: 0, since that loss counts rows")
        is_masked = self.prefix_length > 0 and not self.use_varlen_prefix  # rows after a shared prefix are full
        has_varlen = attention.has_varlen(model, settings.precision) and not self.router_loss.coef
        is_partial = settings.trainable.is_partial and settings.cache_frozen_layers != "off"
        caches_layers = is_partial and num_frozen_layers(model) > 0
        return bool(self.lengths) and not is_masked and is_padding_free(settings, has_varlen, caches_layers)

    def _collate_flat(self, numbers: Sequence[int]) -> MicroBatch:
        """Examples end to end, rounded up to one of a few sizes."""
        if len(numbers) not in self._shapes:
            count = len(self.train_set.rows)
            trained = self.lengths[:count] or self.lengths, self._target_counts[:count] or self._target_counts
            self._shapes[len(numbers)] = batch_shapes(*trained, len(numbers), self.prefix_length)
        tokens = sum(self.lengths[number] for number in numbers) - (len(numbers) - 1) * self.prefix_length
        size = self._shapes[len(numbers)].size(tokens, sum(self._target_counts[number] for number in numbers))
        if self.prefix_length:
            rows = layout_packs([numbers], self.lengths, self.prefix_length, self.use_varlen_prefix)
            return to_varlen(pad_targets(collate_rows(rows, self.examples, self.prefix_length, size[0]), size[1]))
        return collate_flat([self.examples[number] for number in numbers], size, max(self.lengths))

    def _collate(self, packs: Sequence[Sequence[int]]) -> MicroBatch:
        if self.padding_free and packs:
            return self._collate_flat([number for pack in packs for number in pack])
        rows = layout_packs(packs, self.lengths, self.prefix_length, self.use_varlen_prefix)
        if self.loss_module.cache is not None:
            return self.loss_module.cache.batch(rows)
        micro_batch = collate_rows(rows, self.examples, self.prefix_length, self._row_multiple)
        if self._rounds_targets:
            micro_batch = round_targets(micro_batch)
        if self.router_loss.coef:
            used = torch.tensor([sum(span.stop - span.start for span in row) for row in rows] or [2])
            mask = torch.arange(micro_batch.inputs["tokens"].shape[1]) < used[:, None]
            return replace(micro_batch, inputs={**micro_batch.inputs, "attention_mask": mask})
        return to_varlen(micro_batch) if self.use_varlen_prefix else micro_batch


def _supports_varlen_prefix(model: Any, settings: SftConfig) -> bool:
    """Whether varlen attention can share the prefix; on a CPU our attention is registered for it."""
    inner = unwrap_peft(model)
    if next(inner.parameters()).is_cuda:
        return settings.precision != "fp32" and supports_layout(model)
    if inner.config._attn_implementation != "sdpa" or settings.torch_compile is True:
        return False
    attention.register_attention(inner)
    if supports_layout(model):
        return True
    inner.set_attn_implementation("sdpa")
    return False


@dataclass(frozen=True)
class ComputeReuse:
    """What an SFT stage computes once instead of every step."""

    task: SftTask
    settings: SftConfig
    frozen_layers: FrozenLayers | None
    """The frozen layers whose outputs are cached."""
    cache_blocker: str | None
    """Why they are not cached, if parts of the model are frozen."""

    def describe(self, plan: StagePlan) -> tuple[str, ...]:
        """What is computed once and the expected gain, one line each."""
        lines = [self.cache_blocker] if self.cache_blocker else []
        if self.frozen_layers is not None:
            speedup, epochs = self._cache_speedup(plan), plan.total_samples / plan.train_rows
            lines.append(
                f"{self.frozen_layers.num_layers} of {len(self.frozen_layers.layers)} layers frozen: outputs "
                f"cached, about {speedup:.1f}× less compute over {epochs:.3g} epochs (cache_frozen_layers)"
            )
        if self.task.prefix_length:
            lines.append(
                f"{self.task.prefix_length}-token shared prefix computed once per batch, about "
                f"{self._prefix_speedup(plan.micro_batch_size):.1f}× fewer tokens per step (share_prefix)"
            )
        return tuple(lines)

    def precompute(self, engine: Engine, folder: Path, fingerprint: str) -> str | None:
        """Fill the cache before the first step; returns a line about it."""
        if self.frozen_layers is None:
            return None
        if engine.plan.sharding in ("fsdp", "hsdp"):
            return "frozen layers are recomputed every step: with fsdp no device holds all of their weights"
        cache = self.task.enable_cache(self.frozen_layers, engine.world.device)
        fingerprint = f"{fingerprint}:{engine.precision.matmul_precision}"
        location = CacheLocation(self.settings.cache_frozen_layers, folder, fingerprint)
        return engine.with_fallback(lambda: cache.fill(engine.world, engine.forward_context, location))

    def flops_per_token(self, parameter_count: ParameterCount, micro_batch_size: int) -> float:
        """FLOPs per token of the rows, forward and backward, without attention and padding."""
        flops = 4.0 * parameter_count.total + 2.0 * parameter_count.trained
        if self.frozen_layers is not None:
            flops = 6.0 * parameter_count.trained
        return flops / self._prefix_speedup(micro_batch_size)

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

    def _prefix_speedup(self, micro_batch_size: int) -> float:
        if not self.task.prefix_length or not self.task.rows:
            return 1.0
        examples = len(self.task.train_set.rows) / self.task.rows * micro_batch_size
        tokens = self.task.train_set.stats()["tokens"] / self.task.rows * micro_batch_size
        suffix_tokens = tokens - examples * self.task.prefix_length
        max_row_length = max_prefix_row(self.task.use_varlen_prefix)
        rows = shared_prefix_rows(self.task.prefix_length, suffix_tokens, max_row_length)
        return float(tokens / (rows * self.task.prefix_length + suffix_tokens))


def find_compute_reuse(task: SftTask, model: Any, settings: SftConfig) -> ComputeReuse:
    """What this SFT stage can compute once without changing results."""
    if settings.cache_frozen_layers == "off" or not settings.trainable.is_partial:
        return ComputeReuse(task, settings, None, None)
    num_frozen = num_frozen_layers(model)
    frozen_layers = FrozenLayers(model, num_frozen) if num_frozen else None
    blocker = None
    core = unwrap_peft(model)
    if any(weight.requires_grad for weight in core.get_input_embeddings().parameters()):
        size = _num_params(core.get_output_embeddings()) / 1e6
        blocker = (
            "the head shares its weights with the embeddings, so training it changes what every layer is given and "
            f"sends gradients through all of them; untie_lm_head: true gives it a copy of its own ({size:,.1f} M "
            "weights more to hold) and lets the frozen layers be computed once"
        )
    elif frozen_layers is not None:
        reason = "the loss reads the router of each" if task.router_loss.coef else frozen_layers.blocker()
        if reason is not None:
            frozen_layers, blocker = None, f"frozen layers are recomputed every step: {reason}"
    return ComputeReuse(task, settings, frozen_layers, blocker)


def _num_params(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
