"""What the arithmetic is done in: fp32, bf16 or fp8, or fp16 with a loss scaler; and what the weights are kept in."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""What is not multiplied in fp8 is computed in bf16."""


class Precision:
    """Casts the forward pass where the weights are fp32, scales the backward pass, and moves the weights."""

    def __init__(self, name: str, device: torch.device, weights: str = "fp32") -> None:
        self.name, self.weights = name, weights
        self.compute = DTYPES[name]
        self._device = device
        # on a processor without bf16 torch tells at length, once, that it takes the slow way; the plan chose otherwise
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        self._scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Do matrix products in the compute type."""
        if self.compute is None or self.weights == "bf16":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.compute)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        (self._scaler.scale(loss) if self._scaler else loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients back to their own size, ready to be measured and clipped."""
        if self._scaler:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the weights."""
        if self._scaler:
            self._scaler.step(optimizer)
        else:
            optimizer.step()

    def update(self) -> None:
        """Let the scaler learn from the step, whether the weights moved or overflowed."""
        if self._scaler:
            self._scaler.update()

    @property
    def overflows_are_normal(self) -> bool:
        """Whether a non-finite gradient may only mean that the loss scale is too large."""
        return self._scaler is not None and self._scaler.get_scale() > 1.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._scaler.state_dict() if self._scaler else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's scale."""
        if self._scaler and state:
            self._scaler.load_state_dict(state)
