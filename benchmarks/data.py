"""Data throughput against peers: near-duplicates, tokenizing, packing, reading; per CPU-second over all threads.

Each side does the same on the same text; a slow peer gets less of it, and rates are compared. `--gigabytes` measures
the memory of a preparation instead.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import common
from modelwright.data.packing import pack_bfd
from modelwright.data.prepare import dedup
from modelwright.data.prepare.dedup import Shingles, concat_shingles, hash_words
from modelwright.data.prepare.steps import load_gigatoken
from modelwright.data.shards import DocumentBatch, PackedDataset, ShardLayout, write_manifest, write_split
from modelwright.data.tokenizer import DocumentTokenizer, TokenizedDocuments, train_bpe

NDArray = np.ndarray[Any, Any]

MEGABYTES = 110
PEER_MEGABYTES = 12
LENGTH = 2048
EXACT_DOCUMENTS = 2500
"""Documents whose every pair is compared exactly."""
PREPARE_RECIPE = """\
name: bench-data
model: {{architecture: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}}}}
data: {{train_file: {source}, test_size: 1%}}
prepare: {{vocab_size: 8192, tokenizer_sample_mb: 4, num_proc: {workers}}}
"""
PREPARE_COMMAND = (
    "import json, sys; from benchmarks.data import timed_prepare; print(json.dumps(timed_prepare(*sys.argv[1:])))"
)
POLL_SECONDS = 0.2
DATATROVE = """
import sys, json
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
docs = [Document(text=json.loads(line), id=str(n)) for n, line in enumerate(open(sys.argv[1]))]
config = MinhashConfig(hash_config=HashConfig(precision=64), num_buckets=14, hashes_per_bucket=8, n_grams=5)
MinhashDedupSignature(output_folder=sys.argv[2], config=config).run(docs, 0, 1)
"""


def measure(only: Sequence[str] = (), datatrove: str | None = None) -> dict[str, Any]:
    """The selected parts, or all of them."""
    parts: dict[str, Callable[[list[str]], Any]] = {
        "near_duplicates": lambda texts: near_duplicates(texts, datatrove),
        "quality": quality,
        "tokens": tokens,
        "gpu": gpu,
    }
    wanted = [name for name in parts if name in only or (not only and name != "gpu")]
    texts = read_corpus(MEGABYTES)
    figures: dict[str, Any] = {"corpus": {"documents": len(texts), "megabytes": round(_megabytes(texts), 1)}}
    return figures | {name: parts[name](texts) for name in wanted}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    output = [f"corpus: {figures['corpus']['documents']:,} documents, {figures['corpus']['megabytes']} MB"]
    for part, values in figures.items():
        if part != "corpus":
            output += [f"{part}: {name} {value}" for name, value in values.items()]
    return output


def measure_memory(gigabytes: Sequence[float]) -> dict[str, Any]:
    """Peak memory and CPU-seconds of each step of a preparation of so much text."""
    with tempfile.TemporaryDirectory() as folder:
        return {"memory": [prepare_memory(Path(folder), size) for size in gigabytes]}


def memory_lines(figures: dict[str, Any]) -> list[str]:
    """The memory figures as sentences."""
    output = []
    for one in figures["memory"]:
        steps = ", ".join(f"{step} {seconds}" for step, seconds in one["cpu_seconds"].items())
        memory = f"at most {one['peak_mb']} MB in a process, {one['peak_mb_of_all']} MB in all three"
        output.append(f"{one['gigabytes']} GB: {memory}; CPU-seconds: {steps}")
    return output


def near_duplicates(texts: list[str], datatrove: str | None) -> dict[str, Any]:
    """From text to verified clusters, against rensa with Python shingles and datatrove's signatures alone."""
    ours, _ = _rate(texts, _clusters)
    few = _first(texts, PEER_MEGABYTES)
    rates: dict[str, Any] = {"modelwright_mb_per_cpu_s": ours}
    try:
        rates["rensa_python_shingles_mb_per_cpu_s"] = _rate(few, _rensa)[0]
        rates["times_rensa"] = round(ours / rates["rensa_python_shingles_mb_per_cpu_s"], 1)
    except ImportError:
        rates["rensa"] = "not installed"
    if datatrove:
        small, large = (_datatrove(_first(texts, size), datatrove) for size in (1, 4))
        marginal = round((large[0] - small[0]) / (large[1] - small[1]), 3)
        rates |= {"datatrove_signatures_mb_per_cpu_s": marginal, "times_datatrove": round(ours / marginal, 1),
                  "datatrove_seconds": [round(small[1], 1), round(large[1], 1)]}  # fmt: skip
    return rates


