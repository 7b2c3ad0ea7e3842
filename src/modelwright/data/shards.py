"""Read and write packed token shards, and pack raw text into them."""

from __future__ import annotations

import io
import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.data.readers import InvalidRow, Row, get_text, raise_on_invalid_rows
from modelwright.data.sources import iter_train_rows, iter_validation_rows, local_path
from modelwright.data.tokenizer import DocumentTokenizer, NDArray, TokenizedDocuments
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import DataConfig
from modelwright.runs.folder import atomic_write, hash_file, read_json, write_json

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class ShardLayout:
    """How tokens lie in the shards."""

    sequence_length: int
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
class SourceRows:
    """Rows that came from one source, for weighted mixing."""

    name: str
    """What the recipe calls it."""
    rows: int
    """How many there are at the length asked for."""


class PackedDataset:
    """One part, train or held_out, of a packed folder."""

    def __init__(self, folder: Path, split: str, manifest: dict[str, Any]) -> None:
        self.folder, self.split, self.manifest = folder, split, manifest
        self._stats: dict[str, Any] = manifest["splits"].get(split) or empty_split_stats()
        self.sequence_length: int = manifest["sequence_length"]
        """Tokens in a stored row."""
        self.vocab_size: int = manifest["vocab_size"]
        """Token ids are below this."""
        self._open_shards: dict[tuple[int, int], tuple[NDArray, NDArray, memoryview]] = {}

    @classmethod
    def open(cls, folder: Path, split: str = "train") -> Self:
        """Open a part; a file that is missing or has another size than the manifest says is told."""
        path = folder / MANIFEST
        if not path.exists():
            message = "there is no manifest.json, so these are no finished shards; modelwright data prepare makes them"
            raise DataError([Problem(str(folder), message)])
        dataset = cls(folder, split, read_json(path))
        dataset._check(verify_hashes=False)
        return dataset

    def verify(self) -> None:
        """Read every byte and hold it against the manifest."""
        self._check(verify_hashes=True)

    @property
    def size_bytes(self) -> int:
        """What its files take."""
        return sum(int(entry["size"]) for entry in shard_files(self._stats).values())

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self._stats["tokens"])

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes that these tokens stand for: what bits per byte are counted by."""
        return int(self._stats["text_bytes"])

    @property
    def documents(self) -> int:
        """Documents that begin in these rows."""
        return int(self._stats["documents"])

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
        return int(self._stats["rows"]) * self._per_row(length)

    def sources(self, length: int | None = None) -> list[SourceRows]:
        """The rows of each source, in the order they are numbered."""
        per_row = self._per_row(length)
        return [SourceRows(name, rows * per_row) for name, rows in self._stats["sources"].items()]

    def get_rows(self, rows: Sequence[int] | NDArray, length: int | None = None) -> tuple[NDArray, NDArray]:
        """Rows by number: tokens and positions, both [count, length] int64.

        Positions begin anew with each document, which keeps the documents of a row apart.
        """
        length = length or self.sequence_length
        wanted = np.asarray(rows, dtype=np.int64)
        tokens, positions = np.empty((2, len(wanted), length), dtype=np.int64)
        positions[:] = arange = np.arange(length)
        firsts = self._first_rows * self._per_row(length)
        shard_indices = firsts.searchsorted(wanted, side="right") - 1
        views = zip(tokens, positions, shard_indices.tolist(), (wanted - firsts[shard_indices]).tolist(), strict=True)
        for row_tokens, row_positions, shard, row in views:  # row by row: gathered at once they would be copied twice
            stored, starts, first_starts = self._open_shard(shard, length)
            row_tokens[:] = stored[row]
            first, stop = first_starts[row], first_starts[row + 1]
            if first < stop:
                begin = row * length
                for start in starts[first:stop].tolist():
                    row_positions[start - begin :] = arange[: length - start + begin]
        return tokens, positions

    def _open_shard(self, shard: int, length: int) -> tuple[NDArray, NDArray, memoryview]:
        """A shard in rows of that length: its tokens, where documents begin, and the first of these in each row."""
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
            # searching in another type would copy them every time, and a memmap is slower to slice than an array
            maps.append((stored, np.array(starts, dtype=np.int64)))
        return maps

    @cached_property
    def _first_rows(self) -> NDArray:
        return np.cumsum([0, *(shard["rows"] for shard in self._stats["shards"])], dtype=np.int64)[:-1]

    def _per_row(self, length: int | None) -> int:
        if length is not None and (length < 1 or self.sequence_length % length):
            message = f"rows of {length} tokens were asked for; it wants a length that divides the stored {self.sequence_length}"
            raise DataError([Problem(str(self.folder), message)])
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
    """Every file of a part with its size and hash."""
    return {name: entry for shard in split_stats["shards"] for name, entry in shard["files"].items()}


def empty_split_stats() -> dict[str, Any]:
    """The facts of a part with nothing in it."""
    return {"rows": 0, "tokens": 0, "documents": 0, "text_bytes": 0, "dropped_tokens": 0, "sources": {}, "shards": []}


def write_manifest(folder: Path, layout: ShardLayout, splits: dict[str, dict[str, Any]], extra: dict[str, Any]) -> None:
    """Write the manifest, last of all: a folder with one is finished."""
    hashes = [entry["xxh3"] for split_stats in splits.values() for entry in shard_files(split_stats).values()]
    fingerprint = xxhash.xxh3_128_hexdigest("\n".join([str(layout.sequence_length), *hashes]).encode())
    manifest = {
        "format": MANIFEST_VERSION,
        "sequence_length": layout.sequence_length,
        "dtype": layout.dtype.name,
        "vocab_size": layout.vocab_size,
        "fingerprint": fingerprint,
        **extra,
        "splits": splits,
    }
    write_json(folder / MANIFEST, manifest)


WRITE_CHUNK_TOKENS = 1 << 18
"""Tokens written at once: they stay in the cache from one use to the next."""


@dataclass(frozen=True)
class DocumentBatch:
    """Documents that are loaded when their turn comes."""

    tokens: int
    """How many they hold, known before they are loaded."""
    load: Callable[[], TokenizedDocuments]
    """Brings them."""


@dataclass
class _ShardBuffer:
    """The shard that is being filled: views of what will be written, not a copy."""

    pieces: list[NDArray] = field(default_factory=list)
    starts: list[NDArray] = field(default_factory=list)
    filled: int = 0
    text_bytes: int = 0


def write_split(
    folder: Path, split: str, layout: ShardLayout, sources: dict[str, Iterable[DocumentBatch]], config: str
) -> dict[str, Any]:
    """Pack the blocks of each source, in order, and return the facts of the part.

    A source begins on a fresh row, so that rows can be mixed by weight; what is left of its last row is lost and
    counted. Shards written before for the same `config` are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stats = empty_split_stats()
    progress = folder / f".{split}.progress.json"
    written = _completed_shards(progress, config, folder)
    for name, batches in sources.items():
        source_shards = [shard for shard in written if shard["source"] == name]
        shards = list(stats["shards"])
        for shard in _pack_source(
            folder, split, layout, _SourceProgress(name, batches, source_shards, len(shards)), stats
        ):
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
    """One source, and what is already on the disk of it."""

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
    """Take tokens from a place on until the shard is full or the block ends; returns the new place."""
    count = min(capacity - buffer.filled, len(documents.tokens) - offset)
    buffer.pieces.append(documents.tokens[offset : offset + count])
    document_offsets = np.concatenate([[0], np.cumsum(documents.lengths)])
    first, stop = np.searchsorted(document_offsets[:-1], [offset, offset + count])
    buffer.starts.append(document_offsets[first:stop] - offset + buffer.filled)
    buffer.text_bytes += _bytes_before(documents, document_offsets, offset + count) - _bytes_before(
        documents, document_offsets, offset
    )
    buffer.filled += count
    return offset + count


