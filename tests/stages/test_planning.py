"""A run records prediction and measurement, fits its plan to memory, and profiles the memory of a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelwright.engine.memory_profiler import MemoryProfiler
from modelwright.engine.optimizer import build_optimizer
from modelwright.models import trainable
from modelwright.plan.hardware import probe_device
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import SftConfig
from modelwright.stages import pipeline, planning
from tests.faults.fork_server import events_of
from tiny import tiny_recipe


def test_prediction_and_measurement_are_recorded_and_a_step_is_profiled(tmp_path: Path, model_folder: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, profile_memory=True, max_steps=5)
    run = pipeline.run(load(recipe, ())).path
    plan = json.loads((run / "plan.json").read_text())["sft"]
    assert plan["prediction"]["memory"]["bytes"] > 0 and plan["prediction"]["tokens_per_second"] > 0
    assert plan["actual"]["tokens_per_second"]["actual"] > 0
    assert events_of(run, "prediction")[-1]["tokens_per_second"] == plan["actual"]["tokens_per_second"]
    profile = json.loads((run / "stages" / "sft" / "memory_profile.json").read_text())
    weights = sum(w.numel() * 4 for w in torch.nn.ModuleList([_model(model_folder)]).parameters())
    assert profile["components"]["weights"] == weights
    assert profile["peak_phase"] in ("forward", "backward", "optimizer")
    assert profile["peak_bytes"] == sum(profile["components"].values()) > weights
    assert [event["step"] for event in events_of(run, "step")] == [1, 2, 3, 4, 5], "watching leaves no step out"
    assert "Memory of a step of sft" in (run / "report.html").read_text()


def test_a_run_on_a_small_gpu_takes_a_smaller_micro_batch_and_keeps_its_global_batch(
    tmp_path: Path, model_folder: Path, monkeypatch: object
) -> None:
    small = replace(probe_device(), memory=round(622e6))
    monkeypatch.setattr(pipeline.hardware, "probe_device", lambda: small)  # type: ignore[attr-defined]
    recipe = tiny_recipe(
        tmp_path, model_folder, max_steps=2, per_device_train_batch_size=8, per_device_eval_batch_size=1
    )
    run = pipeline.run(load(recipe, ())).path
    plan = json.loads((run / "plan.json").read_text())["sft"]
    assert (plan["global_batch_size"] == 16 and plan["micro_batch_size"] < 8) or plan["gradient_checkpointing"], plan


def test_without_decoder_layers_gradient_checkpointing_is_full(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(plan: Any, *_: Any, may_merge: bool) -> Any:
        return SimpleNamespace(plan=plan.revise(gradient_checkpointing="selective"), fits=True, prediction=lambda: None)

    monkeypatch.setattr(planning, "choose_plan", chosen)
    monkeypatch.setattr(trainable, "_layers", lambda _: None)
    run = pipeline.run(load(tiny_recipe(tmp_path, model_folder, max_steps=1), ())).path
    plan = json.loads((run / "plan.json").read_text())["sft"]
    assert plan["gradient_checkpointing"] is True
    assert plan["reasons"][-1].startswith("gradient checkpointing is full: the model's layers were not found")


def test_the_profile_counts_what_a_step_holds() -> None:
    layer = torch.nn.Linear(256, 256, bias=False)
    optimizer = build_optimizer(dict(layer.named_parameters()), SftConfig())
    layer(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    profiler = MemoryProfiler(layer, optimizer)
    with profiler.profile_step():
        layer(torch.ones(1024, 256)).square().sum().backward()
        optimizer.step()
    profile = profiler.log.as_json()
    assert profile["baseline"]["weights"] == 256 * 256 * 4
    assert profile["baseline"]["optimizer"] >= 2 * 256 * 256 * 4
    assert profile["components"]["activations"] >= 2 * 1024 * 256 * 4
    assert [mark["phase"] for mark in profile["phases"]] == ["forward", "backward", "optimizer"]


def _model(folder: Path) -> torch.nn.Module:
    from modelwright.models.pretrained import load_model

    model: torch.nn.Module = load_model(folder)
    return model