def _clusters(texts: list[str]) -> NDArray:
    parts = [dedup.minhash_signatures(lot.shingles(dedup.NGRAM_SIZE)) for lot in hash_words(texts)]
    return clusters_of(np.concatenate(parts))


def clusters_of(signatures: NDArray) -> NDArray:
    """Verified clusters of all documents."""
    everyone = np.ones(len(signatures), dtype=np.bool_)
    edges = [dedup.verified_band_pairs(keys, everyone, lambda numbers: signatures[numbers], 0.7)
             for keys in dedup.band_keys(signatures)]  # fmt: skip
    return dedup.split_unverified(
        dedup.connected_components(len(signatures), np.concatenate(edges)), lambda n: signatures[n], 0.7
    )


def _rensa(texts: list[str]) -> list[bool]:
    import re

    from rensa import RMinHash, RMinHashLSH

    word = re.compile(r"\w+")
    sets = []
    for text in texts:
        words = word.findall(text.lower())
        sets.append([" ".join(words[start : start + 5]) for start in range(max(1, len(words) - 4))])
    matrix = RMinHash.digest_matrix_from_token_sets(sets, 112, 42)
    index = RMinHashLSH(threshold=0.7, num_perm=112, num_bands=14)
    return list(index.query_duplicate_flags_matrix_one_shot(matrix))


def _datatrove(texts: list[str], python: str) -> tuple[float, float]:
    """Megabytes and CPU-seconds of a process of its own; two sizes give the marginal rate."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([python, "-c", DATATROVE, str(path), f"{folder}/out"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _megabytes(texts), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def quality(texts: list[str]) -> dict[str, Any]:
    """Precision and recall against the exact Jaccard index of every pair that shares a rare shingle.

    A pair is recalled when both are in one cluster; also, the fraction of pairs of which at most one remains.
    """
    planted = int(len(texts) * (1 - 1 / (1 + COPY_FRACTION)))
    documents = [*texts[:EXACT_DOCUMENTS], *texts[-planted:]]
    shingles = concat_shingles([lot.shingles(dedup.NGRAM_SIZE) for lot in hash_words(documents)])
    clusters = clusters_of(dedup.minhash_signatures(shingles))
    sets = [np.unique(part) for part in np.split(shingles.hashes, shingles.offsets[1:-1])]
    dropped = [(int(clusters[number]), number) for number in range(len(documents)) if clusters[number] != number]
    figures: dict[str, Any] = {"documents": len(documents), "dropped": len(dropped)}
    figures["precision_at_0.7"] = round(float(np.mean([_jaccard(sets, *pair) >= 0.7 for pair in dropped])), 3)
    truth = _similar_pairs(sets, shingles)
    for limit in (0.7, 0.8, 0.9):
        pairs = [pair for pair, index in truth.items() if index >= limit]
        figures[f"recall_at_{limit}"] = round(float(np.mean([clusters[a] == clusters[b] for a, b in pairs])), 3)
        reduced = [clusters[a] != a or clusters[b] != b for a, b in pairs]
        figures[f"not_both_left_at_{limit}"] = round(float(np.mean(reduced)), 3)
        figures[f"pairs_at_{limit}"] = len(pairs)
    return figures


def _jaccard(sets: list[NDArray], first: int, second: int) -> float:
    both = len(np.intersect1d(sets[first], sets[second], assume_unique=True))
    return both / max(1, len(sets[first]) + len(sets[second]) - both)


def _similar_pairs(sets: list[NDArray], shingles: Shingles) -> dict[tuple[int, int], float]:
    """Every pair with a Jaccard index of at least 0.7, by the shingles that few documents share."""
    owners = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
    hashes = np.concatenate(sets)
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    edges = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1], [True]]))
    pairs: set[tuple[int, int]] = set()
    for start, stop in itertools.pairwise(edges):
        if 1 < stop - start <= 40:
            sharing = np.sort(owners[start:stop]).tolist()
            pairs.update((a, b) for index_in_group, a in enumerate(sharing) for b in sharing[index_in_group + 1 :])
    sizes = [len(each) for each in sets]
    near = [(a, b) for a, b in pairs if min(sizes[a], sizes[b]) >= 0.7 * max(sizes[a], sizes[b])]
    return {pair: index for pair in near if (index := _jaccard(sets, *pair)) >= 0.7}


def tokens(texts: list[str]) -> dict[str, Any]:
    """Tokenizing, packing and reading, one after the other on the same documents."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_bpe(_first(texts, 8), 16_384, folder / "tokenizer")
        encoder, quick = DocumentTokenizer.open(folder / "tokenizer"), load_gigatoken(folder / "tokenizer")
        few = _first(texts, PEER_MEGABYTES)
        figures["tokenizers_mb_per_cpu_s"], reference = _rate(few, encoder.encode_batch)
        if quick is None:
            return {**figures, "gigatoken": "not installed"}
        figures["gigatoken_mb_per_cpu_s"], tokenized = _rate(texts, quick.encode_batch, repeats=1)  # it caches words
        figures["times_tokenizers"] = round(figures["gigatoken_mb_per_cpu_s"] / figures["tokenizers_mb_per_cpu_s"], 1)
        figures["documents_compared"] = len(few)
        figures["documents_differing"] = _differing(reference, tokenized)
        figures |= _packing(tokenized, folder / "packed", encoder) | _reading(folder / "packed")
    return figures


