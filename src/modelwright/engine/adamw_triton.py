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
"""Numbers that one program moves: 26 bytes each at 4.2 TB/s on an H200, against 3.5 of the compiled formula."""
SHARED_MAX_NUMEL = 4 * 2**20
"""Numbers up to which a tensor shares its kernel with others: a larger one is at work while the host launches more."""
NORM_BLOCK = 8192
"""Numbers of a gradient that one program adds up."""
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _adamw_block(  # type: ignore[no-untyped-def]  # the compiler would look annotations up among its own names
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
    master = master - lr / tl.load(bias_corrections) * momentum / (
        tl.sqrt(variance) / tl.load(bias_corrections + 1) + epsilon
    )
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
    """Does to tensors what `masters._move` does, to the last bits of fp32: all that can be ready before, is.

    Small ones share a kernel, which reads from a table where they are: 448 of low rank are launched in 50 microseconds,
    where one by one they took 23 ms, with the device standing still. Where tensors stay in their places all share it:
    a recording of one kernel begins at once, and one of 129 after a third of a millisecond.
    """

    def __init__(self, tensors: Sequence[AdamWTensors], static_grads: bool) -> None:
        assert all(tensor.is_contiguous() for params in tensors for tensor in params)
        self._singles: list[AdamWTensors] = []
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[AdamWTensors]] = {}
        for params in tensors:
            dtypes = params[1].dtype, params[3].dtype
            is_single = (params[0].numel() > SHARED_MAX_NUMEL and not static_grads) or not TRITON_DTYPES.keys() >= set(
                dtypes
            )
            (self._singles if is_single else by_dtype.setdefault(dtypes, [])).append(params)
        self._shared = [MultiTensorAdamW(params) for params in by_dtype.values()]

    def __call__(self, scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
        """Move the tensors."""
        for launch in self._shared:
            launch(scalars, hyperparameters)
        _launch_singles(self._singles, scalars, hyperparameters)


class MultiTensorAdamW:
    """One kernel for tensors of one kind."""

    def __init__(self, tensors: Sequence[AdamWTensors]) -> None:
        self._programs, self._table, alignment = _table_on_device(tensors, BLOCK)
        _, gradient, _, exp_avg, _ = tensors[0]
        self._constants = (
            TRITON_DTYPES[gradient.dtype],
            TRITON_DTYPES[exp_avg.dtype],
            self._table[0].shape[1],
            alignment,
            BLOCK,
        )

    def __call__(self, scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
        """Move the tensors."""
        _adamw_multi[self._programs](*self._table, *scalars, *hyperparameters, *self._constants)


class GradNormKernel:
    """How long gradients of one type are: sums of squares, then the sum of these, in an order that never changes."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        [dtype] = {gradient.dtype for gradient in gradients}
        self._type = TRITON_DTYPES[dtype]
        self._programs, self._table, self._alignment = _table_on_device(
            [(gradient,) for gradient in gradients], NORM_BLOCK
        )

    def __call__(self) -> Tensor:
        """The length, in fp32."""
        sums = torch.empty(self._programs, device=self._table[0].device)
        columns = self._table[0].shape[1]
        _sum_squares[self._programs](*self._table, sums, self._type, columns, self._alignment, NORM_BLOCK, num_warps=8)
        return sums.sum().sqrt()


def _table_on_device(
    tensors: Sequence[tuple[Tensor, ...]], block: int
) -> tuple[tuple[int], tuple[Tensor, Tensor], int]:
    """How many programs there are, their table on the device, and what its addresses are multiples of."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the pointer table must be built before CUDA graph capture")
    table, device = build_pointer_table(tensors, block), tensors[0][0].device
    return (
        (len(table.block_owner),),
        (to_device(table.pointers, device), to_device(table.block_owner, device)),
        table.alignment,
    )


def _launch_singles(tensors: Sequence[AdamWTensors], scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
    """One kernel a tensor, every other one in a second stream.

    Where one kernel ends, and few of its programs still run, another is at work already.
    """
    if not tensors:
        return
    main_stream, side_stream = torch.cuda.current_stream(), _side_stream(scalars[0].device)
    side_stream.wait_stream(main_stream)
    with torch.cuda.stream(side_stream):
        for params in tensors[1::2]:
            _launch_single(*params, scalars, hyperparameters)
    for params in tensors[::2]:
        _launch_single(*params, scalars, hyperparameters)
    main_stream.wait_stream(side_stream)


def _launch_single(
    weight: Tensor,
    gradient: Tensor,
    remainder: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: StepScalars,
    hyperparameters: Hyperparameters,
) -> None:
    count = weight.numel()
    programs = (triton.cdiv(count, BLOCK),)
    _adamw_single[programs](
        weight.view(torch.int16),
        gradient,
        remainder,
        exp_avg,
        exp_avg_sq,
        count,
        *scalars,
        *hyperparameters,
        block=BLOCK,
    )


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else uses: of high priority, since streams of the usual kind are handed out again."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
