"""Put short rows together into rows of one length: best fit, longest first, nothing cut."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

STARTS_MULTIPLE = 64


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group row numbers so that each group's lengths fit into the capacity.

    Longest first, each into the fullest group it still fits (best-fit decreasing); equal lengths in their order.
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, group), sorted
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        length = lengths[row]
        assert length <= capacity, f"row {row} has {length} tokens, more than {capacity}"
        place = bisect_left(room, (length, -1))
        if place == len(room):
            groups.append([row])
            left, group = capacity - length, len(groups) - 1
        else:
            left, group = room.pop(place)
            groups[group].append(row)
            left -= length
        if left:
            insort(room, (left, group))
    return groups


def document_starts(positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where documents begin in the flattened rows, and where the last ends. positions: [rows, length], 0 at each begin.

    Filled up with the end to a multiple of 64, so that compiled code sees few different sizes.
    """
    starts = np.flatnonzero(positions.ravel() == 0)
    size = -(-(len(starts) + 1) // STARTS_MULTIPLE) * STARTS_MULTIPLE
    return np.concatenate((starts, np.full(size - len(starts), positions.size))).astype(np.int32)
