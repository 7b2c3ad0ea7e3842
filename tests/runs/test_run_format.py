"""A run folder of version 0.1 is refused by every command with one sentence, and nothing in it changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelwright import __version__
from modelwright.cli.main import main
from modelwright.errors import Refused
from modelwright.recipe.load import load
from modelwright.runs.folder import RUN_FORMAT, RunFolder, open_run
from modelwright.runs.journal import Journal
from modelwright.stages import pipeline
from tiny import tiny_recipe

MESSAGE = f"was written by modelwright 0.1.0; modelwright {__version__} cannot continue or read it: choose another"


@pytest.fixture
def old_run(tmp_path: Path, model_folder: Path) -> Path:
    """A finished run in the layout of version 0.1, at the output_dir of a recipe."""
    recipe = tiny_recipe(tmp_path, model_folder)
    run = tmp_path / "run"
    checkpoint = run / "stages/sft/checkpoints/step-00000012"
    checkpoint.mkdir(parents=True)
    (run / "recipe.yaml").write_bytes(recipe.read_bytes())
    start = {"time": 1.0, "event": "run", "recipe": "tiny", "folder": str(run), "stages": ["sft"], "world": 1,
             "device": "2 CPU threads", "modelwright": "0.1.0"}  # fmt: skip
    events = [start, {"time": 2.0, "event": "flow", "stage": "sft", "state": "running"}]
    (run / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    files = {"metrics": {}, "wishes": {"sft.learning_rate": 1e-3}, "plan": {}, "files": {}, "seal": "0" * 32}
    (run / "stages/sft/result.json").write_text(json.dumps(files), encoding="utf-8")
    manifest = {"step": 12, "modelwright": "0.1.0", "files": {}, "seal": "0" * 32}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "command", ["run", "report", "dashboard", "ask", "eval", "gate", "export", "compare", "chat", "serve"]
)
def test_every_command_refuses_a_run_of_version_0_1(
    old_run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(old_run)
    target = str(old_run.parent / "recipe.yaml") if command == "run" else str(old_run)
    with pytest.raises(SystemExit) as stopped:
        main([command, target, *(["What is it?"] if command == "ask" else [])])
    assert stopped.value.code == Refused.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{old_run} {MESSAGE}")
    assert contents(old_run) == before


def test_a_checkpoint_of_version_0_1_is_not_imported(old_run: Path, model_folder: Path, tmp_path: Path) -> None:
    checkpoint = old_run / "stages/sft/checkpoints/step-00000012"
    recipe = tiny_recipe(tmp_path / "new", model_folder, resume_from_checkpoint=str(checkpoint))
    with pytest.raises(Refused, match=r"was written by modelwright 0\.1\.0"):
        pipeline.run(load(recipe, environ={}))


def test_the_first_start_in_the_journal_decides(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.journal.write_text("a line torn by a ki\n", encoding="utf-8")
    assert open_run(tmp_path) == folder
    journal = Journal(folder.journal)
    journal.add("run", modelwright="9.0.0", run_format=RUN_FORMAT + 1)
    journal.add("run", modelwright=__version__, run_format=RUN_FORMAT)
    with pytest.raises(Refused, match=r"was written by modelwright 9\.0\.0"):
        open_run(tmp_path)
