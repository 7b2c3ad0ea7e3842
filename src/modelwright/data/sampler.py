"""Compute the row indices of each global batch as a function of seed and step, and a rank's micro-batches of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RowIndices = np.ndarray[tuple[int], np.dtype[np.int64]]
MIXTURE_BLOCK = 4096
"""Rows per block; each block holds the sources in the ratio of their weights."""
WEIGHT_SCALE = 1 << 32


@dataclass(frozen=True)
class GlobalBatchSampler:
    """The row indices of each global batch; there is no state.

    With sources, every block of 4,096 rows holds them in the ratio of their weights, shuffled; each source has its own
    shuffled epochs, so that a small source with a large weight is repeated more often.
    """

    num_rows: int
    """Rows in one epoch."""
    global_batch_size: int
    """Rows in one global batch."""
    total_samples: int
    """Rows of the whole stage over all epochs."""
    seed: int
    """Seed of the shuffles."""
    sources: tuple[tuple[int, float], ...] = ()
    """Rows and weight of each source of a mixture; row indices run through the sources in this order."""

    @property
    def steps(self) -> int:
        """Global batches in the stage."""
        return -(-self.total_samples // self.global_batch_size)

    def batch_indices(self, step: int) -> list[int]:
        """Row indices of one global batch."""
        start, stop = step * self.global_batch_size, min((step + 1) * self.global_batch_size, self.total_samples)
        rows: list[int] = []
        while start < stop:
            indices = self._indices_from(start)[: stop - start]
            rows += indices.tolist()
            start += len(indices)
        return rows

    def _indices_from(self, position: int) -> RowIndices:
        """Row indices from a position up to the end of its epoch, or of its block of a mixture."""
        if self.sources:
            block, first = divmod(position, MIXTURE_BLOCK)
            return _mixture_block(self.seed, block, self.sources)[first:]
        epoch, first = divmod(position, self.num_rows)
        return _epoch_permutation(self.seed, epoch, self.num_rows)[first:]

    def epoch_at(self, step: int) -> float:
        """Epochs completed after this many steps."""
        return min(step * self.global_batch_size, self.total_samples) / self.num_rows


def epoch_rows(sources: Sequence[tuple[int, float]], stopping_strategy: str | None) -> int:
    """Rows in one epoch of a mixture: until the first source or all have come once, or as many as there are."""
    if not stopping_strategy:
        return sum(count for count, _ in sources)
    ends = [count / weight * sum(weight for _, weight in sources) for count, weight in sources]
    return max(1, int(min(ends))) if stopping_strategy == "first_exhausted" else math.ceil(max(ends) - 1e-6)


def rank_micro_batches(
    global_batch: Sequence[int], rank: int, world_size: int, micro_batch_size: int
) -> list[list[int]]:
    """A rank's micro-batches of a global batch; every rank has equally many, the last ones may be empty."""
    count = -(-len(global_batch) // (micro_batch_size * world_size))
    starts = [(micro_step * world_size + rank) * micro_batch_size for micro_step in range(count)]
    return [list(global_batch[start : start + micro_batch_size]) for start in starts]


@lru_cache(maxsize=4)
def _epoch_permutation(seed: int, epoch: int, rows: int) -> RowIndices:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows)


@lru_cache(maxsize=8)
def _mixture_block(seed: int, block: int, sources: tuple[tuple[int, float], ...]) -> RowIndices:
    """The row indices of one block of a mixture."""
    total = sum(weight for _, weight in sources)
    cumulative_weights = np.cumsum([0.0, *(weight / total for _, weight in sources)])
    limits = [round(height * WEIGHT_SCALE) for height in cumulative_weights]
    before, after = (
        [limit * offset // WEIGHT_SCALE for limit in limits]
        for offset in (block * MIXTURE_BLOCK, (block + 1) * MIXTURE_BLOCK)
    )
    rows, first = [], 0
    for source, (count, _) in enumerate(sources):
        begin = before[source + 1] - before[source]
        end = after[source + 1] - after[source]
        rows.append(first + _source_indices(seed, source, count, (begin, end)))
        first += count
    rng = np.random.Generator(np.random.Philox(key=[seed, WEIGHT_SCALE + block]))
    mixed = np.concatenate(rows)
    return mixed[rng.permutation(len(mixed))]


def _source_indices(seed: int, source: int, count: int, span: tuple[int, int]) -> RowIndices:
    """Row indices of one source between two positions of its endless sequence of shuffled epochs."""
    position, end = span
    rows = [np.zeros(0, dtype=np.int64)]
    while position < end:
        epoch, first = divmod(position, count)
        indices = _epoch_permutation(seed + source, epoch, count)[first : first + end - position]
        rows.append(indices)
        position += len(indices)
    return np.concatenate(rows)
