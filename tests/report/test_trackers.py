"""Trackers get every number of the journal; one that is missing, broken or full never stops a run."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from modelwright.recipe.load import load
from modelwright.recipe.schema import Recipe
from modelwright.report import trackers
from modelwright.report.trackers import TensorBoardTracker, start_trackers
from modelwright.runs.folder import RunFolder
from tests.faults.fork_server import ForkServer, steps_of
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


def with_trackers(recipe: Recipe, *names: str) -> Recipe:
    return recipe.model_copy(update={"report_to": list(names)})


def test_tensorboard_reads_what_was_measured_and_forgets_what_was_done_again(recipe: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="its own reader is in the extra track")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with start_trackers(recipe, RunFolder(tmp_path / "run"), None) as log_event:
        for event in EVENTS:
            log_event(event)
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    tags = read.Tags()["scalars"]
    assert sorted(tags) == ["sft/eval_loss", "sft/learning_rate", "sft/loss"]
    assert [(each.step, each.value) for each in read.Scalars("sft/loss")] == [(1, 4.0), (2, 3.0), (300, 2.0)]
    assert read.Scalars("sft/loss")[0].wall_time == 3.0


def test_an_event_file_is_whole_after_every_step(tmp_path: Path) -> None:
    """What a killed run leaves is readable."""
    pytest.importorskip("tensorboard", reason="its own reader is in the extra track")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    TensorBoardTracker(RunFolder(tmp_path)).log("sft", {"loss": 1.5}, 7, 1.0)
    [path] = (tmp_path / "tensorboard").iterdir()
    assert [event.step for event in EventFileLoader(str(path)).Load()] == [0, 7]


class Trial(trackers.Tracker):
    """A tracker that fails, or never answers, at the second step."""

    def __init__(self, trouble: Callable[[], None]) -> None:
        self.num_logged, self.trouble = 0, trouble

    def log(self, stage: str, values: Any, step: int, when: float) -> None:
        self.num_logged += 1
        if self.num_logged > 1:
            self.trouble()

    def on_resume(self, step: int, when: float) -> None: ...

    def close(self) -> None:
        raise OSError("never mind")


def gone() -> None:
    raise ConnectionError("the server is gone\nand here is a page about it")


def test_a_tracker_that_fails_is_disabled(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda package, recipe, folder: Trial(gone))
    watched: list[str] = []
    with start_trackers(
        with_trackers(recipe, "wandb"), RunFolder(tmp_path / "run"), lambda e: watched.append(e["event"])
    ) as log_event:
        for event in EVENTS:
            log_event(event)
    assert len(watched) == len(EVENTS)
    stderr = capsys.readouterr().err
    assert (
        stderr
        == "note: wandb logging failed, tracker disabled (ConnectionError: the server is gone); training continues\n"
    )


def test_a_tracker_that_does_not_answer_keeps_nobody_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    answered = threading.Event()
    tracker = trackers.BackgroundTracker("wandb", lambda: Trial(lambda: (answered.wait(), None)[1]), flush_timeout=0.2)
    for event in EVENTS * 3000:  # more than are kept for it
        tracker.submit(event)
    tracker.close()
    answered.set()
    assert capsys.readouterr().err == "note: wandb did not flush within 0.2 s; continuing without it\n"


def test_a_tracker_that_cannot_start_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def begin() -> Any:
        raise PermissionError("log in first")

    tracker = trackers.BackgroundTracker("wandb", begin)
    tracker.submit(EVENTS[1])
    tracker.close()
    assert (
        capsys.readouterr().err == "note: wandb could not start (PermissionError: log in first); training continues\n"
    )


def test_a_watcher_that_has_gone_does_not_take_the_trackers_with_it(recipe: Recipe, tmp_path: Path) -> None:
    def closed(event: Any) -> None:
        raise BrokenPipeError

    with start_trackers(recipe, RunFolder(tmp_path / "run"), closed) as log_event:
        for event in EVENTS:
            log_event(event)
    [path] = (tmp_path / "run" / "tensorboard").iterdir()
    assert path.stat().st_size > 200


def test_a_tracker_that_is_not_installed_is_reported_with_what_would_work(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with start_trackers(with_trackers(recipe, "mlflow"), RunFolder(tmp_path / "run"), None) as log_event:
        log_event(EVENTS[0])
    assert capsys.readouterr().err == (
        "note: report_to names mlflow, which is not installed: pip install mlflow; training continues\n"
    )


def test_a_folder_that_cannot_be_written_stops_nothing(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run").write_text("a file where a folder should be", encoding="utf-8")
    with start_trackers(recipe, RunFolder(tmp_path / "run"), None) as log_event:
        log_event(EVENTS[1])
    assert "tensorboard could not start" in capsys.readouterr().err


def stand_in(name: str, called: list[tuple[str, Any, Any]]) -> Any:
    """A module with the functions of the package that we call; it records the calls."""

    def recorder(function: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: called.append((function, args, kwargs)) or run

    functions = (
        "init",
        "Settings",
        "start_run",
        "log",
        "log_metrics",
        "log_params",
        "define_metric",
        "finish",
        "end_run",
    )
    run = SimpleNamespace(**{each: recorder(each) for each in functions}, info=SimpleNamespace(run_id="7"))
    module: Any = ModuleType(name)
    vars(module).update(vars(run))
    return module


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_an_external_tracker_is_started_logged_to_closed_and_resumed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By a stand-in; the packages themselves are asked below, where they are installed."""
    called: list[tuple[str, Any, Any]] = []
    monkeypatch.setitem(sys.modules, name, stand_in(name, called))
    (tmp_path / "run").mkdir()
    for _ in range(2):
        with start_trackers(with_trackers(recipe, name), RunFolder(tmp_path / "run"), None) as log_event:
            for event in EVENTS:
                log_event(event)
    begun = [(function, named) for function, _, named in called if function in ("init", "start_run")]
    assert len(begun) == 2
    if name == "mlflow":
        assert begun[1][1] == {"run_id": "7"}, "it goes on with the run it began"
    else:
        assert begun[0] == begun[1], "it goes on with the run it began"
    logged = [args[0] for function, args, _ in called if function in ("log", "log_metrics")]
    assert len(logged) == 10 and logged[0].items() >= {"sft/eval_loss": 5.0}.items()
    assert [function for function, _, _ in called][-1] in ("finish", "end_run")


