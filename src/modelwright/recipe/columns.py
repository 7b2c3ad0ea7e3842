"""Letters about a column name the line of the recipe that asks for it, besides the line of the data that lacks it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from modelwright.errors import Problem
from modelwright.recipe.load import LoadedRecipe

_COLUMN = re.compile(r"there is no column '(?P<name>[^']*)'")


def name_lines(problems: Sequence[Problem], loaded: LoadedRecipe, stage: str) -> list[Problem]:
    """The same letters, with the recipe's line where one of its columns is missing in the data."""
    return [_named(problem, loaded, stage) for problem in problems]


def _named(problem: Problem, loaded: LoadedRecipe, stage: str) -> Problem:
    match = _COLUMN.search(problem.message)
    if match is None:
        return problem
    for section in (f"{stage}.data", "data"):
        for key in (f"{section}.columns.{match['name']}", f"{section}.text_column", f"{section}.split_by"):
            origin = loaded.origins.get(key)
            if origin is not None and origin.kind != "default":
                return Problem(problem.where, f"{problem.message} ({key} is asked for in {origin.where})")
    return problem
