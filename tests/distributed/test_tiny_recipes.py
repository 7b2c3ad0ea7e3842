"""The fine-tunes' tiny recipes with a tiny model: two ranks learn what one rank learns, killed on the way or not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkedProcess, ForkServer, events_of, steps_of, wait_for_step
from tiny import tiny_model

pytestmark = pytest.mark.slow
HOLD = """
import os, time
from modelwright.engine.trainer import Engine
quick, taken = Engine._step, []
def step(self, stop_asked):
    taken.append(1)
    time.sleep(300 if len(taken) == 5 else 0)
    return quick(self, stop_asked)
Engine._step = step
"""
"""A rank that waits in its fifth step, to be killed there."""
SHORT = {
    "survival-smollm3-tiny": ("data.max_rows=24", "data.test_size=4", "sft.max_length=2048"),
    "lyrics-pythia-tiny": ("sft.max_length=2048",),
    "gemma-270m-tiny": ("data.max_rows=6", "data.test_size=2", "pretrain.max_length=64"),
}


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which two are frozen."""
    return tiny_model(tmp_path_factory.mktemp("deep"), layers=4)


def command(name: str, model: Path, folder: Path) -> list[str]:
    """The command that runs a shipped tiny recipe with a tiny model for six steps, a batch of four, and no gate."""
    folder.mkdir()
    stage = "pretrain" if name.startswith("gemma") else "sft"
    settings = [
        *(f"{stage}.{setting}" for setting in ("max_steps=6", "save_steps=2", "eval_steps=3", "precision=fp32")),
        *(f"{stage}.{setting}" for setting in ("per_device_train_batch_size=2", "global_batch_size=4")),
        *(f"model.model_name_or_path={model}", f"output_dir={folder / 'run'}", "gates={}"),
        *(("compare.max_new_tokens=3", "compare.num_held_out_prompts=1") if stage == "sft" else ()),
        *SHORT[name],
    ]
    return ["run", name, *(word for setting in settings for word in ("--set", setting))]


def losses_of(run: Path) -> list[float]:
    """Of all steps, then of all evaluations."""
    steps = [float(record["loss"]) for _, record in sorted(steps_of(run).items())]
    return [*steps, *(float(record["eval_loss"]) for record in events_of(run, "evaluation"))]


def succeeded(ranks: list[ForkedProcess]) -> str:
    codes = [trial.wait() for trial in ranks]
    assert codes == [0] * len(ranks), "\n".join(trial.output for trial in ranks)
    return ranks[0].output


@pytest.mark.parametrize("name", ["lyrics-pythia-tiny", "gemma-270m-tiny"])
def test_a_tiny_recipe_learns_on_two_ranks_what_it_learns_on_one(
    fork_server: ForkServer, deep_model: Path, tmp_path: Path, name: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    succeeded([fork_server.start(command(name, deep_model, one), one)])
    succeeded(fork_server.start_ranks(command(name, deep_model, two), two, 2))
    assert len(losses_of(one / "run")) >= 8
    assert losses_of(two / "run") == pytest.approx(losses_of(one / "run"), abs=1e-5)
    run = two / "run"
    assert (run / "best_model/model.safetensors").exists() and (run / "best_model/README.md").exists()
    assert json.loads((run / "training_summary.json").read_text())["recipe"] == name
    assert (run / "demo_outputs/before_after.md").exists() == name.startswith("lyrics")


def test_cached_frozen_layers_on_two_killed_ranks_learn_what_one_rank_learns(
    fork_server: ForkServer, deep_model: Path, tmp_path: Path
) -> None:
    name, one, two = "survival-smollm3-tiny", tmp_path / "one", tmp_path / "two"
    output = succeeded([fork_server.start(command(name, deep_model, one), one)])
    assert "2 of 4 layers frozen" in output
    assert "token shared prefix" in output
    words = command(name, deep_model, two)
    ranks = fork_server.start_ranks(words, two, 2, first=HOLD)
    wait_for_step(two / "run", 4)
    for trial in ranks:
        os.kill(trial.pid, signal.SIGKILL)
    assert [trial.wait() for trial in ranks] == [-signal.SIGKILL] * 2
    output = succeeded(fork_server.start_ranks(words, two, 2))
    assert "2 of 4 layers frozen" in output
    assert events_of(two / "run", "resumed")
    assert losses_of(two / "run") == pytest.approx(losses_of(one / "run"), abs=1e-5)
    summary = json.loads((two / "run/training_summary.json").read_text())
    assert summary["distributed"]["devices"] == 2
    assert summary["batch"] == "batch 4 = 2 per device × 2 devices × 1 accumulation"
