"""Predict the seconds of a step: matmuls and attention by their FLOP rate, the rest by memory traffic, bounded by host launches and communication."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from modelwright.plan.hardware import GpuSpec
from modelwright.plan.memory import LOSS_CHUNK, StepWorkload
from modelwright.plan.model_shape import MLP_LINEARS, DecoderShape, ResNetShape

ADAM_BYTES = {"fp32": 36, "bf16": 28}
"""Bytes moved for each weight in an update: weight, moments and gradient read, all but the last written; the norm."""
COMPILED_OPS = 0.25
"""Of the kernels of an eager layer, those that a compiled one has."""
NORM_OPS, ROPE_OPS, OTHER_OPS, LLAMA_OPS = 6, 12, 7, 40
"""Operations of a norm, of turning queries and keys, of attention, sums and an activation; and of all in a Llama."""
LORA_MATMULS, LORA_OPS, UNSHARE_OPS = 2, 5, 8
"""Operations of a low-rank matrix beside a frozen one, its products alone and all; of laying answers apart."""
FUSED_MLP_TRAFFIC = 0.27
"""Of what low-rank matrices beside gate, up and down move, the share where the gate's own kernels add their products:
0.22 and 0.31 of two compiled shapes on an H200, 0.27 of an eager one."""
ROWWISE_BYTES, ROWWISE_WGRAD_BYTES = 4.0, 15.5
"""Bytes more for each input and output of a matrix where each of its rows has a scale in fp8, and more where it learns:
of four shapes on an H200 19.3 to 22.9 in all where it does, 4.2 where it does not."""
ATTENTION_REF_LENGTH, ATTENTION_REF_HEAD_DIM = 1024, 128
"""Tokens in a row, and numbers in a head, at which attention's rate is told."""
HEAD_CHUNK_BYTES, HEAD_FINAL_BYTES = 12, 14
"""Bytes moved for each number of a head that moves: with each chunk of places, and once more at the end."""
SMOOTH_MAX = 6
DISPATCH_MODE_COST = 1.75
"""How many times as long the host takes to order an eager layer whose every operation it watches, to keep products:
LoRA on 3 B weights took 0.44 s a step where the host needs 0.25 else, on an H200."""
OVERLAP = 0.7
"""Share of the exchange of gradients that hides behind the backward pass."""


@dataclass(frozen=True)
class TimeCoefficients:
    """What a machine reaches of what its data sheet says: the coefficients of the time arithmetic."""

    matmul: float = 0.72
    """Share of the rate that large bf16 and fp16 matrix products reach."""
    matmul_fp8: float = 0.6
    """Share of the fp8 rate that products with their casts reach."""
    matmul_fp32: float = 0.75
    """Share of the fp32 rate."""
    matmul_tf32: float = 0.6
    """Share of the tf32 rate."""
    half_rate_width: float = 200.0
    """Width of a layer at which its products reach half of that."""
    attention: float = 0.30
    """Share of the rate that attention over 1,024 tokens reaches, both ways."""
    attention_fp32: float = 0.4
    """The same in fp32 on a GPU, whose kernel leaves the tensor cores alone."""
    eager_traffic: float = 1.2
    """How much longer the counted traffic of eager layers takes than the memory rate says."""
    compiled_traffic: float = 1.2
    """The same for compiled layers."""
    lora_traffic: float = 30.0
    """Bytes moved for each input and output of a matrix that has a low-rank one beside it, both ways."""
    lora_traffic_compiled: float = 12.0
    """The same for a compiled layer."""
    loss_traffic: float = 14.0
    """Bytes moved for each logit, both ways."""
    optimizer: float = 0.8
    """Share of the memory rate that an update reaches."""
    host_seconds: float = 2.6e-3
    """Seconds the host needs to order one eager layer's work, both ways."""
    host_seconds_lora: float = 3e-3
    """The same for what low-rank matrices add to an eager layer."""
    host_seconds_compiled: float = 2e-3
    """The same for a compiled layer."""
    kernel_seconds: float = 6e-4
    """Seconds that the small pieces of an eager layer's work take on the device however little there is to do."""
    fixed: float = 3e-3
    """Seconds of every step besides."""
    convolution: float = 0.3
    """Share of the rate that convolutions on small images reach."""
    conv_traffic: float = 12.0
    """How often what comes out of a convolution passes through memory, both ways."""

    def as_json(self) -> dict[str, float]:
        """For the calibration file."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TimeCoefficients:
        """Read what `as_json` wrote; unknown names are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: float(value) for name, value in values.items() if name in known})


