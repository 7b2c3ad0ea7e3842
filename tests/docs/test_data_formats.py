"""Every format of docs/guides/data-formats.md is read by its command as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelwright.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/data-formats.md").read_text(encoding="utf-8")
FILE = re.compile(r"^<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```bash\n(?P<commands>(?:modelwright .*\n)+)```\n\n```text\n(?P<output>.*?)\n```$", re.MULTILINE)
EXAMPLES = [(match["commands"].splitlines(), match["output"]) for match in SHOWN.finditer(PAGE)]


def test_every_format_has_an_example() -> None:
    assert len(EXAMPLES) == len(re.findall("^### ", PAGE, re.MULTILINE)) >= 18
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
