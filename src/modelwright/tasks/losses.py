"""Losses: cross-entropy, token log-probs, preference losses, and the LM head fused with the loss.

The chunked cross-entropy decides what fits: LoRA of an 8 B model with a vocabulary of 128,256, 4 × 4096 tokens a step,
takes 78.4 instead of 100.2 GB at 16,432 instead of 16,135 tokens/s (H200, 2026-11-17, `python -m benchmarks.ablation
--only chunked-loss`).
"""

from __future__ import annotations

import math
import sys
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from modelwright.errors import ModelError
from modelwright.models.attention import base_outputs, compute_logits, lm_head_weight, probe_tokens, unwrap_peft
from modelwright.recipe.stage_specs import PreferenceConfig


def lm_head_loss(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy from hidden states. hidden: [tokens, width]; targets: [tokens] int64."""
    if (head := lm_head_weight(model)) is not None:
        return fused_linear_cross_entropy(hidden, head, targets)
    return summed_cross_entropy(compute_logits(model, hidden), targets)


def lm_head_logps(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-prob of each target from hidden states: [tokens] float32. hidden: [tokens, width]; targets: [tokens]."""
    logits = compute_logits(model, hidden)
    if not logits.is_cuda:
        return selective_log_softmax(logits, targets)
    logps: Tensor = _SelectiveLogSoftmax.apply(logits.contiguous(), targets)  # type: ignore[no-untyped-call]
    return logps


class RouterLoss:
    """The load-balancing loss of a mixture of experts, by the model's own function; no effect on other models.

    As in TRL it is added wherever the config has a coefficient, whether or not output_router_logits is set.
    """

    def __init__(self, model: Any, setting: float | None = 0.0) -> None:
        """setting: the coefficient; None takes that of the config."""
        self._model = unwrap_peft(model)
        config = self._model.config.get_text_config()
        self.coef = float((getattr(config, "router_aux_loss_coef", 0.0) if setting is None else setting) or 0.0)
        if self.coef and not self._has_router():
            if setting or getattr(config, "output_router_logits", False):
                raise ModelError("model: it has no router with a load-balancing loss; use router_aux_loss_coef: 0")
            self.coef = 0.0
        self.options = {"output_router_logits": True} if self.coef else {}
        self.metric_names = ("router_aux_loss",) if self.coef else ()

    def add(self, sums: Tensor, outputs: Any, attention_mask: Tensor | None, count: int | Tensor) -> Tensor:
        """Summed metrics with the loss of the tokens in the mask added to the first, times count, and appended."""
        if not self.coef:
            return sums
        assert attention_mask is not None
        aux_sum = (self._loss(outputs, attention_mask) * count).reshape(1).to(sums.dtype)
        sums = sums.reshape(-1)
        return torch.cat((sums[:1] + self.coef * aux_sum, sums[1:], aux_sum.detach()))

    @torch.no_grad()
    def _has_router(self) -> bool:
        tokens = probe_tokens(self._model)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        outputs = base_outputs(self._model, tokens, positions, output_router_logits=True)
        return bool(getattr(outputs, "router_logits", None)) and hasattr(self._module, "load_balancing_loss_func")

    @property
    def _module(self) -> Any:
        return sys.modules[type(self._model).__module__]

    def _loss(self, outputs: Any, attention_mask: Tensor) -> Tensor:
        balance, experts = self._module.load_balancing_loss_func, self._model.num_experts
        keys = {"num_keys": math.isqrt(experts)} if "num_keys" in signature(balance).parameters else {}  # Doge
        options = {"top_k": self._model.num_experts_per_tok, "attention_mask": attention_mask, **keys}
        loss: Tensor = balance(outputs.router_logits, experts, **options)
        return loss


IGNORE_INDEX = -100
"""The target where there is no next token."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over rows. logits: [rows, vocab]; targets: [rows] int64, or IGNORE_INDEX."""
    return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORE_INDEX)


