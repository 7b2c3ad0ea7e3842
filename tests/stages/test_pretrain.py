"""Pretraining from an architecture and raw text: sequence-length curriculum, tokens per step, kill and resume."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelwright.data.shards import PackedDataset
from modelwright.errors import DataError, ModelError, Refused
from modelwright.models.pretrained import load_model
from modelwright.plan.model_shape import shape_from_config
from modelwright.recipe.load import load
from modelwright.recipe.sections import CountOrFraction
from modelwright.recipe.stage_specs import PretrainConfig
from modelwright.runs.folder import RunFolder, read_json
from modelwright.stages import pipeline
from modelwright.stages.context import RunOptions
from modelwright.tasks.losses import IGNORE_INDEX
from modelwright.tasks.pretrain import PretrainTask
from tests.faults.fork_server import SLOW_STEPS, ForkServer, events_of, run_fingerprint, wait_for_step

ARCHITECTURE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
PRETRAIN = {
    "max_length": 32, "sequence_length_curriculum": {8: 3, 16: "30%"}, "max_steps": 10,
    "per_device_train_batch_size": 2, "learning_rate": 3e-3, "precision": "fp32", "save_steps": 2, "eval_steps": 5,
}  # fmt: skip


def documents(count: int = 60) -> list[str]:
    """Documents of many lengths, no two alike."""
    return [f"Walk {n} began at gate {n % 7}. " + "The path was dry. " * (n % 5) for n in range(count)]


def recipe_of(folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """A recipe that makes a model from scratch and trains it on documents next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) for text in documents()]
    (folder / "walks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sections = {
        "name": "walks",
        "output_dir": str(folder / "run"),
        "model": {"architecture": ARCHITECTURE, "tokenizer_name_or_path": str(tokenizer)},
        "data": {"train_file": "walks.jsonl", "test_size": 6},
        "pretrain": {**PRETRAIN, **settings},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A finished run that nothing happened to; nobody writes into it."""
    recipe = recipe_of(tmp_path_factory.mktemp("pretrain"), model_folder)
    pipeline.run(load(recipe, environ={}))
    return recipe.parent / "run"


def test_a_model_is_made_pretrained_and_its_loss_falls(done: Path) -> None:
    metrics = read_json(RunFolder(done).result("pretrain"))["metrics"]
    assert metrics["eval_loss"] < metrics["base_eval_loss"] - 0.3
    assert [each["stage"] for each in events_of(done, "stage_status")[-1]["stages"]] == ["init", "pretrain"]
    lineage = read_json(RunFolder(done).lineage)["stages"]["pretrain"]
    assert lineage["parent"] == "init"


def test_bits_per_byte_are_the_loss_in_bits_over_the_bytes_of_the_text(done: Path) -> None:
    metrics = read_json(RunFolder(done).result("pretrain"))["metrics"]
    held_out = PackedDataset.open(done / "data/pretrain/packed", "held_out")
    bits = metrics["eval_loss"] / math.log(2) * held_out.tokens / held_out.text_bytes
    assert metrics["eval_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert read_json(RunFolder(done).history)["epochs"][-1]["eval_bits_per_byte"] == metrics["eval_bits_per_byte"]


def test_the_parameter_count_is_printed_and_is_that_of_the_arithmetic_and_of_the_model(done: Path) -> None:
    model = load_model(RunFolder(done).model("init"))
    counted = sum(weight.numel() for weight in model.parameters())
    planned = shape_from_config(model.config.to_dict(), "init", "its config").parameters
    assert counted == planned == events_of(done, "model_initialized")[0]["parameters"]
    assert model.config.vocab_size % 64 == 0
    [plan] = events_of(done, "model_initialized")[0]["plan"]
    assert re.match(r"pretrain: \d+ steps, batch .*, fp32, .* GiB of .*, [\d,]+ tokens/s, ", plan), plan


def test_the_first_weights_are_scaled_and_a_function_of_the_seed(
    done: Path, model_folder: Path, tmp_path: Path
) -> None:
    weights = dict(load_model(RunFolder(done).model("init")).named_parameters())
    back = weights["model.layers.1.mlp.down_proj.weight"].std().item()
    assert back == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.05)
    assert weights["model.layers.1.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    again = pipeline.run(load(recipe_of(tmp_path, model_folder), environ={}), None, RunOptions(until_stage="init"))
    assert read_json(again.result("init"))["files"] == read_json(RunFolder(done).result("init"))["files"]


def test_every_step_holds_the_same_tokens_while_the_rows_grow(done: Path, model_folder: Path) -> None:
    folder = done / "data/pretrain/packed"
    settings = PretrainConfig.model_validate(PRETRAIN)
    task = PretrainTask(
        load_model(model_folder), PackedDataset.open(folder), PackedDataset.open(folder, "held_out"), settings
    )
    task.set_total_steps(10)
    shapes = [tuple(task.batch([3, 1], step).inputs["tokens"].shape) for step in range(10)]
    assert shapes == [(8, 8)] * 3 + [(4, 16)] * 3 + [(2, 32)] * 4
    tokens = [task.batch([3, 1], step).inputs["tokens"].flatten().tolist() for step in range(10)]
    assert all(row == tokens[0] for row in tokens)
    assert {event["tokens"] for event in events_of(done, "step")} == {64}


def test_a_document_is_predicted_from_itself_alone(done: Path, model_folder: Path) -> None:
    folder = done / "data/pretrain/packed"
    settings = PretrainConfig(max_length=32)
    task = PretrainTask(
        load_model(model_folder), PackedDataset.open(folder), PackedDataset.open(folder, "held_out"), settings
    )
    batch = task.batch(range(4))
    positions, targets = batch.inputs["positions"].flatten(), batch.inputs["targets"].flatten()
    trained = torch.from_numpy(np.flatnonzero(targets.numpy() != IGNORE_INDEX))
    assert torch.equal(targets[trained], batch.inputs["tokens"].flatten()[trained + 1])
    assert batch.trained_tokens == len(trained) < 4 * 32
    assert (positions[trained + 1] == positions[trained] + 1).all()
    assert set(np.flatnonzero(positions.numpy()[1:] != 0)) == set(trained.tolist())


def test_a_kill_at_a_change_of_length_leaves_no_trace(
    fork_server: ForkServer, done: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, model_folder)
    for moment in (3, 6):  # the rows grow after steps 3 and 6; checkpoints are at even steps
        trial = fork_server.start(["run", str(recipe)], tmp_path, first=SLOW_STEPS)
        wait_for_step(tmp_path / "run", moment)
        os.kill(trial.pid, signal.SIGKILL)
        trial.wait()
    code, output = fork_server.run(["run", str(recipe)], tmp_path)
    assert code == 0, output
    assert run_fingerprint(tmp_path / "run", "pretrain") == run_fingerprint(done, "pretrain")


def test_changed_sizes_are_refused_by_name(done: Path) -> None:
    with pytest.raises(Refused, match=r"model\.architecture\.hidden_size was 32, now 64"):
        pipeline.run(load(done / "recipe.yaml", ["model.architecture.hidden_size=64"], {}))


def test_an_architecture_without_a_tokenizer_is_answered(model_folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model_folder)
    with pytest.raises(ModelError, match="wants tokenizer_name_or_path, or a section prepare"):
        pipeline.run(load(recipe, ["model.tokenizer_name_or_path=null"], {}))
    with pytest.raises(ModelError, match=r"it wants a folder with a tokenizer\.json"):
        pipeline.run(load(recipe, ["model.tokenizer_name_or_path=nowhere"], {}))
    with pytest.raises(ModelError, match=r"architecture\.vocab_size is 300, but the tokenizer has 400 tokens"):
        pipeline.run(load(recipe, ["model.architecture.vocab_size=300"], {}))


def test_text_in_another_column_is_answered_with_the_columns(model_folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model_folder)
    with pytest.raises(DataError, match=r"there is no column 'lyrics'; the columns are text; data\.text_column says"):
        pipeline.run(load(recipe, ["data.text_column=lyrics"], {}))


def test_shards_of_another_tokenizer_are_refused(done: Path, model_folder: Path, tmp_path: Path) -> None:
    """Two tokens changed places: the vocabulary has the same size, and every text would be trained as another one."""
    shutil.copytree(model_folder, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    recipe = recipe_of(tmp_path / "recipe", file.parent)
    shards = RunFolder(done).data("pretrain") / "packed"
    with pytest.raises(
        DataError, match=r"tokenized by another tokenizer\.json than that of the init model of this run"
    ):
        pipeline.run(load(recipe, [f"data={{dataset_name: {shards}}}"], {}))


def test_lengths_of_a_curriculum_may_be_counts_or_shares() -> None:
    settings = PretrainConfig(
        max_length=32, sequence_length_curriculum={8: CountOrFraction(2), 16: CountOrFraction("25%")}
    )
    assert [settings.sequence_length_at(step, 8) for step in range(8)] == [8, 8, 16, 16, 32, 32, 32, 32]
