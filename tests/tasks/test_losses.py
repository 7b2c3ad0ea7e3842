"""The loss taken a few places at a time is the loss of all of them, and so are its gradients."""

from __future__ import annotations

import pytest
import torch

from modelwright.tasks import losses
from modelwright.tasks.losses import (
    IGNORE_INDEX,
    _logits_grad,
    _row_losses,
    _scale_grad,
    _SelectiveLogSoftmax,
    fused_linear_cross_entropy,
    selective_log_softmax,
    summed_cross_entropy,
)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOSS_CHUNK", 16)


def parts(positions: int = 70) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, head = torch.randn(positions, 32), torch.randn(50, 32)
    targets = torch.randint(0, 50, (positions,))
    targets[3::7] = IGNORE_INDEX
    return hidden.requires_grad_(), head.requires_grad_(), targets


@pytest.mark.parametrize("positions", [8, 64, 70])
def test_loss_and_gradients_equal_the_plain_computation(positions: int) -> None:
    hidden, head, targets = parts(positions)
    plain = summed_cross_entropy(hidden @ head.T, targets)
    expected = torch.autograd.grad(plain * 0.3, (hidden, head))
    ours = fused_linear_cross_entropy(hidden, head, targets)
    gradients = torch.autograd.grad(ours * 0.3, (hidden, head))
    torch.testing.assert_close(ours, plain)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_in_fp16_gradients_are_scaled_before_they_are_rounded_and_no_more_than_a_chunk_of_logits_is_kept() -> None:
    hidden, head, targets = parts()
    saved: list[torch.Size] = []
    with torch.autocast("cpu", torch.float16):
        plain = summed_cross_entropy(torch.nn.functional.linear(hidden, head), targets)
        expected = torch.autograd.grad(plain * 2**10, (hidden, head))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda x: x):
            ours = fused_linear_cross_entropy(hidden, head, targets)
        gradients = torch.autograd.grad(ours * 2**10, (hidden, head))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-2)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2.0)  # of values of 2**10
    assert all(shape[-1:] != (50,) for shape in saved if len(shape) == 2), saved


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    *weights, targets = parts()
    weights[frozen].requires_grad_(False)
    fused_linear_cross_entropy(*weights, targets).backward()
    assert weights[frozen].grad is None
    assert weights[1 - frozen].grad is not None


def test_log_probs_and_their_gradients_equal_those_of_all_logits_and_are_computed_from_one_saved_copy() -> None:
    hidden, head, targets = parts()
    targets, weights = targets.clamp(min=0), torch.linspace(-1, 1, 70)
    plain = torch.log_softmax(hidden @ head.T, 1)[range(70), targets]
    expected = torch.autograd.grad(plain @ weights, (hidden, head))
    saved: list[tuple[torch.Size, torch.dtype]] = []
    logits = (hidden @ head.T).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append((x.shape, x.dtype)) or x, lambda x: x):
        half = _SelectiveLogSoftmax.apply(logits, targets)
    assert [dtype for shape, dtype in saved if shape == logits.shape] == [torch.bfloat16], "as a GPU computes them"
    torch.testing.assert_close(half, plain, rtol=2e-2, atol=2e-2)
    for gradient, other in zip(torch.autograd.grad(half @ weights, (hidden, head)), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=5e-2, atol=5e-2)
    logps = selective_log_softmax(hidden @ head.T, targets)
    torch.testing.assert_close(logps, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run by hand on a GPU machine")
@pytest.mark.parametrize("vocab", [50, 8192, 50_257, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_compute_what_torch_computes(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(300, vocab) * 5).to(dtype)
    logits[5, ::2], logits[6] = -float("inf"), 1e4
    targets, weights = torch.randint(0, vocab // 2, (300,)) * 2 + 1, torch.linspace(-1, 1, 300)
    targets[3::7] = IGNORE_INDEX
    rows, logsumexps = _row_losses(logits, targets)
    cuda_rows, cuda_logsumexps = _row_losses(logits.cuda(), targets.cuda())
    torch.testing.assert_close(cuda_rows.cpu(), rows, rtol=1e-5, atol=1e-3)  # fp32 numbers near 1e4 are 1e-3 apart
    expected = _logits_grad(logits, targets, logsumexps, weights)
    gradient = _logits_grad(logits.cuda(), targets.cuda(), cuda_logsumexps, weights.cuda())
    torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-6)
    scaled = _scale_grad(gradient, torch.tensor(1 / 3, device="cuda"), torch.float32)
    torch.testing.assert_close(scaled.cpu(), _scale_grad(gradient.cpu(), torch.tensor(1 / 3), torch.float32))
    logits[7, 3] = float("nan")
    assert _row_losses(logits.cuda(), targets.cuda())[0].isnan().nonzero().flatten().tolist() == [7]


def test_measuring_keeps_nothing() -> None:
    hidden, head, targets = parts()
    with torch.no_grad():
        assert not fused_linear_cross_entropy(hidden, head, targets).requires_grad


def test_evaluations_compute_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOSS_CHUNK", 8)
    monkeypatch.setattr(losses, "_logits_grad", lambda *_: pytest.fail("a gradient was computed"))
    hidden, head, targets = parts()
    with torch.no_grad():
        loss = fused_linear_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(loss, summed_cross_entropy(hidden @ head.T, targets))
