"""Predict the seconds of a step from FLOPs, memory traffic, host launches and communication."""

from __future__ import annotations

from dataclasses import dataclass

from modelwright.plan.hardware import GpuSpec
from modelwright.plan.memory import LOSS_CHUNK, StepWorkload
from modelwright.plan.model_shape import DecoderShape, ResNetShape
from modelwright.recipe.sections import MLP_LINEARS

COMPILED_OPS = 0.25
"""Kernels of a compiled layer, as a fraction of an eager one's."""
NORM_OPS, ROPE_OPS, OTHER_OPS, LLAMA_OPS = 6, 12, 7, 40
"""Operations of a norm, of RoPE, of the rest (attention, residuals, activation), and of a whole Llama layer."""
LORA_MATMULS, LORA_OPS, UNSHARE_OPS = 2, 5, 8
"""Operations of LoRA on a linear, matmuls alone and all; and of unsharing a prefix for attention."""
FUSED_MLP_TRAFFIC = 0.27
"""Memory traffic of the fused LoRA MLP, as a fraction of the unfused one's: 0.22 and 0.31 for two compiled shapes on an
H200, 0.27 for an eager one."""
ROWWISE_BYTES, ROWWISE_WGRAD_BYTES = 4.0, 15.5
"""Extra bytes per in and out feature of a linear with rowwise fp8, and more if it is trained: on an H200 19.3 to 22.9
in total for four trained shapes, 4.2 for a frozen one."""
QK_NORM_TRAFFIC = 3.2
"""Traffic of the norms of queries and keys, relative to a norm of as many numbers: their views are strided, and each
head has its own mean. With 1 the plan said 0.097 s for an eager step of Qwen3-0.6B that took 0.130 (H200, 2026-11-18).
"""
ATTENTION_REF_LENGTH, ATTENTION_REF_HEAD_DIM = 1024, 128
"""Row length and head width at which the attention efficiency holds."""
HEAD_CHUNK_BYTES, HEAD_FINAL_BYTES = 12, 14
"""Bytes moved per weight of a trained LM head: for each loss chunk, and at the end."""
SMOOTH_MAX = 6
"""Exponent of the smooth maximum of device and host time."""
DISPATCH_MODE_COST = 1.75
"""Factor on the host time of an eager layer under the dispatch mode of selective checkpointing: with LoRA on 3 B
weights a step took 0.44 s instead of 0.25 on an H200."""
OVERLAP = 0.7
"""Fraction of the backward pass that can hide communication."""


@dataclass(frozen=True)
class TimeCoefficients:
    """Coefficients of the time estimate: efficiencies relative to the data sheet, fitted to measured runs."""

    matmul: float = 0.72
    """Fraction of the peak rate that large bf16 and fp16 matmuls reach."""
    matmul_fp8: float = 0.6
    """Fraction of the fp8 rate that matmuls with their casts reach."""
    matmul_fp32: float = 0.75
    """Fraction of the fp32 rate."""
    matmul_tf32: float = 0.6
    """Fraction of the tf32 rate."""
    half_rate_width: float = 200.0
    """Hidden size at which matmuls reach half of that."""
    attention: float = 0.30
    """Fraction of the peak rate of attention over 1,024 tokens, forward and backward."""
    attention_fp32: float = 0.4
    """The same in fp32 on a GPU, without tensor cores."""
    eager_traffic: float = 1.2
    """Time of the memory traffic of eager layers, relative to the bandwidth."""
    compiled_traffic: float = 1.2
    """The same for compiled layers."""
    lora_traffic: float = 30.0
    """Bytes moved per in and out feature of a linear with LoRA, forward and backward."""
    lora_traffic_compiled: float = 12.0
    """The same for a compiled layer."""
    loss_traffic: float = 14.0
    """Bytes moved per logit, forward and backward."""
    optimizer: float = 0.8
    """Fraction of the bandwidth that an optimizer step reaches."""
    host_seconds: float = 2.6e-3
    """Host seconds to launch one eager layer, forward and backward."""
    host_seconds_lora: float = 3e-3
    """The same for LoRA in an eager layer."""
    host_seconds_compiled: float = 2e-3
    """The same for a compiled layer."""
    kernel_seconds: float = 6e-4
    """Device seconds of the kernels of an eager layer at any size."""
    fixed: float = 3e-3
    """Other seconds per step."""
    convolution: float = 0.3
    """Fraction of the peak rate of convolutions on small images."""
    conv_traffic: float = 12.0
    """Memory passes over a convolution's output, forward and backward."""


