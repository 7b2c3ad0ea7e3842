"""Write safetensors files one tensor at a time, hashed as they go.

The library's own writer wants all tensors in memory at once and hides a full disk behind its own error;
this one holds one tensor, gives the hash for nothing, and refuses a number that is no number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from modelwright.errors import Diverged

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Lazy:
    """A tensor that is fetched only when it is written."""

    name: str
    """Its name in the file."""
    shape: tuple[int, ...]
    """Its full shape."""
    dtype: torch.dtype
    """Its type."""
    fetch: Callable[[], Tensor]
    """Brings the full tensor; every rank must call it, in the same order."""

    @property
    def size(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_finite(data: Tensor) -> bool:
    """Whether every number is one; a finite sum says so for all at once: 0.01 s for 128 MiB, each by itself 0.15 s."""
    if not data.is_floating_point():
        return True
    return bool(torch.isfinite(data.sum())) or bool(torch.isfinite(data).all())


def size_of(tensors: Iterable[Lazy]) -> int:
    """Bytes that a file of these tensors takes, all but the head."""
    return sum(tensor.size for tensor in tensors)


def write(path: Path, tensors: list[Lazy]) -> str:
    """Write a safetensors file, make it durable, and return its hash."""
    head: dict[str, Any] = {}
    place = 0
    for tensor in tensors:
        stop = place + tensor.size
        head[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    # hashed and judged on a second core while the bytes go to the disk; the cost is row R26 of `bench reliability`
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        for start in (len(text).to_bytes(8, "little"), text):
            file.write(start)
            digest.update(start)
        for tensor in tensors:
            data = tensor.fetch().to("cpu").contiguous()
            view = data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else memoryview(b"")
            hashed, judged = beside.submit(digest.update, view), beside.submit(is_finite, data)
            file.write(view)
            hashed.result()
            if not judged.result():
                raise Diverged(f"{tensor.name} holds a number that is not finite; no checkpoint is written with it")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
