"""What NVML says of the GPUs is in the journal, the panel, the report and the board; without it, nothing is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from modelwright.engine import throughput
from modelwright.engine.distributed import visible_gpus
from modelwright.engine.throughput import GpuMonitor
from modelwright.recipe.load import load
from modelwright.report.console import format_event
from modelwright.stages import pipeline
from tests.faults.fork_server import events_of
from tiny import tiny_recipe


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver of two GPUs, known by index and UUID."""
    module: Any = ModuleType("pynvml")
    module.NVML_TEMPERATURE_GPU = 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetHandleByUUID = {"GPU-b": 1}.__getitem__
    module.nvmlDeviceGetUtilizationRates = lambda gpu: SimpleNamespace(gpu=90 + 4 * gpu, memory=50)
    module.nvmlDeviceGetPowerUsage = lambda gpu: 300_000 + gpu
    module.nvmlDeviceGetTemperature = lambda gpu, sensor: 60 + gpu
    module.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(used=2**30, total=2**34)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(throughput, "NVML_SECONDS", 0.0)
    return module


def test_every_device_is_read(nvml: Any) -> None:
    fields = GpuMonitor(visible_gpus()).read()
    assert fields["gpu_utilization"] == pytest.approx(0.92)
    assert (fields["gpu_power_watts"], fields["gpu_temperature"]) == (600.0, 61)
    assert [gpu["memory_bytes"] for gpu in fields["gpus"]] == [2**30, 2**30]


@pytest.mark.parametrize("visible", ["1", "GPU-b"])
def test_only_visible_devices_are_read(nvml: Any, visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GpuMonitor(visible_gpus()).read()["gpu_utilization"] == pytest.approx(0.94)


def test_a_driver_that_fails_later_is_not_asked_again(nvml: Any) -> None:
    monitor = GpuMonitor(visible_gpus())
    assert monitor.read()
    nvml.nvmlDeviceGetPowerUsage = None
    assert monitor.read() == monitor.read() == {}


def test_without_the_package_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMonitor(visible_gpus()).read() == {}


def test_a_run_shows_them_in_journal_panel_and_report(nvml: Any, model_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=3, eval_steps=3, logging_steps=1)
    pipeline.run(load(recipe, ["compare={}"], environ={}))
    steps = events_of(tmp_path / "run", "step")
    assert [len(step["gpus"]) for step in steps] == [2, 2, 2]
    assert "gpu 92% 600 W 61 °C" in (format_event(steps[-1]) or "")
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert all(title in page for title in ("GPU utilization", "GPU power, watts", "GPU temperature, °C"))
