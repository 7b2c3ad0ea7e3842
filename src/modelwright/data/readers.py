"""Read JSONL, JSON, CSV, TSV, Parquet, Arrow and TXT files row by row, and quarantine rows that are invalid."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from modelwright.errors import DataError, Problem, UsageError, first_line, redact_secrets
from modelwright.runs.folder import write_text

ROW_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
"""Compressions of a row file, as in rows.jsonl.gz."""
SampleBy = Literal["document", "paragraph", "line"]
TXT_DOCUMENT_CHARS = 1 << 20
"""Characters after which a text file is split at the next blank line, so that no file must fit in memory."""
CSV_FIELD_LIMIT = 1 << 30
MAX_PROBLEMS_SHOWN = 20
"""Kinds of problems listed one by one; the rest are counted."""
EXAMPLES_SHOWN = 3
"""Rows of one kind that are shown."""
QUARANTINE_FILE = "quarantine.jsonl"
NOT_UTF8 = "these bytes are not UTF-8; save the file as UTF-8"
LONE_SURROGATE = "the text holds half a character (a lone surrogate), which no tokenizer takes"


@dataclass(frozen=True)
class Row:
    """One row as read."""

    where: str
    """File and line, or data set and row."""
    values: dict[str, Any]
    """Its columns."""


@dataclass(frozen=True)
class InvalidRow:
    """A row that cannot be used."""

    where: str
    """File and line, or data set and row."""
    reason: str
    """What is wrong and what would work."""
    excerpt: str = ""
    """The first characters of the row."""
    file_unreadable: bool = False
    """Whether the rest of the file cannot be read either."""

    def __post_init__(self) -> None:
        """Remove secrets and lone surrogates, so that the text can be written anywhere."""
        for name in ("where", "reason", "excerpt"):
            object.__setattr__(self, name, redact_secrets(getattr(self, name)))


@dataclass(frozen=True)
class FileSlice:
    """A byte range of a JSONL file, a row-group range of a Parquet file, or all of any other file."""

    start: int = 0
    """First byte, or first row group."""
    stop: int | None = None
    """End (exclusive); a line that begins before it is read to its end."""
    row_offset: int = 0
    """Lines or rows before the start, for line numbers in messages."""


WHOLE_FILE = FileSlice()


def utf8_size(text: str) -> int | None:
    """Bytes of a text in UTF-8; None if it has a lone surrogate."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        return None


def describe_columns(values: Mapping[str, Any]) -> str:
    """The columns of a row, for error messages."""
    return f"the columns are {', '.join(map(str, values))}"


def get_text(row: Row, column: str) -> str | InvalidRow:
    """The text in a column of a row, or what is wrong with it."""
    if column not in row.values:
        message = f"there is no column {column!r}; {describe_columns(row.values)}"
        return InvalidRow(row.where, f"{message}; data.text_column says which holds the text")
    text = row.values[column]
    if not isinstance(text, str):
        return InvalidRow(row.where, f"{column!r} is {str(text)[:40]!r}; it wants text", str(text)[:80])
    return text if utf8_size(text) is not None else InvalidRow(row.where, LONE_SURROGATE)


def raise_on_invalid_rows(items: Iterable[Row | InvalidRow]) -> Iterator[Row]:
    """Yield the rows; after the last one, raise all invalid rows as one error."""
    invalid_rows: list[InvalidRow] = []
    for item in items:
        if isinstance(item, InvalidRow):
            invalid_rows.append(item)
        elif not invalid_rows:
            yield item
    if invalid_rows:
        raise DataError(group_problems([Problem(row.where, row.reason) for row in invalid_rows]))


def reason_category(reason: str) -> str:
    """A reason without the parts that differ from row to row."""
    head = reason.partition(";")[0].partition(" (")[0]
    return re.sub(r"\d+", "N", re.sub(r" is ['\"\[{\d-].*", " is", head))


