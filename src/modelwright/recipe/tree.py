"""A tree of settings in which every value knows who wrote it and on which line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.errors import Problem
from modelwright.recipe.schema import TRAINING_STAGES

Path = tuple[str, ...]
"""The way to a value: ``("sft", "learning_rate")``; list items go by their number as text."""


@dataclass(frozen=True)
class Origin:
    """Who set a value."""

    kind: Literal["default", "recipe", "base", "environment", "set"]
    """The layer the value comes from, lowest first as in the order of precedence."""
    name: str = ""
    """The file as shown to people, or the environment variable."""
    line: int | None = None
    """Line in the file."""

    @property
    def where(self) -> str:
        """The place as a letter names it: ``lyrics.yaml:14``, ``environment EPOCHS`` or ``--set``."""
        if self.kind == "set":
            return "--set"
        if self.kind == "environment":
            return f"environment {self.name}"
        if self.kind == "default":
            return "default"
        return self.name if self.line is None else f"{self.name}:{self.line}"

    def __str__(self) -> str:
        return f"base {self.where}" if self.kind == "base" else self.where


DEFAULT = Origin("default")


@dataclass(frozen=True)
class RecipeProblem(Problem):
    """One thing wrong in a recipe, with its key and its place apart for machines."""

    key: str = ""
    """The setting, as ``sft.learning_rate``; empty when the file as a whole is meant."""
    origin: Origin = DEFAULT
    """Who wrote it."""

    @property
    def rank(self) -> tuple[int, str, int]:
        """Sorts problems: the recipe before its bases, the environment and the command line; then by line."""
        order = ("default", "recipe", "base", "environment", "set")
        return order.index(self.origin.kind), self.origin.name, self.origin.line or 0


def problem(origin: Origin, key: str, message: str) -> RecipeProblem:
    """Write one letter about a key."""
    return RecipeProblem(origin.where, message, key, origin)


@dataclass(frozen=True)
class Located:
    """A value and its origin."""

    value: str | int | float | bool | list[Located] | dict[str, Located] | None
    """A scalar, a list or a mapping of located values."""
    origin: Origin
    """Who wrote it; for a value in a mapping, the line of its key."""
    text: str = ""
    """A scalar exactly as written; empty where nothing was written."""
    called: str = ""
    """The other tool's name that its key was written under, if it was."""

    @property
    def entries(self) -> dict[str, Located]:
        """The mapping, or an empty one where the value is something else."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def is_blank(self) -> bool:
        """Whether a key stands there with nothing after its colon."""
        return self.value is None and not self.text

    @property
    def shown(self) -> str:
        """The value as a letter quotes it: short, text in quotes, numbers as they were written."""
        if isinstance(self.value, dict | list):
            return "a mapping" if isinstance(self.value, dict) else "a list"
        if self.value is None:
            return "null" if self.text else "empty"
        if not isinstance(self.value, str):
            return self.text
        first, *more = self.value.splitlines() or [""]
        return repr(first[:40] + "…" if len(first) > 40 or more else first)

    def at(self, path: Sequence[str]) -> Located | None:
        """The value that a path leads to."""
        node: Located | None = self
        for step in path:
            if node is None:
                return None
            if isinstance(node.value, list):
                node = node.value[int(step)] if step.isdecimal() and int(step) < len(node.value) else None
            else:
                node = node.entries.get(step)
        return node

    def put(self, path: Sequence[str], node: Located) -> Located:
        """A copy with one value set; mappings on the way are made, lists are entered by number."""
        if not path:
            return node
        step, rest = path[0], path[1:]
        if isinstance(self.value, list) and step.isdecimal() and int(step) < len(self.value):
            items = list(self.value)
            items[int(step)] = items[int(step)].put(rest, node)
            return Located(items, self.origin)
        child = self.entries.get(step, Located({}, node.origin))
        return Located({**self.entries, step: child.put(rest, node)}, self.origin)

    def drop(self, path: Sequence[str]) -> Located:
        """A copy without one entry of a mapping."""
        if not path or path[0] not in self.entries:
            return self
        step, rest = path[0], path[1:]
        if rest:
            return Located({**self.entries, step: self.entries[step].drop(rest)}, self.origin)
        return Located({key: node for key, node in self.entries.items() if key != step}, self.origin)

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, Located]]:
        """Every entry of every mapping, parents first."""
        for key, node in self.entries.items():
            yield (*path, key), node
            yield from node.walk((*path, key))


ONE_BATCH = {
    "global_batch_size": ("gradient_accumulation_steps",),
    "gradient_accumulation_steps": ("global_batch_size",),
}
ONE_SOURCE = {"train_file": ("dataset_name", "dataset_config_name"), "dataset_name": ("train_file",)}
ONE_WAY = {
    "lora": ("last_layers", "head", "norms", "untie_head"),
    **dict.fromkeys(("last_layers", "head", "norms"), ("lora",)),
}
GIVES_WAY: Mapping[Path, Mapping[str, tuple[str, ...]]] = {
    ("data",): ONE_SOURCE,
    ("model",): {"architecture": ("model_name_or_path",), "model_name_or_path": ("architecture",)},
    **{(stage,): ONE_BATCH for stage in TRAINING_STAGES},
    **{(stage, "data"): ONE_SOURCE for stage in TRAINING_STAGES},
    **{(stage, "trainable"): ONE_WAY for stage in TRAINING_STAGES},
}
"""Where a higher layer chooses the key, these of a lower layer give way: the later choice wins."""


NOTHING = "{}"
"""What a person types to clear a mapping."""


def merge(lower: Located, upper: Located, path: Path = ()) -> Located:
    """Lay one tree over another: mappings are merged deeply, everything else is replaced.

    An empty mapping of --set clears: merged it would say nothing, and nobody types that.
    """
    clears = bool(path) and not upper.entries and upper.text == NOTHING
    if clears or not isinstance(lower.value, dict) or not isinstance(upper.value, dict):
        return upper
    merged = dict(lower.value)
    for key, losers in GIVES_WAY.get(path, {}).items():
        chosen = upper.value.get(key)
        if chosen is not None and chosen.value not in (None, False):
            for loser in losers:
                merged.pop(loser, None)
    for key, node in upper.value.items():
        merged[key] = merge(merged[key], node, (*path, key)) if key in merged else node
    return Located(merged, lower.origin if upper.origin.kind in ("environment", "set") else upper.origin)


def without_nulls(node: Located) -> Located:
    """Take out what was set to ``null``, so that the default speaks again."""
    if not isinstance(node.value, dict):
        return node
    kept = {key: without_nulls(child) for key, child in node.value.items() if child.value is not None or child.is_blank}
    return Located(kept, node.origin)
