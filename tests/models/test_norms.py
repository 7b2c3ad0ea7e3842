"""A batch norm with what follows it gives torch's own numbers, by whichever way it goes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.models.vision import batch_norm_relu, resnet18


def both_ways(device: str, dtype: torch.dtype, channels: int, past: bool, rectify: bool) -> list[tuple[Tensor, Tensor]]:
    """What ours and torch's layers give for the same input: the output, all gradients, the running statistics."""
    torch.manual_seed(1)
    shape, layout = (50, channels, 9, 7), torch.channels_last
    seen, beside, upstream = (torch.randn(shape, device=device).to(dtype, memory_format=layout) for _ in range(3))
    found = []
    for ours in (True, False):
        torch.manual_seed(2)
        norm = nn.BatchNorm2d(channels).to(device)
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
        inputs = [value.clone().requires_grad_() for value in ((seen, beside) if past else (seen,))]
        inputs = inputs if ours else [value.detach().float().requires_grad_() for value in inputs]
        if ours:
            made = batch_norm_relu(norm, inputs[0], inputs[1] if past else None, rectify)
        else:
            made = norm(inputs[0]) + (inputs[1] if past else 0.0)
            made = F.relu(made) if rectify else made
        made.backward(upstream.to(made.dtype))  # type: ignore[no-untyped-call]
        gradients = [value.grad for value in (*inputs, norm.weight, norm.bias)]
        found.append([made, *gradients, norm.running_mean, norm.running_var, norm.num_batches_tracked])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize(("past", "rectify"), [(True, True), (False, True), (False, False)])
def test_it_is_the_norm_the_sum_and_the_rectifier(past: bool, rectify: bool) -> None:
    for ours, theirs in both_ways("cpu", torch.float32, 8, past, rectify):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "exactness"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("channels", "past", "rectify"), [(64, True, True), (128, False, True), (512, False, False)])
def test_its_kernels_are_the_norm_the_sum_and_the_rectifier(
    dtype: torch.dtype, exactness: float, channels: int, past: bool, rectify: bool
) -> None:
    for ours, theirs in both_ways("cuda", dtype, channels, past, rectify):
        gap = (ours.detach().float() - theirs.detach().float()).abs().max()
        assert float(gap / theirs.detach().float().abs().max()) < exactness


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_learns_the_same_with_them_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    found = []
    for fast in (True, False):
        torch.manual_seed(1)
        model = resnet18().to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not fast:
            monkeypatch.setattr("modelwright.models.vision._is_fast", lambda norm, seen: False)
        with torch.backends.cudnn.flags(allow_tf32=False):
            F.cross_entropy(model(images), torch.arange(32, device="cuda") % 10).backward()  # type: ignore[no-untyped-call]
        found.append([weight.grad for weight in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rectifier_does_not_hide_what_is_no_number() -> None:
    seen = torch.zeros(8, 64, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last)
    seen[0, 5, 0, 0] = float("nan")
    made = batch_norm_relu(nn.BatchNorm2d(64).to("cuda"), seen)
    assert made[:, 5].isnan().all() and not made[:, 6].isnan().any()
