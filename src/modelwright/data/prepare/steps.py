"""Tasks that workers run: clean a slice, deduplicate a band, tokenize a slice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.data import sources
from modelwright.data.prepare import dedup
from modelwright.data.prepare.clean import CleanedDocument, FilterResult, clean_document, duplicate_ngram_fraction
from modelwright.data.prepare.dedup import NDArray, WordHashes, has_ngram_overlap
from modelwright.data.prepare.job import PrepareJob, TaskStore, save_array, save_stats
from modelwright.data.readers import QUARANTINE_FILE, InvalidRow, Row, describe_columns, get_text, to_jsonl, utf8_size
from modelwright.data.shards import ShardLayout
from modelwright.data.tokenizer import DocumentTokenizer, TokenizedDocuments
from modelwright.errors import DataError, Problem

BATCH_BYTES = 4 << 20
"""Text held at once."""
EXAMPLES_PER_FILTER = 3
"""Documents shown for each rule."""
TRAIN, HELD_OUT, EXACT_DUPLICATE, NEAR_DUPLICATE = range(4)
"""What becomes of a document."""


def run_task(job: PrepareJob, step: str, number: int) -> None:
    """Do one piece, unless it is done."""
    if job.store.is_done(step, number):
        return
    tasks = {job.clean_key: clean_slice, job.dedup_key: dedup_band, job.tokenize_key: tokenize_slice}
    with job.store.write_task(step, number) as folder:
        tasks[step](job, number, folder)


@dataclass
class _CleaningStats:
    """What is counted while a unit is cleaned."""

    rows: int = 0
    invalid_rows: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    documents: int = 0
    lines_dropped: int = 0
    filters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def count_dropped(self, where: str, text: str, result: FilterResult) -> None:
        """Count a document that goes, and keep the first few as examples."""
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
    """Clean the documents of a unit, and keep with each its hash, its signature and its bands."""
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
            columns = {
                "where": [document.where for document in documents],
                "text": [document.text for document in documents],
            }
            writer.write_table(pyarrow.table(columns, schema=schema))
    for name, array in signatures.arrays().items():
        save_array(folder, name, array)
    save_stats(folder, vars(stats))


def _iter_cleaned(job: PrepareJob, number: int, stats: _CleaningStats, quarantine: Any) -> Iterator[_Document]:
    """Documents that pass the rules for one document alone; bad rows go to the quarantine."""
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
    """The text of a row, or what is wrong with it."""
    if isinstance(item, InvalidRow):
        return item
    text, split_by = get_text(item, job.data.text_column), job.data.split_by
    if isinstance(text, InvalidRow):
        return text
    if split_by and split_by not in item.values:
        return InvalidRow(item.where, f"there is no column {split_by!r}; {describe_columns(item)}")
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
    """Arrays that grow batch by batch."""

    hashes: list[NDArray] = field(default_factory=list)
    groups: list[NDArray] = field(default_factory=list)
    signatures: list[NDArray] = field(default_factory=list)

    def arrays(self) -> dict[str, NDArray]:
        """All of them, with the band keys beside."""
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
    """Hash a batch, leave out what repeats itself or is asked in an examination, and keep the signatures."""
    texts = [document.text for document in batch]
    word_batches = list(dedup.hash_words(texts))
    ngrams = dedup.concat_shingles([word_batch.shingles(dedup.NGRAM_SIZE) for word_batch in word_batches])
    duplicate_fraction = duplicate_ngram_fraction(ngrams)
    contaminated = benchmark.contaminated(word_batches) if benchmark else np.zeros(len(batch), dtype=np.bool_)
    limit = job.settings.max_repeated_ngrams
    passed = (duplicate_fraction <= limit) & ~contaminated
    for index in np.flatnonzero(~passed):
        ngram = job.settings.decontaminate_ngram
        result = FilterResult("decontaminate", f"a run of {ngram} words") if contaminated[index] else FilterResult(
            "max_repeated_ngrams", round(float(duplicate_fraction[index]), 3))  # fmt: skip
        stats.count_dropped(batch[index].where, batch[index].text, result)
    remaining = [batch[index] for index in np.flatnonzero(passed)]
    device = job.settings.minhash_device
    signature = dedup.compute_signatures(device, ngrams) if job.settings.minhash_dedup else np.full(
        (len(batch), dedup.NUM_HASHES), dedup.EMPTY_HASH)  # fmt: skip
    raw = [document.text.encode() for document in remaining]
    digests = b"".join(xxhash.xxh3_128_digest(text) for text in raw)
    signatures.hashes.append(np.frombuffer(digests, dtype="<u8").reshape(-1, 2))
    groups = [
        document.split_key.encode() if job.data.split_by else text
        for document, text in zip(remaining, raw, strict=True)
    ]
    # chance of each group to be held out: the seed and the words decide, never the place
    signatures.groups.append(np.array([xxhash.xxh3_64_intdigest(group, job.seed) for group in groups], dtype=np.uint64))
    signatures.signatures.append(signature[passed])
    stats.documents += len(remaining)
    stats.bytes_out += sum(map(len, raw))
    return remaining


def dedup_band(job: PrepareJob, band: int, folder: Path) -> None:
    """Verified near-duplicates within one band."""
    keys = np.concatenate(
        [job.store.load_array(job.clean_key, index, "bands")[band] for index in range(len(job.slices))]
    )
    first = np.array(job.store.load_array(f"exact_dedup-{job.clean_key}", 0, "first"))
    eligible = first == np.arange(len(first))
    pairs = dedup.verified_band_pairs(keys, eligible, signature_loader(job), job.settings.jaccard_threshold)
    save_pairs(folder, pairs)


def save_pairs(folder: Path, pairs: NDArray) -> None:
    """Write the pairs of a band, sorted: the same bytes however they were found."""
    save_array(folder, "pairs", pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])
    save_stats(folder, {"pairs": len(pairs)})


def slice_offsets(job: PrepareJob) -> NDArray:
    """Where the documents of each unit begin, and the end of the last: [units + 1] int64."""
    counts = [len(job.store.load_array(job.clean_key, index, "hashes")) for index in range(len(job.slices))]
    return np.cumsum([0, *counts])


def signature_loader(job: PrepareJob) -> dedup.SignatureLoader:
    """Brings signatures by document number from the pieces on the disk."""
    stored = [job.store.load_array(job.clean_key, index, "signatures") for index in range(len(job.slices))]
    offsets = slice_offsets(job)

    def load(documents: NDArray) -> NDArray:
        rows = np.empty((len(documents), dedup.NUM_HASHES), dtype=np.uint32)
        slice_indices = np.searchsorted(offsets, documents, side="right") - 1
        for index in np.unique(slice_indices):
            mask = slice_indices == index
            rows[mask] = stored[index][documents[mask] - offsets[index]]
        return rows

    return load


def tokenize_slice(job: PrepareJob, number: int, folder: Path) -> None:
    """Tokenize the documents of a unit that were kept, each side by itself."""
    decisions = job.store.load_array(job.assign_splits_key, 0, "decisions")
    offsets = job.store.load_array(job.assign_splits_key, 0, "offsets")
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
    """Where the tokenizer lies: trained in the work folder, or as the plan names it."""
    return Path(job.tokenizer) if job.tokenizer else job.store.task_dir(job.tokenizer_key)


def iter_texts(store: TaskStore, step: str, number: int, wanted: NDArray) -> Iterator[list[str]]:
    """Texts of a cleaned unit, some megabytes at a time; wanted: [documents] bool."""
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
"""Words below which an evaluation text says too little to be looked for."""


@dataclass(frozen=True)
class BenchmarkNgrams:
    """What is asked, by the number of words in a run."""

    ngrams: dict[int, NDArray]
    """Sorted hashes of all runs of so many words: [count] uint32."""

    def contaminated(self, word_batches: Sequence[WordHashes]) -> NDArray:
        """Whether each document holds a run of words that is asked: [documents] bool."""
        overlaps = [has_ngram_overlap(dedup.concat_shingles([word_batch.shingles(size) for word_batch in word_batches]), hashes)
                 for size, hashes in self.ngrams.items()]  # fmt: skip
        return (
            np.logical_or.reduce(overlaps)
            if overlaps
            else np.zeros(sum(len(word_batch.offsets) - 1 for word_batch in word_batches), np.bool_)
        )

    @classmethod
    def read(cls, store: TaskStore, step: str) -> Self:
        """As it was written for the workers."""
        sizes = store.read_stats(f"benchmark_ngrams-{step}")["sizes"]
        return cls(
            {int(size): np.array(store.load_array(f"benchmark_ngrams-{step}", 0, f"ngrams-{size}")) for size in sizes}
        )


def write_benchmark_ngrams(
    store: TaskStore, step: str, names: Iterable[str], ngram: int, recipe_dir: Path
) -> dict[str, Any]:
    """Read evaluation sets, every text in every column, and write their runs for the workers."""
    name = f"benchmark_ngrams-{step}"
    if not store.is_done(name):
        texts: list[str] = []
        skipped = 0
        for source in names:
            for item in sources.iter_rows(source, None, recipe_dir):
                if not isinstance(item, InvalidRow):
                    texts += _iter_strings(item.values)
        ngrams: dict[int, list[NDArray]] = {}
        for word_batch in dedup.hash_words(texts):
            counts = np.diff(word_batch.offsets)
            skipped += int((counts < MIN_NGRAM_WORDS).sum())
            for size in sorted({*counts[(counts >= MIN_NGRAM_WORDS) & (counts < ngram)].tolist(), ngram}):
                shingle_batch = word_batch.shingles(size)
                exact = shingle_batch.counts > 0 if size == ngram else counts == size
                ngrams.setdefault(int(size), []).append(shingle_batch.hashes[np.repeat(exact, shingle_batch.counts)])
        with store.write_task(name) as folder:
            for size, hash_arrays in ngrams.items():
                save_array(folder, f"ngrams-{size}", np.unique(np.concatenate(hash_arrays)))
            save_stats(folder, {"sizes": sorted(ngrams), "texts": len(texts), "too_short": skipped})
    return store.read_stats(name)


def _iter_strings(values: Any) -> Iterable[str]:
    """Every text in a value, however deep."""
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
    """The same tokens, some thirty times as fast."""

    gigatoken_tokenizer: Any = None
    """gigatoken's tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> TokenizedDocuments:
        """Tokens of each text with its end token."""
        encoded = self.gigatoken_tokenizer.encode_batch(list(texts), parallel=False)
        return _append_eos(encoded, self.eos_token_id, texts)


