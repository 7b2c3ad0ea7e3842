"""How long a step takes: matrix products and attention by their rate, the rest by bytes, never faster than the host.

Every efficiency is a coefficient that measured runs fit; without a run on the same card those of the card that was
measured are taken, and the plan says that it is less sure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from modelwright.plan.architecture import GATED, TextShape, VisionShape
from modelwright.plan.gpus import Gpu
from modelwright.plan.work import CHUNK, Work

ADAM_BYTES = {"fp32": 36, "bf16": 28}
"""Bytes moved for each weight in an update: weight, moments and gradient read, all but the last written; the norm."""
COMPILED_PIECES = 0.25
"""Of the kernels of an eager layer, those that a compiled one has."""
NORM_PIECES, TURN_PIECES, OTHER_PIECES, LLAMA_PIECES = 6, 12, 7, 40
"""Operations of a norm, of turning queries and keys, of attention, sums and an activation; and of all in a Llama."""
LORA_PRODUCTS, LORA_PIECES, APART_PIECES = 2, 5, 8
"""Operations of a low-rank matrix beside a frozen one, its products alone and all; of laying answers apart."""
GATED_SHARE = 0.27
"""Of what low-rank matrices beside gate, up and down move, the share where the gate's own kernels add their products:
0.22 and 0.31 of two compiled shapes on an H200, 0.27 of an eager one."""
ROW_BYTES, LEARNT_ROW_BYTES = 4.0, 15.5
"""Bytes more for each input and output of a matrix where each of its rows has a scale in fp8, and more where it learns:
of four shapes on an H200 19.3 to 22.9 in all where it does, 4.2 where it does not."""
SHORT, NARROW_HEAD = 1024, 128
"""Tokens in a row, and numbers in a head, at which attention's rate is told."""
HEAD_BYTES, LEAVING_BYTES = 12, 14
"""Bytes moved for each number of a head that moves: with each chunk of places, and once more at the end."""
SOFT = 6
WATCHED = 1.75
"""How many times as long the host takes to order an eager layer whose every operation it watches, to keep products:
LoRA on 3 B weights took 0.44 s a step where the host needs 0.25 else, on an H200."""
OVERLAP = 0.7
"""Share of the exchange of gradients that hides behind the backward pass."""


@dataclass(frozen=True)
class Pace:
    """What a machine reaches of what its data sheet says: the coefficients of the time arithmetic."""

    matrices: float = 0.72
    """Share of the rate that large bf16 and fp16 matrix products reach."""
    matrices_fp8: float = 0.6
    """Share of the fp8 rate that products with their casts reach."""
    matrices_fp32: float = 0.75
    """Share of the fp32 rate."""
    matrices_tf32: float = 0.6
    """Share of the tf32 rate."""
    narrow: float = 200.0
    """Width of a layer at which its products reach half of that."""
    attention: float = 0.30
    """Share of the rate that attention over 1,024 tokens reaches, both ways."""
    attention_fp32: float = 0.4
    """The same in fp32 on a GPU, whose kernel leaves the tensor cores alone."""
    traffic: float = 1.2
    """How much longer the counted traffic of eager layers takes than the memory rate says."""
    traffic_compiled: float = 1.2
    """The same for compiled layers."""
    lora_traffic: float = 30.0
    """Bytes moved for each input and output of a matrix that has a low-rank one beside it, both ways."""
    lora_compiled: float = 12.0
    """The same for a compiled layer."""
    loss_traffic: float = 14.0
    """Bytes moved for each logit, both ways."""
    optimizer: float = 0.8
    """Share of the memory rate that an update reaches."""
    host: float = 2.6e-3
    """Seconds the host needs to order one eager layer's work, both ways."""
    host_lora: float = 3e-3
    """The same for what low-rank matrices add to an eager layer."""
    host_compiled: float = 2e-3
    """The same for a compiled layer."""
    kernels: float = 6e-4
    """Seconds that the small pieces of an eager layer's work take on the device however little there is to do."""
    fixed: float = 3e-3
    """Seconds of every step besides."""
    convolution: float = 0.3
    """Share of the rate that convolutions on small images reach."""
    picture_traffic: float = 12.0
    """How often what comes out of a convolution passes through memory, both ways."""

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
        """Seconds of a step; where host and device are about as fast, now one waits and now the other."""
        both: float = (self.device**SOFT + self.host**SOFT) ** (1 / SOFT)
        return both + self.optimizer + self.exchange + self.fixed

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
    host = 0.0 if work.recorded else layers * (pace.host_compiled if work.compiled else pace.host * _pieces(work))
    if work.moves.low_rank and not work.recorded:
        host += layers * pace.host_lora
    if isinstance(work.shape, VisionShape):
        host /= 4.0  # a convolution with its norm is a quarter of a decoder layer's calls
    elif work.moves.crossed_layers < layers:
        host *= (layers + 2 * work.moves.crossed_layers) / (3 * layers)
    if work.checkpointing and not work.compiled:  # which goes over a layer again inside its backward pass
        host *= WATCHED if work.checkpointing == "selective" else 4 / 3
    moved = work.moves.trained / work.shards * (ADAM_BYTES[work.weights] - 2 * (4 - work.mean_width))
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
    again = crossed if work.checkpointing is True else 0
    computed = shape.layers - work.kept_layers
    matrices = layer * (computed + crossed + moves.trained_layers) + low_rank
    matrices += 2.0 * work.tokens * again * _multiplied_again(work)
    matrices += head * (2 + (1 if moves.head else 0))
    # causal: half of two products; answers that share a prompt are laid apart, each a part of the row long
    attention = 2.0 * work.tokens * work.length * shape.query_width * work.spread**2 / (2 if work.branched else 1)
    return matrices, attention * (computed + 2.5 * crossed + again)


