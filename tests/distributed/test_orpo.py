"""ORPO keeps the rules of the engine: killed anywhere it ends the same, and two ranks equal one.

``NIGHTLY=1 pytest tests/distributed/test_orpo.py`` kills ten runs, otherwise two.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer, events_of, run_fingerprint, slow_after, steps_of, wait_for_step
from tiny import tiny_orpo_recipe

KILLS = 10 if os.environ.get("NIGHTLY") else 2
SEED = 20261117


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = fork_server.run(["run", str(tiny_orpo_recipe(folder, model_folder))], folder)
    assert code == 0, output
    return folder / "run"


def test_a_run_killed_at_a_random_moment_ends_as_the_undisturbed_one(
    fork_server: ForkServer, undisturbed: Path, model_folder: Path, tmp_path: Path
) -> None:
    rng, expected = random.Random(SEED), run_fingerprint(undisturbed, "orpo")
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        recipe = tiny_orpo_recipe(folder, model_folder)
        step = rng.randint(0, 11)
        held = slow_after(min(step + 3, 11), before=0.08, after=100.0)  # it must not end before it is killed
        process = fork_server.start(["run", str(recipe)], folder, first=held)
        wait_for_step(folder / "run", step)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        code, output = fork_server.run(["run", str(recipe)], folder)
        assert code == 0, output
        assert run_fingerprint(folder / "run", "orpo") == expected, f"kill {kill}"


def test_two_ranks_equal_one(fork_server: ForkServer, undisturbed: Path, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_orpo_recipe(tmp_path, model_folder, gradient_accumulation_steps=1)
    ranks = fork_server.run_ranks(["run", str(recipe)], tmp_path, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    runs = (undisturbed, tmp_path / "run")
    curves = [[step["loss"] for _, step in sorted(steps_of(run, "orpo").items())] for run in runs]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
    ends = [events_of(run, "evaluation")[-1] for run in runs]
    names = [name for name in ends[0] if name.startswith("eval_")]
    assert len(names) == 5
    assert [ends[1][name] for name in names] == pytest.approx([ends[0][name] for name in names], rel=1e-3, abs=1e-4)
