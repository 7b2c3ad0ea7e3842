"""Prepare raw text: clean, deduplicate, decontaminate, tokenize and pack, resumable after a kill."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelwright import __version__
from modelwright.data import tokenizer
from modelwright.data.chat import held_out_count
from modelwright.data.packing import NDArray
from modelwright.data.prepare import dedup, steps
from modelwright.data.prepare.executors import Executor, ProcessExecutor, SerialExecutor
from modelwright.data.prepare.job import PrepareJob, is_complete, save_array, save_stats
from modelwright.data.prepare.steps import EXACT_DUPLICATE, HELD_OUT, NEAR_DUPLICATE, TRAIN, load_decisions
from modelwright.data.readers import QUARANTINE_FILE
from modelwright.data.row_formats import length_histogram
from modelwright.data.shards import MANIFEST, SPLITS, DocumentBatch, ShardLayout, write_manifest, write_split
from modelwright.data.tokenizer import TokenizedDocuments
from modelwright.errors import DataError, Problem
from modelwright.runs.folder import write_json

REPORT_FILE = "report.json"
MIN_DOCS_FOR_PROCESSES = 20_000
"""With fewer documents, near-dedup is faster than starting a process."""
TOKENIZER_CHECK_DOCS = 256
"""Documents on which gigatoken is compared with the tokenizers library."""


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of a step."""

    step: str
    """Name of the step."""
    done: int
    """Finished tasks."""
    total: int
    """All tasks."""


def run_pipeline(job: PrepareJob, executor: Executor) -> Iterator[PrepareProgress]:
    """Run all steps that are not finished, and yield the progress."""
    if is_complete(job):
        executor.run_once(job, lambda: False, lambda: _remove_intermediate(job))
        return
    slices, settings = list(range(len(job.slices))), job.settings
    executor.run_once(job, lambda: _is_initialized(job), lambda: _initialize(job))
    yield from _run_step(executor, job, "clean", job.clean_key, slices)
    executor.run_once(job, lambda: job.store.is_done(f"exact_dedup-{job.clean_key}"), lambda: _exact_dedup(job))
    if settings.minhash_dedup:
        documents = len(job.store.load_array(f"exact_dedup-{job.clean_key}", 0, "first"))
        serial = documents < MIN_DOCS_FOR_PROCESSES and isinstance(executor, ProcessExecutor)
        bands = list(range(dedup.NUM_BANDS))
        yield from _run_step(SerialExecutor() if serial else executor, job, "near-dedup", job.dedup_key, bands)
    yield PrepareProgress("assign splits", 0, 1)
    executor.run_once(job, lambda: job.store.is_done(job.assign_splits_key), lambda: _assign_splits(job))
    if job.tokenizer is None:
        yield PrepareProgress("train the tokenizer", 0, 1)
        executor.run_once(job, lambda: job.store.is_done(job.tokenizer_key), lambda: _train_tokenizer(job))
    backend = f"tokenizer_backend-{job.tokenize_key}"
    executor.run_once(job, lambda: job.store.is_done(backend), lambda: _select_tokenizer(job))
    yield from _run_step(executor, job, "tokenize", job.tokenize_key, slices)
    yield PrepareProgress("pack", 0, 1)
    executor.run_once(job, lambda: is_complete(job), lambda: _pack_shards(job))
    yield PrepareProgress("pack", 1, 1)


def _run_step(
    executor: Executor, job: PrepareJob, name: str, step: str, numbers: list[int]
) -> Iterator[PrepareProgress]:
    done = sum(job.store.is_done(step, number) for number in numbers)
    yield PrepareProgress(name, done, len(numbers))
    for _ in executor.run(job, step, numbers):
        done = sum(job.store.is_done(step, number) for number in numbers)
        yield PrepareProgress(name, done, len(numbers))


