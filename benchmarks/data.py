"""Data, beside the peers: near-duplicates, tokenizing, packing, reading; by CPU-seconds, all threads counted.

Each side does the same on the same text; where a peer is slow it gets less of it, and rates are compared.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
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
from modelwright.data.prepare.dedup import NDArray, Shingles, concat_shingles, hash_words
from modelwright.data.prepare.steps import load_gigatoken
from modelwright.data.shards import DocumentBatch, PackedDataset, ShardLayout, write_manifest, write_split
from modelwright.data.tokenizer import DocumentTokenizer, TokenizedDocuments, train_bpe

MEGABYTES = 110
PEER_MEGABYTES = 12
LENGTH = 2048
TRUTH = 2500
"""Documents whose every pair is compared exactly."""
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
    """The parts that are asked for, or all of them."""
    parts: dict[str, Callable[[list[str]], Any]] = {
        "near_duplicates": lambda texts: near_duplicates(texts, datatrove),
        "quality": quality,
        "tokens": tokens,
        "gpu": gpu,
    }
    wanted = [name for name in parts if name in only or (not only and name != "gpu")]
    texts = gather(MEGABYTES)
    figures: dict[str, Any] = {"corpus": {"documents": len(texts), "megabytes": round(_megabytes(texts), 1)}}
    return figures | {name: parts[name](texts) for name in wanted}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    said = [f"corpus: {figures['corpus']['documents']:,} documents, {figures['corpus']['megabytes']} MB"]
    for part, found in figures.items():
        if part != "corpus":
            said += [f"{part}: {name} {value}" for name, value in found.items()]
    return said


def near_duplicates(texts: list[str], datatrove: str | None) -> dict[str, Any]:
    """From text to verified clusters, beside rensa with Python shingling and datatrove's signatures alone."""
    ours, _ = _rate(texts, _clusters)
    few = _first(texts, PEER_MEGABYTES)
    found: dict[str, Any] = {"modelwright_mb_per_cpu_s": ours}
    try:
        found["rensa_python_shingles_mb_per_cpu_s"] = _rate(few, _rensa)[0]
        found["times_rensa"] = round(ours / found["rensa_python_shingles_mb_per_cpu_s"], 1)
    except ImportError:
        found["rensa"] = "not installed"
    if datatrove:
        small, large = (_datatrove(_first(texts, size), datatrove) for size in (1, 4))
        marginal = round((large[0] - small[0]) / (large[1] - small[1]), 3)
        found |= {"datatrove_signatures_mb_per_cpu_s": marginal, "times_datatrove": round(ours / marginal, 1),
                  "datatrove_seconds": [round(small[1], 1), round(large[1], 1)]}  # fmt: skip
    return found


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
        found = word.findall(text.lower())
        sets.append([" ".join(found[place : place + 5]) for place in range(max(1, len(found) - 4))])
    matrix = RMinHash.digest_matrix_from_token_sets(sets, 112, 42)
    index = RMinHashLSH(threshold=0.7, num_perm=112, num_bands=14)
    return list(index.query_duplicate_flags_matrix_one_shot(matrix))


def _datatrove(texts: list[str], python: str) -> tuple[float, float]:
    """Megabytes and CPU-seconds of a process of its own; two sizes tell what is fixed and what grows."""
    import json

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "texts.jsonl"
        path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([python, "-c", DATATROVE, str(path), f"{place}/out"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _megabytes(texts), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def quality(texts: list[str]) -> dict[str, Any]:
    """Precision and recall against the exact Jaccard index of every pair that shares a rare run of words.

    A pair is recalled when both stand in one cluster; beside it, the share of pairs of which not both are left.
    """
    planted = int(len(texts) * (1 - 1 / (1 + PLANTED)))
    some = [*texts[:TRUTH], *texts[-planted:]]
    shingles = concat_shingles([lot.shingles(dedup.NGRAM_SIZE) for lot in hash_words(some)])
    lowest = clusters_of(dedup.minhash_signatures(shingles))
    sets = [np.unique(part) for part in np.split(shingles.hashes, shingles.offsets[1:-1])]
    dropped = [(int(lowest[number]), number) for number in range(len(some)) if lowest[number] != number]
    found: dict[str, Any] = {"documents": len(some), "dropped": len(dropped)}
    found["precision_at_0.7"] = round(float(np.mean([_jaccard(sets, *pair) >= 0.7 for pair in dropped])), 3)
    truth = _alike(sets, shingles)
    for limit in (0.7, 0.8, 0.9):
        pairs = [pair for pair, index in truth.items() if index >= limit]
        found[f"recall_at_{limit}"] = round(float(np.mean([lowest[a] == lowest[b] for a, b in pairs])), 3)
        left = [lowest[a] != a or lowest[b] != b for a, b in pairs]
        found[f"not_both_left_at_{limit}"] = round(float(np.mean(left)), 3)
        found[f"pairs_at_{limit}"] = len(pairs)
    return found


def _jaccard(sets: list[NDArray], first: int, second: int) -> float:
    both = len(np.intersect1d(sets[first], sets[second], assume_unique=True))
    return both / max(1, len(sets[first]) + len(sets[second]) - both)


def _alike(sets: list[NDArray], shingles: Shingles) -> dict[tuple[int, int], float]:
    """Every pair with a Jaccard index of at least 0.7, found by the runs that few documents share."""
    owners = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
    hashes = np.concatenate(sets)
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    edges = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1], [True]]))
    pairs: set[tuple[int, int]] = set()
    for start, stop in itertools.pairwise(edges):
        if 1 < stop - start <= 40:
            mine = np.sort(owners[start:stop]).tolist()
            pairs.update((a, b) for place, a in enumerate(mine) for b in mine[place + 1 :])
    sizes = [len(each) for each in sets]
    near = [(a, b) for a, b in pairs if min(sizes[a], sizes[b]) >= 0.7 * max(sizes[a], sizes[b])]
    return {pair: index for pair in near if (index := _jaccard(sets, *pair)) >= 0.7}


