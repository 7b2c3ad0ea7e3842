"""Put short rows together into rows of one length: best fit, longest first, nothing cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

STARTS_MULTIPLE = 64


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group row numbers so that each group's lengths fit into the capacity.

    Longest first, each into the fullest group it still fits (best-fit decreasing); equal lengths in their order. Rows
    of one length are placed together, so that a million rows cost no more than the lengths they have.
    """
    if not len(lengths):
        return []
    sizes = np.asarray(lengths, dtype=np.int64)
    longest = int(sizes.argmax())
    assert sizes[longest] <= capacity, f"row {longest} has {sizes[longest]} tokens, more than {capacity}"
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    rooms = _Rooms(capacity)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        rooms.place(length, count)
    rows = order[np.argsort(np.array(rooms.owners), kind="stable")].tolist()
    members = np.bincount(rooms.owners).tolist()
    return [rows[start:stop] for start, stop in pairwise(accumulate(members, initial=0))]


class _Rooms:
    """Groups by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.owners: list[int] = []
        """The group of each row, in the order they were placed."""
        self._groups: dict[int, list[int]] = {}
        self._left = 0
        """A bit for each room that some group has, which makes the smallest that fits one shift away."""
        self._count = 0

    def place(self, length: int, count: int) -> None:
        """Place so many rows of one length."""
        while count:
            fitting = self._left >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else self.capacity
            each = room // length  # the fullest group that fits stays the fullest, until no more of them do
            wanted = -(-count // each)
            chosen = self._take(room, wanted) if fitting else self._open(wanted)
            placed = min(count, each * len(chosen))
            self.owners += chosen if each == 1 else [group for group in chosen for _ in range(each)][:placed]
            last = placed - each * (len(chosen) - 1)
            if last < each:
                self._put(room - last * length, [chosen.pop()])
            self._put(room - each * length, chosen)
            count -= placed

    def _open(self, count: int) -> list[int]:
        self._count += count
        return list(range(self._count - count, self._count))

    def _take(self, room: int, count: int) -> list[int]:
        groups = self._groups[room]
        chosen = groups[:count]
        del groups[:count]
        if not groups:
            self._left ^= 1 << room
        return chosen

    def _put(self, room: int, groups: list[int]) -> None:
        if room and groups:
            known = self._groups.get(room)
            self._groups[room] = sorted(known + groups) if known else groups
            self._left |= 1 << room


def document_starts(positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where documents begin in the flattened rows, and where the last ends. positions: [rows, length], 0 at each begin.

    Filled up with the end to a multiple of 64, so that compiled code sees few different sizes.
    """
    starts = np.flatnonzero(positions.ravel() == 0)
    size = -(-(len(starts) + 1) // STARTS_MULTIPLE) * STARTS_MULTIPLE
    return np.concatenate((starts, np.full(size - len(starts), positions.size))).astype(np.int32)
