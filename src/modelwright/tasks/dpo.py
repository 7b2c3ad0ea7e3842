"""Direct preference optimization (DPO, IPO, hinge) and its reference log-probs.

The prompt computed once for both answers, on a 1 B model with 512 + 2 × 512 tokens a pair: 52.7 instead of 42.6 pairs/s
(H200, 2026-11-17, `python -m benchmarks.ablation --only share-prompt`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from modelwright.data.packing import NDArray
from modelwright.data.preferences import PreferenceDataset, TokenizedPair, tokenize_pairs
from modelwright.data.sampler import rank_micro_batches
from modelwright.engine.task import MicroBatch
from modelwright.engine.trainer import Engine
from modelwright.errors import ModelError, StorageError, is_storage_failure
from modelwright.models.attention import (
    HALF_DTYPES,
    SharedPrefixLayout,
    UnsharedLayout,
    base_outputs,
    has_varlen,
    register_attention,
    unshared_layout,
    unshared_layout_at,
    unwrap_peft,
)
from modelwright.models.prefix_sharing import (
    prefix_sharing_blocker,
    shared_prefix_layout,
    shared_prefix_mask,
    supports_layout,
)
from modelwright.models.trainable import disable_dropout
from modelwright.plan.stage import BatchShapes, batch_shapes, is_padding_free
from modelwright.recipe.stage_specs import PairConfig
from modelwright.runs.folder import fsync_path, hash_file, read_json, write_json
from modelwright.tasks.batching import MixtureTask, as_tensors, row_multiple
from modelwright.tasks.losses import RouterLoss, lm_head_logps, preference_loss

LENGTH_MULTIPLE = 8
"""Row length multiple with a mask; otherwise masked attention on a GPU copies the mask."""
KL_CLAMP = 20.0
"""Upper bound of a log-ratio in the KL estimate, so that one token cannot make it infinite."""


class PairLoss(nn.Module):
    """A language model on pairs: `metrics` of a subclass makes sums over the pairs of the log-probs of the targets."""

    own_inputs: tuple[str, ...]
    """Names of the other arguments of `metrics`."""
    metric_names: tuple[str, ...]
    """Names of its sums, the loss first."""
    metrics: Callable[..., Tensor]

    def __init__(self, model: Any, settings: Any, router_aux_loss_coef: float | None = 0.0) -> None:
        super().__init__()
        self.model, self.settings, self.router_loss = model, settings, RouterLoss(model, router_aux_loss_coef)

    def forward(self, answer_lengths: Tensor, attention_mask: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Returns [metrics], or without the inputs of `metrics`, the log-probs of all targets, [count] float32.

        answer_lengths: [2 × pairs] int64, of each pair's chosen and rejected answer; attention_mask: [rows, length],
        the tokens that a router's load-balancing loss counts; inputs: see `token_logps` and `metrics`.
        """
        own_inputs = {name: inputs.pop(name) for name in self.own_inputs if name in inputs}
        logps, outputs = self.token_logps(**inputs)
        if not own_inputs:
            return logps
        if len(answer_lengths):
            sums = self.metrics(logps, answer_lengths, **own_inputs)
        else:  # zeros with gradients for every parameter, as DDP needs
            sums = logps.sum() * logps.new_zeros(len(self.metric_names))
        return self.router_loss.add(sums, outputs, attention_mask, len(answer_lengths) // 2)

    def token_logps(
        self, tokens: Tensor, positions: Tensor, positions_and_targets: Tensor, **layout_inputs: Tensor
    ) -> tuple[Tensor, Any]:
        """tokens, positions: [rows, length] int64. Returns [count] float32, and the outputs of the base model.

        positions_and_targets: [2, count] int64, flat indices of the logits that predict the targets, and the targets;
        layout_inputs: segment_ids if a row holds both answers, a varlen layout (see `layout_from_inputs`).
        """
        segment_ids = layout_inputs.get("segment_ids")
        has_layout = segment_ids is None or self._computes_in_half()  # flat pairs have nothing else
        layout = layout_from_inputs(layout_inputs) if has_layout else None
        mask = None
        if segment_ids is not None and layout is None:
            mask = shared_prefix_mask(self.model, positions, segment_ids)
        outputs = base_outputs(self.model, tokens, positions, mask, layout, **self.router_loss.options)
        logit_positions, target_ids = positions_and_targets
        hidden = outputs[0].flatten(0, 1).index_select(0, logit_positions)
        return lm_head_logps(self.model, hidden, target_ids), outputs

    def _computes_in_half(self) -> bool:
        """Whether attention runs in bf16 or fp16, which varlen attention needs."""
        return torch.is_autocast_enabled("cuda") or next(self.model.parameters()).dtype in HALF_DTYPES


class DpoLoss(PairLoss):
    """The DPO loss."""

    own_inputs = ("ref_logps",)
    metric_names = (
        *("loss", "reward_accuracy", "reward_margin", "chosen_logp", "rejected_logp"),
        *("kl per answer_tokens", "sft_loss per chosen_tokens", "chosen_tokens", "answer_tokens"),
    )
    """kl is estimated over the answer tokens by r - 1 - log r, with r = policy / reference probability."""

    def metrics(self, logps: Tensor, answer_lengths: Tensor, ref_logps: Tensor) -> Tensor:
        """logps, ref_logps: [count] float32, of all answer tokens."""
        counts = answer_lengths.view(-1, 2)
        policy_sums, ref_sums = (segment_sum(values, answer_lengths).view(-1, 2) for values in (logps, ref_logps))
        logratios = policy_sums - ref_sums
        loss = preference_loss(logratios, counts, self.settings)
        with torch.no_grad():
            margins = self.settings.beta * (logratios[:, 0] - logratios[:, 1])
            is_target = torch.arange(len(logps), device=logps.device) < answer_lengths.sum()
            token_logratios = torch.where(is_target, logps - ref_logps, 0.0)
            kl = (token_logratios.clamp(max=KL_CLAMP).exp() - 1 - token_logratios).sum()
            metrics = [
                *((margins > 0).sum(), margins.sum(), policy_sums[:, 0].sum(), policy_sums[:, 1].sum()),
                *(kl, -policy_sums[:, 0].sum(), counts[:, 0].sum(), counts.sum()),
            ]
        return torch.stack([loss.sum(), *(value.to(loss.dtype) for value in metrics)])


class PairTask(MixtureTask):
    """Preference pairs as rows."""

    loss_class: type[PairLoss]

    def __init__(
        self, model: Any, tokenizer: Any, data: PreferenceDataset, settings: PairConfig, stops: Collection[int]
    ) -> None:
        if settings.disable_dropout:
            disable_dropout(model)
        loss_module = self.loss_class(model, settings, settings.router_aux_loss_coef)
        self.module: nn.Module = loss_module
        self.metric_names = (*loss_module.metric_names, *loss_module.router_loss.metric_names)
        self.sharing_blocker = prefix_sharing_blocker(model) if settings.share_prompt else "share_prompt is false"
        if loss_module.router_loss.coef:
            self.sharing_blocker = "the load-balancing loss of its router counts the tokens of both rows"
        self.train_set, self.held_out_set = (
            tokenize_pairs(pairs, tokenizer, settings, stops, data.cache_key(split))
            for split, pairs in (("train", data.train), ("held_out", data.held_out))
        )
        self.data_config, self.row_sources = data.config, [row.source for row in self.train_set.rows]
        layouts = (unshared_layout, shared_prefix_layout) if self.sharing_blocker is None else ()
        is_required = getattr(settings, "padding_free", False) is True
        if is_required and unwrap_peft(model).config._attn_implementation == "sdpa":  # as on a CPU
            register_attention(unwrap_peft(model))
        self.layout = next((layout for layout in layouts if supports_layout(model, layout)), None)
        self._row_multiple = row_multiple(settings)
        is_flat = is_padding_free(settings, has_varlen(model, settings.precision))
        self.padding_free = is_flat and self.layout is unshared_layout
        if is_required and not self.padding_free:
            reason = self.sharing_blocker or "its attention takes no such layout"
            raise ModelError(f"padding_free: true wants a prompt shared by both answers: {reason}; auto would do")
        self._shapes: dict[int, BatchShapes] = {}

    @property
    def splits(self) -> dict[str, list[TokenizedPair]]:
        """The pairs of each split, by name."""
        return {"train": self.train_set.rows, "held_out": self.held_out_set.rows}

    @property
    def rows(self) -> int:
        return len(self.train_set.rows)

    @property
    def held_out_rows(self) -> int:
        return len(self.held_out_set.rows)

    def row_length(self, row: int) -> int:
        """Tokens in a pair, its prompt counted once."""
        return len(self.train_set.rows[row])

    def batch(self, rows: Sequence[int], step: int = 0) -> MicroBatch:
        return self.split_batch("train", rows)

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        return self.split_batch("held_out", rows)

    def split_batch(self, split: str, rows: Sequence[int]) -> MicroBatch:
        """Micro-batch of these pairs of a split, with all inputs of the loss."""
        return self.collate(split, rows)

    def collate(self, split: str, rows: Sequence[int]) -> MicroBatch:
        """A micro-batch of these pairs of a split, with their answer tokens as targets."""
        pairs = [self.splits[split][row] for row in rows]
        if self.padding_free and pairs:
            return self._collate_flat(pairs)
        micro_batch = collate_pairs(pairs, shared=self.sharing_blocker is None, multiple=self._row_multiple)
        return micro_batch if self.layout is None else with_layout(self.layout, micro_batch)

    def _collate_flat(self, pairs: Sequence[TokenizedPair]) -> MicroBatch:
        """Pairs end to end, rounded up to one of a few sizes; attention gets its answers in rows of one of a few."""
        if len(pairs) not in self._shapes:
            rows = self.train_set.rows or self.held_out_set.rows
            lengths, targets = [len(pair) for pair in rows], [_num_targets(pair) for pair in rows]
            self._shapes[len(pairs)] = batch_shapes(lengths, targets, len(pairs))
        size = self._shapes[len(pairs)].size(sum(map(len, pairs)), sum(map(_num_targets, pairs)))
        return collate_flat_pairs(pairs, size, self._longest)

    @cached_property
    def _longest(self) -> int:
        """Tokens of the longest prompt with an answer."""
        return max(map(_answer_length, (pair for pairs in self.splits.values() for pair in pairs)))


class DpoTask(PairTask):
    """Pairs whose reference log-probs are computed before training."""

    loss_class = DpoLoss
    fp8_check_metric = "sft_loss per chosen_tokens"
    """The metric that compares fp8 with bf16; the DPO loss is a difference of two such."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ref_logps: dict[str, list[NDArray]] = {}

    def time_trial_batch(self, rows: Sequence[int]) -> MicroBatch:
        """The reference log-probs do not exist yet: they are zeros."""
        micro_batch = self.collate("train", rows)
        zeros = torch.zeros(micro_batch.inputs["positions_and_targets"].shape[1])
        return replace(micro_batch, inputs={**micro_batch.inputs, "ref_logps": zeros})

    def split_batch(self, split: str, rows: Sequence[int]) -> MicroBatch:
        assert not rows or self.ref_logps, "the reference log-probs are computed before training"
        micro_batch = self.collate(split, rows)
        row_logps = [np.zeros(0, dtype=np.float32), *(self.ref_logps[split][row] for row in rows)]
        ref_logps = torch.from_numpy(np.concatenate(row_logps))
        padding = micro_batch.inputs["positions_and_targets"].shape[1] - len(ref_logps)
        ref_logps = nn.functional.pad(ref_logps, (0, padding))
        return replace(micro_batch, inputs={**micro_batch.inputs, "ref_logps": ref_logps})


def collate_pairs(pairs: Sequence[TokenizedPair], shared: bool = True, multiple: int = 1) -> MicroBatch:
    """Collate pairs in right-padded rows: one row per pair with its prompt once (shared), or one row per answer."""
    answers = [(pair.prompt, (pair.chosen, pair.rejected)) for pair in pairs]
    rows = [_row(prompt, part) for prompt, both in answers for part in ([both] if shared else [[one] for one in both])]
    length = max((len(tokens) for tokens, *_ in rows), default=2)
    multiple = math.lcm(multiple, LENGTH_MULTIPLE if shared else 1)
    length = -(-length // multiple) * multiple
    padded = np.zeros((3, max(1, len(rows)), length), dtype=np.int64)  # tokens, positions, segment ids
    logit_positions: list[NDArray] = []
    for number, (tokens, positions, segment_ids, row_logit_positions) in enumerate(rows):
        padded[:, number, : len(tokens)] = tokens, positions, segment_ids
        padded[1, number, len(tokens) :] = np.arange(length - len(tokens))
        padded[2, number, len(tokens) :] = 3
        logit_positions.append(number * length + row_logit_positions)
    target_ids = [answer.input_ids[answer.loss_mask] for pair in pairs for answer in (pair.chosen, pair.rejected)]
    inputs = {
        "tokens": padded[0],
        "positions": padded[1],
        "positions_and_targets": np.stack([_concatenate(logit_positions), _concatenate(target_ids)]),
        "answer_lengths": np.array([len(tokens) for tokens in target_ids], dtype=np.int64),
        **({"segment_ids": padded[2]} if shared else {"attention_mask": padded[2] != 3}),
    }
    return MicroBatch(as_tensors(inputs), trained_tokens=len(pairs), tokens=sum(len(tokens) for tokens, *_ in rows))


def collate_flat_pairs(pairs: Sequence[TokenizedPair], size: tuple[int, int], longest: int) -> MicroBatch:
    """Pairs with their prompts once, end to end in one row of so many tokens and targets; attention copies prompts.

    longest: tokens of the longest prompt with an answer of all pairs, in powers of two the unit of attention's rows.
    """
    rows = [_row(pair.prompt, (pair.chosen, pair.rejected)) for pair in pairs]
    lengths = [len(tokens) for tokens, *_ in rows]
    starts, padding = np.cumsum([0, *lengths[:-1]]), size[0] - sum(lengths)
    tokens, positions, _, _ = (_concatenate([row[part] for row in rows]) for part in range(4))
    logit_positions = _concatenate([start + row[3] for start, row in zip(starts, rows, strict=True)])
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    target_ids = [answer.input_ids[answer.loss_mask] for answer in answers]
    further = size[1] - len(logit_positions)
    targets = np.pad(np.stack([logit_positions, _concatenate(target_ids)]), ((0, 0), (0, further)))
    targets[0, len(logit_positions) :] = np.arange(further) % size[0]  # each once, and without effect on the loss
    inputs = {
        "tokens": np.pad(tokens, (0, padding))[None],
        "positions": np.concatenate([positions, np.arange(padding) % longest])[None],
        "positions_and_targets": targets,
        "answer_lengths": np.array([len(ids) for ids in target_ids], dtype=np.int64),
    }
    unit = max(LENGTH_MULTIPLE, 1 << max(0, (longest - 1).bit_length() - 2))
    max_length = -(-max(map(_answer_length, pairs)) // unit) * unit
    sizes = [(len(pair.prompt), len(pair.chosen), len(pair.rejected)) for pair in pairs]
    layout = unshared_layout_at(starts.tolist(), sizes, size[0], max_length)
    return MicroBatch({**as_tensors(inputs), **layout._asdict()}, trained_tokens=len(pairs), tokens=sum(lengths))


def _num_targets(pair: TokenizedPair) -> int:
    return int(pair.chosen.loss_mask.sum() + pair.rejected.loss_mask.sum())


def _answer_length(pair: TokenizedPair) -> int:
    """Tokens of the prompt with the longer answer."""
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))


def layout_from_inputs(inputs: dict[str, Tensor]) -> UnsharedLayout | SharedPrefixLayout | None:
    """The varlen layout of a batch, if it has one."""
    if "gather_index" in inputs:
        return UnsharedLayout(*(inputs[name] for name in UnsharedLayout._fields))
    return SharedPrefixLayout.of(inputs) if "kv_index" in inputs else None


def with_layout(
    make_layout: Callable[[Tensor], UnsharedLayout | SharedPrefixLayout], micro_batch: MicroBatch
) -> MicroBatch:
    """The same batch with the inputs of a varlen layout."""
    # a shared-prefix layout covers every token: padding, which no answer attends to, goes with the last answer
    max_segment = 2 if make_layout is shared_prefix_layout else 3
    fields = make_layout(micro_batch.inputs["segment_ids"].clamp(max=max_segment))._asdict()
    tensors = {name: each for name, each in fields.items() if isinstance(each, Tensor)}
    return replace(micro_batch, inputs={**micro_batch.inputs, **tensors})


def _row(prompt: NDArray, answers: Sequence[Any]) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """Tokens, positions and segment ids of one row, and the positions that predict the trained answer tokens."""
    start, parts = len(prompt), [prompt]
    positions, segment_ids, logit_positions = [np.arange(start)], [np.zeros(start, dtype=np.int64)], []
    for segment, answer in enumerate(answers, 1):
        parts.append(answer.input_ids)
        positions.append(len(prompt) + np.arange(len(answer)))
        segment_ids.append(np.full(len(answer), segment))
        predicting = np.arange(start - 1, start - 1 + len(answer))
        predicting[0] = len(prompt) - 1  # the last prompt token predicts the first token of each answer
        logit_positions.append(predicting[answer.loss_mask])
        start += len(answer)
    return tuple(np.concatenate(each) for each in (parts, positions, segment_ids, logit_positions))  # type: ignore[return-value]


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive segments: [count] into [len(lengths)], deterministic on every device; the rest is padding."""
    rest = len(values) - lengths.sum(dim=0, keepdim=True)
    return torch.segment_reduce(values, "sum", lengths=torch.cat([lengths, rest]), unsafe=True)[:-1]


def _concatenate(arrays: Sequence[NDArray]) -> NDArray:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)


