"""Tasks that workers run: clean a slice, deduplicate a band, tokenize a slice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.data import sources
from modelwright.data.packing import NDArray
from modelwright.data.prepare import dedup
from modelwright.data.prepare.clean import CleanedDocument, FilterResult, clean_document, duplicate_ngram_fraction
from modelwright.data.prepare.dedup import WordHashes, has_ngram_overlap
from modelwright.data.prepare.job import PrepareJob, TaskStore, save_array, save_stats
from modelwright.data.readers import QUARANTINE_FILE, InvalidRow, Row, describe_columns, get_text, to_jsonl, utf8_size
from modelwright.data.shards import ShardLayout
from modelwright.data.tokenizer import DocumentTokenizer, TokenizedDocuments, concat_with_eos
from modelwright.errors import DataError, Problem

BATCH_BYTES = 4 << 20
"""Bytes of text in memory at once."""
EXAMPLES_PER_FILTER = 3
"""Examples per filter in the report."""
TRAIN, HELD_OUT, EXACT_DUPLICATE, NEAR_DUPLICATE = range(4)
"""Decisions on a document."""


def run_task(job: PrepareJob, step: str, number: int) -> None:
    """Run one task unless it is finished."""
    if job.store.is_done(step, number):
        return
    tasks = {job.clean_key: clean_slice, job.dedup_key: dedup_band, job.tokenize_key: tokenize_slice}
    with job.store.write_task(step, number) as folder:
        tasks[step](job, number, folder)


@dataclass
class _CleaningStats:
    """Counts of cleaning one slice."""

    rows: int = 0
    invalid_rows: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    documents: int = 0
    lines_dropped: int = 0
    filters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def count_dropped(self, where: str, text: str, result: FilterResult) -> None:
        """Count a dropped document, and keep the first ones as examples."""
        entry = self.filters.setdefault(result.filter, {"documents": 0, "bytes": 0, "examples": []})
        entry["documents"] += 1
        entry["bytes"] += len(text.encode("utf-8", "replace"))
        if len(entry["examples"]) < EXAMPLES_PER_FILTER:
            entry["examples"].append({"where": where, "value": result.value, "text": " ".join(text.split())[:120]})


@dataclass(frozen=True)
class _Document:
    where: str
    text: str
    split_key: str
    size: int = 0


def clean_slice(job: PrepareJob, number: int, folder: Path) -> None:
    """Clean the documents of a slice, and save their hashes, signatures and band keys."""
    import pyarrow
    import pyarrow.parquet

    stats, signatures = _CleaningStats(), _Signatures()
    benchmark = BenchmarkNgrams.read(job.store, job.clean_key) if job.settings.decontaminate_against else None
    schema = pyarrow.schema([("where", pyarrow.string()), ("text", pyarrow.string())])
    with (
        pyarrow.parquet.ParquetWriter(folder / "documents.parquet", schema, compression="lz4") as writer,
        (folder / QUARANTINE_FILE).open("w", encoding="utf-8") as quarantine,
    ):
        for batch in _batches(_iter_cleaned(job, number, stats, quarantine)):
            documents = _filter_and_sign(job, batch, stats, signatures, benchmark)
            columns = {name: [getattr(document, name) for document in documents] for name in ("where", "text")}
            writer.write_table(pyarrow.table(columns, schema=schema))
    for name, array in signatures.arrays().items():
        save_array(folder, name, array)
    save_stats(folder, vars(stats))


def _iter_cleaned(job: PrepareJob, number: int, stats: _CleaningStats, quarantine: Any) -> Iterator[_Document]:
    """Documents that pass the filters on single documents; invalid rows go to the quarantine."""
    for item in job.slices[number].rows(job.data, job.recipe_dir):
        stats.rows += 1
        row = _parse_document(item, job)
        if isinstance(row, InvalidRow):
            if row.file_unreadable:
                raise DataError([Problem(row.where, row.reason)])
            stats.invalid_rows += 1
            quarantine.write(to_jsonl(row))
            continue
        stats.bytes_in += row.size
        cleaned: CleanedDocument = clean_document(row.text, job.settings)
        stats.lines_dropped += cleaned.lines_dropped
        if cleaned.dropped_by:
            stats.count_dropped(row.where, row.text, cleaned.dropped_by)
        else:
            yield _Document(row.where, cleaned.text, row.split_key)


def _parse_document(item: Row | InvalidRow, job: PrepareJob) -> _Document | InvalidRow:
    """The document of a row, or the reason why it is invalid."""
    if isinstance(item, InvalidRow):
        return item
    text, split_by = get_text(item, job.data.text_column), job.data.split_by
    if isinstance(text, InvalidRow):
        return text
    if split_by and split_by not in item.values:
        return InvalidRow(item.where, f"there is no column {split_by!r}; {describe_columns(item.values)}")
    size = utf8_size(text)
    assert size is not None
    return _Document(item.where, text, str(item.values[split_by]) if split_by else "", size)


def _batches(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
    batch: list[_Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass
class _Signatures:
    """Hashes and signatures, batch by batch."""

    hashes: list[NDArray] = field(default_factory=list)
    groups: list[NDArray] = field(default_factory=list)
    signatures: list[NDArray] = field(default_factory=list)

    def arrays(self) -> dict[str, NDArray]:
        """All batches concatenated, and the band keys."""
        signature = np.concatenate(self.signatures or [np.zeros((0, dedup.NUM_HASHES), dtype=np.uint32)])
        return {
            "hashes": np.concatenate(self.hashes or [np.zeros((0, 2), dtype=np.uint64)]),
            "groups": np.concatenate(self.groups or [np.zeros(0, dtype=np.uint64)]),
            "signatures": signature,
            "bands": dedup.band_keys(signature),
        }


def _filter_and_sign(
    job: PrepareJob,
    batch: list[_Document],
    stats: _CleaningStats,
    signatures: _Signatures,
    benchmark: BenchmarkNgrams | None,
) -> list[_Document]:
    """Hash a batch, drop repetitive and contaminated documents, and keep the signatures of the rest."""
    texts = [document.text for document in batch]
    word_batches = list(dedup.hash_words(texts))
    ngrams = dedup.concat_shingles([word_batch.shingles(dedup.NGRAM_SIZE) for word_batch in word_batches])
    duplicate_fraction = duplicate_ngram_fraction(ngrams)
    contaminated = benchmark.contaminated(word_batches) if benchmark else np.zeros(len(batch), dtype=np.bool_)
    passed = (duplicate_fraction <= job.settings.max_repeated_ngrams) & ~contaminated
    for index in np.flatnonzero(~passed):
        result = FilterResult("max_repeated_ngrams", round(float(duplicate_fraction[index]), 3))
        if contaminated[index]:
            result = FilterResult("decontaminate", f"a run of {job.settings.decontaminate_ngram} words")
        stats.count_dropped(batch[index].where, batch[index].text, result)
    remaining = [batch[index] for index in np.flatnonzero(passed)]
    if job.settings.minhash_dedup:
        signature = dedup.compute_signatures(job.settings.minhash_device, ngrams)
    else:
        signature = np.full((len(batch), dedup.NUM_HASHES), dedup.EMPTY_HASH)
    raw = [document.text.encode() for document in remaining]
    digests = b"".join(xxhash.xxh3_128_digest(text) for text in raw)
    signatures.hashes.append(np.frombuffer(digests, dtype="<u8").reshape(-1, 2))
    groups = [document.split_key.encode() for document in remaining] if job.data.split_by else raw
    # a document is held out by the hash of seed and text, whatever its position
    signatures.groups.append(np.array([xxhash.xxh3_64_intdigest(group, job.seed) for group in groups], dtype=np.uint64))
    signatures.signatures.append(signature[passed])
    stats.documents += len(remaining)
    stats.bytes_out += sum(map(len, raw))
    return remaining


def dedup_band(job: PrepareJob, band: int, folder: Path) -> None:
    """Find the verified near-duplicates within one band."""
    keys = np.concatenate([bands[band] for bands in job.cleaned_arrays("bands")])
    first = np.array(job.store.load_array(f"exact_dedup-{job.clean_key}", 0, "first"))
    eligible = first == np.arange(len(first))
    threshold = job.settings.jaccard_threshold
    save_pairs(folder, dedup.verified_band_pairs(keys, eligible, signature_loader(job), threshold))


def save_pairs(folder: Path, pairs: NDArray) -> None:
    """Write the pairs of a band, sorted, so that every executor writes the same bytes."""
    save_array(folder, "pairs", pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])
    save_stats(folder, {"pairs": len(pairs)})


def slice_offsets(job: PrepareJob) -> NDArray:
    """First document of each slice, and the end: [slices + 1] int64."""
    return np.cumsum([0, *map(len, job.cleaned_arrays("hashes"))])


def signature_loader(job: PrepareJob) -> dedup.SignatureLoader:
    """A function that loads signatures by document index from the store."""
    stored, offsets = job.cleaned_arrays("signatures"), slice_offsets(job)

    def load(documents: NDArray) -> NDArray:
        rows = np.empty((len(documents), dedup.NUM_HASHES), dtype=np.uint32)
        slice_indices = np.searchsorted(offsets, documents, side="right") - 1
        for index in np.unique(slice_indices):
            mask = slice_indices == index
            rows[mask] = stored[index][documents[mask] - offsets[index]]
        return rows

    return load


def load_decisions(job: PrepareJob) -> tuple[NDArray, NDArray]:
    """The decision on each document, and the slice offsets."""
    decisions, offsets = (job.store.load_array(job.assign_splits_key, 0, name) for name in ("decisions", "offsets"))
    return np.asarray(decisions), offsets


def tokenize_slice(job: PrepareJob, number: int, folder: Path) -> None:
    """Tokenize the documents of a slice, separately for train and held_out."""
    decisions, offsets = load_decisions(job)
    slice_decisions = np.array(decisions[offsets[number] : offsets[number + 1]])
    tokenizer = open_selected_tokenizer(tokenizer_dir(job), job.store, job.tokenize_key)
    dtype = ShardLayout(1, tokenizer.vocab_size).dtype
    stats: dict[str, Any] = {}
    for split, decision in (("train", TRAIN), ("held_out", HELD_OUT)):
        tokens, lengths, text_bytes = [], [], []
        for texts in iter_texts(job.store, job.clean_key, number, slice_decisions == decision):
            tokenized = tokenizer.encode_batch(texts)
            tokens.append(tokenized.tokens.astype(dtype))
            lengths.append(tokenized.lengths)
            text_bytes.append(tokenized.text_bytes)
        empty = np.zeros(0, dtype=np.int64)
        save_array(folder, f"{split}.tokens", np.concatenate(tokens or [empty.astype(dtype)]))
        save_array(folder, f"{split}.lengths", np.concatenate(lengths or [empty]))
        save_array(folder, f"{split}.bytes", np.concatenate(text_bytes or [empty]))
        stats[split] = {"tokens": int(sum(map(len, tokens))), "documents": int(sum(map(len, lengths)))}
    save_stats(folder, stats)


def tokenizer_dir(job: PrepareJob) -> Path:
    """Folder of the tokenizer: trained by this job, or given."""
    return Path(job.tokenizer) if job.tokenizer else job.store.task_dir(job.tokenizer_key)


def iter_texts(store: TaskStore, step: str, number: int, wanted: NDArray) -> Iterator[list[str]]:
    """Texts of a cleaned slice, a few megabytes at a time; wanted: [documents] bool."""
    import pyarrow.parquet

    start = 0
    with pyarrow.parquet.ParquetFile(store.task_dir(step, number) / "documents.parquet") as file:
        for group in range(file.metadata.num_row_groups):
            column = file.read_row_group(group, columns=["text"]).column("text")
            chosen = column.filter(wanted[start : start + len(column)])
            start += len(column)
            if len(chosen):
                yield chosen.to_pylist()


MIN_NGRAM_WORDS = 4
"""Shorter evaluation texts are not searched for."""


@dataclass(frozen=True)
class BenchmarkNgrams:
    """N-gram hashes of the evaluation sets."""

    ngrams: dict[int, NDArray]
    """Sorted hashes by n-gram size: [count] uint32."""

    def contaminated(self, word_batches: Sequence[WordHashes]) -> NDArray:
        """Whether each document shares an n-gram with an evaluation set: [documents] bool."""
        result = np.zeros(sum(len(word_batch.offsets) - 1 for word_batch in word_batches), np.bool_)
        for size, hashes in self.ngrams.items():
            ngrams = dedup.concat_shingles([word_batch.shingles(size) for word_batch in word_batches])
            result |= has_ngram_overlap(ngrams, hashes)
        return result

    @classmethod
    def read(cls, store: TaskStore, step: str) -> Self:
        """Read what write_benchmark_ngrams wrote."""
        name = f"benchmark_ngrams-{step}"
        sizes = store.read_stats(name)["sizes"]
        return cls({int(size): np.array(store.load_array(name, 0, f"ngrams-{size}")) for size in sizes})


def write_benchmark_ngrams(job: PrepareJob) -> None:
    """Read the evaluation sets, all strings of all columns, and write their n-gram hashes for the workers."""
    name, ngram = f"benchmark_ngrams-{job.clean_key}", job.settings.decontaminate_ngram
    if job.store.is_done(name):
        return
    texts: list[str] = []
    for source in job.settings.decontaminate_against:
        for item in sources.iter_rows(source, None, job.recipe_dir):
            if not isinstance(item, InvalidRow):
                texts += _iter_strings(item.values)
    ngrams: dict[int, list[NDArray]] = {}
    skipped = 0
    for word_batch in dedup.hash_words(texts):
        counts = np.diff(word_batch.offsets)
        skipped += int((counts < MIN_NGRAM_WORDS).sum())
        for size in sorted({*counts[(counts >= MIN_NGRAM_WORDS) & (counts < ngram)].tolist(), ngram}):
            shingle_batch = word_batch.shingles(size)
            exact = shingle_batch.counts > 0 if size == ngram else counts == size
            ngrams.setdefault(int(size), []).append(shingle_batch.hashes[np.repeat(exact, shingle_batch.counts)])
    with job.store.write_task(name) as folder:
        for size, hash_arrays in ngrams.items():
            save_array(folder, f"ngrams-{size}", np.unique(np.concatenate(hash_arrays)))
        save_stats(folder, {"sizes": sorted(ngrams), "texts": len(texts), "too_short": skipped})


def _iter_strings(values: Any) -> Iterable[str]:
    """All strings in a nested value."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _iter_strings(value)
    elif isinstance(values, list):
        for value in values:
            yield from _iter_strings(value)


