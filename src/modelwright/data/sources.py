"""Read rows from wherever they are: an embedded set, a file, a folder or the hub, through one door."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import DataError, Problem, UsageError
from modelwright.recipe.schema import Data

EMBEDDED = {"field-guide": Path(__file__).parent / "embedded" / "field_guide.jsonl"}
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class Row:
    """One row as it was found."""

    where: str
    """File and line, or data set and row."""
    values: dict[str, Any]
    """Its columns."""


def read_training(data: Data, beside: Path) -> list[Row]:
    """All rows to train on, before anything is held out."""
    rows = list(_read(data.dataset_name or data.train_file or "", data.dataset_config_name, beside))
    return rows[: data.max_rows] if data.max_rows else rows


def read_validation(data: Data, beside: Path) -> list[Row]:
    """The rows of validation_file, where there is one."""
    return list(_read(data.validation_file, None, beside)) if data.validation_file else []


def local_path(name: str, beside: Path) -> Path | None:
    """The file or folder that a name means, from where we stand or beside the recipe."""
    for candidate in (Path(name), beside / name):
        if candidate.exists():
            return candidate
    return None


def is_hub_name(name: str, beside: Path) -> bool:
    """Whether a name can only mean a data set on the hub: owner/name, and nothing of that name here."""
    if name in EMBEDDED or local_path(name, beside) is not None:
        return False
    return name.count("/") == 1 and Path(name).suffix not in SUFFIXES and not name.startswith((".", "/", "~"))


def _read(name: str, config: str | None, beside: Path) -> Iterator[Row]:
    path = EMBEDDED.get(name) or local_path(name, beside)
    if path is None:
        if not is_hub_name(name, beside):
            raise UsageError(_no_such_source(name, beside))
        yield from _read_hub(name, config)
    elif path.is_dir():
        yield from _read_folder(path)
    else:
        yield from _read_file(path)


def _no_such_source(name: str, beside: Path) -> str:
    folder = (beside / name).parent
    around = [str(p.name) for p in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(Path(name).name, [*around, *EMBEDDED], n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"data: there is no file, folder or embedded set {name!r}{hint}"


def _read_folder(path: Path) -> Iterator[Row]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        from datasets import DatasetDict, load_from_disk

        stored = load_from_disk(str(path))
        if isinstance(stored, DatasetDict):
            if "train" not in stored:
                raise UsageError(f"data: {path} has no split 'train'; its splits are {', '.join(stored)}")
            stored = stored["train"]
        yield from _rows_of(stored, path.name)
        return
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    train = [p for p in files if p.stem.startswith("train")]
    if not files:
        raise UsageError(f"data: the folder {path} holds no {', '.join(SUFFIXES)} file")
    for file in train or files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix not in SUFFIXES:
        raise UsageError(f"data: {path} ends in {path.suffix or 'nothing'}; it wants one of {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError([Problem(f"{path.name}:{line}", "these bytes are not UTF-8; save the file as UTF-8")]) from None
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    yield from readers[path.suffix](path.name, text)


def _read_jsonl(name: str, text: str) -> Iterator[Row]:
    problems = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(Problem(where, f"this is no JSON ({error.msg} at column {error.colno})"))
            continue
        if not isinstance(values, dict):
            problems.append(Problem(where, f"this is a JSON {type(values).__name__}; it wants an object with columns"))
            continue
        if not problems:
            yield Row(where, values)
    if problems:
        raise DataError(problems)


def _read_json(name: str, text: str) -> Iterator[Row]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError([Problem(f"{name}:{error.lineno}", f"this is no JSON ({error.msg})")]) from None
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(lists) == 1 else values
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise DataError([Problem(name, "it wants a JSON list of objects, each a row")])
    for number, value in enumerate(values, 1):
        yield Row(f"{name} row {number}", value)


def _read_csv(name: str, text: str) -> Iterator[Row]:
    csv.field_size_limit(max(len(text), 131_072))  # the library's own limit, which one long document passes
    reader = csv.DictReader(io.StringIO(text, newline=""))  # splitlines would also cut at U+2028 and the like
    for values in reader:
        if None in values or None in values.values():
            count = len(reader.fieldnames or [])
            raise DataError(
                [Problem(f"{name}:{reader.line_num}", f"this line has not the {count} columns of the head")]
            )
        yield Row(f"{name}:{reader.line_num}", dict(values))


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError([Problem(path.name, f"this is no whole Parquet file ({str(error).splitlines()[0]})")]) from None
    for number, values in enumerate(table.to_pylist(), 1):
        yield Row(f"{path.name} row {number}", values)


def _read_hub(name: str, config: str | None) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        stored = load_dataset(name, config, split="train")
    except Exception as error:  # the hub client raises many kinds; each becomes one letter
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"data: {name!r} is no local file or folder, and the hub gave no data set of that name ({reason}); "
            "check the name, the network, and HF_TOKEN for a gated set"
        ) from None
    yield from _rows_of(stored, name)


def _rows_of(stored: Any, name: str) -> Iterator[Row]:
    for number, values in enumerate(stored, 1):
        yield Row(f"{name} row {number}", dict(values))
