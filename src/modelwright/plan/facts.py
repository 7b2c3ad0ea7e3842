"""What the machine can do: asked once, handed to the plan as plain values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A40": 150e12}
"""Dense bf16 matrix rates in FLOP/s, by the vendors' data sheets: what MFU is counted against."""

FAST_BF16 = {"amx_bf16", "avx512_bf16", "bf16"}
"""What x86 and ARM processors call it, of those where it pays; without it torch's bf16 is a hundred times slower."""


@dataclass(frozen=True)
class Facts:
    """One device and what it is good at."""

    device: Literal["cpu", "cuda"]
    """What computes."""
    name: str
    """What it calls itself."""
    memory: int
    """Bytes it has."""
    fast_bf16: bool
    """Whether bf16 matrix products are faster than fp32 ones here."""
    peak_flops: float | None = None
    """Dense bf16 FLOP/s, where known."""


def probe() -> Facts:
    """Ask this machine; the only place that asks torch."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        peak = next((rate for key, rate in PEAK_BF16.items() if key in properties.name), None)
        return Facts("cuda", properties.name, properties.total_memory, properties.major >= 8, peak)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flags, threads = _cpu_flags(), torch.get_num_threads()
    return Facts("cpu", f"{threads} CPU thread{'s' * (threads > 1)}", memory, bool(flags & FAST_BF16))


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "").split())
