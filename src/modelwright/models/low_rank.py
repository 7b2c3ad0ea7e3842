"""The gated part of a layer with low-rank matrices beside its frozen ones: a third of its bytes need not be moved.

What peft computes, in the same numbers: a product with two thin matrices is written, read again and added for each of
the three frozen ones, and so is each gradient. Here gate's and up's thin products are added as the gate is read.
Whatever is unusual (other precision, dropout, DoRA, merged or quantized matrices) goes peft's own way.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

KNOWN = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"}
"""Layers known to be down(silu(gate(x)) · up(x)) and nothing more."""
NAMES = ("gate_proj", "up_proj", "down_proj")
BESIDE = "lora_"
"""How the names of low-rank matrices begin."""
SILU = {"SiLU", "SiLUActivation"}
RANKS = (16, 32, 64, 128)
"""Ranks that a tensor core multiplies."""

HAS_KERNELS = find_spec("triton") is not None

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("modelwright::low_rank_gate", mutates_args=())
def forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    gate_a: Tensor, gate_b: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The layer's answer but for down's low-rank part, the thin product for that, and what the gradient asks for.

    That part is added outside, together with whatever else is added there: on a number already rounded to bf16 a small
    one would be lost, and at first all are small (with B's of 1e-4 a fifth of what was learnt did not reach the loss).
    """
    inner = linear(x, torch.cat((gate_a, up_a))).mul_(scale)
    opened, risen = x @ gate.T, x @ up.T
    passed = _gated(opened, risen, inner, gate_b, up_b)
    return passed @ down.T, linear(passed, down_a).mul_(scale), opened, risen, inner