REF_FILE, REF_MANIFEST = "reference.safetensors", "reference.json"
REF_VERSION = 2
"""Raised when the format or the values change, so that an old file is not used."""


def precompute_ref_log_probs(task: DpoTask, engine: Engine, folder: Path, model: str) -> str | None:
    """Set the task's reference log-probs from a valid cache, else compute them; returns a message for the user.

    model: the fingerprint of the weights before training, which the engine must still hold.
    """
    key = ref_fingerprint(task, engine, model)
    problem = engine.world.on_rank0_broadcast(lambda: _cache_problem(folder, key))
    if problem:
        had_cache = engine.world.on_rank0_broadcast((folder / REF_MANIFEST).exists)
        logps = compute_ref_logps(task, engine)
        engine.world.on_rank0_broadcast(lambda: _write_ref_logps(folder, key, logps))
    flat = load_file(folder / REF_FILE)
    task.ref_logps = {split: _split_by_pair(flat[split], task, split) for split in task.splits}
    return f"cached reference log-probs not used ({problem}); recomputed" if problem and had_cache else None


def compute_ref_logps(task: DpoTask, engine: Engine) -> dict[str, NDArray]:
    """Reference log-prob of each answer token, concatenated for each split: [count] float32."""
    model: Any = task.module.model
    with model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        return {split: engine.with_fallback(partial(_split_logps, task, engine, split)) for split in task.splits}