def _multiplied_again(work: Work) -> int:
    """Numbers in the matrices of a layer that its backward pass multiplies with once more to compute it again."""
    shape = work.shape
    assert isinstance(shape, TextShape)
    if work.checkpointing is not True:
        return 0
    return shape.layer_matrices - (0 if work.asks_for_last else shape.width * shape.inner)


def _text(work: Work, gpu: Gpu, pace: Pace) -> tuple[float, float]:
    shape, moves = work.shape, work.moves
    assert isinstance(shape, TextShape)
    matrices, attention = operations(work)
    share = {"fp8": pace.matrices_fp8, "fp32": pace.matrices_fp32}.get(work.precision, pace.matrices)
    broad = shape.width / (shape.width + pace.narrow)
    share *= broad
    wide = gpu.rate("bf16" if work.precision == "fp8" else work.precision)
    # longer rows and wider heads fill the kernel better
    reached = 2 * work.length / (work.length + SHORT) * min(1, 2 * shape.head_width / (shape.head_width + NARROW_HEAD))
    reached *= pace.attention_fp32 if work.on_gpu and work.precision == "fp32" else pace.attention
    rate = gpu.rate(work.precision) * share
    if work.tf32:
        rate = max(rate, gpu.tf32 * pace.matrices_tf32 * broad)
    products = matrices / rate + attention / (wide * reached)
    crossed, computed = moves.crossed_layers, shape.layers - work.kept_layers
    # a compiler puts small operations that are done again into the kernels of the backward pass
    again = crossed if work.checkpointing is True or (work.checkpointing and not work.compiled) else 0
    visits = (computed + again + 2 * crossed) / 3
    pieces = COMPILED_PIECES if work.compiled else _pieces(work)
    if moves.low_rank:  # two products, and around them what only a compiler spares
        pieces += len(shape.linears) * (LORA_PRODUCTS if work.compiled else LORA_PIECES) / LLAMA_PIECES
    pieces *= pace.kernels * visits
    return matrices + attention, products + _moved(work, gpu, pace) / gpu.bandwidth + pieces


