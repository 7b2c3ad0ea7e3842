"""How much memory a step takes, by component and by moment: the peak is the fullest moment of a step.

The counts are those of the tensors that autograd keeps for each kind of layer; a test holds them against a model
that is really traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelwright.plan.architecture import TextShape, VisionShape
from modelwright.plan.work import CHUNK, Work

MOMENT_BYTES = {"adamw_torch": 8, "sgd": 4}
"""Bytes an optimizer keeps for each weight that moves, in fp32."""
LOSS_BYTES, TOLD_BYTES = 12, 10
"""Bytes per logit at the fullest moment of the loss: three fp32 copies backward; bf16 and two fp32 forward."""
QUANTISED = {"nf4": 0.52, "int8": 1.01}
"""Bytes of a quantised number, with the scales of its block."""
CONTEXT = 0.6e9
"""Bytes a CUDA process takes before the first tensor: the context, the libraries' workspaces."""
RECORDER = 0.05e9
"""Bytes of workspaces that a recorded step has of its own, since it is recorded on a stream of its own."""
MARGIN, GAPS = 0.03, 0.10
"""Share of a plan that stays free on the card, and more of what comes and goes in a step: the allocator leaves gaps.

A step of 4 B weights whose tensors are counted as 142 GB at its peak, 89 of them for a while only, ran out of 149.6:
what is not counted was 9 % of those or more. Where there is room, the allocator holds 5 to 10 % more of what comes and
goes where that is 20 GB and more, 1 to 3 GB where it is less.
"""
POOLS = 1e9
"""Bytes that stay with the allocator beside a recording, which cannot use them: 1.1 GB where a step takes 1 to 3."""


@dataclass(frozen=True)
class Fitted:
    """What measured runs teach about memory: factors on what cannot be derived."""

    compiled: float = 0.64
    """Share of an eager layer's activations that a compiled one keeps."""
    compiled_fp8: float = 0.44
    """The same where matrices are multiplied in fp8."""
    compiled_lora: float = 0.8
    """The same with low-rank matrices beside frozen ones."""
    fixed: float = 0.1e9
    """Bytes beside everything that is counted: workspaces of matrix products, small tensors."""


GUESSED_MEMORY = Fitted()
"""Before anything was measured."""


@dataclass(frozen=True)
class Memory:
    """The fullest moment on one device."""

    parts: dict[str, float]
    """Bytes by component at the fullest moment of a step."""
    moment: str
    """When most is held: in a step, or when the weights arrive."""
    moments: dict[str, float]
    """Bytes in all at each moment that was looked at."""
    beside: float = 0.0
    """Bytes that recordings keep to themselves: for rows of other lengths, and for measuring beside them."""
    passing: float = 0.0
    """Bytes that come and go in a step."""

    @property
    def total(self) -> float:
        """Bytes of tensors at the peak."""
        return self.moments[self.moment]

    @property
    def needed(self) -> float:
        """Bytes a card must have: the tensors, the process, and room for the allocator."""
        return (self.total + self.beside + CONTEXT) * (1 + MARGIN) + self.passing * GAPS

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        return {
            "bytes": round(self.total),
            "needed_bytes": round(self.needed),
            "at": self.moment,
            "parts": {name: round(size) for name, size in self.parts.items() if size},
            "moments": {name: round(size) for name, size in self.moments.items()},
        }


def memory(work: Work, fitted: Fitted = GUESSED_MEMORY) -> Memory:
    """The components of a step's memory at its fullest moment."""
    steady = _steady(work)
    found = _vision_moments(work) if isinstance(work.shape, VisionShape) else _text_moments(work, fitted)
    moments = {name: {**steady, **parts} for name, parts in found.items()}
    if work.arrives and work.on_gpu and work.quantization == "none":
        moments["loading"] = {"weights": work.moves.total * 4.0, "data": float(work.resident)}
    for parts in moments.values():
        parts["workspace"] = parts.get("workspace", 0.0) + fitted.fixed + (RECORDER if work.recorded else 0.0)
    totals = {name: sum(parts.values()) for name, parts in moments.items()}
    fullest, in_step = (max(names, key=lambda name: totals[name]) for names in (totals, found))
    parts = moments[in_step]
    passing = totals[in_step] - sum(steady.values())
    return Memory(parts, fullest, totals, _recorded(work, passing, found) if work.recorded else 0.0, passing)


def _recorded(work: Work, passing: float, moments: dict[str, dict[str, float]]) -> float:
    """Bytes of recordings beside the one that is counted: each has memory and gradients of its own.

    Micro-batches that add to gradients are recorded apart from the first, and what is measured is not recorded.
    """
    more = work.recordings * (2 if work.accumulation > 1 else 1) - 1
    measured = sum(moments.get("measuring", {}).values())
    return passing * more + _gradients(work) * (work.recordings - 1) + measured + POOLS


