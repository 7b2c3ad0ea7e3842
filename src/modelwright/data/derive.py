"""Make columns out of columns: a template filled from each row, or questions and answers made of songs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from modelwright.data.files import Row
from modelwright.data.songs import pairs_of
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import Data

NAMED = re.compile(r"\{([^{}]+)\}")


def derive(rows: Iterable[Row], data: Data) -> Iterator[Row]:
    """The rows with the columns that the recipe derives; a column that is there already stays as it is."""
    for row in rows:
        for made in pairs_of(row) if data.make_pairs == "songs" else (row,):
            values = dict(made.values)
            for name, template in data.derive.items():
                if name not in values:
                    values[name] = fill(template, values, made.where)
            yield Row(made.where, values)


def fill(template: str, values: Mapping[str, Any], where: str) -> str:
    """A template with each {column} replaced by the row's value."""
    missing = [name for name in NAMED.findall(template) if name not in values]
    if missing:
        seen = ", ".join(map(str, values))
        letter = f"data.derive asks for the column {missing[0]!r}, which is not there; the columns are {seen}"
        raise DataError([Problem(where, letter)])
    return NAMED.sub(lambda found: str(values[found[1]]), template)
