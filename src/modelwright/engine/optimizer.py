"""Optimizers, learning-rate schedules and the exponential moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from modelwright.engine.parallel import distribute_like, full_tensor, local_shard
from modelwright.engine.precision import PARAM_REMAINDER
from modelwright.plan.stage import StagePlan
from modelwright.recipe.stage_specs import OPTIMIZERS, OptimizerConfig, OptimizerSpec

LrSchedule = Callable[[int], float]
SHARED_MAX_NUMEL = 4 * 2**20
"""Tensors up to this size are updated together, by one kernel for each operation."""
ONE_CYCLE_START, ONE_CYCLE_END = 0.04, 0.001
"""First and last factor of a one_cycle schedule: linear warm-up, cosine decay."""


class TrainerOptimizer(torch.optim.Optimizer):
    """What the loop, the checkpoint and the memory profiler ask of an optimizer; a torch optimizer adds `step`."""

    spec: OptimizerSpec
    """What recipe and planner know of it."""
    named_params: Mapping[str, Tensor]
    """Trained parameters in the order of the module, in which the gradient norm is summed."""

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradients to a norm, or set the factor by which the step reads them; returns the norm before."""
        if math.isinf(max_norm):
            return total_grad_norm([param.grad for param in self.named_params.values() if param.grad is not None])
        return full_tensor(clip_grad_norm_(self.named_params.values(), max_norm))

    def prepare_step(self, static_grads: bool = False) -> object:
        """Prepare the next step; static_grads: a CUDA graph will replay it, and must keep the result alive."""
        return None

    def make_capturable(self, device: torch.device) -> None:
        """Let a CUDA graph replay the step: the learning rate becomes a tensor that a captured step reads."""
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            group["capturable"] = True

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.param_groups:
            group["lr"] = group["lr"].fill_(learning_rate) if isinstance(group["lr"], Tensor) else learning_rate

    def state_tensors(self) -> dict[str, Tensor]:
        """The state of every parameter, named `parameter.key` as in a checkpoint."""
        states = ((name, self.state.get(param, {})) for name, param in self.named_params.items())
        return {f"{name}.{key}": value for name, state in states for key, value in state.items()}

    def load_state_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Restore the state of a checkpoint, sharded as the parameters are."""
        self.state.clear()
        for name, tensor in tensors:
            param_name, key = name.rsplit(".", 1)
            param = self.named_params[param_name]
            # a fused optimizer counts steps on the parameter's device
            self.state[param][key] = tensor.to(param.device) if key == "step" else distribute_like(tensor, param)
        keys = {key for state in self.state.values() for key in state} - {PARAM_REMAINDER, "step"}
        if keys and keys != {*self.spec.state}:
            raise ValueError(f"another optimizer wrote it, with {', '.join(sorted(keys))}")


class FusedAdamW(TrainerOptimizer, torch.optim.AdamW):
    """torch's AdamW over fp32 parameters."""


class FusedSGD(TrainerOptimizer, torch.optim.SGD):
    """torch's SGD with Nesterov momentum."""