def _append_eos(encoded: Any, eos_token_id: int, texts: Sequence[str]) -> TokenizedDocuments:
    """An awkward array of documents as one flat array, an end token after each."""
    import awkward

    counts = np.asarray(awkward.num(encoded, axis=1), dtype=np.int64)
    lengths = counts + 1
    tokens = np.full(int(lengths.sum()), eos_token_id, dtype=np.uint32)
    inside = np.ones(len(tokens), dtype=np.bool_)
    inside[np.cumsum(lengths) - 1] = False
    tokens[inside] = np.asarray(awkward.flatten(encoded, axis=1))
    return TokenizedDocuments(tokens, lengths, np.array([len(text.encode()) for text in texts], dtype=np.int64))


def load_gigatoken(folder: Path) -> GigatokenTokenizer | None:
    """gigatoken's form of a tokenizer, where it is installed and takes it."""
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
    except Exception:  # whatever it does not know, the tokenizers library does
        return None
    return GigatokenTokenizer(tokenizer.tokenizer, tokenizer.eos_token_id, tokenizer.fingerprint, gigatoken_tokenizer)


def select_backend(folder: Path, samples: Sequence[str], wanted: bool, store: TaskStore, step: str) -> dict[str, Any]:
    """Decide once which tokenizer encodes, and write it down for the workers."""
    name = f"tokenizer_backend-{step}"
    if not store.is_done(name):
        with store.write_task(name) as task_dir:
            save_stats(task_dir, _check_backend(folder, samples, wanted))
    return store.read_stats(name)


