"""One row with the prompt once equals two rows; the losses are their formulas; the reference is measured once."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from families import BACKENDS, FAMILIES, family
from modelwright.data.chat_tokens import TokenizedRow
from modelwright.data.preferences import PreferenceDataset, PreferencePair, TokenizedPair
from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.errors import ModelwrightError
from modelwright.models import attention
from modelwright.models.attention import unshared_layout
from modelwright.models.prefix_sharing import (
    prefix_sharing_blocker,
    shared_prefix_layout,
    supports_layout,
)
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.models.trainable import set_trainable
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import DpoConfig, PreferenceConfig
from modelwright.tasks.dpo import (
    REF_FILE,
    REF_MANIFEST,
    DpoLoss,
    DpoTask,
    collate_pairs,
    compute_ref_logps,
    precompute_ref_log_probs,
    with_layout,
)
from modelwright.tasks.losses import preference_loss
from tiny import tiny_pairs

LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)
SIZES = ((9, 5, 8), (4, 7, 3), (14, 1, 2))
"""Tokens in the prompt, the chosen and the rejected answer of each pair; the gemma's window is shorter than most."""


def encoded(*sizes: tuple[int, int, int], seed: int = 0) -> list[TokenizedPair]:
    """Random pairs whose answers are trained throughout."""
    rng = np.random.default_rng(seed)
    rows = [[rng.integers(3, 300, size, dtype=np.int32) for size in each] for each in sizes]
    return [
        TokenizedPair(prompt, *(TokenizedRow(tokens, np.ones(len(tokens), dtype=bool)) for tokens in answers))
        for prompt, *answers in rows
    ]


def answer_logps(model: Any, pairs: Sequence[TokenizedPair], shared: bool) -> Tensor:
    return DpoLoss(model, PreferenceConfig())(**collate_pairs(pairs, shared).inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_computed_once_gives_the_loss_and_the_gradients_of_two_passes(name: str, backend: str) -> None:
    model, pairs = family(name, backend), encoded(*SIZES)
    assert prefix_sharing_blocker(model) is None
    reference = answer_logps(model, pairs, shared=False).detach() + torch.linspace(-1, 1, 26)
    sums, gradients = [], []
    for shared in (True, False):
        batch = collate_pairs(pairs, shared)
        result = DpoLoss(model, PreferenceConfig())(**batch.inputs, ref_logps=reference)
        result[0].backward()
        sums.append(result.detach())
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)
    for weight, gradient in gradients[0].items():
        scale = gradients[1][weight].abs().max().clamp(min=1e-3)
        assert (gradient - gradients[1][weight]).abs().max() / scale < 1e-5, weight


@pytest.mark.parametrize("make_layout", [shared_prefix_layout, unshared_layout])
def test_log_probs_without_a_mask_equal_those_with_a_mask(make_layout: Any, monkeypatch: Any) -> None:
    model = copy.deepcopy(family("llama"))
    attention.register_attention(model)
    assert supports_layout(model, make_layout)
    module, batch = DpoLoss(model, PreferenceConfig()), collate_pairs(encoded(*SIZES), multiple=16)
    monkeypatch.setattr(module, "_computes_in_half", lambda: True)
    masked = module(**batch.inputs)
    gradients = torch.autograd.grad(masked.sum(), list(model.parameters()))
    result = module(**with_layout(make_layout, batch).inputs)
    torch.testing.assert_close(result, masked, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(result.sum(), list(model.parameters())), gradients, strict=True):
        assert (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_log_probs_without_a_mask_on_a_gpu() -> None:
    model = copy.deepcopy(family("llama")).cuda()
    attention.register_attention(model)
    assert supports_layout(model) and supports_layout(model, unshared_layout)


def test_attention_over_separate_answers_compiles_into_one_graph_at_any_length() -> None:
    def attended(query: Tensor, key: Tensor, gather_index: Tensor, scatter_index: Tensor, first_use: Tensor) -> Tensor:
        layout_inputs = {
            "unshare_gather_index": gather_index,
            "unshare_scatter_index": scatter_index,
            "unshare_first_use": first_use,
        }
        return attention.attention_forward(None, query, key, key, None, **layout_inputs)[0]

    compiled = torch.compile(attended, backend="eager", fullgraph=True)
    for sizes in (SIZES, SIZES[1:], ((20, 9, 30),) * 4):
        branches = collate_pairs(encoded(*sizes)).inputs["segment_ids"]
        query, key = (torch.randn(len(branches), heads, branches.shape[1], 8) for heads in (4, 2))
        reported = unshared_layout(branches)
        torch.testing.assert_close(compiled(query, key, *reported), attended(query, key, *reported))


def test_answers_are_not_laid_apart_where_a_layer_sees_less() -> None:
    model = copy.deepcopy(family("gemma3_text"))
    attention.register_attention(model)
    assert not supports_layout(model, unshared_layout)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_an_answer_cannot_see_the_other_nor_the_padding(name: str) -> None:
    model, (pair, other) = family(name), encoded((9, 5, 8), (9, 5, 17))
    alone = answer_logps(model, [pair], shared=True)
    changed = TokenizedPair(pair.prompt, pair.chosen, other.rejected)
    torch.testing.assert_close(answer_logps(model, [changed], shared=True)[:5], alone[:5], rtol=0, atol=1e-5)
    changed = TokenizedPair(pair.prompt, other.chosen, pair.rejected)
    torch.testing.assert_close(answer_logps(model, [changed], shared=True)[5:], alone[5:], rtol=0, atol=1e-5)
    torch.testing.assert_close(answer_logps(model, [pair, other], shared=True)[:13], alone, rtol=0, atol=1e-5)


def test_a_model_that_takes_no_mask_computes_each_answer_in_a_row_of_its_own(untied_model_folder: Path) -> None:
    model = load_model(untied_model_folder)
    model.config._attn_implementation = "flash_attention_2"
    assert "takes no mask" in str(prefix_sharing_blocker(model))
    batch = collate_pairs(encoded(*SIZES), shared=False)
    assert batch.inputs["tokens"].shape == (6, 17)
    assert "segment_ids" not in batch.inputs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -math.log(1 / (1 + math.exp(-0.1 * 3)))),
        ({"beta": 0.5}, -math.log(1 / (1 + math.exp(-0.5 * 3)))),
        ({"label_smoothing": 0.2}, 0.8 * math.log1p(math.exp(-0.3)) + 0.2 * math.log1p(math.exp(0.3))),
        ({"loss_type": "hinge"}, 1 - 0.3),
        ({"loss_type": "hinge", "beta": 1.0}, 0.0),
        ({"loss_type": "ipo"}, (2 / 4 + 1 / 2 - 5) ** 2),
    ],
)
def test_each_loss_is_its_formula(options: dict[str, Any], expected: float) -> None:
    # the chosen answer of 4 tokens has become likelier by 2, the rejected one of 2 tokens less likely by 1
    [result] = preference_loss(
        torch.tensor([[2.0, -1.0]]), torch.tensor([[4, 2]]), PreferenceConfig(**options)
    ).tolist()
    assert result == pytest.approx(expected, rel=1e-5)


