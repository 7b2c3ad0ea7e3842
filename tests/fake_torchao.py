"""A fake torchao where it is not installed: its names, and linear layers that round their operands to FP8."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelwright.engine import precision


@dataclass(frozen=True)
class Float8LinearConfig:
    """The options of torchao that are used."""

    round_scales_to_power_of_2: bool = False
    emulate: bool = False
    rowwise: bool = False

    @classmethod
    def from_recipe_name(cls, name: str) -> Float8LinearConfig:
        rowwise = {"tensorwise": False, "rowwise": True}[name]
        return cls(round_scales_to_power_of_2=rowwise, rowwise=rowwise)  # as torchao's recipes have it


class Float8Linear(nn.Linear):
    """A linear layer with tensorwise or rowwise scales; gradients pass straight through the rounding."""

    config = Float8LinearConfig()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self._rounded(x), self._rounded(self.weight), self.bias)

    def _rounded(self, exact: Tensor) -> Tensor:
        size = exact.detach().abs()
        largest = size.amax(-1, keepdim=True) if self.config.rowwise else size.max()
        scale = 448.0 / largest.float().clamp(min=1e-12)
        scale = scale.log2().floor().exp2() if self.config.round_scales_to_power_of_2 else scale
        near = ((exact.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(exact.dtype)
        return exact + (near - exact).detach()


def convert_to_float8_training(
    module: nn.Module, *, config: Float8LinearConfig, module_filter_fn: Callable[[Any, str], bool]
) -> None:
    """Replace the linear layers that the filter accepts."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear) and module_filter_fn(linear, name):
            fp8_linear = Float8Linear(1, 1, bias=False)
            fp8_linear.__dict__.update(linear.__dict__)
            fp8_linear.config = config
            module.set_submodule(name, fp8_linear)


def use_fake_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the fake torchao unless the real one exists; everything else computes in fp32, fast on any CPU."""
    monkeypatch.setattr(precision, "DTYPES", dict.fromkeys(precision.DTYPES))
    if find_spec("torchao") is not None:
        return
    package, float8 = ModuleType("torchao"), ModuleType("torchao.float8")
    for definition in (Float8LinearConfig, convert_to_float8_training):
        setattr(float8, definition.__name__, definition)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
