"""The gradients of our 3 x 3 convolution are those of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelwright.models.vision import Conv3x3


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs", "size"), [(3, 8, 32), (8, 16, 16), (16, 4, 7)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_equal_torchs(inputs: int, outputs: int, size: int, stride: int, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    ours = Conv3x3(inputs, outputs, stride)
    theirs = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, inputs, size, size).to(memory_format=layout)
    gradients = []
    for convolution in (ours, theirs):
        leaf = x.clone(memory_format=layout).requires_grad_()
        convolution(leaf).square().sum().backward()
        gradients.append((leaf.grad, convolution.weight.grad))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_under_autocast_it_is_torchs_own() -> None:
    torch.manual_seed(0)
    ours = Conv3x3(4, 8)
    x = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which a processor that is fast in bf16 trains in
        out = ours(x)
        plain = torch.nn.functional.conv2d(x, ours.weight, None, 1, 1)
    assert out.dtype is torch.bfloat16 and torch.equal(out, plain)
    out.float().square().sum().backward()
    assert ours.weight.grad is not None and bool(ours.weight.grad.any())