def _steady(work: Work) -> dict[str, float]:
    """What is there at every moment."""
    trained, frozen = work.moves.trained, work.moves.total - work.moves.trained
    whole = float((trained + frozen) * work.kept_width)
    if work.quantization in QUANTISED and isinstance(work.shape, TextShape):
        matrices = work.shape.layers * work.shape.layer_matrices
        whole -= matrices * (work.kept_width - QUANTISED[work.quantization])
    return {
        "weights": whole / work.shards,
        "optimizer": trained * _state_bytes(work) / work.shards,
        "gradients": _gradients(work) if _gradients_stay(work) else 0.0,
        "communication": _buffers(work),
        "kept trunk": work.tokens * work.shape.width * 2.0 if work.kept_layers else 0.0,
        "data": float(work.resident),
    }


def _state_bytes(work: Work) -> float:
    """Bytes of optimizer state for a weight; beside bf16 weights stand the 16 bits they have lost."""
    if work.weights == "bf16":
        return 4 + work.mean_width + 2
    return MOMENT_BYTES[work.optimizer]


def _gradients(work: Work) -> float:
    return work.moves.trained * work.kept_width / work.shards


def _gradients_stay(work: Work) -> bool:
    """Whether gradients are there in the forward pass: under accumulation, and in DDP's buckets."""
    return work.accumulation > 1 or (work.world > 1 and work.sharding == "ddp")


def _buffers(work: Work) -> float:
    """What sharding gathers: two layers in the computed width, their fp32 gradients, and head and embeddings."""
    shape = work.shape
    if work.sharding == "ddp" or not isinstance(shape, TextShape) or (work.shards == 1 and work.world == 1):
        return 0.0
    ends = shape.embedding * (1 if work.moves.tied else 2)
    return (2 * shape.layer_parameters + ends) * work.width + shape.layer_parameters * 4.0


def _text_moments(work: Work, fitted: Fitted) -> dict[str, dict[str, float]]:
    """The moments at which a language model's step may be fullest."""
    shape, moves = work.shape, work.moves
    assert isinstance(shape, TextShape)
    low = work.width < work.stream
    copies = shape.layer_matrices * work.width if low else 0.0
    head_copy = shape.embedding * work.width if low else 0.0
    crossed = moves.crossed_layers
    one_layer = layer_activations(work, fitted, trained=moves.trained_layers > 0)
    kept, kept_copies = stream_activations(work, fitted), copies * crossed + head_copy
    grown = 0.0 if _gradients_stay(work) else 1.0
    gradients, logits = _gradients(work), work.places * shape.words
    again = max(0.0, one_layer - layer_products(work)) if work.checkpointing else 0.0
    if work.checkpointing:
        kept_copies = head_copy
    told, lost = logits * TOLD_BYTES, logits * LOSS_BYTES
    if not work.chunked_loss and work.on_gpu and work.width == 2:  # held once; then their gradient, and the head's
        told, lost = logits * 2.0, logits * 4.0 + (shape.embedding * 2.0 if moves.head else 0.0)
    if work.chunked:
        told = _chunks(work)
        lost = shape.embedding * 10.0 if moves.head else 0.0
    cached = moves.trained_layers * copies + head_copy if work.checkpointing else kept_copies
    of_embeddings = shape.embedding * work.kept_width if moves.embeddings else 0.0
    first = {"gradients": gradients - of_embeddings * (0 if moves.tied else 1) * grown / work.shards,
             "activations": one_layer, "casts": copies if crossed else head_copy}  # fmt: skip
    # the gradients of embeddings and of a head that is the same matrix meet, and their sum is a third one
    last = {"gradients": gradients, "workspace": 2.0 * of_embeddings if moves.tied else 0.0}
    top = max(moves.trained_layers and shape.layer_parameters * 4.0, moves.head and shape.embedding * 6.0)
    found = {
        "forward": {"activations": kept, "casts": cached, "logits": told},
        "loss": {"activations": kept, "casts": kept_copies, "logits": lost},
        "backward begins": {"activations": kept + again, "casts": kept_copies, "workspace": top * grown},
        "first layer": first,
        "backward ends": last,
    }  # fmt: skip
    if work.eval_rows:
        seen = work.eval_rows * work.length
        logits = told if work.chunked else seen * work.learnt * shape.words * TOLD_BYTES
        found["measuring"] = {"logits": logits, "casts": head_copy + copies,
                              "activations": seen * _transient(shape, work)}  # fmt: skip
    return found


