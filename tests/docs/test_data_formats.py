"""Every format of docs/guides/data-formats.md is read by its command as the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelwright.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/data-formats.md").read_text(encoding="utf-8")
FILE = re.compile(r"^<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n((?:modelwright .*\n)+)```$", re.MULTILINE)
OUTPUT = re.compile(r"^(?<!-->\n)```text\n(.*?)\n```$", re.MULTILINE)
AUDIT = "modelwright data audit {file} --set data.test_size=0"
"""The command of the page for every format that shows no other."""


def examples() -> Iterator[tuple[list[str], str]]:
    """The commands of each format, and the line that the last of them prints."""
    for text in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        text = text.partition("\n## ")[0]
        shown, file = COMMANDS.search(text), FILE.search(text)
        commands = shown[1].splitlines() if shown else [AUDIT.format(file=file["name"])] if file else []
        output = OUTPUT.search(text)
        assert commands and output, text
        yield commands, output[1]


EXAMPLES = list(examples())


def test_every_format_has_an_example() -> None:
    assert len(EXAMPLES) >= 18
    assert AUDIT.format(file="wells.jsonl") in PAGE
    assert {name for name, _ in FILE.findall(PAGE)} > {"calls.jsonl", "camp/dataset_info.json", "wells.csv"}


@pytest.mark.parametrize(("commands", "output"), EXAMPLES, ids=lambda value: value[-1] if type(value) is list else "")
def test_a_format_is_read_as_the_page_says(
    commands: list[str],
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, body in FILE.findall(PAGE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words, _, comment = command.partition("  # exits ")
        code = 0
        try:
            main(words.split()[1:])
        except SystemExit as stop:
            code = int(stop.code or 0)
        assert code == int(comment or 0)
    assert output in capsys.readouterr().out
