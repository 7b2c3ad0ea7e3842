"""Known accelerators: memory, bandwidth, dense matrix rates, links and capability, from the vendor's data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from modelwright.errors import UsageError

GIB, GB, MB, TERA = 2**30, 1e9, 1e6, 1e12


@dataclass(frozen=True)
class Gpu:
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
    link: float
    """Bytes per second in one direction between two such cards of one machine."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cache: float
    """Bytes of its last cache, where a tensor may wait for its next use."""
    source: str
    """The document the figures were taken from."""
    also: tuple[str, ...] = ()
    """Words by which drivers name it."""

    def rate(self, precision: str) -> float:
        """The matrix rate of a precision; what the card lacks is done in the next wider one."""
        rates = {"fp8": self.fp8 or self.bf16, "bf16": self.bf16 or self.fp32, "fp16": self.fp16, "fp32": self.fp32}
        return rates[precision]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 14.6 * GIB, 320 * GB, 8.1 * TERA, 8.1 * TERA, 0.0, 65 * TERA, 0.0, 15.75 * GB, (7, 5), 4 * MB,
            "NVIDIA T4 data sheet", ("Tesla T4",)),
        Gpu("L4", 22.2 * GIB, 300 * GB, 30.3 * TERA, 60 * TERA, 121 * TERA, 121 * TERA, 242 * TERA, 31.5 * GB,
            (8, 9), 48 * MB, "NVIDIA L4 data sheet"),
        Gpu("L40S", 44.4 * GIB, 864 * GB, 91.6 * TERA, 183 * TERA, 362 * TERA, 362 * TERA, 733 * TERA, 31.5 * GB,
            (8, 9), 96 * MB, "NVIDIA L40S data sheet"),
        Gpu("A40", 44.4 * GIB, 696 * GB, 37.4 * TERA, 74.8 * TERA, 149.7 * TERA, 149.7 * TERA, 0.0, 31.5 * GB,
            (8, 6), 6 * MB, "NVIDIA A40 data sheet"),
        Gpu("A100-40", 39.4 * GIB, 1555 * GB, 19.5 * TERA, 156 * TERA, 312 * TERA, 312 * TERA, 0.0, 300 * GB,
            (8, 0), 40 * MB, "NVIDIA A100 data sheet, 40 GB SXM", ("A100-SXM4-40GB", "A100-PCIE-40GB")),
        Gpu("A100-80", 79.1 * GIB, 2039 * GB, 19.5 * TERA, 156 * TERA, 312 * TERA, 312 * TERA, 0.0, 300 * GB,
            (8, 0), 40 * MB, "NVIDIA A100 data sheet, 80 GB SXM", ("A100-SXM4-80GB", "A100 80GB", "A100")),
        Gpu("H100-PCIe", 79.1 * GIB, 2000 * GB, 51 * TERA, 378 * TERA, 756 * TERA, 756 * TERA, 1513 * TERA, 63 * GB,
            (9, 0), 50 * MB, "NVIDIA H100 data sheet, PCIe", ("H100 PCIe",)),
        Gpu("H100", 79.1 * GIB, 3350 * GB, 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA, 1979 * TERA, 450 * GB,
            (9, 0), 50 * MB, "NVIDIA H100 data sheet, SXM", ("H100 80GB HBM3", "H100-SXM")),
        Gpu("H200", 139.8 * GIB, 4800 * GB, 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA, 1979 * TERA, 450 * GB,
            (9, 0), 50 * MB, "NVIDIA H200 data sheet, SXM"),
        Gpu("RTX4090", 23.5 * GIB, 1008 * GB, 82.6 * TERA, 82.6 * TERA, 165.2 * TERA, 165.2 * TERA, 330.3 * TERA,
            31.5 * GB, (8, 9), 72 * MB, "NVIDIA Ada GPU architecture whitepaper", ("RTX 4090",)),
    )
}  # fmt: skip
"""By the name used in --on."""

NETWORK = 25 * GB / 8
"""Bytes per second between two machines where nothing else is said: 25 Gbit/s Ethernet."""


@dataclass(frozen=True)
class Machines:
    """So many machines with so many equal cards each."""

    nodes: int
    """Machines."""
    per_node: int
    """Cards in each."""
    gpu: Gpu
    """What each card is."""
    network: float = NETWORK
    """Bytes per second between two machines."""

    @property
    def world(self) -> int:
        """Cards in all."""
        return self.nodes * self.per_node

    @property
    def link(self) -> float:
        """Bytes per second of the slowest link that gradients pass."""
        return self.network if self.nodes > 1 else self.gpu.link

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}x{self.gpu.name}" if self.nodes > 1 else f"{self.per_node}x{self.gpu.name}"


def machines(text: str) -> Machines:
    """Read `4xL40S` (one machine, four cards), `2x2xA40` (two machines of two), or `L4`."""
    found = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w-]*)", text.strip().replace("×", "x"))
    if not found:
        raise UsageError(f"--on is {text!r}; it wants a machine such as 1xH200, 4xL40S or 2x2xA40")
    first, second, name = found.groups()
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    gpu = named(name)
    if gpu is None:
        raise UsageError(f"--on names {name!r}; known are {', '.join(GPUS)}")
    if not nodes or not per_node:
        raise UsageError(f"--on is {text!r}; it wants at least one card")
    return Machines(nodes, per_node, gpu)


def named(name: str) -> Gpu | None:
    """The card that a person or a driver calls by this name."""
    plain = re.sub(r"[\s_-]", "", name).lower()
    for gpu in GPUS.values():
        if plain == re.sub(r"[\s_-]", "", gpu.name).lower():
            return gpu
    words = sorted(((word, gpu) for gpu in GPUS.values() for word in (gpu.name, *gpu.also)), key=lambda w: -len(w[0]))
    return next((gpu for word, gpu in words if re.search(rf"\b{re.escape(word)}\b", name, re.IGNORECASE)), None)
