"""A run that chooses and stops by judged answers ends the same wherever it is killed.

``NIGHTLY=1 pytest tests/distributed/test_early_stopping.py`` kills twenty runs, otherwise one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tests.faults.fork_server import ForkServer, events_of, run_fingerprint, slow_after, wait_for_step
from tiny import tiny_recipe

KILLS = 20 if os.environ.get("NIGHTLY") else 1
SEED = 20261118
ANSWERS = """
evaluate:
  answers:
    verifiers: {exact_match: {}, short: {type: length, max_words: 3}}
    max_new_tokens: 8
gates:
  sft:
    answers.score: {at_least: 0.0}
"""


def stopping_recipe(folder: Path, model: Path) -> Path:
    recipe = tiny_recipe(
        folder, model, eval_steps=2, metric_for_best_model="answers.score", early_stopping_patience=3, max_steps=16
    )
    recipe.write_text(recipe.read_text(encoding="utf-8") + ANSWERS, encoding="utf-8")
    return recipe


def test_a_run_with_early_stopping_and_answer_gates_survives_kills(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    code, output = fork_server.run(["run", str(stopping_recipe(undisturbed, model_folder))], undisturbed)
    assert code == 0, output
    rng, expected = random.Random(SEED), run_fingerprint(undisturbed / "run")
    last = max(expected["steps"])
    assert last < 16, "it must stop early"
    evaluations = [_judged(undisturbed / "run")]
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        recipe = stopping_recipe(folder, model_folder)
        step = rng.randint(0, last - 1)
        held = slow_after(min(step + 3, last - 1), before=0.08, after=100.0)  # it must not end before it is killed
        process = fork_server.start(["run", str(recipe)], folder, first=held)
        wait_for_step(folder / "run", step)
        time.sleep(rng.uniform(0.0, 0.5))  # also while answers are judged
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        code, output = fork_server.run(["run", str(recipe)], folder)
        assert code == 0, output
        assert run_fingerprint(folder / "run") == expected, f"kill {kill} after step {step}"
        evaluations.append(_judged(folder / "run"))
    assert all(judged == evaluations[0] for judged in evaluations)


def _judged(run: Path) -> dict[int, float | None]:
    return {event["step"]: event.get("answers.score") for event in events_of(run, "evaluation")}
