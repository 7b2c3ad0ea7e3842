"""Direct preference optimization (DPO, IPO, hinge) and the reference log-probabilities it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from modelwright.data.preferences import PreferenceDataset, TokenizedPair, TokenizedPairs, tokenize_pairs
from modelwright.data.sampler import rank_micro_batches
from modelwright.engine.task import MicroBatch
from modelwright.engine.trainer import Engine
from modelwright.errors import StorageError, is_storage_failure
from modelwright.models.attention import (
    HALF_DTYPES,
    SharedPrefixLayout,
    UnsharedLayout,
    compute_logits,
    hidden_states,
    lm_head_weight,
    unshared_layout,
)
from modelwright.models.prefix_sharing import (
    prefix_sharing_blocker,
    shared_prefix_layout,
    shared_prefix_mask,
    supports_layout,
)
from modelwright.recipe.schema import DpoConfig, PreferenceConfig
from modelwright.runs.folder import fsync_path, hash_file, read_json, write_json
from modelwright.tasks.batching import row_multiple
from modelwright.tasks.losses import preference_loss, selective_log_softmax, token_logps

Array = np.ndarray[Any, Any]
LENGTH_MULTIPLE = 8
"""Rows with a mask are a multiple of this long, without which a GPU's masked attention copies the mask."""
KL_CLAMP = 20.0
"""Where the exponential of a logarithm is held, so that one token cannot make the distance infinite."""