GIGATOKEN = "gigatoken"


@dataclass(frozen=True)
class GigatokenTokenizer(DocumentTokenizer):
    """The same tokens by gigatoken: 89 instead of 1.4 MB per CPU-second."""

    gigatoken_tokenizer: Any = None
    """A `gigatoken.Tokenizer`."""

    def encode_batch(self, texts: Sequence[str]) -> TokenizedDocuments:
        """Token ids of each text, followed by EOS."""
        import awkward

        encoded = self.gigatoken_tokenizer.encode_batch(list(texts), parallel=False)
        counts = np.asarray(awkward.num(encoded, axis=1), dtype=np.int64)
        return concat_with_eos(np.asarray(awkward.flatten(encoded, axis=1)), counts, self.eos_token_id, texts)


def load_gigatoken(folder: Path) -> GigatokenTokenizer | None:
    """The gigatoken form of a tokenizer; None if gigatoken is not installed or does not support it."""
    try:
        import gigatoken
    except ImportError:
        return None
    tokenizer = DocumentTokenizer.open(folder)
    config = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config["added_tokens"] = [token for token in config.get("added_tokens", []) if not token.get("special")]
    config["post_processor"] = None
    try:
        gigatoken_tokenizer = gigatoken.Tokenizer.from_json(json.dumps(config))
    except Exception:  # fall back to the tokenizers library
        return None
    return GigatokenTokenizer(tokenizer.tokenizer, tokenizer.eos_token_id, tokenizer.fingerprint, gigatoken_tokenizer)