def _differing(reference: TokenizedDocuments, other: TokenizedDocuments) -> int:
    ours, theirs = (np.split(side.tokens, np.cumsum(side.lengths)[:-1]) for side in (reference, other))
    return sum(not np.array_equal(one, other) for one, other in zip(ours, theirs, strict=False))


def _packing(tokenized: TokenizedDocuments, folder: Path, encoder: DocumentTokenizer) -> dict[str, Any]:
    """Rows of one length: concatenated and written, and by best fit; against TRL on the same documents."""
    layout, million = ShardLayout(LENGTH, encoder.vocab_size), len(tokenized.tokens) / 1e6
    blocks: dict[str, Iterable[DocumentBatch]] = {"all": [DocumentBatch(len(tokenized.tokens), lambda: tokenized)]}
    folders = iter([folder / "first", folder / "second", folder])  # into a fresh folder each time
    seconds, facts = _min_cpu_seconds(lambda: write_split(next(folders), "train", layout, blocks, "bench"))
    write_manifest(folder, layout, {"train": facts}, {"tokenizer": encoder.fingerprint})
    best_fit_seconds, _ = _min_cpu_seconds(lambda: _best_fit(tokenized))
    figures: dict[str, Any] = {"tokens": len(tokenized.tokens),
                               "pack_and_write_mtok_per_cpu_s": round(million / seconds, 1),
                             "best_fit_mtok_per_cpu_s": round(million / best_fit_seconds, 1)}  # fmt: skip
    try:
        from trl import pack_dataset
    except ImportError:
        return {**figures, "trl": "not installed"}
    dataset = _dataset(tokenized.tokens.astype(np.int32), tokenized.lengths)
    for strategy, ours in (("wrapped", seconds), ("bfd_split", best_fit_seconds)):
        theirs, packed = _min_cpu_seconds(lambda strategy=strategy: pack_dataset(dataset, LENGTH, strategy))  # type: ignore[misc]
        writing, _ = _min_cpu_seconds(lambda packed=packed: packed.save_to_disk(str(folder / "trl")))  # type: ignore[misc]
        figures[f"trl_{strategy}_not_written_mtok_per_cpu_s"] = round(million / theirs, 1)
        figures[f"trl_{strategy}_written_mtok_per_cpu_s"] = round(million / (theirs + writing), 1)
        figures[f"times_trl_{strategy}"] = round(theirs / ours, 1)
    return figures


