"""Shapes of documents, and everything in a value that does not fit one: unknown, missing, of another type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from modelwright.launch.stream import Step

Path = tuple[Step, ...]
QUANTITY = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?")


@dataclass(frozen=True)
class Kind:
    """A type of value, in words."""

    wants: str
    """What would do."""


TEXT, WHOLE, TRUTH = Kind("text"), Kind("a whole number"), Kind("true or false")
AMOUNT, WHOLE_OR_TEXT, ANY = Kind("an amount such as 16Gi"), Kind("a whole number or text"), Kind("anything")


@dataclass(frozen=True)
class ListOf:
    """Items that are all alike."""

    item: Field


@dataclass(frozen=True)
class MapOf:
    """Free names, values that are all alike."""

    value: Field


@dataclass(frozen=True)
class Shape:
    """A mapping with fixed names."""

    fields: dict[str, Field]
    """What we render, and its type."""
    required: tuple[str, ...] = ()
    """What must be there."""
    others: frozenset[str] = field(default_factory=frozenset)
    """Names that Kubernetes knows and we do not render."""


Field = Kind | ListOf | MapOf | Shape


def mismatches(value: Any, wanted: Field, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Every field that is unknown, missing or of another type: its path, and what would do."""
    name = shown(path)
    if isinstance(wanted, Kind):
        if not _is(value, wanted):
            yield path, f"{name} is {_said(value)}; it wants {wanted.wants}{_advice(value, wanted)}"
    elif isinstance(wanted, ListOf):
        if not isinstance(value, list):
            yield path, f"{name} is {_said(value)}; it wants a list, each item after a dash"
            return
        for number, item in enumerate(value):
            yield from mismatches(item, wanted.item, (*path, number))
    elif not isinstance(value, dict):
        yield path, f"{name} is {_said(value)}; it wants a mapping"
    elif isinstance(wanted, MapOf):
        for key, item in value.items():
            yield from mismatches(item, wanted.value, (*path, str(key)))
    else:
        yield from _misshapen(value, wanted, path)


def _misshapen(value: dict[str, Any], wanted: Shape, path: Path) -> Iterator[tuple[Path, str]]:
    meant: set[str] = set()
    for key, item in value.items():
        if key in wanted.fields:
            if item is not None:
                yield from mismatches(item, wanted.fields[key], (*path, key))
        elif key not in wanted.others:
            close = difflib.get_close_matches(str(key), [*wanted.fields, *wanted.others], n=1, cutoff=0.7)
            meant |= set(close)
            hint = f"did you mean {close[0]}?" if close else f"there is no such field in {shown(path) or 'a document'}"
            yield (*path, str(key)), f"{shown((*path, str(key)))} is unknown and would be dropped or refused; {hint}"
    for key in wanted.required:
        if key not in meant and value.get(key) is None:
            yield (*path, key), f"{shown((*path, key))} is missing; it wants {_wants(wanted.fields[key])}"


def shown(path: Path) -> str:
    """A path as a person writes it: spec.containers[0].env."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _wants(wanted: Field) -> str:
    return wanted.wants if isinstance(wanted, Kind) else "a list" if isinstance(wanted, ListOf) else "a mapping"


def _is(value: Any, wanted: Kind) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if wanted is AMOUNT:
        return whole or (isinstance(value, str) and QUANTITY.fullmatch(value) is not None)
    answers = {"text": isinstance(value, str), "a whole number": whole, "true or false": isinstance(value, bool)}
    return answers.get(wanted.wants, wanted is ANY or whole or isinstance(value, str))


def _said(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "empty" if value is None else repr(value) if isinstance(value, str) else str(value).lower()


def _advice(value: Any, wanted: Kind) -> str:
    if wanted is TEXT and not isinstance(value, dict | list) and value is not None:
        return f', in quotes: "{_said(value)}"'
    return ""
