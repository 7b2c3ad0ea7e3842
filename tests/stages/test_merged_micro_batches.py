"""Merged micro-batches train what the recipe's do, and a resumed run keeps those of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.plan.hardware import GPUS, Hardware
from modelwright.recipe.load import load
from modelwright.runs.folder import write_json
from modelwright.stages import pipeline, planning, stage_runner
from modelwright.stages.context import RunContext
from modelwright.tasks.sft import SftLoss
from tests.faults.fork_server import events_of, run_fingerprint
from tiny import tiny_dpo_recipe, tiny_recipe

SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 6,
            "save_steps": 2, "torch_compile": False, "cuda_graphs": "never"}  # fmt: skip


@pytest.fixture
def plan_for_h200(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the planner take this machine for an H200, or not."""
    here = planning._hardware

    def switch(on: bool) -> None:
        monkeypatch.setattr(planning, "_hardware", (lambda _: Hardware(1, 1, GPUS["H200"])) if on else here)

    return switch


def train(recipe: Path) -> tuple[dict[str, Any], list[int]]:
    """Steps and files of a run, and the micro-batch size of each start."""
    stage = "dpo" if "dpo:" in recipe.read_text(encoding="utf-8") else "sft"
    pipeline.run(load(recipe, environ={}), lambda event: None)
    run = recipe.parent / "run"
    return run_fingerprint(run, stage), [plan["micro_batch_size"] for plan in events_of(run, "plan")]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (tiny_recipe, {}),
        (tiny_recipe, {"padding_free": True}),
        (tiny_recipe, {"packing": True}),
        (tiny_dpo_recipe, {}),
    ],
    ids=["padded", "padding_free", "packed", "dpo"],
)
def test_merged_micro_batches_have_the_loss_and_the_gradients_of_small_ones(
    recipe: Callable[..., Path],
    settings: dict[str, Any],
    model_folder: Path,
    tmp_path: Path,
    plan_for_h200: Callable[[bool], None],
) -> None:
    runs = {}
    for merged in (False, True):
        plan_for_h200(merged)
        runs[merged], sizes = train(recipe(tmp_path / str(merged), model_folder, **SETTINGS, **settings))
        assert sizes == [4 if merged else 1]
    [plan] = events_of(tmp_path / "True/run", "plan")
    assert any(line.startswith("4 rows at once instead of 1: ") for line in plan["reasons"]), plan["reasons"]
    for step, (loss, batch_hash, grad_norm, _) in runs[False]["steps"].items():
        merged_loss, merged_hash, merged_norm, _ = runs[True]["steps"][step]
        assert merged_hash == batch_hash
        assert merged_loss == pytest.approx(loss, rel=1e-6)
        assert merged_norm == pytest.approx(grad_norm, rel=1e-4)


def kill_in_step_5(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train up to the checkpoint of step 4."""
    step = Engine._step

    def stop(self: Engine, stop_requested: bool) -> Any:
        if self.cursor.step == 4:
            raise RuntimeError("killed")
        return step(self, stop_requested)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        patched.setattr(Engine, "_step", stop)
        train(recipe)


def test_a_killed_run_keeps_the_micro_batch_of_its_checkpoint_whatever_the_plan_would_choose(
    model_folder: Path, tmp_path: Path, plan_for_h200: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_for_h200(True)
    expected, _ = train(tiny_recipe(tmp_path / "whole", model_folder, **SETTINGS))
    killed = tiny_recipe(tmp_path / "killed", model_folder, **SETTINGS)
    kill_in_step_5(killed, monkeypatch)
    plan_for_h200(False)
    resumed, sizes = train(killed)
    assert sizes == [4, 4]
    assert "4 rows at once, as at this run's earlier start" in events_of(tmp_path / "killed/run", "plan")[-1]["reasons"]
    assert resumed == expected, "bit for bit"


@pytest.mark.parametrize("saves_size", [True, False])
def test_a_resumed_run_decides_the_rest_of_its_plan_as_at_its_first_start(
    saves_size: bool,
    model_folder: Path,
    tmp_path: Path,
    plan_for_h200: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the size of the checkpoint given, two variants could be compared at other sizes than before."""
    plan_for_h200(True)
    calls, choose = [], planning.choose_plan

    def record(*arguments: Any, **options: Any) -> Any:
        calls.append((*arguments[1:], options))
        return choose(*arguments, **options)

    monkeypatch.setattr(planning, "choose_plan", record)
    recipe = tiny_recipe(tmp_path, model_folder, **SETTINGS)
    kill_in_step_5(recipe, monkeypatch)
    if not saves_size:  # a checkpoint of an older version, whose micro-batches were the recipe's
        read = stage_runner.read_state
        monkeypatch.setattr(stage_runner, "read_state", lambda folder: {**read(folder), "micro_batch_size": 0})
    _, sizes = train(recipe)
    assert sizes == ([4, 4] if saves_size else [4, 1])
    assert (calls[0] == calls[1]) == saves_size and len(calls) == 2


def test_a_merged_micro_batch_that_runs_out_of_memory_is_halved(
    model_folder: Path, tmp_path: Path, plan_for_h200: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SftLoss.forward

    def forward_of_two_rows(self: SftLoss, tokens: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
        if self.training and len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, *others, **kwargs)

    monkeypatch.setattr(SftLoss, "forward", forward_of_two_rows)
    plan_for_h200(True)
    _, sizes = train(tiny_recipe(tmp_path, model_folder, **SETTINGS))
    [revised] = events_of(tmp_path / "run", "plan_revised")
    assert sizes == [4] and revised["changes"]["micro_batch_size"] == {"from": 4, "to": 2}


@pytest.mark.parametrize("is_free", [False, True])
def test_what_ran_out_of_memory_with_several_ranks_does_not_grow_again(
    is_free: bool,
    model_folder: Path,
    tmp_path: Path,
    plan_for_h200: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(stage: str, context: RunContext) -> list[Any]:
        write_json(context.folder.micro_batch(stage) / "rank-1.json", {"rows": 2, "where": ["here"]})
        return ["here"]

    recipe = tiny_recipe(tmp_path, model_folder, **SETTINGS, global_batch_size=4)
    if is_free:  # the planner chooses the micro-batch size
        lines = recipe.read_text(encoding="utf-8").splitlines(keepends=True)
        recipe.write_text("".join(line for line in lines if "per_device_train" not in line), encoding="utf-8")
    monkeypatch.setattr(planning, "_micro_batch_key", key)
    plan_for_h200(True)
    assert train(recipe)[1] == [2]
    [plan] = events_of(tmp_path / "run", "plan")
    assert any(line.startswith("more than 2 rows at once ran out of memory before ") for line in plan["reasons"])


def test_all_ranks_take_the_micro_batch_of_rank_0(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broadcast(self: World, action: Callable[[], Any]) -> Any:
        value = action()
        is_plan = isinstance(value, dict) and "sharding" in value
        return {**value, "micro_batch_size": 2, "gradient_accumulation_steps": 2} if is_plan else value

    monkeypatch.setattr(World, "on_rank0_broadcast", broadcast)
    assert train(tiny_recipe(tmp_path, model_folder, **SETTINGS))[1] == [2]


def test_micro_batches_with_dropout_stay_as_they_are_written(
    model_folder: Path, tmp_path: Path, plan_for_h200: Callable[[bool], None]
) -> None:
    plan_for_h200(True)
    lora = {"trainable": "lora", "lora_dropout": 0.1}
    assert train(tiny_recipe(tmp_path, model_folder, **SETTINGS, **lora))[1] == [1]