def _best_fit(tokenized: TokenizedDocuments) -> tuple[NDArray, int]:
    """Documents packed best-fit, long ones split: tokens row after row, and the number of rows."""
    edges = np.concatenate([[0], np.cumsum(tokenized.lengths)])
    pieces = [(start, min(start + LENGTH, stop)) for first, stop in itertools.pairwise(edges.tolist())
              for start in range(first, stop, LENGTH)]  # fmt: skip
    groups = pack_bfd([stop - start for start, stop in pieces], LENGTH)
    order = itertools.chain.from_iterable(groups)
    return np.concatenate([tokenized.tokens[slice(*pieces[number])] for number in order]), len(groups)


def _dataset(values: NDArray, lengths: NDArray) -> Any:
    """Token rows as a dataset of the datasets library."""
    import pyarrow
    from datasets import Dataset

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
    return Dataset(pyarrow.table({"input_ids": column}))


def _reading(folder: Path, batches: int = 200) -> dict[str, Any]:
    """Random batches of 16 rows: ours with positions, theirs without."""
    shards = PackedDataset.open(folder)
    rng = np.random.default_rng(1)
    picks = [rng.integers(0, shards.rows(), 16) for _ in range(batches)]
    tokens = shards.get_rows(range(shards.rows()))[0]
    stored = _dataset(tokens.ravel(), np.full(len(tokens), LENGTH)).with_format("torch")
    wanted = [rows.tolist() for rows in picks]
    ours, _ = _min_cpu_seconds(lambda: all(len(shards.get_rows(rows)[0]) for rows in picks))  # not kept, as in training
    theirs, _ = _min_cpu_seconds(lambda: all(len(stored[rows]["input_ids"]) for rows in wanted))
    million = batches * 16 * LENGTH / 1e6
    return {"read_mtok_per_cpu_s": round(million / ours, 1),
            "datasets_torch_mtok_per_cpu_s": round(million / theirs, 1),
            "times_datasets": round(theirs / ours, 1)}  # fmt: skip


