"""Messages name settings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from modelwright.recipe.explain import json_schema

SOURCE = Path(__file__).parents[2] / "src" / "modelwright"
NO_SETTINGS = {"fingerprint", "safetensors", "html", "jsonl", "row_formats", "prepare", "sft"}
"""Words after a section's name that end a file's name, or belong to the code."""


def named_settings() -> set[str]:
    """Every name in the schema, at any depth."""
    names: set[str] = set()
    waiting = [json_schema()]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            names |= set(node.get("properties", {}))
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return names


def test_every_setting_that_a_message_names_is_in_the_schema() -> None:
    """An error of images of two sizes once recommended image_size, which there was not."""
    known = named_settings() | NO_SETTINGS
    sections = "|".join(json_schema()["properties"])
    dotted = re.compile(rf"(?<![./\w])(?:{sections})\.([a-z_]{{3,}})\b")
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                wrong += [f"{path.name}:{node.lineno}: {name}" for name in dotted.findall(node.value)
                          if name not in known]  # fmt: skip
    assert wrong == []


def test_errors_of_images_name_no_other_setting() -> None:
    words = re.findall(r"[a-z]+_[a-z_]+", " ".join(
        part.value for raised in ast.walk(ast.parse((SOURCE / "data" / "images.py").read_text(encoding="utf-8")))
        if isinstance(raised, ast.Call) and getattr(raised.func, "id", "") in ("Problem", "UsageError", "DataError")
        for part in ast.walk(raised) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ))  # fmt: skip
    assert set(words) <= named_settings() | {"train_images", "test_images"}, words