DEFAULT_TIME = TimeCoefficients()
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
    communication: float
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
        both: float = (self.device**SMOOTH_MAX + self.host**SMOOTH_MAX) ** (1 / SMOOTH_MAX)
        return both + self.optimizer + self.communication + self.fixed

    @property
    def tokens_per_second(self) -> float:
        """Tokens (or images) per second over all devices."""
        return self.tokens / self.seconds

    @property
    def bottleneck(self) -> str:
        """What the step waits for most."""
        parts = {"host launch": self.host if self.host > self.device else 0.0, "compute and memory": self.device,
                 "network": self.communication, "optimizer step": self.optimizer}  # fmt: skip
        return max(parts, key=lambda name: parts[name])


def step_time(
    work: StepWorkload,
    gpu: GpuSpec,
    coefficients: TimeCoefficients = DEFAULT_TIME,
    link_bandwidth: float | None = None,
    fill_fraction: float = 1.0,
) -> StepTime:
    """The seconds of a step; `filled` is the share of places that hold no padding."""
    flops, device = (
        _resnet_seconds(work, gpu, coefficients)
        if isinstance(work.shape, ResNetShape)
        else _decoder_seconds(work, gpu, coefficients)
    )
    layers = (
        work.shape.num_hidden_layers - work.cached_layers
        if isinstance(work.shape, DecoderShape)
        else len(work.shape.convolutions)
    )
    host = (
        0.0
        if work.cuda_graphs
        else layers
        * (coefficients.host_seconds_compiled if work.compiled else coefficients.host_seconds * _op_count(work))
    )
    if work.trainable.lora_parameters and not work.cuda_graphs:
        host += layers * coefficients.host_seconds_lora
    if isinstance(work.shape, ResNetShape):
        host /= 4.0  # a convolution with its norm is a quarter of a decoder layer's calls
    elif work.trainable.backward_layers < layers:
        host *= (layers + 2 * work.trainable.backward_layers) / (3 * layers)
    if work.checkpointing and not work.compiled:  # which goes over a layer again inside its backward pass
        host *= DISPATCH_MODE_COST if work.checkpointing == "selective" else 4 / 3
    bytes_moved = (
        work.trainable.trained / work.shard_degree * (ADAM_BYTES[work.param_dtype] - 2 * (4 - work.exp_avg_bytes))
    )
    update = bytes_moved / (gpu.bandwidth * coefficients.optimizer)
    return StepTime(
        device=device * work.gradient_accumulation_steps,
        host=host * work.gradient_accumulation_steps,
        optimizer=update,
        communication=_communication_seconds(
            work, (gpu.interconnect_bandwidth, link_bandwidth or gpu.interconnect_bandwidth), device
        ),
        fixed=coefficients.fixed,
        tokens=work.tokens * work.gradient_accumulation_steps * work.world_size * fill_fraction,
        flops=flops * work.gradient_accumulation_steps,
    )