def tokens(texts: list[str]) -> dict[str, Any]:
    """Tokenizing, packing and reading, one after the other on the same documents."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train_bpe(_first(texts, 8), 16_384, folder / "tokenizer")
        encoder, quick = DocumentTokenizer.open(folder / "tokenizer"), load_gigatoken(folder / "tokenizer")
        few = _first(texts, PEER_MEGABYTES)
        found["tokenizers_mb_per_cpu_s"], reference = _rate(few, encoder.encode_batch)
        if quick is None:
            return {**found, "gigatoken": "not installed"}
        found["gigatoken_mb_per_cpu_s"], made = _rate(
            texts, quick.encode_batch, tries=1
        )  # it remembers words it has met
        found["times_tokenizers"] = round(found["gigatoken_mb_per_cpu_s"] / found["tokenizers_mb_per_cpu_s"], 1)
        found["documents_compared"] = len(few)
        found["documents_differing"] = _differing(reference, made)
        found |= _packing(made, folder / "packed", encoder) | _reading(folder / "packed")
    return found


def _differing(reference: TokenizedDocuments, made: TokenizedDocuments) -> int:
    ours, theirs = (np.split(side.tokens, np.cumsum(side.lengths)[:-1]) for side in (reference, made))
    return sum(not np.array_equal(one, other) for one, other in zip(ours, theirs, strict=False))


def _packing(made: TokenizedDocuments, folder: Path, encoder: DocumentTokenizer) -> dict[str, Any]:
    """Rows of one length: concatenated and written, and by best fit; TRL does the same with the same documents."""
    layout, million = ShardLayout(LENGTH, encoder.vocab_size), len(made.tokens) / 1e6
    blocks: dict[str, Iterable[DocumentBatch]] = {"all": [DocumentBatch(len(made.tokens), lambda: made)]}
    places = iter([folder / "first", folder / "second", folder])  # into a fresh folder each time
    seconds, facts = _least(lambda: write_split(next(places), "train", layout, blocks, "bench"))
    write_manifest(folder, layout, {"train": facts}, {"tokenizer": encoder.fingerprint})
    fitted, _ = _least(lambda: _best_fit(made))
    found: dict[str, Any] = {"tokens": len(made.tokens), "pack_and_write_mtok_per_cpu_s": round(million / seconds, 1),
                             "best_fit_mtok_per_cpu_s": round(million / fitted, 1)}  # fmt: skip
    try:
        from trl import pack_dataset
    except ImportError:
        return {**found, "trl": "not installed"}
    dataset = _dataset(made.tokens.astype(np.int32), made.lengths)
    for strategy, ours in (("wrapped", seconds), ("bfd_split", fitted)):
        theirs, packed = _least(lambda strategy=strategy: pack_dataset(dataset, LENGTH, strategy))  # type: ignore[misc]
        writing, _ = _least(lambda packed=packed: packed.save_to_disk(str(folder / "trl")))  # type: ignore[misc]
        found[f"trl_{strategy}_not_written_mtok_per_cpu_s"] = round(million / theirs, 1)
        found[f"trl_{strategy}_written_mtok_per_cpu_s"] = round(million / (theirs + writing), 1)
        found[f"times_trl_{strategy}"] = round(theirs / ours, 1)
    return found


def _best_fit(made: TokenizedDocuments) -> tuple[NDArray, int]:
    """Documents in rows by best fit, long ones divided: tokens one row after the other, and how many rows."""
    edges = np.concatenate([[0], np.cumsum(made.lengths)])
    pieces = [(start, min(start + LENGTH, stop)) for first, stop in itertools.pairwise(edges.tolist())
              for start in range(first, stop, LENGTH)]  # fmt: skip
    groups = pack_bfd([stop - start for start, stop in pieces], LENGTH)
    order = itertools.chain.from_iterable(groups)
    return np.concatenate([made.tokens[slice(*pieces[number])] for number in order]), len(groups)


def _dataset(values: NDArray, lengths: NDArray) -> Any:
    """Rows of numbers as the datasets library holds them."""
    import pyarrow
    from datasets import Dataset

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
    return Dataset(pyarrow.table({"input_ids": column}))


def _reading(folder: Path, batches: int = 200) -> dict[str, Any]:
    """Random batches of 16 rows: ours with positions, theirs without."""
    shards = PackedDataset.open(folder)
    chance = np.random.default_rng(1)
    picks = [chance.integers(0, shards.rows(), 16) for _ in range(batches)]
    tokens = shards.get_rows(range(shards.rows()))[0]
    stored = _dataset(tokens.ravel(), np.full(len(tokens), LENGTH)).with_format("torch")
    wanted = [rows.tolist() for rows in picks]
    ours, _ = _least(lambda: all(len(shards.get_rows(rows)[0]) for rows in picks))  # none is kept, as in training
    theirs, _ = _least(lambda: all(len(stored[rows]["input_ids"]) for rows in wanted))
    million = batches * 16 * LENGTH / 1e6
    return {"read_mtok_per_cpu_s": round(million / ours, 1),
            "datasets_torch_mtok_per_cpu_s": round(million / theirs, 1),
            "times_datasets": round(theirs / ours, 1)}  # fmt: skip


def _least(action: Callable[[], Any], tries: int = 3) -> tuple[float, Any]:
    """The fewest CPU-seconds of some tries, and what the last gave."""
    seconds = []
    for _ in range(tries):
        begun = time.process_time()
        made = action()
        seconds.append(time.process_time() - begun)
    return min(seconds), made


def gpu(texts: list[str]) -> dict[str, Any]:
    """Signatures on a GPU: gigabytes of text per second, and whether they are the CPU's to the last bit."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "there is none"}
    from modelwright.data.prepare.dedup import minhash_kernel

    shingles = concat_shingles([lot.shingles(dedup.NGRAM_SIZE) for lot in hash_words(texts)])
    same = bool(np.array_equal(dedup.signatures_torch("cuda", shingles), dedup.minhash_signatures(shingles)))
    on_device = [torch.from_numpy(np.ascontiguousarray(each).astype(np.int64)).cuda()
                 for each in (shingles.hashes, shingles.offsets, dedup.HASH_A, dedup.HASH_B)]  # fmt: skip
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        minhash_kernel(*on_device)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    dedup.signatures_torch("cuda", shingles)
    whole = time.perf_counter() - begun
    return {"same_bits_as_cpu": same, "gb_per_s": round(_megabytes(texts) / 1e3 / min(times), 2),
            "gb_per_s_with_copies": round(_megabytes(texts) / 1e3 / whole, 2),
            "device": torch.cuda.get_device_name()}  # fmt: skip


