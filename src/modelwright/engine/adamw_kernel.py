"""An AdamW step as kernels of the GPU: bf16 weights with their rests, each number read and written once.

The gradients' length is another: what torch has for it reads them at half the speed, and rounds each length to bf16.

Written for Triton, which comes with torch for GPUs; nothing else may import this module on a machine without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelwright.engine.adamw_table import Now, Parts, Settings, lay_out
from modelwright.engine.task import sent

BLOCK = 1024
"""Numbers that one program moves: 26 bytes each at 4.2 TB/s on an H200, against 3.5 of the compiled formula."""
SMALL = 4 * 2**20
"""Numbers up to which a tensor shares its kernel with others: a larger one is at work while the host launches more."""
READ = 8192
"""Numbers of a gradient that one program adds up."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _moved(  # type: ignore[no-untyped-def]  # the compiler would look annotations up among its own names
    weight, gradient, rest, mean, square, at, there,
    learning_rate, corrections, shortened, beta1, beta2, epsilon, decay,
):  # fmt: skip
    rate, part = tl.load(learning_rate), tl.load(shortened)
    there = there & (part >= 0)
    read = tl.load(gradient + at, there).to(tl.float32) * part
    direction = tl.load(mean + at, there).to(tl.float32)
    direction = direction + (1 - beta1) * (read - direction)
    size = tl.load(square + at, there)
    size = size * beta2 + (1 - beta2) * read * read
    bits = (tl.load(weight + at, there).to(tl.int32) << 16) + tl.load(rest + at, there).to(tl.int32)
    master = bits.to(tl.float32, bitcast=True)
    master = master * (1 - rate * decay)
    master = master - rate / tl.load(corrections) * direction / (tl.sqrt(size) / tl.load(corrections + 1) + epsilon)
    bits = master.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    tl.store(mean + at, direction.to(mean.dtype.element_ty), there)
    tl.store(square + at, size, there)
    tl.store(weight + at, high.to(tl.int16), there)
    tl.store(rest + at, (bits - (high << 16)).to(tl.int16), there)


@triton.jit  # type: ignore[untyped-decorator]
def _one(  # type: ignore[no-untyped-def]
    weight, gradient, rest, mean, square, count,
    learning_rate, corrections, shortened, beta1, beta2, epsilon, decay, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    _moved(
        weight, gradient, rest, mean, square, at, at < count,
        learning_rate, corrections, shortened, beta1, beta2, epsilon, decay,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _many(  # type: ignore[no-untyped-def]
    table, owners, learning_rate, corrections, shortened, beta1, beta2, epsilon, decay,
    gradient_type: tl.constexpr, mean_type: tl.constexpr,
    columns: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = table + tl.load(owners + tl.program_id(0)) * columns
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int16)), aligned)
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(gradient_type)), aligned)
    rest = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.int16)), aligned)
    mean = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(mean_type)), aligned)
    square = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), aligned)
    count = tl.multiple_of(tl.load(row + 5), aligned)
    at = (tl.program_id(0) - tl.load(row + 6)).to(tl.int64) * block + tl.arange(0, block)
    _moved(
        weight, gradient, rest, mean, square, at, at < count,
        learning_rate, corrections, shortened, beta1, beta2, epsilon, decay,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _squared(  # type: ignore[no-untyped-def]
    table, owners, sums,
    gradient_type: tl.constexpr, columns: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = table + tl.load(owners + tl.program_id(0)) * columns
    gradient = tl.multiple_of(tl.load(row).to(tl.pointer_type(gradient_type)), aligned)
    count = tl.multiple_of(tl.load(row + 1), aligned)
    at = (tl.program_id(0) - tl.load(row + 2)).to(tl.int64) * block + tl.arange(0, block)
    read = tl.load(gradient + at, at < count, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(read * read))


class Launches:
    """Does to tensors what `masters._move` does, to the last bits of fp32: all that can be ready before, is.

    Small ones share a kernel, which reads from a table where they are: 448 of low rank are launched in 50 microseconds,
    where one by one they took 23 ms, with the device standing still. Where tensors stay in their places all share it:
    a recording of one kernel begins at once, and one of 129 after a third of a millisecond.
    """

    def __init__(self, tensors: Sequence[Parts], to_stay: bool) -> None:
        assert all(part.is_contiguous() for parts in tensors for part in parts)
        self._alone: list[Parts] = []
        kinds: dict[tuple[torch.dtype, torch.dtype], list[Parts]] = {}
        for parts in tensors:
            kind = parts[1].dtype, parts[3].dtype
            alone = (parts[0].numel() > SMALL and not to_stay) or not TYPES.keys() >= set(kind)
            (self._alone if alone else kinds.setdefault(kind, [])).append(parts)
        self._shared = [Shared(parts) for parts in kinds.values()]

    def __call__(self, now: Now, settings: Settings) -> None:
        """Move the tensors."""
        for move in self._shared:
            move(now, settings)
        _move_each(self._alone, now, settings)


class Shared:
    """One kernel for tensors of one kind."""

    def __init__(self, tensors: Sequence[Parts]) -> None:
        self._programs, self._table, aligned = _placed(tensors, BLOCK)
        _, gradient, _, mean, _ = tensors[0]
        self._known = TYPES[gradient.dtype], TYPES[mean.dtype], self._table[0].shape[1], aligned, BLOCK

    def __call__(self, now: Now, settings: Settings) -> None:
        """Move the tensors."""
        _many[self._programs](*self._table, *now, *settings, *self._known)


class Length:
    """How long gradients of one type are: sums of squares, then the sum of these, in an order that never changes."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        [kind] = {each.dtype for each in gradients}
        self._type = TYPES[kind]
        self._programs, self._table, self._aligned = _placed([(each,) for each in gradients], READ)

    def __call__(self) -> Tensor:
        """The length, in fp32."""
        sums = torch.empty(self._programs, device=self._table[0].device)
        columns = self._table[0].shape[1]
        _squared[self._programs](*self._table, sums, self._type, columns, self._aligned, READ, num_warps=8)
        return sums.sum().sqrt()


def _placed(tensors: Sequence[tuple[Tensor, ...]], block: int) -> tuple[tuple[int], tuple[Tensor, Tensor], int]:
    """How many programs there are, their table on the device, and what its addresses are multiples of."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a table is to be ready before a recording that reads it")
    table, device = lay_out(tensors, block), tensors[0][0].device
    return (len(table.owners),), (sent(table.rows, device), sent(table.owners, device)), table.aligned


def _move_each(tensors: Sequence[Parts], now: Now, settings: Settings) -> None:
    """One kernel a tensor, every other one in a second stream.

    Where one kernel ends, and few of its programs still run, another is at work already.
    """
    if not tensors:
        return
    here, aside = torch.cuda.current_stream(), _aside(now[0].device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for parts in tensors[1::2]:
            _move_one(*parts, now, settings)
    for parts in tensors[::2]:
        _move_one(*parts, now, settings)
    here.wait_stream(aside)


def _move_one(
    weight: Tensor, gradient: Tensor, rest: Tensor, mean: Tensor, square: Tensor, now: Now, settings: Settings
) -> None:
    count = weight.numel()
    programs = (triton.cdiv(count, BLOCK),)
    _one[programs](weight.view(torch.int16), gradient, rest, mean, square, count, *now, *settings, block=BLOCK)


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else uses: of high priority, since streams of the usual kind are handed out again."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
