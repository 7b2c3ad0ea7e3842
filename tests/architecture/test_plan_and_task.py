"""A task has no optional members that only a getattr would find."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def hidden_hooks(text: str) -> list[int]:
    """Lines that ask a task for something its protocol may not have."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and name_of(node.func) in ("getattr", "hasattr")
        and name_of(node.args[0]) == "task"
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_task_protocol_says_all_that_is_asked_of_a_task(file: Path) -> None:
    assert not hidden_hooks(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("code", ["getattr(task, 'rows', 0)", "x = hasattr(self.engine.task, 'warm_up')"])
def test_a_hidden_hook_would_be_found(code: str) -> None:
    assert hidden_hooks(f"import os\n{code}") == [2]
    assert not hidden_hooks("getattr(tasks, 'sft'); task.rows")
