"""GPU data sheets, the hardware named by --gpus, and what this machine has."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from modelwright.errors import UsageError

GIB, GB, MB, TERA = 2**30, 1e9, 1e6, 1e12


@dataclass(frozen=True)
class GpuSpec:
    """One GPU by its data sheet; FLOP rates are dense, without structured sparsity."""

    name: str
    """Its name in --gpus."""
    memory: float
    """Bytes a program can use, a little less than the nominal size."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    fp32: float
    """FLOP/s in fp32, outside the tensor cores."""
    tf32: float
    """FLOP/s in tf32."""
    bf16: float
    """FLOP/s in bf16; 0 if not supported."""
    fp16: float
    """FLOP/s in fp16 with fp32 accumulation."""
    fp8: float
    """FLOP/s in fp8; 0 if not supported."""
    interconnect_bandwidth: float
    """Bytes per second in one direction between two GPUs of one node."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    l2_cache: float
    """Bytes of the L2 cache."""
    source: str
    """The document these figures come from."""
    aliases: tuple[str, ...] = ()
    """Its names in drivers."""

    def peak_flops(self, precision: str) -> float:
        """Matmul rate of a precision; one that is not supported runs in the next wider one."""
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
        GpuSpec("H100-PCIe", 79.1 * GIB, 2000 * GB, 51 * TERA, 378 * TERA, 756 * TERA, 756 * TERA, 1513 * TERA,
            63 * GB, (9, 0), 50 * MB, "NVIDIA H100 data sheet, PCIe", ("H100 PCIe",)),
        GpuSpec("H100", 79.1 * GIB, 3350 * GB, 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA, 1979 * TERA,
            450 * GB, (9, 0), 50 * MB, "NVIDIA H100 data sheet, SXM", ("H100 80GB HBM3", "H100-SXM")),
        GpuSpec("H200", 139.8 * GIB, 4800 * GB, 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA, 1979 * TERA,
            450 * GB, (9, 0), 50 * MB, "NVIDIA H200 data sheet, SXM"),
        GpuSpec("RTX4090", 23.5 * GIB, 1008 * GB, 82.6 * TERA, 82.6 * TERA, 165.2 * TERA, 165.2 * TERA, 330.3 * TERA,
            31.5 * GB, (8, 9), 72 * MB, "NVIDIA Ada GPU architecture whitepaper", ("RTX 4090",)),
    )
}  # fmt: skip
"""By the name used in --gpus."""
DEFAULT_NETWORK_BANDWIDTH = 25 * GB / 8
"""Bytes per second between two nodes by default: 25 Gbit/s Ethernet."""


@dataclass(frozen=True)
class Hardware:
    """Nodes with equal GPUs."""

    nodes: int
    """Number of nodes."""
    per_node: int
    """GPUs per node."""
    gpu: GpuSpec
    """The GPU model."""
    network_bandwidth: float = DEFAULT_NETWORK_BANDWIDTH
    """Bytes per second between two nodes."""

    @property
    def world_size(self) -> int:
        """GPUs in total."""
        return self.nodes * self.per_node

    @property
    def slowest_bandwidth(self) -> float:
        """Bytes per second of the slowest link in an all-reduce."""
        return self.network_bandwidth if self.nodes > 1 else self.gpu.interconnect_bandwidth

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}x{self.gpu.name}" if self.nodes > 1 else f"{self.per_node}x{self.gpu.name}"


def parse_hardware(text: str) -> Hardware:
    """Parse `4xL40S` (one node, four GPUs), `2x2xA40` (two nodes of two), or `L4`."""
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w-]*)", text.strip().replace("×", "x"))
    if not match:
        raise UsageError(f"--gpus is {text!r}; it wants a machine such as 1xH200, 4xL40S or 2x2xA40")
    first, second, name = match.groups()
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    gpu = find_gpu(name)
    if gpu is None:
        raise UsageError(f"--gpus names {name!r}; known are {', '.join(GPUS)}")
    if not nodes or not per_node:
        raise UsageError(f"--gpus is {text!r}; it wants at least one GPU")
    return Hardware(nodes, per_node, gpu)


def find_gpu(name: str) -> GpuSpec | None:
    """The GPU of this name, as written in --gpus or reported by a driver."""
    normalized = re.sub(r"[\s_-]", "", name).lower()
    for gpu in GPUS.values():
        if normalized == re.sub(r"[\s_-]", "", gpu.name).lower():
            return gpu
    names = [(alias, gpu) for gpu in GPUS.values() for alias in (gpu.name, *gpu.aliases)]
    names.sort(key=lambda pair: -len(pair[0]))
    return next((gpu for alias, gpu in names if re.search(rf"\b{re.escape(alias)}\b", name, re.IGNORECASE)), None)


CGROUP = Path("/sys/fs/cgroup")
CGROUP_MEMORY_FILES = (("memory.max", "memory.current"),
                       ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))  # fmt: skip
"""Memory limit and usage of a container, in cgroup v2 and v1."""
BF16_CPU_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
"""CPU flags of fast bf16 on x86 and ARM; without them bf16 in torch is a hundred times slower."""


@dataclass(frozen=True)
class DeviceInfo:
    """One device and its capabilities."""

    device: Literal["cpu", "cuda"]
    """Device type."""
    name: str
    """Device name."""
    memory: int
    """Bytes of memory."""
    fast_bf16: bool
    """Whether bf16 matmuls are faster than fp32 ones."""
    peak_flops: float | None = None
    """Dense bf16 FLOP/s, if known."""

    @property
    def has_tf32(self) -> bool:
        """Whether its tensor cores have tf32: since compute capability 8.0, as with bf16."""
        return self.device == "cuda" and self.fast_bf16


def probe_device() -> DeviceInfo:
    """Detect the device of this process; the only function here that imports torch."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        spec = find_gpu(properties.name)
        peak = (spec.bf16 or spec.fp16) if spec else None
        return DeviceInfo("cuda", properties.name, properties.total_memory, properties.major >= 8, peak)
    return _cpu_info(torch.get_num_threads())


