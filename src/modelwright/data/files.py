"""Read JSONL, JSON, CSV, Parquet and TXT files row by row; what cannot be read is a fault with its place and remedy."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from modelwright.data.json_window import Window
from modelwright.errors import DataError, Problem, UsageError, first_line, hide

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
PIECE = 1 << 20
"""Characters after which a text file is divided at its next paragraph, so that none has to fit the memory."""
LONGEST_FIELD = 1 << 30
NOT_UTF8 = "these bytes are not UTF-8; save the file as UTF-8"
HALF_A_CHARACTER = "the text holds half a character (a lone surrogate), which no tokenizer takes"


@dataclass(frozen=True)
class Row:
    """One row as it was found."""

    where: str
    """File and line, or data set and row."""
    values: dict[str, Any]
    """Its columns."""


@dataclass(frozen=True)
class Fault:
    """A row that cannot be used."""

    where: str
    """File and line, or data set and row."""
    reason: str
    """What was found and what would do."""
    found: str = ""
    """The beginning of what stands there."""
    whole_file: bool = False
    """Whether all of the file is lost with it."""

    def __post_init__(self) -> None:
        """Keep what is quoted fit to be written anywhere: no secret, and no half of a letter."""
        for name in ("where", "reason", "found"):
            object.__setattr__(self, name, hide(getattr(self, name)))


@dataclass(frozen=True)
class Stretch:
    """A part of a file: bytes of a JSONL file, row groups of a Parquet file, or all of any other."""

    start: int = 0
    """First byte, or first row group."""
    stop: int | None = None
    """Byte or row group where it ends; a line that begins before it is read whole."""
    rows_before: int = 0
    """Lines or rows before the start, for naming places."""


WHOLE = Stretch()


def utf8_size(text: str) -> int | None:
    """Bytes of a text in UTF-8; None where it holds half a character."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        return None


def columns_seen(row: Row) -> str:
    """The columns of a row, for letters."""
    return f"the columns are {', '.join(map(str, row.values))}"


def text_of(row: Row, column: str) -> str | Fault:
    """The text in a column of a row, or what is wrong with it."""
    if column not in row.values:
        letter = f"there is no column {column!r}; {columns_seen(row)}; data.text_column says which holds the text"
        return Fault(row.where, letter)
    text = row.values[column]
    if not isinstance(text, str):
        return Fault(row.where, f"{column!r} is {str(text)[:40]!r}; it wants text", str(text)[:80])
    return text if utf8_size(text) is not None else Fault(row.where, HALF_A_CHARACTER)


def strictly(items: Iterable[Row | Fault], most_shown: int = 20) -> Iterator[Row]:
    """Rows alone; faults are raised at once, all of them, when the end is reached."""
    faults: list[Fault] = []
    for item in items:
        if isinstance(item, Fault):
            faults.append(item)
        elif not faults:
            yield item
    if faults:
        problems = [Problem(fault.where, fault.reason) for fault in faults[:most_shown]]
        more = len(faults) - most_shown
        raise DataError([*problems, *([Problem(f"{more} more rows", "have problems like these")] if more > 0 else [])])


def read_file(path: Path, stretch: Stretch = WHOLE) -> Iterator[Row | Fault]:
    """The rows of a file, or of a stretch of it, by its suffix."""
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet,
               ".txt": _read_txt}  # fmt: skip
    if path.suffix not in readers:
        raise UsageError(f"data: {path} ends in {path.suffix or 'nothing'}; it wants one of {', '.join(SUFFIXES)}")
    return readers[path.suffix](path, stretch)


def _read_jsonl(path: Path, stretch: Stretch) -> Iterator[Row | Fault]:
    with path.open("rb") as file:
        if stretch.start:
            file.seek(stretch.start - 1)
            file.readline()  # the line that began before belongs to the stretch before
        number = stretch.rows_before
        while stretch.stop is None or file.tell() < stretch.stop:
            line = file.readline()
            if not line:
                return
            number += 1
            item = _json_line(line, f"{path.name}:{number}", first=number == 1)
            if item is None:
                continue
            yield item
            if isinstance(item, Fault) and item.whole_file:
                return


def _json_line(line: bytes, where: str, first: bool) -> Row | Fault | None:
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").strip("\r\n")
    except UnicodeDecodeError:
        return Fault(where, NOT_UTF8, repr(line[:80]))
    if not text.strip():
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        if first and text.count(",") + text.count(";") and not text.lstrip().startswith(("{", "[")):
            return Fault(where, "this is no JSON; it looks like CSV: name the file .csv", text[:80], True)
        return Fault(where, f"this is no JSON ({_why(error)})", text[:80])
    except RecursionError:
        return Fault(where, "this JSON is nested too deep to be read", text[:80])
    if not isinstance(values, dict):
        return Fault(where, f"this is a JSON {type(values).__name__}; it wants an object with columns", text[:80])
    return Row(where, values)


