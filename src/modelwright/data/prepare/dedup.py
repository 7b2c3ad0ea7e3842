"""Find exact and near duplicates: word n-gram hashes, MinHash signatures, verified clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data.packing import NDArray

MAX_WORD_BYTES = 64
"""Bytes of a word that are hashed; of a longer word, these and its length."""
HASH_BATCH_BYTES = 1 << 20
"""Bytes per batch; larger batches leave the CPU cache and are a fifth slower."""
_LOWER = bytes(
    (code | 0x20 if 65 <= code <= 90 else code) if code >= 128 or chr(code).isalnum() else 0 for code in range(256)
)
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)
_SPREAD, _STIR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_FOLD, _HALF = np.uint64(29), np.uint64(32)


@dataclass(frozen=True)
class Shingles:
    """Hashed n-grams of several documents, one document after the other."""

    hashes: NDArray
    """All hashes: [count] uint32."""
    offsets: NDArray
    """Start of each document, and the end: [documents + 1] int64."""

    @property
    def counts(self) -> NDArray:
        """N-grams per document."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class WordHashes:
    """Hashed words of several documents, one document after the other."""

    hashes: NDArray
    """All hashes: [count] uint64."""
    offsets: NDArray
    """Start of each document, and the end: [documents + 1] int64."""

    def shingles(self, size: int) -> Shingles:
        """All n-grams of this size; a document with fewer words has none."""
        word_counts = np.diff(self.offsets)
        counts = np.maximum(word_counts - size + 1, 0)
        total = len(self.hashes) - size + 1
        if total <= 0:
            return Shingles(np.zeros(0, dtype=np.uint32), np.zeros(len(self.offsets), dtype=np.int64))
        factors = _factors(size)
        mixed = self.hashes[:total] * factors[0]
        part = np.empty_like(mixed)
        for index in range(1, size):
            np.multiply(self.hashes[index : index + total], factors[index], out=part)
            mixed += part
        mixed >>= _HALF
        inside = np.ones(len(self.hashes), dtype=np.bool_)
        for back in range(1, size):  # n-grams that would reach into the next document
            inside[np.maximum(self.offsets[1:][word_counts > 0] - back, self.offsets[:-1][word_counts > 0])] = False
        if size > 1:
            short = np.flatnonzero((word_counts > 0) & (word_counts < size))
            for document in short:
                inside[self.offsets[document] : self.offsets[document + 1]] = False
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return Shingles(mixed[inside[:total]].astype(np.uint32), offsets)


def hash_words(texts: Sequence[str]) -> Iterator[WordHashes]:
    """Hash the words of each text, one megabyte of texts at a time."""
    return (_hash_batch(group) for group in _byte_batches(texts))


def shingle(texts: Sequence[str], size: int) -> Shingles:
    """All n-grams of this size of each text."""
    return concat_shingles([word_hashes.shingles(size) for word_hashes in hash_words(texts)])


def concat_shingles(parts: Sequence[Shingles]) -> Shingles:
    """Concatenate batches of documents."""
    if not parts:
        return Shingles(np.zeros(0, dtype=np.uint32), np.zeros(1, dtype=np.int64))
    counts = np.concatenate([part.counts for part in parts])
    return Shingles(np.concatenate([part.hashes for part in parts]), np.concatenate([[0], np.cumsum(counts)]))


