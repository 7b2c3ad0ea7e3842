"""What the pages quote is what the code says: messages of the trouble guide, lines of the walk through the loop."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "modelwright"
TROUBLE = (ROOT / "docs" / "guides" / "trouble.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `([^`]+)` \|", TROUBLE.partition("## Installing")[0], re.MULTILINE)
CONCEPTS = [ROOT / "docs" / "concepts" / name for name in ("loop.md", "data-order.md")]
QUOTE = re.compile(r"^```python\n# (src/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WALKED = ("steps", "_accumulate")
"""Functions that loop.md quotes whole."""


@cache
def source_texts() -> tuple[str, ...]:
    """Every text in the source, with … in place of what is filled in."""
    return tuple(text for file in sorted(SOURCE.rglob("*.py")) for text in _texts(ast.parse(file.read_text("utf-8"))))


def _texts(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in child.values)
            yield re.sub(r"…(…)+", "…", "".join(parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.BinOp) and isinstance(child.op, ast.Add):
            yield "…".join(text for side in (child.left, child.right) for text in _texts(side))


def holds(message: str) -> bool:
    """Whether some text of the source says this, with holes in the same places."""
    parts = (re.escape(part) for part in re.split(r"\s*…\s*", message) if part)
    wanted = re.compile(r"\s*…[…\s]*".join(parts))
    return any(wanted.search(text) for text in source_texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_trouble_guide_is_one_of_the_code(message: str) -> None:
    assert holds(message), message


def test_a_message_that_nobody_writes_would_be_found() -> None:
    assert len(MESSAGES) > 30
    assert not holds("the moon is out of cheese; buy …")
    assert not holds(MESSAGES[-1].replace("debug", "debugging"))


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_quoted_lines_stand_in_the_source(page: Path) -> None:
    quotes = QUOTE.findall(page.read_text(encoding="utf-8"))
    assert quotes
    for file, body in quotes:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        count = len(body.splitlines())
        stretches = ("\n".join(lines[start : start + count]) for start in range(len(lines)))
        assert any(textwrap.dedent(some) == body.rstrip() for some in stretches), f"{page.name} quotes {body}"


def test_no_line_of_the_loop_is_left_out_of_the_walk() -> None:
    page = CONCEPTS[0].read_text(encoding="utf-8")
    explained = {line.strip() for _, body in QUOTE.findall(page) for line in body.splitlines()}
    file = SOURCE / "engine" / "trainer.py"
    lines = file.read_text(encoding="utf-8").splitlines()
    count = 0
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef) and node.name in WALKED:
            count += 1
            for line in lines[node.lineno - 1 : node.end_lineno]:
                assert line.strip() in explained or not line.strip(), f"{node.name}: {line.strip()} is not explained"
    assert count == len(WALKED)
