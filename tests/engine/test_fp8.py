"""FP8 padding changes no loss, and a row's result does not depend on the other rows of its batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_torchao import use_fake_torchao
from families import family
from modelwright.data.chat_tokens import TokenizedRow
from modelwright.data.preferences import PreferenceDataset, PreferencePair
from modelwright.engine import precision
from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.models.trainable import set_trainable
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import DpoConfig, PretrainConfig, SftConfig
from modelwright.stages.planning import run_fp8_trial
from modelwright.tasks import batching, dpo, pretrain, sft
from modelwright.tasks.dpo import precompute_ref_log_probs
from tiny import tiny_pairs

LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_torchao(monkeypatch)


def documents(*lengths: int) -> list[TokenizedRow]:
    rng = np.random.default_rng(0)
    return [TokenizedRow(rng.integers(3, 300, each, dtype=np.int32), np.arange(each) > each // 2) for each in lengths]


def message(role: str, text: str) -> tuple[dict[str, str], ...]:
    return ({"role": role, "content": text},)


def pairs_task(folder: Path, model: Any, settings: DpoConfig) -> dpo.DpoTask:
    pairs = [
        PreferencePair(str(index), message("user", row["prompt"]), message("assistant", row["chosen"]),
             message("assistant", row["rejected"]), row["prompt"])
        for index, row in enumerate(tiny_pairs(12))
    ]  # fmt: skip
    return dpo.DpoTask(model, load_tokenizer(folder), PreferenceDataset(pairs, [], ""), settings, eos_token_ids(model))


@pytest.mark.parametrize("settings", [SftConfig, DpoConfig, PretrainConfig])
def test_only_fp8_asks_for_padding(settings: Any) -> None:
    assert batching.row_multiple(settings(precision="fp8")) == precision.FP8_ALIGNMENT
    assert batching.row_multiple(settings(precision="bf16")) == 1


def test_packed_rows_of_compiled_layers_come_in_few_lengths() -> None:
    compiled, fp8 = SftConfig(torch_compile=True, max_length=2048), SftConfig(precision="fp8", max_length=2048)
    for settings in (compiled, fp8):
        multiple = batching.packed_row_multiple(settings, settings.max_length)
        assert {-(-length // multiple) * multiple for length in range(1921, 2049)} == {2048}
    assert batching.packed_row_multiple(SftConfig(), 2048) == 1
    assert batching.packed_row_multiple(SftConfig(precision="fp8"), 100) == precision.FP8_ALIGNMENT


def test_padding_changes_no_loss() -> None:
    model, rows = family("llama"), documents(21, 14, 9, 33)
    rows_layout = batching.layout_rows([[0, 1], [2], [3]], list(map(len, rows)))
    tokens = np.random.default_rng(1).integers(3, 300, (2, 37))
    positions = np.stack([np.arange(37), np.arange(37) % 20])
    collators = {
        sft.SftLoss(model): lambda multiple: batching.collate_rows(rows_layout, rows, 0, multiple),
        pretrain.PretrainLoss(model, 1.0): lambda multiple: pretrain.collate_packed(tokens, positions, 74, multiple),
    }
    for module, collate in collators.items():
        plain, padded = collate(1), collate(16)
        assert plain.inputs["tokens"].shape[1] % 16 and padded.inputs["tokens"].shape[1] % 16 == 0
        assert (plain.trained_tokens, plain.tokens) == (padded.trained_tokens, padded.tokens)
        torch.testing.assert_close(module(**padded.inputs), module(**plain.inputs), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_padding_changes_no_likelihood_of_an_answer(model_folder: Path, shared: bool) -> None:
    model, outputs = load_model(model_folder), []
    for name in ("fp8", "bf16"):
        task = pairs_task(model_folder, model, DpoConfig(precision=name, max_length=128, share_prompt=shared))
        batch = task.collate("train", [0, 2, 5])
        assert name == "bf16" or batch.inputs["tokens"].shape[1] % 16 == 0
        outputs.append(task.module(**batch.inputs))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-5)


@torch.no_grad()
def test_the_log_probs_of_a_pair_in_fp8_do_not_depend_on_the_other_rows(torchao: None, model_folder: Path) -> None:
    task = pairs_task(model_folder, load_model(model_folder), DpoConfig(precision="fp8", max_length=128))
    exact = task.module(**task.collate("train", [3]).inputs)
    linears = precision.convert_to_fp8(task.module)
    assert len(linears) == 14
    precision.set_fp8_scaling(linears, "rowwise")
    alone = task.module(**task.collate("train", [3]).inputs)
    among = task.module(**task.collate("train", [3, 1, 7, 11]).inputs)[: len(alone)]
    rounding = (alone - exact).abs().max()
    assert rounding > 1e-4
    assert (among - alone).abs().max() < 0.02 * rounding  # with a scale for each matrix, as large as it


def test_before_the_first_step_in_fp8_the_loss_is_the_logarithm_of_two(
    torchao: None, model_folder: Path, tmp_path: Path
) -> None:
    settings = DpoConfig(
        precision="fp8", max_length=128, max_steps=2, per_device_train_batch_size=3, learning_rate=1e-3
    )
    task = pairs_task(model_folder, load_model(model_folder), settings)
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)
    precompute_ref_log_probs(task, engine, tmp_path, "m")
    losses = [report.loss for report in engine.steps()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[1] < losses[0]


def test_low_rank_matrices_and_the_head_stay_as_they_are(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = set_trainable(load_model(model_folder), SftConfig(trainable="lora", lora_r=16))
    use_fake_torchao(monkeypatch)  # only now: peft would look into it
    plain = {name for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    assert len(precision.convert_to_fp8(model)) == 14
    left = {name for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    assert {name.rpartition(".")[2] for name in plain - left} == {"base_layer"}
    assert len(left) == 2 * 14 + 1
    answers = sft.SftLoss(model)
    rows = documents(21, 14)
    answers(
        **batching.collate_rows(batching.layout_rows([[0], [1]], list(map(len, rows))), rows, 0, 16).inputs
    ).backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert moved and all("lora_" in name for name in moved)


def test_fp8_that_fails_half_way_leaves_no_gradient(
    torchao: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DpoConfig(
        precision="fp8", max_length=128, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    task = pairs_task(model_folder, load_model(model_folder), settings)
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)
    precompute_ref_log_probs(task, engine, tmp_path, "m")
    original, micro_batches = engine._run_micro_batch, []

    def fails_in_the_second(micro_step: int, is_short: bool, inputs: Any) -> Any:
        micro_batches.append(micro_step)
        if engine.precision.name == "fp8" and micro_step == 1:
            raise NotImplementedError("no such kernel")
        return original(micro_step, is_short, inputs)

    monkeypatch.setattr(engine, "_run_micro_batch", fails_in_the_second)
    outputs = run_fp8_trial(engine, ("tensorwise",))
    assert not outputs.use_fp8 and "no such kernel" in outputs.reason and 1 in micro_batches
    assert all(weight.grad is None for weight in engine.trainable_params.values())
