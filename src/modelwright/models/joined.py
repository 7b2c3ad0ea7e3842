"""Queries, keys and values as one product: where a layer is compiled, three matrices that read the same are one.

Keys and values have few heads, and a product with few columns leaves much of a GPU idle. The three weights are moved
next to each other before layers are compiled; where they lie apart, each pass copies them. On an H200 the kernels of a
LoRA step of 8 B took 986 ms instead of 999; where all weights move, laying gradients side by side takes most of the
gain again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.models import products
from modelwright.models.gathered import gather, multiplied, to_weight
from modelwright.models.low_rank import is_plain, matrices_of, size_of
from modelwright.models.operations import operation

KNOWN = {
    *("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "SmolLM3Attention"),
    *("GemmaAttention", "Gemma2Attention", "Gemma3Attention"),
}
"""Attention that takes from what it is given its queries, keys, values and length, and nothing more."""
NAMES = ("q_proj", "k_proj", "v_proj")


@operation(
    "joined(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    lambda x, weights, biases: x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights)),
)
def product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """What several linear layers make of the same rows, side by side. x: [rows, width]."""
    made = products.mm(x, _together(weights).T)
    return made.add_(torch.cat(list(biases))) if biases else made


@operation(
    "joined_backward(Tensor given, Tensor[] weights) -> Tensor",
    lambda given, weights: given.new_empty(given.shape[0], weights[0].shape[1]),
)
def backward(given: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the rows. given: that of the product."""
    return products.mm(given, _together(weights))


@operation(
    "side_by_side(Tensor[] parts) -> Tensor",
    lambda parts: parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)),
)
def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Rows next to each other: a compiler would compute all parts for each number of each, 0.25 ms instead of 0.18."""
    return torch.cat(list(parts), -1)


@torch.library.custom_op("modelwright::joined_gathered", mutates_args=())
def gathered(x: Tensor, weights: Sequence[Tensor], into: Sequence[Tensor]) -> Tensor:
    """The same where the gradients of the weights are added up in places of their own (`gathered.py`)."""
    return products.mm(x, _together(weights).T)


@gathered.register_fake
def _(x: Tensor, weights: Sequence[Tensor], into: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, ctx.into = inputs
    ctx.save_for_backward(x, *weights)


def _back(ctx: Any, given: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    for sums, part in zip(ctx.into, torch.split(given, [len(weight) for weight in weights], 1), strict=True):
        gather(sums, part, x)
    to_x = backward(given, weights) if ctx.needs_input_grad[0] else None
    return to_x, [None] * len(weights), [None] * len(weights)


gathered.register_autograd(_back, setup_context=_keep)


class _Joined(torch.autograd.Function):
    """Of rows, how many weights there are, the weights and, where they have some, as many biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.count = count
        ctx.save_for_backward(x, *tensors[:count])
        made: Tensor = product(x, tensors[:count], tensors[count:])
        return made

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad
        sizes = [len(weight) for weight in weights]
        learnt: list[Tensor | None] = [None] * len(needed)
        if any(needed[: ctx.count]):
            learnt[: ctx.count] = torch.split(to_weight(given, x), sizes)
        if any(needed[ctx.count :]):
            learnt[ctx.count :] = torch.split(given.sum(0), sizes)
        return backward(given, weights) if needs_x else None, None, *learnt


