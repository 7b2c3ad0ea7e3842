"""Files and functions stay small: when one outgrows this, a noun is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST_FILE = 350
LONGEST_FUNCTION = 60


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_is_short(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").count("\n")
    assert lines < LONGEST_FILE, f"{name_of(file)} has {lines} lines"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_its_functions_are_short(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length < LONGEST_FUNCTION, f"{name_of(file)}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_it_opens_with_what_it_is_for(file: Path) -> None:
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert said, f"{name_of(file)} has no docstring"
