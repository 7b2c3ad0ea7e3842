"""A non-finite evaluation loss ends the stage as diverged and never counts as the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelwright.engine.trainer import Engine
from modelwright.errors import Diverged
from modelwright.recipe.load import load
from modelwright.stages import pipeline
from tiny import tiny_recipe


def test_a_held_out_loss_that_is_no_number_is_divergence(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Engine.evaluate

    def evaluate(self: Engine) -> dict[str, float]:
        return {"eval_loss": float("nan")} if self.cursor.step == 6 else sound(self)

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    with pytest.raises(Diverged, match="sft diverged by step 6: eval_loss is not finite"):
        pipeline.run(load(tiny_recipe(tmp_path, model_folder), environ={}))
    assert not (tmp_path / "run/best_model").exists()
    assert not (tmp_path / "run/stages/sft/result.json").exists()
