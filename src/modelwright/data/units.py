"""Divide sources into units of work: the same units whoever does them, so that the result depends on no worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from modelwright.data import sources
from modelwright.data.files import Fault, Row, Stretch, read_file
from modelwright.recipe.schema import Data

UNIT_BYTES = 32 << 20
"""Bytes of a file in one unit."""
UNIT_ROWS = 8192
"""Rows in one unit of a set that has no files of its own."""

Side = Literal["split", "held_out"]


@dataclass(frozen=True)
class Unit:
    """A part of a source that one worker reads."""

    source: str
    """The source as the recipe names it."""
    side: Side
    """Whether its documents are split, or all held out."""
    path: str | None
    """The file, where it is one; else the whole set is opened by its name."""
    start: int = 0
    """First byte, row group or row."""
    stop: int | None = None
    """Where it ends."""
    rows_before: int = 0
    """Rows before it, for naming places."""
    most: int | None = None
    """Read no more rows than this."""

    def rows(self, data: Data, beside: Path) -> Iterator[Row | Fault]:
        """Its rows, and what cannot be read."""
        if self.path is not None:
            found = read_file(Path(self.path), Stretch(self.start, self.stop, self.rows_before))
        else:
            found = sources.read(self.source, data, beside, self.start, self.stop)
        return itertools.islice(found, self.most)

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """Units of all sources, and a hash of what stands in them."""

    units: list[Unit]
    """In the order of their documents."""
    fingerprint: str
    """Changes when any byte of any source does."""


def divide(data: Data, beside: Path) -> Found:
    """Every unit of a recipe's data; held-out files first, so that of two alike the held-out one is kept."""
    digest = xxhash.xxh3_128()
    units: list[Unit] = []
    names: list[tuple[str, Side]] = [(data.validation_file, "held_out")] if data.validation_file else []
    names += [(name, "split") for name in ([*data.mix] or [data.source])]
    for name, side in names:
        digest.update(f"\0{name}\0{side}".encode())
        some = _units(Unit(name, side, None), data, beside, digest)
        units += [replace(some[0], stop=None, most=data.max_rows)] if data.max_rows and side == "split" else some
    return Found(units, digest.hexdigest())


def _units(unit: Unit, data: Data, beside: Path, digest: Any) -> list[Unit]:
    path = sources.EMBEDDED.get(unit.source) or sources.local_path(unit.source, beside)
    if path is None or unit.source in sources.GATHERED or (path.is_dir() and sources.is_stored_set(path)):
        return _row_units(unit, data, beside, digest)
    files = sources.files_in(path) if path.is_dir() else [path]
    return [each for file in files for each in _file_units(replace(unit, path=str(file.resolve())), file, digest)]


def _row_units(unit: Unit, data: Data, beside: Path, digest: Any) -> list[Unit]:
    """Sets without files of their own are counted by reading them once."""
    count = 0
    for item in sources.read(unit.source, data, beside):
        count += 1
        digest.update(repr(item).encode("utf-8", "replace"))
    starts = range(0, max(1, count), UNIT_ROWS)
    return [replace(unit, start=start, stop=start + UNIT_ROWS, rows_before=start) for start in starts]


def _file_units(unit: Unit, path: Path, digest: Any) -> list[Unit]:
    digest.update(f"\0{path.name}\0".encode())
    places, lines, position = [(0, 0)], 0, 0
    with path.open("rb") as file:
        while piece := file.read(UNIT_BYTES):
            digest.update(piece)
            position += len(piece)
            # the line that holds the last byte of this piece belongs to the unit before the next piece
            places.append((position, lines + piece[:-1].count(b"\n") + 1))
            lines += piece.count(b"\n")
    if path.suffix == ".parquet":
        return _parquet_units(unit, path)
    if path.suffix != ".jsonl" or len(places) < 3:
        return [unit]
    return [replace(unit, start=start, stop=stop, rows_before=before)
            for (start, before), (stop, _) in itertools.pairwise(places)]  # fmt: skip


def _parquet_units(unit: Unit, path: Path) -> list[Unit]:
    import pyarrow
    import pyarrow.parquet

    try:
        facts = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        return [unit]  # reading it will tell what is wrong
    units, start, size, before, rows = [], 0, 0, 0, 0
    for number in range(facts.num_row_groups):
        group = facts.row_group(number)
        size, rows = size + group.total_byte_size, rows + group.num_rows
        if size >= UNIT_BYTES or number == facts.num_row_groups - 1:
            units.append(replace(unit, start=start, stop=number + 1, rows_before=before))
            start, size, before = number + 1, 0, rows
    return units or [unit]
