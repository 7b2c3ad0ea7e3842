"""Data sets in other people's forms: conversations and pairs as `datasets` folders, rows as Parquet."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from modelwright.data.conversations import Conversations
from modelwright.data.derive import fill
from modelwright.data.files import Row, columns_seen, read_file, strictly
from modelwright.data.preferences import Preferences
from modelwright.errors import DataError, Problem, UsageError
from modelwright.runs.folder import sync

FULL_QUESTION = "full-question"


def save_set(data: Conversations | Preferences, folder: Path) -> dict[str, int]:
    """Write train and held_out as a folder that `load_from_disk` reads; it is whole or absent. Returns the rows."""
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    sides = {"train": data.train, "held_out": data.held_out}
    rows = {name: [_row(item) for item in items] for name, items in sides.items() if items}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    DatasetDict({name: Dataset.from_list(items) for name, items in rows.items()}).save_to_disk(str(partial))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)
    return {name: len(items) for name, items in rows.items()}


def _row(item: Any) -> dict[str, Any]:
    if hasattr(item, "chosen"):
        return {part: [dict(turn) for turn in getattr(item, part)] for part in ("prompt", "chosen", "rejected")}
    return {"messages": [dict(turn) for turn in item.messages]}


def convert(source: Path, target: Path, full_question: str | None = None) -> int:
    """Write the rows of a file as Parquet; a template such as "For {topic}, {question}" makes a column full-question.

    With a template, the columns are full-question and those that the template does not use. Returns the rows.
    """
    import pyarrow
    import pyarrow.parquet

    if target.suffix != ".parquet":
        raise UsageError(f"{target} ends in {target.suffix or 'nothing'}; it wants .parquet")
    rows = list(strictly(read_file(source)))
    values = [_asked(row, full_question) for row in rows] if full_question else [row.values for row in rows]
    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), partial, compression="zstd")
    sync(partial)
    partial.replace(target)
    return len(values)


def _asked(row: Row, template: str) -> dict[str, Any]:
    used = _columns_of(template)
    missing = [name for name in used if name not in row.values]
    if missing:
        raise DataError([Problem(row.where, f"there is no column {missing[0]!r}; {columns_seen(row)}")])
    rest = {name: value for name, value in row.values.items() if name not in used}
    return {FULL_QUESTION: fill(template, row.values, row.where), **rest}


def _columns_of(template: str) -> Sequence[str]:
    try:
        return [name for _, name, _, _ in Formatter().parse(template) if name]
    except ValueError as error:
        raise UsageError(f"--full-question is {template!r}; it wants columns in braces ({error})") from None
