"""Every broken recipe gives exactly the messages in the .txt file of the same name.

``UPDATE_GOLDEN=1 pytest tests/recipe/test_broken.py`` rewrites them; read the diff.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from modelwright.errors import RecipeError
from modelwright.recipe.load import load

BROKEN = Path(__file__).parent / "broken"
RECIPES = sorted(BROKEN.glob("*.yaml"))


def directive(path: Path, word: str) -> list[str]:
    """The words after ``# args:`` or ``# env:`` in a recipe's first line."""
    first = path.read_bytes().split(b"\n", 1)[0].decode("utf-8", "replace")
    return shlex.split(first.removeprefix(f"# {word}:")) if first.startswith(f"# {word}:") else []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_broken_recipe_gives_its_messages(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BROKEN)
    sets = [word for word in directive(path, "args") if word != "--set"]
    environ = dict(word.split("=", 1) for word in directive(path, "env"))
    with pytest.raises(RecipeError) as caught:
        load(path.name, sets, environ)
    messages = f"{caught.value}\n"
    golden = path.with_suffix(".txt")
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(messages, encoding="utf-8")
    assert messages == golden.read_text(encoding="utf-8")


def test_there_are_many_broken_recipes_and_each_has_its_messages() -> None:
    assert len(RECIPES) >= 45
    assert [path.stem for path in RECIPES] == sorted(path.stem for path in BROKEN.glob("*.txt"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_message_is_short_and_says_where(path: Path) -> None:
    for message in path.with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        assert len(message) <= 200, message
        assert message.startswith(("--set: ", "environment ")) or ".yaml:" in message.split(" ", 1)[0], message
