"""The page of the five systems: every row has a state, and the commands that train nothing succeed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelwright.cli.main import main
from tests.stages.test_pretrain import recipe_of

PAGE = Path(__file__).parents[2] / "docs" / "systems.md"
ROWS = [re.split(r"\s*\|\s*", line.strip("| "))
        for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]  # fmt: skip
QUICK = ("plan", "check", "explain")
COMMANDS = [command for row in ROWS for command in re.findall(r"`([^`]+)`", row[1])
            if re.search(rf"\bmodelwright (?:{'|'.join(QUICK)}) |--render", command)
            and "FOLDER" not in command and "--measure" not in command]  # fmt: skip


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row[0].strip() != "in the document"], ids=lambda row: row[0][:40]
)
def test_a_row_has_a_command_or_words_and_a_state(row: list[str]) -> None:
    assert len(row) == 3
    assert re.match(r"(works|differs|not done)\b", row[2].strip()), row[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_trains_nothing_succeeds(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    variables, _, arguments = command.partition("modelwright ")
    for name, _, value in (part.partition("=") for part in shlex.split(variables)):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(arguments))
        raise SystemExit(0)
    printed = capsys.readouterr()
    assert stop.value.code in (0, None), printed.err
    assert printed.out


def test_many_commands_are_run() -> None:
    assert len(COMMANDS) > 30


SCRIPTS = {
    "verify_gpu.py": "doctor pipeline.yaml",
    "02_clean_deduplicate_optimized.py, 03_tokenize_and_pack.py": "data prepare pipeline.yaml",
    "04_init_model.py": "run pipeline.yaml --until-stage init",
    "START_PRODUCTION_TRAINING.sh, production_pretrain.py": "run pipeline.yaml --until-stage pretrain",
    "05_pretrain.py --no-fp8": "run pipeline.yaml --until-stage pretrain --no-fp8 --output_dir bf16",
    "12_check_gates.py pretrain": "gate run pretrain",
    "11_evaluate.py checkpoints/pretrain": "eval run/stages/pretrain/checkpoints/step-00000002 --text notes.txt",
    "07_sft.py --no-fp8": "run pipeline.yaml --from-stage sft --until-stage sft --no-fp8",
    "12_check_gates.py sft": "gate run sft",
    "11_evaluate.py checkpoints/sft_final": "eval run/stages/sft/model",
    "resume_pipeline.sh sft": "run pipeline.yaml --from-stage sft --until-stage sft --no-fp8",
    "09_dpo.py": "run pipeline.yaml --from-stage dpo --until-stage dpo",
    "12_check_gates.py dpo": "gate run dpo",
    "11_evaluate.py checkpoints/dpo_final": "eval run/stages/dpo/model --text notes.txt",
    "10_lora_finetune.py": "run pipeline.yaml --from-stage lora",
    "run_full_pipeline.sh": "run pipeline.yaml --set sft.precision=bf16",
    "profile_memory.py": "plan pipeline.yaml --measure --steps 2 --stage sft",
}
"""The scripts of the 7B document, in the order of its stages, and the command for each."""


def pipeline_recipe(folder: Path, tokenizer: Path) -> dict[str, Any]:
    """All stages of the 7B document in two steps each, with their data."""
    recipe_of(folder, tokenizer)
    recipe: dict[str, Any] = json.loads((folder / "recipe.yaml").read_text(encoding="utf-8"))
    brief = {"max_steps": 2, "save_steps": 2, "eval_steps": 2, "precision": "auto"}
    recipe["pretrain"] |= {**brief, "sequence_length_curriculum": {}}
    answers = [{"prompt": f"Gate {n}?", "completion": f"Path {n}."} for n in range(12)]
    preferred = [{"prompt": f"Gate {n}?", "chosen": f"Path {n}.", "rejected": "No idea."} for n in range(12)]
    for name, rows in (("answers.jsonl", answers), ("pairs.jsonl", preferred)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "notes.txt").write_text("The path was dry. " * 9, encoding="utf-8")
    files = {"sft": "answers.jsonl", "dpo": "pairs.jsonl", "lora": "answers.jsonl"}
    stages = {
        stage: {**brief, "max_length": 64, "data": {"train_file": file, "test_size": 2}}
        for stage, file in files.items()
    }
    gates = {stage: {"eval_loss": {"at_most": 100}} for stage in ("pretrain", "sft", "dpo")}
    return {**recipe, **stages, "output_dir": "run", "prepare": {"sequence_length": 32, "minhash_dedup": False},
            "gates": gates, "compare": {}}  # fmt: skip


@pytest.mark.slow
def test_the_scripts_of_the_pipeline_have_commands_that_work(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = pipeline_recipe(tmp_path, model_folder)
    (tmp_path / "pipeline.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    for script, command in SCRIPTS.items():
        with pytest.raises(SystemExit) as stop:
            main(command.split())
            raise SystemExit(0)
        printed = capsys.readouterr()
        assert stop.value.code in (0, None), f"{script}: {printed.out[-2000:]}{printed.err}"
        assert printed.out, script
    for stage in ("init", "pretrain", "sft", "dpo"):
        assert (tmp_path / f"run/stages/{stage}/model/model.safetensors").exists(), stage
    assert (tmp_path / "run/stages/lora/model/adapter_model.safetensors").exists()


def test_every_script_of_the_documents_is_in_a_row_of_the_page() -> None:
    named = " ".join(row[0] for row in ROWS)
    for scripts in SCRIPTS:
        for script in re.findall(r"\S+\.(?:py|sh)\b", scripts):
            assert script in named, script


TINY = {
    "data convert FILE.jsonl": ["data convert {shared}/practical-skills-qa/final_qa_data_unique.jsonl -o qa.parquet "
                                "--prompt-template 'For {{topic}}, {{question}}'"],
    "data convert RECIPE": ["data convert survival-smollm3-tiny -o rows"],
    "data show survival-smollm3-tiny": ["data show survival-smollm3-tiny --num-samples 1"],
    "run survival-smollm3": ["RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=23456 modelwright run "
                             "survival-smollm3-tiny --set sft.max_steps=2 --set compare=null --set gates={{}}"],
    "launch survival-smollm3-tiny --on openshift --simulate": [
        "launch gemma-270m-tiny --on openshift --simulate --inject-fault kill:1@5 --set cluster.nodes=2 "
        "--work-dir job"],
    "ask RUN": ["ask runs/survival-smollm3-tiny 'How do I tie a bowline?'",
                "ask runs/survival-smollm3-tiny 'How do I tie a bowline?' --both"],
    "run resnet18-cifar10-plain": ["DATA_DIR={shared}/cifar10 OUTPUT_DIR=images modelwright run resnet18-cifar10-plain "
                                   "--set classify.max_steps=2 --set model.resnet_width=8 --set gates={{}} "
                                   "--set classify.max_eval_samples=64"],
    "export RUN --format pth": ["export images --format pth"],
    "run llama-7b --until-stage init": ["run llama-tiny --until-stage init"],
    "run llama-7b --fp8": ["run llama-tiny --until-stage pretrain --no-fp8 --set pretrain.max_steps=20"
                           " --set gates={{}}"],
    "run llama-7b --from-stage sft": ["run llama-tiny --from-stage sft --until-stage sft --no-fp8 --set gates={{}} "
                                      "--set pretrain.max_steps=20"],
    "eval RUN": ["eval runs/llama-tiny"],
    "data prepare llama-tiny": ["data prepare llama-tiny"],
    "plan llama-tiny --measure": ["plan llama-tiny --measure --steps 2 --stage dpo"],
    "doctor": ["doctor"],
    "launch gemma-270m --nproc-per-node 2": ["launch gemma-270m-tiny --nproc-per-node 2 --bf16 --output_dir two "
                                             "--set gates={{}} --set pretrain.max_steps=2"],
}  # fmt: skip
"""What the page trains, by the beginning of its command: the same with the tiny recipes, in this order."""
PIPELINE = "project/test_systems.py::test_the_scripts_of_the_pipeline_have_commands_that_work"
ELSEWHERE = {
    "convert": "recipe/test_convert.py::test_convert_writes_a_recipe_and_says_what_is_missing",
    "dashboard": "report/test_dashboard.py::test_the_list_and_a_run_and_two_over_each_other",
    "launch … --submit": "cluster/test_client.py::test_the_runtime_is_created_before_the_server_tries_the_job",
    "job logs": "cluster/test_client.py::test_logs_are_those_of_the_first_pod",
    "job status": "cluster/test_client.py::test_status_shows_phase_pods_and_progress",
    "run llama-7b": PIPELINE,
    "gate RUN pretrain": PIPELINE,
    "data prepare": PIPELINE,
    "data download fineweb-edu": (
        "data/test_hub_download.py::test_an_open_corpus_fills_a_folder_resumes_and_is_repaired"
    ),
    "doctor gemma-270m": "stages/test_gemma.py::test_the_doctor_asks_the_hub_whether_the_gated_model_may_be_read",
    "launch gemma-270m --on nodes":
        "stages/test_gemma.py::test_run_node0_and_run_node1_are_the_two_commands_that_launch_prints",
    "launch gemma-270m": "stages/test_gemma.py::test_what_accelerate_launch_started_is_one_command",
}  # fmt: skip
"""Other commands of the page, and the tests that run them or what they call."""


def test_each_command_of_the_page_is_run_by_a_test() -> None:
    commands = [command for row in ROWS for command in re.findall(r"`([^`]*modelwright [^`]+)`", row[1])]
    for command in commands:
        words = command.split("modelwright ", 1)[1]
        is_run = command in COMMANDS or any(words.startswith(each) for each in (*TINY, *ELSEWHERE))
        assert is_run or words.startswith("install"), command
    for test in ELSEWHERE.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (PAGE.parents[1] / "tests" / path).read_text(encoding="utf-8"), test


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="takes ten minutes; NIGHTLY=1 runs it")
def test_the_commands_that_train_work_with_the_tiny_recipes(shared: Path, tmp_path: Path) -> None:
    for command in [each for commands in TINY.values() for each in commands]:
        ranks = range(2 if "{rank}" in command else 1)
        processes = [start(command.format(shared=shared / "data", rank=rank), tmp_path) for rank in ranks]
        outputs = [process.communicate(timeout=900)[0] for process in processes]
        assert [process.returncode for process in processes] == [0 for _ in ranks], f"{command}: {outputs}"
        assert any(outputs), command


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """A command of the page as a process, with its variables."""
    variables, _, words = command.partition("modelwright ") if "modelwright " in command else ("", "", command)
    env = {**os.environ, **dict(part.split("=", 1) for part in variables.split())}
    return subprocess.Popen([sys.executable, "-m", "modelwright", *shlex.split(words)], cwd=folder, env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