def select_backend(job: PrepareJob, samples: Sequence[str]) -> None:
    """Select the tokenizer library once, and write the choice for the workers."""
    with job.store.write_task(f"tokenizer_backend-{job.tokenize_key}") as folder:
        save_stats(folder, _check_backend(tokenizer_dir(job), samples, job.settings.use_gigatoken))


def _check_backend(folder: Path, samples: Sequence[str], wanted: bool) -> dict[str, Any]:
    verdict = {"backend": "tokenizers", "tokenizers": version("tokenizers"), "checked": 0}
    if not wanted:
        return {**verdict, "reason": "use_gigatoken is false"}
    gigatoken_tokenizer = load_gigatoken(folder)
    if gigatoken_tokenizer is None:
        return {**verdict, "reason": f"{GIGATOKEN} is not installed (pip install 'modelwright[fast]') or knows it not"}
    expected = DocumentTokenizer.open(folder).encode_batch(samples)
    try:
        actual = gigatoken_tokenizer.encode_batch(samples)
    except Exception as error:
        return {**verdict, "reason": f"{GIGATOKEN} failed on this text ({type(error).__name__})"}
    if not np.array_equal(expected.lengths, actual.lengths) or not np.array_equal(expected.tokens, actual.tokens):
        return {**verdict, "checked": len(samples), "reason": f"{GIGATOKEN} gives other tokens for this text"}
    reason = f"same tokens for {len(samples)} sample documents"
    return {**verdict, "backend": GIGATOKEN, GIGATOKEN: version(GIGATOKEN), "checked": len(samples), "reason": reason}


def open_selected_tokenizer(folder: Path, store: TaskStore, step: str) -> DocumentTokenizer:
    """The selected tokenizer; the tokenizers library if this gigatoken is not installed, with the same tokens."""
    selected = store.read_stats(f"tokenizer_backend-{step}")
    tokenizer: DocumentTokenizer | None = None
    with suppress(PackageNotFoundError):
        if selected["backend"] == GIGATOKEN and version(GIGATOKEN) == selected[GIGATOKEN]:
            tokenizer = load_gigatoken(folder)
    return tokenizer or DocumentTokenizer.open(folder)
