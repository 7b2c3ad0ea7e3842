"""Two runs are held against each other: what was measured, how the gates stand, the settings in which they differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.report.formatting import format_metric
from modelwright.report.history import read_history
from modelwright.report.html import render_report
from modelwright.report.view import compare_runs, load_run_view
from modelwright.runs.folder import RUN_FORMAT, RunFolder
from modelwright.runs.journal import Journal
from tiny import tiny_recipe


def run_of(folder: Path, loss: float, is_open: bool, rate: float) -> RunFolder:
    """A run that was judged."""
    recipe = tiny_recipe(folder, folder / "model", learning_rate=rate)
    run = RunFolder(folder / "run")
    run.path.mkdir()
    text = recipe.read_text(encoding="utf-8")
    run.recipe.write_text(text.replace("\n  test_size: 4", '\n  test_size: 4\n  system_prompt: "\\e[31mred"'), "utf-8")
    journal = Journal(run.journal)
    journal.add("run", run_format=RUN_FORMAT, recipe="tiny", folder=str(run.path), stages=["sft"])
    journal.add("verdict", stage="sft", open=is_open, message="…", metrics={"eval_loss": loss, "steps": 3})
    journal.close()
    return run


def test_every_stage_of_a_pipeline_is_shown_in_its_order_and_the_current_one_has_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.recipe.write_text("base: llama-tiny\n", encoding="utf-8")
    journal = Journal(run.journal)
    journal.add("run", run_format=RUN_FORMAT, recipe="llama-tiny", folder=str(run.path), stages=["prepare", "init"])
    for stage in ("prepare", "init", "pretrain"):
        journal.add("stage_started", stage=stage)
        journal.add("stage_status", stage=stage, state="done")
    journal.add("step", stage="pretrain", step=9, steps=9, loss=1.0)
    journal.add(
        "verdict", stage="pretrain", open=True, message="…", metrics={"tokens": 81_920, "parent_tokens": 81_920}
    )
    journal.add("stage_status", stage="evaluate", state="running")
    journal.close()
    view = load_run_view(run, read_history(run))
    assert [stage.name for stage in view.stages] == ["prepare", "init", "pretrain", "sft", "dpo", "lora", "evaluate"]
    assert view.current is not None and view.current.name == "pretrain"
    text = render_report(run, read_history(run))
    assert "9 of 9 <small>of pretrain</small>" in text and "81,920 <small>of pretrain</small>" in text
    assert "<span>1 threshold</span>" in text and "1 thresholds" not in text
    pipeline = re.sub(r"<[^>]*>|\s+", " ", text.partition('<ol class="pipeline">')[2].partition("</ol>")[0])
    assert re.search(r"prepare +done +init +done +pretrain +9 of 9 steps", pipeline), pipeline
    assert re.search(r"evaluate +running", pipeline), pipeline
    comparison = compare_runs(view, view)
    assert list(comparison.gates) == ["pretrain", "sft", "dpo", "lora"], "the others have no gate"
    assert format_metric("parent_tokens", 81_920) == "81,920"


@pytest.fixture
def two(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    first = run_of(tmp_path / "a", 2.5, True, 1e-3)
    second = run_of(tmp_path / "b", 3.25, False, 5e-4)
    second.recipe.write_text(second.recipe.read_text("utf-8").replace("[31mred", "[32mgreen"), "utf-8")
    return first, second


def compare_output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_metrics_gates_and_differing_settings_stand_side_by_side(
    two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = compare_output(capsys, *(str(run.path) for run in two)).splitlines()
    rows = {cells[0]: cells[1:] for line in lines if len(cells := re.split(r"\s{2,}", line)) == 3}
    assert rows["eval_loss"] == ["2.5", "3.25"]
    assert rows["gate sft"] == ["open", "closed"]
    assert rows["sft.learning_rate"] == ["0.001", "0.0005"]
    assert "sft.max_length" not in rows, "what is alike is left out"


def test_machines_get_numbers_and_terminals_nothing_to_obey(
    two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(run.path) for run in two]
    assert "\x1b" not in compare_output(capsys, *names)
    result = json.loads(compare_output(capsys, *names, "--json"))
    assert result["metrics"]["eval_loss"] == [2.5, 3.25]
    assert result["settings"]["data.system_prompt"] == ["\x1b[31mred", "\x1b[32mgreen"]
    assert result["gates"] == {"sft": ["open", "closed"]}
