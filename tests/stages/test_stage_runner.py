"""Evaluation while training, what is written at the end of a stage and how often, and the spans of its time."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelwright.engine import checkpoint
from modelwright.engine.checkpoint import AsyncCheckpointer, CheckpointManager, LazyTensor, Snapshot
from modelwright.engine.distributed import World
from modelwright.engine.task import StepReport
from modelwright.engine.throughput import ThroughputMeter
from modelwright.engine.trainer import Engine
from modelwright.errors import Diverged, Interrupted, StorageError
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import SftConfig
from modelwright.report.history import SPANS, read_history
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder, hash_file, read_json
from modelwright.stages import compare, evaluate, pipeline, stage_runner
from modelwright.stages.context import RunOptions
from modelwright.stages.evaluate import EvalHistory
from modelwright.stages.gate import hash_folder
from modelwright.stages.stage_runner import StageRunner
from tests.faults.fork_server import events_of
from tiny import tiny_recipe


def test_a_held_out_loss_that_is_no_number_is_divergence(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Engine.evaluate

    def evaluate(self: Engine, stop_requested: Callable[[], bool]) -> dict[str, float] | None:
        return {"eval_loss": float("nan")} if self.cursor.step == 6 else sound(self, stop_requested)

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    with pytest.raises(Diverged, match="sft diverged by step 6: eval_loss is not finite"):
        pipeline.run(load(tiny_recipe(tmp_path, model_folder), environ={}))
    assert not (tmp_path / "run/best_model").exists()
    assert not (tmp_path / "run/stages/sft/result.json").exists()


@pytest.mark.parametrize("step", [6, 12])
def test_a_signal_stops_an_evaluation_which_the_resumed_run_makes_up_for(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, eval_steps=3, per_device_eval_batch_size=1)
    plain = load(tiny_recipe(tmp_path / "plain", model_folder, eval_steps=3, per_device_eval_batch_size=1), environ={})
    sound = Engine._forward
    batches: list[int] = []

    def forward(self: Engine, micro_batch: Any) -> Any:
        if self.cursor.step == step:
            batches.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return sound(self, micro_batch)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_forward", forward)
        with pytest.raises(Interrupted, match=f"stopped after step {step} of 12; rerun the same command to resume"):
            pipeline.run(load(recipe, environ={}))
    assert len(batches) == 1, "the rest of the evaluation is left out"
    pipeline.run(load(recipe, environ={}))
    pipeline.run(plain)
    runs = [tmp_path / "run", tmp_path / "plain/run"]
    records = [
        {
            event["step"]: event["eval_loss"]
            for event in journal.read(run / "journal.jsonl")
            if event["event"] == "evaluation"
        }
        for run in runs
    ]
    assert records[0] == records[1]
    assert hash_file(runs[0] / "best_model/model.safetensors") == hash_file(runs[1] / "best_model/model.safetensors")


def test_an_evaluation_takes_the_same_rows_of_the_number_that_is_set(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, eval_steps=6, max_eval_samples=3)
    sound = Engine._held_out_sums
    eval_rows: list[list[int]] = []

    def held_out_sums(self: Engine, stop_requested: Callable[[], bool]) -> Any:
        eval_rows.append(list(self.eval_rows))
        return sound(self, stop_requested)

    monkeypatch.setattr(Engine, "_held_out_sums", held_out_sums)
    monkeypatch.setattr(stage_runner, "EVALUATION_LOG_SECONDS", 0.0)
    pipeline.run(load(recipe, ["sft.max_steps=6"], environ={}))
    events = list(journal.read(tmp_path / "run/journal.jsonl"))
    assert len(eval_rows) >= 2
    assert all(rows == eval_rows[0] for rows in eval_rows)
    assert len(eval_rows[0]) == 3 and sorted({*eval_rows[0]}) == eval_rows[0] and {*eval_rows[0]} < {*range(4)}
    notes = [event["message"] for event in events if event["event"] == "note"]
    assert "evaluations take 3 of 4 held-out rows, chosen by the seed (max_eval_samples)" in notes
    assert [event["fraction"] for event in events if event["event"] == "evaluating"][:1] == [0.0]


def test_nothing_is_saved_or_evaluated_shortly_before_the_last_step_does_it_anyway(
    model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=21, save_steps=20, eval_steps=20)
    folder = pipeline.run(load(recipe, environ={}))
    assert [event["step"] for event in events_of(folder.path, "checkpoint_saved")] == [21]
    assert [event["step"] for event in events_of(folder.path, "evaluation")] == [0, 21]
    assert stage_runner._is_due(10, 10, 0, steps=11), "a whole tenth before it: 1 of 10 steps"
    assert not stage_runner._is_due(9, 10, 0, steps=11)


def test_the_start_model_answers_while_the_trained_one_is_written(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "eval_steps": 3, "async_save": "always"}
    plain = pipeline.run(load(tiny_recipe(tmp_path / "plain", model_folder, **settings), environ={}))
    before: list[bool] = []

    def answers_before(*args: Any) -> list[str]:
        before.append(RunFolder(tmp_path / "run").result("sft").exists())
        return compare.answers_before(*args)

    monkeypatch.setattr(StageRunner, "_has_room_for_two", lambda self: True)
    monkeypatch.setattr(pipeline, "BUILDERS", {
        "sft": replace(pipeline.BUILDERS["sft"], sample_before=answers_before)})  # fmt: skip
    folder = pipeline.run(load(tiny_recipe(tmp_path, model_folder, **settings), environ={}))
    assert before == [False], "once, and the stage was not finished yet"
    results = [read_json(run.result("sft")) for run in (plain, folder)]
    assert results[0]["files"] == results[1]["files"]
    outputs = [read_json(run.demo_outputs / "before_after.json")["answers"] for run in (plain, folder)]
    assert outputs[0] == outputs[1]


def test_too_little_memory_for_two_models_delays_the_answers(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(StageRunner, "_has_room_for_two", lambda self: True)
    monkeypatch.setattr(pipeline, "BUILDERS", {
        "sft": replace(pipeline.BUILDERS["sft"], sample_before=out_of_memory)})  # fmt: skip
    folder = pipeline.run(load(tiny_recipe(tmp_path, model_folder, max_steps=3), environ={}))
    assert read_json(folder.demo_outputs / "before_after.json")["answers"][0]["question"]


def fail_the_last_save(patch: pytest.MonkeyPatch) -> None:
    """The disk is full at the checkpoint of step 12."""
    sound = CheckpointManager._save

    def save(self: CheckpointManager, snapshot: Snapshot, best_step: int | None) -> None:
        if snapshot.step == 12:
            raise StorageError("the disk is full")
        sound(self, snapshot, best_step)

    patch.setattr(CheckpointManager, "_save", save)


def test_a_stage_is_not_finished_before_its_last_checkpoint_is(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(tiny_recipe(tmp_path, model_folder, async_save="always"), environ={})
    with monkeypatch.context() as patch:
        fail_the_last_save(patch)
        with pytest.raises(StorageError, match="the disk is full"):
            pipeline.run(recipe)
    assert not RunFolder(tmp_path / "run").result("sft").exists()
    folder = pipeline.run(recipe)
    assert [event["step"] for event in events_of(folder.path, "resumed")] == [9]


def test_the_files_of_a_host_copy_are_written_at_the_same_time(tmp_path: Path) -> None:
    together = threading.Barrier(2)
    tensors = {name: torch.randn(1000) for name in ("model.safetensors", "optimizer.safetensors")}

    def materialize(tensor: torch.Tensor, waits: bool) -> torch.Tensor:
        if waits:
            together.wait(timeout=60)
        return tensor

    for is_local in (False, True):
        files = {
            name: [LazyTensor("weight", (1000,), torch.float32, partial(materialize, tensor, is_local))]
            for name, tensor in tensors.items()
        }
        manager = CheckpointManager(tmp_path / str(is_local), 2, print)
        manager.save(Snapshot(1, {"cursor": 1}, files, is_local), writes=True)
        assert manager.newest_valid() is not None
    assert hash_folder(tmp_path / "False") == hash_folder(tmp_path / "True")


def test_large_files_of_a_checkpoint_are_divided_and_resumed_from_with_the_same_bits(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"save_steps": 6, "async_save": "always", "ema_decay": 0.9}
    undivided = pipeline.run(load(tiny_recipe(tmp_path / "undivided", model_folder, **settings), environ={}))
    recipe = load(tiny_recipe(tmp_path / "divided", model_folder, **settings), environ={})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "PART_BYTES", 1000)
        patch.setattr(checkpoint, "MAX_PARTS", 8)
        fail_the_last_save(patch)
        with pytest.raises(StorageError, match="the disk is full"):
            pipeline.run(recipe)
    half = RunFolder(tmp_path / "divided/run").checkpoints("sft") / "step-00000006"
    for name in ("model.safetensors", "optimizer.safetensors", "ema.safetensors"):
        assert not (half / name).exists() and len(checkpoint.part_paths(half, name)) > 1
    same = undivided.checkpoints("sft") / half.name
    for name, weight in evaluate.read_weights(same).items():
        assert torch.equal(evaluate.read_weights(half)[name], weight)
    divided = pipeline.run(recipe)
    assert [event["step"] for event in events_of(divided.path, "resumed")] == [6]
    assert hash_folder(divided.model("sft")) == hash_folder(undivided.model("sft"))


@pytest.mark.parametrize("sizes", [[], [0], [1], [3] * 100, [1, 500, 1, 1, 500], [1000, 1, 1]])
def test_parts_have_every_tensor_once_and_in_order(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 100)
    monkeypatch.setattr(checkpoint, "MAX_PARTS", 8)
    tensors = [LazyTensor(f"{n}", (size,), torch.uint8, lambda: torch.zeros(0)) for n, size in enumerate(sizes)]
    parts = checkpoint.split_files({"model.safetensors": tensors})
    assert [tensor for part in parts.values() for tensor in part] == tensors
    names = [f"model-{number}-of-{len(parts)}.safetensors" for number in range(1, len(parts) + 1)]
    assert list(parts) == (names if len(parts) > 1 else ["model.safetensors"]) and len(parts) <= checkpoint.MAX_PARTS


@pytest.mark.parametrize(("settings", "best"), [({}, 12), ({}, 6), ({"ema_decay": 0.9}, 12)])
def test_the_final_model_is_written_from_the_copies_of_the_last_checkpoint(
    settings: dict[str, Any], best: int, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[bool] = []
    sound = StageRunner._save_model

    def save_model(self: StageRunner, weights: dict[str, Any], trained_loss: float | None) -> dict[str, Any]:
        copies = {copy.data_ptr() for copy in self.checkpointer._host_buffers.values()}
        shared.append(all(weight.data_ptr() in copies for weight in weights.values()))
        for name, weight in self.parts.model.state_dict().items():
            assert torch.equal(weights[name], weight)
        return sound(self, weights, trained_loss)

    monkeypatch.setattr(StageRunner, "_save_model", save_model)
    monkeypatch.setattr(EvalHistory, "best_step", lambda self: best if len(self.records) > best // 6 else None)
    pipeline.run(load(tiny_recipe(tmp_path, model_folder, async_save="always", **settings), environ={}))
    assert shared == [best == 12 and not settings], "an average or another step has other weights"


def test_tied_weights_are_written_once_whether_or_not_a_checkpoint_has_copies(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = StageRunner._full_weights

    def full_weights(self: StageRunner, *arguments: Any) -> dict[str, Any]:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as on a GPU, always a new tensor
            return sound(self, *arguments)

    monkeypatch.setattr(StageRunner, "_full_weights", full_weights)
    files = []
    for mode in ("always", "never"):
        recipe = tiny_recipe(tmp_path / mode, model_folder, async_save=mode, max_steps=2)
        folder = pipeline.run(load(recipe, environ={}))
        files.append((folder.model("sft") / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_checkpoint_that_is_a_share_of_the_run_waits_for_none_before_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"save_steps": "25%", "eval_steps": 12, "async_save": "always"}
    recipe, sound = load(tiny_recipe(tmp_path, model_folder, **settings), environ={}), CheckpointManager._save
    monkeypatch.setattr(checkpoint, "TIMED_STEPS", 1)

    def save(self: CheckpointManager, snapshot: Snapshot, best_step: int | None) -> None:
        deadline = time.monotonic() + 60
        while snapshot.step == 3 and max(event["step"] for event in events_of(tmp_path / "run", "step")) < 7:
            assert time.monotonic() < deadline, "training waits for the save"
            time.sleep(0.02)
        sound(self, snapshot, best_step)

    log_step = StageRunner._log_step

    def log_step_slowly(self: StageRunner, report: StepReport, meter: ThroughputMeter) -> None:
        time.sleep(0.2 * (report.step > 7))  # the first save ends before the last step
        log_step(self, report, meter)

    monkeypatch.setattr(CheckpointManager, "_save", save)
    monkeypatch.setattr(StageRunner, "_log_step", log_step_slowly)
    folder = pipeline.run(recipe)
    first, *later = [event["step"] for event in events_of(folder.path, "checkpoint_saved")]
    assert (first, later[-1]) == (3, 12) and 6 not in later, "it was due while the first was being written"
    assert any(7 <= step < 12 for step in later), "and taken afterwards"


def buffered_saves(steps: int, seconds: float, resumed_at: int, size: int) -> list[int]:
    """The steps at which a run saves, a quarter of its steps apart, by the rules for buffers alone."""
    settings = SftConfig(async_save="always", max_steps=steps)
    plan = plan_stage(settings, 1000, 1, DeviceInfo("cpu", "a test", 10**9, False))
    task = SimpleNamespace(held_out_rows=0)
    runner = SimpleNamespace(engine=SimpleNamespace(plan=plan), settings=settings, task=task,
                             context=SimpleNamespace(world=World()), last_saved_step=resumed_at)  # fmt: skip
    snapshot = Snapshot(0, {}, {"model.safetensors": [LazyTensor("w", (size,), torch.uint8, lambda: torch.zeros(0))]})
    saver, saves = AsyncCheckpointer(CheckpointManager(Path(), 2, print), World(), background=True), []
    saver._buffer = lambda file, lazy: torch.zeros(0)  # type: ignore[method-assign]
    saver._fits_in_memory = lambda snapshot: True  # type: ignore[method-assign]
    for step in range(resumed_at + 1, steps):
        report: Any = SimpleNamespace(step=step, step_seconds=seconds)
        saver.preallocate_buffers(lambda: snapshot, seconds, StageRunner._steps_left(runner, report))  # type: ignore[arg-type]
        if saver._preallocation is not None:
            saver._preallocation.join()
        is_due = stage_runner._is_due(step, plan.save_steps, runner.last_saved_step, steps)
        if is_due and not saver.would_wait((steps - step) * seconds):
            runner.last_saved_step = step
            saves.append(step)
    return saves


@pytest.mark.parametrize(
    ("steps", "seconds", "resumed_at", "size", "saved"),
    [
        (10_000, 2.0, 0, 10**10, [2500, 5000, 7500]),
        (10_000, 2.0, 7498, 10**10, [7500]),
        (10_000, 0.01, 2498, 10**9, [2502, 5000, 7500]),
        (12, 600.0, 0, 10**10, [3, 6, 9]),
        (40, 0.1, 0, 7 * 10**9, []),
    ],
    ids=["a long run", "resumed before a save", "resumed, short steps", "long steps", "too short"],
)
def test_checkpoints_are_made_wherever_they_are_written_before_the_end(
    steps: int, seconds: float, resumed_at: int, size: int, saved: list[int]
) -> None:
    """A run that was resumed two steps before a save made none of those that followed."""
    assert buffered_saves(steps, seconds, resumed_at, size) == saved


def test_no_checkpoint_that_is_a_share_of_the_run_delays_the_last_one(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "BYTES_PER_SECOND", 1)  # it would be written for hours, and the steps take seconds
    settings: dict[str, Any] = {"save_steps": "25%", "eval_steps": 12, "async_save": "always"}
    folder = pipeline.run(load(tiny_recipe(tmp_path, model_folder, **settings), environ={}))
    assert [event["step"] for event in events_of(folder.path, "checkpoint_saved")] == [12]
    settings = {"save_steps": 6, "eval_steps": 12, "async_save": "always"}
    folder = pipeline.run(load(tiny_recipe(tmp_path / "exact", model_folder, **settings), environ={}))
    assert [event["step"] for event in events_of(folder.path, "checkpoint_saved")] == [6, 12]


def test_the_spans_of_a_run_cover_its_time(model_folder: Path, tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path, model_folder), environ={})
    unnamed = []
    for _ in range(3):  # a run takes a second: one pause of a busy machine would be 10 % of it
        folder = pipeline.run(recipe, options=RunOptions(is_command=True))
        names = [event["name"] for event in events_of(folder.path, "span")]
        assert names == [
            "check",
            "load data",
            "load tokenizer",
            "load model",
            "tokenize",
            "plan",
            "engine",
            "precompute",
            "final model",
            "free memory",
            "answers",
        ]
        assert all(event["seconds"] >= 0 for event in events_of(folder.path, "evaluation"))
        assert set(names) <= set(SPANS)
        [started], [done] = events_of(folder.path, "run"), events_of(folder.path, "done")
        assert done["seconds"] > started["import_seconds"] > 0, "the summary counts from the command"
        seconds = read_history(folder).time_breakdown.seconds
        unnamed.append(seconds["startup"] / (sum(seconds.values()) - seconds["imports"]))
        shutil.rmtree(folder.path)
    assert min(unnamed) < 0.05, unnamed
