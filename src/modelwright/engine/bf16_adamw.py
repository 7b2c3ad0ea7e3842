"""AdamW over bf16 weights with 16-bit remainders: exact fp32 master weights in 4 bytes per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modelwright.engine.parallel import total_grad_norm

AdamWTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What moves a weight: itself, its gradient, rest, mean and square, all of one shape."""
StepScalars = tuple[Tensor, Tensor, Tensor]
"""On the device: learning rate, corrections of the two means, share of the gradient to read, below 0 to stay."""
Hyperparameters = tuple[float, float, float, float]
"""The two betas, epsilon and weight decay."""
VECTOR_BYTES = 16
"""Bytes that a thread reads at once, where all addresses are multiples of them and no count leaves a part of them."""


@dataclass(frozen=True)
class PointerTable:
    """What a kernel has to know of many tensors."""

    pointers: Tensor
    """[tensors, columns] int64: the addresses of its parts, how many numbers a tensor has, which program begins it."""
    block_owner: Tensor
    """[programs] int32: the tensor that each program takes a block of."""
    alignment: int
    """What every address and count is a multiple of: ALIGNED or 1."""


def build_pointer_table(tensors: Sequence[tuple[Tensor, ...]], block: int) -> PointerTable:
    """The table of tensors of some parts each, of which each program takes one block of numbers."""
    counts = np.array([group[0].numel() for group in tensors])
    programs = -(-counts // block)
    addresses = np.array([tensor.data_ptr() for group in tensors for tensor in group]).reshape(len(tensors), -1)
    pointers = np.column_stack((addresses, counts, programs.cumsum() - programs))
    block_owner = np.repeat(np.arange(len(tensors), dtype=np.int32), programs)
    return PointerTable(
        torch.from_numpy(pointers),
        torch.from_numpy(block_owner),
        1 if (pointers[:, :-1] % VECTOR_BYTES).any() else VECTOR_BYTES,
    )


UpdateFn = Callable[[StepScalars, Hyperparameters], None]
SKIPPED = -1.0
"""The share of a gradient that is read where nothing is to move."""
PARAM_REMAINDER = "param_remainder"
"""What the optimizer state calls the 16 bits that a bf16 weight has lost."""


def split_fp32_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as its bf16 rounding and the rest: bf16, int16."""
    high, remainder = _split_bits(master.float().contiguous().view(torch.int32))
    return high.view(torch.bfloat16), remainder


def join_fp32_master(high: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 tensor that was split."""
    return _join_bits(high.contiguous().view(torch.int16), remainder).view(torch.float32)


def to_bf16_with_remainders(module: nn.Module) -> dict[str, Tensor]:
    """Turn a module's weights into bf16; returns the rest of those that move, by name."""
    remainders: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        if weight.dtype is not torch.float32:
            continue
        if not weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
            continue
        weight.data, remainders[name] = split_fp32_master(weight.data.contiguous())
    return remainders


class PreparedStep(NamedTuple):
    """A step that only has to be told the rates; on a GPU these are kernels of our own, which read each number once."""

    gradients: list[Tensor | None]
    grad_norm: Callable[[], Tensor]
    """How long they are."""
    updates: list[UpdateFn]
    """What moves each group of weights."""
    static_grads: bool
    """Whether it may be done again with gradients that come in the same places."""


class BF16AdamW(torch.optim.Optimizer):
    """AdamW whose weights are bf16 and whose masters are exact; rests: by weight, what halving it left over.

    The mean of the gradients may be kept in bf16, which saves two bytes a weight and costs nothing that shows.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        param_remainders: dict[Tensor, Tensor],
        exp_avg_dtype: torch.dtype,
        **defaults: Any,
    ) -> None:
        super().__init__(groups, defaults)
        device = self.param_groups[0]["params"][0].device
        step_count = torch.zeros((), device=device)
        self._clip_factor = torch.ones((), device=device)
        self._prepared: PreparedStep | None = None
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = {
                    "step": step_count,
                    "exp_avg": torch.zeros_like(weight, dtype=exp_avg_dtype),
                    "exp_avg_sq": torch.zeros_like(weight, dtype=torch.float32),
                    PARAM_REMAINDER: param_remainders[weight],
                }

    @torch.no_grad()
    def set_clip_factor(self, max_norm: float) -> Tensor:
        """Read gradients as no longer than this in the next step, which saves a pass over them; returns their length.

        That step is got ready here: the device is at work now, and stands still once the length is known.
        """
        grad_norm = self.prepare_step().grad_norm()
        self._clip_factor.copy_((max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        return grad_norm

    def skip_step_if(self, is_bad_step: Tensor) -> None:
        """Let the next step move nothing where this is true: the device knows before the host has asked."""
        self._clip_factor.masked_fill_(is_bad_step, SKIPPED)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient, unless it was told to stay."""
        assert closure is None
        step_count = self._step_count()
        prepared, self._prepared = self.prepare_step(), None
        step_count += self._clip_factor >= 0
        for group, update in zip(self.param_groups, prepared.updates, strict=True):
            beta1, beta2 = group["betas"]
            bias_corrections = torch.stack((1 - beta1**step_count, (1 - beta2**step_count).sqrt()))
            learning_rate = group["lr"]
            if not isinstance(learning_rate, Tensor):  # filled in there: one that is sent would wait for the device
                learning_rate = torch.full((), learning_rate, device=step_count.device)
            update(
                (learning_rate, bias_corrections, self._clip_factor),
                (beta1, beta2, group["eps"], group["weight_decay"]),
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients, also of those that a skipped step was got ready for."""
        self._prepared = None
        super().zero_grad(set_to_none)

    def prepare_step(self, static_grads: bool = False) -> PreparedStep:
        """Have what the next step does ready, unless it is already and no other gradients have come since.

        to_stay: it will be done many times, with gradients that stay in their places.
        """
        gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
        prepared = self._prepared
        if (
            prepared is None
            or (static_grads and not prepared.static_grads)
            or any(current is not previous for current, previous in zip(gradients, prepared.gradients, strict=True))
        ):
            prepared = self._prepared = PreparedStep(
                gradients, *self._build_step(gradients, static_grads), static_grads
            )
        return prepared

    def _build_step(
        self, gradients: list[Tensor | None], static_grads: bool
    ) -> tuple[Callable[[], Tensor], list[UpdateFn]]:
        step_count, grads = self._step_count(), [gradient for gradient in gradients if gradient is not None]
        groups = [
            [self._tensors_of_param(weight, step_count) for weight in group["params"] if weight.grad is not None]
            for group in self.param_groups
        ]
        if static_grads and not all(gradient.is_contiguous() for gradient in grads):
            raise RuntimeError("copies of gradients are not static")
        if not step_count.is_cuda:
            return partial(total_grad_norm, grads), [partial(_adamw_update_all, tensors) for tensors in groups]
        from modelwright.engine.adamw_triton import AdamWLauncher, GradNormKernel

        is_sharded = any(isinstance(gradient, DTensor) for gradient in grads)
        grad_norm = (
            partial(total_grad_norm, grads)
            if is_sharded
            else GradNormKernel([tensors[1] for tensors in chain(*groups)])
        )
        return grad_norm, [AdamWLauncher(tensors, static_grads) for tensors in groups]

    def _step_count(self) -> Tensor:
        step_count: Tensor = next(iter(self.state.values()))["step"]
        return step_count

    def _tensors_of_param(self, weight: Tensor, step_count: Tensor) -> AdamWTensors:
        state = self.state[weight]
        state["step"] = step_count  # one count for all, also after a restart that read it many times
        assert weight.grad is not None
        state_tensors = (_local(state[PARAM_REMAINDER]), _local(state["exp_avg"]), _local(state["exp_avg_sq"]))
        return _local(weight), _local(weight.grad).contiguous(), *state_tensors


def _adamw_update_all(params: Iterable[AdamWTensors], scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
    for tensors in params if scalars[2] >= 0 else ():
        _adamw_update(*tensors, scalars, hyperparameters)


def _adamw_update(
    weight: Tensor, gradient: Tensor, remainder: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    scalars: StepScalars, hyperparameters: Hyperparameters,
) -> None:  # fmt: skip
    """One AdamW step of one tensor, in fp32, by torch's own formula."""
    beta1, beta2, epsilon, weight_decay = hyperparameters
    learning_rate, bias_corrections, clip_factor = scalars
    gradient = gradient.float() * clip_factor
    momentum = exp_avg.float().lerp(gradient, 1 - beta1)
    exp_avg.copy_(momentum)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    master = _join_bits(weight.view(torch.int16), remainder).view(torch.float32)
    master = master * (1 - learning_rate * weight_decay)
    master = master - learning_rate / bias_corrections[0] * momentum / (
        exp_avg_sq.sqrt() / bias_corrections[1] + epsilon
    )
    high, new_remainder = _split_bits(master.view(torch.int32))
    weight.copy_(high.view(torch.bfloat16))
    remainder.copy_(new_remainder)


def _split_bits(bits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 bits to the bits of the nearest bf16 and the signed difference: int16, int16.

    Ties go away from zero: to even, a tie that goes down would leave a rest of 32768, one more than int16 holds.
    """
    high = _round_to_bf16_bits(bits)
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def _round_to_bf16_bits(bits: Tensor) -> Tensor:
    return (bits + 0x8000) >> 16


def _join_bits(high: Tensor, remainder: Tensor) -> Tensor:
    return (high.to(torch.int32) << 16) + remainder.to(torch.int32)


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
