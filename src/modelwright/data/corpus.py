"""The embedded pretraining corpus: what Python says about itself, gathered from the interpreter that runs.

Language reference topics and the standard library's docstrings: two megabytes of English technical prose that every
machine has. The sources are parsed, never imported, and the same interpreter gives the same documents.
"""

from __future__ import annotations

import ast
import json
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import write_text

NAME = "python-docs"
LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo", "ensurepip"})
"""Folders with little prose in them."""
SHORTEST = 200
"""Characters below which a module's docstrings make no document."""


def python_docs() -> list[tuple[str, str]]:
    """Name and text of each document, in a fixed order; parsed once, then kept in the cache."""
    kept = cache_dir() / "corpus" / f"{NAME}-{platform.python_version()}.json"
    if not kept.exists():  # parsing the standard library takes some 4 CPU-seconds
        write_text(kept, json.dumps([*_topics(), *_modules()], ensure_ascii=False) + "\n")
    return [(name, text) for name, text in json.loads(kept.read_text(encoding="utf-8"))]


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name].strip()


def _modules() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not LEFT_OUT & set(parts):
            name = ".".join(parts).removesuffix(".__init__")
            text = "\n\n".join(_docstrings(path, name))
            if len(text) >= SHORTEST:
                yield f"module {name}", text


def _docstrings(path: Path, module: str) -> Iterator[str]:
    """What a module says about itself and its parts, each under its name, in the order they are written."""
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(path.read_bytes()), module)]
    while waiting:
        node, name = waiting.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said and said.strip():
                yield f"{name}\n\n{said.strip()}"
            parts = [part for part in node.body if isinstance(part, ast.ClassDef | ast.FunctionDef)]
            waiting = [(part, f"{name}.{part.name}") for part in parts] + waiting
