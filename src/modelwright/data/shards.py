"""Read and write packed token shards, and pack raw text into them."""

from __future__ import annotations

import io
import json
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.data.chat import SplitDataset
from modelwright.data.packing import NDArray
from modelwright.data.readers import InvalidRow, Quarantine, Row, describe_columns, get_text, row_suffix
from modelwright.data.sources import (
    add_derived_columns,
    has_validation_rows,
    iter_train_rows,
    iter_validation_rows,
    local_path,
    notes_on_files,
)
from modelwright.data.tokenizer import DocumentTokenizer, TokenizedDocuments
from modelwright.errors import DataError, Problem
from modelwright.recipe.sections import DataConfig
from modelwright.runs.folder import atomic_write, hash_file, read_json, write_json

MANIFEST = "manifest.json"
MANIFEST_VERSION = 2
"""Raise it when the manifest or the shards change; other versions are refused."""
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class ShardLayout:
    """Row length, vocabulary and shard size."""

    sequence_length: int
    """Tokens per stored row."""
    vocab_size: int
    """Token ids are below this; it decides the dtype."""
    rows_per_shard: int = 8192
    """Rows per shard."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 if the vocabulary allows it, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class SourceRows:
    """Rows of one source, for weighted mixing."""

    name: str
    """Its name in the recipe."""
    rows: int
    """Number of rows at the requested length."""


class PackedDataset:
    """Memory-mapped packed rows of one split, train or held_out."""

    def __init__(self, folder: Path, split: str, manifest: dict[str, Any]) -> None:
        self.folder, self.split, self.manifest = folder, split, manifest
        self._stats: dict[str, Any] = manifest["splits"].get(split) or empty_split_stats()
        self.sequence_length: int = manifest["sequence_length"]
        """Tokens per stored row."""
        self.vocab_size: int = manifest["vocab_size"]
        """Token ids are below this."""
        self.fingerprint: str = manifest["fingerprint"]
        """Hash of all shards of all splits."""
        self.tokenizer_fingerprint: str = manifest["tokenizer"]
        """Hash of the tokenizer.json that made the tokens."""
        self.tokens: int = self._stats["tokens"]
        """Tokens in all rows."""
        self.documents: int = self._stats["documents"]
        """Documents that start in these rows."""
        self.text_bytes: int = self._stats["text_bytes"]
        """UTF-8 bytes of the text of these tokens, for bits per byte."""
        self._open_shards: dict[tuple[int, int], tuple[NDArray, NDArray, memoryview]] = {}

    @classmethod
    def open(cls, folder: Path, split: str = "train") -> Self:
        """Open a split; missing files and files of another size than in the manifest are errors."""
        path = folder / MANIFEST
        if not path.exists():
            message = "there is no manifest.json, so these are no finished shards; modelwright data prepare makes them"
            raise DataError([Problem(str(folder), message)])
        manifest = read_json(path)
        if (version := manifest.get("format")) != MANIFEST_VERSION:
            message = (
                f"these shards have format {version} (Modelwright 0.1 wrote 1); it wants format {MANIFEST_VERSION}"
            )
            raise DataError([Problem(str(folder), f"{message}; modelwright data prepare makes them again")])
        dataset = cls(folder, split, manifest)
        dataset._check(verify_hashes=False)
        return dataset

    def verify(self) -> None:
        """Check the hash of every file against the manifest."""
        self._check(verify_hashes=True)

    @property
    def size_bytes(self) -> int:
        """Bytes of its files."""
        return sum(int(entry["size"]) for entry in shard_files(self._stats).values())

    def rows(self, length: int | None = None) -> int:
        """Number of rows of this length, which must divide the stored length."""
        return int(self._stats["rows"]) * self._per_row(length)

    def sources(self, length: int | None = None) -> list[SourceRows]:
        """The rows of each source, in index order."""
        per_row = self._per_row(length)
        return [SourceRows(name, rows * per_row) for name, rows in self._stats["sources"].items()]

    def get_rows(self, rows: Sequence[int] | NDArray, length: int | None = None) -> tuple[NDArray, NDArray]:
        """Rows by index: tokens and positions, both [count, length] int64.

        Positions restart at 0 with each document, which separates the documents of a row.
        """
        length = length or self.sequence_length
        wanted = np.asarray(rows, dtype=np.int64)
        tokens, positions = np.empty((2, len(wanted), length), dtype=np.int64)
        positions[:] = arange = np.arange(length)
        firsts = self._first_rows * self._per_row(length)
        shard_indices = firsts.searchsorted(wanted, side="right") - 1
        views = zip(tokens, positions, shard_indices.tolist(), (wanted - firsts[shard_indices]).tolist(), strict=True)
        for row_tokens, row_positions, shard, row in views:  # row by row: fancy indexing would copy twice
            stored, starts, first_starts = self._open_shard(shard, length)
            row_tokens[:] = stored[row]
            first, stop = first_starts[row], first_starts[row + 1]
            if first < stop:
                begin = row * length
                for start in starts[first:stop].tolist():
                    row_positions[start - begin :] = arange[: length - start + begin]
        return tokens, positions

    def _open_shard(self, shard: int, length: int) -> tuple[NDArray, NDArray, memoryview]:
        """A shard in rows of that length: tokens, document starts, and the index of the first start of each row."""
        opened = self._open_shards.get((shard, length))
        if opened is None:
            stored, starts = self._maps[shard]
            rows = stored.reshape(-1, length)
            first_starts = starts.searchsorted(np.arange(len(rows) + 1) * length)
            opened = self._open_shards[shard, length] = (rows, starts, first_starts.astype(np.int64).data)
        return opened

    @cached_property
    def _maps(self) -> list[tuple[NDArray, NDArray]]:
        maps: list[tuple[NDArray, NDArray]] = []
        for shard in self._stats["shards"]:
            stored = np.asarray(np.lib.format.open_memmap(self.folder / shard["name"], mode="r"))
            starts = np.lib.format.open_memmap(self.folder / shard["starts"], mode="r")
            # int64 avoids a copy per search, and an array is faster to slice than a memmap
            maps.append((stored, np.array(starts, dtype=np.int64)))
        return maps

    @cached_property
    def _first_rows(self) -> NDArray:
        return np.cumsum([0, *(shard["rows"] for shard in self._stats["shards"])], dtype=np.int64)[:-1]

    def _per_row(self, length: int | None) -> int:
        if length is not None and (length < 1 or self.sequence_length % length):
            wanted = f"it wants a length that divides the stored {self.sequence_length}"
            raise DataError([Problem(str(self.folder), f"rows of {length} tokens were asked for; {wanted}")])
        return self.sequence_length // (length or self.sequence_length)

    def _check(self, verify_hashes: bool) -> None:
        problems = []
        for name, entry in shard_files(self._stats).items():
            path = self.folder / name
            if not path.exists():
                problems.append(Problem(str(path), "this shard is missing; prepare the data again"))
            elif path.stat().st_size != entry["size"] or (verify_hashes and hash_file(path) != entry["xxh3"]):
                problems.append(Problem(str(path), "this shard is damaged; delete it and prepare the data again"))
        if problems:
            raise DataError(problems)


def shard_files(split_stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All files of a split with size and hash."""
    return {name: entry for shard in split_stats["shards"] for name, entry in shard["files"].items()}


