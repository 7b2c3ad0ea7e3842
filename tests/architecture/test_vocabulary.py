"""Words of a private language stay out of identifiers, and no public class name is used twice.

An engineer who knows PyTorch and has never met this project must find things by the usual word. The list holds the
words that version 0.1 used instead; they may not come back.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("src", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))
PRIVATE_WORDS = {
    *("told", "tells", "wish", "wishes", "letter", "letters", "beside", "settle", "settled", "muster", "eighths"),
    *("rehearse", "rehearsal", "rehearsed", "mend", "mended", "mends", "foresee", "foreseen", "foretold", "shorten"),
    *("parcel", "mortal", "hurry", "disturb", "disturbance", "bite", "bites", "trunk", "twin", "twins", "crew"),
    *("aside", "anew", "learnt", "fewest", "stands", "rests", "sureness", "behind", "standing", "pulse", "deeds"),
    *("scene", "card", "cards"),
}
VAGUE_WORDS = {
    *("found", "made", "given", "seen", "taken", "said", "asked", "kept", "look", "looks", "way", "ways", "place"),
    *("places", "whole", "goes"),
}
"""Words that say nothing as a name; in the name of a test, which is a sentence, they are plain English."""
ALLOWED = {"CHOICE_LETTERS", "WHOLE_FILE", "connection_made", "looks_like_jsonl"}
"""Names in which such a word has its ordinary meaning."""
TERMS = re.compile(r"(?i:in_place|(model|dataset)_card)")
"""Terms of the field that hold such a word."""
SNAKE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def words_of(identifier: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return set(SNAKE.sub("_", TERMS.sub("", identifier)).lower().split("_"))


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module defines: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def private_words(text: str) -> list[str]:
    """Identifiers with a word of the list, each with its line."""
    return [
        f"{line}: {name}"
        for line, name in identifiers(ast.parse(text))
        if name not in ALLOWED
        and words_of(name) & (PRIVATE_WORDS if name.startswith("test_") else PRIVATE_WORDS | VAGUE_WORDS)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_identifiers_use_the_words_of_the_field(file: Path) -> None:
    problems = private_words(file.read_text(encoding="utf-8"))
    assert not problems, "\n".join(f"{file.relative_to(ROOT)}:{problem}" for problem in problems)


def test_a_private_word_is_noticed() -> None:
    assert sorted(private_words("def clip(told):\n    wish = told\n    class RestLetter: ...\n")) == [
        "1: told",
        "2: wish",
        "3: RestLetter",
    ]
    assert private_words("def test_a_key_is_told(found): ...") == ["1: test_a_key_is_told", "1: found"]
    assert private_words("def clip_grad_norm(max_norm): ...\ndef test_a_key_is_found_in_its_place(): ...") == []


def test_no_public_class_name_is_defined_twice() -> None:
    defined = defaultdict(list)
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(file.relative_to(ROOT / "src")))
    assert not {name: files for name, files in defined.items() if len(files) > 1}
