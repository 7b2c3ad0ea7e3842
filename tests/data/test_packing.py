"""Packing loses nothing, fills no row beyond its capacity, and always chooses the fullest row that still fits."""

from __future__ import annotations

import random

import pytest

from modelwright.data.packing import pack_bfd


def some_lengths(dice: random.Random) -> tuple[list[int], int]:
    capacity = dice.choice([8, 17, 64, 256])
    return [dice.randint(1, capacity) for _ in range(dice.randint(1, 120))], capacity


def simple_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same rule in the slowest and plainest words."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        left = [(capacity - sum(lengths[member] for member in group), index) for index, group in enumerate(groups)]
        fitting = [(room, index) for room, index in left if room >= lengths[row]]
        if fitting:
            groups[min(fitting)[1]].append(row)
        else:
            groups.append([row])
    return groups


def test_nothing_is_lost_and_no_row_is_overfull() -> None:
    for seed in range(100):
        lengths, capacity = some_lengths(random.Random(seed))
        groups = pack_bfd(lengths, capacity)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths))), f"seed {seed}"
        assert all(0 < sum(lengths[row] for row in group) <= capacity for group in groups), f"seed {seed}"


def test_each_row_goes_into_the_fullest_group_it_fits() -> None:
    for seed in range(100):
        lengths, capacity = some_lengths(random.Random(1000 + seed))
        assert pack_bfd(lengths, capacity) == simple_best_fit(lengths, capacity), f"seed {seed}"


def test_equal_lengths_keep_their_order() -> None:
    assert pack_bfd([5, 5, 5], 5) == [[0], [1], [2]]


def test_a_row_that_fills_its_group_exactly_leaves_no_room() -> None:
    assert pack_bfd([4, 4, 4, 4], 8) == [[0, 1], [2, 3]]
    assert pack_bfd([8, 8], 8) == [[0], [1]]


def test_no_rows_give_no_groups() -> None:
    assert pack_bfd([], 8) == []


def test_a_row_longer_than_the_capacity_is_a_programmer_s_mistake() -> None:
    with pytest.raises(AssertionError, match="row 1 has 9 tokens, more than 8"):
        pack_bfd([3, 9], 8)
