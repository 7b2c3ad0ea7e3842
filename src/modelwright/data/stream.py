"""The order of data: a function of seed, epoch and step, never of workers or world size.

Epoch after epoch of shuffled rows makes one endless line; step s takes rows [s·B, (s+1)·B) of it. So resuming
costs nothing, four devices and two see the same batches, and no batch is short but the very last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]
STRETCH = 4096
"""Rows over which a mixture keeps its weights."""
SCALE = 1 << 32


@dataclass(frozen=True)
class Order:
    """Which rows each global batch holds."""

    rows: int
    """Rows in one epoch."""
    batch: int
    """Rows in one global batch."""
    total: int
    """Rows over the whole stage, all epochs counted."""
    seed: int
    """Decides the shuffles."""

    @property
    def steps(self) -> int:
        """Global batches in the stage."""
        return -(-self.total // self.batch)

    def at(self, step: int) -> list[int]:
        """The rows of one global batch, in the order of the line."""
        start, stop = step * self.batch, min((step + 1) * self.batch, self.total)
        rows: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self.rows)
            taken = _shuffle(self.seed, epoch, self.rows)[first : first + stop - start]
            rows += taken.tolist()
            start += len(taken)
        return rows

    def epoch(self, step: int) -> float:
        """How many times the rows have been seen once this many steps are done."""
        return min(step * self.batch, self.total) / self.rows


@dataclass(frozen=True)
class Mixed(Order):
    """The same line, with rows drawn from several sources by weight.

    Every stretch of 4,096 rows holds its share of each source, in an order of its own; each source goes through
    shuffled epochs of its own, so that a small one with a large weight is seen more often, and nothing is remembered.
    """

    sources: tuple[tuple[int, float], ...] = ()
    """Rows and weight of each source; rows are numbered through the sources in this order."""

    def at(self, step: int) -> list[int]:
        """The rows of one global batch, in the order of the line."""
        start, stop = step * self.batch, min((step + 1) * self.batch, self.total)
        rows: list[int] = []
        while start < stop:
            stretch, first = divmod(start, STRETCH)
            taken = _stretch(self.seed, stretch, self.sources)[first : first + stop - start]
            rows += taken.tolist()
            start += len(taken)
        return rows


def order_of(task: object, line: tuple[int, int, int, int]) -> Order:
    """The order of a task's rows (rows, batch, total, seed): mixed by weight where the task says so."""
    sources: Sequence[tuple[int, float]] = getattr(task, "mixture", ())
    return Mixed(*line, tuple(sources)) if sources else Order(*line)


def share(batch: Sequence[int], rank: int, size: int, per_device: int) -> list[list[int]]:
    """A rank's micro-batches of a global batch: as many on every rank, the last ones perhaps empty."""
    count = -(-len(batch) // (per_device * size))
    starts = [(turn * size + rank) * per_device for turn in range(count)]
    return [list(batch[start : start + per_device]) for start in starts]


@lru_cache(maxsize=4)
def _shuffle(seed: int, epoch: int, rows: int) -> Rows:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows)


@lru_cache(maxsize=8)
def _stretch(
    seed: int, number: int, sources: tuple[tuple[int, float], ...]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The rows of one stretch of a mixture."""
    total = sum(weight for _, weight in sources)
    heights = np.cumsum([0.0, *(weight / total for _, weight in sources)])
    limits = [round(height * SCALE) for height in heights]
    before, after = (
        [limit * place // SCALE for limit in limits] for place in (number * STRETCH, (number + 1) * STRETCH)
    )
    rows, first = [], 0
    for source, (count, _) in enumerate(sources):
        begin = before[source + 1] - before[source]
        end = after[source + 1] - after[source]
        rows.append(first + _own_line(seed, source, count, (begin, end)))
        first += count
    chance = np.random.Generator(np.random.Philox(key=[seed, SCALE + number]))
    mixed = np.concatenate(rows)
    return mixed[chance.permutation(len(mixed))]


def _own_line(
    seed: int, source: int, count: int, stretch: tuple[int, int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows of one source between two places of its own endless line."""
    place, end = stretch
    rows = [np.zeros(0, dtype=np.int64)]
    while place < end:
        epoch, first = divmod(place, count)
        taken = _shuffle(seed + source, epoch, count)[first : first + end - place]
        rows.append(taken)
        place += len(taken)
    return np.concatenate(rows)