def empty_split_stats() -> dict[str, Any]:
    """The stats of an empty split."""
    return {"rows": 0, "tokens": 0, "documents": 0, "text_bytes": 0, "dropped_tokens": 0, "sources": {}, "shards": []}


def write_manifest(folder: Path, layout: ShardLayout, splits: dict[str, dict[str, Any]], extra: dict[str, Any]) -> None:
    """Write the manifest, which marks the folder as complete."""
    hashes = [entry["xxh3"] for split_stats in splits.values() for entry in shard_files(split_stats).values()]
    fingerprint = xxhash.xxh3_128_hexdigest("\n".join([str(layout.sequence_length), *hashes]).encode())
    fields = {"format": MANIFEST_VERSION, "sequence_length": layout.sequence_length, "dtype": layout.dtype.name}
    fields |= {"vocab_size": layout.vocab_size, "fingerprint": fingerprint}
    write_json(folder / MANIFEST, {**fields, **extra, "splits": splits})


WRITE_CHUNK_TOKENS = 1 << 18
"""Tokens per write; they stay in the CPU cache between copy, hash and write."""


@dataclass(frozen=True)
class DocumentBatch:
    """Documents that are loaded lazily."""

    tokens: int
    """Token count, known before loading."""
    load: Callable[[], TokenizedDocuments]
    """Loads the documents."""


@dataclass
class _ShardBuffer:
    """The shard that is being filled, as views of the documents."""

    pieces: list[NDArray] = field(default_factory=list)
    starts: list[NDArray] = field(default_factory=list)
    filled: int = 0
    text_bytes: int = 0