def count_flops(work: StepWorkload) -> tuple[float, float]:
    """Matrix and attention operations of one micro-batch, forward, backward and again where checkpointed."""
    shape, trainable = work.shape, work.trainable
    assert isinstance(shape, DecoderShape)
    layer, head = 2.0 * shape.layer_matrices * work.tokens, 2.0 * shape.embedding * work.tokens * work.trained_fraction
    backward_layers = trainable.backward_layers
    lora = 3 * 2.0 * trainable.lora_parameters * work.tokens
    recomputed_layers = backward_layers if work.checkpointing is True else 0
    forward_layers = shape.num_hidden_layers - work.cached_layers
    matmul = layer * (forward_layers + backward_layers + trainable.trained_layers) + lora
    matmul += 2.0 * work.tokens * recomputed_layers * _recomputed_matmul_params(work)
    matmul += head * (2 + (1 if trainable.lm_head else 0))
    # causal: half of two products; answers that share a prompt are laid apart, each a part of the row long
    attention = (
        2.0
        * work.tokens
        * work.seq_len
        * shape.query_width
        * work.attention_expansion**2
        / (2 if work.shared_prompt else 1)
    )
    return matmul, attention * (forward_layers + 2.5 * backward_layers + recomputed_layers)


def _recomputed_matmul_params(work: StepWorkload) -> int:
    """Numbers in the matrices of a layer that its backward pass multiplies with once more to compute it again."""
    shape = work.shape
    assert isinstance(shape, DecoderShape)
    if work.checkpointing is not True:
        return 0
    return shape.layer_matrices - (0 if work.recomputes_last_matmul else shape.hidden_size * shape.intermediate_size)


def _decoder_seconds(work: StepWorkload, gpu: GpuSpec, coefficients: TimeCoefficients) -> tuple[float, float]:
    shape, trainable = work.shape, work.trainable
    assert isinstance(shape, DecoderShape)
    matmul, attention = count_flops(work)
    efficiency = {"fp8": coefficients.matmul_fp8, "fp32": coefficients.matmul_fp32}.get(
        work.precision, coefficients.matmul
    )
    width_efficiency = shape.hidden_size / (shape.hidden_size + coefficients.half_rate_width)
    efficiency *= width_efficiency
    attention_rate = gpu.peak_flops("bf16" if work.precision == "fp8" else work.precision)
    # longer rows and wider heads fill the kernel better
    attention_efficiency = (
        2
        * work.seq_len
        / (work.seq_len + ATTENTION_REF_LENGTH)
        * min(1, 2 * shape.head_dim / (shape.head_dim + ATTENTION_REF_HEAD_DIM))
    )
    attention_efficiency *= (
        coefficients.attention_fp32 if work.on_gpu and work.precision == "fp32" else coefficients.attention
    )
    rate = gpu.peak_flops(work.precision) * efficiency
    if work.tf32:
        rate = max(rate, gpu.tf32 * coefficients.matmul_tf32 * width_efficiency)
    matmul_seconds = matmul / rate + attention / (attention_rate * attention_efficiency)
    backward_layers, forward_layers = trainable.backward_layers, shape.num_hidden_layers - work.cached_layers
    # a compiler puts small operations that are done again into the kernels of the backward pass
    recomputed_layers = (
        backward_layers if work.checkpointing is True or (work.checkpointing and not work.compiled) else 0
    )
    visits = (forward_layers + recomputed_layers + 2 * backward_layers) / 3
    op_seconds = COMPILED_OPS if work.compiled else _op_count(work)
    if trainable.lora_parameters:  # two products, and around them what only a compiler spares
        op_seconds += len(shape.linears) * (LORA_MATMULS if work.compiled else LORA_OPS) / LLAMA_OPS
    op_seconds *= coefficients.kernel_seconds * visits
    return matmul + attention, matmul_seconds + _bytes_moved(work, gpu, coefficients) / gpu.bandwidth + op_seconds