class Lion(TrainerOptimizer):
    """Lion (arXiv:2302.06675): steps by the sign of an interpolated momentum, with decoupled weight decay."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all small tensors together and each large one alone: the temporary updates stay small."""
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            tensors = [self._local_tensors(param) for param in group["params"] if param.grad is not None]
            large = [[each] for each in tensors if each[0].numel() > SHARED_MAX_NUMEL]
            small = [each for each in tensors if each[0].numel() <= SHARED_MAX_NUMEL]
            for params, grads, exp_avgs in (zip(*batch, strict=True) for batch in [*large, small] if batch):
                updates = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
                torch._foreach_sign_(updates)
                torch._foreach_mul_(updates, lr)  # add_(alpha=-lr) would wait for the tensor that a captured step reads
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
                torch._foreach_sub_(params, updates)
                torch._foreach_lerp_(exp_avgs, grads, 1 - beta2)

    def _local_tensors(self, param: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.state[param]:
            self.state[param]["exp_avg"] = torch.zeros_like(param)
        assert param.grad is not None
        return local_shard(param), local_shard(param.grad), local_shard(self.state[param]["exp_avg"])


def build_optimizer(
    named_params: Mapping[str, Tensor], settings: OptimizerConfig, remainders: dict[str, Tensor] | None = None
) -> TrainerOptimizer:
    """The optimizer over the trained parameters, in bf16 if given remainders; no weight decay for norms and biases."""
    matrices = [param for param in named_params.values() if param.ndim >= 2]
    vectors = [param for param in named_params.values() if param.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": settings.weight_decay}] if matrices else []
    groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": (settings.adam_beta1, settings.adam_beta2)}
    if settings.optim == "lion":
        optimizer: TrainerOptimizer = Lion(groups, options)
    elif settings.optim == "sgd":
        optimizer = FusedSGD(groups, options["lr"], settings.momentum, nesterov=settings.momentum > 0, fused=True)
    elif remainders is None:
        # fused on 2 CPU cores too: 0.14 s instead of 0.35 s for 135 M parameters, and 1 GB less at the peak
        optimizer = FusedAdamW(groups, **options, eps=settings.adam_epsilon, fused=True)
    else:
        from modelwright.engine.bf16_adamw import BF16AdamW

        sharded = {named_params[name]: distribute_like(value, named_params[name]) for name, value in remainders.items()}
        exp_avg_dtype = torch.bfloat16 if settings.exp_avg_dtype == "bf16" else torch.float32
        optimizer = BF16AdamW(groups, sharded, exp_avg_dtype, **options, eps=settings.adam_epsilon)
    optimizer.named_params, optimizer.spec = named_params, OPTIMIZERS[settings.optim]
    return optimizer


def total_grad_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm of all gradients together, computed in fp32; a collective for DTensors, so every rank must call it."""
    parts = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return full_tensor(torch.linalg.vector_norm(torch.stack(parts)))


def build_schedule(settings: OptimizerConfig, plan: StagePlan) -> LrSchedule:
    """The learning rate at each step, by the formulas of transformers' schedules."""
    peak, warmup_steps, steps = plan.learning_rate, plan.warmup_steps, plan.steps
    decay_steps = max(1, steps - warmup_steps)

    def cosine(step: int) -> float:
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / decay_steps)))

    def stable_then_decay(step: int) -> float:
        remaining = (steps - step) / max(1, plan.decay_steps)
        return 0.5 * (1.0 - math.cos(math.pi * min(1.0, max(0.0, remaining))))

    schedules: dict[str, LrSchedule] = {
        "one_cycle": lambda step: ONE_CYCLE_END + (1.0 - ONE_CYCLE_END) * cosine(step),
        "linear": lambda step: max(0.0, (steps - step) / decay_steps),
        "cosine": cosine,
        "constant": lambda step: 1.0,
        "constant_with_warmup": lambda step: 1.0,
        "warmup_stable_decay": stable_then_decay,
    }
    schedule = schedules[settings.lr_scheduler_type]
    start_factor = ONE_CYCLE_START if settings.lr_scheduler_type == "one_cycle" else 0.0

    def learning_rate(step: int) -> float:
        if step < warmup_steps and settings.lr_scheduler_type != "constant":
            return peak * (start_factor + (1.0 - start_factor) * step / warmup_steps)
        return peak * schedule(step)

    return learning_rate


class EMA:
    """Exponential moving average of parameters and buffers; holds nothing if decay is 0."""

    def __init__(self, tensors: dict[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._tensors = {name: tensor for name, tensor in tensors.items() if decay and tensor.is_floating_point()}
        self.shadow = {name: tensor.detach().float().clone() for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after a step; the decay is lower in the first steps."""
        decay = min(self._decay, (1 + step) / (10 + step))
        if self.shadow:
            current = [self._tensors[name].detach().float() for name in self.shadow]
            torch._foreach_lerp_(list(self.shadow.values()), current, 1 - decay)  # one kernel for all tensors

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Use the average instead of the parameters inside."""
        weights = {name: self._tensors[name].detach().clone() for name in self.shadow}
        self.copy_to()
        try:
            yield
        finally:
            self.copy_to(weights)

    @torch.no_grad()
    def copy_to(self, values: dict[str, Tensor] | None = None) -> None:
        """Copy the average, or other values, into the parameters."""
        for name, value in (self.shadow if values is None else values).items():
            self._tensors[name].copy_(value)