def _split_logps(task: DpoTask, engine: Engine, split: str) -> NDArray:
    pairs, world = task.splits[split], engine.world
    order = sorted(range(len(pairs)), key=lambda row: len(pairs[row]))  # similar lengths together save padding
    micro_batches = rank_micro_batches(order, world.rank, world.size, engine.plan.eval_micro_batch_size)
    flat_logps = np.zeros(sum(_token_counts(task, split)), dtype=np.float32)
    pair_logps = _split_by_pair(flat_logps, task, split)  # views into flat_logps
    extremes = [task.collate(split, rows) for rows in (micro_batches[:1] + micro_batches[-1:])]
    outputs = engine.predict((task.collate(split, rows) for rows in micro_batches), extremes)
    for rows, batch_logps in zip(micro_batches, outputs, strict=True):
        parts = np.split(batch_logps.numpy(), np.cumsum([len(pair_logps[row]) for row in rows]))[:-1] if rows else []
        for row, part in zip(rows, parts, strict=True):
            pair_logps[row][:] = part
    all_logps: NDArray = world.all_reduce(torch.from_numpy(flat_logps)).numpy()
    return all_logps


def ref_fingerprint(task: DpoTask, engine: Engine, model: str) -> str:
    """Changes with the model, the precision and every token, so with data, template and lengths."""
    digest = xxhash.xxh3_128()
    digest.update(repr((REF_VERSION, model, engine.precision.matmul_precision, task.sharing_blocker is None)).encode())
    for split, pairs in task.splits.items():
        digest.update(f"{split}:{len(pairs)}".encode())
        for pair in pairs:
            for answer in (pair.chosen, pair.rejected):
                digest.update(repr((len(pair.prompt), len(answer))).encode())
                digest.update(pair.prompt.tobytes() + answer.input_ids.tobytes() + answer.loss_mask.tobytes())
    return digest.hexdigest()


