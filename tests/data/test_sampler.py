"""The order of data is a function of seed and step: the same on one device and many, before and after a kill."""

from __future__ import annotations

import numpy as np
import pytest

from modelwright.data.sampler import GlobalBatchSampler, rank_micro_batches


def test_the_order_is_a_function_of_seed_and_step() -> None:
    first, second = (
        GlobalBatchSampler(num_rows=50, global_batch_size=8, total_samples=200, seed=7),
        GlobalBatchSampler(num_rows=50, global_batch_size=8, total_samples=200, seed=7),
    )
    forwards = [first.batch_indices(step) for step in range(first.steps)]
    backwards = [second.batch_indices(step) for step in reversed(range(second.steps))]
    assert forwards == backwards[::-1]


def test_another_seed_and_another_epoch_give_other_orders() -> None:
    order = GlobalBatchSampler(num_rows=32, global_batch_size=32, total_samples=64, seed=1)
    assert order.batch_indices(0) != order.batch_indices(1)
    assert order.batch_indices(0) != GlobalBatchSampler(
        num_rows=32, global_batch_size=32, total_samples=64, seed=2
    ).batch_indices(0)


def test_the_order_does_not_change_between_releases() -> None:
    assert GlobalBatchSampler(num_rows=10, global_batch_size=5, total_samples=20, seed=42).batch_indices(0) == [
        2,
        4,
        5,
        0,
        9,
    ]


@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (7, 7), (5, 8), (1, 3), (100, 1)])
def test_every_row_is_seen_once_in_each_epoch(rows: int, batch: int) -> None:
    order = GlobalBatchSampler(num_rows=rows, global_batch_size=batch, total_samples=3 * rows, seed=0)
    line = [row for step in range(order.steps) for row in order.batch_indices(step)]
    assert len(line) == 3 * rows
    for epoch in range(3):
        assert sorted(line[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_a_batch_may_hold_the_end_of_one_epoch_and_the_start_of_the_next() -> None:
    order = GlobalBatchSampler(num_rows=5, global_batch_size=4, total_samples=10, seed=0)
    assert [len(order.batch_indices(step)) for step in range(order.steps)] == [4, 4, 2]


def test_only_the_last_batch_may_be_short() -> None:
    order = GlobalBatchSampler(num_rows=10, global_batch_size=4, total_samples=10, seed=0)
    assert order.steps == 3
    assert [len(order.batch_indices(step)) for step in range(3)] == [4, 4, 2]


def test_the_epoch_is_the_share_of_rows_that_were_seen() -> None:
    order = GlobalBatchSampler(num_rows=10, global_batch_size=4, total_samples=25, seed=0)
    assert [order.epoch_at(step) for step in (0, 5, order.steps)] == [0.0, 2.0, 2.5]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("per_device", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_the_ranks_together_take_each_row_of_a_batch_once(size: int, per_device: int, count: int) -> None:
    batch = list(range(100, 100 + count))
    shares = [rank_micro_batches(batch, rank, size, per_device) for rank in range(size)]
    assert sorted(row for micro_batches in shares for rows in micro_batches for row in rows) == batch
    assert all(len(rows) <= per_device for micro_batches in shares for rows in micro_batches)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_every_rank_has_as_many_micro_batches_as_the_others(size: int, count: int) -> None:
    counts = {len(rank_micro_batches(list(range(count)), rank, size, micro_batch_size=2)) for rank in range(size)}
    assert len(counts) == 1


def test_one_rank_and_four_see_the_same_micro_batches_at_the_same_positions() -> None:
    batch = list(range(16))
    alone = rank_micro_batches(batch, 0, 1, micro_batch_size=2)
    together = [rank_micro_batches(batch, rank, 4, micro_batch_size=2) for rank in range(4)]
    assert [together[index % 4][index // 4] for index in range(8)] == alone


MIX = GlobalBatchSampler(
    num_rows=1100, global_batch_size=64, total_samples=64 * 384, seed=7, sources=((1000, 1.0), (100, 3.0))
)


def test_a_mixture_keeps_its_weights_and_goes_through_each_source_in_epochs() -> None:
    rows = np.array([row for step in range(384) for row in MIX.batch_indices(step)])
    assert len(rows) == MIX.total_samples
    small = rows[rows >= 1000] - 1000
    assert abs(len(small) / len(rows) - 0.75) < 0.002
    assert set(np.bincount(small, minlength=100).tolist()) <= {184, 185}  # every row as often as any other
    times = np.bincount(rows[rows < 1000], minlength=1000)
    assert times.max() - times.min() <= 1
    stretches = rows[: 6 * 4096].reshape(6, 4096)
    assert all(abs((stretch >= 1000).mean() - 0.75) < 0.001 for stretch in stretches)


def test_a_mixture_is_a_function_of_the_step() -> None:
    steps = [MIX.batch_indices(step) for step in range(130)]
    for step in (129, 63, 64, 0, 65):  # 64 steps fill a stretch: both sides of its edge
        assert MIX.batch_indices(step) == steps[step]
    assert MIX.batch_indices(3) != GlobalBatchSampler(1100, 64, 64 * 384, 8, MIX.sources).batch_indices(3)
