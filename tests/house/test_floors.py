"""Rooms import only from the floors below them, so that the house can be read from the ground up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FLOORS = (
    ("errors",),
    ("recipe", "runs"),
    ("plan", "data", "models", "report"),
    ("engine", "launch", "serve"),
    ("tasks",),
    ("stages",),
    ("cli",),
)
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
FILES = sorted((SOURCE / "modelwright").rglob("*.py"))


def room_of(module: str) -> str:
    """The room a dotted module lies in; the package itself has none."""
    return (*module.split("."), "")[1]


def module_of(file: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Line and room of every import of ours, those inside functions too; the package root belongs to all."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(module.split(".")[: -node.level]) if node.level else ""
            whole = ".".join(part for part in (above, node.module) if part)
            # `from modelwright import engine` names a room, `from modelwright import __version__` does not
            found = [f"{whole}.{name.name}" for name in node.names] if whole == "modelwright" else [whole]
        for name in found:
            if name.split(".")[0] == "modelwright" and (room := room_of(name)) and not room.startswith("__"):
                yield getattr(node, "lineno", 0), room


def climbs(text: str, module: str) -> list[str]:
    """Every import that does not go down, with its line."""
    here = room_of(module)
    return [
        f"{line}: {here} imports {room}"
        for line, room in imports_of(ast.parse(text), module)
        if room != here and FLOOR_OF[room] >= FLOOR_OF[here]
    ]


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_room_imports_only_from_below(file: Path) -> None:
    module = module_of(file)
    if room_of(module) in ("", "__main__"):
        return  # the package itself and `python -m modelwright` stand outside the house
    found = climbs(file.read_text(encoding="utf-8"), module)
    assert not found, "\n".join(f"{file.relative_to(SOURCE.parent)}:{line}" for line in found)


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module_of(file)) for file in FILES} - {"", "__main__"}
    assert rooms <= set(FLOOR_OF), f"no floor is known for {', '.join(sorted(rooms - set(FLOOR_OF)))}"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("from modelwright.tasks.sft import SftTask", "1: engine imports tasks"),
        ("def warm():\n    import modelwright.stages.pipeline", "2: engine imports stages"),
        ("from modelwright import cli", "1: engine imports cli"),
        ("from ..serve.ask import Answerer", "1: engine imports serve"),
    ],
)
def test_an_import_upwards_or_sideways_is_noticed(text: str, letter: str) -> None:
    assert climbs(text, "modelwright.engine.trainer") == [letter]


def test_imports_downwards_and_within_the_room_are_fine() -> None:
    lines = [
        "from modelwright import __version__, errors",
        "from modelwright.engine.distributed import World",
        "from .guard import Guard",
        "import torch",
    ]
    assert climbs("\n".join(lines), "modelwright.engine.trainer") == []