def _byte_batches(texts: Sequence[str]) -> Iterator[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for text in texts:
        raw = text.encode("utf-8", "replace") + b"\n"
        if group and size + len(raw) > HASH_BATCH_BYTES:
            yield group
            group, size = [], 0
        group.append(raw)
        size += len(raw)
    if group:
        yield group


def _hash_batch(group: Sequence[bytes]) -> WordHashes:
    lowered = b"".join(group).translate(_LOWER) + bytes(MAX_WORD_BYTES + 8)
    raw = np.frombuffer(lowered, dtype=np.uint8)
    inside = raw != 0
    boundaries = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    if inside[0]:
        boundaries = np.concatenate([[0], boundaries])
    starts = boundaries[::2]
    lengths = boundaries[1::2] - starts
    windows = np.ndarray((len(raw) - 7,), dtype="<u8", buffer=lowered, strides=(1,))
    hashes = (windows[starts] & _MASKS[np.minimum(lengths, 8)]) * _SPREAD
    longer, done = np.flatnonzero(lengths > 8), 8
    while len(longer) and done < MAX_WORD_BYTES:
        left = lengths[longer]
        mixed = hashes[longer]
        mixed ^= mixed >> _FOLD
        mixed *= _STIR
        mixed += windows[starts[longer] + done] & _MASKS[np.minimum(left - done, 8)]
        hashes[longer] = mixed * _SPREAD
        done += 8
        longer = longer[left > done]
    if len(longer):
        hashes[longer] += lengths[longer].astype(np.uint64) * _STIR
    hashes ^= hashes >> _HALF
    hashes *= _STIR
    hashes ^= hashes >> _FOLD
    offsets = np.cumsum([0, *(len(raw) for raw in group)])
    return WordHashes(hashes, np.searchsorted(starts, offsets))


def _factors(size: int) -> NDArray:
    """An odd factor for each position in an n-gram."""
    rng = np.random.Generator(np.random.Philox(key=[size, 5]))
    return rng.integers(0, 2**64, size, dtype=np.uint64) | np.uint64(1)


NGRAM_SIZE = 5
"""Words per n-gram."""
NUM_BANDS, ROWS_PER_BAND = 16, 7
"""Documents are compared if all hashes of a band agree: 98 % of the pairs with a Jaccard index of 0.8.

The usual 14 bands of 8 compare 92 % of them."""
NUM_HASHES = NUM_BANDS * ROWS_PER_BAND
EMPTY_HASH = np.uint32(0xFFFFFFFF)
"""Signature value of a document without n-grams; such documents are never similar."""


def _hash_parameters() -> tuple[NDArray, NDArray]:
    rng = np.random.Generator(np.random.Philox(key=[NUM_HASHES, 32]))
    factors = rng.integers(0, 2**32, NUM_HASHES, dtype=np.uint32) | np.uint32(1)
    return factors, rng.integers(0, 2**32, NUM_HASHES, dtype=np.uint32)


HASH_A, HASH_B = _hash_parameters()


def minhash_signatures(shingles: Shingles) -> NDArray:
    """Minimum of each hash function over a document's n-grams: [documents, 112] uint32."""
    counts = shingles.counts
    filled = np.flatnonzero(counts)
    result = np.full((NUM_HASHES, len(counts)), EMPTY_HASH, dtype=np.uint32)
    if len(filled):
        starts = shingles.offsets[:-1][filled]
        values = np.empty(len(shingles.hashes), dtype=np.uint32)
        for index in range(NUM_HASHES):
            np.multiply(shingles.hashes, HASH_A[index], out=values)
            np.add(values, HASH_B[index], out=values)
            result[index, filled] = np.minimum.reduceat(values, starts)
    return np.ascontiguousarray(result.T)


def compute_signatures(device: str, shingles: Shingles) -> NDArray:
    """MinHash signatures on the CPU, a GPU, or (auto) a GPU that gives the same result as the CPU."""
    on_gpu = device == "cuda" or (device == "auto" and any(Path("/dev").glob("nvidia[0-9]*")) and _gpu_agrees())
    return signatures_cuda(shingles) if on_gpu else minhash_signatures(shingles)


@cache
def _gpu_agrees() -> bool:
    """Whether the GPU gives the CPU's signatures; checked once per process on random documents."""
    rng = np.random.Generator(np.random.Philox(key=[NUM_HASHES, 7]))
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 500, 64))])
    sample = Shingles(rng.integers(0, 2**32, offsets[-1], dtype=np.uint32), offsets)
    try:
        return bool(np.array_equal(signatures_cuda(sample), minhash_signatures(sample)))
    except Exception:  # fall back to the CPU
        return False


def signatures_cuda(shingles: Shingles) -> NDArray:
    """The same signatures as minhash_signatures, by a Triton kernel."""
    import torch

    offsets = torch.from_numpy(np.ascontiguousarray(shingles.offsets)).to("cuda")
    hashes, factors, shifts = (torch.from_numpy(array.astype(np.int64)).to("cuda")
                               for array in (shingles.hashes, HASH_A, HASH_B))  # fmt: skip
    result = minhash_kernel(hashes, offsets, factors, shifts)
    return np.ascontiguousarray(result.cpu().numpy().astype(np.uint32))


