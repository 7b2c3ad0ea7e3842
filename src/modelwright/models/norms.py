"""Batch norms that learn faster on a GPU: with the way past and the rectifier in two passes over memory, each way.

Torch's own take six and eight: the batch norm, the sum and the rectifier each read and write the whole tensor. An epoch
of the full ResNet-18, 512 images at a time, takes 0.70 s with these and 0.85 s with torch's, on one H200 with the whole
step in one CUDA graph.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LINES, WARPS, PROGRAMS = 128, 8, 528
"""Lines of the table that a program takes at once, its warps, and programs that add up: four a processor of an H200."""
STEP = 64
"""Partial sums that are added up at once."""


def normalised(norm: nn.BatchNorm2d, seen: Tensor, past: Tensor | None = None, rectify: bool = True) -> Tensor:
    """What a batch norm makes of its input, plus what came past it, and nothing below zero.

    seen, past: [rows, channels, height, width].
    """
    if _is_fast(norm, seen):
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        made: Tensor = _Learnt.apply(seen, past, norm.weight, norm.bias, norm, rectify)  # type: ignore[no-untyped-call]
        return made
    made = norm(seen) if past is None else norm(seen) + past
    return F.relu(made, inplace=True) if rectify else made


def _is_fast(norm: nn.BatchNorm2d, seen: Tensor) -> bool:
    """Whether it is learning on a GPU, in a layout that the kernels know; a compiler has ways of its own."""
    if not seen.is_cuda or not norm.training or norm.momentum is None or torch.compiler.is_compiling():
        return False
    fits = seen.shape[1] % 64 == 0 and seen.is_contiguous(memory_format=torch.channels_last)
    return fits and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class _Learnt(torch.autograd.Function):
    """Both ways by the kernels."""

    @staticmethod
    def forward(
        ctx: Any, seen: Tensor, past: Tensor | None, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, rectify: bool
    ) -> Tensor:
        from modelwright.models import norm_kernels as kernels

        channels = seen.shape[1]
        lines, across = seen.numel() // channels, channels // kernels.COLUMNS
        programs = max(1, min(-(-lines // LINES), PROGRAMS // across))
        share = -(-lines // (programs * LINES)) * LINES
        parts = seen.new_empty(programs, 2, channels, dtype=torch.float32)
        held = seen.new_empty(4, channels, dtype=torch.float32)
        made = torch.empty_like(seen)
        least = 0.0 if rectify else float("-inf")
        tiles = {"LINES": LINES, "COLUMNS": kernels.COLUMNS, "num_warps": WARPS}
        sums = {"STEP": STEP, "COLUMNS": kernels.COLUMNS, "num_warps": WARPS}
        kernels.add_up[(programs, across)](seen, parts, lines, channels, share, **tiles)
        running = (norm.running_mean, norm.running_var)
        kernels.take_statistics[(across,)](
            parts, weight, bias, held, *running, lines, channels, programs, norm.momentum, norm.eps, **sums
        )
        kernels.normalise[(-(-lines // LINES), across)](
            seen, seen if past is None else past, held, made, lines, channels, int(past is not None), least, **tiles
        )
        ctx.save_for_backward(seen, made, held)
        ctx.past, ctx.least, ctx.programs, ctx.share, ctx.tiles, ctx.sums = (
            *(past is not None, least, programs, share, tiles, sums),
        )
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        from modelwright.models import norm_kernels as kernels

        seen, made, held = ctx.saved_tensors
        upstream = upstream.contiguous(memory_format=torch.channels_last)
        channels = seen.shape[1]
        lines, across = seen.numel() // channels, channels // kernels.COLUMNS
        parts, gradients = held.new_empty(ctx.programs, 2, channels), held.new_empty(2, channels)
        by_seen = torch.empty_like(seen)
        by_past = torch.empty_like(seen) if ctx.past else None
        kernels.add_up_gradients[(ctx.programs, across)](
            upstream, made, seen, held, parts, lines, channels, ctx.share, ctx.least, **ctx.tiles
        )
        kernels.take_gradients[(across,)](parts, gradients, channels, ctx.programs, **ctx.sums)
        kernels.pass_back[(-(-lines // LINES), across)](
            upstream, made, seen, held, gradients, by_seen, by_seen if by_past is None else by_past, lines, channels,
            int(ctx.past), ctx.least, **ctx.tiles,
        )  # fmt: skip
        return by_seen, by_past, gradients[0], gradients[1], None, None