def _why(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "a number in it is too long"


def _read_json(path: Path, stretch: Stretch) -> Iterator[Row | Fault]:
    """A list of objects, one after the other; or all of an object that holds one such list."""
    with path.open(encoding="utf-8-sig") as file:
        window, first = Window(file), ""
        try:
            first = window.peek()
            yield from _json_rows(path, window)
        except UnicodeDecodeError:
            yield Fault(f"{path.name}:{_broken_line(path)}", NOT_UTF8, whole_file=True)
        except (ValueError, RecursionError) as error:
            message, line = getattr(error, "msg", None), getattr(error, "lineno", None)
            lines = message == "Extra data" and first == "{"
            hint = "; it looks like one object a line: name the file .jsonl" if lines else ""
            where = f"{path.name}:{window.lines - 1 + line}" if line else path.name
            reason = f"this is no JSON ({message or 'nested too deep, or a number too long'}){hint}"
            yield Fault(where, reason, whole_file=True)


def _json_rows(path: Path, window: Window) -> Iterator[Row | Fault]:
    no_rows = Fault(path.name, "it wants a JSON list of objects, each a row", whole_file=True)
    if window.peek() != "[":
        values = window.rest()
        lists = [value for value in values.values() if isinstance(value, list)] if isinstance(values, dict) else []
        items: Iterable[Any] = lists[0] if len(lists) == 1 else [None]
    else:
        items = window.items()
    for number, value in enumerate(items, 1):
        if not isinstance(value, dict):
            yield no_rows
            return
        yield Row(f"{path.name} row {number}", value)


def _broken_line(path: Path) -> int:
    """The first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _read_csv(path: Path, stretch: Stretch) -> Iterator[Row | Fault]:
    csv.field_size_limit(LONGEST_FIELD)  # the library's own limit is 128 kB, which one long document passes
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        yield from _csv_rows(path, file)


def _csv_rows(path: Path, file: TextIO) -> Iterator[Row | Fault]:
    reader = csv.reader(file)
    try:
        head = next(reader, None)
    except csv.Error as error:
        yield Fault(f"{path.name}:1", f"this is no CSV ({error})", whole_file=True)
        return
    if head is None:
        return
    if len(head) == 1 and (mark := next((mark for mark in ";\t|" if mark in head[0]), None)):
        word = {";": "semicolons", "\t": "tabs", "|": "bars"}[mark]
        letter = f"the head is one column, {head[0]!r}, that looks separated by {word}; save the file with commas"
        yield Fault(f"{path.name}:1", letter, whole_file=True)
        return
    while True:
        try:
            values = next(reader, None)
        except csv.Error as error:
            yield Fault(f"{path.name}:{reader.line_num}", f"this is no CSV ({error})")
            continue
        if values is None:
            return
        if not values:
            continue
        where = f"{path.name}:{reader.line_num}"
        if any("\udc80" <= letter <= "\udcff" for value in values if not value.isascii() for letter in value):
            yield Fault(where, NOT_UTF8, ",".join(values)[:80].encode(errors="replace").decode())
        elif len(values) != len(head):
            yield Fault(where, f"this line has not the {len(head)} columns of the head", ",".join(values)[:80])
        else:
            yield Row(where, dict(zip(head, values, strict=True)))


def _read_parquet(path: Path, stretch: Stretch) -> Iterator[Row | Fault]:
    import pyarrow.parquet

    number = stretch.rows_before
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=False) as file:
            groups = range(stretch.start, stretch.stop or file.metadata.num_row_groups)
            for batch in file.iter_batches(batch_size=1024, row_groups=list(groups)):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name} row {number}", values)
    except Exception as error:  # the library raises many kinds, OverflowError for a date of year 0 among them
        reason = first_line(error)
        yield Fault(path.name, f"this is no whole Parquet file ({reason})", whole_file=True)


def _read_txt(path: Path, stretch: Stretch) -> Iterator[Row | Fault]:
    """One document a file; a long one is divided after the paragraph that passes a million characters."""
    lines: list[str] = []
    size, first, number = 0, 1, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                yield Fault(f"{path.name}:{number}", NOT_UTF8, repr(line[:80]))
                continue
            lines.append(text)
            size += len(text)
            if (size >= PIECE and not text.strip()) or size >= 2 * PIECE:
                yield Row(f"{path.name}:{first}", {"text": "".join(lines)})
                lines, size, first = [], 0, number + 1
    if "".join(lines).strip():
        yield Row(f"{path.name}:{first}", {"text": "".join(lines)})