def _min_cpu_seconds(action: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """The smallest CPU-seconds of some repeats, and the last result."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        result = action()
        seconds.append(time.process_time() - began)
    return min(seconds), result


def gpu(texts: list[str]) -> dict[str, Any]:
    """Signatures on a GPU: gigabytes of text per second, and whether they equal the CPU's."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "there is none"}
    from modelwright.data.prepare.dedup import minhash_kernel

    shingles = concat_shingles([lot.shingles(dedup.NGRAM_SIZE) for lot in hash_words(texts)])
    same = bool(np.array_equal(dedup.signatures_cuda(shingles), dedup.minhash_signatures(shingles)))
    on_device = [torch.from_numpy(np.ascontiguousarray(each).astype(np.int64)).cuda()
                 for each in (shingles.hashes, shingles.offsets, dedup.HASH_A, dedup.HASH_B)]  # fmt: skip
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        minhash_kernel(*on_device)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    dedup.signatures_cuda(shingles)
    with_copies = time.perf_counter() - began
    return {"same_bits_as_cpu": same, "gb_per_s": round(_megabytes(texts) / 1e3 / min(times), 2),
            "gb_per_s_with_copies": round(_megabytes(texts) / 1e3 / with_copies, 2),
            "device": torch.cuda.get_device_name()}  # fmt: skip


def _rate(texts: list[str], action: Callable[[list[str]], Any], repeats: int = 2) -> tuple[float, Any]:
    """MB per CPU-second of an action, the best of its repeats, and its result."""
    seconds, result = _min_cpu_seconds(lambda: action(texts), repeats)
    return round(_megabytes(texts) / seconds, 2), result


def _megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6


def _first(texts: list[str], megabytes: float) -> list[str]:
    sizes = np.cumsum([len(text) for text in texts])
    return texts[: int(np.searchsorted(sizes, megabytes * 1e6)) + 1]


def main(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="near_duplicates, quality, tokens or gpu; repeatable.")
    ] = None,
    datatrove: Annotated[
        str | None, typer.Option("--datatrove", metavar="PYTHON", help="A Python that has datatrove.")
    ] = None,
    gigabytes: Annotated[
        list[float] | None, typer.Option("--gigabytes", help="Memory of a preparation of so much text; repeatable.")
    ] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Near-duplicates, tokenizing, packing and reading, compared with peers; or the memory of a preparation."""
    if gigabytes:
        common.report("data-memory", lambda: measure_memory(gigabytes), memory_lines, save, as_json)
    else:
        common.report("data", lambda: measure(only or (), datatrove), lines, save, as_json)


SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
MAX_CHARACTERS = 100_000
MIN_CHARACTERS = 200
COPY_FRACTION = 0.05
"""Fraction of documents that are repeated with some words changed."""


def read_corpus(megabytes: float, seed: int = 3) -> list[str]:
    """So many megabytes of documents, one per file, by path; the changed copies are at the end."""
    texts: list[str] = []
    size = 0
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")[:MAX_CHARACTERS]
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) < MIN_CHARACTERS:
            continue
        texts.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            break
    rng = random.Random(seed)
    return texts + [_changed(text, rng) for text in rng.sample(texts, int(COPY_FRACTION * len(texts)))]


def _files() -> Iterator[Path]:
    folders = dict.fromkeys(filter(None, (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), *sys.path)))
    visited: set[Path] = set()
    for folder in map(Path, folders):
        if folder.name in ("site-packages", "dist-packages") or folder == Path(sysconfig.get_path("stdlib")):
            for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
                if path not in visited:
                    visited.add(path)
                    yield path


def _changed(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    for _ in range(max(1, int(len(words) * rng.choice((0.005, 0.01, 0.02, 0.03, 0.05))))):
        words[rng.randrange(len(words))] = f"changed{rng.randrange(10_000)}"
    return " ".join(words)


def write_jsonl(texts: list[str], path: Path, megabytes: float) -> int:
    """Write the documents again and again, changed each time, until the file is so large; returns the rows."""
    size = rows = repeat = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for number, text in enumerate(texts):
                salted = text if repeat == 0 else text.replace("e", f"e{repeat}", 400 + number % 7)
                size += file.write(json.dumps({"text": salted}, ensure_ascii=False) + "\n")
                rows += 1
                if size >= megabytes * 1e6:
                    break
            repeat += 1
    return rows


def prepare_memory(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Peak memory of a preparation by two processes, and the CPU-seconds of each of its steps."""
    source, output = folder / "large.jsonl", folder / "large"
    rows = write_jsonl(read_corpus(min(100.0, gigabytes * 1e3)), source, gigabytes * 1e3)
    recipe = folder / "large.yaml"
    recipe.write_text(PREPARE_RECIPE.format(source=source, workers=2), encoding="utf-8")
    command = [sys.executable, "-c", PREPARE_COMMAND, str(recipe), str(output)]
    process, peak = subprocess.Popen(command, env=common.environment({}), stdout=subprocess.PIPE, text=True), 0
    while process.poll() is None:
        peak = max(peak, _memory_bytes(process.pid))
        time.sleep(POLL_SECONDS)
    assert process.stdout is not None
    figures = json.loads(process.stdout.read().splitlines()[-1])
    shutil.rmtree(output)
    source.unlink()
    return {"gigabytes": gigabytes, "rows": rows, **figures, "peak_mb_of_all": peak >> 20}


def _memory_bytes(pid: int) -> int:
    """Bytes of a process and its descendants; shared pages count once (PSS)."""
    total = 0
    try:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(_memory_bytes(int(child)) for child in children.read_text().split())
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):  # the process has ended
        return total
    return total


def timed_prepare(recipe: str, folder: str) -> dict[str, Any]:
    """Prepare from this process, and take the CPU time of all processes after each step."""
    from modelwright.recipe.load import load
    from modelwright.stages.prepare import build_prepare_job, process_executor, run_prepare

    loaded = load(recipe)
    seconds: dict[str, float] = {}
    step, began = "plan", 0.0
    for event in run_prepare(build_prepare_job(loaded, Path(folder)), process_executor(loaded.recipe.prepare), loaded):
        now = _cpu_seconds()
        seconds[step] = seconds.get(step, 0.0) + now - began
        step, began = event.step, now
    peaks = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"cpu_seconds": {name: round(value, 1) for name, value in seconds.items()}, "peak_mb": max(peaks)}


def _cpu_seconds() -> float:
    """CPU-seconds of this process and of its running children."""
    total, tick = time.process_time(), os.sysconf("SC_CLK_TCK")
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in listed.read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / tick
    return total


if __name__ == "__main__":
    common.run(main)