class _Apart(torch.autograd.Function):
    """Rows cut into parts, each by itself: a view that is kept for the backward pass would keep the whole."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in torch.split(rows, sizes, -1))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        rows: Tensor = side_by_side(given)
        return rows, None


class Made(NamedTuple):
    """What takes the place of the rows that attention is given: what it would make of them first."""

    shape: tuple[int, ...]
    """Of the rows."""
    parts: tuple[Tensor, ...]
    """Queries, keys and values."""


def install(model: Any) -> Any:
    """Let the attention of a model, where that is known, multiply once wherever it is compiled; returns the model."""
    for attention in model.modules():
        if type(attention).__name__ not in KNOWN:
            continue
        linears = _linears(attention)
        if all(map(_is_untouched, (attention, *linears))) and all(map(_is_usual, linears)):
            attention.forward = MethodType(_attend, attention)
            for number, linear in enumerate(linears):
                linear.number, linear.forward = number, MethodType(_taken, linear)
    return model


@torch.no_grad()
def lay_together(parts: Iterable[nn.Module]) -> None:
    """Move weights that are multiplied together next to each other, so that they are one matrix without a copy."""
    for attention in (module for part in parts for module in part.modules() if _is_joined(module)):
        weights = [getattr(linear, "base_layer", linear).weight for linear in _linears(attention)]
        alike = all(type(weight) is nn.Parameter and weight.dtype is weights[0].dtype for weight in weights)
        if not alike or _as_one(weights) is not None:
            continue
        data = torch.split(torch.cat(weights), [len(weight) for weight in weights])
        for weight, part in zip(weights, data, strict=True):
            weight.data = part


def _linears(attention: Any) -> list[Any]:
    return [getattr(attention, name) for name in NAMES]


def _is_joined(module: Any) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is _attend


def _together(weights: Sequence[Tensor]) -> Tensor:
    """Several matrices of one width as one."""
    whole = _as_one(weights)
    return torch.cat(list(weights)) if whole is None else whole


def _as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """The one matrix that they are the parts of, where each begins at the end of the one before."""
    first, rows, width = weights[0], sum(len(weight) for weight in weights), weights[0].shape[1]
    place, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for weight in weights:
        lies_there = weight.data_ptr() == end and weight.untyped_storage().data_ptr() == place
        if not (lies_there and weight.is_contiguous() and weight.dtype is first.dtype):
            return None
        end += weight.nbytes
    return first.as_strided((rows, width), (width, 1))


def _is_untouched(module: Any) -> bool:
    """Whether nobody else has given a module a forward of its own."""
    own = module.__dict__.get("forward")
    return own is None or getattr(own, "__func__", None) in (_attend, _taken, multiplied)


def _is_usual(linear: Any) -> bool:
    return type(linear) is nn.Linear or type(getattr(linear, "base_layer", None)) is nn.Linear


def _attend(attention: Any, hidden_states: Tensor, *given: Any, **more: Any) -> Any:
    """The attention's own forward, for which the products are there already."""
    seen: Any = hidden_states
    linears = _linears(attention)
    if torch.compiler.is_compiling() and all(hasattr(each, "number") for each in linears):
        if all(type(linear) is nn.Linear for linear in linears) and len({each.bias is None for each in linears}) == 1:
            seen = Made(hidden_states.shape, _side_by_side(hidden_states, linears))
        elif all(is_plain(linear, hidden_states.dtype) for linear in linears) and len(_sizes(linears)) == 1:
            seen = Made(hidden_states.shape, _with_low_rank(hidden_states, linears))
    return type(attention).forward(attention, seen, *given, **more)


def _taken(linear: Any, x: Tensor | Made) -> Tensor:
    """A linear layer's part of what was made; whatever else comes is multiplied."""
    if isinstance(x, Made):
        part: Tensor = x.parts[linear.number]
        return part
    made: Tensor = multiplied(linear, x) if type(linear) is nn.Linear else type(linear).forward(linear, x)
    return made


def _side_by_side(x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if torch.is_autocast_enabled(x.device.type):  # which does not look into a product of our own
        compute = torch.get_autocast_dtype(x.device.type)
        x, weights, biases = (
            x.to(compute),
            [each.to(compute) for each in weights],
            [each.to(compute) for each in biases],
        )
    sums, rows = [getattr(linear, "into", None) for linear in linears], x.flatten(0, -2)
    if any(each is None for each in sums):
        made: Tensor = _Joined.apply(rows, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    else:
        made = gathered(rows, weights, sums)
    made = made.view(*x.shape[:-1], made.shape[-1])
    parts: tuple[Tensor, ...] = _Apart.apply(made, [len(weight) for weight in weights])  # type: ignore[no-untyped-call]
    return parts


def _with_low_rank(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    """The same of frozen matrices, and what the low-rank ones beside them add."""
    parts = _side_by_side(x, [linear.base_layer for linear in linears])
    if linears[0].disable_adapters:
        return parts
    [(rank, scale, _)] = _sizes(linears)
    inner, outer = zip(*(matrices_of(linear) for linear in linears), strict=True)
    between = torch.split(F.linear(x, torch.cat(inner)) * scale, rank, -1)
    return tuple(part + F.linear(*thinly) for part, *thinly in zip(parts, between, outer, strict=True))


def _sizes(linears: Sequence[Any]) -> set[tuple[int, float, bool]]:
    return {(*size_of(linear), linear.disable_adapters) for linear in linears}
