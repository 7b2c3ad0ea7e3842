"""A gate opens on measured, finite metrics only; its message has the value, the requirement and the recipe line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from modelwright.errors import RecipeError, UsageError
from modelwright.recipe.load import LoadedRecipe, dump_yaml, load
from modelwright.recipe.schema import Threshold
from modelwright.runs.folder import RunFolder, write_json, write_text
from modelwright.stages.gate import judge_metrics, judge_stage, rejudge_run
from tiny import tiny_recipe

AT_MOST = {"eval_loss": Threshold(at_most=2.2)}


def recipe_with_gate(folder: Path, *lines: str) -> LoadedRecipe:
    """A recipe whose gate starts at line 51."""
    path = tiny_recipe(folder, folder / "model")
    head = path.read_text(encoding="utf-8").splitlines()
    text = [*head, *[""] * (48 - len(head)), "gates:", "  sft:", *lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return load(path, environ={})


def test_the_message_of_a_closed_gate_says_what_was_measured_what_it_needs_and_where_that_is_written(
    tmp_path: Path,
) -> None:
    loaded = recipe_with_gate(tmp_path, "    eval_loss: {at_most: 2.2}")
    verdict = judge_stage(loaded, "sft", {"eval_loss": 2.41})
    assert verdict.message == "gate sft is closed: eval_loss 2.41 (needs at most 2.2, recipe line 51)"
    assert not verdict.open


def test_the_message_of_an_open_gate_says_what_was_measured_and_what_it_needs() -> None:
    assert (
        judge_metrics("sft", AT_MOST, {"eval_loss": 2.0}).message == "gate sft is open: eval_loss 2 (needs at most 2.2)"
    )


def test_a_metric_at_its_limit_passes() -> None:
    assert judge_metrics("sft", AT_MOST, {"eval_loss": 2.2}).open
    assert judge_metrics("sft", {"style_score": Threshold(at_least=0.8)}, {"style_score": 0.8}).open


def test_a_metric_that_was_not_measured_closes_the_gate() -> None:
    verdict = judge_metrics("sft", AT_MOST, {})
    assert not verdict.open
    assert verdict.message == "gate sft is closed: eval_loss was not measured or is not finite (needs at most 2.2)"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("threshold", [Threshold(at_most=2.2), Threshold(at_least=-1e9)])
def test_a_metric_that_is_not_finite_closes_the_gate(value: float | None, threshold: Threshold) -> None:
    verdict = judge_metrics("sft", {"eval_loss": threshold}, {"eval_loss": value})
    assert not verdict.open
    json.dumps(verdict.as_json(), allow_nan=False)


def test_a_limit_may_be_a_multiple_of_another_metric() -> None:
    threshold = {"eval_loss": Threshold(at_most=0.7, times="base_eval_loss")}
    assert judge_metrics("sft", threshold, {"eval_loss": 2.0, "base_eval_loss": 4.0}).open
    closed = judge_metrics("sft", threshold, {"eval_loss": 3.0, "base_eval_loss": 4.0})
    assert closed.message == "gate sft is closed: eval_loss 3 (needs at most 2.8 = 0.7 × base_eval_loss 4)"


def test_a_limit_may_be_so_much_above_what_the_parent_measured() -> None:
    threshold = {"eval_loss": Threshold(at_most=0.2, plus="parent_eval_loss")}
    assert judge_metrics("dpo", threshold, {"eval_loss": 2.1, "parent_eval_loss": 2.0}).open
    closed = judge_metrics("dpo", threshold, {"eval_loss": 2.3, "parent_eval_loss": 2.0})
    assert closed.message == "gate dpo is closed: eval_loss 2.3 (needs at most 2.2 = parent_eval_loss 2 + 0.2)"
    score = {"score": Threshold(at_least=-0.05, plus="base_score")}
    assert judge_metrics("sft", score, {"score": 0.9, "base_score": 0.94}).open
    assert (
        "needs at least base_score - 0.05, which was not measured"
        in judge_metrics("sft", score, {"score": 0.9}).message
    )


def test_gates_may_be_in_a_file_next_to_the_recipe_and_the_recipes_own_override_them(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    gates = "sft:\n  eval_loss:\n    at_most: 2.2\n  steps: {at_least: 3}\n"
    (tmp_path / "configs/promotion_gates.yaml").write_text(gates, encoding="utf-8")
    path = tiny_recipe(tmp_path, tmp_path / "model")
    text = path.read_text(encoding="utf-8") + "gates_file: configs/promotion_gates.yaml\n"
    path.write_text(text + "gates:\n  sft:\n    steps: {at_least: 9}\n", encoding="utf-8")
    loaded = load(path, environ={})
    closed = judge_stage(loaded, "sft", {"eval_loss": 3.0, "steps": 5})
    assert "needs at most 2.2, " in closed.message
    assert "configs/promotion_gates.yaml:3)" in closed.message
    assert f"needs at least 9, recipe line {len(text.splitlines()) + 3})" in closed.message
    (tmp_path / "saved.yaml").write_text(dump_yaml(loaded.recipe), encoding="utf-8")
    assert load(tmp_path / "saved.yaml", environ={}).recipe.gates == loaded.recipe.gates


def test_a_gates_file_that_is_not_there_or_asks_for_nothing_known_is_answered(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, tmp_path / "model")
    with pytest.raises(RecipeError, match=r"gates_file is 'none\.yaml'; there is no such file next to the recipe"):
        load(path, ["gates_file=none.yaml"], {})
    (tmp_path / "gates.yaml").write_text("sft:\n  eval_los: {at_most: 2}\n", encoding="utf-8")
    with pytest.raises(
        RecipeError, match=r"gates\.yaml:2: gates\.sft\.eval_los is not a metric of this stage; did you mean"
    ):
        load(path, ["gates_file=gates.yaml"], {})


@pytest.mark.parametrize("base", [None, math.nan])
def test_a_multiple_of_something_unmeasured_closes_the_gate(base: float | None) -> None:
    threshold = {"eval_loss": Threshold(at_most=0.7, times="base_eval_loss")}
    verdict = judge_metrics("sft", threshold, {"eval_loss": 0.1, "base_eval_loss": base})
    assert not verdict.open
    assert "0.7 × base_eval_loss, which was not measured" in verdict.message


def test_only_what_failed_is_in_the_message_and_everything_in_the_record() -> None:
    thresholds = {**AT_MOST, "style_score": Threshold(at_least=0.8)}
    verdict = judge_metrics("sft", thresholds, {"eval_loss": 2.0, "style_score": 0.5})
    assert verdict.message == "gate sft is closed: style_score 0.5 (needs at least 0.8)"
    assert [check["passed"] for check in verdict.as_json()["checks"]] == [True, False]


def test_a_gate_that_asks_nothing_is_open_and_says_so() -> None:
    assert judge_metrics("sft", {}, {}).message == "sft has no gate: its model is promoted as it is"


def test_each_limit_of_a_metric_is_named_by_its_own_line(tmp_path: Path) -> None:
    loaded = recipe_with_gate(tmp_path, "    eval_loss:", "      at_most: 2.2", "      at_least: 1.5")
    assert "needs at most 2.2, recipe line 52)" in judge_stage(loaded, "sft", {"eval_loss": 3.0}).message
    assert "needs at least 1.5, recipe line 53)" in judge_stage(loaded, "sft", {"eval_loss": 1.0}).message


def test_a_stage_without_a_gate_is_open(tmp_path: Path) -> None:
    loaded = load(tiny_recipe(tmp_path, tmp_path / "model"), environ={})
    assert judge_stage(loaded, "sft", {"eval_loss": 2.0}).open


def test_a_run_is_judged_again_by_the_thresholds_it_has_now(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    loaded = recipe_with_gate(tmp_path, "    eval_loss: {at_most: 2.2}")
    write_text(run.recipe, loaded.path.read_text(encoding="utf-8"))
    write_text(run.journal, "")
    write_json(run.gate("sft"), {"metrics": {"eval_loss": 2.41}})
    assert [verdict.open for verdict in rejudge_run(str(run.path), None)] == [False]
    write_text(run.recipe, run.recipe.read_text(encoding="utf-8").replace("2.2", "2.5"))
    assert [verdict.open for verdict in rejudge_run(str(run.path), "sft")] == [True]


def test_a_stage_that_was_never_measured_has_no_verdict(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    write_text(run.recipe, tiny_recipe(tmp_path, tmp_path / "model").read_text(encoding="utf-8"))
    write_text(run.journal, "")
    with pytest.raises(UsageError, match="has no verdict yet; finish it with: modelwright run"):
        rejudge_run(str(run.path), None)
    with pytest.raises(UsageError, match="has no verdict on 'dpo'; stages that were measured: none yet"):
        rejudge_run(str(run.path), "dpo")
