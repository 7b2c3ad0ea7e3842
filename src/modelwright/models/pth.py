"""Write weights the old way, as .pth, for programs that want it; what is written holds tensors and plain values only.

Such a file is a pickle. We never read one; `torch.load(path, weights_only=True)` reads these without running anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def write_pth(path: Path, contents: Mapping[str, Any]) -> None:
    """Write one file and read it back in the safe way, so that what we hand out is known to open so."""
    torch.save(dict(contents), path)
    torch.load(path, weights_only=True, map_location="cpu")


def weights_in(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a safetensors file, those under a prefix without it."""
    return {name.removeprefix(prefix): value for name, value in load_file(path).items() if name.startswith(prefix)}
