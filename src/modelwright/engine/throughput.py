"""Throughput, MFU, peak memory, device timers and straggler detection."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from modelwright.engine.task import StepReport

WINDOW = 32
ETA_WINDOW = 8
"""Steps whose median is the speed for the remaining time: short, so that it follows a machine that becomes slower."""


class ThroughputMeter:
    """Turns step reports into tokens/s, MFU, ETA and peak memory."""

    def __init__(self, steps: int, batch_size: int, flops_per_token: float, peak_flops: float | None) -> None:
        self._steps, self._batch_size = steps, batch_size
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._token_rates: deque[float] = deque(maxlen=WINDOW)
        self._data_wait_fractions: deque[float] = deque(maxlen=WINDOW)
        self._first, self._steps_left = True, steps
        self._recorded_at: float | None = None
        self._between: list[float] = [0.0, 0.0]  # seconds between steps (evaluations, checkpoints), and their number

    def record(self, report: StepReport) -> None:
        """Record a step; the first step of a process is warm-up."""
        now = time.monotonic()
        if self._recorded_at is not None:
            self._between[0] += max(0.0, now - self._recorded_at - report.step_seconds)
            self._between[1] += 1
        self._recorded_at = now
        if not self._first or self._steps == 1:
            self._seconds.append(report.step_seconds)
            self._token_rates.append(report.tokens / max(report.step_seconds, 1e-9))
            self._data_wait_fractions.append(report.data_wait_seconds / max(report.step_seconds, 1e-9))
        self._first, self._steps_left = False, self._steps - report.step

    def summary(self) -> dict[str, float | int | None]:
        """Speed, time left and memory after the last step; reading the GPU's memory takes 0.2 ms."""
        rate = median(self._token_rates) if self._token_rates else None
        between = self._between[0] / max(1.0, self._between[1])
        eta = self._steps_left * (median([*self._seconds][-ETA_WINDOW:]) + between) if self._seconds else None
        return {
            "tokens_per_second": round(rate, 1) if rate else None,
            "samples_per_second": round(self._batch_size / median(self._seconds), 2) if self._seconds else None,
            "mfu": round(rate * self._flops_per_token / self._peak_flops, 4) if rate and self._peak_flops else None,
            "data_wait_fraction": round(median(self._data_wait_fractions), 4) if self._data_wait_fractions else None,
            "eta_seconds": round(eta, 1) if eta is not None else None,
            "peak_memory_bytes": peak_memory_bytes(),
        }


def peak_memory_bytes() -> int:
    """Peak memory of this process: on the GPU if there is one, else RSS."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


NVML_SECONDS = 1.0
"""Seconds between two readings of the GPUs: a reading takes the driver about a millisecond."""


class GpuMonitor:
    """Utilization, power, temperature and memory of the visible GPUs by NVML; nothing without nvidia-ml-py."""

    def __init__(self, visible: Sequence[str] = ()) -> None:
        self._handles: list[Any] = []
        self._read_at = -NVML_SECONDS
        try:
            import pynvml

            self._nvml: Any = pynvml
            pynvml.nvmlInit()
            indices = visible or [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._handles = [
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
                for name in indices
            ]
        except Exception:  # no package, no driver, no permission: the run does not need it
            self._handles = []

    def read(self) -> dict[str, Any]:
        """Fields of a step: mean utilization, summed power, highest temperature, and `gpus` with each device."""
        if not self._handles or time.monotonic() - self._read_at < NVML_SECONDS:
            return {}
        self._read_at = time.monotonic()
        try:
            gpus = [self._read_device(handle) for handle in self._handles]
        except Exception:  # a driver that was restarted, or a device that has no such sensor
            self._handles = []
            return {}
        return {
            "gpu_utilization": round(sum(gpu["utilization"] for gpu in gpus) / len(gpus), 4),
            "gpu_power_watts": round(sum(gpu["power_watts"] for gpu in gpus), 1),
            "gpu_temperature": max(gpu["temperature"] for gpu in gpus),
            "gpus": gpus,
        }

    def _read_device(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        return {
            "utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).used,
        }


STRAGGLER_WINDOW = 8
"""Steps before a rank is called a straggler."""
STRAGGLER_RATIO = 1.6
"""A straggler takes this many times the median of the others."""
STRAGGLER_MIN_SECONDS = 0.005
TIMEOUT_AFTER_STEPS = 8
"""Steps after which the duration of a step is known."""
MIN_TIMEOUT_SECONDS, TIMEOUT_STEPS = 300.0, 20.0
"""Timeout of a collective: at least these seconds, and this many steps."""


class DeviceTimer:
    """Time from start to stop, on the device if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[Any] = []
        if self._on_gpu:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._began = self._ended = 0.0

    def start(self) -> None:

        self._began = self._ended = time.perf_counter()
        if self._on_gpu:
            self._events[0].record()

    def stop(self) -> None:
        """Stop; GPU time is read once the device has caught up."""
        self._ended = time.perf_counter()
        if self._on_gpu:
            self._events[1].record()

    def seconds_by_rank(self, rank: int, size: int) -> list[float]:
        """The seconds at this rank's index and zeros elsewhere, so that an all_reduce sum collects them."""
        seconds = max(self._ended - self._began, self.seconds)
        return [seconds if index == rank else 0.0 for index in range(size)]

    @property
    def seconds(self) -> float:
        """Time on the device: near zero if a GPU was still busy with earlier work."""
        if self._on_gpu and self._ended > self._began:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._ended - self._began


class StragglerDetector:
    """Reports ranks that slow the others down, once each time it begins."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=STRAGGLER_WINDOW)
        self._reported: set[int] = set()

    def check(self, seconds: tuple[float, ...]) -> list[str]:
        """Messages after a step."""
        self._recent.append(seconds)
        if len(seconds) < 2 or len(self._recent) < STRAGGLER_WINDOW:
            return []
        medians = [median(rank) for rank in zip(*self._recent, strict=True)]
        lines = []
        for rank, own in enumerate(medians):
            others = median(medians[:rank] + medians[rank + 1 :])
            is_straggler = own > max(STRAGGLER_MIN_SECONDS, STRAGGLER_RATIO * others)
            if is_straggler and rank not in self._reported:
                lines.append(f"rank {rank} is a straggler: {own:.2g} s per step, the others {others:.2g} s")
            self._reported = self._reported | {rank} if is_straggler else self._reported - {rank}
        return lines
