"""What one device has to do in a step: the one value that the memory and the time arithmetic are given."""

from __future__ import annotations

from dataclasses import dataclass

from modelwright.plan.architecture import Movement, Shape

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of a number while it is computed with; fp8 products leave bf16 behind."""


@dataclass(frozen=True)
class Work:
    """One stage as one device sees it."""

    shape: Shape
    """The model."""
    moves: Movement
    """Which of its weights move."""
    rows: int
    """Rows (or images) the device takes at once."""
    length: int = 1
    """Tokens in the longest row."""
    accumulation: int = 1
    """Micro-batches in a step."""
    learnt: float = 1.0
    """Share of places whose next token is trained, which is where the head runs."""
    eval_rows: int = 0
    """Rows the device takes at once when measuring."""
    precision: str = "bf16"
    """What is multiplied."""
    weights: str = "fp32"
    """What the weights are kept in."""
    optimizer: str = "adamw_torch"
    """AdamW keeps two numbers for each weight that moves, sgd one."""
    checkpointing: bool = False
    """Whether activations are computed again in the backward pass."""
    compiled: bool = False
    """Whether layers are compiled."""
    fused_loss: bool = False
    """Whether the head and its loss are computed in chunks, so that the logits never stand whole."""
    kept_trunk: int = 0
    """Bytes of states of frozen layers that are kept on the device."""
    masked: bool = False
    """Whether attention is given a mask: pairs with a shared prompt, and packed rows where nothing better is there."""
    four_bit: bool = False
    """Whether frozen matrices are kept in 4 bits."""
    sharding: str = "ddp"
    """How devices share the model: ddp keeps it whole, fsdp splits it over all, hsdp over each machine."""
    world: int = 1
    """Devices in all."""
    per_node: int = 1
    """Devices in a machine."""
    resident: int = 0
    """Bytes of data that live on the device, such as an image set."""

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.rows * self.length

    @property
    def width(self) -> int:
        """Bytes of a computed number."""
        return WIDTHS[self.precision]

    @property
    def kept_width(self) -> int:
        """Bytes of a weight, and of the stream between layers."""
        return WIDTHS[self.weights]

    @property
    def shards(self) -> int:
        """Devices that a weight is split over."""
        return {"fsdp": self.world, "hsdp": self.per_node}.get(self.sharding, 1)