def band_keys(signature: NDArray) -> NDArray:
    """One key per band and document: [16, documents] uint64; 0 for documents without n-grams."""
    rng = np.random.Generator(np.random.Philox(key=[ROWS_PER_BAND, 64]))
    factors = rng.integers(0, 2**64, ROWS_PER_BAND, dtype=np.uint64) | np.uint64(1)
    bands = signature.reshape(-1, NUM_BANDS, ROWS_PER_BAND).astype(np.uint64)
    keys = (bands * factors).sum(axis=2, dtype=np.uint64)
    keys ^= keys >> np.uint64(31)
    keys[(signature == EMPTY_HASH).all(axis=1)] = 0
    return np.ascontiguousarray(keys.T)


def estimated_jaccard(signature: NDArray, other: NDArray) -> NDArray:
    """Estimated Jaccard index of each pair of rows: the fraction of equal values."""
    return np.asarray((signature == other).mean(axis=1))


HASHES_PER_PROGRAM = 16
"""Hash functions per Triton program."""
SHINGLES_PER_BLOCK = 128
"""N-grams per loop iteration."""


def minhash_kernel(hashes: Any, offsets: Any, factors: Any, shifts: Any) -> Any:
    """MinHash on the GPU; hashes: [count], offsets: [documents + 1], factors and shifts: [width], all int64.

    Returns [documents, width] int64 with values below 2^32.
    """
    import torch

    documents, width = len(offsets) - 1, len(factors)
    assert width % HASHES_PER_PROGRAM == 0
    result = torch.empty((documents, width), dtype=torch.int64, device=hashes.device)
    if documents:
        kernel = _build_kernel()
        arrays = (_to_int32(hashes), offsets, _to_int32(factors), _to_int32(shifts), result)
        sizes = {"WIDTH": width, "GROUP": HASHES_PER_PROGRAM, "BLOCK_SIZE": SHINGLES_PER_BLOCK}
        kernel[(documents, width // HASHES_PER_PROGRAM)](*arrays, **sizes)
    return result


def _to_int32(values: Any) -> Any:
    """Reinterpret values below 2^32 as int32."""
    import torch

    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def _build_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(  # type: ignore[no-untyped-def]
        hashes, offsets, factors, shifts, result, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr
    ):
        document, group = tl.program_id(0), tl.program_id(1)
        columns = group * GROUP + tl.arange(0, GROUP)
        factor = tl.load(factors + columns).to(tl.uint32, bitcast=True)
        shift = tl.load(shifts + columns).to(tl.uint32, bitcast=True)
        start, stop = tl.load(offsets + document), tl.load(offsets + document + 1)
        minimum = tl.full([GROUP], 0xFFFFFFFF, dtype=tl.int64)
        for first in range(start, stop, BLOCK_SIZE):
            index = first + tl.arange(0, BLOCK_SIZE)
            inside = index < stop
            value = tl.load(hashes + index, mask=inside, other=0).to(tl.uint32, bitcast=True)
            mixed = (value[:, None] * factor[None, :] + shift[None, :]).to(tl.int64)
            mixed = tl.where(inside[:, None], mixed, 0xFFFFFFFF)
            minimum = tl.minimum(minimum, tl.min(mixed, axis=0))
        tl.store(result + document * WIDTH + columns, minimum)

    return kernel


MAX_ROUNDS = 16
"""Rounds in which the rest of a bucket is compared with its first document."""
VERIFY_BATCH = 1 << 15
"""Pairs per comparison."""
SignatureLoader = Callable[[NDArray], NDArray]
"""Loads signatures by document index: [count, 112] uint32."""


def first_occurrence(hashes: NDArray) -> NDArray:
    """Index of the first document with the same hash: [documents] int64; hashes: [documents, 2] uint64."""
    order = np.lexsort((np.arange(len(hashes)), hashes[:, 1], hashes[:, 0]))
    sorted_hashes = hashes[order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = (sorted_hashes[1:] != sorted_hashes[:-1]).any(axis=1)
    leaders = order[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    first = np.empty(len(order), dtype=np.int64)
    first[order] = leaders
    return first


def verified_band_pairs(keys: NDArray, eligible: NDArray, signatures: SignatureLoader, threshold: float) -> NDArray:
    """Verified pairs within one band: [pairs, 2] int64, the lower document first.

    keys: [documents] uint64, 0 for none; eligible: [documents] bool.
    """
    members = np.flatnonzero(eligible & (keys != 0))
    return verify_bucket_pairs(members, keys[members], signatures, threshold)


def verify_bucket_pairs(members: NDArray, buckets: NDArray, signatures: SignatureLoader, threshold: float) -> NDArray:
    """Verified pairs of documents in one bucket: [pairs, 2] int64; members and buckets: [documents].

    All documents of a bucket are compared with its first; those that differ are compared with the first of them, and
    so on.
    """
    order = np.lexsort((members, buckets))
    members, buckets = members[order], buckets[order]
    pairs: list[NDArray] = []
    for _ in range(MAX_ROUNDS):
        fresh = np.ones(len(members), dtype=np.bool_)
        fresh[1:] = buckets[1:] != buckets[:-1]
        leaders = members[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
        leaders, others, buckets = leaders[~fresh], members[~fresh], buckets[~fresh]
        if not len(others):
            break
        similar = _verify(leaders, others, signatures, threshold)
        pairs.append(np.stack([leaders[similar], others[similar]], axis=1))
        members, buckets = others[~similar], buckets[~similar]
    return np.concatenate(pairs) if pairs else np.zeros((0, 2), dtype=np.int64)


def _verify(leaders: NDArray, others: NDArray, signatures: SignatureLoader, threshold: float) -> NDArray:
    similar = np.zeros(len(leaders), dtype=np.bool_)
    for start in range(0, len(leaders), VERIFY_BATCH):
        stop = start + VERIFY_BATCH
        jaccard = estimated_jaccard(signatures(leaders[start:stop]), signatures(others[start:stop]))
        similar[start:stop] = jaccard >= threshold
    return similar


def connected_components(count: int, pairs: NDArray) -> NDArray:
    """Index of the lowest connected document: [documents] int64."""
    lowest = np.arange(count)
    while True:
        ends = lowest[pairs]
        minimum = ends.min(axis=1)
        after = lowest.copy()
        np.minimum.at(after, ends[:, 0], minimum)
        np.minimum.at(after, ends[:, 1], minimum)
        after = after[after]
        if np.array_equal(after, lowest):
            return lowest
        lowest = after


def split_unverified(lowest: NDArray, signatures: SignatureLoader, threshold: float) -> NDArray:
    """Split clusters so that every document is itself similar to the first of its cluster.

    Documents that differ from the first one form a new cluster, and so on.
    """
    lowest = lowest.copy()
    doubtful = np.flatnonzero(lowest != np.arange(len(lowest)))
    while len(doubtful):
        unlike = doubtful[~_verify(lowest[doubtful], doubtful, signatures, threshold)]
        cluster_ids, first = np.unique(lowest[unlike], return_index=True)
        leaders = unlike[first]
        lowest[unlike] = leaders[np.searchsorted(cluster_ids, lowest[unlike])]
        doubtful = unlike[lowest[unlike] != unlike]
    return lowest


def cluster_size_counts(lowest: NDArray) -> dict[int, int]:
    """Number of clusters by size, from two documents on."""
    counts = np.bincount(lowest)
    cluster_sizes, frequencies = np.unique(counts[counts > 1], return_counts=True)
    return {int(size): int(frequency) for size, frequency in zip(cluster_sizes, frequencies, strict=True)}


def has_ngram_overlap(shingles: Any, known: NDArray) -> NDArray:
    """Documents that share an n-gram with an evaluation set: [documents] bool; known: sorted hashes."""
    if not len(shingles.hashes) or not len(known):
        return np.zeros(len(shingles.offsets) - 1, dtype=np.bool_)
    positions = np.minimum(np.searchsorted(known, shingles.hashes), len(known) - 1)
    hits = np.concatenate([[0], np.cumsum(known[positions] == shingles.hashes)])
    return np.asarray(hits[shingles.offsets[1:]] > hits[shingles.offsets[:-1]])
