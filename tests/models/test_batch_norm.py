"""The fused batch norm with residual and ReLU gives torch's outputs and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.models.vision import batch_norm_relu, resnet18


def compare_with_torch(
    device: str, dtype: torch.dtype, channels: int, has_residual: bool, relu: bool
) -> list[tuple[Tensor, Tensor]]:
    """What ours and torch's layers give for the same input: the output, all gradients, the running statistics."""
    torch.manual_seed(1)
    shape, layout = (50, channels, 9, 7), torch.channels_last
    x, residual, upstream = (torch.randn(shape, device=device).to(dtype, memory_format=layout) for _ in range(3))
    results = []
    for ours in (True, False):
        torch.manual_seed(2)
        norm = nn.BatchNorm2d(channels).to(device)
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
        inputs = [value.clone().requires_grad_() for value in ((x, residual) if has_residual else (x,))]
        inputs = inputs if ours else [value.detach().float().requires_grad_() for value in inputs]
        if ours:
            out = batch_norm_relu(norm, inputs[0], inputs[1] if has_residual else None, relu)
        else:
            out = norm(inputs[0]) + (inputs[1] if has_residual else 0.0)
            out = F.relu(out) if relu else out
        out.backward(upstream.to(out.dtype))  # type: ignore[no-untyped-call]
        gradients = [value.grad for value in (*inputs, norm.weight, norm.bias)]
        results.append([out, *gradients, norm.running_mean, norm.running_var, norm.num_batches_tracked])
    return list(zip(*results, strict=True))


@pytest.mark.parametrize(("has_residual", "relu"), [(True, True), (False, True), (False, False)])
def test_it_equals_norm_residual_and_relu(has_residual: bool, relu: bool) -> None:
    for ours, theirs in compare_with_torch("cpu", torch.float32, 8, has_residual, relu):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "exactness"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("channels", "has_residual", "relu"), [(64, True, True), (128, False, True), (512, False, False)]
)
def test_its_kernels_equal_norm_residual_and_relu(
    dtype: torch.dtype, exactness: float, channels: int, has_residual: bool, relu: bool
) -> None:
    for ours, theirs in compare_with_torch("cuda", dtype, channels, has_residual, relu):
        gap = (ours.detach().float() - theirs.detach().float()).abs().max()
        assert float(gap / theirs.detach().float().abs().max()) < exactness


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_learns_the_same_with_them_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    results = []
    for fast in (True, False):
        torch.manual_seed(1)
        model = resnet18().to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not fast:
            monkeypatch.setattr("modelwright.models.vision._is_fast", lambda norm, x: False)
        with torch.backends.cudnn.flags(allow_tf32=False):
            F.cross_entropy(model(images), torch.arange(32, device="cuda") % 10).backward()  # type: ignore[no-untyped-call]
        results.append([weight.grad for weight in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_relu_does_not_hide_nan() -> None:
    x = torch.zeros(8, 64, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last)
    x[0, 5, 0, 0] = float("nan")
    out = batch_norm_relu(nn.BatchNorm2d(64).to("cuda"), x)
    assert out[:, 5].isnan().all() and not out[:, 6].isnan().any()