@torch.library.custom_op("modelwright::low_rank_gate_backward", mutates_args=())
def backward(
    out: Tensor, thin: Tensor, x: Tensor, opened: Tensor, risen: Tensor, inner: Tensor,
    gate: Tensor, up: Tensor, down: Tensor,
    gate_a: Tensor, gate_b: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    """The gradients of x and of the five thin matrices; out, thin: those of the answer and of the thin product."""
    rank, back_thin = gate_a.shape[0], thin * scale
    given = out @ down
    d_gate, d_up, sums = _ungated(opened, risen, inner, gate_b, up_b, given, back_thin, down_a.T.contiguous())
    back_inner = torch.cat((d_gate @ gate_b, d_up @ up_b), 1).mul_(scale)
    d_x = d_gate @ gate
    d_x.addmm_(d_up, up)
    d_x.addmm_(back_inner, torch.cat((gate_a, up_a)))
    d_a = back_inner.T @ x
    d_gate_b, d_up_b, d_down_a = sums[0].clone(), sums[1].clone(), sums[2].T.contiguous()
    return d_x, d_a[:rank].clone(), d_gate_b, d_a[rank:].clone(), d_up_b, d_down_a


@forward.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gate_a: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows, wide, rank = x.shape[0], gate.shape[0], gate_a.shape[0]
    widths = (down.shape[0], rank, wide, wide, 2 * rank)
    return tuple(x.new_empty(rows, width) for width in widths)


@backward.register_fake
def _(out: Tensor, thin: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(given) for given in (x, *rest[6:11]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], *output[2:], *inputs[1:9])
    ctx.scale = inputs[9]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _back(ctx: Any, out: Tensor, thin: Tensor, *_: Any) -> tuple[Any, ...]:
    d_x, *d_thin = backward(out.contiguous(), thin.contiguous(), *ctx.saved_tensors, ctx.scale)
    return d_x, None, None, None, *d_thin, None


forward.register_autograd(_back, setup_context=_keep)


def _gated(opened: Tensor, risen: Tensor, inner: Tensor, gate_b: Tensor, up_b: Tensor) -> Tensor:
    if opened.is_cuda:
        from modelwright.models.low_rank_kernels import gated

        return gated(opened, risen, inner, gate_b, up_b)
    first, second = inner.float().chunk(2, 1)
    return (silu(opened + first @ gate_b.float().T) * (risen + second @ up_b.float().T)).to(opened.dtype)


def _ungated(
    opened: Tensor, risen: Tensor, inner: Tensor, gate_b: Tensor, up_b: Tensor,
    given: Tensor, back_thin: Tensor, down_a: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of both products, and of gate_b, up_b and down_a, which is [wide, rank] here: [3, wide, rank]."""
    if opened.is_cuda:
        from modelwright.models.low_rank_kernels import ungated

        return ungated(opened, risen, inner, gate_b, up_b, given, back_thin, down_a)
    first, second = inner.chunk(2, 1)
    opened, risen, given = opened + first @ gate_b.T, risen + second @ up_b.T, given + back_thin @ down_a.T
    share = torch.sigmoid(opened)
    passed = opened * share
    d_gate, d_up = given * risen * share * (1 + opened * (1 - share)), given * passed
    return d_gate, d_up, torch.stack((d_gate.T @ first, d_up.T @ second, (passed * risen).T @ back_thin))


def shorten(model: Any) -> Any:
    """Let the gated layers of a model with low-rank matrices take the short way where they can; returns the model."""
    for layer in model.modules():
        if type(layer).__name__ in KNOWN and type(layer.act_fn).__name__ in SILU and _has_low_rank(layer):
            layer.forward = MethodType(_layer_forward, layer)
    return model


def _has_low_rank(layer: Any) -> bool:
    from peft.tuners.lora.layer import Linear

    return all(type(getattr(layer, name)) is Linear for name in NAMES)


def _layer_forward(layer: Any, x: Tensor) -> Tensor:
    linears = [getattr(layer, name) for name in NAMES]
    alike = HAS_KERNELS and x.is_cuda and all(is_plain(each, x.dtype) for each in linears)
    if not alike or len({(size_of(each), each.disable_adapters) for each in linears}) != 1:
        answer: Tensor = type(layer).forward(layer, x)
        return answer
    frozen = [each.base_layer.weight for each in linears]
    *beside, down_b = [weight for each in linears for weight in matrices_of(each)]
    off = linears[0].disable_adapters
    if off:  # a reference rounds as what is held against it does: while B is zero they are the same to the bit
        beside = [torch.zeros_like(weight) for weight in beside]
    rows, thin, *_ = forward(x.flatten(0, -2), *frozen, *beside, size_of(linears[0])[1])
    answer = rows if off else rows + linear(thin, down_b)
    return answer.view(*x.shape[:-1], rows.shape[-1])


def is_plain(linear: Any, dtype: torch.dtype) -> bool:
    """Whether a frozen matrix and its low-rank ones are added up and nothing more, in the kernels' own precision."""
    adapters = getattr(linear, "active_adapters", [])
    if len(adapters) != 1 or adapters[0] not in linear.r or linear.merged or adapters[0] in linear.lora_variant:
        return False
    base, outer = linear.base_layer, linear.lora_B[adapters[0]]
    # fp8's layers are given the forward of any linear layer where fp8 was tried and left
    usual = type(base) is nn.Linear or (isinstance(base, nn.Linear) and "forward" in base.__dict__)
    bare = usual and base.bias is None and outer.bias is None and not base.weight.requires_grad
    alone = isinstance(linear.lora_dropout[adapters[0]], nn.Identity) and linear.r[adapters[0]] in RANKS
    weights = (base.weight, *matrices_of(linear))
    return bare and alone and all(weight.dtype == dtype == torch.bfloat16 for weight in weights)


def matrices_of(linear: Any) -> tuple[Tensor, Tensor]:
    """The two low-rank matrices: [rank, in], [out, rank]."""
    adapter = linear.active_adapters[0]
    return linear.lora_A[adapter].weight, linear.lora_B[adapter].weight


def size_of(linear: Any) -> tuple[int, float]:
    """The rank, and what the low-rank product is multiplied by."""
    adapter = linear.active_adapters[0]
    return linear.r[adapter], linear.scaling[adapter]
