"""Triton kernels of the AdamW step over bf16 weights and of the gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelwright.engine.bf16_adamw import AdamWTensors, Hyperparameters, StepScalars, build_pointer_table
from modelwright.engine.task import to_device

BLOCK = 1024
"""Elements per program: 26 bytes each at 4.2 TB/s on an H200, 3.5 TB/s by torch.compile."""
SHARED_MAX_NUMEL = 4 * 2**20
"""Tensors up to this size share one kernel; a larger one keeps the GPU busy while the host launches the next."""
NORM_BLOCK = 8192
"""Elements of a gradient that one program sums."""
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _adamw_block(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    weight, gradient, remainder, exp_avg, exp_avg_sq, offsets, mask,
    learning_rate, bias_corrections, clip_factor, beta1, beta2, epsilon, weight_decay,
):  # fmt: skip
    lr, clip = tl.load(learning_rate), tl.load(clip_factor)
    mask = mask & (clip >= 0)
    grad = tl.load(gradient + offsets, mask).to(tl.float32) * clip
    momentum = tl.load(exp_avg + offsets, mask).to(tl.float32)
    momentum = momentum + (1 - beta1) * (grad - momentum)
    variance = tl.load(exp_avg_sq + offsets, mask)
    variance = variance * beta2 + (1 - beta2) * grad * grad
    bits = (tl.load(weight + offsets, mask).to(tl.int32) << 16) + tl.load(remainder + offsets, mask).to(tl.int32)
    master = bits.to(tl.float32, bitcast=True)
    master = master * (1 - lr * weight_decay)
    denominator = tl.sqrt(variance) / tl.load(bias_corrections + 1) + epsilon
    master = master - lr / tl.load(bias_corrections) * momentum / denominator
    bits = master.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    tl.store(exp_avg + offsets, momentum.to(exp_avg.dtype.element_ty), mask)
    tl.store(exp_avg_sq + offsets, variance, mask)
    tl.store(weight + offsets, high.to(tl.int16), mask)
    tl.store(remainder + offsets, (bits - (high << 16)).to(tl.int16), mask)


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_single(  # type: ignore[no-untyped-def]
    weight, gradient, remainder, exp_avg, exp_avg_sq, count,
    learning_rate, bias_corrections, clip_factor, beta1, beta2, epsilon, weight_decay, block: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    _adamw_block(
        weight, gradient, remainder, exp_avg, exp_avg_sq, offsets, offsets < count,
        learning_rate, bias_corrections, clip_factor, beta1, beta2, epsilon, weight_decay,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_multi(  # type: ignore[no-untyped-def]
    table, block_owner, learning_rate, bias_corrections, clip_factor, beta1, beta2, epsilon, weight_decay,
    gradient_type: tl.constexpr, exp_avg_type: tl.constexpr,
    columns: tl.constexpr, alignment: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = table + tl.load(block_owner + tl.program_id(0)) * columns
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int16)), alignment)
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(gradient_type)), alignment)
    remainder = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.int16)), alignment)
    exp_avg = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(exp_avg_type)), alignment)
    exp_avg_sq = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), alignment)
    count = tl.multiple_of(tl.load(row + 5), alignment)
    offsets = (tl.program_id(0) - tl.load(row + 6)).to(tl.int64) * block + tl.arange(0, block)
    _adamw_block(
        weight, gradient, remainder, exp_avg, exp_avg_sq, offsets, offsets < count,
        learning_rate, bias_corrections, clip_factor, beta1, beta2, epsilon, weight_decay,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _sum_squares(  # type: ignore[no-untyped-def]
    table, block_owner, sums,
    gradient_type: tl.constexpr, columns: tl.constexpr, alignment: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = table + tl.load(block_owner + tl.program_id(0)) * columns
    gradient = tl.multiple_of(tl.load(row).to(tl.pointer_type(gradient_type)), alignment)
    count = tl.multiple_of(tl.load(row + 1), alignment)
    offsets = (tl.program_id(0) - tl.load(row + 2)).to(tl.int64) * block + tl.arange(0, block)
    grad = tl.load(gradient + offsets, offsets < count, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(grad * grad))


class AdamWLauncher:
    """Runs the update of `bf16_adamw._adamw_update` with Triton; arguments are built ahead of the step.

    Small tensors share one kernel that reads their addresses from a table: 448 LoRA tensors launch in 50 µs, one by
    one in 23 ms. With static gradients (CUDA graphs) all tensors share it: a graph of 1 kernel starts at once, of 129
    kernels after 0.3 ms.
    """

    def __init__(self, tensors: Sequence[AdamWTensors], static_grads: bool) -> None:
        assert all(tensor.is_contiguous() for params in tensors for tensor in params)
        self._singles: list[AdamWTensors] = []
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[AdamWTensors]] = {}
        for params in tensors:
            dtypes = params[1].dtype, params[3].dtype
            is_large = params[0].numel() > SHARED_MAX_NUMEL and not static_grads
            is_single = is_large or not TRITON_DTYPES.keys() >= set(dtypes)
            (self._singles if is_single else by_dtype.setdefault(dtypes, [])).append(params)
        self._shared = [MultiTensorAdamW(params) for params in by_dtype.values()]

    def __call__(self, scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
        for launch in self._shared:
            launch(scalars, hyperparameters)
        _launch_singles(self._singles, scalars, hyperparameters)


class MultiTensorAdamW:
    """One kernel for all tensors of one combination of dtypes."""

    def __init__(self, tensors: Sequence[AdamWTensors]) -> None:
        self._programs, self._table, alignment = _table_on_device(tensors, BLOCK)
        _, gradient, _, exp_avg, _ = tensors[0]
        dtypes = TRITON_DTYPES[gradient.dtype], TRITON_DTYPES[exp_avg.dtype]
        self._constants = (*dtypes, self._table[0].shape[1], alignment, BLOCK)

    def __call__(self, scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
        _adamw_multi[self._programs](*self._table, *scalars, *hyperparameters, *self._constants)


class GradNormKernel:
    """L2 norm of gradients of one dtype, deterministic: sums of squares per block, then their sum."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        [dtype] = {gradient.dtype for gradient in gradients}
        self._type = TRITON_DTYPES[dtype]
        groups = [(gradient,) for gradient in gradients]
        self._programs, self._table, self._alignment = _table_on_device(groups, NORM_BLOCK)

    def __call__(self) -> Tensor:
        """The norm, in fp32."""
        sums = torch.empty(self._programs, device=self._table[0].device)
        columns = self._table[0].shape[1]
        _sum_squares[self._programs](*self._table, sums, self._type, columns, self._alignment, NORM_BLOCK, num_warps=8)
        return sums.sum().sqrt()