def test_what_is_measured_is_what_it_says() -> None:
    model, pairs = family("llama"), encoded(*SIZES)
    now = answer_logps(model, pairs, shared=True).detach()
    reference = now - torch.tensor([0.1] * 5 + [-0.2] * 8 + [-0.1] * 7 + [0.3] * 3 + [0.4] + [0.25] * 2)
    result = DpoLoss(model, PreferenceConfig(beta=0.5))(**collate_pairs(pairs).inputs, ref_logps=reference).tolist()
    values = dict(zip(DpoLoss.metric_names, result, strict=True))
    chosen = float(now[:5].sum() + now[13:20].sum() + now[23:24].sum())
    assert values["reward_accuracy"] == 1  # of three
    assert values["reward_margin"] == pytest.approx(0.5 * (0.5 + 1.6 - 0.7 - 0.9 + 0.4 - 0.5), abs=1e-4)
    assert values["chosen_logp"] == pytest.approx(chosen, rel=1e-5)
    assert values["chosen_logp"] + values["rejected_logp"] == pytest.approx(float(now.sum()), rel=1e-5)
    assert values["sft_loss per chosen_tokens"] == pytest.approx(-chosen, rel=1e-5)
    assert (values["chosen_tokens"], values["answer_tokens"]) == (13, 26)
    moved = now - reference
    assert values["kl per answer_tokens"] == pytest.approx(float((moved.exp() - 1 - moved).sum()), rel=1e-4)


def preferences(count: int = 12, held_out: int = 4) -> PreferenceDataset:
    pairs = [
        PreferencePair(
            str(index),
            ({"role": "user", "content": row["prompt"]},),
            ({"role": "assistant", "content": row["chosen"]},),
            ({"role": "assistant", "content": row["rejected"]},),
            row["prompt"],
        )
        for index, row in enumerate(tiny_pairs(count + held_out))
    ]
    return PreferenceDataset(pairs[:count], pairs[count:], "")


def build_task_and_engine(folder: Path, model: Any = None, **options: Any) -> tuple[DpoTask, Engine]:
    """A task and an engine over the tiny model."""
    settings = DpoConfig(**{"precision": "fp32", "max_length": 128, "learning_rate": 1e-3, "max_steps": 6, **options})
    model = model or load_model(folder)
    task = DpoTask(model, load_tokenizer(folder), preferences(), settings, eos_token_ids(model))
    return task, Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)


