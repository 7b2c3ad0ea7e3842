"""The AdamW step over bf16 weights as one Triton kernel.

SFT of a 3 B model with 32 short rows a step: 285 instead of 251 rows/s with a kernel per tensor by torch.compile, which
also takes ten seconds before the first step (H200, 2026-11-17, `python -m benchmarks.ablation --only adamw-triton`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from modelwright.engine.bf16_adamw import AdamWTensors, Hyperparameters, StepScalars, build_pointer_table
from modelwright.engine.task import to_device

BLOCK, CHUNK = 1024, 8192
"""Elements that a program updates at once (26 bytes each at 4.2 TB/s on an H200), and in all: the host builds a table
of the programs in every step that no CUDA graph replays."""
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    table, block_owner, learning_rate, bias_corrections, clip_factor, beta1, beta2, epsilon, weight_decay,
    gradient_type: tl.constexpr, exp_avg_type: tl.constexpr,
    columns: tl.constexpr, alignment: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    row = table + tl.load(block_owner + tl.program_id(0)) * columns
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int16)), alignment)
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(gradient_type)), alignment)
    remainder = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.int16)), alignment)
    exp_avg = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(exp_avg_type)), alignment)
    exp_avg_sq = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), alignment)
    count = tl.multiple_of(tl.load(row + 5), alignment)
    first = (tl.program_id(0) - tl.load(row + 6)).to(tl.int64) * chunk
    lr, clip = tl.load(learning_rate), tl.load(clip_factor)
    step_size, correction = lr / tl.load(bias_corrections), tl.load(bias_corrections + 1)
    for start in range(0, chunk, block):
        offsets = first + start + tl.arange(0, block)
        mask = offsets < count
        grad = tl.load(gradient + offsets, mask).to(tl.float32) * clip
        momentum = tl.load(exp_avg + offsets, mask).to(tl.float32)
        momentum = momentum + (1 - beta1) * (grad - momentum)
        variance = tl.load(exp_avg_sq + offsets, mask)
        variance = variance * beta2 + (1 - beta2) * grad * grad
        bits = (tl.load(weight + offsets, mask).to(tl.int32) << 16) + tl.load(remainder + offsets, mask).to(tl.int32)
        master = bits.to(tl.float32, bitcast=True)
        master = master * (1 - lr * weight_decay)
        master = master - step_size * momentum / (tl.sqrt(variance) / correction + epsilon)
        bits = master.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(exp_avg + offsets, momentum.to(exp_avg_type), mask)
        tl.store(exp_avg_sq + offsets, variance, mask)
        tl.store(weight + offsets, high.to(tl.int16), mask)
        tl.store(remainder + offsets, (bits - (high << 16)).to(tl.int16), mask)


class MultiTensorAdamW:
    """The update of `bf16_adamw._adamw_update` for many tensors of one combination of dtypes by one kernel.

    448 LoRA tensors launch in 50 µs, one by one in 23 ms.
    """

    def __init__(self, tensors: Sequence[AdamWTensors]) -> None:
        assert all(tensor.is_contiguous() for params in tensors for tensor in params)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the pointer table must be built before CUDA graph capture")
        pointers, block_owner, alignment = build_pointer_table(tensors, CHUNK)
        _, gradient, _, exp_avg, _ = tensors[0]
        self._table = to_device(pointers, gradient.device), to_device(block_owner, gradient.device)
        dtypes = TRITON_DTYPES[gradient.dtype], TRITON_DTYPES[exp_avg.dtype]
        self._constants = (*dtypes, pointers.shape[1], alignment, BLOCK, CHUNK)

    def __call__(self, scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
        _adamw[(len(self._table[1]),)](*self._table, *scalars, *hyperparameters, *self._constants)
