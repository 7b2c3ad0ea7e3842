"""The verb that trains hands on what was asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelwright.cli.main import main
from modelwright.stages import pipeline

RECIPE = """\
name: two-stages
model: {model_name_or_path: some/model}
data: {train_file: rows.jsonl}
sft: {}
lora: {precision: fp32}
"""


@pytest.mark.parametrize(("flag", "precision"), [("--fp8", "fp8"), ("--no-fp8", "bf16"), (None, "auto")])
def test_fp8_is_forced_or_forbidden_in_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str | None, precision: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    recipes: list[Any] = []
    monkeypatch.setattr(pipeline, "run", lambda loaded, *_: recipes.append(loaded.recipe))
    monkeypatch.setattr(pipeline, "is_rank_zero", lambda: False)
    monkeypatch.setattr("sys.argv", ["modelwright", "run", str(tmp_path / "recipe.yaml"), *([flag] if flag else [])])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main())
    assert not ended.value.code
    assert {stage.fp8_validation for stage in recipes[0].stages.values()} == {"off" if flag == "--fp8" else "auto"}
    stages = {name: stage.precision for name, stage in recipes[0].stages.items()}
    assert stages == {"sft": precision, "lora": precision if flag else "fp32"}
