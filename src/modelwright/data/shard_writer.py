"""Write packed shards: documents one after the other, an end token after each, cut into rows; nothing truncated.

Every shard is whole or absent (temporary name, fsync, rename), and what is written is remembered, so that a killed
writer goes on after its last whole shard and the bytes are those of a writer that nobody killed.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data.shards import Array, Layout, empty_part
from modelwright.runs.folder import hash_file, read_json, replacing, write_json

STRETCH = 1 << 18
"""Tokens written at once: they stay in the cache from one use to the next."""


@dataclass(frozen=True)
class Documents:
    """Tokens of many documents, each with its end token, one after the other."""

    tokens: Array
    """All of them: [sum of lengths]."""
    lengths: Array
    """Tokens in each document: [documents] int64."""
    text_bytes: Array
    """UTF-8 bytes of each document: [documents] int64."""


@dataclass(frozen=True)
class Block:
    """Documents that are loaded when their turn comes."""

    tokens: int
    """How many they hold, known before they are loaded."""
    load: Callable[[], Documents]
    """Brings them."""


@dataclass
class _Open:
    """The shard that is being filled: views of what will be written, not a copy."""

    pieces: list[Array] = field(default_factory=list)
    starts: list[Array] = field(default_factory=list)
    filled: int = 0
    text_bytes: int = 0


def write_part(
    folder: Path, part: str, layout: Layout, sources: dict[str, Iterable[Block]], config: str
) -> dict[str, Any]:
    """Pack the blocks of each source, in order, and return the facts of the part.

    A source begins on a fresh row, so that rows can be mixed by weight; what is left of its last row is lost and
    counted. Shards written before for the same `config` are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = empty_part()
    progress = folder / f".{part}.progress.json"
    written = _remembered(progress, config, folder)
    for name, blocks in sources.items():
        mine = [shard for shard in written if shard["source"] == name]
        known = list(facts["shards"])
        for shard in _pack(folder, part, layout, _Resumed(name, blocks, mine, len(known)), facts):
            known.append(shard)
            if shard not in written:
                write_json(progress, {"config": config, "shards": known})
        facts["shards"] = known
        facts["sources"][name] = sum(shard["rows"] for shard in known if shard["source"] == name)
    for key in ("rows", "tokens", "documents", "text_bytes"):
        facts[key] = sum(shard[key] for shard in facts["shards"])
    progress.unlink(missing_ok=True)
    return facts


@dataclass(frozen=True)
class _Resumed:
    """One source, and what is already on the disk of it."""

    name: str
    blocks: Iterable[Block]
    written: list[dict[str, Any]]
    first_shard: int


def _pack(folder: Path, part: str, layout: Layout, source: _Resumed, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from source.written
    skip = sum(shard["tokens"] for shard in source.written)
    capacity = layout.rows_per_shard * layout.length
    number = source.first_shard + len(source.written)
    current = _Open()
    for block in source.blocks:
        if skip >= block.tokens:
            skip -= block.tokens
            continue
        documents = block.load()
        place, skip = skip, 0
        while place < len(documents.tokens):
            place = _fill(current, documents, place, capacity)
            if current.filled == capacity:
                yield _write(folder, f"{part}-{number:05d}", layout, current, source.name)
                number, current = number + 1, _Open()
    rows = current.filled // layout.length
    facts["lost_tokens"] += current.filled - rows * layout.length
    if rows:
        yield _write(folder, f"{part}-{number:05d}", layout, current, source.name)


def _fill(current: _Open, documents: Documents, place: int, capacity: int) -> int:
    """Take tokens from a place on until the shard is full or the block ends; returns the new place."""
    taken = min(capacity - current.filled, len(documents.tokens) - place)
    current.pieces.append(documents.tokens[place : place + taken])
    begins = np.concatenate([[0], np.cumsum(documents.lengths)])
    first, stop = np.searchsorted(begins[:-1], [place, place + taken])
    current.starts.append(begins[first:stop] - place + current.filled)
    current.text_bytes += _bytes_before(documents, begins, place + taken) - _bytes_before(documents, begins, place)
    current.filled += taken
    return place + taken


def _bytes_before(documents: Documents, begins: Array, place: int) -> int:
    """Bytes of text before a place; inside a document they are shared out evenly over its tokens."""
    document = int(np.searchsorted(begins, place, side="right")) - 1
    whole = int(documents.text_bytes[:document].sum())
    if document == len(documents.lengths):
        return whole
    inside = place - int(begins[document])
    return whole + int(documents.text_bytes[document]) * inside // int(documents.lengths[document])


def _write(folder: Path, stem: str, layout: Layout, current: _Open, source: str) -> dict[str, Any]:
    rows = current.filled // layout.length
    kept = rows * layout.length
    starts = np.concatenate(current.starts) if current.starts else np.zeros(0, dtype=np.int64)
    starts = starts[starts < kept].astype(np.uint32)
    name, beside = f"{stem}.npy", f"{stem}.starts.npy"
    return {
        "name": name,
        "starts": beside,
        "source": source,
        "rows": rows,
        "tokens": kept,
        "documents": len(starts),
        "text_bytes": current.text_bytes * kept // max(1, current.filled),
        "files": {
            name: _write_array(folder / name, current.pieces, (rows, layout.length), layout.dtype),
            beside: _write_array(folder / beside, [starts], starts.shape, starts.dtype),
        },
    }


def _write_array(path: Path, pieces: Iterable[Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Write flat pieces one after the other as an array of that shape; what is too much is left. Returns size and hash.

    Each stretch is narrowed, hashed and written while it is in the cache: no second copy of the shard is ever made.
    """
    head = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, facts)
    digest, left = xxhash.xxh3_128(head.getvalue()), math.prod(shape)
    buffer = np.empty(STRETCH, dtype=dtype)  # one for all: a fresh one each time would cost a third more
    with replacing(path) as file:
        file.write(head.getvalue())
        file.flush()
        for piece in pieces:
            for start in range(0, min(len(piece), left), STRETCH):
                taken = piece[start : start + min(STRETCH, left)]
                stretch = buffer[: len(taken)]
                np.copyto(stretch, taken, casting="unsafe")
                digest.update(stretch.data)
                _write_all(file.fileno(), stretch.data.cast("B"))
                left -= len(stretch)
    return {"size": path.stat().st_size, "xxh3": digest.hexdigest()}


def _write_all(descriptor: int, data: memoryview) -> None:
    """Write without a buffer between, however often the system takes only a part."""
    while data:
        data = data[os.write(descriptor, data) :]


def _remembered(progress: Path, config: str, folder: Path) -> list[dict[str, Any]]:
    """Shards that an earlier try finished for the same wish and that still are as it left them."""
    if not progress.exists():
        return []
    found = read_json(progress)
    if found["config"] != config:
        return []
    good: list[dict[str, Any]] = []
    for shard in found["shards"]:
        for name, known in shard["files"].items():
            if not (folder / name).exists() or hash_file(folder / name) != known["xxh3"]:
                return good
        good.append(shard)
    return good