def group_problems(problems: Sequence[Problem], noun: str = "rows") -> list[Problem]:
    """The first problem of each kind with the number of others like it; of many kinds, the first ones."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(reason_category(problem.message), []).append(problem)
    shown = [Problem(first.where, f"{first.message}{_like_it([each.where for each in others], noun)}")
             for first, *others in groups.values()]  # fmt: skip
    more = sum(map(len, list(groups.values())[MAX_PROBLEMS_SHOWN:]))
    tail = [Problem(f"{more} more {noun}", "have other problems")] if more else []
    return [*shown[:MAX_PROBLEMS_SHOWN], *tail]


def _like_it(others: Sequence[str], noun: str) -> str:
    examples = " and ".join(others[: EXAMPLES_SHOWN - 1])
    return f" ({len(others) + 1:,} {noun} like it, such as {examples})" if others else ""


def row_suffix(path: Path) -> str:
    """The suffix that decides the format of a row file, such as .jsonl of rows.JSONL.gz; empty for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in ROW_FILE_SUFFIXES else ""


def read_file(
    path: Path, file_slice: FileSlice = WHOLE_FILE, sample_by: SampleBy = "document"
) -> Iterator[Row | InvalidRow]:
    """The rows of a file or of a slice of it; the suffix decides the format, `sample_by` what a document of TXT is."""
    readers: dict[str, Callable[[Path, FileSlice], Iterator[Row | InvalidRow]]]
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
               ".parquet": _read_parquet, ".arrow": _read_arrow, ".txt": partial(_read_txt, sample_by)}  # fmt: skip
    suffix = row_suffix(path)
    if not suffix:
        wanted = f"{', '.join(ROW_FILE_SUFFIXES)}, each also with {' or '.join(COMPRESSED_SUFFIXES)}"
        raise UsageError(f"data: {path} ends in {path.suffix or 'nothing'}; it wants one of {wanted}")
    if path.exists() and not path.is_file():
        raise UsageError(f"data: {path} is not a regular file")
    rows = _check_names(readers[suffix](path, file_slice))
    return rows if path.suffix.lower() not in COMPRESSED_SUFFIXES else _check_compression(rows, path)


def _check_names(rows: Iterator[Row | InvalidRow]) -> Iterator[Row | InvalidRow]:
    for row in rows:
        if isinstance(row, Row) and any(utf8_size(name) is None for name in row.values):
            yield invalid_row(row, "the name of a column holds half a character (a lone surrogate); rename the column")
        else:
            yield row


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading; one that ends in .gz or .zst is decompressed."""
    compression = COMPRESSED_SUFFIXES.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression))


def _check_compression(rows: Iterator[Row | InvalidRow], path: Path) -> Iterator[Row | InvalidRow]:
    try:
        yield from rows
    except OSError as error:  # of Arrow: truncated or damaged
        reason = f"this file cannot be decompressed ({first_line(error)[:120]}); it is damaged or ends early"
        yield InvalidRow(path.name, reason, file_unreadable=True)


def _read_jsonl(path: Path, file_slice: FileSlice) -> Iterator[Row | InvalidRow]:
    with open_binary(path) as file:
        if file_slice.start:
            file.seek(file_slice.start - 1)
            file.readline()  # a line that began before the slice belongs to the previous slice
        number = file_slice.row_offset
        while file_slice.stop is None or file.tell() < file_slice.stop:  # a compressed file is never sliced
            line = file.readline()
            if not line:
                return
            number += 1
            item = _parse_json_line(line, f"{path.name}:{number}", first=number == 1)
            if item is None:
                continue
            yield item
            if isinstance(item, InvalidRow) and item.file_unreadable:
                return


def _parse_json_line(line: bytes, where: str, first: bool) -> Row | InvalidRow | None:
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").strip("\r\n")
    except UnicodeDecodeError:
        return InvalidRow(where, NOT_UTF8, repr(line[:80]))
    if not text.strip():
        return None
    try:
        values = DECODER.decode(text)
    except ValueError as error:
        if first and text.count(",") + text.count(";") and not text.lstrip().startswith(("{", "[")):
            return InvalidRow(where, "this is no JSON; it looks like CSV: name the file .csv", text[:80], True)
        return InvalidRow(where, f"this is no JSON ({_json_error_reason(error)})", text[:80])
    except RecursionError:
        return InvalidRow(where, "this JSON is nested too deep to be read", text[:80])
    if not isinstance(values, dict):
        return InvalidRow(where, f"this is a JSON {type(values).__name__}; it wants an object with columns", text[:80])
    return Row(where, values)


class DuplicateKey(ValueError):
    """An object of JSON has a key twice, of which json.loads would take the last."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values, for object_pairs_hook of json.loads."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise DuplicateKey(f"the key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} is there twice")
    return values


