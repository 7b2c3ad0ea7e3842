"""Weights whose gradients are added up where they are made: by the very product that makes them.

In a step of several micro-batches torch writes each gradient down, then reads it and the sum before it and writes the
sum: twice the bytes, and one rounding more. With four micro-batches of 16,384 tokens and 6 B weights that pass took
0.6 % of a step; a card at its limit of power gave little of it back. With smaller micro-batches it is a larger part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.models import products
from modelwright.models.low_rank import BESIDE
from modelwright.models.operations import operation

CHANGED = "modified by an inplace operation"
"""What torch says of a tensor that was to be as it had been."""


@torch.library.custom_op("modelwright::gather", mutates_args={"into"})
def gather(into: Tensor, given: Tensor, x: Tensor) -> None:
    """Add a weight's gradient to the sum. given: [rows, out], x: [rows, in], into: [out, in]."""
    products.add_mm(into, given.T, x)


@torch.library.custom_op("modelwright::gathered_mm", mutates_args=())
def gathered(x: Tensor, weight: Tensor, into: Tensor) -> Tensor:
    """A linear layer, whose weight's gradient is added up there. x: [rows, in]."""
    return products.mm(x, weight.T)


@operation("linear_mm(Tensor x, Tensor weight) -> Tensor", lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def product(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer. x: [rows, in]."""
    return products.mm(x, weight.T)


@operation(
    "backward_mm(Tensor given, Tensor w) -> Tensor", lambda given, w: given.new_empty(given.shape[0], w.shape[1])
)
def backward(given: Tensor, w: Tensor) -> Tensor:
    """The gradient of the input: [rows, in]."""
    return products.mm(given, w)


@operation("weight_mm(Tensor given, Tensor x) -> Tensor", lambda given, x: x.new_empty(given.shape[1], x.shape[1]))
def to_weight(given: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight: [out, in]."""
    return products.mm(given.T, x)


@gather.register_fake
def _(into: Tensor, given: Tensor, x: Tensor) -> None:
    return None


@gathered.register_fake
def _(x: Tensor, weight: Tensor, into: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.into = inputs[2]  # which changes, and is not asked for what it was


def _back(ctx: Any, given: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    gather(ctx.into, given, x)
    return backward(given, weight) if ctx.needs_input_grad[0] else None, None, None


gathered.register_autograd(_back, setup_context=_keep)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        made: Tensor = product(x, weight)
        return made

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return backward(given, weight) if needs_x else None, to_weight(given, x) if needs_weight else None


class Gathering:
    """The linear layers of a model that add up their gradients themselves."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """layers: whose linear layers do, where they learn and have no bias; low-rank ones are too small to gain."""
        self._linears: list[Any] = [
            part for layer in layers for name, part in layer.named_modules() if BESIDE not in name and _learns(part)
        ]
        for linear in self._linears:
            linear.into = None
            if "forward" not in linear.__dict__:  # or it knows of this, as those of attention do
                linear.forward = MethodType(multiplied, linear)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Inside, the first gradients of a step are made."""
        for weight in {id(linear.weight): linear.weight for linear in self._linears}.values():  # which some share
            weight.grad = torch.zeros_like(weight)
        with self.more():
            yield

    @contextmanager
    def more(self) -> Iterator[None]:
        """Inside, gradients are added to what the weights have."""
        for linear in self._linears:
            linear.into = linear.weight.grad
        try:
            yield
        finally:
            for linear in self._linears:
                linear.into = None

    def give_up(self, error: Exception) -> bool:
        """Leave it to torch from now on, where a compiled layer is gone through twice before its gradients are made:
        it would not have what it is given change meanwhile. Returns whether that was it."""
        was_it = bool(self._linears) and CHANGED in str(error)
        if was_it:
            self._linears = []
        return was_it


def _learns(part: Any) -> bool:
    """Whether it is a linear layer with a weight of its own, that moves, and nothing beside it."""
    plain = type(part) is nn.Linear and getattr(part, "bias", None) is None
    return plain and part.weight.requires_grad and part.weight.is_leaf


def install(model: nn.Module) -> None:
    """Let the linear layers of a model multiply by kernels that are chosen, where their products are large."""
    for linear in model.modules():
        if type(linear) is nn.Linear and "forward" not in linear.__dict__:
            linear.forward = MethodType(multiplied, linear)  # type: ignore[method-assign]


def multiplied(linear: Any, x: Tensor) -> Tensor:
    """What a linear layer makes of its input."""
    into: Tensor | None = getattr(linear, "into", None)
    if linear.bias is not None or (into is None and not products.is_large(x, linear.weight.T)):
        return F.linear(x, linear.weight, linear.bias)
    rows, weight = x.flatten(0, -2) if x.dim() > 1 else x[None], linear.weight
    made: Tensor = _Linear.apply(rows, weight) if into is None else gathered(rows, weight, into)  # type: ignore[no-untyped-call]
    return made.view(*x.shape[:-1], linear.weight.shape[0])
