"""A configuration of another trainer on its way into a recipe: what was put where, and what could not come along."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modelwright.recipe.aliases import aliases_of, names_in, other_names
from modelwright.recipe.schema import Recipe
from modelwright.recipe.tree import Located, Origin

Kind = Literal["lost", "nearest", "unneeded"]
"""lost: there is no such thing here; nearest: something close to it is written; unneeded: it needs no setting here."""

PLAIN = re.compile(r"[A-Za-z_./~][\w./~@+-]*( [\w./~@+-]+)*|\d+(\.\d+)?%")
WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "~"})
WIDEST = 110


@dataclass(frozen=True)
class Left:
    """One setting that is not in the recipe as it was."""

    key: str
    """Its name in the other tool."""
    shown: str
    """Its value, short."""
    line: int | None
    """Its line; none where the file is silent and the tool has a default."""
    kind: Kind
    """How much is lost."""
    advice: str
    """Why, and what is nearest."""

    def __str__(self) -> str:
        what = f"{self.key}: {self.shown}" if self.shown else self.key
        return f"{what}: {self.advice}" if self.advice else what


@dataclass
class Move:
    """A configuration whose settings are taken one by one, so that none is forgotten."""

    tool: str
    """What it was written for, as people call it."""
    source: dict[str, Located]
    """What was not taken yet."""
    stage: str
    """The training stage that it becomes."""
    tree: Located
    """The recipe so far."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What stands beside a setting of the recipe, by its dotted key."""
    left: list[Left] = field(default_factory=list)
    """What did not come along."""
    carried: list[str] = field(default_factory=list)
    """The names that did."""

    def take(self, name: str) -> Located | None:
        """A setting that asks for something; what is null or false asks for nothing, and is kept in mind as that."""
        node = self.source.pop(name, None)
        if node is None:
            return None
        if node.value is None or node.value is False or node.value in ("", [], {}):
            self.leave(name, node, "unneeded", "")
            return None
        return node

    def word(self, name: str) -> str:
        """A setting taken as a lower-case word; empty where it asks for nothing."""
        node = self.take(name)
        return "" if node is None else str(node.value).lower()

    def put(self, key: str, value: Any, came_from: str = "", remark: str = "") -> None:
        """Write a setting of the recipe: a value as it was read, or a plain one of ours."""
        node = value if isinstance(value, Located) else located(value, self.tree.origin)
        self.tree = self.tree.put(key.split("."), node)
        if remark:
            self.remarks[key] = remark
        if came_from:
            self.carried.append(came_from)

    def default(self, key: str, value: Any) -> None:
        """Write what the other tool does where its file is silent, and ours would do something else."""
        said = any(name in self.source for name in (key.rpartition(".")[2], *other_names(key)))
        if self.at(key) is None and not said:
            self.put(key, value, remark=f"{self.tool}'s default")

    def at(self, key: str) -> Located | None:
        """What the recipe says of a key so far."""
        return self.tree.at(key.split("."))

    def leave(self, name: str, node: Located | None, kind: Kind, advice: str) -> None:
        """Keep in mind that a setting does not come along."""
        line = node.origin.line if node is not None else None
        self.left.append(Left(name, short(node), line, kind, advice))

    def home(self, name: str) -> str | None:
        """The key of the recipe that has this name, or knows it as another tool's."""
        for section in ("", "model", "data", self.stage):
            if name in names_in(section) or name in aliases_of(section):
                return f"{section}.{name}".lstrip(".")
        return None


def located(value: Any, origin: Origin) -> Located:
    """A plain value of ours as the reader would have brought it."""
    if isinstance(value, dict):
        return Located({key: located(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Located([located(item, origin) for item in value], origin)
    return Located(value, origin, str(value).lower() if isinstance(value, bool) else str(value))


def short(node: Located | None) -> str:
    """A value in a few characters."""
    if node is None:
        return ""
    text = "" if node.value is None else flow(node)
    return text if len(text) <= 60 else f"{text[:59]}…"


def written(tree: Located, remarks: Mapping[str, str], head: list[str]) -> str:
    """The recipe as a person would write it: what was said and nothing else, in the order of the schema."""
    lines = [f"# {line}".rstrip() for line in head]
    found = {name: tree.entries[name] for name in Recipe.model_fields if name in tree.entries}
    sections = {name: node for name, node in found.items() if node.entries}
    lines += [_line(name, name, node, remarks) for name, node in found.items() if name not in sections]
    for name, node in sections.items():
        lines += ["", f"{name}:", *_section(name, node, remarks)]
    return "\n".join(lines) + "\n"


def _section(section: str, node: Located, remarks: Mapping[str, str]) -> list[str]:
    order = {name: place for place, name in enumerate(names_in(section))}
    entries = sorted(node.entries.items(), key=lambda entry: order.get(entry[0], len(order)))
    return [f"  {_line(f'{section}.{name}', name, child, remarks)}" for name, child in entries]


def _line(key: str, name: str, node: Located, remarks: Mapping[str, str]) -> str:
    remark = remarks.get(key, node.called)
    text = f"{name}: {flow(node)}"
    return f"{text:<36}  # {remark}" if remark else text


def flow(node: Located) -> str:
    """A value on one line."""
    if isinstance(node.value, dict):
        return "{" + ", ".join(f"{_text(key)}: {flow(child)}" for key, child in node.value.items()) + "}"
    if isinstance(node.value, list):
        return "[" + ", ".join(map(flow, node.value)) + "]"
    if isinstance(node.value, str):
        return _text(node.value)
    return "null" if node.value is None else node.text


def _text(value: str) -> str:
    plain = PLAIN.fullmatch(value) and value.lower() not in WORDS
    return value if plain else json.dumps(value, ensure_ascii=False)
