"""AdamW over bf16 weights with 16-bit remainders: exact fp32 master weights in 4 bytes per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from modelwright.engine.optimizer import TrainerOptimizer, total_grad_norm
from modelwright.engine.parallel import local_shard
from modelwright.engine.precision import PARAM_REMAINDER, join_fp32_master, split_fp32_master

AdamWTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Weight, gradient, remainder, exp_avg and exp_avg_sq of one parameter, all of one shape."""
StepScalars = tuple[Tensor, Tensor, Tensor]
"""On the device: learning rate, the two bias corrections, clip factor (below 0: skip the step)."""
Hyperparameters = tuple[float, float, float, float]
"""The two betas, epsilon and weight decay."""
VECTOR_BYTES = 16
"""Vector width of a load, used where all addresses and sizes are multiples of it."""


def build_pointer_table(tensors: Sequence[tuple[Tensor, ...]], block: int) -> tuple[Tensor, Tensor, int]:
    """Addresses and sizes of groups of tensors for one kernel (multi-tensor apply) whose programs handle a block each.

    Returns [tensors, columns] int64: addresses, number of elements, first program of each tensor; [programs] int32: the
    tensor whose block a program handles; the common divisor of all addresses and sizes: VECTOR_BYTES or 1.
    """
    counts = np.array([group[0].numel() for group in tensors])
    programs = -(-counts // block)
    addresses = np.array([tensor.data_ptr() for group in tensors for tensor in group]).reshape(len(tensors), -1)
    pointers = np.column_stack((addresses, counts, programs.cumsum() - programs))
    block_owner = np.repeat(np.arange(len(tensors), dtype=np.int32), programs)
    alignment = 1 if (pointers[:, :-1] % VECTOR_BYTES).any() else VECTOR_BYTES
    return torch.from_numpy(pointers), torch.from_numpy(block_owner), alignment


UpdateFn = Callable[[StepScalars, Hyperparameters], None]
SKIPPED = -1.0
"""The clip factor of a skipped step."""


class PreparedStep(NamedTuple):
    """Kernels and arguments of the next optimizer step; on a GPU our Triton kernels."""

    gradients: list[Tensor | None]
    grad_norm: Callable[[], Tensor]
    updates: list[UpdateFn]
    """The AdamW update of each parameter group."""
    static_grads: bool
    """Whether the gradients stay at the same addresses, so that a CUDA graph can replay the step."""


class BF16AdamW(TrainerOptimizer):
    """AdamW over bf16 parameters with exact fp32 masters; a bf16 exp_avg saves 2 bytes per parameter at no loss."""

    can_skip_on_device = True

    def __init__(
        self, groups: list[Any], param_remainders: dict[Tensor, Tensor], exp_avg_dtype: torch.dtype, **defaults: Any
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
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by scaling gradients as the step reads them, which saves a pass; returns the norm, prepares the step."""
        grad_norm = self.prepare_step().grad_norm()
        self._clip_factor.copy_((max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        return grad_norm

    def skip_step_if(self, is_bad_step: Tensor) -> None:
        """Skip the next step if this is true, decided on the device without waiting for the host."""
        self._clip_factor.masked_fill_(is_bad_step, SKIPPED)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, unless the step is skipped."""
        assert closure is None
        step_count = self._step_count()
        prepared, self._prepared = self.prepare_step(), None
        step_count += self._clip_factor >= 0
        for group, update in zip(self.param_groups, prepared.updates, strict=True):
            beta1, beta2 = group["betas"]
            bias_corrections = torch.stack((1 - beta1**step_count, (1 - beta2**step_count).sqrt()))
            learning_rate = group["lr"]
            if not isinstance(learning_rate, Tensor):  # a fill on the device: a copy from the host would synchronize
                learning_rate = torch.full((), learning_rate, device=step_count.device)
            hyperparameters = (beta1, beta2, group["eps"], group["weight_decay"])
            update((learning_rate, bias_corrections, self._clip_factor), hyperparameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients and the step prepared for them."""
        self._prepared = None
        super().zero_grad(set_to_none)

    def prepare_step(self, static_grads: bool = False) -> PreparedStep:
        """Prepare the next step, unless done for these gradients; static_grads: a CUDA graph will replay it."""
        gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
        prepared = self._prepared
        if (
            prepared is None
            or (static_grads and not prepared.static_grads)
            or any(current is not previous for current, previous in zip(gradients, prepared.gradients, strict=True))
        ):
            grad_norm, updates = self._build_step(gradients, static_grads)
            prepared = self._prepared = PreparedStep(gradients, grad_norm, updates, static_grads)
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
        local_grads = [tensors[1] for tensors in chain(*groups)]
        grad_norm = partial(total_grad_norm, grads) if is_sharded else GradNormKernel(local_grads)
        return grad_norm, [AdamWLauncher(tensors, static_grads) for tensors in groups]

    def _step_count(self) -> Tensor:
        step_count: Tensor = next(iter(self.state.values()))["step"]
        return step_count

    def _tensors_of_param(self, weight: Tensor, step_count: Tensor) -> AdamWTensors:
        state = self.state[weight]
        state["step"] = step_count  # one shared count, also after a checkpoint loaded one per parameter
        assert weight.grad is not None
        remainder, exp_avg, exp_avg_sq = (local_shard(state[key]) for key in (PARAM_REMAINDER, "exp_avg", "exp_avg_sq"))
        return local_shard(weight), local_shard(weight.grad).contiguous(), remainder, exp_avg, exp_avg_sq


def _adamw_update_all(params: Iterable[AdamWTensors], scalars: StepScalars, hyperparameters: Hyperparameters) -> None:
    for tensors in params if scalars[2] >= 0 else ():
        _adamw_update(*tensors, scalars, hyperparameters)


def _adamw_update(
    weight: Tensor, gradient: Tensor, remainder: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    scalars: StepScalars, hyperparameters: Hyperparameters,
) -> None:  # fmt: skip
    """One AdamW step of one tensor in fp32, by the formula of torch.optim.AdamW."""
    beta1, beta2, epsilon, weight_decay = hyperparameters
    learning_rate, bias_corrections, clip_factor = scalars
    gradient = gradient.float() * clip_factor
    momentum = exp_avg.float().lerp(gradient, 1 - beta1)
    exp_avg.copy_(momentum)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    master = join_fp32_master(weight, remainder)
    master = master * (1 - learning_rate * weight_decay)
    denominator = exp_avg_sq.sqrt() / bias_corrections[1] + epsilon
    master = master - learning_rate / bias_corrections[0] * momentum / denominator
    high, new_remainder = split_fp32_master(master)
    weight.copy_(high)
    remainder.copy_(new_remainder)