def write_split(
    folder: Path, split: str, layout: ShardLayout, sources: Mapping[str, Iterable[DocumentBatch]], config: str
) -> dict[str, Any]:
    """Pack the documents of each source in order, and return the stats of the split.

    Every source starts a new row, so that rows can be mixed by weight; its incomplete last row is dropped and counted.
    Shards that exist for the same `config` are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stats = empty_split_stats()
    progress = folder / f".{split}.progress.json"
    written = _completed_shards(progress, config, folder)
    for name, batches in sources.items():
        source_shards = [shard for shard in written if shard["source"] == name]
        shards = list(stats["shards"])
        source = _SourceProgress(name, batches, source_shards, len(shards))
        for shard in _pack_source(folder, split, layout, source, stats):
            shards.append(shard)
            if shard not in written:
                write_json(progress, {"config": config, "shards": shards})
        stats["shards"] = shards
        stats["sources"][name] = sum(shard["rows"] for shard in shards if shard["source"] == name)
    for key in ("rows", "tokens", "documents", "text_bytes"):
        stats[key] = sum(shard[key] for shard in stats["shards"])
    progress.unlink(missing_ok=True)
    return stats


@dataclass(frozen=True)
class _SourceProgress:
    """One source and its shards that exist already."""

    name: str
    batches: Iterable[DocumentBatch]
    written: list[dict[str, Any]]
    first_shard: int


def _pack_source(
    folder: Path, split: str, layout: ShardLayout, source: _SourceProgress, stats: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    yield from source.written
    skip = sum(shard["tokens"] for shard in source.written)
    capacity = layout.rows_per_shard * layout.sequence_length
    number = source.first_shard + len(source.written)
    buffer = _ShardBuffer()
    for batch in source.batches:
        if skip >= batch.tokens:
            skip -= batch.tokens
            continue
        documents = batch.load()
        offset, skip = skip, 0
        while offset < len(documents.tokens):
            offset = _fill_shard(buffer, documents, offset, capacity)
            if buffer.filled == capacity:
                yield _write_shard(folder, f"{split}-{number:05d}", layout, buffer, source.name)
                number, buffer = number + 1, _ShardBuffer()
    rows = buffer.filled // layout.sequence_length
    stats["dropped_tokens"] += buffer.filled - rows * layout.sequence_length
    if rows:
        yield _write_shard(folder, f"{split}-{number:05d}", layout, buffer, source.name)


def _fill_shard(buffer: _ShardBuffer, documents: TokenizedDocuments, offset: int, capacity: int) -> int:
    """Append tokens from an offset until the shard is full or the documents end; returns the new offset."""
    count = min(capacity - buffer.filled, len(documents.tokens) - offset)
    buffer.pieces.append(documents.tokens[offset : offset + count])
    document_offsets = np.concatenate([[0], np.cumsum(documents.lengths)])
    first, stop = np.searchsorted(document_offsets[:-1], [offset, offset + count])
    buffer.starts.append(document_offsets[first:stop] - offset + buffer.filled)
    start, end = (_bytes_before(documents, document_offsets, position) for position in (offset, offset + count))
    buffer.text_bytes += end - start
    buffer.filled += count
    return offset + count


def _bytes_before(documents: TokenizedDocuments, document_offsets: NDArray, offset: int) -> int:
    """Bytes of text before a token offset; inside a document, in proportion to its tokens."""
    document = int(np.searchsorted(document_offsets, offset, side="right")) - 1
    bytes_before = int(documents.text_bytes[:document].sum())
    if document == len(documents.lengths):
        return bytes_before
    inside = offset - int(document_offsets[document])
    return bytes_before + int(documents.text_bytes[document]) * inside // int(documents.lengths[document])


def _write_shard(folder: Path, stem: str, layout: ShardLayout, buffer: _ShardBuffer, source: str) -> dict[str, Any]:
    rows = buffer.filled // layout.sequence_length
    token_count = rows * layout.sequence_length
    starts = np.concatenate(buffer.starts) if buffer.starts else np.zeros(0, dtype=np.int64)
    starts = starts[starts < token_count].astype(np.uint32)
    name, starts_name = f"{stem}.npy", f"{stem}.starts.npy"
    return {
        "name": name,
        "starts": starts_name,
        "source": source,
        "rows": rows,
        "tokens": token_count,
        "documents": len(starts),
        "text_bytes": buffer.text_bytes * token_count // max(1, buffer.filled),
        "files": {
            name: _write_array(folder / name, buffer.pieces, (rows, layout.sequence_length), layout.dtype),
            starts_name: _write_array(folder / starts_name, [starts], starts.shape, starts.dtype),
        },
    }


def _write_array(path: Path, pieces: Iterable[NDArray], shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Write flat pieces as an array of that shape and drop the excess; returns size and hash.

    Each chunk is cast, hashed and written while it is in the CPU cache; the shard is never copied as a whole.
    """
    header = io.BytesIO()
    header_fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, header_fields)
    digest, remaining = xxhash.xxh3_128(header.getvalue()), math.prod(shape)
    buffer = np.empty(WRITE_CHUNK_TOKENS, dtype=dtype)  # reused: allocating one per chunk takes a third more time
    with atomic_write(path) as file:
        file.write(header.getvalue())
        file.flush()
        for piece in pieces:
            for start in range(0, min(len(piece), remaining), WRITE_CHUNK_TOKENS):
                values = piece[start : start + min(WRITE_CHUNK_TOKENS, remaining)]
                chunk = buffer[: len(values)]
                np.copyto(chunk, values, casting="unsafe")
                digest.update(chunk.data)
                _write_all(file.fileno(), chunk.data.cast("B"))
                remaining -= len(chunk)
    return {"size": path.stat().st_size, "xxh3": digest.hexdigest()}