def _moved(work: Work, gpu: Gpu, pace: Pace) -> float:
    """Bytes that one micro-batch moves beside its products; what the card's cache still holds is not fetched again."""
    shape, moves = work.shape, work.moves
    assert isinstance(shape, TextShape)
    crossed, computed = moves.crossed_layers, shape.layers - work.kept_layers
    again = crossed if work.checkpointing else 0
    forward, backward = layer_traffic(work)
    moved = work.tokens * (forward * (computed + again) + backward * crossed)
    size = work.tokens * shape.width * 4.0
    moved *= (pace.traffic_compiled if work.compiled else pace.traffic) * size / (size + gpu.cache)
    moved += work.places * shape.words * pace.loss_traffic
    if work.chunked and moves.head:
        moved += shape.embedding * (HEAD_BYTES * -(-work.places // CHUNK) + LEAVING_BYTES)
    if moves.embeddings:
        moved += shape.embedding * 5.0 * work.kept_width
    if work.width < work.stream:  # every use of a weight reads it in fp32 and writes it in the computed width
        moved += (computed + crossed * (2 if work.checkpointing else 1)) * shape.layer_matrices * 6.0
        moved += moves.trained_layers * shape.layer_matrices * 8.0  # and its gradient goes the other way
    # each product reads its matrix, and the one that makes a gradient writes it
    moved += (computed + crossed + moves.trained_layers) * shape.layer_matrices * work.width
    moved += again * _multiplied_again(work) * work.width
    # gradients of all micro-batches but the first are added to what is there
    moved += moves.trained * 3.0 * work.kept_width * (work.accumulation - 1) / work.accumulation
    if work.by_row:
        numbers = work.tokens * sum(map(sum, shape.linears.values()))
        moved += numbers * (ROW_BYTES * crossed + LEARNT_ROW_BYTES * moves.trained_layers)
    if moves.low_rank:
        shares = dict.fromkeys(GATED, GATED_SHARE) if work.short else {}
        beside = sum((inputs + outputs) * shares.get(name, 1.0) for name, (inputs, outputs) in shape.linears.items())
        moved += work.tokens * beside * shape.layers * (pace.lora_compiled if work.compiled else pace.lora_traffic)
    return moved


def _pieces(work: Work) -> float:
    """Operations of an eager layer, counted in those of a Llama's with bf16 weights."""
    shape = work.shape
    if not isinstance(shape, TextShape):
        return 1.0
    traits, matrices = shape.traits, len(shape.linears)
    norms = traits.norms * (1 if traits.fused_query else NORM_PIECES) + 2 * NORM_PIECES * traits.head_norms
    casts = 2 * matrices if work.width < work.stream else 0
    apart = APART_PIECES if work.branched else 0
    return (norms + casts + matrices + TURN_PIECES + OTHER_PIECES + 2 * traits.gated + apart) / LLAMA_PIECES


def layer_traffic(work: Work) -> tuple[float, float]:
    """Bytes that a layer's small operations read and write for each token, forward and backward.

    Counted operation by operation as the model's own code has them, for numbers of two bytes, norms in fp32; a
    compiled layer reads and writes once where an eager one does so in each operation.
    """
    shape = work.shape
    assert isinstance(shape, TextShape)
    half = work.width / 2
    turned, width, inner = shape.query_width + shape.kv_width, shape.width, shape.inner
    apart, back = _apart(work)
    if work.compiled:
        norms = 8.0 * shape.traits.norms * width
        forward, backward = norms + 4 * turned + 6 * inner, 1.5 * norms + 4 * turned + 12 * inner
        return half * (forward + apart), half * (backward + back)
    if shape.traits.fused_query:
        return half * (42.0 * width + 4 * inner), half * (68.0 * width + 8 * inner)
    normed = shape.traits.norms * width + (turned if shape.traits.head_norms else 0)
    casts = 30.0 * width if work.width < work.stream else 0.0
    forward = 36.0 * normed + half * (12 * width + 20 * turned + 10 * inner + apart) + casts
    backward = 80.0 * normed + half * (30 * width + 24 * turned + 18 * inner + back) + casts
    return forward, backward


def _apart(work: Work) -> tuple[float, float]:
    """Bytes of laying answers that share a prompt apart for attention, and of bringing together what it says.

    Queries, keys and values are turned and taken to their places; their gradients are fetched twice and added.
    """
    shape = work.shape
    assert isinstance(shape, TextShape)
    if not work.branched:
        return 0.0, 0.0
    asked, said = shape.query_width + 2 * shape.kv_width, shape.query_width
    return 2.0 * asked * (3 + work.spread) + 2.0 * said * (1 + work.spread), 26.0 * asked + 12.0 * said * work.spread


def _vision(work: Work, gpu: Gpu, pace: Pace) -> tuple[float, float]:
    shape = work.shape
    assert isinstance(shape, VisionShape)
    flops = 6.0 * shape.multiplications * work.rows
    moved = work.rows * shape.passed(work.on_gpu) * work.width * pace.picture_traffic
    # a convolution with its norm is an eighth of a decoder layer's kernels
    pieces = pace.kernels * len(shape.convolutions) / 8 if work.on_gpu else 0.0
    rate = gpu.tf32 if work.tf32 else gpu.rate(work.precision)
    return flops, flops / (rate * pace.convolution) + moved / gpu.bandwidth + pieces


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