def _cache_problem(folder: Path, key: str) -> str | None:
    """Why the cached reference log-probs cannot be used, or None."""
    try:
        manifest = read_json(folder / REF_MANIFEST)
        if manifest["fingerprint"] != key:
            return "it is of another model, other data or other arithmetic"
        return None if hash_file(folder / REF_FILE) == manifest["hash"] else f"{REF_FILE} is damaged"
    except FileNotFoundError as error:
        return f"there is no {Path(error.filename).name}"
    except (OSError, StorageError, ValueError, KeyError, TypeError) as error:
        return f"it cannot be read ({error})"


def _write_ref_logps(folder: Path, key: str, logps: dict[str, NDArray]) -> None:
    """Write the log-probs, then the manifest that makes them valid."""
    partial = folder / f".{REF_FILE}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REF_MANIFEST).unlink(missing_ok=True)
        save_file(logps, partial)
        fsync_path(partial)
        partial.replace(folder / REF_FILE)
    except Exception as error:
        partial.unlink(missing_ok=True)
        if is_storage_failure(error):
            raise StorageError(f"{folder / REF_FILE}: the reference could not be written ({error})") from None
        raise
    counts = {f"{split}_tokens": len(flat_logps) for split, flat_logps in logps.items()}
    write_json(folder / REF_MANIFEST, {"fingerprint": key, "hash": hash_file(folder / REF_FILE), **counts})


def _token_counts(task: DpoTask, split: str) -> list[int]:
    """Trained tokens of each pair."""
    return [int(pair.chosen.loss_mask.sum() + pair.rejected.loss_mask.sum()) for pair in task.splits[split]]


def _split_by_pair(flat_logps: NDArray, task: DpoTask, split: str) -> list[NDArray]:
    """The log-probs of each pair."""
    counts = _token_counts(task, split)
    return np.split(flat_logps, np.cumsum(counts)[:-1]) if counts else []