def _json_error_reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return str(error) if isinstance(error, DuplicateKey) else "a number in it is too long"


def _read_json(path: Path, file_slice: FileSlice) -> Iterator[Row | InvalidRow]:
    """Stream a list of objects; an object that holds one such list is loaded whole."""
    with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig") as file:
        stream, first = JsonStream(file), ""
        try:
            first = stream.peek()
            yield from _json_rows(path, stream)
        except UnicodeDecodeError:
            yield InvalidRow(f"{path.name}:{_first_non_utf8_line(path)}", NOT_UTF8, file_unreadable=True)
        except (ValueError, RecursionError) as error:
            message, line = getattr(error, "msg", None), getattr(error, "lineno", None)
            if isinstance(error, DuplicateKey):
                message, line = str(error), 1 + stream.text.count("\n", 0, stream.position)
            is_jsonl = message == "Extra data" and first == "{"
            hint = "; it looks like one object a line: name the file .jsonl" if is_jsonl else ""
            where = f"{path.name}:{stream.line_number - 1 + line}" if line else path.name
            reason = f"this is no JSON ({message or 'nested too deep, or a number too long'}){hint}"
            yield InvalidRow(where, reason, file_unreadable=True)


def _json_rows(path: Path, stream: JsonStream) -> Iterator[Row | InvalidRow]:
    reason = "it wants a JSON list of objects, each a row, or an object with such a list under data"
    no_rows = InvalidRow(path.name, reason, file_unreadable=True)
    if stream.peek() != "[":
        values = stream.load_rest()
        values = values if isinstance(values, dict) else {}
        lists = [value for value in values.values() if isinstance(value, list)]
        lists = [values["data"]] if isinstance(values.get("data"), list) else lists
        items: Iterable[Any] = lists[0] if len(lists) == 1 else [None]
    else:
        items = stream.iter_items()
    for number, value in enumerate(items, 1):
        if not isinstance(value, dict):
            yield no_rows
            return
        yield Row(f"{path.name} row {number}", value)


def _first_non_utf8_line(path: Path) -> int:
    """Number of the first line that is not UTF-8."""
    with open_binary(path) as file:
        return next((number for number, line in enumerate(file, 1) if line.decode(errors="ignore").encode() != line), 1)


def _read_csv(path: Path, file_slice: FileSlice) -> Iterator[Row | InvalidRow]:
    csv.field_size_limit(CSV_FIELD_LIMIT)  # the default of 128 kB is too small for a long document
    with io.TextIOWrapper(open_binary(path), "utf-8-sig", errors="surrogateescape", newline="") as file:
        yield from _csv_rows(path, file, "\t" if row_suffix(path) == ".tsv" else ",")


