"""Hold frozen weights in 4 or 8 bits, so that low-rank matrices beside them fit where the model would not (QLoRA)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from modelwright.errors import ModelError


def require(kind: str) -> None:
    """Say what is missing, where quantizing wants a package that is not there."""
    if kind != "none" and find_spec("bitsandbytes") is None:
        raise ModelError(
            f"quantization: {kind} wants bitsandbytes, which is not installed: pip install bitsandbytes; "
            "or quantization: none"
        )


def loading(kind: str, device: torch.device) -> dict[str, Any]:
    """What from_pretrained is told to quantize a model while it reads it; nothing for "none"."""
    if kind == "none":
        return {}
    require(kind)
    from transformers import BitsAndBytesConfig

    wishes: dict[str, Any] = {"load_in_8bit": True}
    if kind == "nf4":
        # what is multiplied is as exact as the rest of the stage: autocast decides on a GPU
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        wishes = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
                  "bnb_4bit_compute_dtype": compute}  # fmt: skip
    return {"quantization_config": BitsAndBytesConfig(**wishes), "device_map": {"": device}}


def is_quantized(model: Any) -> bool:
    """Whether a model's weights were quantized as it was read."""
    return bool(getattr(model, "is_quantized", False))