DEFAULT_TIME = TimeCoefficients()
"""Used where nothing was measured."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by cause."""

    device: float
    """Device seconds of forward and backward."""
    host: float
    """Host seconds to launch it; if they are longer, the device waits."""
    optimizer: float
    """Seconds of the optimizer step."""
    communication: float
    """Seconds of communication that is not overlapped."""
    fixed: float
    """Other seconds per step."""
    tokens: float
    """Tokens (or images) per step over all devices, without padding."""
    flops: float
    """FLOPs of the step on one device."""

    @property
    def seconds(self) -> float:
        """Seconds of a step: a smooth maximum of host and device, and the rest."""
        both: float = (self.device**SMOOTH_MAX + self.host**SMOOTH_MAX) ** (1 / SMOOTH_MAX)
        return both + self.optimizer + self.communication + self.fixed

    @property
    def tokens_per_second(self) -> float:
        """Tokens (or images) per second over all devices."""
        return self.tokens / self.seconds

    @property
    def bottleneck(self) -> str:
        """The largest part of the step."""
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
    """Predict the seconds of a step; `fill_fraction` is the fraction of positions without padding."""
    is_resnet, accumulation = isinstance(work.shape, ResNetShape), work.gradient_accumulation_steps
    flops, device = (_resnet_seconds if is_resnet else _decoder_seconds)(work, gpu, coefficients)
    optimizer_traffic = work.trainable.trained / work.shard_degree * work.optimizer.optimizer_bytes(work.param_dtype)[1]
    bandwidths = gpu.interconnect_bandwidth, link_bandwidth or gpu.interconnect_bandwidth
    return StepTime(
        device=device * accumulation,
        host=0.0 if work.cuda_graphs else _host_seconds(work, coefficients) * accumulation,
        optimizer=optimizer_traffic / (gpu.bandwidth * coefficients.optimizer),
        communication=_communication_seconds(work, bandwidths, device),
        fixed=coefficients.fixed,
        tokens=work.tokens * accumulation * work.world_size * fill_fraction,
        flops=flops * accumulation,
    )


def _host_seconds(work: StepWorkload, coefficients: TimeCoefficients) -> float:
    """Seconds the host takes to launch the kernels of a micro-batch without CUDA graphs."""
    shape, backward_layers = work.shape, work.trainable.backward_layers
    is_resnet = isinstance(shape, ResNetShape)
    layers = len(shape.convolutions) if isinstance(shape, ResNetShape) else shape.num_hidden_layers - work.cached_layers
    eager = coefficients.host_seconds * _op_count(work)
    host = layers * (coefficients.host_seconds_compiled if work.compiled else eager)
    if work.trainable.lora_parameters:
        host += layers * coefficients.host_seconds_lora
    if is_resnet:
        host /= 4.0  # a convolution with its norm has a quarter of the launches of a decoder layer
    elif backward_layers < layers:
        host *= (layers + 2 * backward_layers) / (3 * layers)
    if work.checkpointing and not work.compiled:  # the backward pass launches the forward again
        host *= DISPATCH_MODE_COST if work.checkpointing == "selective" else 4 / 3
    return host


def count_flops(work: StepWorkload) -> tuple[float, float]:
    """Matmul and attention FLOPs of one micro-batch: forward, backward and recomputation."""
    shape, trainable = work.decoder, work.trainable
    layer, head = 2.0 * shape.active_matrices * work.tokens, 2.0 * shape.embedding * work.tokens * work.trained_fraction
    backward_layers = trainable.backward_layers
    lora = 3 * 2.0 * trainable.lora_parameters * work.tokens
    recomputed_layers = backward_layers if work.checkpointing is True else 0
    forward_layers = shape.num_hidden_layers - work.cached_layers
    matmul = layer * (forward_layers + backward_layers + trainable.trained_layers) + lora
    matmul += 2.0 * work.tokens * recomputed_layers * _recomputed_matmul_params(work)
    matmul += head * (2 + (1 if trainable.lm_head else 0))
    # causal: half of two matmuls; with an unshared prompt each answer is a part of the row
    attention = 2.0 * work.tokens * work.seq_len * shape.query_width * work.attention_expansion**2
    attention /= 2 if work.shared_prompt else 1
    return matmul, attention * (forward_layers + 2.5 * backward_layers + recomputed_layers)


def _recomputed_matmul_params(work: StepWorkload) -> int:
    """Parameters of the linears of a layer whose matmuls full checkpointing recomputes."""
    shape = work.decoder
    if work.checkpointing is not True:
        return 0
    return shape.active_matrices - (0 if work.recomputes_last_matmul else shape.hidden_size * shape.intermediate_size)


