"""FP8 takes rows of any length and changes no loss by padding; what a row says does not hang on the rows beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eighths import stand_in
from families import family
from modelwright.data.chat import Encoded
from modelwright.data.preferences import Pair, Preferences
from modelwright.engine import fp8
from modelwright.engine.loop import Engine
from modelwright.engine.trial import try_fp8
from modelwright.engine.world import World
from modelwright.models.text import load_model, load_tokenizer, stop_tokens
from modelwright.models.trainable import set_trainable
from modelwright.plan.facts import Facts
from modelwright.plan.stage import plan_stage
from modelwright.recipe.schema import Dpo, Pretrain, Sft
from modelwright.tasks import dpo, layout, pretrain, sft
from modelwright.tasks.reference import set_reference
from tiny import tiny_pairs

LAPTOP = Facts("cpu", "a laptop", 8 << 30, fast_bf16=False)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def documents(*lengths: int) -> list[Encoded]:
    dice = np.random.default_rng(0)
    return [Encoded(dice.integers(3, 300, each, dtype=np.int32), np.arange(each) > each // 2) for each in lengths]


def said(role: str, words: str) -> tuple[dict[str, str], ...]:
    return ({"role": role, "content": words},)


def pairs_task(folder: Path, model: Any, settings: Dpo) -> dpo.DpoTask:
    pairs = [
        Pair(str(place), said("user", row["prompt"]), said("assistant", row["chosen"]),
             said("assistant", row["rejected"]), row["prompt"])
        for place, row in enumerate(tiny_pairs(12))
    ]  # fmt: skip
    return dpo.DpoTask(model, load_tokenizer(folder), Preferences(pairs, [], ""), settings, stop_tokens(model))


@pytest.mark.parametrize("settings", [Sft, Dpo, Pretrain])
def test_only_fp8_asks_for_padding(settings: Any) -> None:
    assert layout.multiple_of(settings(precision="fp8")) == fp8.MULTIPLE
    assert layout.multiple_of(settings(precision="bf16")) == 1


def test_packed_rows_of_compiled_layers_come_in_few_lengths() -> None:
    compiled, eighths = Sft(torch_compile=True, max_length=2048), Sft(precision="fp8", max_length=2048)
    for settings in (compiled, eighths):
        multiple = layout.packed_multiple_of(settings, settings.max_length)
        assert {-(-length // multiple) * multiple for length in range(1921, 2049)} == {2048}
    assert layout.packed_multiple_of(Sft(), 2048) == 1
    assert layout.packed_multiple_of(Sft(precision="fp8"), 100) == fp8.MULTIPLE


def test_padding_changes_no_loss() -> None:
    model, rows = family("llama"), documents(21, 14, 9, 33)
    placed = layout.side_by_side([[0, 1], [2], [3]], rows)
    tokens = np.random.default_rng(1).integers(3, 300, (2, 37))
    positions = np.stack([np.arange(37), np.arange(37) % 20])
    laid = {
        sft.AnswerLoss(model): lambda multiple: layout.lay_out(placed, rows, 0, multiple),
        pretrain.TextLoss(model, 1.0): lambda multiple: pretrain.lay_out(tokens, positions, 74, multiple),
    }
    for module, lay_out in laid.items():
        plain, padded = lay_out(1), lay_out(16)
        assert plain.inputs["tokens"].shape[1] % 16 and padded.inputs["tokens"].shape[1] % 16 == 0
        assert (plain.trained, plain.tokens) == (padded.trained, padded.tokens)
        torch.testing.assert_close(module(**padded.inputs), module(**plain.inputs), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_padding_changes_no_likelihood_of_an_answer(model_folder: Path, shared: bool) -> None:
    model, found = load_model(model_folder), []
    for precision in ("fp8", "bf16"):
        task = pairs_task(model_folder, model, Dpo(precision=precision, max_length=128, share_prompt=shared))
        batch = task.bare_batch("train", [0, 2, 5])
        assert precision == "bf16" or batch.inputs["tokens"].shape[1] % 16 == 0
        found.append(task.module(**batch.inputs))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-5)


@torch.no_grad()
def test_what_a_pair_says_in_fp8_does_not_hang_on_the_rows_beside_it(torchao: None, model_folder: Path) -> None:
    task = pairs_task(model_folder, load_model(model_folder), Dpo(precision="fp8", max_length=128))
    exact = task.module(**task.bare_batch("train", [3]).inputs)
    linears = fp8.convert(task.module)
    assert len(linears) == 14
    fp8.switch(linears, "rowwise")
    alone = task.module(**task.bare_batch("train", [3]).inputs)
    among = task.module(**task.bare_batch("train", [3, 1, 7, 11]).inputs)[: len(alone)]
    rounding = (alone - exact).abs().max()
    assert rounding > 1e-4
    assert (among - alone).abs().max() < 0.02 * rounding  # with a scale for each matrix, as large as it


def test_before_the_first_step_in_fp8_the_loss_is_the_logarithm_of_two(
    torchao: None, model_folder: Path, tmp_path: Path
) -> None:
    settings = Dpo(precision="fp8", max_length=128, max_steps=2, per_device_train_batch_size=3, learning_rate=1e-3)
    task = pairs_task(model_folder, load_model(model_folder), settings)
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)
    set_reference(task, engine, tmp_path, "m")
    losses = [report.loss for report in engine.steps()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[1] < losses[0]


def test_low_rank_matrices_and_the_head_stay_as_they_are(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = set_trainable(load_model(model_folder), Sft(trainable="lora", lora_r=16))
    stand_in(monkeypatch)  # only now: peft would look into it
    plain = {name for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    assert len(fp8.convert(model)) == 14
    left = {name for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    assert {name.rpartition(".")[2] for name in plain - left} == {"base_layer"}
    assert len(left) == 2 * 14 + 1
    answers = sft.AnswerLoss(model)
    rows = documents(21, 14)
    answers(**layout.lay_out(layout.side_by_side([[0], [1]], rows), rows, 0, 16).inputs).backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert moved and all("lora_" in name for name in moved)


def test_fp8_that_fails_half_way_leaves_no_gradient_behind(
    torchao: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Dpo(
        precision="fp8", max_length=128, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    task = pairs_task(model_folder, load_model(model_folder), settings)
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)
    set_reference(task, engine, tmp_path, "m")
    usual, micro_batches = engine._micro, []

    def fails_in_the_second(turn: int, **inputs: Any) -> Any:
        micro_batches.append(turn)
        if engine.precision.name == "fp8" and turn == 1:
            raise NotImplementedError("no such kernel")
        return usual(turn, **inputs)

    monkeypatch.setattr(engine, "_micro", fails_in_the_second)
    found = try_fp8(engine, ("tensorwise",))
    assert not found.kept and "no such kernel" in found.why and 1 in micro_batches
    assert all(weight.grad is None for weight in engine.weights.values())
