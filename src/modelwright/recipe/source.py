"""Read YAML, from a recipe file or from ``--set``, into a tree that knows its lines."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLWarning
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from modelwright.errors import RecipeError, first_line
from modelwright.recipe.tree import Located, Origin, RecipeProblem, problem

LARGEST_FILE = 1_000_000
"""Bytes; a recipe is written by a person, and a megabyte is no longer a recipe."""
MOST_VALUES = 20_000
"""Values after YAML aliases are expanded: nine lines of aliases can stand for a billion values."""
DEEPEST = 32
"""Levels of nesting; recipes need five."""

TAG = "tag:yaml.org,2002:"


def read_file(path: Path, origin: Origin) -> tuple[Located, list[RecipeProblem]]:
    """Read a recipe file; what can be told without giving up comes back beside the tree."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError([problem(origin, "", f"cannot be read: {error.strerror}")]) from None
    if len(content) > LARGEST_FILE:
        size = f"is {len(content) / 1e6:.1f} MB; it wants at most {LARGEST_FILE / 1e6:.0f} MB"
        raise RecipeError([problem(origin, "", f"{size}, with data in a file of its own (data.train_file)")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{content[error.start]:02x} is not UTF-8; it wants the file saved as UTF-8"
        raise RecipeError([problem(replace(origin, line=line), "", found)]) from None
    return read_text(text, origin)


def read_text(text: str, origin: Origin) -> tuple[Located, list[RecipeProblem]]:
    """Read the text of a recipe, whose top level is a mapping."""
    node = _compose(text, origin)
    if node is None:
        found = "the file is empty; it wants name, model, data and sft"
        raise RecipeError([problem(replace(origin, line=1), "", found)])
    builder = _Builder(origin)
    tree = builder.build(node, line=1)
    if not isinstance(tree.value, dict):
        found = "a list" if isinstance(tree.value, list) else f"the text {tree.text.split(chr(10))[0][:40]!r}"
        wants = "it wants a mapping, such as name: my-recipe"
        top = replace(origin, line=node.start_mark.line + 1)
        raise RecipeError([problem(top, "", f"the top level is {found}; {wants}")])
    return tree, builder.problems


def read_value(text: str, origin: Origin) -> tuple[Located, list[RecipeProblem]]:
    """Read one value as the command line or the environment gives it: a scalar, ``[a, b]`` or ``{a: b}``."""
    node = _compose(text, origin)
    if node is None:
        return Located(None, origin), []
    builder = _Builder(origin)
    return builder.build(node, line=1), builder.problems


def _compose(text: str, origin: Origin) -> Node | None:
    """Parse YAML 1.2 into nodes; nothing is constructed, so nothing can be executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", YAMLWarning)
            node: Node | None = YAML(typ="safe", pure=True).compose(text)
            return node
    except ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        message = f"character 0x{ord(str(text[int(error.position)])):02x} cannot stand in YAML; take it out"
    except MarkedYAMLError as error:
        line, message = _reason(error, text)
    except YAMLError as error:
        line, message = 1, f"is not YAML: {first_line(error)}"
    except RecursionError:
        line, message = 1, f"the file is nested too deeply; it wants at most {DEEPEST} levels"
    raise RecipeError([problem(_at(origin, line), "", message)])


def _reason(error: MarkedYAMLError, text: str) -> tuple[int, str]:
    """Tell a syntax error in words a person can act on: the line to look at, and what to do there."""
    found = str(error.problem or error.context or "not YAML")
    mark = error.problem_mark or error.context_mark
    opened = (error.context_mark or mark).line + 1
    line, column = mark.line + 1, mark.column
    written = (text.splitlines() or [""])[min(mark.line, text.count("\n"), max(0, len(text.splitlines()) - 1))]
    character = written[column : column + 1]
    if "unexpected end of stream" in found and "quoted" in str(error.context):
        return opened, "the quote that opens here is never closed"
    if bracket := re.match(r"expected ',' or '([\]}])'", found):
        opening = {"]": "[", "}": "{"}[bracket[1]]
        return opened, f"the {opening} that opens here is never closed"
    if "mapping values are not allowed" in found:
        if ": " in written[:column]:
            return line, "text with a colon in it wants quotes around it"
        above = text.splitlines()[mark.line - 1]
        if ":" not in above:
            return line - 1, "a colon is missing here; it wants key: value"
        return line, "the indentation does not fit the line above, which already has a value"
    if "could not find expected ':'" in found:
        return opened, "a colon is missing here; it wants key: value"
    if "'\\t'" in found or character == "\t":
        return line, "a tab indents this line; it wants spaces"
    if "cannot start any token" in found:
        return line, f"text that begins with {character} wants quotes around it"
    if "another document" in found:
        return line, "a second document begins here (---); a recipe is one document"
    if alias := re.search(r"undefined alias '(.*)'", found):
        return line, f"*{alias[1]} is used, but no &{alias[1]} comes before it; text that begins with * wants quotes"
    if "<block end>" in found and ("scalar" in found or character in "]}'\""):
        left = written[column:].strip()[:20]
        if written[column - 1 : column] == "'":
            return line, "the quoted text ends in the middle; a ' between single quotes is written ''"
        return line, f"{left!r} is left over; text with quotes or brackets in it wants quotes around it"
    if "<block end>" in found:
        return line, "the indentation does not fit the lines above"
    if "unknown escape character" in found:
        return line, f"\\{character} means nothing between double quotes; single quotes take a backslash as it is"
    return line, f"is not YAML: {found}"


@dataclass
class _Builder:
    """Turns nodes into located values, collecting what is wrong on the way."""

    origin: Origin
    problems: list[RecipeProblem] = field(default_factory=list)
    values: int = 0
    top_line: int = 1

    def build(self, node: Node, line: int, path: tuple[str, ...] = ()) -> Located:
        """Build one node; ``line`` is that of its key or list item."""
        self.values += 1
        if len(path) > DEEPEST:
            self._give_up(f"{path[0]} is nested too deeply; it wants at most {DEEPEST} levels")
        if self.values > MOST_VALUES:
            self._give_up(
                f"{path[0]} holds over {MOST_VALUES:,} values once its aliases are expanded; write it shorter"
            )
        origin = self._at(line)
        if isinstance(node, MappingNode) and str(node.tag) == TAG + "map":
            return Located(self._mapping(node, path), origin)
        if isinstance(node, SequenceNode) and str(node.tag) == TAG + "seq":
            items = [self.build(item, _line(item), (*path, str(i))) for i, item in enumerate(node.value)]
            return Located(items, origin)
        if isinstance(node, ScalarNode):
            return self._scalar(node, origin, path)
        self._refuse_tag(node, origin, path)
        return Located({} if isinstance(node, MappingNode) else [], origin)

    def _mapping(self, node: MappingNode, path: tuple[str, ...]) -> dict[str, Located]:
        entries: dict[str, Located] = {}
        merged: dict[str, Located] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            self.top_line = self.top_line if path else line
            if not isinstance(key_node, ScalarNode):
                shape = "a list" if isinstance(key_node, SequenceNode) else "a mapping"
                message = f"{'.'.join(path) or 'the top level'} has {shape} for a key; it wants a word"
                self.problems.append(problem(self._at(line), ".".join(path), f"{message} (braces in text want quotes)"))
                continue
            if str(key_node.tag) == TAG + "merge":
                merged |= {**self._merge_key(value_node, line, path), **merged}
                continue
            name = self._whole(str(key_node.value), line, path)
            key = ".".join((*path, name))
            if name in entries:
                first = entries[name].origin.line
                message = f"{key} is given twice (first on line {first}); keep one"
                self.problems.append(problem(self._at(line), key, message))
            entries[name] = self.build(value_node, line, (*path, name))
        return {**{name: value for name, value in merged.items() if name not in entries}, **entries}

    def _merge_key(self, node: Node, line: int, path: tuple[str, ...]) -> dict[str, Located]:
        """The entries that ``<<: *defaults`` brings in; of several mappings the first wins."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        merged: dict[str, Located] = {}
        for source in sources:
            if not isinstance(source, MappingNode):
                self.problems.append(problem(self._at(line), ".".join(path), "<< wants a mapping, such as *defaults"))
                continue
            merged |= {**self._mapping(source, path), **merged}
        return merged

    def _scalar(self, node: ScalarNode, origin: Origin, path: tuple[str, ...]) -> Located:
        text, tag = self._whole(str(node.value), origin.line or 1, path), str(node.tag).removeprefix(TAG)
        if tag == "null":
            return Located(None, origin, text)
        if tag not in SCALARS:
            self._refuse_tag(node, origin, path)
        try:
            return Located(SCALARS.get(tag, str)(text), origin, text or "''")
        except (ValueError, KeyError):
            return Located(text, origin, text or "''")

    def _whole(self, text: str, line: int, path: tuple[str, ...]) -> str:
        """Text with the two halves of a letter joined, as JSON spells some letters; a lone half is told."""
        if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            key = ".".join(path)
            message = f"{key or 'the top level'} holds half a character (a lone surrogate); write it whole"
            self.problems.append(problem(self._at(line), key, message))
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _refuse_tag(self, node: Node, origin: Origin, path: tuple[str, ...]) -> None:
        tag = str(node.tag).replace(TAG, "!!")
        key = ".".join(path)
        message = f"{key or 'the top level'} has the tag {tag}; a recipe holds plain values only"
        self.problems.append(problem(origin, key, message))

    def _at(self, line: int) -> Origin:
        return _at(self.origin, line)

    def _give_up(self, message: str) -> None:
        raise RecipeError([*self.problems, problem(self._at(self.top_line), "", message)])


def _at(origin: Origin, line: int) -> Origin:
    return origin if origin.kind in ("environment", "set") else replace(origin, line=line)


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _integer(text: str) -> int:
    """``0x1F``, ``0o17`` and ``0b11`` by their prefix; ``010`` is ten, as YAML 1.2 has it."""
    prefixed = re.match(r"[-+]?0[xob]", text.lower())
    return int(text, 0) if prefixed else int(text)


def _number(text: str) -> float:
    """Any YAML float, such as ``2e-4``, ``1_000.5``, ``.inf`` and ``.nan``."""
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _truth(text: str) -> bool:
    """True and false; yes, no, on and off reach here only under an explicit ``%YAML 1.1``."""
    return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[text.lower()]


SCALARS: dict[str, Callable[[str], str | int | float | bool]] = {
    "str": str,
    "timestamp": str,
    "value": str,
    "bool": _truth,
    "int": _integer,
    "float": _number,
}
"""How the scalars of YAML become values; any other tag is refused."""