def _write_all(descriptor: int, data: memoryview) -> None:
    """Write unbuffered, and repeat after partial writes."""
    while data:
        data = data[os.write(descriptor, data) :]


def _completed_shards(progress: Path, config: str, folder: Path) -> list[dict[str, Any]]:
    """Undamaged shards that an interrupted run completed for the same config."""
    if not progress.exists():
        return []
    saved = read_json(progress)
    if saved["config"] != config:
        return []
    completed: list[dict[str, Any]] = []
    for shard in saved["shards"]:
        for name, entry in shard["files"].items():
            if not (folder / name).exists() or hash_file(folder / name) != entry["xxh3"]:
                return completed
        completed.append(shard)
    return completed


DOCUMENT_BATCH = 256
"""Documents per tokenizer call."""


def pack_raw_text(
    data: DataConfig, seed: int, recipe_dir: Path, tokenizer: DocumentTokenizer, layout: ShardLayout, folder: Path
) -> Quarantine:
    """Pack the text of a recipe into shards; complete shards of the same text are kept. Returns what was left out."""
    documents = _SplitDocuments(data, seed, recipe_dir)
    parts = [tokenizer.fingerprint, layout.sequence_length, documents.fingerprint]
    config = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
    if (folder / MANIFEST).exists():
        manifest = read_json(folder / MANIFEST)
        if (manifest.get("format"), manifest.get("config")) == (MANIFEST_VERSION, config):
            return documents.quarantine
    (folder / MANIFEST).unlink(missing_ok=True)
    splits = {}
    for split, texts in documents.splits():
        sources = {data.source: _document_batches(texts, tokenizer)}
        splits[split] = write_split(folder, split, layout, sources, f"{split} {config}")
    if not splits["train"]["rows"]:
        message = f"all text together is shorter than one row of {layout.sequence_length} tokens; lower max_length"
        raise DataError([Problem(data.source, message)])
    extra = {"tokenizer": tokenizer.fingerprint, "config": config, "source": data.source}
    write_manifest(folder, layout, splits, {**extra, "text_rows": documents.quarantine.summary()})
    return documents.quarantine