def read_mlflow(folder: Path) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    [run] = client.search_runs(["0"])
    assert run.data.params["sft.max_steps"] == "3" and run.info.status == "FINISHED"
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "sft/loss")]


def read_wandb(folder: Path) -> list[tuple[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    losses = []
    for path in sorted((folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in logged(path.read_bytes()):
            record = Record.FromString(data)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "sft/loss" in items:
                losses.append((items["sft/step"], items["sft/loss"]))
    return losses


def logged(file: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format: pieces with checksum, length and kind, in blocks of 32 KiB."""
    offset, record = 7, b""  # after a header of its own
    while offset + 7 <= len(file):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
        length, kind = struct.unpack_from("<HB", file, offset + 4)
        record += file[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # the only piece, or the last
            yield record
            record = b""


def read_trackio(folder: Path) -> list[tuple[int, float]]:
    [path] = [each for each in (folder / "trackio").glob("*.db") if "modelwright" in each.name]
    with sqlite3.connect(path) as file:
        rows = file.execute("select step, metrics from metrics order by id").fetchall()
    return [(step, values["sft/loss"]) for step, metrics in rows if "sft/loss" in (values := json.loads(metrics))]


READERS = {"mlflow": read_mlflow, "wandb": read_wandb, "trackio": read_trackio}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(READERS))
def test_the_real_package_keeps_a_run_without_a_network(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, name: str
) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: its stand-in alone was asked")
    path = tiny_recipe(tmp_path, model_folder, max_steps=3)
    environ = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "WANDB_MODE": "offline",
               "TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_DISABLE_TELEMETRY": "true"}  # fmt: skip
    for _ in range(2):  # the second finds everything done, and is the same run there
        code, output = fork_server.run(["run", str(path), "--set", f"report_to={name}"], tmp_path, environ)
        assert (code, "note: " + name in output) == (0, False), output
    steps = steps_of(tmp_path / "run")
    assert READERS[name](tmp_path) == [(step, steps[step]["loss"]) for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("none", []), ("wandb", ["wandb"]), ("[tensorboard, mlflow]", ["tensorboard", "mlflow"]), ("[]", [])],
)
def test_report_to_is_a_word_or_a_list(tmp_path: Path, value: str, expected: list[str]) -> None:
    path = tiny_recipe(tmp_path, tmp_path / "model")
    assert load(path, [f"report_to={value}"], {}).recipe.report_to == expected