def _bytes_moved(work: StepWorkload, gpu: GpuSpec, coefficients: TimeCoefficients) -> float:
    """Bytes that one micro-batch moves beside its products; what the card's cache still holds is not fetched again."""
    shape, trainable = work.shape, work.trainable
    assert isinstance(shape, DecoderShape)
    backward_layers, forward_layers = trainable.backward_layers, shape.num_hidden_layers - work.cached_layers
    recomputed_layers = backward_layers if work.checkpointing else 0
    forward, backward = layer_traffic(work)
    total = work.tokens * (forward * (forward_layers + recomputed_layers) + backward * backward_layers)
    size = work.tokens * shape.hidden_size * 4.0
    total *= (
        (coefficients.compiled_traffic if work.compiled else coefficients.eager_traffic) * size / (size + gpu.l2_cache)
    )
    total += work.loss_positions * shape.vocab_size * coefficients.loss_traffic
    if work.chunked and trainable.lm_head:
        total += shape.embedding * (HEAD_CHUNK_BYTES * -(-work.loss_positions // LOSS_CHUNK) + HEAD_FINAL_BYTES)
    if trainable.embeddings:
        total += shape.embedding * 5.0 * work.param_bytes
    if (
        work.compute_bytes < work.residual_bytes
    ):  # every use of a weight reads it in fp32 and writes it in the computed width
        total += (forward_layers + backward_layers * (2 if work.checkpointing else 1)) * shape.layer_matrices * 6.0
        total += trainable.trained_layers * shape.layer_matrices * 8.0  # and its gradient goes the other way
    # each product reads its matrix, and the one that makes a gradient writes it
    total += (forward_layers + backward_layers + trainable.trained_layers) * shape.layer_matrices * work.compute_bytes
    total += recomputed_layers * _recomputed_matmul_params(work) * work.compute_bytes
    # gradients of all micro-batches but the first are added to what is there
    total += (
        trainable.trained
        * 3.0
        * work.param_bytes
        * (work.gradient_accumulation_steps - 1)
        / work.gradient_accumulation_steps
    )
    if work.rowwise_fp8:
        numbers = work.tokens * sum(map(sum, shape.linears.values()))
        total += numbers * (ROWWISE_BYTES * backward_layers + ROWWISE_WGRAD_BYTES * trainable.trained_layers)
    if trainable.lora_parameters:
        traffic_factors = dict.fromkeys(MLP_LINEARS, FUSED_MLP_TRAFFIC) if work.fused_lora_mlp else {}
        lora_width = sum(
            (inputs + outputs) * traffic_factors.get(name, 1.0) for name, (inputs, outputs) in shape.linears.items()
        )
        total += (
            work.tokens
            * lora_width
            * shape.num_hidden_layers
            * (coefficients.lora_traffic_compiled if work.compiled else coefficients.lora_traffic)
        )
    return total


def _op_count(work: StepWorkload) -> float:
    """Operations of an eager layer, counted in those of a Llama's with bf16 weights."""
    shape = work.shape
    if not isinstance(shape, DecoderShape):
        return 1.0
    traits, matrices = shape.traits, len(shape.linears)
    norms = traits.norms_per_layer * (1 if traits.fused_qkv else NORM_OPS) + 2 * NORM_OPS * traits.qk_norm
    casts = 2 * matrices if work.compute_bytes < work.residual_bytes else 0
    unshare = UNSHARE_OPS if work.shared_prompt else 0
    return (norms + casts + matrices + ROPE_OPS + OTHER_OPS + 2 * traits.gated_mlp + unshare) / LLAMA_OPS


def layer_traffic(work: StepWorkload) -> tuple[float, float]:
    """Bytes that a layer's small operations read and write for each token, forward and backward.

    Counted operation by operation as the model's own code has them, for numbers of two bytes, norms in fp32; a
    compiled layer reads and writes once where an eager one does so in each operation.
    """
    shape = work.shape
    assert isinstance(shape, DecoderShape)
    half = work.compute_bytes / 2
    rotated_width, width, inner = shape.query_width + shape.kv_width, shape.hidden_size, shape.intermediate_size
    unshare_forward, unshare_backward = _unshare_traffic(work)
    if work.compiled:
        norms = 8.0 * shape.traits.norms_per_layer * width
        forward, backward = norms + 4 * rotated_width + 6 * inner, 1.5 * norms + 4 * rotated_width + 12 * inner
        return half * (forward + unshare_forward), half * (backward + unshare_backward)
    if shape.traits.fused_qkv:
        return half * (42.0 * width + 4 * inner), half * (68.0 * width + 8 * inner)
    normed = shape.traits.norms_per_layer * width + (rotated_width if shape.traits.qk_norm else 0)
    casts = 30.0 * width if work.compute_bytes < work.residual_bytes else 0.0
    forward = 36.0 * normed + half * (12 * width + 20 * rotated_width + 10 * inner + unshare_forward) + casts
    backward = 80.0 * normed + half * (30 * width + 24 * rotated_width + 18 * inner + unshare_backward) + casts
    return forward, backward


def _unshare_traffic(work: StepWorkload) -> tuple[float, float]:
    """Bytes of laying answers that share a prompt apart for attention, and of bringing together what it says.

    Queries, keys and values are turned and taken to their places; their gradients are fetched twice and added.
    """
    shape = work.shape
    assert isinstance(shape, DecoderShape)
    if not work.shared_prompt:
        return 0.0, 0.0
    qkv_width, out_width = shape.query_width + 2 * shape.kv_width, shape.query_width
    return 2.0 * qkv_width * (3 + work.attention_expansion) + 2.0 * out_width * (
        1 + work.attention_expansion
    ), 26.0 * qkv_width + 12.0 * out_width * work.attention_expansion


def _resnet_seconds(work: StepWorkload, gpu: GpuSpec, coefficients: TimeCoefficients) -> tuple[float, float]:
    shape = work.shape
    assert isinstance(shape, ResNetShape)
    flops = 6.0 * shape.multiplications * work.micro_batch_size
    bytes_moved = (
        work.micro_batch_size * shape.activation_traffic(work.on_gpu) * work.compute_bytes * coefficients.conv_traffic
    )
    # a convolution with its norm is an eighth of a decoder layer's kernels
    op_seconds = coefficients.kernel_seconds * len(shape.convolutions) / 8 if work.on_gpu else 0.0
    rate = gpu.tf32 if work.tf32 else gpu.peak_flops(work.precision)
    return flops, flops / (rate * coefficients.convolution) + bytes_moved / gpu.bandwidth + op_seconds


def _communication_seconds(work: StepWorkload, bandwidths: tuple[float, float], backward_seconds: float) -> float:
    """Seconds of gradients (ddp) or of weights twice and gradients once (fsdp) that nothing hides.

    `links` are bytes per second inside a machine and between the slowest two cards: hsdp gathers weights over the
    first, and sends each card's share of the gradients over the second.
    """
    if work.world_size == 1:
        return 0.0
    inside, between = bandwidths
    if work.sharding == "ddp":
        seconds = work.trainable.trained * work.param_bytes * _ring_factor(work.world_size) / between
    else:
        split = (
            work.trainable.total * work.compute_bytes * work.gradient_accumulation_steps
            + work.trainable.trained * 4.0 / 2
        )
        seconds = (
            split * _ring_factor(work.shard_degree) / (between if work.shard_degree == work.world_size else inside)
        )
        replicas = work.world_size // work.shard_degree
        seconds += work.trainable.trained * 4.0 / work.shard_degree * _ring_factor(replicas) / between
    hidden = OVERLAP * backward_seconds * (2 / 3) * (1 if work.sharding == "ddp" else work.gradient_accumulation_steps)
    return max(0.05 * seconds, seconds - hidden)


def _ring_factor(ranks: int) -> float:
    """How often each byte crosses a link when so many ranks add up what they have."""
    return 2.0 * (ranks - 1) / ranks