def _bytes_before(documents: TokenizedDocuments, document_offsets: NDArray, offset: int) -> int:
    """Bytes of text before a place; inside a document they are shared out evenly over its tokens."""
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
    """Write flat pieces one after the other as an array of that shape; what is too much is left. Returns size and hash.

    Each stretch is narrowed, hashed and written while it is in the cache: no second copy of the shard is ever made.
    """
    header = io.BytesIO()
    header_fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, header_fields)
    digest, remaining = xxhash.xxh3_128(header.getvalue()), math.prod(shape)
    buffer = np.empty(WRITE_CHUNK_TOKENS, dtype=dtype)  # one for all: a fresh one each time would cost a third more
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
    """Write without a buffer between, however often the system takes only a part."""
    while data:
        data = data[os.write(descriptor, data) :]


def _completed_shards(progress: Path, config: str, folder: Path) -> list[dict[str, Any]]:
    """Shards that an earlier try finished for the same wish and that still are as it left them."""
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
"""Documents tokenized together."""


def pack_raw_text(
    data: DataConfig, seed: int, recipe_dir: Path, tokenizer: DocumentTokenizer, layout: ShardLayout, folder: Path
) -> None:
    """Leave the shards of a recipe's text in the folder; those that stand already for the same text are kept."""
    documents = _SplitDocuments(data, seed, recipe_dir)
    config = xxhash.xxh3_128_hexdigest(
        json.dumps([tokenizer.fingerprint, layout.sequence_length, documents.fingerprint]).encode()
    )
    if (folder / MANIFEST).exists() and read_json(folder / MANIFEST).get("config") == config:
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    splits = {
        split: write_split(
            folder, split, layout, {data.source: _document_batches(split_texts, tokenizer)}, f"{split} {config}"
        )
        for split, split_texts in documents.splits()
    }
    if not splits["train"]["rows"]:
        message = f"all text together is shorter than one row of {layout.sequence_length} tokens; lower max_length"
        raise DataError([Problem(data.source, message)])
    write_manifest(
        folder, layout, splits, {"tokenizer": tokenizer.fingerprint, "config": config, "source": data.source}
    )


