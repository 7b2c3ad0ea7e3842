"""Refuse a recipe that holds a secret: it is copied into the run folder, the report, the manifests and the trackers."""

from __future__ import annotations

from collections.abc import Iterator

from modelwright.errors import holds_secret, names_secret
from modelwright.recipe.tree import Located, RecipeProblem, problem

REMEDY = "a recipe is copied into the run, its report and its manifests; keep it in the environment"
IN_PODS = "or, for pods, in a Secret (cluster.token_secret)"


def refuse_secrets(tree: Located) -> list[RecipeProblem]:
    """A letter for every value that looks like a token, a key or a password; the value itself is not in it."""
    found = []
    for path, node in _texts(tree):
        key, text = ".".join(path), str(node.value)
        if holds_secret(text):
            found.append(problem(node.origin, key, f"{key} holds what looks like a secret; {REMEDY}, {IN_PODS}"))
        elif path[:2] == ("cluster", "variables") and names_secret(path[-1]) and text:
            found.append(problem(node.origin, key, f"{key} is a secret by its name; {REMEDY}, {IN_PODS}"))
        elif holds_secret(key):
            hidden = f"a key of {'.'.join(path[:-1]) or 'the recipe'} looks like a secret"
            found.append(problem(node.origin, "", f"{hidden}; {REMEDY}, {IN_PODS}"))
    return found


def _texts(node: Located, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Located]]:
    """Every text of a tree with the way to it, those in lists too."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _texts(child, (*path, key))
    elif isinstance(node.value, list):
        for number, child in enumerate(node.value):
            yield from _texts(child, (*path, str(number)))
    elif isinstance(node.value, str):
        yield path, node
