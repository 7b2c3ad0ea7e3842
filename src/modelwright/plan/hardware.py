"""GPU data sheets, the hardware named by --on, and what this machine has."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from modelwright.errors import UsageError


def device_info_of(hardware: Hardware) -> DeviceInfo:
    """What a probe would say on such a machine."""
    gpu = hardware.gpu
    device = "cpu" if gpu.name == "CPU" else "cuda"
    return DeviceInfo(device, gpu.name, round(gpu.memory), gpu.bf16 > gpu.fp32, gpu.bf16 or gpu.fp16)  # type: ignore[arg-type]


GIB, GB, MB, TERA = 2**30, 1e9, 1e6, 1e12


@dataclass(frozen=True)
class GpuSpec:
    """One accelerator as its data sheet describes it; rates are dense, without structured sparsity."""

    name: str
    """How it is written in --on."""
    memory: float
    """Bytes a program can see, which is a little less than what is printed on the box."""
    bandwidth: float
    """Bytes per second to its own memory."""
    fp32: float
    """FLOP/s in fp32, outside the tensor cores."""
    tf32: float
    """FLOP/s in tf32."""
    bf16: float
    """FLOP/s in bf16; 0 where the card has none."""
    fp16: float
    """FLOP/s in fp16, with sums in fp32."""
    fp8: float
    """FLOP/s in fp8; 0 where the card has none."""
    interconnect_bandwidth: float
    """Bytes per second in one direction between two such cards of one machine."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    l2_cache: float
    """Bytes of its last cache, where a tensor may wait for its next use."""
    source: str
    """The document the figures were taken from."""
    aliases: tuple[str, ...] = ()
    """Words by which drivers name it."""

    def peak_flops(self, precision: str) -> float:
        """The matrix rate of a precision; what the card lacks is done in the next wider one."""
        rates = {"fp8": self.fp8 or self.bf16, "bf16": self.bf16 or self.fp32, "fp16": self.fp16, "fp32": self.fp32}
        return rates[precision]


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("T4", 14.6 * GIB, 320 * GB, 8.1 * TERA, 8.1 * TERA, 0.0, 65 * TERA, 0.0, 15.75 * GB, (7, 5), 4 * MB,
            "NVIDIA T4 data sheet", ("Tesla T4",)),
        GpuSpec("L4", 22.2 * GIB, 300 * GB, 30.3 * TERA, 60 * TERA, 121 * TERA, 121 * TERA, 242 * TERA, 31.5 * GB,
            (8, 9), 48 * MB, "NVIDIA L4 data sheet"),
        GpuSpec("L40S", 44.4 * GIB, 864 * GB, 91.6 * TERA, 183 * TERA, 362 * TERA, 362 * TERA, 733 * TERA, 31.5 * GB,
            (8, 9), 96 * MB, "NVIDIA L40S data sheet"),
        GpuSpec("A40", 44.4 * GIB, 696 * GB, 37.4 * TERA, 74.8 * TERA, 149.7 * TERA, 149.7 * TERA, 0.0, 31.5 * GB,
            (8, 6), 6 * MB, "NVIDIA A40 data sheet"),
        GpuSpec("A100-40", 39.4 * GIB, 1555 * GB, 19.5 * TERA, 156 * TERA, 312 * TERA, 312 * TERA, 0.0, 300 * GB,
            (8, 0), 40 * MB, "NVIDIA A100 data sheet, 40 GB SXM", ("A100-SXM4-40GB", "A100-PCIE-40GB")),
        GpuSpec("A100-80", 79.1 * GIB, 2039 * GB, 19.5 * TERA, 156 * TERA, 312 * TERA, 312 * TERA, 0.0, 300 * GB,
            (8, 0), 40 * MB, "NVIDIA A100 data sheet, 80 GB SXM", ("A100-SXM4-80GB", "A100 80GB", "A100")),
        GpuSpec("H100-PCIe", 79.1 * GIB, 2000 * GB, 51 * TERA, 378 * TERA, 756 * TERA, 756 * TERA, 1513 * TERA, 63 * GB,
            (9, 0), 50 * MB, "NVIDIA H100 data sheet, PCIe", ("H100 PCIe",)),
        GpuSpec("H100", 79.1 * GIB, 3350 * GB, 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA, 1979 * TERA, 450 * GB,
            (9, 0), 50 * MB, "NVIDIA H100 data sheet, SXM", ("H100 80GB HBM3", "H100-SXM")),
        GpuSpec("H200", 139.8 * GIB, 4800 * GB, 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA, 1979 * TERA, 450 * GB,
            (9, 0), 50 * MB, "NVIDIA H200 data sheet, SXM"),
        GpuSpec("RTX4090", 23.5 * GIB, 1008 * GB, 82.6 * TERA, 82.6 * TERA, 165.2 * TERA, 165.2 * TERA, 330.3 * TERA,
            31.5 * GB, (8, 9), 72 * MB, "NVIDIA Ada GPU architecture whitepaper", ("RTX 4090",)),
    )
}  # fmt: skip
"""By the name used in --on."""
DEFAULT_NETWORK_BANDWIDTH = 25 * GB / 8
"""Bytes per second between two machines where nothing else is said: 25 Gbit/s Ethernet."""


