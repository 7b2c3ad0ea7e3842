"""Matrices that read the same rows, where a layer is compiled: queries, keys and values as one product, gate and up as
two whose gradients of the rows are added up by the second.

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

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Gemma", "Gemma2", "Gemma3")
"""Whose attention takes from what it is given its queries, keys, values and length, whose gated part takes gate and up,
and both nothing more."""
NAMES, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
KNOWN = {**{f"{each}Attention": NAMES for each in FAMILIES}, **{f"{each}MLP": GATED for each in FAMILIES}}


@torch.library.custom_op("modelwright::joined", mutates_args=())
def product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], into: Sequence[Tensor]) -> Tensor:
    """What several linear layers make of the same rows, side by side. x: [rows, width].

    into: where the gradients of the weights are added up, if they are (`gathered.py`).
    """
    made = products.mm(x, _together(weights).T)
    return made.add_(torch.cat(list(biases))) if biases else made


@torch.library.custom_op("modelwright::joined_backward", mutates_args=())
def backward(given: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the rows. given: that of the product."""
    return products.mm(given, _together(weights))


@product.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], into: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


@backward.register_fake
def _(given: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return given.new_empty(given.shape[0], weights[0].shape[1])


@torch.library.custom_op("modelwright::side_by_side", mutates_args=())
def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Rows next to each other: a compiler would compute all parts for each number of each, 0.25 ms instead of 0.18."""
    return torch.cat(list(parts), -1)


@side_by_side.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases, into = inputs
    ctx.save_for_backward(x, *weights)
    ctx.sizes, ctx.has_bias, ctx.into = [weight.shape[0] for weight in weights], bool(biases), into


def _back(ctx: Any, given: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    to_weights: list[Tensor | None] = [None] * len(weights)
    if ctx.into:
        for sums, part in zip(ctx.into, torch.split(given, ctx.sizes, 1), strict=True):
            gather(sums, part, x)
    elif any(ctx.needs_input_grad[1]):
        to_weights = list(torch.split(to_weight(given, x), ctx.sizes))
    return (
        backward(given, weights) if ctx.needs_input_grad[0] else None,
        to_weights,
        list(torch.split(given.sum(0), ctx.sizes)) if ctx.has_bias else [],
        [None] * len(ctx.into),
    )


product.register_autograd(_back, setup_context=_keep)


@torch.library.custom_op("modelwright::pair", mutates_args=())
def pair(x: Tensor, gate: Tensor, up: Tensor, into: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What two linear layers make of the same rows. x: [rows, width]."""
    return products.mm(x, gate.T), products.mm(x, up.T)


@torch.library.custom_op("modelwright::pair_backward", mutates_args=())
def pair_backward(to_gate: Tensor, to_up: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The gradient of the rows: the second product is added to the first as it is made, not by a pass of its own."""
    made = products.mm(to_gate, gate)
    products.add_mm(made, to_up, up)
    return made


@pair.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, into: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], gate.shape[0]), x.new_empty(x.shape[0], up.shape[0])


@pair_backward.register_fake
def _(to_gate: Tensor, to_up: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return to_gate.new_empty(to_gate.shape[0], gate.shape[1])


def _keep_pair(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.into = inputs
    ctx.save_for_backward(*tensors)


def _back_pair(ctx: Any, *given: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    to_weights: list[Tensor | None] = [None, None]
    if ctx.into:
        for sums, part in zip(ctx.into, given, strict=True):
            gather(sums, part, x)
    else:
        needed = ctx.needs_input_grad[1:3]
        to_weights = [to_weight(part, x) if needs else None for part, needs in zip(given, needed, strict=True)]
    to_x = pair_backward(*given, *weights) if ctx.needs_input_grad[0] else None
    return to_x, *to_weights, [None] * len(ctx.into)


pair.register_autograd(_back_pair, setup_context=_keep_pair)


class _Apart(torch.autograd.Function):
    """Rows cut into parts, each by itself: a view that is kept for the backward pass would keep the whole."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in torch.split(rows, sizes, -1))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        return side_by_side(given), None


class Made(NamedTuple):
    """What takes the place of the rows that a part of a layer is given: what it would make of them first."""

    shape: tuple[int, ...]
    """Of the rows."""
    parts: tuple[Tensor, ...]
    """Queries, keys and values, or gate and up."""


def install(model: Any) -> Any:
    """Let the known parts of a model do what is told above wherever they are compiled; returns the model."""
    for part in model.modules():
        if type(part).__name__ not in KNOWN:
            continue
        linears = _linears(part)
        if all(map(_is_untouched, (part, *linears))) and all(map(_is_usual, linears)):
            part.forward = MethodType(_forward, part)
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


def _is_joined(module: Any) -> bool:
    ours = getattr(module.__dict__.get("forward"), "__func__", None) is _forward
    return ours and KNOWN[type(module).__name__] == NAMES


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
    return own is None or getattr(own, "__func__", None) in (_forward, _taken, multiplied)


def _is_usual(linear: Any) -> bool:
    return type(linear) is nn.Linear or type(getattr(linear, "base_layer", None)) is nn.Linear


def _linears(part: Any) -> list[Any]:
    return [getattr(part, name) for name in KNOWN[type(part).__name__]]


def _forward(part: Any, hidden_states: Tensor, *given: Any, **more: Any) -> Any:
    """The part's own forward, for which the products are there already."""
    linears, made = _linears(part), None
    if torch.compiler.is_compiling() and all(hasattr(each, "number") for each in linears):
        made = _paired(hidden_states, linears) if len(linears) == len(GATED) else _joined(hidden_states, linears)
    seen: Any = hidden_states if made is None else Made(hidden_states.shape, made)
    return type(part).forward(part, seen, *given, **more)


def _taken(linear: Any, x: Tensor | Made) -> Tensor:
    """A linear layer's part of what was made; whatever else comes is multiplied."""
    if isinstance(x, Made):
        part: Tensor = x.parts[linear.number]
        return part
    made: Tensor = multiplied(linear, x) if type(linear) is nn.Linear else type(linear).forward(linear, x)
    return made


def _paired(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...] | None:
    if not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
        return None
    x, gate, up = _as_computed(x, *(linear.weight for linear in linears))
    return tuple(rows.view(*x.shape[:-1], rows.shape[-1]) for rows in pair(x.flatten(0, -2), gate, up, _into(linears)))


def _joined(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...] | None:
    if all(type(linear) is nn.Linear for linear in linears) and len({each.bias is None for each in linears}) == 1:
        return _side_by_side(x, linears)
    if all(is_plain(linear, x.dtype) for linear in linears) and len(_sizes(linears)) == 1:
        return _with_low_rank(x, linears)
    return None


def _as_computed(*tensors: Tensor) -> list[Tensor]:
    """The same as autocast would have them, which does not look into a product of our own."""
    where = tensors[0].device.type
    cast = torch.is_autocast_enabled(where)
    return [tensor.to(torch.get_autocast_dtype(where)) if cast else tensor for tensor in tensors]


def _into(linears: Sequence[Any]) -> list[Tensor]:
    """Where gradients are added up, if they are."""
    sums = [getattr(linear, "into", None) for linear in linears]
    return [each for each in sums if each is not None] if all(each is not None for each in sums) else []


def _side_by_side(x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    x, *weights = _as_computed(x, *(linear.weight for linear in linears))
    biases = _as_computed(x, *(linear.bias for linear in linears if linear.bias is not None))[1:]
    rows = product(x.flatten(0, -2), weights, biases, _into(linears))
    rows = rows.view(*x.shape[:-1], rows.shape[-1])
    parts: tuple[Tensor, ...] = _Apart.apply(rows, [len(weight) for weight in weights])  # type: ignore[no-untyped-call]
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