def selective_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-prob of each target: [rows] float32. logits: [rows, vocab]; targets: [rows] int64."""
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def preference_loss(logratios: Tensor, answer_lengths: Tensor, settings: PreferenceConfig) -> Tensor:
    """The loss of each pair: [pairs].

    logratios: [pairs, 2], log-prob of the chosen and the rejected answer minus the reference's; answer_lengths:
    [pairs, 2], by which IPO divides (as its authors' published results do).
    """
    if settings.loss_type == "ipo":
        mean_logratios = logratios / answer_lengths.clamp(min=1)
        return (mean_logratios[:, 0] - mean_logratios[:, 1] - 1 / (2 * settings.beta)) ** 2
    margins = settings.beta * (logratios[:, 0] - logratios[:, 1])
    if settings.loss_type == "hinge":
        return F.relu(1 - margins)
    smooth = settings.label_smoothing
    return -(1 - smooth) * F.logsigmoid(margins) - smooth * F.logsigmoid(-margins)


LOSS_CHUNK = 4096
"""Tokens whose logits are in memory together: 0.4 GB in bf16 at 50,304 vocab, as fast as all at once."""


def fused_linear_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of the LM head. hidden: [tokens, width]; head: [vocab, width]; targets: [tokens] int64."""
    device = hidden.device.type
    compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    is_small = len(hidden) <= (LOSS_CHUNK if device == "cpu" else LOSS_CHUNK // 4)
    if is_small:
        return _linear_cross_entropy(hidden, head, targets)
    if compute_dtype is torch.float16:
        # its gradients must be scaled before they are rounded, which only autograd does: backward computes logits again
        starts = range(0, len(hidden), LOSS_CHUNK)
        chunks = ((hidden[start : start + LOSS_CHUNK], head, targets[start : start + LOSS_CHUNK]) for start in starts)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.stack([checkpoint(_linear_cross_entropy, *chunk, **options) for chunk in chunks]).sum()
    if not torch.is_grad_enabled():  # a Function computes what its inputs require, also without gradients
        hidden, head = hidden.detach(), head.detach()
    loss_sum: Tensor = _ChunkedCrossEntropy.apply(hidden.to(compute_dtype), head, targets)  # type: ignore[no-untyped-call]
    return loss_sum


def _linear_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return summed_cross_entropy(F.linear(hidden, head), targets)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        weight = head.to(hidden.dtype)
        loss_sum = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head: Tensor | None = None
        for start in range(0, len(hidden), LOSS_CHUNK):
            chunk = hidden[start : start + LOSS_CHUNK]
            logits, chunk_targets = chunk @ weight.T, targets[start : start + LOSS_CHUNK]
            if not (needs_hidden or needs_head):
                loss_sum += _row_losses(logits, chunk_targets)[0].sum()
                continue
            loss, gradient = _cross_entropy_with_grad(logits, chunk_targets)
            loss_sum += loss
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[start : start + LOSS_CHUNK])
            if needs_head:
                chunk_grad = gradient.T @ chunk
                # a single chunk needs no accumulation; several are added in fp32
                if grad_head is None:
                    grad_head = chunk_grad if len(chunk) == len(hidden) else chunk_grad.float()
                else:
                    grad_head.add_(chunk_grad)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_type = head.dtype
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return (
            None if grad_hidden is None else _scale_grad(grad_hidden, grad_output, grad_hidden.dtype),
            None if grad_head is None else _scale_grad(grad_head, grad_output, ctx.head_type),
            None,
        )


class _SelectiveLogSoftmax(torch.autograd.Function):
    """`selective_log_softmax` on a GPU: it saves the logits once, in bf16, without fp32 copies."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses, logsumexps = _row_losses(logits, targets)
        ctx.save_for_backward(logits, targets, logsumexps)
        return -losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, targets, logsumexps = ctx.saved_tensors
        return _logits_grad(logits, targets, logsumexps, -grad_output), None


def _cross_entropy_with_grad(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss and the gradient of the logits, in their dtype."""
    losses, logsumexps = _row_losses(logits, targets)
    return losses.sum(), _logits_grad(logits, targets, logsumexps, torch.ones_like(losses))


def _row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, 0 where nothing is trained, and its logsumexp: [rows] float32."""
    if logits.is_cuda:
        from modelwright.models.kernels import cross_entropy

        return cross_entropy(logits, targets, IGNORE_INDEX)
    exact = logits.float()
    logsumexps = torch.logsumexp(exact, dim=-1)
    target_logits = exact.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return (logsumexps - target_logits) * (targets != IGNORE_INDEX), logsumexps


def _logits_grad(logits: Tensor, targets: Tensor, logsumexps: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the sum of weights times row losses, in the logits' dtype. weights: [rows] float32."""
    if logits.is_cuda:
        from modelwright.models.kernels import cross_entropy_grad

        return cross_entropy_grad(logits, targets, logsumexps, weights, IGNORE_INDEX)
    is_target = torch.arange(logits.shape[1])[None, :] == targets[:, None]
    gradient = (logits.float() - logsumexps[:, None]).exp() - is_target.float()
    return (gradient * (weights * (targets != IGNORE_INDEX))[:, None]).to(logits.dtype)


def _scale_grad(gradient: Tensor, grad_output: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient times grad_output, in fp32, in another dtype."""
    if gradient.is_cuda:
        from modelwright.models.kernels import scale_gradient

        return scale_gradient(gradient, grad_output, dtype)
    return (gradient.float() * grad_output).to(dtype)