def _csv_rows(path: Path, file: TextIO, delimiter: str) -> Iterator[Row | InvalidRow]:
    reader = csv.reader(file, delimiter=delimiter, strict=True)  # else a lost quote joins rows
    try:
        header = next((values for values in reader if values), None)  # blank lines may stand before it
    except csv.Error as error:
        yield InvalidRow(f"{path.name}:1", f"this is no CSV ({error})", file_unreadable=True)
        return
    if header is None:
        return
    if problem := _header_problem(header, delimiter):
        yield InvalidRow(f"{path.name}:{reader.line_num}", problem, file_unreadable=True)
        return
    while True:
        try:
            values = next(reader, None)
        except csv.Error as error:
            yield InvalidRow(f"{path.name}:{reader.line_num}", f"this is no CSV ({error}); double a quote in quotes")
            continue
        if values is None:
            return
        if not values:
            continue
        where = f"{path.name}:{reader.line_num}"
        if any("\udc80" <= char <= "\udcff" for value in values if not value.isascii() for char in value):
            yield InvalidRow(where, NOT_UTF8, ",".join(values)[:80].encode(errors="replace").decode())
        elif len(values) != len(header):
            yield InvalidRow(where, f"this line has not the {len(header)} columns of the header", ",".join(values)[:80])
        elif delimiter == "\t" and any("\t" in value and "\n" in value for value in values):
            yield InvalidRow(where, "a quote opens here and swallows the lines after it; double it or leave it out")
        else:
            yield Row(where, dict(zip(header, values, strict=True)))


def _header_problem(header: list[str], delimiter: str) -> str:
    """What is wrong with the header of a CSV or TSV file, if anything."""
    if any(utf8_size(name) is None for name in header):
        return NOT_UTF8
    names = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
    separator = next((each for each in names if each != delimiter and each in header[0]), None)
    if len(header) == 1 and separator:
        message = f"the header is one column, {header[0]!r}, that looks separated by {names[separator]}"
        return f"{message}; save the file with {names[delimiter]}"
    repeated = next((name for name in header if header.count(name) > 1), None)
    return "" if repeated is None else f"the header names the column {repeated!r} twice; rename one of them"


def _read_parquet(path: Path, file_slice: FileSlice) -> Iterator[Row | InvalidRow]:
    import pyarrow.parquet

    number = file_slice.row_offset
    try:
        compressed = path.suffix.lower() in COMPRESSED_SUFFIXES
        source = pyarrow.BufferReader(open_binary(path).read()) if compressed else path
        with pyarrow.parquet.ParquetFile(source, memory_map=False) as file:
            groups = range(file_slice.start, file_slice.stop or file.metadata.num_row_groups)
            for batch in file.iter_batches(batch_size=1024, row_groups=list(groups)):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name} row {number}", values)
    except Exception as error:  # many types, such as OverflowError for a date in year 0
        yield _unreadable(path, "Parquet", error)


def _unreadable(path: Path, name: str, error: Exception) -> InvalidRow:
    """A file that a library cannot read; pyarrow's ArrowMemoryError is a MemoryError too."""
    if isinstance(error, MemoryError):
        reason = f"memory ran out while this {name} file was read ({first_line(error)}); write it in smaller row groups"
        return InvalidRow(path.name, reason, file_unreadable=True)
    return InvalidRow(path.name, f"this is no whole {name} file ({first_line(error)})", file_unreadable=True)


def _read_arrow(path: Path, file_slice: FileSlice) -> Iterator[Row | InvalidRow]:
    """An Arrow IPC file, or a stream such as `datasets` writes."""
    import pyarrow

    number = 0
    try:
        with open_binary(path) as file:
            is_file = file.read(6) == b"ARROW1"
        with open_binary(path) as file:
            # only the file format needs random access, so only it is read whole
            reader = pyarrow.ipc.open_file(file.read()) if is_file else pyarrow.ipc.open_stream(file)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name} row {number}", values)
    except Exception as error:  # as for Parquet
        yield _unreadable(path, "Arrow", error)