def _check_backend(folder: Path, samples: Sequence[str], wanted: bool) -> dict[str, Any]:
    verdict = {"backend": "tokenizers", "tokenizers": version("tokenizers"), "checked": 0}
    if not wanted:
        return {**verdict, "reason": "use_gigatoken is false"}
    gigatoken_tokenizer = load_gigatoken(folder)
    if gigatoken_tokenizer is None:
        return {**verdict, "reason": f"{GIGATOKEN} is not installed (pip install 'modelwright[fast]') or knows it not"}
    try:
        expected, actual = (
            DocumentTokenizer.open(folder).encode_batch(samples),
            gigatoken_tokenizer.encode_batch(samples),
        )
    except Exception as error:
        return {**verdict, "reason": f"{GIGATOKEN} failed on this text ({type(error).__name__})"}
    if not np.array_equal(expected.lengths, actual.lengths) or not np.array_equal(expected.tokens, actual.tokens):
        return {**verdict, "checked": len(samples), "reason": f"{GIGATOKEN} gives other tokens for this text"}
    reason = f"same tokens for {len(samples)} sample documents"
    return {**verdict, "backend": GIGATOKEN, GIGATOKEN: version(GIGATOKEN), "checked": len(samples), "reason": reason}


def open_selected_tokenizer(folder: Path, store: TaskStore, step: str) -> DocumentTokenizer:
    """The tokenizer that was chosen; where gigatoken is not at hand, the library whose tokens are the same."""
    selected = store.read_stats(f"tokenizer_backend-{step}")
    gigatoken_tokenizer = (
        load_gigatoken(folder) if selected["backend"] == GIGATOKEN and _same_version_installed(selected) else None
    )
    return gigatoken_tokenizer or DocumentTokenizer.open(folder)


def _same_version_installed(selected: dict[str, Any]) -> bool:
    try:
        return bool(version(GIGATOKEN) == selected[GIGATOKEN])
    except PackageNotFoundError:
        return False