def _chunks(work: Work) -> float:
    """Bytes where logits are told a chunk at a time: theirs, their gradient's, and those of the chunk before.

    The head's own gradient is added up in fp32 where there are several chunks, beside the part of each.
    """
    shape = work.shape
    assert isinstance(shape, TextShape)
    head = shape.embedding * work.width if work.moves.head else 0.0
    one = shape.words * work.width
    if work.places <= CHUNK:
        return work.places * one + max(work.places * one, head)
    last = CHUNK if work.places >= 2 * CHUNK else work.places - CHUNK
    return (CHUNK + 2 * last) * one + head + (shape.embedding * 4.0 if work.moves.head else 0.0)


def _transient(shape: TextShape, work: Work) -> float:
    """Bytes per token inside one layer when nothing is kept."""
    return 3.0 * shape.inner * work.width + 3.0 * shape.width * work.stream


def stream_activations(work: Work, fitted: Fitted) -> float:
    """Bytes kept between forward and backward over all layers, and around the last norm."""
    shape, moves = work.shape, work.moves
    assert isinstance(shape, TextShape)
    ends = work.tokens * shape.width * 2.0 * work.stream + work.places * shape.width * (work.stream + work.width)
    if work.checkpointing:
        return ends + moves.crossed_layers * (work.tokens * shape.width * work.stream + layer_products(work))
    frozen = moves.crossed_layers - moves.trained_layers
    return (
        ends
        + moves.trained_layers * layer_activations(work, fitted, trained=True)
        + frozen * layer_activations(work, fitted, trained=False)
    )


def layer_products(work: Work) -> float:
    """Bytes of products and attention that one layer keeps where all else in it is computed again."""
    shape = work.shape
    assert isinstance(shape, TextShape)
    if work.checkpointing != "selective":
        return 0.0
    products = sum(outputs for _, outputs in shape.linears.values())
    if not work.asks_for_last:
        products -= shape.width
    return work.tokens * (work.width * (products + shape.query_width * work.spread) + 4.0 * shape.heads)


def layer_activations(work: Work, fitted: Fitted, trained: bool) -> float:
    """Bytes that one layer keeps for its backward pass; a frozen layer keeps no inputs of its matrices."""
    shape = work.shape
    assert isinstance(shape, TextShape)
    stream, computed = work.stream, work.width
    low, lora = computed < stream, work.moves.low_rank > 0
    attention = computed * 2 * (shape.query_width + work.keys) * work.spread + 4 * shape.heads
    if work.branched:  # what attention says is brought together again
        attention += computed * shape.query_width
    if shape.traits.fused_query:
        inputs = (3 * shape.width if trained or lora else 0) * computed
        inner = (2 if trained or lora else 1) * shape.inner * computed
        bytes_per_token: float = stream * shape.width + inputs + 6 * computed * shape.width + 4 * shape.heads + inner
    else:
        wide = 4 if shape.traits.wide_norms else stream
        norms = shape.traits.norms * shape.width * (4 + (wide if trained else 0))  # normed in fp32 in any case
        if shape.traits.head_norms:
            norms += wide * (2 * shape.query_width + 4 * shape.kv_width)
        inputs = computed * shape.width * (5 if low else 2) if trained or lora else 0
        if lora:  # low-rank matrices keep the inputs of frozen ones, in copies of their own where types differ
            inputs += computed * (shape.inner + (shape.query_width if low else 0))
        inner = computed * shape.inner * ((4 if trained else 3) if shape.traits.gated else (2 if trained else 1))
        bytes_per_token = norms + inputs + attention + inner
    factor = 1.0
    if work.compiled:
        factor = fitted.compiled_lora if lora else fitted.compiled
        factor = fitted.compiled_fp8 if work.precision == "fp8" else factor
    # with the gate's own kernels only both products are kept, not what comes of them: compiled layers keep one of those
    spared = computed * shape.inner * (1 if work.compiled else 2) if work.short else 0
    return work.tokens * (bytes_per_token * factor - spared)


def _vision_moments(work: Work) -> dict[str, dict[str, float]]:
    """All is kept when the loss is known; at the end of the backward pass only what the widest layer needs."""
    shape = work.shape
    assert isinstance(shape, VisionShape)
    copies = work.moves.trained * work.width if work.width < 4 else 0.0
    image, widest = shape.channels * shape.side**2, work.rows * shape.width * shape.side**2 * work.width
    # images are made fp32, scaled and shifted, and then take the computed width; on a CPU what each place of the
    # first layers saw is laid side by side, nine times as wide, while their own activations are still kept
    at_the_end = 5.0 if work.on_gpu else 21.0
    return {
        "loss": {"activations": work.rows * (shape.kept(work.on_gpu) + image) * work.width, "casts": copies,
                 "workspace": work.rows * image * 8.0},
        "backward ends": {"gradients": _gradients(work), "casts": copies, "workspace": at_the_end * widest},
    }  # fmt: skip
