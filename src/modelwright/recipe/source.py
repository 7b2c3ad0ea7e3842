"""Read YAML into a tree in which every value knows its file and line, and merge such trees."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLWarning
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from modelwright.errors import Problem, RecipeError, first_line
from modelwright.recipe.stage_specs import STAGES

KeyPath = tuple[str, ...]
"""The keys that lead to a value: ``("sft", "learning_rate")``; list items by their index as text."""


@dataclass(frozen=True)
class Origin:
    """Where a value was set."""

    kind: Literal["default", "recipe", "base", "environment", "set"]
    """The layer of the value; a later one of base, recipe, environment, set overrides an earlier one."""
    name: str = ""
    """The file as messages name it, or the environment variable."""
    line: int | None = None
    """Line in the file."""

    @property
    def location(self) -> str:
        """The location as messages name it: ``lyrics.yaml:14``, ``environment EPOCHS`` or ``--set``."""
        if self.kind == "set":
            return "--set"
        if self.kind == "environment":
            return f"environment {self.name}"
        if self.kind == "default":
            return "default"
        return self.name if self.line is None else f"{self.name}:{self.line}"

    def __str__(self) -> str:
        return f"base {self.location}" if self.kind == "base" else self.location


DEFAULT = Origin("default")


@dataclass(frozen=True)
class RecipeProblem(Problem):
    """A problem of a recipe, with its key and origin for machines."""

    key: str = ""
    """The setting, as ``sft.learning_rate``; empty for a problem of the whole file."""
    origin: Origin = DEFAULT
    """Where it was written."""

    @property
    def sort_key(self) -> tuple[int, str, int]:
        """Order of problems: the recipe, its bases, the environment, the command line; then by line."""
        order = ("default", "recipe", "base", "environment", "set")
        return order.index(self.origin.kind), self.origin.name, self.origin.line or 0


def make_problem(origin: Origin, key: str, message: str) -> RecipeProblem:
    """A problem of one key."""
    return RecipeProblem(origin.location, message, key, origin)


@dataclass(frozen=True)
class ConfigNode:
    """A value and its origin."""

    value: str | int | float | bool | list[ConfigNode] | dict[str, ConfigNode] | None
    """A scalar, or a list or mapping of nodes."""
    origin: Origin
    """Where it was written; for a value in a mapping, the line of its key."""
    text: str = ""
    """A scalar as written; empty where nothing was written."""
    alias_used: str = ""
    """The alias that its key was written as, if any."""

    @property
    def mapping(self) -> dict[str, ConfigNode]:
        """The mapping, or an empty one if the value is something else."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def is_empty(self) -> bool:
        """Whether the key has nothing after its colon."""
        return self.value is None and not self.text

    @property
    def display(self) -> str:
        """The value as messages quote it: short, text in quotes, numbers as written."""
        if isinstance(self.value, dict | list):
            return "a mapping" if isinstance(self.value, dict) else "a list"
        if self.value is None:
            return "null" if self.text else "empty"
        if self.origin.kind == "environment" and len(self.text) > 3:
            return repr(self.text[:3] + "…")  # it may be a secret
        if not isinstance(self.value, str):
            return self.text
        first, *more = self.value.splitlines() or [""]
        return repr(first[:40] + "…" if len(first) > 40 or more else first)

    def get(self, path: Sequence[str]) -> ConfigNode | None:
        """The node at a path."""
        node: ConfigNode | None = self
        for step in path:
            if node is None:
                return None
            if isinstance(node.value, list):
                node = node.value[int(step)] if step.isdecimal() and int(step) < len(node.value) else None
            else:
                node = node.mapping.get(step)
        return node

    def with_value(self, path: Sequence[str], node: ConfigNode) -> ConfigNode:
        """A copy with one value set; missing mappings are created, list items are addressed by index."""
        if not path:
            return node
        step, rest = path[0], path[1:]
        if isinstance(self.value, list) and step.isdecimal() and int(step) < len(self.value):
            items = list(self.value)
            items[int(step)] = items[int(step)].with_value(rest, node)
            return ConfigNode(items, self.origin)
        child = self.mapping.get(step, ConfigNode({}, node.origin))
        return ConfigNode({**self.mapping, step: child.with_value(rest, node)}, self.origin)

    def without(self, path: Sequence[str]) -> ConfigNode:
        """A copy without one entry."""
        if not path or path[0] not in self.mapping:
            return self
        step, rest = path[0], path[1:]
        if rest:
            return ConfigNode({**self.mapping, step: self.mapping[step].without(rest)}, self.origin)
        return ConfigNode({key: node for key, node in self.mapping.items() if key != step}, self.origin)

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, ConfigNode]]:
        """Every entry of every mapping, parents first."""
        for key, node in self.mapping.items():
            yield (*path, key), node
            yield from node.walk((*path, key))