def _decoder_seconds(work: StepWorkload, gpu: GpuSpec, coefficients: TimeCoefficients) -> tuple[float, float]:
    """FLOPs and device seconds of one micro-batch of a language model."""
    shape, trainable, is_fp32 = work.decoder, work.trainable, work.precision == "fp32"
    matmul, attention = count_flops(work)
    efficiencies = {"fp8": coefficients.matmul_fp8, "fp32": coefficients.matmul_fp32}
    width_efficiency = shape.hidden_size / (shape.hidden_size + coefficients.half_rate_width)
    rate = gpu.peak_flops(work.precision) * efficiencies.get(work.precision, coefficients.matmul) * width_efficiency
    attention_rate = gpu.peak_flops("bf16" if work.precision == "fp8" else work.precision)
    # attention kernels are more efficient with longer rows and wider heads
    attention_efficiency = 2 * work.seq_len / (work.seq_len + ATTENTION_REF_LENGTH)
    attention_efficiency *= min(1, 2 * shape.head_dim / (shape.head_dim + ATTENTION_REF_HEAD_DIM))
    attention_efficiency *= coefficients.attention_fp32 if work.on_gpu and is_fp32 else coefficients.attention
    if work.tf32:
        rate = max(rate, gpu.tf32 * coefficients.matmul_tf32 * width_efficiency)
    matmul_seconds = matmul / rate + attention / (attention_rate * attention_efficiency)
    backward_layers, forward_layers = trainable.backward_layers, shape.num_hidden_layers - work.cached_layers
    # torch.compile fuses the small operations that selective checkpointing recomputes into the backward kernels
    recomputes = work.checkpointing is True or (work.checkpointing and not work.compiled)
    recomputed_layers = backward_layers if recomputes else 0
    visits = (forward_layers + recomputed_layers + 2 * backward_layers) / 3
    op_seconds = COMPILED_OPS if work.compiled else _op_count(work)
    if trainable.lora_parameters:
        op_seconds += len(shape.linears) * (LORA_MATMULS if work.compiled else LORA_OPS) / LLAMA_OPS
    op_seconds *= coefficients.kernel_seconds * visits
    return matmul + attention, matmul_seconds + _bytes_moved(work, gpu, coefficients) / gpu.bandwidth + op_seconds


