"""The order of data: a function of seed, epoch and step, never of workers or world size.

Epoch after epoch of shuffled rows makes one endless line; step s takes rows [s·B, (s+1)·B) of it. So resuming
costs nothing, four devices and two see the same batches, and no batch is short but the very last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


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


def share(batch: Sequence[int], rank: int, size: int, per_device: int) -> list[list[int]]:
    """A rank's micro-batches of a global batch: as many on every rank, the last ones perhaps empty."""
    count = -(-len(batch) // (per_device * size))
    starts = [(turn * size + rank) * per_device for turn in range(count)]
    return [list(batch[start : start + per_device]) for start in starts]


@lru_cache(maxsize=4)
def _shuffle(seed: int, epoch: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows)
