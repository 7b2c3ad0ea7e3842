"""A mixture is killed and resumed bit for bit, and two ranks equal one, with held-out losses by source."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer, events_of, run_fingerprint, slow_after, steps_of, wait_for_step
from tiny import tiny_dpo_recipe, tiny_recipe

NAMES = ("eval_loss", "eval_loss.sums", "eval_loss.more")
FILES = {"sft": "rows.jsonl", "dpo": "pairs.jsonl"}


def mixed_recipe(stage: str, folder: Path, model: Path) -> Path:
    """Two sources by weight, evaluated on five of the eight held-out rows."""
    build = tiny_recipe if stage == "sft" else tiny_dpo_recipe
    path = build(folder, model, max_eval_samples=5, global_batch_size=4, gradient_accumulation_steps=1)
    lines = (folder / FILES[stage]).read_text(encoding="utf-8").splitlines()
    for name, rows in (("sums", lines[:-15]), ("more", lines[-15:])):
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    mix = "mix: {sums: {dataset_name: sums.jsonl, weight: 1}, more: {dataset_name: more.jsonl, weight: 2}}"
    text = (
        path.read_text(encoding="utf-8")
        .replace(f'train_file: "{FILES[stage]}"', mix)
        .replace("test_size: 4", "test_size: 8")
    )
    gate = f"gates: {{{stage}: {{eval_loss.more: {{at_most: 2, times: base_eval_loss.more}}}}}}\n"
    path.write_text(text.partition("gates:")[0] + gate, encoding="utf-8")
    return path


def evaluations(run: Path) -> list[list[float]]:
    return [[event[name] for name in NAMES] for event in events_of(run, "evaluation")]


@pytest.mark.parametrize("stage", FILES)
def test_a_killed_mixture_resumes_bit_for_bit_and_two_ranks_equal_one(
    stage: str, fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    one, killed, two = (tmp_path / name for name in ("one", "killed", "two"))
    code, output = fork_server.run(["run", str(mixed_recipe(stage, one, model_folder))], one)
    assert code == 0, output
    assert "source more: 15 rows, 66.7% of the rows of a step" in output
    assert "eval_loss.more" in output or "(sums " in output

    history = json.loads((one / "run/training_history.json").read_text(encoding="utf-8"))
    last = events_of(one / "run", "evaluation")[-1]
    measured = {name: value for name, value in last.items() if name.startswith("eval_")}
    assert measured.items() <= history["epochs"][-1].items() and measured.items() <= history["steps"][-1].items()
    assert measured.keys() >= {"eval_loss.more", *(["eval_reward_margin.sums"] if stage == "dpo" else [])}

    recipe = mixed_recipe(stage, killed, model_folder)
    trial = fork_server.start(["run", str(recipe)], killed, first=slow_after(5))
    wait_for_step(killed / "run", 5)
    os.kill(trial.pid, signal.SIGKILL)
    assert trial.wait() != 0
    code, output = fork_server.run(["run", str(recipe)], killed)
    assert code == 0, output
    assert events_of(killed / "run", "resumed")[-1]["step"] == 3
    assert run_fingerprint(killed / "run", stage)["steps"] == run_fingerprint(one / "run", stage)["steps"]
    assert run_fingerprint(killed / "run", stage)["files"] == run_fingerprint(one / "run", stage)["files"]
    assert evaluations(killed / "run")[-1] == evaluations(one / "run")[-1]

    ranks = fork_server.run_ranks(["run", str(mixed_recipe(stage, two, model_folder))], two, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    first, second = ([step["batch_hash"] for _, step in sorted(steps_of(each / "run").items())] for each in (one, two))
    assert first == second
    for values, others in zip(evaluations(two / "run"), evaluations(one / "run"), strict=True):
        assert values == pytest.approx(others, abs=1e-5)
    notes = [event["message"] for event in events_of(two / "run", "note")]
    assert any(note.startswith("evaluations take 5 of ") for note in notes)
