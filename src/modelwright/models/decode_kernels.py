"""Triton kernels of the decoder: attention of one new token a row; import only inside GPU functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Keys that a program reads at once."""
FULL_GPU = 256
"""Programs that keep a GPU busy; with fewer rows the keys of each are split among several."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, mask, out, log_sums, key_row, key_group, value_row, value_group, mask_row, width, split_width,
    scale, groups, shared: tl.constexpr, depth: tl.constexpr, value_depth: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group of heads of one row over one part of its keys. `shared`: query heads of a group."""
    row, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    part, parts = tl.program_id(1), tl.num_programs(1)
    head, inner, inner_value = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    heads = tl.program_id(0) * shared + head  # of all rows
    q = tl.load(
        query + heads[:, None] * depth + inner[None, :], (head < shared)[:, None] & (inner < depth)[None, :], 0.0
    )
    keys = key + row.to(tl.int64) * key_row + group.to(tl.int64) * key_group
    values = value + row.to(tl.int64) * value_row + group.to(tl.int64) * value_group
    highest = tl.full((BLOCK_H,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    sums = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    end = tl.minimum(width, (part + 1) * split_width)
    for start in range(part * split_width, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        seen = (tl.load(mask + row * mask_row + column, column < end, 0) != 0) & (column < end)
        k = tl.load(keys + column[:, None] * depth + inner[None, :], seen[:, None] & (inner < depth)[None, :], 0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights, factor = tl.exp(scores - new_highest[:, None]), tl.exp(highest - new_highest)
        v = tl.load(
            values + column[:, None] * value_depth + inner_value[None, :],
            seen[:, None] & (inner_value < value_depth)[None, :], 0.0,
        )  # fmt: skip
        total = total * factor + tl.sum(weights, 1)
        sums = sums * factor[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = new_highest
    result = sums / tl.maximum(total, 1e-30)[:, None]
    place = (heads * parts + part)[:, None] * value_depth + inner_value[None, :]
    is_head = head < shared
    tl.store(out + place, result.to(out.dtype.element_ty), is_head[:, None] & (inner_value < value_depth)[None, :])
    tl.store(log_sums + heads * parts + part, highest + tl.log(total), is_head)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one token a row: [rows, heads, value depth].

    query: [rows, heads, depth]; key, value: [rows, groups, width, depth]; mask: [rows, width] bool.
    """
    (rows, heads, depth), (_, groups, width, value_depth) = query.shape, value.shape
    parts = max(1, min(FULL_GPU // (rows * groups), triton.cdiv(width, 2 * BLOCK)))
    split_width = triton.cdiv(triton.cdiv(width, parts), BLOCK) * BLOCK
    key, value = (each if each.stride()[2:] == (each.shape[3], 1) else each.contiguous() for each in (key, value))
    query, mask = query.contiguous(), mask.contiguous().view(torch.uint8)
    out = query.new_empty(rows, heads, parts, value_depth, dtype=query.dtype if parts == 1 else torch.float32)
    log_sums = query.new_empty(rows, heads, parts, dtype=torch.float32)
    _attend[(rows * groups, parts)](
        query, key, value, mask, out, log_sums, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        mask.stride(0), width, split_width, scale, groups, heads // groups, depth, value_depth,
        max(16, triton.next_power_of_2(heads // groups)), triton.next_power_of_2(depth),
        triton.next_power_of_2(value_depth), BLOCK, num_warps=4, num_stages=3 if depth <= 128 else 2,
    )  # fmt: skip
    if parts == 1:
        return out[:, :, 0]
    return (out * log_sums.softmax(-1)[..., None]).sum(2).to(query.dtype)
