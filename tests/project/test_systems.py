"""The page of the five systems: every row has a state, and the commands that train nothing succeed."""

from __future__ import annotations

import json
import re
import shlex
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
