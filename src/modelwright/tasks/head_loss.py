"""The loss, or how likely words are, from before the head: without all the logits, or with them held but once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modelwright.tasks.losses import IGNORED, log_probabilities, summed_cross_entropy

AT_ONCE = 4096
"""Places whose logits stand in memory together: 0.4 GB in bf16 with 50,304 words, and as fast as all at once."""


def summed_head_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over places.

    hidden: [places, width]; head: [words, width]; targets: [places] int64.
    """
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    is_small = len(hidden) <= (AT_ONCE if device == "cpu" else AT_ONCE // 4)
    # fp16 gradients must be scaled before they are rounded, which only the plain way does
    if is_small or compute is torch.float16:
        return summed_cross_entropy(F.linear(hidden, head), targets)
    summed: Tensor = _HeadLoss.apply(hidden.to(compute), head, targets)  # type: ignore[no-untyped-call]
    return summed


def likelihoods(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """How likely each target is, as a logarithm: [places] float32.

    hidden: [places, width]; head: [words, width]; targets: [places] int64.
    """
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if compute is torch.float32 or device == "cpu":
        return log_probabilities(F.linear(hidden, head), targets)
    likely: Tensor = _Likelihoods.apply(hidden.to(compute), head, targets)  # type: ignore[no-untyped-call]
    return likely


class _Likelihoods(torch.autograd.Function):
    """Keeps the logits once, in the type they are computed in: 0.8 GB in bf16 instead of 5 with fp32 beside them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = hidden @ head.to(hidden.dtype).T
        likely, total = _on(logits.is_cuda, _likely)(logits, targets)
        ctx.save_for_backward(hidden, head, targets, logits, total)
        return likely  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, head, targets, logits, total = ctx.saved_tensors
        gradient = _on(logits.is_cuda, _likely_backward)(logits, total, targets, upstream)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        return (
            gradient @ head.to(hidden.dtype) if needs_hidden else None,
            (gradient.T @ hidden).to(head.dtype) if needs_head else None,
            None,
        )


def _likely(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of the targets' likelihoods, and of the sums over all words: [places], [places] float32."""
    total = torch.logsumexp(logits.float(), dim=-1)
    return logits.gather(1, targets[:, None])[:, 0].float() - total, total


def _likely_backward(logits: Tensor, total: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    """The gradient by the logits, in their type."""
    is_target = torch.arange(logits.shape[1], device=logits.device)[None, :] == targets[:, None]
    shares = (logits.float() - total[:, None]).exp()
    return ((is_target.float() - shares) * upstream[:, None]).to(logits.dtype)


class _HeadLoss(torch.autograd.Function):
    """Takes the gradients in the forward pass, a few thousand places at a time, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        words = head.to(hidden.dtype)
        summed = hidden.new_zeros((), dtype=torch.float32)
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_head: Tensor | None = None
        for start in range(0, len(hidden), AT_ONCE):
            some = hidden[start : start + AT_ONCE]
            judge = _on(some.is_cuda, _summed_with_gradient)
            loss, gradient = judge(some @ words.T, targets[start : start + AT_ONCE])
            summed += loss
            if to_hidden is not None:
                torch.mm(gradient, words, out=to_hidden[start : start + AT_ONCE])
            if needs_head:
                part = gradient.T @ some
                # one part is all there is: nothing to add it to; several are added up in fp32
                to_head = part if len(some) == len(hidden) else part.float() if to_head is None else to_head.add_(part)
        ctx.save_for_backward(to_hidden, to_head)
        ctx.head_type = head.dtype
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        to_hidden, to_head = ctx.saved_tensors
        times = _on(upstream.is_cuda, _times)
        return (
            None if to_hidden is None else times(to_hidden, upstream, to_hidden.dtype),
            None if to_head is None else times(to_head, upstream, ctx.head_type),
            None,
        )


def _summed_with_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss and its gradient by the logits, in their type."""
    exact = logits.float()
    total = torch.logsumexp(exact, dim=-1, keepdim=True)
    counts = (targets != IGNORED).float()[:, None]
    summed = ((total - exact.gather(1, targets.clamp(min=0)[:, None])) * counts).sum()
    is_target = torch.arange(logits.shape[1], device=logits.device)[None, :] == targets[:, None]
    return summed, (((exact - total).exp() - is_target.float()) * counts).to(logits.dtype)


def _times(gradient: Tensor, upstream: Tensor, kind: torch.dtype) -> Tensor:
    """A gradient times what comes from above, in fp32, in its own type again."""
    return (gradient.float() * upstream).to(kind)


_COMPILED: dict[Any, Any] = {}


def _on(gpu: bool, function: Any) -> Any:
    """One kernel over the logits on a GPU: 0.4 GB read twice and written once, instead of eight passes in fp32."""
    if gpu and function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function] if gpu else function