def _bytes_moved(work: StepWorkload, gpu: GpuSpec, coefficients: TimeCoefficients) -> float:
    """Memory traffic of one micro-batch; what is still in the L2 cache is not read again."""
    shape, trainable = work.decoder, work.trainable
    backward_layers, forward_layers = trainable.backward_layers, shape.num_hidden_layers - work.cached_layers
    recomputed_layers = backward_layers if work.checkpointing else 0
    forward, backward = layer_traffic(work)
    total = work.tokens * (forward * (forward_layers + recomputed_layers) + backward * backward_layers)
    size = work.tokens * shape.hidden_size * 4.0
    factor = coefficients.compiled_traffic if work.compiled else coefficients.eager_traffic
    total *= factor * size / (size + gpu.l2_cache)
    total += work.loss_positions * shape.vocab_size * coefficients.loss_traffic
    if work.chunked and trainable.lm_head:
        total += shape.embedding * (HEAD_CHUNK_BYTES * -(-work.loss_positions // LOSS_CHUNK) + HEAD_FINAL_BYTES)
    if trainable.embeddings:
        total += shape.embedding * 5.0 * work.param_bytes
    if work.compute_bytes < work.residual_bytes:  # autocast reads each weight in fp32 and writes it in 16 bits
        total += (forward_layers + backward_layers * (2 if work.checkpointing else 1)) * shape.layer_matrices * 6.0
        total += trainable.trained_layers * shape.layer_matrices * 8.0  # and casts its gradient back
    # each matmul reads its weight, and that of the weight gradient writes it
    total += (forward_layers + backward_layers + trainable.trained_layers) * shape.layer_matrices * work.compute_bytes
    total += recomputed_layers * _recomputed_matmul_params(work) * work.compute_bytes
    # all micro-batches but the first accumulate into existing gradients
    accumulated = (work.gradient_accumulation_steps - 1) / work.gradient_accumulation_steps
    total += trainable.trained * 3.0 * work.param_bytes * accumulated
    if work.rowwise_fp8:
        numbers = work.tokens * sum(map(sum, shape.linears.values()))
        total += numbers * (ROWWISE_BYTES * backward_layers + ROWWISE_WGRAD_BYTES * trainable.trained_layers)
    if trainable.lora_parameters:
        traffic_factors = dict.fromkeys(MLP_LINEARS, FUSED_MLP_TRAFFIC) if work.fused_lora_mlp else {}
        lora_width = sum(sum(size) * traffic_factors.get(name, 1.0) for name, size in shape.linears.items())
        lora_traffic = coefficients.lora_traffic_compiled if work.compiled else coefficients.lora_traffic
        total += work.tokens * lora_width * shape.num_hidden_layers * lora_traffic
    return total


def _op_count(work: StepWorkload) -> float:
    """Operations of an eager layer relative to a Llama layer with bf16 weights."""
    shape = work.shape
    if not isinstance(shape, DecoderShape):
        return 1.0
    traits, matrices = shape.traits, len(shape.linears)
    norms = traits.norms_per_layer * (1 if traits.fused_qkv else NORM_OPS) + 2 * NORM_OPS * traits.qk_norm
    casts = 2 * matrices if work.compute_bytes < work.residual_bytes else 0
    unshare = UNSHARE_OPS if work.shared_prompt else 0
    return (norms + casts + matrices + ROPE_OPS + OTHER_OPS + 2 * traits.gated_mlp + unshare) / LLAMA_OPS


def layer_traffic(work: StepWorkload) -> tuple[float, float]:
    """Bytes per token that the elementwise operations of a layer read and write, forward and backward.

    Counted per operation of the transformers code, in 16 bits with norms in fp32; a compiled layer reads and writes
    once where an eager one does in each operation.
    """
    shape = work.decoder
    half = work.compute_bytes / 2
    rotated_width, width, inner = shape.query_width + shape.kv_width, shape.hidden_size, shape.intermediate_size
    unshare_forward, unshare_backward = _unshare_traffic(work)
    if work.compiled:
        norms = 8.0 * shape.traits.norms_per_layer * width
        forward, backward = norms + 4 * rotated_width + 6 * inner, 1.5 * norms + 4 * rotated_width + 12 * inner
        return half * (forward + unshare_forward), half * (backward + unshare_backward)
    if shape.traits.fused_qkv:
        return half * (42.0 * width + 4 * inner), half * (68.0 * width + 8 * inner)
    normed = shape.traits.norms_per_layer * width + QK_NORM_TRAFFIC * rotated_width * shape.traits.qk_norm
    casts = 30.0 * width if work.compute_bytes < work.residual_bytes else 0.0
    forward = 36.0 * normed + half * (12 * width + 20 * rotated_width + 10 * inner + unshare_forward) + casts
    backward = 80.0 * normed + half * (30 * width + 24 * rotated_width + 18 * inner + unshare_backward) + casts
    return forward, backward


def _unshare_traffic(work: StepWorkload) -> tuple[float, float]:
    """Bytes per token to copy a shared prompt before each answer for attention, and to gather its outputs again.

    Queries, keys and values are transposed and gathered; their gradients are gathered twice and added.
    """
    if not work.shared_prompt:
        return 0.0, 0.0
    out_width, expansion = work.decoder.query_width, work.attention_expansion
    qkv_width = out_width + 2 * work.decoder.kv_width
    forward = 2.0 * qkv_width * (3 + expansion) + 2.0 * out_width * (1 + expansion)
    return forward, 26.0 * qkv_width + 12.0 * out_width * expansion


def _resnet_seconds(work: StepWorkload, gpu: GpuSpec, coefficients: TimeCoefficients) -> tuple[float, float]:
    """FLOPs and device seconds of one micro-batch of images."""
    shape = work.shape
    assert isinstance(shape, ResNetShape)
    flops = 6.0 * shape.multiplications * work.micro_batch_size
    bytes_moved = work.micro_batch_size * shape.activation_traffic(work.on_gpu) * work.compute_bytes
    bytes_moved *= coefficients.conv_traffic
    # a convolution with its norm has an eighth of the kernels of a decoder layer
    op_seconds = coefficients.kernel_seconds * len(shape.convolutions) / 8 if work.on_gpu else 0.0
    rate = gpu.tf32 if work.tf32 else gpu.peak_flops(work.precision)
    return flops, flops / (rate * coefficients.convolution) + bytes_moved / gpu.bandwidth + op_seconds


def _communication_seconds(work: StepWorkload, bandwidths: tuple[float, float], backward_seconds: float) -> float:
    """Seconds that are not overlapped: all-reduced gradients (ddp), or weights twice and gradients once (fsdp).

    `bandwidths` are those within a node and of the slowest link: hsdp gathers weights over the first, and all-reduces
    gradient shards over the second.
    """
    if work.world_size == 1:
        return 0.0
    inside, between = bandwidths
    trained, degree, accumulation = work.trainable.trained, work.shard_degree, work.gradient_accumulation_steps
    if work.sharding == "ddp":
        seconds = trained * work.param_bytes * _ring_factor(work.world_size) / between
    else:
        gathered = work.trainable.total * work.compute_bytes * accumulation + trained * 4.0 / 2
        seconds = gathered * _ring_factor(degree) / (between if degree == work.world_size else inside)
        seconds += trained * 4.0 / degree * _ring_factor(work.world_size // degree) / between
    hidden = OVERLAP * backward_seconds * (2 / 3) * (1 if work.sharding == "ddp" else accumulation)
    return max(0.05 * seconds, seconds - hidden)


def _ring_factor(ranks: int) -> float:
    """How often each byte crosses a link in a ring all-reduce."""
    return 2.0 * (ranks - 1) / ranks