def _read_txt(sample_by: SampleBy, path: Path, file_slice: FileSlice) -> Iterator[Row | InvalidRow]:
    """The documents of a text: lines, paragraphs, or all of it, split at a blank line after a million characters."""
    lines: list[str] = []
    size, first, number = 0, 1, 0
    limit = {"document": TXT_DOCUMENT_CHARS, "paragraph": 0, "line": 0}[sample_by]
    with open_binary(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                yield InvalidRow(f"{path.name}:{number}", NOT_UTF8, repr(line[:80]))
                continue
            lines.append(text)
            size += len(text)
            is_end = sample_by == "line" or not text.strip()
            if (size >= limit and is_end) or size >= 2 * TXT_DOCUMENT_CHARS:
                if "".join(lines).strip():
                    yield Row(f"{path.name}:{first}", {"text": _document_text(lines, sample_by)})
                lines, size, first = [], 0, number + 1
    if "".join(lines).strip():
        yield Row(f"{path.name}:{first}", {"text": _document_text(lines, sample_by)})


def _document_text(lines: list[str], sample_by: SampleBy) -> str:
    return "".join(lines) if sample_by == "document" else "".join(lines).strip("\r\n")


WHITESPACE, DECODER = re.compile(r"[ \t\n\r]*"), json.JSONDecoder(object_pairs_hook=unique_keys)
READ_CHARS = 1 << 20
"""Characters per read."""


class JsonStream:
    """Incremental parser of a JSON list, in memory bounded by its largest item.

    ijson 3.6 is no replacement: its errors have no line number, it rejects NaN, it turns a lone surrogate into '?', and
    100,000 nested brackets exhausted 23 GB of memory.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self.position, self._ended = file, 0, False
        self.text, self.line_number = "", 1

    def peek(self) -> str:
        """The next character that is no whitespace, without consuming it; empty at the end."""
        while True:
            match = WHITESPACE.match(self.text, self.position)
            assert match is not None
            self.position = match.end()
            if self.position < len(self.text) or not self._read_more():
                return self.text[self.position : self.position + 1]

    def iter_items(self) -> Iterator[Any]:
        """The items of the list that begins here, one by one."""
        self.position += 1
        if self.peek() != "]":
            yield self._parse_value()
            while self.peek() == ",":
                self.position += 1
                self.peek()
                yield self._parse_value()
            if self.peek() != "]":
                raise json.JSONDecodeError("Expecting ',' delimiter", self.text, self.position)
        self.position += 1
        if self.peek():
            raise json.JSONDecodeError("Extra data", self.text, self.position)

    def load_rest(self) -> Any:
        """Everything that remains, as one value."""
        while self._read_more():
            pass
        return DECODER.decode(self.text)

    def _parse_value(self) -> Any:
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.position)
                if end < len(self.text) or self._ended:  # else the value may continue in the next chunk
                    self.position = end
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise
            self._read_more()

    def _read_more(self) -> bool:
        """Drop the consumed text, and read at least as much again as is unparsed."""
        unparsed = self.text[self.position :]
        chunk = self._file.read(max(READ_CHARS, len(unparsed)))
        self.line_number += self.text.count("\n", 0, self.position)
        self.text, self.position, self._ended = unparsed + chunk, 0, not chunk
        return bool(chunk)


class DroppedRow(Exception):
    """The reason why a valid row is left out, such as a pair of identical answers."""


@dataclass
class Quarantine:
    """Invalid rows and the limit on how many are allowed."""

    max_invalid_fraction: float = 0.0
    """Largest allowed fraction of invalid rows."""
    rows_read: int = 0
    """Rows read, valid and invalid."""
    invalid_rows: list[InvalidRow] = field(default_factory=list)
    """Rows that cannot be used."""
    dropped_rows: list[InvalidRow] = field(default_factory=list)
    """Valid rows that are left out, such as pairs of identical answers and empty documents."""
    formats: Counter[str] = field(default_factory=Counter)
    """How rows were read, and how many."""
    notes: list[str] = field(default_factory=list)
    """Files that are not read."""
    sources: list[str] = field(default_factory=list)
    """A line about each source of a mixture."""

    def count(self, items: Iterable[Row | InvalidRow]) -> Iterator[Row | InvalidRow]:
        """Count the rows that are read; an unreadable file raises at once."""
        for item in items:
            self.rows_read += 1
            if isinstance(item, InvalidRow) and item.file_unreadable:
                raise DataError([Problem(item.where, item.reason)])
            yield item

    def iter_valid(self, items: Iterable[Row | InvalidRow]) -> Iterator[Row]:
        """The valid rows; the others are kept here."""
        for item in items:
            if isinstance(item, Row):
                yield item
            else:
                self.invalid_rows.append(item)

    def add(self, row: Row, reason: str) -> None:
        """Quarantine a row."""
        self.invalid_rows.append(invalid_row(row, reason))

    def drop(self, row: Row, reason: str) -> None:
        """Leave out a valid row."""
        self.dropped_rows.append(invalid_row(row, reason))

    def count_format(self, description: str) -> None:
        """Count a row that was read as described."""
        self.formats[description] += 1

    def summary(self) -> dict[str, Any]:
        """Counts and first rows, for a manifest."""
        kinds = {"quarantined": self.invalid_rows, "dropped": self.dropped_rows}
        return {
            "read_as": dict(self.formats),
            **{f"{kind}_rows": len(rows) for kind, rows in kinds.items()},
            **{f"{kind}_examples": show_examples(rows) for kind, rows in kinds.items() if rows},
        }

    def lines(self, quarantine_file: str = "") -> list[str]:
        """What a user should know: how rows were read, and which were left out, with the first three."""
        formats = self.formats.most_common()
        shown = [f"{text} ({count:,} rows)" if len(formats) > 1 else text for text, count in formats[:EXAMPLES_SHOWN]]
        if others := formats[EXAMPLES_SHOWN:]:
            shown.append(f"{sum(count for _, count in others):,} rows have {len(others)} other sets of columns")
        shown += self.notes
        target = f", listed in {quarantine_file}" if quarantine_file else ""
        kinds = ((self.invalid_rows, f"cannot be used{target}"), (self.dropped_rows, "are dropped"))
        for rows, what in kinds:
            if rows:
                examples = "; ".join(show_examples(rows))
                shown.append(f"{len(rows):,} of {self.rows_read:,} rows {what}: {examples}")
        return [*self.sources, *shown]

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise the invalid rows beside a problem of the whole set, or if there are more than allowed."""
        try:
            yield
        except DataError as error:
            if len(self.invalid_rows) == self.rows_read:
                self.raise_if_over_limit()
            raise DataError([*self._problems(), *error.problems]) from None
        self.raise_if_over_limit()

    def _problems(self) -> list[Problem]:
        return group_problems([Problem(row.where, row.reason) for row in self.invalid_rows])

    def raise_if_over_limit(self) -> None:
        """Raise all invalid rows as one error if there are more than allowed."""
        if len(self.invalid_rows) > self.max_invalid_fraction * self.rows_read:
            problems = self._problems()
            if self.max_invalid_fraction:
                limit = f"data.max_invalid_fraction {self.max_invalid_fraction:g}"
                summary = f"{len(self.invalid_rows):,} of {self.rows_read:,} rows cannot be used"
                problems.append(Problem("data", f"{summary}, more than {limit} allows"))
            raise DataError(problems)


def show_examples(rows: Sequence[InvalidRow]) -> list[str]:
    """The first rows with their reasons."""
    return [f"{row.where}: {row.reason}" for row in rows[:EXAMPLES_SHOWN]]


def invalid_row(row: Row, reason: str) -> InvalidRow:
    """A row that cannot be used, with its first characters."""
    return InvalidRow(row.where, reason, json.dumps(row.values, ensure_ascii=False, default=str)[:120])


def to_jsonl(invalid_row: InvalidRow) -> str:
    """An invalid row as a line of quarantine.jsonl."""
    record = {"where": invalid_row.where, "reason": invalid_row.reason, "excerpt": invalid_row.excerpt}
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_quarantine(path: Path, invalid_rows: Iterable[InvalidRow]) -> None:
    """Write the invalid rows, one per line."""
    write_text(path, "".join(map(to_jsonl, invalid_rows)))
