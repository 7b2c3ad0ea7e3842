"""The engine on a CUDA device, run by hand on a GPU machine: same loss as the CPU, exact resume, every precision."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.errors import Interrupted
from modelwright.recipe.load import load
from modelwright.stages import pipeline
from rig import trace
from tiny import tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run by hand on a GPU machine"),
]


def run(folder: Path, model: Path, stop_after: int | None = None, **settings: Any) -> Path:
    """Run the tiny recipe in this process, perhaps only to some step."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        tiny_recipe(folder, model, **settings)

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    pipeline.run(load(recipe, environ={}), watch)
    return folder / "run"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_resumed_run_equals_the_uninterrupted_run_on_the_gpu(
    model_folder: Path, tmp_path: Path, precision: str, sharding: str
) -> None:
    settings = {"precision": precision, "sharding": sharding}
    whole = run(tmp_path / "whole", model_folder, **settings)
    with pytest.raises(Interrupted):
        run(tmp_path / "halved", model_folder, stop_after=8, **settings)
    halved = run(tmp_path / "halved", model_folder)
    assert trace(halved) == trace(whole)
    losses = [loss for loss, *_ in trace(whole)["steps"].values()]
    assert losses[-1] < losses[0] - 0.5


def test_the_gpu_computes_the_losses_of_the_cpu(model_folder: Path, tmp_path: Path, cpu_losses: list[float]) -> None:
    whole = run(tmp_path, model_folder, precision="fp32")
    losses = [loss for loss, *_ in trace(whole)["steps"].values()]
    assert losses == pytest.approx(cpu_losses, rel=1e-4)


@pytest.mark.parametrize("trainable", ["lora", {"last_layers": 1, "head": True, "untie_head": True}])
def test_parts_train_on_the_gpu(model_folder: Path, tmp_path: Path, trainable: Any) -> None:
    whole = run(tmp_path, model_folder, trainable=trainable, packing=True, learning_rate=1e-2)
    losses = [loss for loss, *_ in trace(whole)["steps"].values()]
    assert losses[-1] < losses[0]
    assert json.loads((whole / "plan.json").read_text())["sft"]["precision"] == "fp32"


@pytest.fixture
def cpu_losses(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run in a process that sees no GPU."""
    folder = tmp_path_factory.mktemp("cpu")
    recipe = tiny_recipe(folder, model_folder)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "modelwright", "run", str(recipe)], env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return [loss for loss, *_ in trace(folder / "run")["steps"].values()]
