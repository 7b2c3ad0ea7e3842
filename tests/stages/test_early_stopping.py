"""Training stops once a metric no longer improves, judged answers may be that metric, and resuming changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import Interrupted, RecipeError, UsageError
from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder, read_json
from modelwright.stages import evaluate, pipeline
from modelwright.stages.evaluate import EvalHistory, EvaluationJob
from modelwright.stages.stage_runner import StageRunner
from modelwright.tasks.verifiers import JudgedAnswers
from tests.faults.fork_server import events_of, run_fingerprint, steps_of
from tiny import tiny_recipe

ANSWERS = """
evaluate:
  answers:
    verifiers: {exact_match: {}}
    max_prompts: 3
    max_new_tokens: 4
gates:
  sft:
    answers.exact_match: {at_least: 0}
"""


def answers_recipe(folder: Path, model: Path, **settings: Any) -> Path:
    recipe = tiny_recipe(folder, model, **{"eval_steps": 2, "metric_for_best_model": "answers.exact_match", **settings})
    recipe.write_text(recipe.read_text(encoding="utf-8") + ANSWERS, encoding="utf-8")
    return recipe


@pytest.mark.parametrize(
    ("metric", "values", "threshold", "count"),
    [
        ("eval_loss", [], 0.0, 0),
        ("eval_loss", [3.0, 2.0, 2.0], 0.0, 1),
        ("eval_loss", [3.0, 2.0, 2.5, 1.9], 0.0, 0),
        ("eval_loss", [3.0, 2.0, 1.95, 1.92], 0.1, 2),
        ("answers.exact_match", [0.1, 0.5, 0.5, 0.4], 0.0, 2),
        ("answers.exact_match", [0.1, 0.5, 0.55, 0.8], 0.1, 0),
    ],
)
def test_evaluations_without_an_improvement_are_counted(
    metric: str, values: Sequence[float], threshold: float, count: int
) -> None:
    history = EvalHistory("sft", metric)
    history.records = [{"step": 0, "eval_loss": 0.0}]  # before training: does not count
    history.records += [{"step": step, metric: value} for step, value in enumerate(values, 1)]
    assert history.evaluations_without_improvement(threshold) == count


def test_a_run_ends_early_and_a_rerun_of_its_last_checkpoint_trains_nothing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = answers_recipe(tmp_path, model_folder, early_stopping_patience=2)

    def killed(self: StageRunner) -> Any:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(StageRunner, "_finish", killed)
        with pytest.raises(RuntimeError, match="killed"):
            pipeline.run(load(recipe, environ={}))
    assert list(steps_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    folder = pipeline.run(load(recipe, environ={}))
    assert list(steps_of(folder.path)) == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in events_of(folder.path, "resumed")] == [6]
    note = "stopped early at step 6 of 12: answers.exact_match did not improve in 2 evaluations"
    assert any(note in event["message"] for event in events_of(folder.path, "note"))
    metrics = read_json(folder.gate("sft"))["metrics"]
    assert (metrics["steps"], metrics["answers.exact_match"]) == (6, 0.0)
    assert not folder.judged_model("sft").exists()


def scripted(scores: dict[int, float], on_call: Callable[[int], None] = lambda step: None) -> Callable[..., Any]:
    """Answers whose score depends on the number of steps that the judged weights have been trained for."""
    real = evaluate.judge_model

    def judge(folder: Path, job: EvaluationJob, *args: Any, **kwargs: Any) -> JudgedAnswers:
        judged = real(folder, job, *args, **kwargs)
        if folder.name != "judged_model":
            return judged
        checkpointed = steps_of(folder.parents[2])
        step = max(checkpointed)
        on_call(step)
        return JudgedAnswers(judged.rows, {**judged.metrics, "answers.exact_match": scores[step]})

    return judge


def test_the_weights_with_the_most_right_answers_are_kept(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {2: 0.1, 4: 0.6, 6: 0.3, 8: 0.2, 10: 0.9, 12: 0.9}
    monkeypatch.setattr(evaluate, "judge_model", scripted(scores))
    folder = pipeline.run(load(answers_recipe(tmp_path / "all", model_folder), environ={}))
    stored = {event["step"]: event.get("answers.exact_match") for event in events_of(folder.path, "evaluation")}
    assert stored == {0: None, **scores}
    assert _restored(folder) == ["best checkpoint restored: step 10 (answers.exact_match)"]
    stopped = answers_recipe(tmp_path / "stopped", model_folder, early_stopping_patience=2)
    folder = pipeline.run(load(stopped, environ={}))
    assert max(steps_of(folder.path)) == 8
    assert _restored(folder) == ["best checkpoint restored: step 4 (answers.exact_match)"]
    entries = read_json(folder.history)["steps"]
    assert [entry["answers.exact_match"] for entry in entries if "answers.exact_match" in entry] == [0.1, 0.6, 0.3, 0.2]


def _restored(folder: RunFolder) -> list[str]:
    notes = (event["message"] for event in events_of(folder.path, "note"))
    return [note for note in notes if note.startswith("best checkpoint restored")]


def test_a_signal_while_answers_are_judged_changes_nothing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"early_stopping_patience": 2, "eval_steps": 3, "metric_for_best_model": "answers.exact_match"}
    plain = pipeline.run(load(answers_recipe(tmp_path / "plain", model_folder, **settings), environ={}))
    recipe = answers_recipe(tmp_path, model_folder, **settings)
    real = StageRunner._judge_weights

    def signalled(self: StageRunner, weights: dict[str, Any]) -> Any:
        if self.engine.cursor.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, weights)

    with monkeypatch.context() as patch:
        patch.setattr(StageRunner, "_judge_weights", signalled)
        with pytest.raises(Interrupted, match="stopped after step 6 of 12"):
            pipeline.run(load(recipe, environ={}))
    folder = pipeline.run(load(recipe, environ={}))
    assert run_fingerprint(folder.path) == run_fingerprint(plain.path)
    assert max(steps_of(folder.path)) == 9


def test_a_run_whose_loss_gets_worse_stops_too(model_folder: Path, tmp_path: Path) -> None:
    settings = {"learning_rate": 3.0, "early_stopping_patience": 1, "early_stopping_threshold": 0.01, "eval_steps": 1}
    folder = pipeline.run(load(tiny_recipe(tmp_path, model_folder, spike_factor=1e9, **settings), environ={}))
    losses = [event["eval_loss"] for event in events_of(folder.path, "evaluation")][1:]
    assert losses[-1] > min(losses[:-1]) - 0.01
    assert len(losses) < 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["sft.early_stopping_patience=2"], "sft.early_stopping_patience needs sft.eval_steps"),
        (["sft.early_stopping_threshold=0.1"], "sft.early_stopping_threshold needs sft.early_stopping_patience"),
        (
            ["sft.metric_for_best_model=answers.f1"],
            "'answers.f1', which nothing measures; it wants one of answers.exac",
        ),
        (["sft.metric_for_best_model=answers.f1", "evaluate=null"], "it wants a section evaluate.answers"),
        (["sft.metric_for_best_model=accuracy"], "'accuracy'; it wants eval_loss or answers.NAME"),
    ],
)
def test_what_cannot_work_is_refused(model_folder: Path, tmp_path: Path, settings: list[str], message: str) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, eval_steps=None)
    recipe.write_text(recipe.read_text(encoding="utf-8") + ANSWERS.partition("gates:")[0], encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load(recipe, settings, environ={})
    assert message in str(error.value)


def test_early_stopping_needs_held_out_rows(model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, early_stopping_patience=2)
    with pytest.raises(UsageError, match=r"sft\.early_stopping_patience needs held-out rows"):
        pipeline.run(load(recipe, ["data.test_size=0"], environ={}))
