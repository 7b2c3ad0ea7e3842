"""A stand-in for torchao where it is not installed: its names, and linear layers that round their factors to 8 bits."""

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
    """What we ask of torchao."""

    round_scales_to_power_of_2: bool = False
    emulate: bool = False
    by_row: bool = False

    @classmethod
    def from_recipe_name(cls, name: str) -> Float8LinearConfig:
        rows = {"tensorwise": False, "rowwise": True}[name]
        return cls(round_scales_to_power_of_2=rows, by_row=rows)  # as torchao's recipes have it


class Float8Linear(nn.Linear):
    """A linear layer with one scale for each of its two factors, or each row; gradients pass the rounding by."""

    config = Float8LinearConfig()

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.linear(self._rounded(given), self._rounded(self.weight), self.bias)

    def _rounded(self, exact: Tensor) -> Tensor:
        size = exact.detach().abs()
        largest = size.amax(-1, keepdim=True) if self.config.by_row else size.max()
        scale = 448.0 / largest.float().clamp(min=1e-12)
        scale = scale.log2().floor().exp2() if self.config.round_scales_to_power_of_2 else scale
        near = ((exact.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(exact.dtype)
        return exact + (near - exact).detach()


def convert_to_float8_training(
    module: nn.Module, *, config: Float8LinearConfig, module_filter_fn: Callable[[Any, str], bool]
) -> None:
    """Put such layers in the place of those that suit."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear) and module_filter_fn(linear, name):
            eighth = Float8Linear(1, 1, bias=False)
            eighth.__dict__.update(linear.__dict__)
            eighth.config = config
            module.set_submodule(name, eighth)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchao be found, the real one where it is there; the rest is computed in fp32, fast on any processor."""
    monkeypatch.setattr(precision, "DTYPES", dict.fromkeys(precision.DTYPES))
    if find_spec("torchao") is not None:
        return
    package, float8 = ModuleType("torchao"), ModuleType("torchao.float8")
    for part in (Float8LinearConfig, convert_to_float8_training):
        setattr(float8, part.__name__, part)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
