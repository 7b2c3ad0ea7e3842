"""The summary that ends a run says what was measured, and nothing that was not."""

from __future__ import annotations

import subprocess
from pathlib import Path

from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import SftConfig
from modelwright.report.console import run_summary
from modelwright.report.model_card import _precision
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Journal

METRICS = {
    "base_eval_loss": 4.0, "eval_loss": 2.0, "base_style_score": 0.125, "style_score": 0.9, "steps": 41,
    "tokens": 31240, "seconds": 200.0,
}  # fmt: skip


def finished_run(folder: Path, metrics: dict[str, float]) -> RunFolder:
    run = RunFolder(folder / "run")
    journal = Journal(run.journal)
    journal.add("verdict", stage="sft", open=False, message="gate sft is closed", metrics={})
    journal.add("answers", answers=[{"question": "Why?", "before": "", "after": ""}])
    journal.add("verdict", stage="sft", open=True, message="gate sft is open", metrics=metrics)
    journal.add("done", seconds=250.0)
    journal.close()
    return run


def test_the_summary_shows_before_after_verdict_and_time(tmp_path: Path) -> None:
    lines = run_summary(finished_run(tmp_path, METRICS)).splitlines()
    assert "  held-out loss    4 → 2  (-50.0%)" in lines
    assert "  style score      0.125 → 0.9" in lines
    assert "  verdict          open" in lines
    assert "  time             3 min 20 s for 41 steps, 31,240 tokens; 4 min 10 s for this command" in lines
    assert not any("words per answer" in line for line in lines), "what was not measured is not shown"


def test_where_nothing_was_trained_there_is_no_verdict(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    Journal(run.journal).add("done", seconds=3.0)
    assert "  verdict          none: nothing was trained yet" in run_summary(run).splitlines()


def test_the_summary_ends_with_three_commands(tmp_path: Path) -> None:
    commands = run_summary(finished_run(tmp_path, METRICS)).split("next:")[1].strip().splitlines()
    assert [command.split()[1] for command in commands] == ["ask", "compare", "gate"]


def test_a_question_from_the_data_does_nothing_in_a_shell(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "with space", METRICS)
    journal = Journal(run.journal)
    journal.add("answers", answers=[{"question": 'Is "this" $(touch x) `touch y` safe!\\'}])
    journal.close()
    [suggestion] = [line for line in run_summary(run).splitlines() if "modelwright ask" in line]
    command = suggestion.replace("modelwright ask", "printf %s\\\\n")
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert shown.splitlines() == [str(run.path), "Is 'this' (touch x) 'touch y' safe", "--both"]
    assert [path.name for path in tmp_path.iterdir()] == ["with space"]


def test_the_last_verdict_counts(tmp_path: Path) -> None:
    lines = run_summary(finished_run(tmp_path, METRICS)).splitlines()
    assert "  verdict          open" in lines
    assert any(line.endswith("; 4 min 10 s for this command") for line in lines)


def test_a_gate_accepted_by_a_person_is_shown_as_accepted(tmp_path: Path) -> None:
    run = finished_run(tmp_path, METRICS)
    journal = Journal(run.journal)
    journal.add("verdict", stage="sft", open=False, accepted="good enough", message="closed", metrics=METRICS)
    journal.close()
    text = run_summary(run)
    assert "  verdict          closed, accepted: good enough\n" in text
    assert "not promoted" not in text


def test_a_model_that_was_not_promoted_is_shown_apart_from_the_best_one(tmp_path: Path) -> None:
    run = finished_run(tmp_path, METRICS)
    run.model("pretrain").mkdir(parents=True)
    run.best_model.symlink_to(run.model("pretrain"))
    assert f"  model            {run.best_model}\n" in run_summary(run)
    journal = Journal(run.journal)
    journal.add("verdict", stage="sft", open=False, message="closed", metrics=METRICS)
    journal.close()
    text = run_summary(run)
    assert f"  model            {run.model('sft')} (not promoted)\n  best model       {run.best_model}\n" in text


def test_a_run_without_held_out_rows_has_a_summary_too(tmp_path: Path) -> None:
    assert "held-out loss" not in run_summary(finished_run(tmp_path, {"steps": 1, "tokens": 2, "seconds": 3.0}))


def test_the_model_card_says_what_fp32_was_multiplied_with() -> None:
    gpu = DeviceInfo("cuda", "NVIDIA H100", 80 << 30, fast_bf16=True)
    descriptions = [
        _precision(plan_stage(SftConfig(precision="fp32", tf32=tf32), 8, 1, gpu).as_json()) for tf32 in ("auto", False)
    ]
    assert descriptions[0].startswith("Computed in fp32. fp32 matmuls use tf32") and descriptions[1] == ""