@dataclass(frozen=True)
class Hardware:
    """So many machines with so many equal cards each."""

    nodes: int
    """Machines."""
    per_node: int
    """Cards in each."""
    gpu: GpuSpec
    """What each card is."""
    network_bandwidth: float = DEFAULT_NETWORK_BANDWIDTH
    """Bytes per second between two machines."""

    @property
    def world_size(self) -> int:
        """Cards in all."""
        return self.nodes * self.per_node

    @property
    def slowest_bandwidth(self) -> float:
        """Bytes per second of the slowest link that gradients pass."""
        return self.network_bandwidth if self.nodes > 1 else self.gpu.interconnect_bandwidth

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}x{self.gpu.name}" if self.nodes > 1 else f"{self.per_node}x{self.gpu.name}"


def parse_hardware(text: str) -> Hardware:
    """Read `4xL40S` (one machine, four cards), `2x2xA40` (two machines of two), or `L4`."""
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w-]*)", text.strip().replace("×", "x"))
    if not match:
        raise UsageError(f"--on is {text!r}; it wants a machine such as 1xH200, 4xL40S or 2x2xA40")
    first, second, name = match.groups()
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    gpu = find_gpu(name)
    if gpu is None:
        raise UsageError(f"--on names {name!r}; known are {', '.join(GPUS)}")
    if not nodes or not per_node:
        raise UsageError(f"--on is {text!r}; it wants at least one card")
    return Hardware(nodes, per_node, gpu)


def find_gpu(name: str) -> GpuSpec | None:
    """The card that a person or a driver calls by this name."""
    normalized = re.sub(r"[\s_-]", "", name).lower()
    for gpu in GPUS.values():
        if normalized == re.sub(r"[\s_-]", "", gpu.name).lower():
            return gpu
    names = sorted(
        ((alias, gpu) for gpu in GPUS.values() for alias in (gpu.name, *gpu.aliases)), key=lambda w: -len(w[0])
    )
    return next((gpu for alias, gpu in names if re.search(rf"\b{re.escape(alias)}\b", name, re.IGNORECASE)), None)


CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limits."""
CGROUP_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""What it may take and what it has taken, by the second version of cgroups and by the first."""
BF16_CPU_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
"""What x86 and ARM processors call it, of those where it pays; without it torch's bf16 is a hundred times slower."""


@dataclass(frozen=True)
class DeviceInfo:
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


def probe_device() -> DeviceInfo:
    """Ask this machine; the only place that asks torch."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        spec = find_gpu(properties.name)
        peak = (spec.bf16 or spec.fp16) if spec else None
        return DeviceInfo("cuda", properties.name, properties.total_memory, properties.major >= 8, peak)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flags, threads = _cpu_flags(), torch.get_num_threads()
    return DeviceInfo("cpu", f"{threads} CPU thread{'s' * (threads > 1)}", memory, bool(flags & BF16_CPU_FLAGS))


def detect_hardware() -> Hardware:
    """This machine without asking torch: its driver names the cards, else its processor counts."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output_lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split("\n")
        cards = [
            (name.strip(), int(memory) << 20) for name, memory in (line.rsplit(",", 1) for line in output_lines if line)
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        cards = []
    if cards:
        name, memory = cards[0]
        spec = find_gpu(name)
        return Hardware(1, len(cards), gpu_spec_of(DeviceInfo("cuda", name, memory, spec is None or spec.bf16 > 0)))
    threads = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        1, 1, gpu_spec_of(DeviceInfo("cpu", f"{threads} CPU threads", memory, bool(_cpu_flags() & BF16_CPU_FLAGS)))
    )


def gpu_spec_of(device_info: DeviceInfo) -> GpuSpec:
    """The device as the arithmetic knows it, with the memory it really has; an unknown one by cautious guesses."""
    spec = find_gpu(device_info.name) if device_info.device == "cuda" else None
    if spec:
        return replace(spec, memory=float(device_info.memory))
    if device_info.device == "cuda":
        return replace(
            GPUS["A40"],
            name=device_info.name,
            memory=float(device_info.memory),
            source="unknown card, taken for an A40",
        )
    threads = int(device_info.name.split()[0]) if device_info.name[:1].isdigit() else 1
    rate, bandwidth = 30e9 * threads, 10e9 * threads**0.75
    half = 2 * rate if device_info.fast_bf16 else rate / 50
    return GpuSpec("CPU", float(device_info.memory), bandwidth, rate, rate, half, rate / 50, 0.0, 1e9, (0, 0), 1e6 * threads,
               "a guess; modelwright plan --calibrate measures it")  # fmt: skip


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "").split())


def available_memory() -> int:
    """Bytes of memory that a process may still take: what this machine has free, or its container may have."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([free, *_container_memory_left()])


def _container_memory_left() -> list[int]:
    """Bytes up to the container's limit, where it has one; files that were read long ago make room for others."""
    for limit, used in CGROUP_MEMORY_FILES:
        try:
            limit_bytes, used_bytes = ((CGROUP / name).read_text(encoding="ascii").strip() for name in (limit, used))
            lines = (CGROUP / limit).with_name("memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        inactive_bytes = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return [] if limit_bytes == "max" else [max(0, int(limit_bytes) - int(used_bytes) + inactive_bytes)]
    return []