def _rate(texts: list[str], action: Callable[[list[str]], Any], tries: int = 2) -> tuple[float, Any]:
    """MB per CPU-second of an action, the best of its tries, and what it gave."""
    seconds, made = _least(lambda: action(texts), tries)
    return round(_megabytes(texts) / seconds, 2), made


def _megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6


def _first(texts: list[str], megabytes: float) -> list[str]:
    sizes = np.cumsum([len(text) for text in texts])
    return texts[: int(np.searchsorted(sizes, megabytes * 1e6)) + 1]


def main(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="near_duplicates, quality, tokens or gpu; may be given often.")
    ] = None,
    datatrove: Annotated[
        str | None, typer.Option("--datatrove", metavar="PYTHON", help="A Python that has datatrove.")
    ] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Near-duplicates, tokenizing, packing and reading, beside the peers."""
    common.report("data", lambda: measure(only or (), datatrove), lines, save, as_json)


SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LONGEST = 100_000
SHORTEST = 200
PLANTED = 0.05
"""Share of documents that come again with some words changed."""


def gather(megabytes: float, seed: int = 3) -> list[str]:
    """So many megabytes of documents, a file each, in the order of their paths; the planted ones stand at the end."""
    texts: list[str] = []
    size = 0
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")[:LONGEST]
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) < SHORTEST:
            continue
        texts.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            break
    chance = random.Random(seed)
    return texts + [_changed(text, chance) for text in chance.sample(texts, int(PLANTED * len(texts)))]


def _files() -> Iterator[Path]:
    places = dict.fromkeys(filter(None, (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), *sys.path)))
    seen: set[Path] = set()
    for folder in map(Path, places):
        if folder.name in ("site-packages", "dist-packages") or folder == Path(sysconfig.get_path("stdlib")):
            for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
                if path not in seen:
                    seen.add(path)
                    yield path


def _changed(text: str, chance: random.Random) -> str:
    words = text.split(" ")
    for _ in range(max(1, int(len(words) * chance.choice((0.005, 0.01, 0.02, 0.03, 0.05))))):
        words[chance.randrange(len(words))] = f"changed{chance.randrange(10_000)}"
    return " ".join(words)


def write_jsonl(texts: list[str], path: Path, megabytes: float) -> int:
    """Write documents again and again, each time a little otherwise, until the file is so large; returns the rows."""
    size = rows = turn = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for number, text in enumerate(texts):
                salted = text if turn == 0 else text.replace("e", f"e{turn}", 400 + number % 7)
                size += file.write(json.dumps({"text": salted}, ensure_ascii=False) + "\n")
                rows += 1
                if size >= megabytes * 1e6:
                    break
            turn += 1
    return rows


if __name__ == "__main__":
    common.run(main)