def _is_initialized(job: PrepareJob) -> bool:
    """Whether the stored job is this one, with all inputs of the workers."""
    try:
        stored = PrepareJob.read(job.folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    has_ngrams = not job.settings.decontaminate_against or job.store.is_done(f"benchmark_ngrams-{job.clean_key}")
    return stored.config_hash == job.config_hash and has_ngrams and job.store.is_done(f"initialized-{job.config_hash}")


def _initialize(job: PrepareJob) -> None:
    """Write the job, and delete tasks of other settings."""
    keep = {job.clean_key, job.dedup_key, job.assign_splits_key, job.tokenizer_key, job.tokenize_key,
            f"exact_dedup-{job.clean_key}", f"benchmark_ngrams-{job.clean_key}",
            f"tokenizer_backend-{job.tokenize_key}"}  # fmt: skip
    if job.store.folder.is_dir():
        for path in job.store.folder.iterdir():
            if path.is_dir() and path.name not in keep:
                shutil.rmtree(path)
    job.write()
    if job.settings.decontaminate_against:
        steps.write_benchmark_ngrams(job)
    with job.store.write_task(f"initialized-{job.config_hash}") as folder:
        save_stats(folder, {"slices": len(job.slices)})


def _exact_dedup(job: PrepareJob) -> None:
    """Find the first document of each text; too many invalid rows are an error."""
    stats = job.cleaning_stats()
    rows, invalid = (sum(slice_stats[key] for slice_stats in stats) for key in ("rows", "invalid_rows"))
    if rows and invalid / rows > job.settings.max_invalid_fraction:
        first_rows = [json.loads(line) for line in _write_quarantine(job).split("\n")[:10] if line]
        problems = [Problem(row["where"], row["reason"]) for row in first_rows]
        limit = f"prepare.max_invalid_fraction {job.settings.max_invalid_fraction:g}"
        message = f"{invalid:,} of {rows:,} rows cannot be used, more than {limit} allows"
        problems.append(Problem(str(job.folder / QUARANTINE_FILE), f"{message}; all of them are listed here"))
        raise DataError(problems)
    if not sum(slice_stats["documents"] for slice_stats in stats):
        raise DataError([Problem(job.data.source, f"no document is left after cleaning; {_top_filter(stats)}")])
    hashes = np.concatenate(job.cleaned_arrays("hashes"))
    first = dedup.first_occurrence(hashes) if job.settings.exact_dedup else np.arange(len(hashes))
    with job.store.write_task(f"exact_dedup-{job.clean_key}") as folder:
        save_array(folder, "first", first)


def _top_filter(stats: list[dict[str, Any]]) -> str:
    for name, entry in _filter_stats(stats).items():
        return f"prepare.{name} dropped {entry['documents']:,}"
    return "there was none to begin with"


def _write_quarantine(job: PrepareJob) -> str:
    """Write the invalid rows of all slices into one file, and return its text."""
    folders = [job.store.task_dir(job.clean_key, index) for index in range(len(job.slices))]
    text = "".join((folder / QUARANTINE_FILE).read_text(encoding="utf-8") for folder in folders)
    (job.folder / QUARANTINE_FILE).write_text(text, encoding="utf-8")
    return text


def _assign_splits(job: PrepareJob) -> None:
    """Decide on each document: train, held out, exact or near duplicate."""
    first = np.array(job.store.load_array(f"exact_dedup-{job.clean_key}", 0, "first"))
    numbers = np.arange(len(first))
    decisions = np.where(first == numbers, TRAIN, EXACT_DUPLICATE).astype(np.uint8)
    sizes: dict[int, int] = {}
    if job.settings.minhash_dedup:
        pairs = [np.array(job.store.load_array(job.dedup_key, band, "pairs")) for band in range(dedup.NUM_BANDS)]
        lowest = dedup.connected_components(len(first), np.unique(np.concatenate(pairs), axis=0))
        lowest = dedup.split_unverified(lowest, steps.signature_loader(job), job.settings.jaccard_threshold)
        decisions[(lowest != numbers) & (decisions == TRAIN)] = NEAR_DUPLICATE
        sizes = dedup.cluster_size_counts(lowest)
    offsets = steps.slice_offsets(job)
    _mark_held_out(job, decisions, offsets)
    with job.store.write_task(job.assign_splits_key) as folder:
        save_array(folder, "decisions", decisions)
        save_array(folder, "offsets", offsets)
        save_stats(folder, {"clusters": {str(size): count for size, count in sizes.items()}})


def _mark_held_out(job: PrepareJob, decisions: NDArray, offsets: NDArray) -> None:
    """Hold out the validation files, or the groups with the lowest hashes."""
    if job.data.validation_file:
        for index, (start, stop) in enumerate(itertools.pairwise(offsets)):
            if job.slices[index].assignment == "held_out":
                slice_decisions = decisions[start:stop]
                slice_decisions[slice_decisions == TRAIN] = HELD_OUT
        return
    groups = np.concatenate(job.cleaned_arrays("groups"))
    distinct = np.unique(groups[decisions == TRAIN])
    chosen = np.isin(groups, distinct[: held_out_count(job.data, len(distinct))])  # by hash: as good as random
    decisions[chosen & (decisions == TRAIN)] = HELD_OUT


def _train_tokenizer(job: PrepareJob) -> None:
    """Train a tokenizer on a sample of the training documents."""
    with job.store.write_task(job.tokenizer_key) as folder:
        size = tokenizer.train_bpe(_tokenizer_sample(job), job.settings.vocab_size, folder)
        save_stats(folder, {"vocab_size": size})


def _tokenizer_sample(job: PrepareJob) -> Iterator[str]:
    """Every n-th training document, up to tokenizer_sample_mb."""
    total_bytes = sum(slice_stats["bytes_out"] for slice_stats in job.cleaning_stats())
    step = max(1, -(-total_bytes // (job.settings.tokenizer_sample_mb * 1_000_000)))
    decisions, offsets = load_decisions(job)
    for index in range(len(job.slices)):
        numbers = np.arange(offsets[index], offsets[index + 1])
        wanted = (decisions[offsets[index] : offsets[index + 1]] == TRAIN) & (numbers % step == 0)
        for texts in steps.iter_texts(job.store, job.clean_key, index, wanted):
            yield from texts


def _select_tokenizer(job: PrepareJob) -> None:
    """Compare gigatoken with the tokenizers library on documents of all slices."""
    decisions, offsets = load_decisions(job)
    included = np.flatnonzero(np.asarray(decisions) <= HELD_OUT)
    chosen = included[np.unique(np.linspace(0, len(included) - 1, TOKENIZER_CHECK_DOCS).astype(np.int64))]
    samples: list[str] = []
    for index in range(len(job.slices)):
        wanted = np.isin(np.arange(offsets[index], offsets[index + 1]), chosen)
        for texts in steps.iter_texts(job.store, job.clean_key, index, wanted):
            samples += [text[:20_000] for text in texts]
    steps.select_backend(job, samples)


def _pack_shards(job: PrepareJob) -> None:
    """Write the shards, the manifest and the report."""
    folder, settings = job.folder, job.settings
    (folder / MANIFEST).unlink(missing_ok=True)
    source_dir = steps.tokenizer_dir(job)
    document_tokenizer = tokenizer.DocumentTokenizer.open(source_dir)
    layout = ShardLayout(settings.sequence_length, document_tokenizer.vocab_size, settings.rows_per_shard)
    splits = {}
    for split in SPLITS:
        slices = [each for each in job.slices if each.assignment == "split" or split == "held_out"]
        batches = {each.source: _document_batches(job, each.source, split) for each in slices}
        splits[split] = write_split(folder, split, layout, batches, job.config_hash)
        _check_dropped_tokens(job, split, splits[split])
    tokenizer.copy_tokenizer(source_dir, folder / "tokenizer")
    report = build_report(job, splits)
    write_json(folder / REPORT_FILE, report)
    _write_quarantine(job)
    extra = {"modelwright": __version__, "config": job.config_hash, "tokenizer": document_tokenizer.fingerprint,
             "sources": job.fingerprint, "weights": job.source_weights,
             "tokenizer_backend": report["tokenizer_backend"], "documents": report["documents"]}  # fmt: skip
    write_manifest(folder, layout, splits, extra)
    _remove_intermediate(job)


def _remove_intermediate(job: PrepareJob) -> None:
    """Delete the work folder, unless keep_intermediate_files."""
    if not job.settings.keep_intermediate_files:
        shutil.rmtree(job.store.folder, ignore_errors=True)


def _document_batches(job: PrepareJob, source: str, split: str) -> Iterator[DocumentBatch]:
    for number, input_slice in enumerate(job.slices):
        if input_slice.source == source:
            stats = job.store.read_stats(job.tokenize_key, number)[split]
            yield DocumentBatch(stats["tokens"], lambda number=number: _load_documents(job, number, split))  # type: ignore[misc]


def _load_documents(job: PrepareJob, number: int, split: str) -> TokenizedDocuments:
    tokens, lengths, text_bytes = (job.store.load_array(job.tokenize_key, number, f"{split}.{name}")
                                   for name in ("tokens", "lengths", "bytes"))  # fmt: skip
    return TokenizedDocuments(tokens, np.asarray(lengths), np.asarray(text_bytes))


def _check_dropped_tokens(job: PrepareJob, split: str, stats: dict[str, Any]) -> None:
    total, length = stats["tokens"] + stats["dropped_tokens"], job.settings.sequence_length
    if split == "train" and not stats["rows"]:
        message = f"there are {total:,} tokens, too few for one row of {length}; lower prepare.sequence_length"
        raise DataError([Problem(job.data.source, message)])
    if split == "held_out" and total and not stats["rows"]:
        message = f"the held-out documents have {total:,} tokens, too few for one row of {length}; raise test_size"
        raise DataError([Problem(job.data.source, message)])
    if split == "train" and stats["dropped_tokens"] > job.settings.max_dropped_token_fraction * total:
        message = f"{stats['dropped_tokens']:,} of {total:,} tokens would be lost with the last row of {length}"
        hint = "lower prepare.sequence_length, or raise prepare.max_dropped_token_fraction"
        raise DataError([Problem(job.data.source, f"{message}; {hint}")])


def build_report(job: PrepareJob, splits: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The report; the same input gives the same report."""
    slices, stats = range(len(job.slices)), job.cleaning_stats()
    total = {key: sum(slice_stats[key] for slice_stats in stats)
             for key in ("rows", "invalid_rows", "bytes_in", "bytes_out", "lines_dropped")}  # fmt: skip
    decisions = load_decisions(job)[0]
    codes = {"train": TRAIN, "held_out": HELD_OUT, "exact_duplicates": EXACT_DUPLICATE,
             "near_duplicates": NEAR_DUPLICATE}  # fmt: skip
    counts = {name: int((decisions == code).sum()) for name, code in codes.items()}
    contamination = f"benchmark_ngrams-{job.clean_key}" if job.settings.decontaminate_against else None
    split_keys = ("rows", "tokens", "documents", "text_bytes", "dropped_tokens")
    names = [f"{split}.lengths" for split in SPLITS]
    lengths = [job.store.load_array(job.tokenize_key, index, name) for index in slices for name in names]
    return {
        "source": job.data.source,
        "rows": total["rows"],
        "invalid_rows": total["invalid_rows"],
        "bytes": {"read": total["bytes_in"], "cleaned": total["bytes_out"]},
        "lines_dropped": total["lines_dropped"],
        "filters": _filter_stats(stats),
        "documents": {"read": total["rows"] - total["invalid_rows"], "cleaned": len(decisions), **counts},
        "clusters": job.store.read_stats(job.assign_splits_key)["clusters"],
        "lengths": length_histogram(np.concatenate(lengths)),
        "tokenizer_backend": job.store.read_stats(f"tokenizer_backend-{job.tokenize_key}"),
        "decontamination": job.store.read_stats(contamination) if contamination else None,
        "splits": {name: {key: split_stats[key] for key in split_keys} for name, split_stats in splits.items()},
        "sequence_length": job.settings.sequence_length,
    }


def _filter_stats(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and examples per filter, the most frequent first."""
    filters: dict[str, dict[str, Any]] = {}
    for slice_stats in stats:
        for name, entry in slice_stats["filters"].items():
            totals = filters.setdefault(name, {"documents": 0, "bytes": 0, "examples": []})
            totals["documents"] += entry["documents"]
            totals["bytes"] += entry["bytes"]
            totals["examples"] = (totals["examples"] + entry["examples"])[: steps.EXAMPLES_PER_FILTER]
    return dict(sorted(filters.items(), key=lambda item: (-item[1]["documents"], item[0])))
