"""MinHash signatures: how alike two documents are, in 448 bytes each; the same numbers from numpy and from a GPU.

All arithmetic is on 32-bit numbers that wrap around, so every device agrees to the last bit. numpy takes 104 MB of
text per CPU-second; a numba kernel took 291 for 208 MB more to install, and rensa's own is faster still but gives
other numbers than a GPU would, so neither is used.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data.shingles import Array, Shingles

SIZE = 5
"""Words in a shingle."""
BANDS, ROWS = 16, 7
"""Two documents are compared when all values of one band agree: 98 % of the pairs with a Jaccard index of 0.8.

Fourteen bands of eight, which others use, compare 92 % of them."""
WIDTH = BANDS * ROWS
EMPTY = np.uint32(0xFFFFFFFF)
"""What a document without a shingle has everywhere; it is like no other."""


def _permutations() -> tuple[Array, Array]:
    chance = np.random.Generator(np.random.Philox(key=[WIDTH, 32]))
    factors = chance.integers(0, 2**32, WIDTH, dtype=np.uint32) | np.uint32(1)
    return factors, chance.integers(0, 2**32, WIDTH, dtype=np.uint32)


FACTORS, SHIFTS = _permutations()


def signatures(shingles: Shingles) -> Array:
    """The least value of each permutation over a document's shingles: [documents, 112] uint32."""
    counts = shingles.counts
    filled = np.flatnonzero(counts)
    found = np.full((WIDTH, len(counts)), EMPTY, dtype=np.uint32)
    if len(filled):
        starts = shingles.edges[:-1][filled]
        values = np.empty(len(shingles.hashes), dtype=np.uint32)
        for place in range(WIDTH):
            np.multiply(shingles.hashes, FACTORS[place], out=values)
            np.add(values, SHIFTS[place], out=values)
            found[place, filled] = np.minimum.reduceat(values, starts)
    return np.ascontiguousarray(found.T)


def signatures_by(wish: str, shingles: Shingles) -> Array:
    """The same numbers, by the CPU, by a GPU, or (auto) by a GPU where there is one that can be trusted."""
    on_gpu = wish == "cuda" or (wish == "auto" and any(Path("/dev").glob("nvidia[0-9]*")) and _gpu_agrees())
    return signatures_on("cuda", shingles) if on_gpu else signatures(shingles)


@cache
def _gpu_agrees() -> bool:
    """Whether this machine's GPU gives the CPU's numbers, tried once in a process on some made-up documents."""
    chance = np.random.Generator(np.random.Philox(key=[WIDTH, 7]))
    edges = np.concatenate([[0], np.cumsum(chance.integers(0, 500, 64))])
    some = Shingles(chance.integers(0, 2**32, edges[-1], dtype=np.uint32), edges)
    try:
        return bool(np.array_equal(signatures_on("cuda", some), signatures(some)))
    except Exception:  # whatever keeps a GPU from working, the CPU does not need it
        return False


def signatures_on(device: str, shingles: Shingles) -> Array:
    """The same numbers, computed by torch on a device."""
    import torch

    hashes = torch.from_numpy(shingles.hashes.astype(np.int64)).to(device)
    edges = torch.from_numpy(np.ascontiguousarray(shingles.edges)).to(device)
    if device.startswith("cuda"):
        from modelwright.data.minhash_gpu import least_values

        found = least_values(hashes, edges, torch.from_numpy(FACTORS.astype(np.int64)).to(device),
                             torch.from_numpy(SHIFTS.astype(np.int64)).to(device))  # fmt: skip
    else:
        found = _scattered(hashes, edges)
    return np.ascontiguousarray(found.cpu().numpy().astype(np.uint32))


def _scattered(hashes: Any, edges: Any) -> Any:
    """Least values by scattering, a permutation at a time: what torch can do anywhere."""
    import torch

    counts = edges[1:] - edges[:-1]
    owner = torch.repeat_interleave(torch.arange(len(counts), device=hashes.device), counts)
    found = torch.full((WIDTH, len(counts)), int(EMPTY), dtype=torch.int64, device=hashes.device)
    for place in range(WIDTH):
        values = (hashes * int(FACTORS[place]) + int(SHIFTS[place])) & 0xFFFFFFFF
        found[place].scatter_reduce_(0, owner, values, "amin")
    return found.T


def band_keys(signature: Array) -> Array:
    """One number for each band of each document: [16, documents] uint64; documents without a shingle have 0."""
    chance = np.random.Generator(np.random.Philox(key=[ROWS, 64]))
    factors = chance.integers(0, 2**64, ROWS, dtype=np.uint64) | np.uint64(1)
    bands = signature.reshape(-1, BANDS, ROWS).astype(np.uint64)
    keys = (bands * factors).sum(axis=2, dtype=np.uint64)
    keys ^= keys >> np.uint64(31)
    keys[(signature == EMPTY).all(axis=1)] = 0
    return np.ascontiguousarray(keys.T)


def likeness(signature: Array, other: Array) -> Array:
    """The estimated Jaccard index of each pair of rows: the share of values that agree."""
    return np.asarray((signature == other).mean(axis=1))
