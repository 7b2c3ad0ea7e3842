"""Trackers get every number of the journal; one that is missing, broken or full never stops a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelwright.recipe.load import load
from modelwright.recipe.schema import Recipe
from modelwright.report import trackers
from modelwright.report.tensorboard import EventFile
from modelwright.report.trackers import tracking
from modelwright.runs.folder import RunFolder
from tiny import tiny_recipe

EVENTS: list[dict[str, Any]] = [
    {"time": 1.0, "event": "run"},
    {"time": 2.0, "event": "evaluation", "stage": "sft", "step": 0, "eval_loss": 5.0},
    {"time": 3.0, "event": "step", "stage": "sft", "step": 1, "loss": 4.0, "learning_rate": 1e-3, "mfu": None},
    {"time": 4.0, "event": "step", "stage": "sft", "step": 2, "loss": 9.0},
    {"time": 5.0, "event": "resumed", "stage": "sft", "step": 1, "steps": 3},
    {"time": 6.0, "event": "step", "stage": "sft", "step": 2, "loss": 3.0},
    {"time": 7.0, "event": "step", "stage": "sft", "step": 300, "loss": 2.0},
]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load(tiny_recipe(tmp_path, tmp_path / "model"), (), {}).recipe


def wished(recipe: Recipe, *names: str) -> Recipe:
    return recipe.model_copy(update={"report_to": list(names)})


def test_tensorboard_reads_what_was_measured_and_forgets_what_was_done_again(recipe: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="its own reader is in the extra track")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracking(recipe, RunFolder(tmp_path / "run"), None) as told:
        for event in EVENTS:
            told(event)
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    tags = read.Tags()["scalars"]
    assert sorted(tags) == ["sft/eval_loss", "sft/learning_rate", "sft/loss"]
    assert [(each.step, each.value) for each in read.Scalars("sft/loss")] == [(1, 4.0), (2, 3.0), (300, 2.0)]
    assert read.Scalars("sft/loss")[0].wall_time == 3.0


def test_an_event_file_is_whole_after_every_step(tmp_path: Path) -> None:
    """What a killed run leaves is readable."""
    pytest.importorskip("tensorboard", reason="its own reader is in the extra track")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    file = EventFile(tmp_path)
    file.scalars({"loss": 1.5}, 7, 1.0)
    [path] = tmp_path.iterdir()
    assert [event.step for event in EventFileLoader(str(path)).Load()] == [0, 7]


class Failing:
    """Fails at the second step."""

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        self.taken = 0

    def take(self, values: Any, step: int, when: float) -> None:
        self.taken += 1
        if self.taken > 1:
            raise ConnectionError("the server is gone")

    def begin_again(self, step: int, when: float) -> None: ...

    def close(self) -> None:
        raise OSError("never mind")


def test_a_tracker_that_fails_is_left_behind(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(trackers.KINDS, "wandb", Failing)
    watched: list[str] = []
    with tracking(wished(recipe, "wandb"), RunFolder(tmp_path / "run"), lambda e: watched.append(e["event"])) as told:
        for event in EVENTS:
            told(event)
    assert len(watched) == len(EVENTS)
    said = capsys.readouterr().err
    assert said == "note: wandb takes no more numbers (ConnectionError: the server is gone); the run goes on\n"


def test_a_watcher_that_has_gone_does_not_take_the_trackers_with_it(recipe: Recipe, tmp_path: Path) -> None:
    def closed(event: Any) -> None:
        raise BrokenPipeError

    with tracking(recipe, RunFolder(tmp_path / "run"), closed) as told:
        for event in EVENTS:
            told(event)
    [path] = (tmp_path / "run" / "tensorboard").iterdir()
    assert path.stat().st_size > 200


def test_a_tracker_that_is_not_installed_is_told_with_what_would_do(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with tracking(wished(recipe, "mlflow"), RunFolder(tmp_path / "run"), None) as told:
        told(EVENTS[0])
    assert capsys.readouterr().err == (
        "note: report_to names mlflow, which is not installed: pip install mlflow; the run goes on\n"
    )


def test_a_folder_that_cannot_be_written_stops_nothing(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run").write_text("a file where a folder should be", encoding="utf-8")
    with tracking(recipe, RunFolder(tmp_path / "run"), None) as told:
        told(EVENTS[1])
    assert "tensorboard could not begin" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_of_others_is_begun_told_and_ended(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each package's own functions by name; the packages themselves want a server, a network or a login."""
    called: list[tuple[str, Any]] = []
    stand_in: Any = ModuleType(name)
    for function in ("init", "log", "finish", "start_run", "log_metrics", "end_run"):
        setattr(stand_in, function, lambda *given, function=function, **named: called.append((function, given)))
    monkeypatch.setitem(sys.modules, name, stand_in)
    with tracking(wished(recipe, name), RunFolder(tmp_path / "run"), None) as told:
        for event in EVENTS:
            told(event)
    names = [function for function, _ in called]
    assert names[0] in ("init", "start_run") and names[-1] in ("finish", "end_run") and len(names) == 7
    assert called[1][1][0] == {"sft/eval_loss": 5.0}


@pytest.mark.parametrize(
    ("said", "meant"),
    [("none", []), ("wandb", ["wandb"]), ("[tensorboard, mlflow]", ["tensorboard", "mlflow"]), ("[]", [])],
)
def test_report_to_is_a_word_or_a_list(tmp_path: Path, said: str, meant: list[str]) -> None:
    path = tiny_recipe(tmp_path, tmp_path / "model")
    assert load(path, [f"report_to={said}"], {}).recipe.report_to == meant
