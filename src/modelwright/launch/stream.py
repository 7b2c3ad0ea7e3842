"""Write Kubernetes documents as one YAML stream that a person can read, and read one back with its lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from modelwright.errors import Problem, ProblemsFound, first_line

Document = dict[str, Any]
Step = str | int
PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./@+-]*(:[A-Za-z0-9_./@+-]+)*")
WORDS_OF_YAML = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
"""What some reader of YAML would take for something other than text."""
LARGEST_FILE = 4_000_000
LONGEST_LINE = 90
"""Characters of a list that stands on one line."""


@dataclass(frozen=True)
class Remarks:
    """Comments that a rendered stream carries, for the questions that a person would ask."""

    top: str = ""
    """Before everything."""
    of_documents: Mapping[str, str] = field(default_factory=dict)
    """By the kind and name of a document: `PersistentVolumeClaim workspace`, or the kind alone."""
    of_keys: Mapping[str, str] = field(default_factory=dict)
    """By key, or by kind and key as in `TrainJob env`; written where the key stands first in a document."""


def write(documents: Sequence[Document], remarks: Remarks | None = None) -> str:
    """All documents as YAML that every reader of YAML takes the same way."""
    remarks = remarks or Remarks()
    parts = [_comment(remarks.top)]
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        said = remarks.of_documents.get(f"{kind} {name}") or remarks.of_documents.get(kind, "")
        of_kind = {key.partition(" ")[2]: text for key, text in remarks.of_keys.items() if key.startswith(f"{kind} ")}
        left = {**remarks.of_keys, **of_kind}
        parts.append("---\n" + _comment(said) + "\n".join(_lines(document, 0, left)) + "\n")
    return "".join(parts)


def as_yaml(mapping: dict[str, Any]) -> str:
    """One mapping as YAML, without remarks."""
    return "\n".join(_lines(mapping, 0, {})) + "\n"


def _comment(text: str, indent: int = 0) -> str:
    return "".join(f"{' ' * indent}# {line}".rstrip() + "\n" for line in text.splitlines())


def _lines(value: Any, indent: int, remarks: dict[str, str]) -> Iterator[str]:
    """The lines of a mapping or a list; a remark is used up where it is written."""
    pad = " " * indent
    if isinstance(value, list):
        for item in value:
            rest = list(_lines(item, indent + 2, remarks)) if item and isinstance(item, dict | list) else []
            if not rest:
                yield f"{pad}- {_scalar(item)}"
                continue
            while rest[0].lstrip().startswith("#"):  # a remark about the first key stands before the dash
                yield pad + rest.pop(0).lstrip()
            yield f"{pad}- {rest[0].lstrip()}"
            yield from rest[1:]
        return
    for key, item in value.items():
        if key in remarks:
            yield from _comment(remarks.pop(key), indent).splitlines()
        name = _scalar(key)
        if item and isinstance(item, dict):
            yield f"{pad}{name}:"
            yield from _lines(item, indent + 2, remarks)
        elif item and isinstance(item, list) and not _is_short(item):
            yield f"{pad}{name}:"
            yield from _lines(item, indent, remarks)
        elif isinstance(item, str) and _is_block(item):
            yield f"{pad}{name}: |"
            yield from (f"{pad}  {line}".rstrip() for line in item.splitlines())
        else:
            yield f"{pad}{name}: {_scalar(item)}"


def _is_short(items: list[Any]) -> bool:
    """Whether a list reads better on one line."""
    return not any(isinstance(item, dict | list) for item in items) and len(_scalar(items)) < LONGEST_LINE


def _is_block(text: str) -> bool:
    """Whether text of several lines comes back whole from a literal block."""
    lines = text.split("\n")
    sound = all(line == line.rstrip() and line.isprintable() for line in lines)
    return len(lines) > 2 and sound and text[:1] not in (" ", "") and text.endswith("\n") and not text.endswith("\n\n")


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS_OF_YAML:
        return value
    if isinstance(value, list):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Manifest:
    """One document of a stream, with the place of everything in it."""

    file: str
    """The file it came from, as letters name it."""
    body: Any
    """What it says."""
    line: int
    """Where it begins."""

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        metadata = self.body.get("metadata")
        return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""

    def where(self, path: Sequence[Step]) -> str:
        """File and line of a field, or of the nearest thing around it that is written."""
        node, line = self.body, self.line
        for step in path:
            places = getattr(getattr(node, "lc", None), "data", None) or {}
            if step not in places:
                break
            line = places[step][0] + 1
            node = node[step]
        return f"{self.file}:{line}"


def read(path: Path) -> list[Manifest]:
    """Read a file of documents; one that is no YAML is told by its line."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ProblemsFound([Problem(str(path), f"is over {LARGEST_FILE // 1_000_000} MB; no manifest is")])
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProblemsFound([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise ProblemsFound([Problem(str(path), "is not UTF-8; save it as UTF-8")]) from None
    return read_text(text, str(path))


def read_text(text: str, name: str) -> list[Manifest]:
    """Read a stream of documents."""
    reader = YAML(typ="rt", pure=True)
    try:
        bodies = [body for body in reader.load_all(text) if body is not None]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ProblemsFound([Problem(f"{name}:{line}", f"is not YAML: {error.problem or error.context}")]) from None
    except YAMLError as error:
        raise ProblemsFound([Problem(name, f"is not YAML: {first_line(error)}")]) from None
    found = []
    for body in bodies:
        if not isinstance(body, CommentedMap):
            raise ProblemsFound([Problem(name, "a document is no mapping; it wants apiVersion, kind and metadata")])
        line = min((place[0] for place in (body.lc.data or {}).values()), default=0) + 1
        found += _items(body, name, line)
    if not found:
        raise ProblemsFound([Problem(name, "holds no document; it wants a PyTorchJob or a TrainJob")])
    return found


def _items(body: CommentedMap, name: str, line: int) -> list[Manifest]:
    """A `List` stands for what is in it."""
    items = body.get("items")
    if body.get("kind") == "List" and isinstance(items, CommentedSeq):
        return [Manifest(name, item, items.lc.data[i][0] + 1) for i, item in enumerate(items)]
    return [Manifest(name, body, line)]
