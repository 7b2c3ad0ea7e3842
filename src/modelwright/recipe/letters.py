"""Check a tree against the schema and write one letter for each thing wrong, all of them at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from modelwright.recipe.aliases import canonicalise, our_key
from modelwright.recipe.schema import Recipe
from modelwright.recipe.settings import Setting, find, sample
from modelwright.recipe.tree import Located, Path, RecipeProblem, problem, without_nulls
from modelwright.recipe.unknown import answer, nearest

MOST_PASSES = 12
"""Problems hide behind problems; after this many layers of them the rest may wait for the next check."""


def validate(tree: Located) -> tuple[Recipe | None, list[RecipeProblem]]:
    """Turn a tree into a recipe, or into everything that is wrong with it; null stands for the default.

    A check between two settings runs only when each is right by itself. So each problem found is mended with a
    value that would do, and the check is repeated: what is then found had been hidden.
    """
    nulls = {path: node for path, node in tree.walk() if node.value is None and not node.is_blank}
    tree, problems = _fill_blanks(without_nulls(tree))
    keys = {letter.key for letter in problems}
    for _ in range(MOST_PASSES):
        try:
            recipe = Recipe.model_validate(plain(tree))
        except ValidationError as error:
            mended = tree
            answered: set[Path] = set()
            # unknown keys first: what they were meant to be is then not missing
            errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
            for details in errors:
                mended, letters = _answer(details, tree, mended, answered)
                problems += [letter for letter in letters if not _follows(letter, keys)]
            keys |= {letter.key for letter in problems}
            problems = [_at_null(letter, nulls) for letter in problems]
            if mended is tree:
                break
            tree = canonicalise(mended)[0]
        else:
            return (recipe if not problems else None), problems
    return None, problems


def plain(node: Located, path: Path = ()) -> Any:
    """The bare values, as pydantic takes them; true and false are no numbers here, though Python thinks so."""
    if isinstance(node.value, dict):
        return {key: plain(child, (*path, key)) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(item, (*path, str(number))) for number, item in enumerate(node.value)]
    if isinstance(node.value, bool):
        setting = find(path)
        return node.text if setting is not None and setting.is_number else node.value
    return node.value


def _fill_blanks(tree: Located) -> tuple[Located, list[RecipeProblem]]:
    """Answer keys with nothing after the colon."""
    problems = []
    for path, node in list(tree.walk()):
        setting = find(path)
        if not node.is_blank or setting is None:
            continue
        wants = "settings, or {} for every default" if setting.section else setting.wants
        wants = setting.meaning if wants == "text" else wants
        or_null = ", or null for none" if setting.optional and not setting.section else ""
        key = ".".join(path)
        problems.append(problem(node.origin, key, f"{key} is empty; it wants {wants}{or_null}"))
        tree = tree.put(path, _located(sample(setting), node))
    return tree, problems


def _answer(
    details: ErrorDetails, tree: Located, mended: Located, answered: set[Path]
) -> tuple[Located, list[RecipeProblem]]:
    """Write the letter for one error of pydantic, and mend the tree so that the next check sees past it."""
    path = tuple(str(step) for step in details["loc"])
    kind = details["type"]
    if kind == "missing":
        return _answer_missing(path, tree, mended)
    if any(path[:length] in answered for length in range(len(path) + 1)):
        return mended, []
    if kind == "extra_forbidden":
        return _answer_unknown(path, tree, mended)
    if path[-1:] == ("[key]",):
        answered.add(path[:-1])
        return _answer_key(path[:-1], tree, mended)
    while path and tree.at(path) is None:
        path = path[:-1]  # the branch of a union, such as list[str], is no step in the file
    node, setting = tree.at(path), find(path)
    assert node is not None and setting is not None
    if path in answered:
        return mended, []
    answered.add(path)
    letter = problem(node.origin, ".".join(path), _message(details, path, node, setting))
    return (mended.put(path, _located(sample(setting), node)) if path else mended), [letter]


def _follows(letter: RecipeProblem, keys: set[str]) -> bool:
    """Whether a letter about a section only speaks of settings that were mended, so that it may not be true."""
    below = (key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == letter.key)
    return any(re.search(rf"\b{re.escape(name)}\b", letter.message) for name in below)


def _answer_missing(path: Path, tree: Located, mended: Located) -> tuple[Located, list[RecipeProblem]]:
    setting, parent = find(path), tree.at(path[:-1])
    assert setting is not None and parent is not None
    if mended.at(path) is not None:  # it was there under an unknown name
        return mended, []
    if setting.section:  # what it needs is told by the next check, one letter for each
        return mended.put(path, Located({}, parent.origin)), []
    message = f"{setting.key} is missing; it wants {setting.meaning}"
    return mended.put(path, _located(sample(setting), parent)), [problem(parent.origin, setting.key, message)]


def _at_null(letter: RecipeProblem, nulls: Mapping[Path, Located]) -> RecipeProblem:
    """A required setting that was set to null is missed on that line."""
    steps = tuple(letter.key.split("."))
    node = next((nulls[steps[:length]] for length in range(1, len(steps) + 1) if steps[:length] in nulls), None)
    return problem(node.origin, letter.key, letter.message) if node and "is missing" in letter.message else letter


def _answer_key(path: Path, tree: Located, mended: Located) -> tuple[Located, list[RecipeProblem]]:
    """A key of a mapping that may have only some keys, such as a gate for a stage that does not exist."""
    node, holder = tree.at(path), find(path[:-1])
    assert node is not None and holder is not None
    allowed = [str(each) for each in get_args(get_args(holder.annotation)[0])]
    close = nearest(path[-1], allowed, cutoff=0.5)
    key, hint = ".".join(path), f"did you mean {close}?"
    if close is None and node.entries and not any(child.entries for child in node.entries.values()):
        hint = f"it wants the stage first: {holder.key}.{allowed[0]}.{path[-1]}"
    elif close is None:
        hint = f"it wants {'one of ' if len(allowed) > 1 else ''}{', '.join(allowed)}"
    return mended.drop(path), [problem(node.origin, key, f"{key} is unknown; {hint}")]


def _answer_unknown(path: Path, tree: Located, mended: Located) -> tuple[Located, list[RecipeProblem]]:
    """An unknown key; its value is looked at again where it was probably meant to be."""
    node = tree.at(path)
    assert node is not None
    told = answer(path, is_mapping=isinstance(node.value, dict))
    mended = mended.drop(path)
    letter = problem(node.origin, ".".join(path), told.message)
    setting = find(tuple(our_key(".".join(told.target)).split("."))) if told.target else None
    if told.target is None or setting is None or mended.at(told.target) is not None:
        return mended, [letter]
    parent = mended.at(told.target[:-1])
    if isinstance(node.value, dict | list) and not setting.section:
        node = _located(sample(setting), node)
    if parent is None or isinstance(parent.value, dict):
        mended = mended.put(told.target, node)
    return mended, [letter]


def _message(details: ErrorDetails, path: Path, node: Located, setting: Setting) -> str:
    """What was found and what would do."""
    name = ".".join((*path[:-1], node.called or path[-1])) if path else "the recipe"
    if _is_item(path):
        name = f"item {int(path[-1]) + 1} of {'.'.join(path[:-1])}"
    text, kind = details["msg"], details["type"]
    context: Mapping[str, Any] = details.get("ctx") or {}
    if kind == "string_too_long":
        length = len(str(node.value))
        return f"{name} has {length} characters; it wants at most {context['max_length']}"
    if text.startswith("it wants"):
        return f"{name} is {node.shown}; {text}"
    if setting.section and kind not in ("model_type", "model_attributes_type"):
        return f"{name} {text}"
    return f"{name} is {node.shown}; it wants {setting.wants}{_advice(path, node, setting)}"


def _advice(path: Path, node: Located, setting: Setting) -> str:
    """The rest of the letter, where what was meant can be guessed."""
    value = node.value
    if setting.is_text and value is not None and not isinstance(value, str | list | dict):
        return f"; put it in quotes: '{node.text}'"
    if isinstance(value, str):
        if setting.choices and path[-1] in setting.choices and path[:-1] == ("data", "columns"):
            return f"; turn it round: {value}: {path[-1]}"
        if setting.choices and (close := nearest(value, setting.choices, cutoff=0.6)):
            return f"; did you mean {close!r}?"
        if setting.key == "name" and (slug := re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("-._")):
            return f"; did you mean {slug!r}?"
        if setting.section and re.match(r"\w+:\S", value):
            return "; put a space after the colon"
        if setting.section and (first := next(iter(sample(setting)), None)):
            return f", such as {first}: {value}" if "\n" not in value else ""
        if get_origin(setting.annotation) is list:
            return ", each after a dash"
    if setting.section and isinstance(value, list):
        return ", without dashes"
    return ""


def _is_item(path: Path) -> bool:
    holder = find(path[:-1]) if path else None
    return holder is not None and get_origin(holder.annotation) is list


def _located(value: Any, at: Located) -> Located:
    """Give a bare value a place."""
    if isinstance(value, dict):
        return Located({key: _located(child, at) for key, child in value.items()}, at.origin)
    return Located([] if isinstance(value, list) else value, at.origin, str(value))
