"""Pack short rows into rows of one length by best-fit decreasing, and compute cu_seqlens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

CU_SEQLENS_MULTIPLE = 64
NDArray = np.ndarray[Any, np.dtype[Any]]


def pack_bfd(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group row indices so that the lengths of each group fit into the capacity.

    Best-fit decreasing: longest first, each into the fullest group that has space. Rows of equal length are placed
    together, so that the cost depends on the number of distinct lengths, not of rows.
    """
    if not len(lengths):
        return []
    sizes = np.asarray(lengths, dtype=np.int64)
    longest_row = int(sizes.argmax())
    assert sizes[longest_row] <= capacity, f"row {longest_row} has {sizes[longest_row]} tokens, more than {capacity}"
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    bins = _Bins(capacity)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        bins.add_rows(length, count)
    rows = order[np.argsort(np.array(bins.row_bins), kind="stable")].tolist()
    bin_sizes = np.bincount(bins.row_bins).tolist()
    return [rows[start:stop] for start, stop in pairwise(accumulate(bin_sizes, initial=0))]


class _Bins:
    """Bins indexed by their free capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.row_bins: list[int] = []
        """The bin of each row, in placement order."""
        self._bins_by_free: dict[int, list[int]] = {}
        self._free_mask = 0
        """One bit per free capacity that some bin has: finds the best fit with one shift."""
        self._num_bins = 0

    def add_rows(self, length: int, count: int) -> None:
        """Place `count` rows of one length."""
        while count:
            fitting = self._free_mask >> length
            free = length + (fitting & -fitting).bit_length() - 1 if fitting else self.capacity
            rows_per_bin = free // length  # the best-fitting bin stays the best fit until it is full
            bins_needed = -(-count // rows_per_bin)
            chosen = self._take_bins(free, bins_needed) if fitting else self._open_bins(bins_needed)
            num_placed = min(count, rows_per_bin * len(chosen))
            bins = chosen if rows_per_bin == 1 else [each for each in chosen for _ in range(rows_per_bin)][:num_placed]
            self.row_bins += bins
            last = num_placed - rows_per_bin * (len(chosen) - 1)
            if last < rows_per_bin:
                self._put_bins(free - last * length, [chosen.pop()])
            self._put_bins(free - rows_per_bin * length, chosen)
            count -= num_placed

    def _open_bins(self, count: int) -> list[int]:
        self._num_bins += count
        return list(range(self._num_bins - count, self._num_bins))

    def _take_bins(self, free: int, count: int) -> list[int]:
        groups = self._bins_by_free[free]
        chosen = groups[:count]
        del groups[:count]
        if not groups:
            self._free_mask ^= 1 << free
        return chosen

    def _put_bins(self, free: int, groups: list[int]) -> None:
        if free and groups:
            existing = self._bins_by_free.get(free)
            self._bins_by_free[free] = sorted(existing + groups) if existing else groups
            self._free_mask |= 1 << free


def cu_seqlens_from_positions(positions: NDArray) -> NDArray:
    """Cumulative sequence lengths of the flattened rows. positions: [rows, length], 0 at each document start.

    Padded with the end to a multiple of 64, so that compiled code sees few different sizes.
    """
    starts = np.flatnonzero(positions.ravel() == 0)
    size = -(-(len(starts) + 1) // CU_SEQLENS_MULTIPLE) * CU_SEQLENS_MULTIPLE
    return np.concatenate((starts, np.full(size - len(starts), positions.size))).astype(np.int32)
