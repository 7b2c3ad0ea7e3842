"""How long a step takes: matrix products and attention by their rate, the rest by bytes, never faster than the host.

Every efficiency is a coefficient that measured runs fit; without a run on the same card those of the card that was
measured are taken, and the plan says that it is less sure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from modelwright.plan.architecture import TextShape, VisionShape
from modelwright.plan.gpus import Gpu
from modelwright.plan.work import Work

ADAM_BYTES = {"fp32": 36, "bf16": 32}
"""Bytes moved for each weight in an update: weight, moments and gradient read, all but the last written; the norm."""
COMPILED_PIECES = 0.25
"""Of the kernels of an eager layer, those that a compiled one has."""
SHORT = 1024
OVERLAP = 0.7
"""Share of the exchange of gradients that hides behind the backward pass."""


@dataclass(frozen=True)
class Pace:
    """What a machine reaches of what its data sheet says: the coefficients of the time arithmetic."""

    matrices: float = 0.68
    """Share of the rate that large bf16 and fp16 matrix products reach."""
    matrices_fp8: float = 0.55
    """Share of the fp8 rate that products with their casts reach."""
    matrices_fp32: float = 0.75
    """Share of the fp32 rate."""
    narrow: float = 200.0
    """Width of a layer at which its products reach half of that."""
    attention: float = 0.30
    """Share of the rate that attention over 1,024 tokens reaches, both ways."""
    traffic: float = 4.0
    """How often the kept activations of an eager layer pass through memory, both ways."""
    traffic_compiled: float = 2.0
    """The same for a compiled layer."""
    lora_traffic: float = 16.0
    """Bytes moved for each output of a matrix that has a low-rank one beside it, both ways."""
    loss_traffic: float = 40.0
    """Bytes moved for each logit, both ways."""
    optimizer: float = 0.8
    """Share of the memory rate that an update reaches."""
    host: float = 2.6e-3
    """Seconds the host needs to order one eager layer's work, both ways."""
    host_lora: float = 3e-3
    """The same for what low-rank matrices add to an eager layer."""
    host_compiled: float = 1.2e-3
    """The same for a compiled layer."""
    kernels: float = 4e-4
    """Seconds that the small pieces of an eager layer's work take on the device however little there is to do."""
    fixed: float = 6e-3
    """Seconds of every step besides."""
    convolution: float = 0.12
    """Share of the rate that convolutions on small images reach."""

    def as_json(self) -> dict[str, float]:
        """For the calibration file."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Pace:
        """Read what `as_json` wrote; unknown names are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: float(value) for name, value in told.items() if name in known})


GUESSED_PACE = Pace()
"""Before anything was measured."""


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go."""

    device: float
    """Seconds the device computes in a step."""
    host: float
    """Seconds the host needs to order it; where that is longer, the device waits."""
    optimizer: float
    """Seconds the weights take to move."""
    exchange: float
    """Seconds of exchanging gradients or weights that nothing hides."""
    fixed: float
    """Seconds of every step besides."""
    tokens: float
    """Tokens (or images) in a step over all devices, padding not counted."""
    flops: float
    """Operations of the step on one device."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return max(self.device, self.host) + self.optimizer + self.exchange + self.fixed

    @property
    def rate(self) -> float:
        """Tokens (or images) per second over all devices."""
        return self.tokens / self.seconds

    @property
    def bound(self) -> str:
        """What the step waits for most."""
        parts = {"the host": self.host if self.host > self.device else 0.0, "arithmetic and memory": self.device,
                 "the network": self.exchange, "the update of the weights": self.optimizer}  # fmt: skip
        return max(parts, key=lambda name: parts[name])


def step_time(
    work: Work, gpu: Gpu, pace: Pace = GUESSED_PACE, link: float | None = None, filled: float = 1.0
) -> StepTime:
    """The seconds of a step; `filled` is the share of places that hold no padding."""
    flops, device = _vision(work, gpu, pace) if isinstance(work.shape, VisionShape) else _text(work, gpu, pace)
    layers = work.shape.layers - work.kept_layers if isinstance(work.shape, TextShape) else len(work.shape.convolutions)
    host = 0.0 if work.recorded else layers * (pace.host_compiled if work.compiled else pace.host)
    if work.moves.low_rank and not work.recorded and not work.compiled:
        host += layers * pace.host_lora
    if isinstance(work.shape, VisionShape):
        host /= 4.0  # a convolution with its norm is a quarter of a decoder layer's calls
    elif work.moves.crossed_layers < layers:
        host *= (layers + 2 * work.moves.crossed_layers) / (3 * layers)
    if work.checkpointing:
        host *= 4 / 3
    moved = work.moves.trained / work.shards * ADAM_BYTES[work.weights]
    update = moved / (gpu.bandwidth * pace.optimizer)
    return StepTime(
        device=device * work.accumulation,
        host=host * work.accumulation,
        optimizer=update,
        exchange=_exchange(work, (gpu.link, link or gpu.link), device),
        fixed=pace.fixed,
        tokens=work.tokens * work.accumulation * work.world * filled,
        flops=flops * work.accumulation,
    )


