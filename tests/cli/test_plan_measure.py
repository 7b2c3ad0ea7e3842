"""plan --measure runs real steps of any recipe, and plan --calibrate keeps what it found for later plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.errors import UsageError
from modelwright.plan import calibrate
from modelwright.plan.calibrate import USER_FILE, calibration_for
from modelwright.plan.hardware import gpu_spec_of, probe_device
from modelwright.recipe.load import load
from modelwright.stages import measure

SMALL = ["model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "prepare.vocab_size=512"]
SMALL += [f"{stage}.per_device_train_batch_size=1" for stage in ("pretrain", "sft", "dpo", "lora")]


@pytest.mark.slow
def test_every_stage_of_an_architecture_is_measured_before_anything_is_prepared() -> None:
    figures = measure.measure_recipe(load("llama-tiny", SMALL), steps=2)
    assert [row["stage"] for row in figures["stages"]] == ["pretrain", "sft", "dpo", "lora"]
    for row in figures["stages"]:
        assert row["tokens_per_second"]["actual"] > 0 and row["memory_bytes"]["predicted"] > 0, row
        assert row["components"]["weights"] > 0 and row["components"]["activations"] > 0
    assert any("random" in note for note in figures["stages"][0]["notes"])


def test_a_model_from_disk_is_measured_by_its_own_rows_and_nothing_is_left(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n} and no more."} for n in range(12)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = (
        f"name: own\nmodel: {{model_name_or_path: {model_folder}}}\ndata: {{train_file: rows.jsonl, test_size: 2}}\n"
    )
    Path("own.yaml").write_text(recipe + "sft: {per_device_train_batch_size: 2}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "own.yaml", "--measure", "--steps", "3", "--json"])
    figures = json.loads(capsys.readouterr().out)
    (row,) = figures["stages"]
    assert len(row["losses"]) == 3 and row["losses"][-1] < row["losses"][0] * 2
    assert row["notes"] == []
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "own.yaml"}


def test_a_stage_without_its_data_is_measured_on_embedded_rows_and_says_so(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        f"name: own\nmodel: {{model_name_or_path: {model_folder}}}\ndata: {{train_file: absent.jsonl, test_size: 2}}\n"
        "sft: {per_device_train_batch_size: 1, max_length: 64}\n",
        encoding="utf-8",
    )
    with pytest.raises(SystemExit, match="0"):
        main(["plan", str(recipe), "--measure", "--steps", "2"])
    assert "measured on the embedded field-guide, since its own data is not here" in capsys.readouterr().out


def test_a_stage_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="--stage is 'dpo'; it wants one of sft"):
        measure.measure_recipe(load("quickstart"), 2, ["dpo"])


def test_what_was_measured_here_is_used_by_later_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "CPU_CASES", calibrate.CPU_CASES[:2])
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--calibrate"])
    output = capsys.readouterr()
    calibration = calibration_for(gpu_spec_of(probe_device()))
    assert calibration.runs == len(output.err.splitlines()) == 2
    assert output.out.startswith(f"{calibration.device}: fitted to 2 measured cases, tokens/s within ")
    assert output.out.endswith(f"% of them; kept in {tmp_path / USER_FILE}\n")


@pytest.mark.parametrize("words", ["", "quickstart --calibrate", "quickstart --measure --gpus 1xH200"])
def test_options_that_do_not_go_together_are_refused(words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *words.split()])
