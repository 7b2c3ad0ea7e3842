"""The gate of a layer with low-rank matrices beside its frozen ones, as kernels of the GPU: each number is read once.

Written for Triton, which comes with torch for GPUs; nothing else may import this module on a machine without one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATED = (64, 64, 4)
"""The part of a matrix that one program computes at once, rows and columns, and by how many warps."""
UNGATED = {16: (64, 64, 4, 2), 32: (64, 64, 4, 1), 64: (64, 32, 8, 1), 128: (64, 32, 8, 1)}
"""The same for the way back by the rank, and how many rounds are under way at once: with more, the sums of large ranks
would not fit what a multiprocessor of smaller cards has (100 kB)."""
SHARE = 1024
"""Rows over which one program adds up gradients: its sums are a seventieth of what it reads."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _near(base, at, there, left, right):  # type: ignore[no-untyped-def]
    """A tile of the product with a frozen matrix, and of the low-rank one beside it: fp32."""
    return tl.load(base + at, there, 0.0).to(tl.float32) + tl.dot(left, tl.trans(right))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gated(  # type: ignore[no-untyped-def]
    gate, up, inner, gate_outer, up_outer, out, rows, wide,
    rank: tl.constexpr, tall: tl.constexpr, broad: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(1) * tall + tl.arange(0, tall), tl.program_id(0) * broad + tl.arange(0, broad)
    low = tl.arange(0, rank)
    there_row, there_column = (row < rows)[:, None], (column < wide)[:, None]
    at = row.to(tl.int64)[:, None] * wide + column[None, :]
    there = there_row & (column < wide)[None, :]
    left, right = inner + row[:, None] * (2 * rank) + low[None, :], column[:, None] * rank + low[None, :]
    gate_left, up_left = tl.load(left, there_row, 0.0), tl.load(left + rank, there_row, 0.0)
    opened = _near(gate, at, there, gate_left, tl.load(gate_outer + right, there_column, 0.0))
    risen = _near(up, at, there, up_left, tl.load(up_outer + right, there_column, 0.0))
    tl.store(out + at, (opened * tl.sigmoid(opened) * risen).to(out.dtype.element_ty), there)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _ungated(  # type: ignore[no-untyped-def]
    gate, up, inner, gate_outer, up_outer, back, back_inner, down_inner, gate_out, up_out, sums, rows, wide,
    rank: tl.constexpr, share: tl.constexpr, tall: tl.constexpr, broad: tl.constexpr,
):  # fmt: skip
    column, low = tl.program_id(0) * broad + tl.arange(0, broad), tl.arange(0, rank)
    right, there_column = column[:, None] * rank + low[None, :], (column < wide)[:, None]
    gate_right = tl.load(gate_outer + right, there_column, 0.0)
    up_right = tl.load(up_outer + right, there_column, 0.0)
    back_right = tl.load(down_inner + right, there_column, 0.0)
    gate_sum = tl.zeros((broad, rank), tl.float32)
    up_sum = tl.zeros((broad, rank), tl.float32)
    down_sum = tl.zeros((broad, rank), tl.float32)
    for start in range(0, share, tall):
        row = tl.program_id(1) * share + start + tl.arange(0, tall)
        there_row = (row < rows)[:, None]
        left = inner + row[:, None] * (2 * rank) + low[None, :]
        gate_left, up_left = tl.load(left, there_row, 0.0), tl.load(left + rank, there_row, 0.0)
        back_left = tl.load(back_inner + row[:, None] * rank + low[None, :], there_row, 0.0)
        at = row.to(tl.int64)[:, None] * wide + column[None, :]
        there = there_row & (column < wide)[None, :]
        opened = _near(gate, at, there, gate_left, gate_right)
        risen = _near(up, at, there, up_left, up_right)
        given = _near(back, at, there, back_left, back_right)
        part = tl.sigmoid(opened)
        passed = opened * part
        d_gate = (given * risen * part * (1 + opened * (1 - part))).to(gate_out.dtype.element_ty)
        d_up = (given * passed).to(gate_out.dtype.element_ty)
        tl.store(gate_out + at, d_gate, there)
        tl.store(up_out + at, d_up, there)
        gate_sum = tl.dot(tl.trans(d_gate), gate_left, gate_sum)
        up_sum = tl.dot(tl.trans(d_up), up_left, up_sum)
        down_sum = tl.dot(tl.trans((passed * risen).to(gate_out.dtype.element_ty)), back_left, down_sum)
    to = sums + tl.program_id(1).to(tl.int64) * 3 * wide * rank + right
    tl.store(to, gate_sum, there_column)
    tl.store(to + wide * rank, up_sum, there_column)
    tl.store(to + 2 * wide * rank, down_sum, there_column)


def gated(gate: Tensor, up: Tensor, inner: Tensor, gate_outer: Tensor, up_outer: Tensor) -> Tensor:
    """silu(gate + its low-rank part) · (up + its own).

    gate, up: [rows, wide]; inner: [rows, 2 · rank], gate's first; gate_outer, up_outer: [wide, rank].
    """
    out, (rows, wide), (tall, broad, warps) = torch.empty_like(gate), gate.shape, GATED
    _gated[(triton.cdiv(wide, broad), triton.cdiv(rows, tall))](
        gate, up, inner, gate_outer, up_outer, out, rows, wide,
        rank=gate_outer.shape[1], tall=tall, broad=broad, num_warps=warps,
    )  # fmt: skip
    return out


def ungated(
    gate: Tensor, up: Tensor, inner: Tensor, gate_outer: Tensor, up_outer: Tensor,
    back: Tensor, back_inner: Tensor, down_inner: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of gate and up, and those of gate_outer, up_outer and down_inner: [3, wide, rank].

    They come from the gradient of what `gated` gave: back, [rows, wide], and its low-rank part, of back_inner,
    [rows, rank], and down_inner, [wide, rank]. Sums are added up in order: the same numbers every time.
    """
    (rows, wide), rank = gate.shape, gate_outer.shape[1]
    tall, broad, warps, rounds = UNGATED[rank]
    grid = (triton.cdiv(wide, broad), triton.cdiv(rows, SHARE))
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
    sums = torch.empty(grid[1], 3, wide, rank, device=gate.device)
    _ungated[grid](
        gate, up, inner, gate_outer, up_outer, back, back_inner, down_inner, d_gate, d_up, sums, rows, wide,
        rank=rank, share=SHARE, tall=tall, broad=broad, num_warps=warps, num_stages=rounds,
    )  # fmt: skip
    return d_gate, d_up, sums.sum(0).to(gate.dtype)
