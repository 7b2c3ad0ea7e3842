"""Rows end to end give the loss and the gradients of padded rows, in a few sizes; the steps of a run stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import FAMILIES, family
from modelwright.data.chat_tokens import TokenizedRow
from modelwright.data.preferences import TokenizedPair
from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.errors import ModelError
from modelwright.models import attention
from modelwright.models.attention import ATTN_NAME, register_attention
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.models.trainable import set_trainable
from modelwright.plan.choose import num_cached_layers
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.model_shape import shape_from_config
from modelwright.plan.stage import batch_shapes, is_padding_free, plan_stage
from modelwright.recipe.stage_specs import DpoConfig, OrpoConfig, SftConfig
from modelwright.tasks.batching import collate_examples, collate_flat
from modelwright.tasks.dpo import DpoLoss, DpoTask, collate_flat_pairs, collate_pairs, precompute_ref_log_probs
from modelwright.tasks.sft import SftLoss, SftTask
from tasks.test_dpo import preferences
from tasks.test_sft import assert_close, documents, gradients
from zoo import conversations

LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)
LENGTHS = (11, 7, 9, 30)


@pytest.mark.parametrize("ours", [False, True], ids=["its attention", "our attention"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_end_to_end_have_the_loss_and_the_gradients_of_padded_rows(name: str, ours: bool) -> None:
    model, rows = family(name), documents(*LENGTHS)
    if ours:
        register_attention(model)
    try:
        module = SftLoss(model)
        padded = module(**collate_examples([[row] for row in rows]).inputs)
        padded.backward()
        expected = gradients(module)
        module.max_seqlen = max(LENGTHS)
        batch = collate_flat(rows, (128, 48), max(LENGTHS))
        assert batch.inputs["tokens"].shape == (1, 128) and batch.inputs["targets"].shape == (48,)
        assert (batch.tokens, batch.trained_tokens) == (sum(LENGTHS), collate_examples([rows]).trained_tokens)
        assert batch.inputs["cu_seqlens"].tolist() == [0, 11, 18, 27, 57, 87, 117, 128], "padding in documents too"
        flat = module(**batch.inputs)
        flat.backward()
        torch.testing.assert_close(flat, padded, rtol=1e-5, atol=1e-4)
        assert_close(gradients(module), expected, 1e-4)
    finally:
        model.set_attn_implementation("sdpa")


def test_pairs_end_to_end_have_the_loss_and_the_gradients_of_padded_pairs() -> None:
    model = family("llama")
    rng = np.random.default_rng(0)
    pairs = []
    for sizes in ((9, 5, 8), (4, 7, 3), (14, 1, 2)):
        prompt, *answers = (rng.integers(3, 300, size, dtype=np.int32) for size in sizes)
        pairs.append(TokenizedPair(prompt, *(TokenizedRow(each, np.ones(len(each), dtype=bool)) for each in answers)))
    ref_logps = torch.linspace(-9, -1, 26)
    register_attention(model)
    try:
        module = DpoLoss(model, DpoConfig())
        padded = module(**collate_pairs(pairs, shared=False).inputs, ref_logps=ref_logps)
        padded[0].backward()
        expected = gradients(module)
        batch = collate_flat_pairs(pairs, (64, 32), 30)
        flat = module(**batch.inputs, ref_logps=torch.nn.functional.pad(ref_logps, (0, 6)))
        flat[0].backward()
        torch.testing.assert_close(flat, padded, rtol=1e-5, atol=1e-5)
        assert_close(gradients(module), expected, 1e-4)
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("prefix", [0, 300])
@pytest.mark.parametrize("rows", [4, 32])
def test_micro_batches_have_few_sizes_and_little_padding(rows: int, prefix: int) -> None:
    rng = np.random.default_rng(1)
    answers = rng.gamma(4, 30, 4000).astype(int) + 2
    lengths = np.minimum(512, answers + rng.integers(40, 160, 4000))
    shapes = batch_shapes((lengths + prefix).tolist(), answers.tolist(), rows, prefix)
    batches = [rng.integers(0, 4000, rows) for _ in range(700)]
    sizes = [shapes.size(prefix + int(lengths[batch].sum()), int(answers[batch].sum())) for batch in batches]
    counts = {size: sizes.count(size) for size in sizes}
    captured = sorted(counts.values(), reverse=True)[:12]
    assert sum(captured) >= 0.97 * len(sizes)
    tokens, targets = (sum(int(each[batch].sum()) for batch in batches) for each in (lengths, answers))
    assert sum(size for size, _ in sizes) <= (1.05 if rows == 32 else 1.10) * (tokens + prefix * len(batches))
    assert all(size > lengths[batch].sum() for (size, _), batch in zip(sizes, batches, strict=True))
    assert targets <= sum(count for _, count in sizes) <= (1.35 if prefix else 1.25) * targets


@pytest.mark.parametrize("share_prefix", [False, True])
def test_the_steps_of_a_run_are_those_of_padded_rows(model_folder: Path, share_prefix: bool) -> None:
    reports: dict[bool, list[Any]] = {}
    for padding_free in (False, True):
        settings = SftConfig(
            max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3,
            max_length=128, padding_free=padding_free, share_prefix=share_prefix,
        )  # fmt: skip
        model = load_model(model_folder)
        task = SftTask(model, load_tokenizer(model_folder), conversations(), settings, eos_token_ids(model))
        assert task.padding_free == padding_free
        engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=1)
        reports[padding_free] = [*engine.steps()]
        assert task.batch([]).trained_tokens == 0, "a rank without rows"
    for padded, flat in zip(*reports.values(), strict=True):
        assert (padded.batch_hash, padded.tokens) == (flat.batch_hash, flat.tokens)
        assert flat.loss == pytest.approx(padded.loss, rel=1e-4)
        assert flat.grad_norm == pytest.approx(padded.grad_norm, rel=1e-3)


def test_packed_rows_have_few_shapes_on_a_gpu(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SftConfig(max_length=128, packing=True, torch_compile=True, share_prefix=False)
    monkeypatch.setattr(attention, "has_varlen", lambda model, precision: False)
    model, tokenizer = load_model(model_folder), load_tokenizer(model_folder)
    plain = SftTask(model, tokenizer, conversations(), settings, eos_token_ids(model))
    monkeypatch.setattr(attention, "has_varlen", lambda model, precision: True)
    rounded = SftTask(model, tokenizer, conversations(), settings, eos_token_ids(model))
    batches = [[first, first + 1] for first in range(0, rounded.rows - 1, 2)]
    for rows in batches:
        expected, batch = plain.batch(rows), rounded.batch(rows)
        assert batch.inputs["targets"].shape == batch.inputs["loss_positions"].shape
        assert len(batch.inputs["targets"]) % (batch.inputs["tokens"].numel() // 16) == 0
        assert (batch.tokens, batch.trained_tokens) == (expected.tokens, expected.trained_tokens)
        torch.testing.assert_close(rounded.module(**batch.inputs), plain.module(**expected.inputs))
    counts = [len({len(task.batch(rows).inputs["loss_positions"]) for rows in batches}) for task in (plain, rounded)]
    assert counts[1] <= min(counts[0], 4)
    assert rounded.batch([]).trained_tokens == 0, "a rank without rows"


def test_the_steps_of_a_dpo_run_are_those_of_padded_pairs(model_folder: Path, tmp_path: Path) -> None:
    reports: dict[bool, list[Any]] = {}
    for padding_free in (False, True):
        settings = DpoConfig(
            max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3,
            max_length=128, padding_free=padding_free,
        )  # fmt: skip
        model = load_model(model_folder)
        task = DpoTask(model, load_tokenizer(model_folder), preferences(), settings, eos_token_ids(model))
        assert task.padding_free == padding_free
        engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=1)
        precompute_ref_log_probs(task, engine, tmp_path / str(padding_free), "model")
        reports[padding_free] = [*engine.steps()]
        assert engine.evaluate()
    for padded, flat in zip(*reports.values(), strict=True):
        assert padded.batch_hash == flat.batch_hash
        assert flat.loss == pytest.approx(padded.loss, rel=1e-4)
        assert flat.metrics == pytest.approx(padded.metrics, rel=1e-3, abs=1e-5)


def test_auto_is_on_where_attention_has_varlen_kernels() -> None:
    assert is_padding_free(SftConfig(), has_varlen=True) and not is_padding_free(SftConfig(), has_varlen=False)
    assert is_padding_free(DpoConfig(), has_varlen=True) and not is_padding_free(OrpoConfig(), has_varlen=True)
    for settings in (SftConfig(packing=True), SftConfig(trainable={"last_layers": 1}), SftConfig(padding_free=False)):
        assert not is_padding_free(settings, has_varlen=True)
    assert not is_padding_free(DpoConfig(share_prompt=False), has_varlen=True)


def test_pairs_that_cannot_be_laid_end_to_end_are_refused(model_folder: Path) -> None:
    model = load_model(model_folder)
    settings = DpoConfig(padding_free=True, share_prompt=False, max_length=128)
    with pytest.raises(ModelError, match="padding_free: true wants a prompt shared by both answers: share_prompt is"):
        DpoTask(model, load_tokenizer(model_folder), preferences(), settings, eos_token_ids(model))
    assert model.config._attn_implementation == ATTN_NAME


@pytest.mark.parametrize("untied", [False, True])
def test_rows_of_a_partly_trained_model_are_laid_end_to_end_unless_layers_are_cached(
    model_folder: Path, untied: bool
) -> None:
    model = load_model(model_folder)
    assert model.config.tie_word_embeddings
    shape = shape_from_config(model.config.to_dict(), "it", "a test")
    trainable = {"last_layers": 1, "lm_head": True, "untie_lm_head": untied}
    settings = SftConfig(max_length=128, padding_free=True, trainable=trainable)
    set_trainable(model, settings)
    task = SftTask(model, load_tokenizer(model_folder), conversations(), settings, eos_token_ids(model))
    assert task.padding_free != untied, "a tied head trains what every layer is given, so that nothing can be cached"
    assert (num_cached_layers(shape, settings) > 0) == untied
