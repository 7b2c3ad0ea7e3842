"""What one device has to do in a step: the one value that the memory and the time arithmetic are given."""

from __future__ import annotations

from dataclasses import dataclass

from modelwright.plan.architecture import Movement, Shape, TextShape
from modelwright.recipe.training import Checkpointing

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of a number while it is computed with; fp8 products leave bf16 behind."""


CHUNK = 4096
"""Places whose logits stand in memory together, where the loss is computed in chunks."""


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
    tf32: bool = False
    """Whether fp32 numbers are multiplied on tensor cores."""
    by_row: bool = False
    """Whether each row of an fp8 matrix has a scale of its own, and not the matrix one."""
    weights: str = "fp32"
    """What the weights are kept in."""
    optimizer: str = "adamw_torch"
    """AdamW keeps two numbers for each weight that moves, sgd one."""
    checkpointing: Checkpointing = False
    """Whether activations are computed again in the backward pass: all, or all but products and attention."""
    compiled: bool = False
    """Whether layers are compiled."""
    chunked_loss: bool = True
    """Whether the task computes the head's loss in chunks where there are many places, so that logits never stand."""
    kept_layers: int = 0
    """Frozen layers whose states were computed once and kept, so that no step computes them."""
    masked: bool = False
    """Whether attention is given a mask: pairs with a shared prompt, where nothing better is there."""
    branched: bool = False
    """Whether two answers share a prompt without a mask: for attention they are then laid apart."""
    on_gpu: bool = True
    """Whether a GPU computes."""
    recorded: bool = False
    """Whether steps are recorded and replayed: the host has next to nothing to do, and gradients stay in place."""
    recordings: int = 1
    """Shapes of rows that are recorded, each with memory of its own."""
    mean_width: int = 4
    """Bytes of the gradients' mean that AdamW keeps."""
    quantization: str = "none"
    """What frozen matrices of the layers are kept in: nf4, int8, or as the other weights."""
    sharding: str = "ddp"
    """How devices share the model: ddp keeps it whole, fsdp splits it over all, hsdp over each machine."""
    world: int = 1
    """Devices in all."""
    per_node: int = 1
    """Devices in a machine."""
    resident: int = 0
    """Bytes of data that live on the device, such as an image set."""
    arrives: bool = True
    """Whether the weights come to the device first, whole and in fp32, before they are halved or split."""

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.rows * self.length

    @property
    def places(self) -> float:
        """Places where the head runs."""
        return self.tokens * self.learnt

    @property
    def chunked(self) -> bool:
        """Whether the loss is computed in chunks: with many places, and not in fp16, whose gradients want scaling."""
        return self.chunked_loss and self.places > (CHUNK // 4 if self.on_gpu else CHUNK) and self.precision != "fp16"

    @property
    def keys(self) -> int:
        """Numbers in the keys that attention is given for each token, and as many in the values."""
        shape = self.shape
        assert isinstance(shape, TextShape)
        if self.masked or (self.on_gpu and self.precision == "fp32"):  # the kernel wants as many as there are queries
            return shape.query_width
        return shape.kv_width

    @property
    def spread(self) -> float:
        """Tokens that attention is given for each one there is: a prompt that two answers share is laid before each."""
        return 2.0 - self.learnt if self.branched else 1.0

    @property
    def width(self) -> int:
        """Bytes of a computed number."""
        return WIDTHS[self.precision]

    @property
    def kept_width(self) -> int:
        """Bytes of a weight."""
        return WIDTHS[self.weights]

    @property
    def stream(self) -> int:
        """Bytes of a number in the stream between layers: as wide as the weights that a layer is given."""
        return self.kept_width if self.sharding == "ddp" else min(self.width, self.kept_width)

    @property
    def short(self) -> bool:
        """Whether low-rank products of gate and up are added as the gate is read, which takes bf16 all through."""
        halves = self.precision == "bf16" and self.stream == 2 and self.quantization == "none"
        return self.moves.short and self.on_gpu and halves

    @property
    def asks_for_last(self) -> bool:
        """Whether a layer that is computed again asks for its last product: a norm stands behind it, or an eager layer
        computes it before the low-rank products that are asked for."""
        assert isinstance(self.shape, TextShape)
        return self.shape.traits.norms > 2 or (self.moves.low_rank > 0 and not self.compiled)

    @property
    def shards(self) -> int:
        """Devices that a weight is split over."""
        return {"fsdp": self.world, "hsdp": self.per_node}.get(self.sharding, 1)
