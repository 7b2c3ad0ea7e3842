"""bf16 weights whose lost bits are kept: AdamW over exact fp32 masters, at the speed and nearly the size of bf16.

An fp32 master is its bf16 rounding (the weight the model computes with) and a signed 16-bit rest: 4 bytes together
instead of 6, no casting in the forward and backward pass, and the very arithmetic of fp32 masters in the update.

On a GPU the update is one kernel for all small tensors and one for each large, or for all where they stay in their
places (`adamw_kernel.py`), and nothing has to be compiled by torch before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modelwright.engine.adamw_table import Now, Parts, Settings
from modelwright.engine.shard import length_of

Moves = Callable[[Now, Settings], None]
STAYS = -1.0
"""The share of a gradient that is read where nothing is to move."""
REST = "rest"
"""What the optimizer state calls the 16 bits that a bf16 weight has lost."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as its bf16 rounding and the rest: bf16, int16."""
    high, rest = _split_bits(master.float().contiguous().view(torch.int32))
    return high.view(torch.bfloat16), rest


def join(high: Tensor, rest: Tensor) -> Tensor:
    """The fp32 tensor that was split."""
    return _joined_bits(high.contiguous().view(torch.int16), rest).view(torch.float32)


def halve(module: nn.Module) -> dict[str, Tensor]:
    """Turn a module's weights into bf16; returns the rest of those that move, by name."""
    rests: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        if weight.dtype is not torch.float32:
            continue
        if not weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
            continue
        weight.data, rests[name] = split(weight.data.contiguous())
    return rests


class Ready(NamedTuple):
    """A step that only has to be told the rates; on a GPU these are kernels of our own, which read each number once."""

    gradients: list[Tensor | None]
    length: Callable[[], Tensor]
    """How long they are."""
    moves: list[Moves]
    """What moves each group of weights."""
    stays: bool
    """Whether it may be done again with gradients that come in the same places."""


class SplitAdamW(torch.optim.Optimizer):
    """AdamW whose weights are bf16 and whose masters are exact; rests: by weight, what halving it left over.

    The mean of the gradients may be kept in bf16, which saves two bytes a weight and costs nothing that shows.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], rests: dict[Tensor, Tensor], mean: torch.dtype, **defaults: Any
    ) -> None:
        super().__init__(groups, defaults)
        device = self.param_groups[0]["params"][0].device
        count = torch.zeros((), device=device)
        self._shortened = torch.ones((), device=device)
        self._ready: Ready | None = None
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = {
                    "step": count,
                    "exp_avg": torch.zeros_like(weight, dtype=mean),
                    "exp_avg_sq": torch.zeros_like(weight, dtype=torch.float32),
                    REST: rests[weight],
                }

    @torch.no_grad()
    def shorten(self, longest: float) -> Tensor:
        """Read gradients as no longer than this in the next step, which saves a pass over them; returns their length.

        That step is got ready here: the device is at work now, and stands still once the length is known.
        """
        length = self.get_ready().length()
        self._shortened.copy_((longest / (length + 1e-6)).clamp(max=1.0))
        return length

    def stay_if(self, bad: Tensor) -> None:
        """Let the next step move nothing where this is true: the device knows before the host has asked."""
        self._shortened.masked_fill_(bad, STAYS)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient, unless it was told to stay."""
        assert closure is None
        count = self._count()
        ready, self._ready = self.get_ready(), None
        count += self._shortened >= 0
        for group, move in zip(self.param_groups, ready.moves, strict=True):
            beta1, beta2 = group["betas"]
            rates = torch.stack((1 - beta1**count, (1 - beta2**count).sqrt()))
            learning_rate = group["lr"]
            if not isinstance(learning_rate, Tensor):  # filled in there: one that is sent would wait for the device
                learning_rate = torch.full((), learning_rate, device=count.device)
            move((learning_rate, rates, self._shortened), (beta1, beta2, group["eps"], group["weight_decay"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients, also of those that a skipped step was got ready for."""
        self._ready = None
        super().zero_grad(set_to_none)

    def get_ready(self, to_stay: bool = False) -> Ready:
        """Have what the next step does ready, unless it is already and no other gradients have come since.

        to_stay: it will be done many times, with gradients that stay in their places.
        """
        gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
        ready = self._ready
        if (
            ready is None
            or (to_stay and not ready.stays)
            or any(now is not then for now, then in zip(gradients, ready.gradients, strict=True))
        ):
            ready = self._ready = Ready(gradients, *self._made_ready(gradients, to_stay), to_stay)
        return ready

    def _made_ready(self, gradients: list[Tensor | None], to_stay: bool) -> tuple[Callable[[], Tensor], list[Moves]]:
        count, there = self._count(), [gradient for gradient in gradients if gradient is not None]
        groups = [
            [self._parts(weight, count) for weight in group["params"] if weight.grad is not None]
            for group in self.param_groups
        ]
        if to_stay and not all(gradient.is_contiguous() for gradient in there):
            raise RuntimeError("copies of gradients are not where the gradients stay")
        if not count.is_cuda:
            return partial(length_of, there), [partial(_move_all, parts) for parts in groups]
        from modelwright.engine.adamw_kernel import Launches, Length

        apart = any(isinstance(gradient, DTensor) for gradient in there)
        length = partial(length_of, there) if apart else Length([parts[1] for parts in chain(*groups)])
        return length, [Launches(parts, to_stay) for parts in groups]

    def _count(self) -> Tensor:
        count: Tensor = next(iter(self.state.values()))["step"]
        return count

    def _parts(self, weight: Tensor, count: Tensor) -> Parts:
        state = self.state[weight]
        state["step"] = count  # one count for all, also after a restart that read it many times
        assert weight.grad is not None
        beside = (_local(state[REST]), _local(state["exp_avg"]), _local(state["exp_avg_sq"]))
        return _local(weight), _local(weight.grad).contiguous(), *beside


def _move_all(tensors: Iterable[Parts], now: Now, settings: Settings) -> None:
    for parts in tensors if now[2] >= 0 else ():
        _move(*parts, now, settings)


def _move(
    weight: Tensor, gradient: Tensor, rest: Tensor, mean: Tensor, square: Tensor,
    now: Now, settings: Settings,
) -> None:  # fmt: skip
    """One AdamW step of one tensor, in fp32, by torch's own formula."""
    beta1, beta2, epsilon, decay = settings
    learning_rate, corrections, shortened = now
    gradient = gradient.float() * shortened
    direction = mean.float().lerp(gradient, 1 - beta1)
    mean.copy_(direction)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    master = _joined_bits(weight.view(torch.int16), rest).view(torch.float32)
    master = master * (1 - learning_rate * decay)
    master = master - learning_rate / corrections[0] * direction / (square.sqrt() / corrections[1] + epsilon)
    high, left = _split_bits(master.view(torch.int32))
    weight.copy_(high.view(torch.bfloat16))
    rest.copy_(left)


def _split_bits(bits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 bits to the bits of the nearest bf16 and the signed difference: int16, int16.

    Ties go away from zero: to even, a tie that goes down would leave a rest of 32768, one more than int16 holds.
    """
    high = _rounded(bits)
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def _rounded(bits: Tensor) -> Tensor:
    return (bits + 0x8000) >> 16


def _joined_bits(high: Tensor, rest: Tensor) -> Tensor:
    return (high.to(torch.int32) << 16) + rest.to(torch.int32)


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