def operations(work: Work) -> tuple[float, float]:
    """Matrix and attention operations of one micro-batch, forward, backward and again where checkpointed."""
    shape, moves = work.shape, work.moves
    assert isinstance(shape, TextShape)
    layer, head = 2.0 * shape.layer_matrices * work.tokens, 2.0 * shape.embedding * work.tokens * work.learnt
    crossed = moves.crossed_layers
    low_rank = 3 * 2.0 * moves.low_rank * work.tokens
    again = crossed if work.checkpointing else 0
    computed = shape.layers - work.kept_layers
    matrices = layer * (computed + crossed + moves.trained_layers + again) + low_rank
    matrices += head * (2 + (1 if moves.head else 0))
    attention = 2.0 * work.tokens * work.length * shape.query_width  # causal: half of two products
    return matrices, attention * (computed + 2.5 * crossed + again)


def _text(work: Work, gpu: Gpu, pace: Pace) -> tuple[float, float]:
    from modelwright.plan.memory import Fitted, layer_activations

    shape, moves = work.shape, work.moves
    assert isinstance(shape, TextShape)
    matrices, attention = operations(work)
    share = {"fp8": pace.matrices_fp8, "fp32": pace.matrices_fp32}.get(work.precision, pace.matrices)
    wide = gpu.rate("bf16" if work.precision == "fp8" else work.precision)
    kept = layer_activations(work, Fitted(compiled=1.0, compiled_fp8=1.0), trained=True)
    passes = pace.traffic_compiled if work.compiled else pace.traffic
    crossed = moves.crossed_layers
    computed = shape.layers - work.kept_layers
    visits = (computed + 2 * crossed + (crossed if work.checkpointing else 0)) / 3
    casts = 0.0
    if work.width < work.stream:  # every use of a weight reads it in fp32 and writes it in the computed width
        casts = (computed + crossed * (2 if work.checkpointing else 1)) * shape.layer_matrices * 6.0
        casts += moves.trained_layers * shape.layer_matrices * 8.0  # and its gradient goes the other way
    if moves.low_rank:
        outputs = sum(size for _, size in shape.linears.values()) * (COMPILED_PIECES if work.compiled else 1.0)
        casts += work.tokens * outputs * shape.layers * pace.lora_traffic
    moved = kept * passes * visits + work.tokens * work.learnt * shape.words * pace.loss_traffic + casts
    reached = 2 * work.length / (work.length + SHORT)  # longer rows fill the kernel better; 1 at 1,024 tokens
    share *= shape.width / (shape.width + pace.narrow)
    products = matrices / (gpu.rate(work.precision) * share) + attention / (wide * pace.attention * reached)
    pieces = pace.kernels * visits * (COMPILED_PIECES if work.compiled else 1.0)
    return matrices + attention, products + moved / gpu.bandwidth + pieces


def _vision(work: Work, gpu: Gpu, pace: Pace) -> tuple[float, float]:
    shape = work.shape
    assert isinstance(shape, VisionShape)
    flops = 6.0 * shape.multiplications * work.rows
    moved = work.rows * shape.outputs * work.width * 2.0 * pace.traffic
    rate = gpu.tf32 if work.precision == "fp32" else gpu.rate(work.precision)  # which torch allows in convolutions
    return flops, flops / (rate * pace.convolution) + moved / gpu.bandwidth


def _exchange(work: Work, links: tuple[float, float], backward: float) -> float:
    """Seconds of gradients (ddp) or of weights twice and gradients once (fsdp) that nothing hides.

    `links` are bytes per second inside a machine and between the slowest two cards: hsdp gathers weights over the
    first, and sends each card's share of the gradients over the second.
    """
    if work.world == 1:
        return 0.0
    inside, between = links
    if work.sharding == "ddp":
        seconds = work.moves.trained * work.kept_width * _ring(work.world) / between
    else:
        split = work.moves.total * work.width * work.accumulation + work.moves.trained * 4.0 / 2
        seconds = split * _ring(work.shards) / (between if work.shards == work.world else inside)
        copies = work.world // work.shards
        seconds += work.moves.trained * 4.0 / work.shards * _ring(copies) / between
    hidden = OVERLAP * backward * (2 / 3) * (1 if work.sharding == "ddp" else work.accumulation)
    return max(0.05 * seconds, seconds - hidden)


def _ring(ranks: int) -> float:
    """How often each byte crosses a link when so many ranks add up what they have."""
    return 2.0 * (ranks - 1) / ranks