def _table_on_device(
    tensors: Sequence[tuple[Tensor, ...]], block: int
) -> tuple[tuple[int], tuple[Tensor, Tensor], int]:
    """Number of programs, the pointer table on the device, and the alignment of its addresses."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the pointer table must be built before CUDA graph capture")
    (pointers, block_owner, alignment), device = build_pointer_table(tensors, block), tensors[0][0].device
    return (len(block_owner),), (to_device(pointers, device), to_device(block_owner, device)), alignment


def _launch_singles(tensors: Sequence[AdamWTensors], scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
    """One kernel per tensor, alternating between two streams, so that kernels overlap at their ends."""
    if not tensors:
        return
    main_stream, side_stream = torch.cuda.current_stream(), _side_stream(scalars[0].device)
    side_stream.wait_stream(main_stream)
    with torch.cuda.stream(side_stream):
        for params in tensors[1::2]:
            _launch_single(params, scalars, hyperparameters)
    for params in tensors[::2]:
        _launch_single(params, scalars, hyperparameters)
    main_stream.wait_stream(side_stream)


def _launch_single(params: AdamWTensors, scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
    weight, *others = params
    count = weight.numel()
    programs = (triton.cdiv(count, BLOCK),)
    _adamw_single[programs](weight.view(torch.int16), *others, count, *scalars, *hyperparameters, block=BLOCK)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of our own: high-priority, since torch's pool hands out normal streams repeatedly."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