def detect_hardware() -> Hardware:
    """The GPUs of this machine by nvidia-smi, else its CPU; without torch."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout
        fields = (line.rsplit(",", 1) for line in output.split("\n") if line)
        gpus = [(name.strip(), int(memory) << 20) for name, memory in fields]
    except (OSError, ValueError, subprocess.SubprocessError):
        gpus = []
    if gpus:
        name, memory = gpus[0]
        spec = find_gpu(name)
        return Hardware(1, len(gpus), gpu_spec_of(DeviceInfo("cuda", name, memory, spec is None or spec.bf16 > 0)))
    return Hardware(1, 1, gpu_spec_of(_cpu_info(len(os.sched_getaffinity(0)))))


def _cpu_info(threads: int) -> DeviceInfo:
    name = f"{threads} CPU thread{'s' * (threads > 1)}"
    return DeviceInfo("cpu", name, _total_memory(), bool(_cpu_flags() & BF16_CPU_FLAGS))


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_spec_of(device_info: DeviceInfo) -> GpuSpec:
    """The data sheet of a device with its actual memory; an unknown GPU counts as an A40, a CPU is estimated."""
    spec = find_gpu(device_info.name) if device_info.device == "cuda" else None
    memory = float(device_info.memory)
    if spec:
        return replace(spec, memory=memory)
    if device_info.device == "cuda":
        return replace(GPUS["A40"], name=device_info.name, memory=memory, source="unknown GPU, counted as an A40")
    threads = int(device_info.name.split()[0]) if device_info.name[:1].isdigit() else 1
    rate, bandwidth = 30e9 * threads, 10e9 * threads**0.75
    half = 2 * rate if device_info.fast_bf16 else rate / 50
    return GpuSpec("CPU", memory, bandwidth, rate, rate, half, rate / 50, 0.0, 1e9, (0, 0), 1e6 * threads,
                   "a guess; modelwright plan --calibrate measures it")  # fmt: skip


def device_info_of(hardware: Hardware) -> DeviceInfo:
    """What `probe_device` would return on this hardware."""
    gpu = hardware.gpu
    device: Literal["cpu", "cuda"] = "cpu" if gpu.name == "CPU" else "cuda"
    return DeviceInfo(device, gpu.name, round(gpu.memory), gpu.bf16 > gpu.fp32, gpu.bf16 or gpu.fp16)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "").split())


def available_memory() -> int:
    """Bytes a process can still allocate: free memory of the machine, within the limit of the container."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = _total_memory() // 2
    return min([free, *_container_memory_left()])


def _container_memory_left() -> list[int]:
    """Bytes up to the container's limit, if it has one; inactive page cache counts as free."""
    for limit, used in CGROUP_MEMORY_FILES:
        try:
            limit_bytes, used_bytes = ((CGROUP / name).read_text(encoding="ascii").strip() for name in (limit, used))
            lines = (CGROUP / limit).with_name("memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        inactive_bytes = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return [] if limit_bytes == "max" else [max(0, int(limit_bytes) - int(used_bytes) + inactive_bytes)]
    return []