class _SplitDocuments:
    """The documents of a recipe, to be read more than once: to train on, and held out by a hash of seed and text."""

    def __init__(self, data: DataConfig, seed: int, recipe_dir: Path) -> None:
        self._data, self._seed, self._recipe_dir = data, seed, recipe_dir
        hashes, digest = array("Q"), xxhash.xxh3_128()
        for text in self._train():
            hashes.append(self._split_hash(text))
            digest.update(text.encode() + b"\0")
        if not hashes:
            raise DataError([Problem(data.source, "there is no text in it")])
        distinct = np.unique(np.frombuffer(hashes, dtype=np.uint64))
        count = 0 if data.validation_file else min(data.test_size.resolve(len(distinct)), len(distinct) - 1)
        self._held_out_limit = int(distinct[count - 1]) if count else -1
        for text in self._validation():
            digest.update(text.encode() + b"\1")
        self.fingerprint = f"{digest.hexdigest()} {self._held_out_limit}"

    def splits(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Those to train on; then those held out, where there are some."""
        yield "train", (text for text in self._train() if self._split_hash(text) > self._held_out_limit)
        if self._held_out_limit >= 0 or self._data.validation_file:
            held_out = (text for text in self._train() if self._split_hash(text) <= self._held_out_limit)
            yield "held_out", chain(held_out, self._validation())

    def _train(self) -> Iterator[str]:
        return iter_documents(
            raise_on_invalid_rows(iter_train_rows(self._data, self._recipe_dir)), self._data.text_column
        )

    def _validation(self) -> Iterator[str]:
        return iter_documents(
            raise_on_invalid_rows(iter_validation_rows(self._data, self._recipe_dir)), self._data.text_column
        )

    def _split_hash(self, text: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed}:{text}".encode())


def check_raw_text(data: DataConfig, seed: int, recipe_dir: Path) -> None:
    """Tell what is wrong with the first documents of both sides; all of them may be more than one wants to wait for."""
    path = local_path(data.source, recipe_dir)
    if path is not None and (path / MANIFEST).exists():
        return  # packed shards, which a run reads back
    for rows in (iter_train_rows(data, recipe_dir), iter_validation_rows(data, recipe_dir)):
        list(iter_documents(raise_on_invalid_rows(islice(rows, DOCUMENT_BATCH)), data.text_column))


def iter_documents(rows: Iterable[Row], column: str) -> Iterator[str]:
    """The documents in the text column of rows; blank ones are passed over, and faults are raised at the end.

    Each kind of fault is told once, where it is met first: a column of another name is so in every row.
    """
    first_locations: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        text = get_text(row, column)
        if isinstance(text, InvalidRow):
            if text.reason in first_locations or len(first_locations) < 20:
                first_locations.setdefault(text.reason, text.where)
                counts[text.reason] += 1
        elif text.strip() and not first_locations:
            yield text
    if first_locations:
        suffixes = {
            reason: f" ({counts[reason]:,} rows like it)" if counts[reason] > 1 else "" for reason in first_locations
        }
        raise DataError([Problem(where, f"{reason}{suffixes[reason]}") for reason, where in first_locations.items()])


def _document_batches(texts: Iterator[str], tokenizer: DocumentTokenizer) -> Iterator[DocumentBatch]:
    while batch := list(islice(texts, DOCUMENT_BATCH)):
        tokenized = tokenizer.encode_batch(batch)
        yield DocumentBatch(len(tokenized.tokens), lambda tokenized=tokenized: tokenized)  # type: ignore[misc]