def make_node(value: Any, origin: Origin) -> ConfigNode:
    """The node of a plain value."""
    if isinstance(value, dict):
        return ConfigNode({key: make_node(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return ConfigNode([make_node(item, origin) for item in value], origin)
    return ConfigNode(value, origin, str(value).lower() if isinstance(value, bool) else str(value))


_ACCUMULATION = "gradient_accumulation_steps"
BATCH_KEYS = {"global_batch_size": (_ACCUMULATION,), _ACCUMULATION: ("global_batch_size",)}
SOURCE_KEYS = {"train_file": ("dataset_name", "dataset_config_name"), "dataset_name": ("train_file",)}
TRAINABLE_KEYS = {
    "lora": ("last_layers", "lm_head", "norms", "untie_lm_head"),
    **dict.fromkeys(("last_layers", "lm_head", "norms"), ("lora",)),
}
EXCLUSIVE_KEYS: Mapping[KeyPath, Mapping[str, tuple[str, ...]]] = {
    ("data",): SOURCE_KEYS,
    ("model",): {"architecture": ("model_name_or_path",), "model_name_or_path": ("architecture",)},
    **{(stage,): BATCH_KEYS for stage in STAGES},
    **{(stage, "data"): SOURCE_KEYS for stage in STAGES},
    **{(stage, "trainable"): TRAINABLE_KEYS for stage in STAGES},
}
"""Where a higher layer sets the key, these keys of a lower layer are dropped."""
EMPTY_MAPPING = "{}"
"""The value of --set that clears a mapping."""


def deep_merge(lower: ConfigNode, upper: ConfigNode, path: KeyPath = ()) -> ConfigNode:
    """Merge two layers: mappings recursively, everything else is replaced; ``{}`` of --set clears a mapping."""
    clears = bool(path) and not upper.mapping and upper.text == EMPTY_MAPPING
    if clears or not isinstance(lower.value, dict) or not isinstance(upper.value, dict):
        return upper
    merged = dict(lower.value)
    for key, excluded in EXCLUSIVE_KEYS.get(path, {}).items():
        chosen = upper.value.get(key)
        if chosen is not None and chosen.value not in (None, False):
            for excluded_key in excluded:
                merged.pop(excluded_key, None)
    for key, node in upper.value.items():
        merged[key] = deep_merge(merged[key], node, (*path, key)) if key in merged else node
    return ConfigNode(merged, lower.origin if upper.origin.kind in ("environment", "set") else upper.origin)


def drop_nulls(node: ConfigNode) -> ConfigNode:
    """Drop what was set to ``null``, so that the default applies."""
    if not isinstance(node.value, dict):
        return node
    entries = {key: drop_nulls(child) for key, child in node.value.items() if child.value is not None or child.is_empty}
    return ConfigNode(entries, node.origin)


MAX_RECIPE_BYTES = 1_000_000
MAX_NODES = 20_000
"""Values after expansion of YAML aliases: nine lines of aliases can expand to a billion values."""
MAX_DEPTH = 32
"""Nesting levels; recipes need five."""
TAG = "tag:yaml.org,2002:"


def read_file(path: Path, origin: Origin) -> tuple[ConfigNode, list[RecipeProblem]]:
    """Read a recipe file into a tree, with the problems that do not prevent it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError([make_problem(origin, "", f"cannot be read: {error.strerror}")]) from None
    if len(content) > MAX_RECIPE_BYTES:
        size = f"is {len(content) / 1e6:.1f} MB; it wants at most {MAX_RECIPE_BYTES / 1e6:.0f} MB"
        raise RecipeError([make_problem(origin, "", f"{size}, with data in a file of its own (data.train_file)")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{content[error.start]:02x} is not UTF-8; it wants the file saved as UTF-8"
        raise RecipeError([make_problem(replace(origin, line=line), "", message)]) from None
    return read_text(text, origin)


def read_text(text: str, origin: Origin) -> tuple[ConfigNode, list[RecipeProblem]]:
    """Read the text of a recipe, whose top level must be a mapping."""
    node = _compose(text, origin)
    if node is None:
        description = "the file is empty; it wants name, model, data and sft"
        raise RecipeError([make_problem(replace(origin, line=1), "", description)])
    builder = _TreeBuilder(origin)
    tree = builder.build(node, line=1)
    if not isinstance(tree.value, dict):
        description = "a list" if isinstance(tree.value, list) else f"the text {tree.text.split(chr(10))[0][:40]!r}"
        wants = "it wants a mapping, such as name: my-recipe"
        top = replace(origin, line=node.start_mark.line + 1)
        raise RecipeError([make_problem(top, "", f"the top level is {description}; {wants}")])
    return tree, builder.problems


def read_value(text: str, origin: Origin) -> tuple[ConfigNode, list[RecipeProblem]]:
    """Read one value of the command line or the environment: a scalar, ``[a, b]`` or ``{a: b}``."""
    node = _compose(text, origin)
    if node is None:
        return ConfigNode(None, origin), []
    builder = _TreeBuilder(origin)
    return builder.build(node, line=1), builder.problems


def _compose(text: str, origin: Origin) -> Node | None:
    """Parse YAML 1.2 into nodes without constructing objects, so nothing can be executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", YAMLWarning)
            node: Node | None = YAML(typ="safe", pure=True).compose(text)
            return node
    except ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        message = f"character 0x{ord(str(text[int(error.position)])):02x} cannot stand in YAML; take it out"
    except MarkedYAMLError as error:
        line, message = _explain_syntax_error(error, text)
    except YAMLError as error:
        line, message = 1, f"is not YAML: {first_line(error)}"
    except RecursionError:
        line, message = 1, f"the file is nested too deeply; it wants at most {MAX_DEPTH} levels"
    raise RecipeError([make_problem(_with_line(origin, line), "", message)])


def _explain_syntax_error(error: MarkedYAMLError, text: str) -> tuple[int, str]:
    """The line of a syntax error, and what to do there."""
    error_text = str(error.problem or error.context or "not YAML")
    mark = error.problem_mark or error.context_mark
    opened_line = (error.context_mark or mark).line + 1
    line, column = mark.line + 1, mark.column
    line_text = (text.splitlines() or [""])[min(mark.line, text.count("\n"), max(0, len(text.splitlines()) - 1))]
    character = line_text[column : column + 1]
    if "unexpected end of stream" in error_text and "quoted" in str(error.context):
        return opened_line, "unclosed quote"
    if bracket := re.match(r"expected ',' or '([\]}])'", error_text):
        opening = {"]": "[", "}": "{"}[bracket[1]]
        return opened_line, f"unclosed {opening}"
    if "mapping values are not allowed" in error_text:
        if ": " in line_text[:column]:
            return line, "quote text that contains a colon"
        above = text.splitlines()[mark.line - 1]
        if ":" not in above:
            return line - 1, "a colon is missing here; it wants key: value"
        return line, "the indentation does not fit the line above, which already has a value"
    if "could not find expected ':'" in error_text:
        return opened_line, "a colon is missing here; it wants key: value"
    if "'\\t'" in error_text or character == "\t":
        return line, "a tab indents this line; it wants spaces"
    if "cannot start any token" in error_text:
        return line, f"text that begins with {character} wants quotes around it"
    if "another document" in error_text:
        return line, "a second document begins here (---); a recipe is one document"
    if alias := re.search(r"undefined alias '(.*)'", error_text):
        return line, f"*{alias[1]} is used, but no &{alias[1]} comes before it; text that begins with * wants quotes"
    if "<block end>" in error_text and ("scalar" in error_text or character in "]}'\""):
        rest = line_text[column:].strip()[:20]
        if line_text[column - 1 : column] == "'":
            return line, "the quoted text ends in the middle; a ' between single quotes is written ''"
        return line, f"{rest!r} is left over; text with quotes or brackets in it wants quotes around it"
    if "<block end>" in error_text:
        return line, "the indentation does not fit the lines above"
    if "unknown escape character" in error_text:
        return line, f"\\{character} means nothing between double quotes; single quotes take a backslash as it is"
    return line, f"is not YAML: {error_text}"


@dataclass
class _TreeBuilder:
    """Converts YAML nodes to a tree and collects problems."""

    origin: Origin
    problems: list[RecipeProblem] = field(default_factory=list)
    num_nodes: int = 0
    top_line: int = 1
    open_mappings: list[MappingNode] = field(default_factory=list)

    def build(self, node: Node, line: int, path: KeyPath = ()) -> ConfigNode:
        """Convert one node; ``line`` is that of its key or list item."""
        self.num_nodes += 1
        if len(path) > MAX_DEPTH:
            self._abort(f"{path[0]} is nested too deeply; it wants at most {MAX_DEPTH} levels")
        if self.num_nodes > MAX_NODES:
            self._abort(f"{path[0]} holds over {MAX_NODES:,} values once its aliases are expanded; write it shorter")
        origin = _with_line(self.origin, line)
        if isinstance(node, MappingNode) and str(node.tag) == TAG + "map":
            return ConfigNode(self._mapping(node, path), origin)
        if isinstance(node, SequenceNode) and str(node.tag) == TAG + "seq":
            items = [self.build(item, _line_number(item), (*path, str(i))) for i, item in enumerate(node.value)]
            return ConfigNode(items, origin)
        if isinstance(node, ScalarNode):
            return self._scalar(node, origin, path)
        self._refuse_tag(node, origin, path)
        return ConfigNode({} if isinstance(node, MappingNode) else [], origin)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, ConfigNode]:
        entries: dict[str, ConfigNode] = {}
        merged: dict[str, ConfigNode] = {}
        self.open_mappings.append(node)
        for key_node, value_node in node.value:
            line = _line_number(key_node)
            self.top_line = self.top_line if path else line
            if not isinstance(key_node, ScalarNode):
                shape = "a list" if isinstance(key_node, SequenceNode) else "a mapping"
                message = f"{'.'.join(path) or 'the top level'} has {shape} for a key; it wants a word"
                self._problem(line, ".".join(path), f"{message} (braces in text want quotes)")
                continue
            if str(key_node.tag) == TAG + "merge":
                merged |= {**self._merge_key(value_node, line, path), **merged}
                continue
            name = self._join_surrogates(str(key_node.value), line, path)
            key = ".".join((*path, name))
            if name in entries:
                first = entries[name].origin.line
                message = f"{key} is given twice (first on line {first}); keep one"
                self._problem(line, key, message)
            entries[name] = self.build(value_node, line, (*path, name))
        self.open_mappings.pop()
        return {**{name: value for name, value in merged.items() if name not in entries}, **entries}

    def _merge_key(self, node: Node, line: int, path: KeyPath) -> dict[str, ConfigNode]:
        """The entries of ``<<: *defaults``; of several mappings the first wins."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        merged: dict[str, ConfigNode] = {}
        for source in sources:
            if not isinstance(source, MappingNode):
                self._problem(line, ".".join(path), "<< wants a mapping, such as *defaults")
                continue
            if any(source is each for each in self.open_mappings):
                self._problem(line, ".".join(path), "<< names the mapping that it stands in; take it out")
                continue
            merged |= {**self._mapping(source, path), **merged}
        return merged

    def _scalar(self, node: ScalarNode, origin: Origin, path: KeyPath) -> ConfigNode:
        text, tag = self._join_surrogates(str(node.value), origin.line or 1, path), str(node.tag).removeprefix(TAG)
        if tag == "null":
            return ConfigNode(None, origin, text)
        if tag not in SCALAR_PARSERS:
            self._refuse_tag(node, origin, path)
        try:
            return ConfigNode(SCALAR_PARSERS.get(tag, str)(text), origin, text or "''")
        except (ValueError, KeyError):
            return ConfigNode(text, origin, text or "''")

    def _join_surrogates(self, text: str, line: int, path: KeyPath) -> str:
        """Join surrogate pairs, as in JSON escapes; an unpaired one is a problem, and so is a NUL character."""
        if "\0" in text:
            self._problem(line, ".".join(path), f"{'.'.join(path) or 'a key'} contains a NUL character; take it out")
        if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            key = ".".join(path)
            self._problem(line, key, f"{key or 'the top level'} contains an unpaired surrogate")
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _refuse_tag(self, node: Node, origin: Origin, path: KeyPath) -> None:
        tag = str(node.tag).replace(TAG, "!!")
        key = ".".join(path)
        message = f"{key or 'the top level'} has the tag {tag}; a recipe holds plain values only"
        self.problems.append(make_problem(origin, key, message))

    def _problem(self, line: int, key: str, message: str) -> None:
        self.problems.append(make_problem(_with_line(self.origin, line), key, message))

    def _abort(self, message: str) -> None:
        self._problem(self.top_line, "", message)
        raise RecipeError(self.problems)


def _with_line(origin: Origin, line: int) -> Origin:
    return origin if origin.kind in ("environment", "set") else replace(origin, line=line)


def _line_number(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _parse_int(text: str) -> int:
    """``0x1F``, ``0o17`` and ``0b11`` by their prefix; ``010`` is ten, as in YAML 1.2."""
    prefixed = re.match(r"[-+]?0[xob]", text.lower())
    return int(text, 0) if prefixed else int(text)


def _parse_float(text: str) -> float:
    """Any YAML float, such as ``2e-4``, ``1_000.5``, ``.inf`` and ``.nan``."""
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _parse_bool(text: str) -> bool:
    """True and false; yes, no, on and off only occur under an explicit ``%YAML 1.1``."""
    return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[text.lower()]


SCALAR_PARSERS: dict[str, Callable[[str], str | int | float | bool]] = {
    **dict.fromkeys(("str", "timestamp", "value"), str),
    **{"bool": _parse_bool, "int": _parse_int, "float": _parse_float},
}
"""Parsers by YAML tag; any other tag is refused."""
