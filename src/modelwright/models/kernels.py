"""Triton kernels of SwiGLU with LoRA, batch norm with residual and ReLU, cross-entropy; import only in GPU functions.

What they bring is in `models/trainable.py` (3.1 %), `models/vision.py` (23 %) and `tasks/losses.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_TILE = (64, 64, 4)
"""Block rows, block columns and warps of the forward kernel."""
BACKWARD_TILES = {16: (64, 64, 4, 2), 32: (64, 64, 4, 1), 64: (64, 32, 8, 1), 128: (64, 32, 8, 1)}
"""The same and the pipeline stages of the backward kernel, by rank: with more stages the accumulators of large ranks
would not fit the 100 kB of shared memory of smaller GPUs."""
ROWS_PER_PROGRAM = 1024
"""Rows over which one program sums gradients: it writes a seventieth of what it reads."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile_with_lora(base, offsets, mask, left, right):  # type: ignore[no-untyped-def]
    """A tile of the frozen linear's output plus its LoRA, in fp32."""
    return tl.load(base + offsets, mask, 0.0).to(tl.float32) + tl.dot(left, tl.trans(right))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _swiglu_lora_kernel(  # type: ignore[no-untyped-def]
    gate, up, lora_inner, gate_outer, up_outer, out, rows, wide,
    rank: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    low = tl.arange(0, rank)
    row_mask, column_mask = (row < rows)[:, None], (column < wide)[:, None]
    offsets = row.to(tl.int64)[:, None] * wide + column[None, :]
    mask = row_mask & (column < wide)[None, :]
    left, right = lora_inner + row[:, None] * (2 * rank) + low[None, :], column[:, None] * rank + low[None, :]
    gate_left, up_left = tl.load(left, row_mask, 0.0), tl.load(left + rank, row_mask, 0.0)
    gate_value = _tile_with_lora(gate, offsets, mask, gate_left, tl.load(gate_outer + right, column_mask, 0.0))
    up_value = _tile_with_lora(up, offsets, mask, up_left, tl.load(up_outer + right, column_mask, 0.0))
    tl.store(out + offsets, (gate_value * tl.sigmoid(gate_value) * up_value).to(out.dtype.element_ty), mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _swiglu_lora_backward_kernel(  # type: ignore[no-untyped-def]
    gate, up, lora_inner, gate_outer, up_outer, grad_act, grad_lora_inner, down_a, gate_out, up_out, sums, rows, wide,
    rank: tl.constexpr, rows_per_program: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    column, low = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, rank)
    right, column_mask = column[:, None] * rank + low[None, :], (column < wide)[:, None]
    gate_right = tl.load(gate_outer + right, column_mask, 0.0)
    up_right = tl.load(up_outer + right, column_mask, 0.0)
    back_right = tl.load(down_a + right, column_mask, 0.0)
    gate_sum = tl.zeros((BLOCK_N, rank), tl.float32)
    up_sum = tl.zeros((BLOCK_N, rank), tl.float32)
    down_sum = tl.zeros((BLOCK_N, rank), tl.float32)
    for start in range(0, rows_per_program, BLOCK_M):
        row = tl.program_id(1) * rows_per_program + start + tl.arange(0, BLOCK_M)
        row_mask = (row < rows)[:, None]
        left = lora_inner + row[:, None] * (2 * rank) + low[None, :]
        gate_left, up_left = tl.load(left, row_mask, 0.0), tl.load(left + rank, row_mask, 0.0)
        back_left = tl.load(grad_lora_inner + row[:, None] * rank + low[None, :], row_mask, 0.0)
        offsets = row.to(tl.int64)[:, None] * wide + column[None, :]
        mask = row_mask & (column < wide)[None, :]
        gate_value = _tile_with_lora(gate, offsets, mask, gate_left, gate_right)
        up_value = _tile_with_lora(up, offsets, mask, up_left, up_right)
        grad_value = _tile_with_lora(grad_act, offsets, mask, back_left, back_right)
        sigmoid = tl.sigmoid(gate_value)
        silu = gate_value * sigmoid
        d_gate = (grad_value * up_value * sigmoid * (1 + gate_value * (1 - sigmoid))).to(gate_out.dtype.element_ty)
        d_up = (grad_value * silu).to(gate_out.dtype.element_ty)
        tl.store(gate_out + offsets, d_gate, mask)
        tl.store(up_out + offsets, d_up, mask)
        gate_sum = tl.dot(tl.trans(d_gate), gate_left, gate_sum)
        up_sum = tl.dot(tl.trans(d_up), up_left, up_sum)
        down_sum = tl.dot(tl.trans((silu * up_value).to(gate_out.dtype.element_ty)), back_left, down_sum)
    to = sums + tl.program_id(1).to(tl.int64) * 3 * wide * rank + right
    tl.store(to, gate_sum, column_mask)
    tl.store(to + wide * rank, up_sum, column_mask)
    tl.store(to + 2 * wide * rank, down_sum, column_mask)


def swiglu_lora(gate: Tensor, up: Tensor, lora_inner: Tensor, gate_outer: Tensor, up_outer: Tensor) -> Tensor:
    """silu(gate + its LoRA) · (up + its LoRA).

    gate, up: [rows, wide]; lora_inner: [rows, 2 · rank], gate's first; gate_outer, up_outer: [wide, rank].
    """
    out, (rows, wide), (block_m, block_n, warps) = torch.empty_like(gate), gate.shape, FORWARD_TILE
    _swiglu_lora_kernel[(triton.cdiv(wide, block_n), triton.cdiv(rows, block_m))](
        gate, up, lora_inner, gate_outer, up_outer, out, rows, wide,
        rank=gate_outer.shape[1], BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
    )  # fmt: skip
    return out


def swiglu_lora_backward(
    gate: Tensor, up: Tensor, lora_inner: Tensor, gate_outer: Tensor, up_outer: Tensor,
    grad_act: Tensor, grad_lora_inner: Tensor, down_a: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of gate and up, and of gate_outer, up_outer and down_a as [3, wide, rank].

    The gradient of `swiglu_lora`'s output is grad_act [rows, wide] plus grad_lora_inner [rows, rank] times down_a
    [wide, rank]. Partial sums are added in a fixed order, so that results are deterministic.
    """
    (rows, wide), rank = gate.shape, gate_outer.shape[1]
    block_m, block_n, warps, num_stages = BACKWARD_TILES[rank]
    grid = (triton.cdiv(wide, block_n), triton.cdiv(rows, ROWS_PER_PROGRAM))
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
    sums = torch.empty(grid[1], 3, wide, rank, device=gate.device)
    _swiglu_lora_backward_kernel[grid](
        gate, up, lora_inner, gate_outer, up_outer, grad_act, grad_lora_inner, down_a, d_gate, d_up, sums, rows, wide,
        rank=rank, rows_per_program=ROWS_PER_PROGRAM, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
        num_stages=num_stages,
    )  # fmt: skip
    return d_gate, d_up, sums.sum(0).to(gate.dtype)


BLOCK_CHANNELS = 64
"""Channels per program; the number of channels is a multiple of it."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def bn_partial_sums(  # type: ignore[no-untyped-def]
    x, partial_sums, num_rows, channels, rows_per_program, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr
):
    """Sums and sums of squares per channel over each program's rows: partial_sums [programs, 2, channels]."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    plain = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    squared = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    for first in range(program * rows_per_program, tl.minimum(num_rows, (program + 1) * rows_per_program), BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        value = tl.load(x + row[:, None] * channels + column[None, :], mask=(row < num_rows)[:, None], other=0.0)
        value = value.to(tl.float32)
        plain += value
        squared += value * value
    tl.store(partial_sums + 2 * program * channels + column, tl.sum(plain, 0))
    tl.store(partial_sums + (2 * program + 1) * channels + column, tl.sum(squared, 0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def bn_total(partial_sums, column, channels, programs, SUM_STEP: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums of some channels over all programs."""
    one = tl.zeros((SUM_STEP, BLOCK_CHANNELS), tl.float32)
    other = tl.zeros((SUM_STEP, BLOCK_CHANNELS), tl.float32)
    for first in range(0, programs, SUM_STEP):
        program = first + tl.arange(0, SUM_STEP)
        inside = (program < programs)[:, None]
        at = partial_sums + 2 * program[:, None] * channels + column[None, :]
        one += tl.load(at, mask=inside, other=0.0)
        other += tl.load(at + channels, mask=inside, other=0.0)
    return tl.sum(one, 0), tl.sum(other, 0)


@triton.jit(do_not_specialize=["programs"])  # type: ignore[untyped-decorator, unused-ignore]
def bn_stats(  # type: ignore[no-untyped-def]
    partial_sums, weight, bias, stats, running_mean, running_var, num_rows, channels, programs, momentum, epsilon,
    SUM_STEP: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Mean, 1/std, scale and offset as stats [4, channels]; updates the running statistics."""
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    plain, squared = bn_total(partial_sums, column, channels, programs, SUM_STEP, BLOCK_CHANNELS)
    mean = plain / num_rows
    variance = tl.maximum(squared / num_rows - mean * mean, 0.0)
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    scale = tl.load(weight + column) * inverse
    tl.store(stats + column, mean)
    tl.store(stats + channels + column, inverse)
    tl.store(stats + 2 * channels + column, scale)
    tl.store(stats + 3 * channels + column, tl.load(bias + column) - mean * scale)
    decay = 1.0 - momentum
    unbiased = variance * (num_rows / (num_rows - 1.0))
    tl.store(running_mean + column, decay * tl.load(running_mean + column) + momentum * mean)
    tl.store(running_var + column, decay * tl.load(running_var + column) + momentum * unbiased)


@triton.jit(do_not_specialize=["has_residual"])  # type: ignore[untyped-decorator, unused-ignore]
def bn_apply(  # type: ignore[no-untyped-def]
    x, residual, stats, out, num_rows, channels, has_residual, floor,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Normalize, add the residual if there is one, and clamp at `floor` (ReLU)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    at, inside = row[:, None] * channels + column[None, :], (row < num_rows)[:, None]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(stats + 2 * channels + column)[None, :] + tl.load(stats + 3 * channels + column)[None, :]
    value += tl.load(residual + at, mask=inside & (has_residual != 0), other=0.0).to(tl.float32)
    value = tl.maximum(value, floor, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def bn_grad_sums(  # type: ignore[no-untyped-def]
    grad_output, out, x, stats, partial_sums, num_rows, channels, rows_per_program, floor,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient, and of the gradient times the normalized input: partial_sums as in bn_partial_sums."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    mean, inverse = tl.load(stats + column)[None, :], tl.load(stats + channels + column)[None, :]
    plain = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    along = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    for first in range(program * rows_per_program, tl.minimum(num_rows, (program + 1) * rows_per_program), BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        at, inside = row[:, None] * channels + column[None, :], (row < num_rows)[:, None]
        gradient = tl.load(grad_output + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(tl.load(out + at, mask=inside, other=0.0).to(tl.float32) <= floor, 0.0, gradient)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        plain += gradient
        along += gradient * (value - mean) * inverse
    tl.store(partial_sums + 2 * program * channels + column, tl.sum(plain, 0))
    tl.store(partial_sums + (2 * program + 1) * channels + column, tl.sum(along, 0))


@triton.jit(do_not_specialize=["programs"])  # type: ignore[untyped-decorator, unused-ignore]
def bn_grads(partial_sums, gradients, channels, programs, SUM_STEP: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradients of weight and bias: gradients [2, channels]."""
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    plain, along = bn_total(partial_sums, column, channels, programs, SUM_STEP, BLOCK_CHANNELS)
    tl.store(gradients + column, along)
    tl.store(gradients + channels + column, plain)


@triton.jit(do_not_specialize=["has_residual"])  # type: ignore[untyped-decorator, unused-ignore]
def bn_backward(  # type: ignore[no-untyped-def]
    grad_output, out, x, stats, gradients, grad_x, grad_residual, num_rows, channels, has_residual, floor,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradients of the input and of the residual."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    at, inside = row[:, None] * channels + column[None, :], (row < num_rows)[:, None]
    gradient = tl.load(grad_output + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.where(tl.load(out + at, mask=inside, other=0.0).to(tl.float32) <= floor, 0.0, gradient)
    tl.store(grad_residual + at, gradient.to(grad_residual.dtype.element_ty), mask=inside & (has_residual != 0))
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = (value - tl.load(stats + column)[None, :]) * tl.load(stats + channels + column)[None, :]
    along, plain = tl.load(gradients + column)[None, :], tl.load(gradients + channels + column)[None, :]
    gradient = (gradient - (plain + value * along) / num_rows) * tl.load(stats + 2 * channels + column)[None, :]
    tl.store(grad_x + at, gradient.to(grad_x.dtype.element_ty), mask=inside)


VOCAB_BLOCK, VOCAB_WARPS, SCALE_BLOCK = 8192, 16, 4096
"""Logits that a program of cross-entropy reads at once, its warps, and numbers that one of `scale_gradient` scales."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cross_entropy_kernel(logits, targets, losses, logsumexps, vocab, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    highest, total = -1e30, 0.0  # not -inf, which minus itself is NaN
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + column, column < vocab, -1e30).to(tl.float32)
        higher = tl.maximum(highest, tl.max(value, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(value - higher), 0)
        highest = higher
    target, logsumexp = tl.load(targets + row), highest + tl.log(total)  # rounded at large logits, the loss is not
    is_trained = target != ignore_index
    value = tl.load(logits + row * vocab + target, is_trained, 0.0).to(tl.float32)
    tl.store(losses + row, tl.where(is_trained, highest - value + tl.log(total), 0.0))
    tl.store(logsumexps + row, logsumexp)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cross_entropy_grad_kernel(  # type: ignore[no-untyped-def]
    logits, targets, logsumexps, weights, gradient, vocab, ignore_index, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target, inside = tl.load(targets + row), column < vocab
    weight = tl.where(target != ignore_index, tl.load(weights + row), 0.0)
    value = tl.load(logits + row * vocab + column, inside, 0.0).to(tl.float32)
    value = (tl.exp(value - tl.load(logsumexps + row)) - tl.where(column == target, 1.0, 0.0)) * weight
    tl.store(gradient + row * vocab + column, value.to(gradient.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale_kernel(source, scale, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, at < count).to(tl.float32) * tl.load(scale).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), at < count)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row and the logsumexp of its logits: [rows] float32. logits: [rows, vocab], contiguous."""
    rows, vocab = logits.shape
    losses, logsumexps = torch.empty(2, rows, device=logits.device)
    args = (logits, targets.contiguous(), losses, logsumexps, vocab, ignore_index)
    _cross_entropy_kernel[(rows,)](*args, BLOCK=VOCAB_BLOCK, num_warps=VOCAB_WARPS)
    return losses, logsumexps


def cross_entropy_grad(
    logits: Tensor, targets: Tensor, logsumexps: Tensor, weights: Tensor, ignore_index: int
) -> Tensor:
    """The gradient of the sum of weights times `cross_entropy`, in the dtype of the logits. weights: [rows] float32."""
    (rows, vocab), gradient = logits.shape, torch.empty_like(logits)
    _cross_entropy_grad_kernel[(rows, triton.cdiv(vocab, VOCAB_BLOCK))](
        *(logits, targets.contiguous(), logsumexps, weights.contiguous(), gradient, vocab, ignore_index),
        BLOCK=VOCAB_BLOCK, num_warps=VOCAB_WARPS,
    )  # fmt: skip
    return gradient


def scale_gradient(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient times a scalar, in fp32, in another dtype."""
    out = torch.empty_like(gradient, dtype=dtype)
    grid = (triton.cdiv(gradient.numel(), SCALE_BLOCK),)
    _scale_kernel[grid](gradient, scale, out, gradient.numel(), BLOCK=SCALE_BLOCK)
    return out
