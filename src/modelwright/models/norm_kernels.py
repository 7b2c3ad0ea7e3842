"""The passes over memory that a batch norm takes on a GPU, in Triton.

Images lie channels last, so that a tensor is a table: a line for each place of each image, a column for each channel.
A pass that adds up columns leaves partial sums, which a small one adds up in order: the same numbers every time.
What differs between the layers are numbers given to a kernel, not kernels: six are compiled, where thirteen had been.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 64
"""Channels that one program works on; a table has a multiple of them."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_up(seen, parts, lines, channels, share, LINES: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of the columns, and of their squares, over each program's share of lines: parts [programs, 2, channels]."""
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    plain = tl.zeros((LINES, COLUMNS), tl.float32)
    squared = tl.zeros((LINES, COLUMNS), tl.float32)
    for first in range(program * share, tl.minimum(lines, (program + 1) * share), LINES):
        line = first + tl.arange(0, LINES)
        value = tl.load(seen + line[:, None] * channels + column[None, :], mask=(line < lines)[:, None], other=0.0)
        value = value.to(tl.float32)
        plain += value
        squared += value * value
    tl.store(parts + 2 * program * channels + column, tl.sum(plain, 0))
    tl.store(parts + (2 * program + 1) * channels + column, tl.sum(squared, 0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def total(parts, column, channels, programs, STEP: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums of some columns over all programs."""
    one = tl.zeros((STEP, COLUMNS), tl.float32)
    other = tl.zeros((STEP, COLUMNS), tl.float32)
    for first in range(0, programs, STEP):
        program = first + tl.arange(0, STEP)
        inside = (program < programs)[:, None]
        at = parts + 2 * program[:, None] * channels + column[None, :]
        one += tl.load(at, mask=inside, other=0.0)
        other += tl.load(at + channels, mask=inside, other=0.0)
    return tl.sum(one, 0), tl.sum(other, 0)


@triton.jit(do_not_specialize=["programs"])  # type: ignore[untyped-decorator, unused-ignore]
def take_statistics(  # type: ignore[no-untyped-def]
    parts, weight, bias, held, running_mean, running_var, lines, channels, programs, momentum, epsilon,
    STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make the sums into mean, 1/deviation, scale and offset, held [4, channels], and move the running statistics."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    plain, squared = total(parts, column, channels, programs, STEP, COLUMNS)
    mean = plain / lines
    variance = tl.maximum(squared / lines - mean * mean, 0.0)
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    scale = tl.load(weight + column) * inverse
    tl.store(held + column, mean)
    tl.store(held + channels + column, inverse)
    tl.store(held + 2 * channels + column, scale)
    tl.store(held + 3 * channels + column, tl.load(bias + column) - mean * scale)
    kept = 1.0 - momentum
    unbiased = variance * (lines / (lines - 1.0))
    tl.store(running_mean + column, kept * tl.load(running_mean + column) + momentum * mean)
    tl.store(running_var + column, kept * tl.load(running_var + column) + momentum * unbiased)


@triton.jit(do_not_specialize=["passing"])  # type: ignore[untyped-decorator, unused-ignore]
def normalise(  # type: ignore[no-untyped-def]
    seen, past, held, made, lines, channels, passing, least,
    LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale and move each column, add what came past where something did, and let nothing be below the least."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = line[:, None] * channels + column[None, :], (line < lines)[:, None]
    value = tl.load(seen + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(held + 2 * channels + column)[None, :] + tl.load(held + 3 * channels + column)[None, :]
    value += tl.load(past + at, mask=inside & (passing != 0), other=0.0).to(tl.float32)
    value = tl.maximum(value, least, propagate_nan=tl.PropagateNan.ALL)
    tl.store(made + at, value.to(made.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_up_gradients(  # type: ignore[no-untyped-def]
    upstream, made, seen, held, parts, lines, channels, share, least,
    LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient, and of the gradient times what was normalised, as `add_up` leaves them."""
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mean, inverse = tl.load(held + column)[None, :], tl.load(held + channels + column)[None, :]
    plain = tl.zeros((LINES, COLUMNS), tl.float32)
    along = tl.zeros((LINES, COLUMNS), tl.float32)
    for first in range(program * share, tl.minimum(lines, (program + 1) * share), LINES):
        line = first + tl.arange(0, LINES)
        at, inside = line[:, None] * channels + column[None, :], (line < lines)[:, None]
        gradient = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(tl.load(made + at, mask=inside, other=0.0).to(tl.float32) <= least, 0.0, gradient)
        value = tl.load(seen + at, mask=inside, other=0.0).to(tl.float32)
        plain += gradient
        along += gradient * (value - mean) * inverse
    tl.store(parts + 2 * program * channels + column, tl.sum(plain, 0))
    tl.store(parts + (2 * program + 1) * channels + column, tl.sum(along, 0))


@triton.jit(do_not_specialize=["programs"])  # type: ignore[untyped-decorator, unused-ignore]
def take_gradients(parts, gradients, channels, programs, STEP: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradients by the weight and by the bias: gradients [2, channels]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    plain, along = total(parts, column, channels, programs, STEP, COLUMNS)
    tl.store(gradients + column, along)
    tl.store(gradients + channels + column, plain)


@triton.jit(do_not_specialize=["passing"])  # type: ignore[untyped-decorator, unused-ignore]
def pass_back(  # type: ignore[no-untyped-def]
    upstream, made, seen, held, gradients, by_seen, by_past, lines, channels, passing, least,
    LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients by what was normalised, and by what came past."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = line[:, None] * channels + column[None, :], (line < lines)[:, None]
    gradient = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.where(tl.load(made + at, mask=inside, other=0.0).to(tl.float32) <= least, 0.0, gradient)
    tl.store(by_past + at, gradient.to(by_past.dtype.element_ty), mask=inside & (passing != 0))
    value = tl.load(seen + at, mask=inside, other=0.0).to(tl.float32)
    value = (value - tl.load(held + column)[None, :]) * tl.load(held + channels + column)[None, :]
    along, plain = tl.load(gradients + column)[None, :], tl.load(gradients + channels + column)[None, :]
    gradient = (gradient - (plain + value * along) / lines) * tl.load(held + 2 * channels + column)[None, :]
    tl.store(by_seen + at, gradient.to(by_seen.dtype.element_ty), mask=inside)
