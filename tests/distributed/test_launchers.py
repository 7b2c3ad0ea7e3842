"""Any launcher will do: the engine reads the standard variables, and its losses are the same whoever has set them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer, free_port, run_fingerprint, steps_of
from tiny import tiny_recipe

TWO = {"gradient_accumulation_steps": 1, "max_steps": 4, "eval_steps": 4}
SOURCE = Path(__file__).parents[2] / "src"
TORCHRUN = ["torchrun", "--nproc-per-node", "2", "--master-port"]
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"]  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(fork_server: ForkServer, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that were started one by one."""
    folder = tmp_path_factory.mktemp("two")
    ranks = fork_server.run_ranks(["run", str(tiny_recipe(folder, model_folder, **TWO))], folder, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=lambda words: str(words[0]))
def test_a_bare_launcher_gives_the_same_run_to_the_last_bit(
    two_ranks: Path, model_folder: Path, tmp_path: Path, launcher: list[str]
) -> None:
    program = Path(sys.executable).with_name(launcher[0])
    if not program.exists():
        pytest.skip(f"there is no {launcher[0]} here")
    recipe = tiny_recipe(tmp_path, model_folder, **TWO)
    words = [str(program), *launcher[1:], str(free_port()), "-m", "modelwright", "run", str(recipe)]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run_fingerprint(tmp_path / "run") == run_fingerprint(two_ranks)


def test_an_operators_variables_alone_make_a_world(
    fork_server: ForkServer, two_ranks: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe, port = tiny_recipe(tmp_path, model_folder, **TWO), str(free_port())
    common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    ranks = [fork_server.start(["run", str(recipe)], tmp_path, {**common, "PET_NODE_RANK": rank}) for rank in "01"]
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert run_fingerprint(tmp_path / "run") == run_fingerprint(two_ranks)


SMALL_GPU = """
from dataclasses import replace
from modelwright.stages import planning
choose = planning.choose_plan
def on_a_small_card(plan, settings, shape, rows, machines, **options):
    copied = choose(plan, settings.model_copy(update={"distributed_strategy": "ddp"}), shape, rows, machines)
    gpu = replace(machines.gpu, memory=copied.memory.required - 20_000)
    return choose(plan, settings, shape, rows, replace(machines, gpu=gpu), **options)
planning.choose_plan = on_a_small_card
"""
"""Every device has a little less memory than a copy of the model takes."""


def test_what_a_gpu_cannot_hold_is_split_automatically_and_trains_the_same(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    settings = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    recipe = tiny_recipe(tmp_path, model_folder, **settings)
    ranks = fork_server.run_ranks(["run", str(recipe)], tmp_path, 2, first=SMALL_GPU)
    assert [code for code, _ in ranks] == [0, 0], ranks
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["sft"]
    assert plan["sharding"] == "fsdp"
    assert any(line.startswith("fsdp instead of ddp: a copy on each GPU") for line in plan["reasons"])
    here, there = steps_of(tmp_path / "run"), steps_of(uninterrupted)
    assert [here[step]["batch_hash"] for step in here] == [there[step]["batch_hash"] for step in here]
    losses = [there[step]["loss"] for step in here]
    assert [record["loss"] for record in here.values()] == pytest.approx(losses, abs=1e-5)
