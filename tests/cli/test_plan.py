"""The verb plan: in a second, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RECIPE = """\
name: survival
model: {model_name_or_path: HuggingFaceTB/SmolLM3-3B}
data: {dataset_name: field-guide, columns: {question: prompt, answer: completion}}
sft:
  trainable: {last_layers: 2, lm_head: true}
  per_device_train_batch_size: 8
  gradient_accumulation_steps: 2
  num_train_epochs: 4
"""


def ask(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "survival.yaml").write_text(RECIPE, encoding="utf-8")
    command = [sys.executable, "-X", "importtime", "-m", "modelwright", "plan", "survival.yaml", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ})


def test_machines_stand_side_by_side_and_torch_stays_asleep(tmp_path: Path) -> None:
    done = ask(tmp_path, "--gpus", "1xH200,4xL40S,2x2xA40", "--json")
    assert done.returncode == 0, done.stderr
    assert not any(line.endswith("| torch") for line in done.stderr.splitlines()), "torch was imported"
    stage = json.loads(done.stdout)["stages"][0]
    assert [each["on"] for each in stage["on"]] == ["1xH200", "4xL40S", "2x2xA40"]
    assert stage["on"][0]["trained_parameters"] == 418_914_304
    assert stage["on"][1]["plan"]["batch_arithmetic"] == "batch 64 = 16 per device × 4 devices × 1 accumulation"
    for each in stage["on"]:
        assert each["fits"] and each["hours"] > 0 and each["cost"] >= 0 and each["memory"]["bytes"] > 1e9


def test_the_table_is_for_people_and_prices_are_ones_own(tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text('{"L4": 100}')
    done = ask(tmp_path, "--gpus", "1xL4", "--prices", "prices.json")
    assert "418.9 M of 3,075.1 M parameters trainable (13.62%)" in done.stdout
    assert "at $100/h" in done.stdout and "GPU-hours" in done.stdout


def test_the_state_of_the_optimizer_is_in_the_plan(tmp_path: Path) -> None:
    done = ask(tmp_path, "--gpus", "1xH200", "--json", "--set", "sft.optim=lion")
    assert done.returncode == 0, done.stderr
    [target] = json.loads(done.stdout)["stages"][0]["on"]
    assert target["memory"]["components"]["optimizer"] == 4 * target["trained_parameters"]
    assert target["plan"]["param_dtype"] == "fp32"


def test_a_data_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    missing = ("--set", "data.dataset_name=null", "--set", "data.train_file=questions.jsonl", "--gpus", "1xL4")
    done = ask(tmp_path, *missing)
    assert done.returncode == 2
    assert "sft: there is no file 'questions.jsonl'; --rows NUMBER plans without it" in done.stderr
    assert ask(tmp_path, *missing, "--rows", "2845").returncode == 0
    done = ask(tmp_path, "--set", "data.validation_file=held.jsonl", "--gpus", "1xL4")
    assert done.returncode == 2 and "sft: there is no file 'held.jsonl'" in done.stderr
    done = ask(tmp_path, "--set", "data.dataset_name=./later", "--gpus", "1xL4")
    assert done.returncode == 0 and "there is no ./later yet" in done.stdout


def test_a_wrong_machine_is_a_short_message(tmp_path: Path) -> None:
    done = ask(tmp_path, "--gpus", "4xV900")
    assert done.returncode == 2
    assert "--gpus names 'V900'; known are T4, L4" in done.stderr