def test_before_the_first_step_nothing_is_preferred_and_the_loss_is_the_logarithm_of_two(
    model_folder: Path, tmp_path: Path
) -> None:
    task, engine = build_task_and_engine(model_folder)
    precompute_ref_log_probs(task, engine, tmp_path, "m")
    result = engine.evaluate()
    assert result["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert result["eval_reward_margin"] == pytest.approx(0, abs=1e-5)
    assert result["eval_kl"] == pytest.approx(0, abs=1e-6)
    assert result["eval_sft_loss"] == pytest.approx(math.log(400), rel=0.02)  # a random model guesses
    assert set(result) == {f"eval_{name}" for name in (
        "loss", "reward_accuracy", "reward_margin", "chosen_logp", "rejected_logp", "kl", "sft_loss",
    )}  # fmt: skip


def test_dropout_is_off_so_that_the_first_loss_is_the_logarithm_of_two(model_folder: Path, tmp_path: Path) -> None:
    for disable_dropout in (True, False):
        model = load_model(model_folder)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
            layer.mlp.register_module("dropout", torch.nn.Dropout(0.3))
            layer.mlp.register_forward_hook(lambda mlp, _inputs, output: mlp.dropout(output))
        task, engine = build_task_and_engine(model_folder, model, disable_dropout=disable_dropout)
        assert (task.sharing_blocker is None) == disable_dropout, "noise is not shared between two answers"
        precompute_ref_log_probs(task, engine, tmp_path / str(disable_dropout), "m")
        first = next(engine.steps()).loss
        assert (abs(first - math.log(2)) < 1e-6) == disable_dropout


def test_training_prefers_the_chosen_answers_and_accumulation_equals_a_large_batch(
    model_folder: Path, tmp_path: Path
) -> None:
    curves, measured = [], []
    for rows, turns in ((4, 1), (1, 4)):
        task, engine = build_task_and_engine(
            model_folder, per_device_train_batch_size=rows, gradient_accumulation_steps=turns, max_steps=10
        )
        precompute_ref_log_probs(task, engine, tmp_path, "m")
        curves.append([(report.loss, report.grad_norm) for report in engine.steps()])
        measured.append(engine.evaluate())
    assert np.array(curves[0]) == pytest.approx(np.array(curves[1]), rel=1e-4)
    assert curves[0][-1][0] < 0.9 * curves[0][0][0]
    assert measured[0]["eval_reward_accuracy"] == 1
    assert measured[0]["eval_reward_margin"] > 0.1
    assert measured[0]["eval_kl"] > 0


def test_the_kept_reference_is_the_fresh_one_and_is_not_measured_again(model_folder: Path, tmp_path: Path) -> None:
    task, engine = build_task_and_engine(model_folder)
    precompute_ref_log_probs(task, engine, tmp_path, "m")
    fresh = compute_ref_logps(task, engine)
    for _ in engine.steps():  # whatever the weights have become since, the kept reference is of those before
        pass
    again, moved = build_task_and_engine(model_folder, model=task.module.model)
    assert precompute_ref_log_probs(again, moved, tmp_path, "m") is None
    for side, line in fresh.items():
        assert np.array_equal(np.concatenate(again.ref_logps[side]), line)
    assert not np.array_equal(compute_ref_logps(again, moved)["train"], fresh["train"])


def test_damaged_ref_log_probs_or_those_of_another_model_are_recomputed_and_reported(
    model_folder: Path, tmp_path: Path
) -> None:
    task, engine = build_task_and_engine(model_folder)
    precompute_ref_log_probs(task, engine, tmp_path, "m")
    before = (tmp_path / REF_FILE).read_bytes()
    damaged = bytearray(before)
    damaged[-3] ^= 1
    reported: list[str | None] = []
    for spoil in (
        lambda: (tmp_path / REF_FILE).write_bytes(damaged),
        lambda: (tmp_path / REF_FILE).unlink(),
        lambda: (tmp_path / REF_MANIFEST).write_text("{"),
    ):
        spoil()
        reported.append(precompute_ref_log_probs(task, engine, tmp_path, "m"))
        assert (tmp_path / REF_FILE).read_bytes() == before
    reported.append(precompute_ref_log_probs(task, engine, tmp_path, "another"))
    words = ("is damaged", "there is no reference.safetensors", "cannot be read", "of another model")
    assert all(word in str(line) for word, line in zip(words, reported, strict=True)), reported


def test_under_adapters_the_reference_is_the_model_without_them(model_folder: Path, tmp_path: Path) -> None:
    plain, engine = build_task_and_engine(model_folder)
    adapted = set_trainable(load_model(model_folder), DpoConfig(trainable="lora", lora_r=4))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    task, other = build_task_and_engine(model_folder, model=adapted)
    assert np.array_equal(compute_ref_logps(task, other)["train"], compute_ref_logps(plain, engine)["train"])
    assert sum(1 for module in task.module.modules() if type(module).__name__ == "LlamaForCausalLM") == 1


def test_pairs_that_are_cut_are_counted_and_too_many_are_refused(model_folder: Path) -> None:
    with pytest.raises(ModelwrightError, match=r"12 of 12 pairs are longer than max_length 32 .* \(1\); raise one"):
        build_task_and_engine(model_folder, max_length=32)
    task, _ = build_task_and_engine(model_folder, max_length=32, max_truncated_rows="100%")
    facts = task.train_set.stats()
    assert (facts["rows"], facts["truncated_rows"], facts["dropped_rows"]) == (12, 12, 0)
    assert facts["truncated_tokens"] > 0
    assert all(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) == 32 for pair in task.train_set.rows)
    assert all(pair.chosen.loss_mask.any() and pair.rejected.loss_mask.any() for pair in task.train_set.rows)