class DpoLoss(nn.Module):
    """A language model whose forward gives what is measured of pairs, the loss first, summed over them."""

    def __init__(self, model: Any, settings: PreferenceConfig) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        positions_and_targets: Tensor,
        answer_lengths: Tensor,
        **extra_inputs: Tensor,
    ) -> Tensor:
        """tokens, positions: [rows, length] int64. Returns [measures], or without a reference [count] logarithms.

        answers: [2, count] int64, flat places that foretell an answer's tokens, and those tokens;
        lengths: [2 × pairs] int64, tokens in each pair's chosen and rejected answer; beside: branches, as tokens,
        where a row holds both answers, what `between_answers` takes where attention needs no mask, reference: [count]
        float32.
        """
        segment_ids, ref_logps = extra_inputs.get("segment_ids"), extra_inputs.get("ref_logps")
        layout = layout_from_inputs(extra_inputs) if self._computes_in_half() else None
        mask = (
            None
            if segment_ids is None or layout is not None
            else shared_prefix_mask(self.model, positions, segment_ids)
        )
        hidden = hidden_states(self.model, tokens, positions, mask, layout)
        logps = self._logps(hidden.flatten(0, 1).index_select(0, positions_and_targets[0]), positions_and_targets[1])
        return logps if ref_logps is None else self._metrics(logps, ref_logps, answer_lengths)

    def _logps(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """How likely each answer token is, as a logarithm. hidden: [count, width]; targets: [count] int64."""
        head = lm_head_weight(self.model)
        if head is not None:
            return token_logps(hidden, head, targets)
        return selective_log_softmax(compute_logits(self.model, hidden), targets)

    def _computes_in_half(self) -> bool:
        """Whether attention is computed in bf16 or fp16, which alone the way without a mask can."""
        return torch.is_autocast_enabled("cuda") or next(self.model.parameters()).dtype in HALF_DTYPES

    def _metrics(self, logps: Tensor, ref_logps: Tensor, answer_lengths: Tensor) -> Tensor:
        if not len(answer_lengths):
            return logps.sum() * logps.new_zeros(len(DpoTask.metric_names))  # nothing, yet through every weight
        counts = answer_lengths.view(-1, 2)
        policy_sums, ref_sums = (_segment_sum(values, answer_lengths).view(-1, 2) for values in (logps, ref_logps))
        logratios = policy_sums - ref_sums
        loss = preference_loss(logratios, counts, self.settings)
        with torch.no_grad():
            margins = self.settings.beta * (logratios[:, 0] - logratios[:, 1])
            token_logratios = logps - ref_logps
            metrics = [
                (margins > 0).sum(), margins.sum(), policy_sums[:, 0].sum(), policy_sums[:, 1].sum(),
                (token_logratios.clamp(max=KL_CLAMP).exp() - 1 - token_logratios).sum(), -policy_sums[:, 0].sum(), counts[:, 0].sum(), counts.sum(),
            ]  # fmt: skip
        return torch.stack([loss.sum(), *(value.to(loss.dtype) for value in metrics)])


class DpoTask:
    """Pairs as rows; the rows are held against a reference that is set before training."""

    metric_names: tuple[str, ...] = (
        *("loss", "reward_accuracy", "reward_margin", "chosen_logp", "rejected_logp"),
        *("kl per answer_tokens", "sft_loss per chosen_tokens", "chosen_tokens", "answer_tokens"),
    )
    """The distance kl is estimated over the answers' tokens by r - 1 - log r, r how much likelier each has become."""
    fp8_check_metric = "sft_loss per chosen_tokens"
    """What two ways of computing are held against each other by; the loss of pairs is a difference of two such."""

    def __init__(
        self, model: Any, tokenizer: Any, data: PreferenceDataset, settings: DpoConfig, stops: Collection[int]
    ) -> None:
        self.module: nn.Module = DpoLoss(model, settings)
        self.sharing_blocker = prefix_sharing_blocker(model) if settings.share_prompt else "share_prompt is false"
        self.train_set = tokenize_pairs(data.train, tokenizer, settings, stops)
        self.held_out_set = (
            tokenize_pairs(data.held_out, tokenizer, settings, stops) if data.held_out else TokenizedPairs()
        )
        layouts = (unshared_layout, shared_prefix_layout) if self.sharing_blocker is None else ()
        self.layout = next((layout for layout in layouts if supports_layout(model, layout)), None)
        self.ref_logps: dict[str, list[Array]] = {}
        self._row_multiple = row_multiple(settings)

    @property
    def splits(self) -> dict[str, list[TokenizedPair]]:
        """The pairs that move the weights and those that only measure, by name."""
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
        return self._batch_with_reference("train", rows)

    def time_trial_batch(self, rows: Sequence[int], step: int = 0) -> MicroBatch:
        """A batch to go through before the reference is measured: it is held against none."""
        micro_batch = self.batch_without_reference("train", rows)
        zeros = torch.zeros(micro_batch.inputs["positions_and_targets"].shape[1])
        return MicroBatch({**micro_batch.inputs, "ref_logps": zeros}, micro_batch.trained_tokens, micro_batch.tokens)

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        return self._batch_with_reference("held_out", rows)

    def batch_without_reference(self, split: str, rows: Sequence[int]) -> MicroBatch:
        """A batch without its reference: the module gives the logarithm of each answer token's likelihood."""
        pairs = [self.splits[split][row] for row in rows]
        micro_batch = collate_pairs(pairs, shared=self.sharing_blocker is None, multiple=self._row_multiple)
        return micro_batch if self.layout is None else with_layout(self.layout, micro_batch)

    def _batch_with_reference(self, split: str, rows: Sequence[int]) -> MicroBatch:
        assert not rows or self.ref_logps, "the reference log-probs are computed before training"
        micro_batch = self.batch_without_reference(split, rows)
        row_logps = [self.ref_logps[split][row] for row in rows]
        ref_logps = np.concatenate(row_logps) if row_logps else np.zeros(0, dtype=np.float32)
        return MicroBatch(
            {**micro_batch.inputs, "ref_logps": torch.from_numpy(ref_logps)},
            micro_batch.trained_tokens,
            micro_batch.tokens,
        )


def collate_pairs(pairs: Sequence[TokenizedPair], shared: bool = True, multiple: int = 1) -> MicroBatch:
    """Lay pairs out in rows of equal length: one row a pair with its prompt once, or one row an answer.

    Padding stands to the right, where no real token can see it; the length is a multiple as asked for.
    """
    rows = [_row(pair.prompt, [pair.chosen, pair.rejected]) for pair in pairs] if shared else [
        _row(pair.prompt, [answer]) for pair in pairs for answer in (pair.chosen, pair.rejected)
    ]  # fmt: skip
    length = max((len(tokens) for tokens, *_ in rows), default=2)
    multiple = math.lcm(multiple, LENGTH_MULTIPLE if shared else 1)
    length = -(-length // multiple) * multiple
    padded = np.zeros((3, max(1, len(rows)), length), dtype=np.int64)  # tokens, positions, branches
    logit_positions: list[Array] = []
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
        **({"segment_ids": padded[2]} if shared else {}),
    }
    return MicroBatch(
        inputs={name: torch.from_numpy(value) for name, value in inputs.items()},
        trained_tokens=len(pairs),
        tokens=sum(len(tokens) for tokens, *_ in rows),
    )


def layout_from_inputs(inputs: dict[str, Tensor]) -> UnsharedLayout | SharedPrefixLayout | None:
    """How attention without a mask is told of answers, where the batch says it."""
    if "gather_index" in inputs:
        return UnsharedLayout(*(inputs[name] for name in UnsharedLayout._fields))
    return SharedPrefixLayout(inputs["kv_index"], inputs["cu_seqlens_qk"]) if "kv_index" in inputs else None


def with_layout(
    make_layout: Callable[[Tensor], UnsharedLayout | SharedPrefixLayout], micro_batch: MicroBatch
) -> MicroBatch:
    """The same batch for attention that is told so, without a mask, who sees whom."""
    # paths leave nobody out: padding, which no answer sees, goes with the last one
    fields = make_layout(
        micro_batch.inputs["segment_ids"].clamp(max=2 if make_layout is shared_prefix_layout else 3)
    )._asdict()
    tensors = {name: each for name, each in fields.items() if isinstance(each, Tensor)}
    return replace(micro_batch, inputs={**micro_batch.inputs, **tensors})


def _row(prompt: Array, answers: Sequence[Any]) -> tuple[Array, Array, Array, Array]:
    """Tokens, positions and branches of one row, and the places that foretell the answers' trained tokens."""
    start, parts = len(prompt), [prompt]
    positions, segment_ids, logit_positions = [np.arange(start)], [np.zeros(start, dtype=np.int64)], []
    for segment, answer in enumerate(answers, 1):
        parts.append(answer.tokens)
        positions.append(len(prompt) + np.arange(len(answer)))
        segment_ids.append(np.full(len(answer), segment))
        predicting = np.arange(start - 1, start - 1 + len(answer))
        predicting[0] = len(prompt) - 1  # the first word of each answer is foretold by the last of the prompt
        logit_positions.append(predicting[answer.trained])
        start += len(answer)
    return tuple(np.concatenate(each) for each in (parts, positions, segment_ids, logit_positions))  # type: ignore[return-value]


def _segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Neighbours added up: [count] into [len(lengths)], the same way at every start, on every device."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def _concatenate(arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)


REF_FILE, REF_MANIFEST = "reference.safetensors", "reference.json"
REF_VERSION = 2
"""Raised when what is kept changes, so that an old file is not taken for a new one."""


def precompute_ref_log_probs(task: DpoTask, engine: Engine, folder: Path, model: str) -> str | None:
    """Give the task its reference: from the folder where it is whole and of this model and data, else measured now.

    `model` is the fingerprint of the weights before training, which the engine must still hold. Returns what a person
    should know.
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


def compute_ref_logps(task: DpoTask, engine: Engine) -> dict[str, Array]:
    """The logarithm of each answer token's likelihood, for each side in one line: [count] float32."""
    model: Any = task.module.model
    adapters_off: AbstractContextManager[Any] = (
        model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()
    )
    with adapters_off:
        return {split: _split_logps(task, engine, split) for split in task.splits}


def _split_logps(task: DpoTask, engine: Engine, split: str) -> Array:
    pairs, world = task.splits[split], engine.world
    order = sorted(range(len(pairs)), key=lambda row: len(pairs[row]))  # like lengths together save padding
    micro_batches = rank_micro_batches(order, world.rank, world.size, engine.eval_micro_batch_size)
    flat_logps = np.zeros(sum(_token_counts(task, split)), dtype=np.float32)
    pair_logps = _split_by_pair(flat_logps, task, split)  # views: what is written there stands in the line
    outputs = engine.predict(task.batch_without_reference(split, rows) for rows in micro_batches)
    for rows, batch_logps in zip(micro_batches, outputs, strict=True):
        parts = np.split(batch_logps.numpy(), np.cumsum([len(pair_logps[row]) for row in rows])[:-1]) if rows else []
        for row, part in zip(rows, parts, strict=True):
            pair_logps[row][:] = part
    all_logps: Array = world.all_reduce(torch.from_numpy(flat_logps)).numpy()
    return all_logps


def ref_fingerprint(task: DpoTask, engine: Engine, model: str) -> str:
    """Changes with the model, the arithmetic, and every token: so with data, template, lengths and cuts."""
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
    """Why the kept reference cannot be taken; None where it can."""
    try:
        manifest = read_json(folder / REF_MANIFEST)
        if manifest["fingerprint"] != key:
            return "it is of another model, other data or other arithmetic"
        return None if hash_file(folder / REF_FILE) == manifest["hash"] else f"{REF_FILE} is damaged"
    except FileNotFoundError as error:
        return f"there is no {Path(error.filename).name}"
    except (OSError, StorageError, ValueError, KeyError, TypeError) as error:
        return f"it cannot be read ({error})"


def _write_ref_logps(folder: Path, key: str, logps: dict[str, Array]) -> None:
    """Write the lines, then the facts that vouch for them."""
    partial = folder / f".{REF_FILE}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REF_MANIFEST).unlink(missing_ok=True)
        save_file(logps, partial)
        fsync_path(partial)
        partial.replace(folder / REF_FILE)
    except Exception as error:
        partial.unlink(missing_ok=True)
        if (isinstance(error, OSError) and is_storage_failure(error)) or "os error 28" in str(error):
            raise StorageError(f"{folder / REF_FILE}: the reference could not be written ({error})") from None
        raise
    counts = {f"{split}_tokens": len(flat_logps) for split, flat_logps in logps.items()}
    write_json(folder / REF_MANIFEST, {"fingerprint": key, "hash": hash_file(folder / REF_FILE), **counts})


def _token_counts(task: DpoTask, split: str) -> list[int]:
    """Trained tokens of each pair."""
    return [int(pair.chosen.loss_mask.sum() + pair.rejected.loss_mask.sum()) for pair in task.splits[split]]


def _split_by_pair(flat_logps: Array, task: DpoTask, split: str) -> list[Array]:
    """One piece of the line for each pair."""
    counts = _token_counts(task, split)
    return np.split(flat_logps, np.cumsum(counts)[:-1]) if counts else []
