"""One AdamW step of one tensor as one kernel of the GPU: bf16 weights with their rests, read and written once.

Written for Triton, which comes with torch for GPUs; nothing else may import this module on a machine without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelwright.engine.masters import Parts

BLOCK = 1024
"""Numbers that one program moves: 26 bytes each at 4.2 TB/s on an H200, against 3.5 of the compiled formula."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # the compiler would look annotations up among its own names
    weight, gradient, rest, mean, square, learning_rate, corrections, shortened, count, beta1, beta2, epsilon, decay,
    block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < count
    rate = tl.load(learning_rate)
    read = tl.load(gradient + at, there).to(tl.float32) * tl.load(shortened)
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


def move_all(
    tensors: Sequence[Parts], now: tuple[Tensor, Tensor, Tensor], settings: tuple[float, float, float, float]
) -> None:
    """What `masters._move` does to the flat parts of each tensor, to the last bits of fp32.

    Every other one goes to a second stream: where one kernel ends, and few of its programs still run, another is at
    work already. A model has a kernel of some microseconds for every norm, and 129 tensors at half a billion weights.
    """
    here, aside = torch.cuda.current_stream(), _aside(now[0].device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for parts in tensors[1::2]:
            _move(*parts, now, settings)
    for parts in tensors[::2]:
        _move(*parts, now, settings)
    here.wait_stream(aside)


def _move(
    weight: Tensor, gradient: Tensor, rest: Tensor, mean: Tensor, square: Tensor,
    now: tuple[Tensor, Tensor, Tensor], settings: tuple[float, float, float, float],
) -> None:  # fmt: skip
    count = weight.numel()
    programs = (triton.cdiv(count, BLOCK),)
    _kernel[programs](weight.view(torch.int16), gradient, rest, mean, square, *now, count, *settings, block=BLOCK)


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else uses: of high priority, since streams of the usual kind are handed out again."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