class _SplitDocuments:
    """The documents of a recipe, read more than once; held out by a hash of seed and text."""

    quarantine: Quarantine
    """Rows that cannot be used, and empty ones."""

    def __init__(self, data: DataConfig, seed: int, recipe_dir: Path) -> None:
        self._data, self._seed, self._recipe_dir = data, seed, recipe_dir
        hashes, digest = array("Q"), xxhash.xxh3_128()
        self.quarantine = Quarantine(data.max_invalid_fraction)
        for text in self._train(self.quarantine):
            hashes.append(self._split_hash(text))
            digest.update(text.encode() + b"\0")
        for text in self._validation(self.quarantine):
            digest.update(text.encode() + b"\1")
        self.quarantine.raise_if_over_limit()
        if not hashes:
            raise DataError([Problem(data.source, "there is no text in it")])
        distinct = np.unique(np.frombuffer(hashes, dtype=np.uint64))
        _check_one_document(data, len(distinct))
        count = (
            0
            if has_validation_rows(data, recipe_dir)
            else min(data.test_size.resolve(len(distinct)), len(distinct) - 1)
        )
        self._held_out_limit = int(distinct[count - 1]) if count else -1
        self.fingerprint = f"{digest.hexdigest()} {self._held_out_limit}"

    def splits(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Training documents, then held-out documents, if any."""
        yield "train", (text for text in self._train() if self._split_hash(text) > self._held_out_limit)
        if self._held_out_limit >= 0 or has_validation_rows(self._data, self._recipe_dir):
            held_out = (text for text in self._train() if self._split_hash(text) <= self._held_out_limit)
            yield "held_out", chain(held_out, self._validation())

    def _train(self, quarantine: Quarantine | None = None) -> Iterator[str]:
        return self._texts(iter_train_rows(self._data, self._recipe_dir), quarantine)

    def _validation(self, quarantine: Quarantine | None = None) -> Iterator[str]:
        return self._texts(iter_validation_rows(self._data, self._recipe_dir), quarantine)

    def _texts(self, rows: Iterable[Row | InvalidRow], quarantine: Quarantine | None) -> Iterator[str]:
        quarantine = quarantine or Quarantine()
        return (item.text for item in iter_documents(quarantine.count(rows), self._data, quarantine))

    def _split_hash(self, text: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed}:{text}".encode())


def check_raw_text(data: DataConfig, seed: int, recipe_dir: Path) -> SplitDataset[Document]:
    """Check the first documents of both splits; checking all could take long."""
    path = local_path(data.source, recipe_dir)
    if path is not None and (path / MANIFEST).exists():
        return SplitDataset([], [], "")  # packed shards, which a run checks
    quarantine = Quarantine(data.max_invalid_fraction, notes=notes_on_files(data, recipe_dir))
    for rows in (iter_train_rows(data, recipe_dir), iter_validation_rows(data, recipe_dir)):
        rows_to_documents(quarantine.count(islice(rows, DOCUMENT_BATCH)), data, quarantine)
    quarantine.raise_if_over_limit()
    if not has_validation_rows(data, recipe_dir):
        _check_one_document(data, quarantine.rows_read)
    return SplitDataset([], [], "", quarantine)


def _check_one_document(data: DataConfig, documents: int) -> None:
    """Raise if a text file is one document although some are to be held out."""
    is_one_file = row_suffix(Path(data.source)) == ".txt" and data.sample_by == "document" and not data.validation_file
    if documents == 1 and is_one_file and data.test_size.resolve(1):
        message = "the file is one document, so none can be held out; data.sample_by: paragraph or line makes several"
        raise DataError([Problem(data.source, f"{message}; else data.validation_file, or data.test_size: 0")])


@dataclass(frozen=True)
class Document:
    """A text to pretrain on."""

    where: str
    """File and line."""
    text: str
    """The text."""
    split_key: str
    """Documents with equal keys stay in one split."""


def rows_to_documents(
    rows: Iterable[Row | InvalidRow], data: DataConfig, quarantine: Quarantine | None = None
) -> list[Document]:
    """The documents of rows; invalid rows go to the quarantine, or are raised if there is none."""
    outcome = quarantine or Quarantine()
    documents = list(iter_documents(rows, data, outcome))
    if quarantine is None:
        outcome.raise_if_over_limit()
    return documents


def iter_documents(rows: Iterable[Row | InvalidRow], data: DataConfig, quarantine: Quarantine) -> Iterator[Document]:
    """The documents of rows; empty ones are dropped and counted."""
    for row in quarantine.iter_valid(add_derived_columns(rows, data)):
        text = get_text(row, data.text_column)
        if isinstance(text, InvalidRow):
            quarantine.add(row, text.reason)
        elif not text.strip():
            quarantine.drop(row, f"{data.text_column!r} is empty")
        elif data.split_by and data.split_by not in row.values:
            quarantine.add(row, f"there is no column {data.split_by!r} to split by; {describe_columns(row.values)}")
        else:
            quarantine.count_format(f"read as text: {data.text_column} → documents")
            yield Document(row.where, text, str(row.values[data.split_by]) if data.split_by else text)


def _document_batches(texts: Iterator[str], tokenizer: DocumentTokenizer) -> Iterator[DocumentBatch]:
    while batch := list(islice(texts, DOCUMENT_BATCH)):
        tokenized = tokenizer.encode_batch(batch)
        yield DocumentBatch(len(tokenized.tokens), lambda tokenized=tokenized: tokenized)  # type: ignore[misc]
