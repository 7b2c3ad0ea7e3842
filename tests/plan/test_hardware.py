"""GPUs by name, as in --gpus and as drivers report them."""

from __future__ import annotations

import pytest

from modelwright.errors import UsageError
from modelwright.plan.hardware import GPUS, find_gpu, parse_hardware


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name"),
    [("1xH200", 1, 1, "H200"), ("4xL40S", 1, 4, "L40S"), ("2x2xA40", 2, 2, "A40"), ("l4", 1, 1, "L4"),
     ("8×H100", 1, 8, "H100"), ("2xa100-80", 1, 2, "A100-80"), ("1xrtx4090", 1, 1, "RTX4090")],
)  # fmt: skip
def test_machines_are_read_as_people_write_them(text: str, nodes: int, per_node: int, name: str) -> None:
    result = parse_hardware(text)
    assert (result.nodes, result.per_node, result.gpu.name) == (nodes, per_node, name)


@pytest.mark.parametrize("text", ["", "4x", "0xL4", "3xB300x", "x"])
def test_a_machine_that_nobody_knows_is_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(UsageError, match=r"--gpus .*(it wants|known are)"):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("driver", "name"),
    [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"),
     ("NVIDIA A100-SXM4-40GB", "A100-40"), ("NVIDIA A100 80GB PCIe", "A100-80"), ("NVIDIA L4", "L4"),
     ("NVIDIA L40S", "L40S"), ("Tesla T4", "T4"), ("NVIDIA GeForce RTX 4090", "RTX4090")],
)  # fmt: skip
def test_the_names_of_drivers_are_known(driver: str, name: str) -> None:
    result = find_gpu(driver)
    assert result is not None and result.name == name


def test_an_unknown_driver_name_is_not_taken_for_another_gpu() -> None:
    assert find_gpu("NVIDIA L400") is None


def test_every_gpu_names_its_source_and_has_sound_figures() -> None:
    for gpu in GPUS.values():
        assert gpu.source and gpu.memory > 14e9 and gpu.bandwidth >= 3e11
        assert gpu.fp32 <= gpu.tf32 <= max(gpu.bf16, gpu.fp16)
        assert (gpu.bf16 > 0) == (gpu.capability >= (8, 0))
        assert (gpu.fp8 > 0) == (gpu.capability >= (8, 9))
