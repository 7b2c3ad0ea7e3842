"""TF32 switches: fp32 matmuls use tensor cores or not, rotary embeddings never do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from families import FAMILIES, family
from modelwright.engine.precision import MixedPrecision, allow_tf32, disable_tf32_in_rope, is_rotary

GPU = torch.device("cuda")


def switches() -> tuple[Any, ...]:
    """Every word that torch has for it."""
    backends = torch.backends
    return (
        torch.get_float32_matmul_precision(),
        backends.cudnn.allow_tf32,
        *(part.fp32_precision for part in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)),  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize(
    ("name", "tf32", "holds"),
    [("fp32", True, ("high", True)), ("fp32", False, ("highest", False)), ("bf16", True, ("highest", True))],
)
def test_matmul_precision_is_set_forward_and_backward_and_restored_afterwards(
    name: str, tf32: bool, holds: tuple[str, bool]
) -> None:
    """The device is only named: the switches are there without it. Other arithmetic than fp32 finds torch's own."""
    before, modes = switches(), []
    precision = MixedPrecision(name, GPU, param_dtype="fp32" if name == "fp32" else "bf16", tf32=tf32)
    number = torch.ones((), requires_grad=True)
    number.register_hook(lambda _: modes.append(switches()[:2]))
    with precision.autocast():
        modes.append(switches()[:2])
    assert switches() == before
    precision.backward(number * 2)
    assert modes == [holds, holds]
    assert switches() == before


def test_who_uses_the_newer_switch_finds_it_as_it_was() -> None:
    """torch refuses to say what the older one is then; transformers' own trainers leave it so."""
    try:
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        with allow_tf32(tf32=False):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


def test_a_processor_is_left_alone() -> None:
    with MixedPrecision("fp32", torch.device("cpu"), tf32=True).autocast():
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_angles_are_multiplied_exactly_whatever_holds_around_them(name: str) -> None:
    model, before = copy.deepcopy(family(name)), switches()
    disable_tf32_in_rope(model)
    modes: set[tuple[bool, str]] = set()
    for part in model.modules():  # hooks that come last see what the module itself will see
        part.register_forward_pre_hook(
            lambda part, _: modes.add((is_rotary(part), torch.get_float32_matmul_precision()))
        )
    with allow_tf32(tf32=True):
        model(torch.arange(8).unsqueeze(0))
    assert modes == {(True, "highest"), (False, "high")}
    assert switches() == before


def test_a_part_that_fails_leaves_nothing_switched() -> None:
    model = copy.deepcopy(family("llama"))
    for _ in range(2):  # as by two engines
        disable_tf32_in_rope(model)
    rotary = next(part for part in model.modules() if is_rotary(part))
    with allow_tf32(tf32=True):
        with pytest.raises(TypeError):
            rotary()
        assert torch.get_float32_matmul_precision() == "high"
