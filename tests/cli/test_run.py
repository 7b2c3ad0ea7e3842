"""The verb that trains hands on what was asked of it, and says what it does not resume; eval says what is no model."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from modelwright.cli.main import main
from modelwright.stages import pipeline
from tiny import tiny_recipe

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


def notes(recipe: Path, *words: str) -> list[str]:
    """Notes in the journal after one step."""
    with suppress(SystemExit):
        main(["run", str(recipe), "--log-format", "plain", *words])
    events = map(json.loads, (recipe.parent / "run/journal.jsonl").read_text(encoding="utf-8").splitlines())
    return [event["message"] for event in events if event["event"] == "note"]


def test_a_run_in_a_folder_with_checkpoints_of_trainer_says_that_it_starts_from_the_model(
    model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=1)
    for step in (20, 100):
        shutil.copytree(model_folder, folder := tmp_path / "run" / f"checkpoint-{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}), encoding="utf-8")
    note = f"{folder}: Transformers' Trainer wrote it, and this run does not resume it; its weights are a start"
    first = notes(recipe)
    assert [line.startswith(note) for line in first].count(True) == 1
    assert f"--model_name_or_path {folder}" in "".join(first)
    again = notes(recipe)  # its own checkpoints are there now
    assert again[len(first) :] == [line for line in again[len(first) :] if not line.startswith(note)]


def test_a_run_that_starts_from_a_checkpoint_of_trainer_has_no_such_note(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, folder := tmp_path / "run" / "checkpoint-20")
    (folder / "trainer_state.json").write_text('{"global_step": 20}', encoding="utf-8")
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=1)
    assert "Trainer wrote it" not in "".join(notes(recipe, "--model_name_or_path", str(folder)))


@pytest.mark.parametrize("target", ["nosuch/checkpoint-4", "nosuch", "run/stages/pretrain", "run/nosuch", "/no/such"])
def test_eval_says_that_a_path_is_no_model(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/stages/pretrain").mkdir(parents=True)
    with pytest.raises(SystemExit) as stop:
        main(["eval", target])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{target} is no model; eval wants a run, its stages/STAGE/model or")


@pytest.mark.parametrize("target", ["google/gemma-3-270m", "smollm2-135m-instruct", "model"])
def test_eval_of_a_model_asks_what_is_to_be_measured(
    target: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model_folder)
    with pytest.raises(SystemExit) as stop:
        main(["eval", target])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"nothing is to be measured of {target}; add --text")
