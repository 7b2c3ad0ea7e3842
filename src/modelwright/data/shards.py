"""Packed shards: tokens of many documents in rows of one length, read by memory map at any length that divides it.

A folder holds `PART-00000.npy` ([rows, length], as narrow as the vocabulary allows), beside each a
`PART-00000.starts.npy` (places, counted through the shard, where a document begins), and `manifest.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.errors import DataError, Problem
from modelwright.runs.folder import hash_file, read_json, write_json

MANIFEST = "manifest.json"
FORMAT = 1
PARTS = ("train", "held_out")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Layout:
    """How tokens lie in the shards."""

    length: int
    """Tokens in a stored row."""
    vocab_size: int
    """Token ids are below this; it decides how many bytes each takes."""
    rows_per_shard: int = 8192
    """Rows in a full shard."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Two bytes a token where the vocabulary allows it, else four."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class Source:
    """Rows that came from one source, for weighted mixing."""

    name: str
    """What the recipe calls it."""
    rows: int
    """How many there are at the length asked for."""


class Shards:
    """One part, train or held_out, of a packed folder."""

    def __init__(self, folder: Path, part: str, manifest: dict[str, Any]) -> None:
        self.folder, self.part, self.manifest = folder, part, manifest
        self._facts: dict[str, Any] = manifest["parts"].get(part) or empty_part()
        self.length: int = manifest["length"]
        """Tokens in a stored row."""
        self.vocab_size: int = manifest["vocab_size"]
        """Token ids are below this."""
        self._opened: dict[tuple[int, int], tuple[Array, Array, memoryview]] = {}

    @classmethod
    def open(cls, folder: Path, part: str = "train") -> Self:
        """Open a part; a file that is missing or has another size than the manifest says is told."""
        path = folder / MANIFEST
        if not path.exists():
            letter = "there is no manifest.json, so these are no finished shards; modelwright data prepare makes them"
            raise DataError([Problem(str(folder), letter)])
        shards = cls(folder, part, read_json(path))
        shards._check(whole=False)
        return shards

    def verify(self) -> None:
        """Read every byte and hold it against the manifest."""
        self._check(whole=True)

    @property
    def bytes(self) -> int:
        """What its files take."""
        return sum(int(known["size"]) for known in files_of(self._facts).values())

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self._facts["tokens"])

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes that these tokens stand for: what bits per byte are counted by."""
        return int(self._facts["text_bytes"])

    @property
    def documents(self) -> int:
        """Documents that begin in these rows."""
        return int(self._facts["documents"])

    @property
    def fingerprint(self) -> str:
        """Changes when any byte of any part does."""
        return str(self.manifest["fingerprint"])

    @property
    def tokenizer_fingerprint(self) -> str:
        """Which tokenizer made the tokens."""
        return str(self.manifest["tokenizer"])

    def rows(self, length: int | None = None) -> int:
        """Rows at this length, which divides the stored one."""
        return int(self._facts["rows"]) * self._per_row(length)

    def sources(self, length: int | None = None) -> list[Source]:
        """The rows of each source, in the order they are numbered."""
        per_row = self._per_row(length)
        return [Source(name, rows * per_row) for name, rows in self._facts["sources"].items()]

    def read(self, rows: Sequence[int] | Array, length: int | None = None) -> tuple[Array, Array]:
        """Rows by number: tokens and positions, both [count, length] int64.

        Positions begin anew with each document, which keeps the documents of a row apart.
        """
        length = length or self.length
        wanted = np.asarray(rows, dtype=np.int64)
        tokens, positions = np.empty((2, len(wanted), length), dtype=np.int64)
        positions[:] = count = np.arange(length)
        firsts = self._first_rows * self._per_row(length)
        owners = firsts.searchsorted(wanted, side="right") - 1
        lines = zip(tokens, positions, owners.tolist(), (wanted - firsts[owners]).tolist(), strict=True)
        for line, places, shard, row in lines:  # row by row: gathered at once they would be copied twice
            stored, starts, edges = self._at(shard, length)
            line[:] = stored[row]
            first, stop = edges[row], edges[row + 1]
            if first < stop:
                begin = row * length
                for start in starts[first:stop].tolist():
                    places[start - begin :] = count[: length - start + begin]
        return tokens, positions

    def _at(self, shard: int, length: int) -> tuple[Array, Array, memoryview]:
        """A shard in rows of that length: its tokens, where documents begin, and the first of these in each row."""
        known = self._opened.get((shard, length))
        if known is None:
            stored, starts = self._maps[shard]
            rows = stored.reshape(-1, length)
            edges = starts.searchsorted(np.arange(len(rows) + 1) * length)
            known = self._opened[shard, length] = (rows, starts, edges.astype(np.int64).data)
        return known

    @cached_property
    def _maps(self) -> list[tuple[Array, Array]]:
        maps: list[tuple[Array, Array]] = []
        for shard in self._facts["shards"]:
            stored = np.asarray(np.lib.format.open_memmap(self.folder / shard["name"], mode="r"))
            starts = np.lib.format.open_memmap(self.folder / shard["starts"], mode="r")
            # searching in another type would copy them every time, and a memmap is slower to slice than an array
            maps.append((stored, np.array(starts, dtype=np.int64)))
        return maps

    @cached_property
    def _first_rows(self) -> Array:
        return np.cumsum([0, *(shard["rows"] for shard in self._facts["shards"])], dtype=np.int64)[:-1]

    def _per_row(self, length: int | None) -> int:
        if length is not None and (length < 1 or self.length % length):
            letter = f"rows of {length} tokens were asked for; it wants a length that divides the stored {self.length}"
            raise DataError([Problem(str(self.folder), letter)])
        return self.length // (length or self.length)

    def _check(self, whole: bool) -> None:
        problems = []
        for name, known in files_of(self._facts).items():
            path = self.folder / name
            if not path.exists():
                problems.append(Problem(str(path), "this shard is missing; prepare the data again"))
            elif path.stat().st_size != known["size"] or (whole and hash_file(path) != known["xxh3"]):
                problems.append(Problem(str(path), "this shard is damaged; delete it and prepare the data again"))
        if problems:
            raise DataError(problems)


def files_of(part: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every file of a part with its size and hash."""
    return {name: known for shard in part["shards"] for name, known in shard["files"].items()}


def empty_part() -> dict[str, Any]:
    """The facts of a part with nothing in it."""
    return {"rows": 0, "tokens": 0, "documents": 0, "text_bytes": 0, "lost_tokens": 0, "sources": {}, "shards": []}


def seal(folder: Path, layout: Layout, parts: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write the manifest, last of all: a folder with one is finished."""
    hashes = [known["xxh3"] for part in parts.values() for known in files_of(part).values()]
    fingerprint = xxhash.xxh3_128_hexdigest("\n".join([str(layout.length), *hashes]).encode())
    manifest = {
        "format": FORMAT,
        "length": layout.length,
        "dtype": layout.dtype.name,
        "vocab_size": layout.vocab_size,
        "fingerprint": fingerprint,
        **facts,
        "parts": parts,
    }
    write_json(folder / MANIFEST, manifest)
