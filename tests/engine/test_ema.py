"""The EMA of the weights is evaluated and saved, and resumes exactly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from modelwright.engine.optimizer import EMA
from modelwright.recipe.load import load
from modelwright.stages import pipeline
from tests.faults.fork_server import run_fingerprint
from tiny import tiny_recipe

BRIEF = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "per_device_train_batch_size": 1, "max_length": 32}


def run(folder: Path, model: Path, **settings: Any) -> dict[str, Any]:
    recipe = tiny_recipe(folder, model, **BRIEF, **settings)
    pipeline.run(load(recipe, environ={}), lambda event: None)
    return run_fingerprint(folder / "run")


def test_the_ema_follows_the_weights_and_replaces_them_only_temporarily() -> None:
    weight, count = torch.zeros(3), torch.tensor(7)
    ema = EMA({"weight": weight, "count": count}, 0.5)
    weight += 1.0
    ema.update(100)
    with ema.swap():
        assert weight.tolist() == [0.5] * 3
    assert weight.tolist() == [1.0] * 3
    ema.copy_to()
    assert weight.tolist() == [0.5] * 3
    assert EMA({"weight": weight}, 0.0).shadow == {}


def test_a_run_keeps_the_mean_and_goes_on_with_it_exactly(model_folder: Path, tmp_path: Path) -> None:
    plain, full = run(tmp_path / "plain", model_folder), run(tmp_path / "whole", model_folder, ema_decay=0.9)
    assert [loss for loss, *_ in full["steps"].values()] == [loss for loss, *_ in plain["steps"].values()]
    weights = [
        load_file(tmp_path / name / "run/stages/sft/model/model.safetensors")["model.norm.weight"]
        for name in ("plain", "whole")
    ]
    assert not torch.equal(*weights)
    stage = tmp_path / "whole/run/stages/sft"
    saved = load_file(max((stage / "checkpoints").glob("step-*")) / "ema.safetensors")
    assert any(torch.equal(weights[1], mean) for name, mean in saved.items() if name.endswith("model.norm.weight"))
    shutil.rmtree(max((stage / "checkpoints").glob("step-*")))
    (stage / "result.json").unlink()
    again = run(tmp_path / "whole", model_folder, ema_decay=0.9)
    assert again == full
