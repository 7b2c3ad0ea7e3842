"""The page of the five systems: every row has a state, and the commands that train nothing succeed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from modelwright.cli.main import main

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
