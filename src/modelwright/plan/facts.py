"""What the machine can do: asked once, handed to the plan as plain values."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from modelwright.plan.gpus import GPUS, Gpu, Machines, named

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limits."""
GROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""What it may take and what it has taken, by the second version of cgroups and by the first."""
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

    @property
    def has_tf32(self) -> bool:
        """Whether its tensor cores take fp32 numbers, by 10 bits: since compute capability 8.0, as with bf16."""
        return self.device == "cuda" and self.fast_bf16


def probe() -> Facts:
    """Ask this machine; the only place that asks torch."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        known = named(properties.name)
        peak = (known.bf16 or known.fp16) if known else None
        return Facts("cuda", properties.name, properties.total_memory, properties.major >= 8, peak)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flags, threads = _cpu_flags(), torch.get_num_threads()
    return Facts("cpu", f"{threads} CPU thread{'s' * (threads > 1)}", memory, bool(flags & FAST_BF16))


def here() -> Machines:
    """This machine without asking torch: its driver names the cards, else its processor counts."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split("\n")
        cards = [(name.strip(), int(memory) << 20) for name, memory in (line.rsplit(",", 1) for line in told if line)]
    except (OSError, ValueError, subprocess.SubprocessError):
        cards = []
    if cards:
        name, memory = cards[0]
        known = named(name)
        return Machines(1, len(cards), card(Facts("cuda", name, memory, known is None or known.bf16 > 0)))
    threads = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machines(1, 1, card(Facts("cpu", f"{threads} CPU threads", memory, bool(_cpu_flags() & FAST_BF16))))


def card(facts: Facts) -> Gpu:
    """The device as the arithmetic knows it, with the memory it really has; an unknown one by cautious guesses."""
    known = named(facts.name) if facts.device == "cuda" else None
    if known:
        return replace(known, memory=float(facts.memory))
    if facts.device == "cuda":
        return replace(
            GPUS["A40"], name=facts.name, memory=float(facts.memory), source="unknown card, taken for an A40"
        )
    threads = int(facts.name.split()[0]) if facts.name[:1].isdigit() else 1
    rate, bandwidth = 30e9 * threads, 10e9 * threads**0.75
    half = 2 * rate if facts.fast_bf16 else rate / 50
    return Gpu("CPU", float(facts.memory), bandwidth, rate, rate, half, rate / 50, 0.0, 1e9, (0, 0), 1e6 * threads,
               "a guess; modelwright plan --calibrate measures it")  # fmt: skip


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "").split())


def free_memory() -> int:
    """Bytes of memory that a process may still take: what this machine has free, or its container may have."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([free, *_left_to_container()])


def _left_to_container() -> list[int]:
    """Bytes up to the container's limit, where it has one; files that were read long ago make room for others."""
    for limit, used in GROUP_FILES:
        try:
            most, taken = ((CGROUP / name).read_text(encoding="ascii").strip() for name in (limit, used))
            lines = (CGROUP / limit).with_name("memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        old = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return [] if most == "max" else [max(0, int(most) - int(taken) + old)]
    return []
