"""The workload of one device in a step, and the memory that step takes by component and phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelwright.plan.model_shape import DecoderShape, ModelShape, ResNetShape, TrainableSummary
from modelwright.recipe.stage_specs import CheckpointingMode, OptimizerConfig

AUTO_GRAPHS_MAX_PARAMS, MAX_GRAPH_SHAPES = 4_000_000_000, 12
"""Trained parameters below which CUDA graphs are used, and graphs for rows of different shapes, as in the engine.

A 3 B model with 700 tokens a micro-batch takes 0.10 instead of 0.65 s a step, LoRA of 8 B with 3,500 tokens 0.198
instead of 0.231 (H200, 2026-11-18).
"""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes per number in a compute precision; outputs of fp8 matmuls are bf16."""
LOSS_CHUNK = 4096
"""Positions per chunk of the chunked loss, whose logits are in memory at the same time."""


@dataclass(frozen=True)
class StepWorkload:
    """The step of a stage on one device: input of the memory and time estimates."""

    shape: ModelShape
    """The model."""
    trainable: TrainableSummary
    """Which of its weights are trained."""
    micro_batch_size: int
    """Rows (or images) per forward pass."""
    seq_len: int = 1
    """Tokens in a row, with padding; of rows of many lengths the mean over a micro-batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in a step."""
    trained_fraction: float = 1.0
    """Fraction of positions in the loss, where the LM head runs."""
    eval_seq_len: int = 0
    """Tokens in the longest row of an evaluation; 0: seq_len."""
    eval_micro_batch_size: int = 0
    """Rows per forward pass in evaluation."""
    precision: str = "bf16"
    """Compute precision."""
    tf32: bool = False
    """Whether fp32 matmuls use tf32."""
    rowwise_fp8: bool = False
    """Whether fp8 scales are rowwise instead of tensorwise."""
    param_dtype: str = "fp32"
    """Dtype of the weights."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Settings of the optimizer."""
    checkpointing: CheckpointingMode = False
    """Activation checkpointing: none, selective (matmuls and attention are kept) or full."""
    compiled: bool = False
    """Whether layers run under torch.compile."""
    chunked_loss: bool = True
    """Whether the task can compute the loss in chunks, without all logits in memory."""
    cached_layers: int = 0
    """Frozen layers whose outputs are cached, so that no step computes them."""
    masked: bool = False
    """Whether attention uses a mask: pairs with a shared prompt without varlen attention."""
    shared_prompt: bool = False
    """Whether pairs share their prompt without a mask: for attention the prompt is copied before each answer."""
    on_gpu: bool = True
    """Whether the device is a GPU."""
    cuda_graphs: bool = False
    """Whether steps are replayed as CUDA graphs, without host launches."""
    graph_shapes: int = 1
    """Graphs for micro-batches of different shapes, which share their memory."""
    quantization: str = "none"
    """Storage of the frozen linears: nf4, int8 or none."""
    sharding: str = "ddp"
    """ddp (a copy per device), fsdp (sharded over all) or hsdp (sharded within each node)."""
    world_size: int = 1
    """Number of devices."""
    per_node: int = 1
    """Devices per node."""
    device_data_bytes: int = 0
    """Bytes of data kept on the device, such as an image data set."""
    counts_loading: bool = True
    """Whether the full fp32 weights on the device during loading are a phase of the estimate."""

    @property
    def decoder(self) -> DecoderShape:
        """The model, which must be a language model."""
        assert isinstance(self.shape, DecoderShape)
        return self.shape

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def loss_positions(self) -> float:
        """Positions in the loss, where the LM head runs."""
        return self.tokens * self.trained_fraction

    @property
    def chunked(self) -> bool:
        """Whether the loss is computed in chunks: with many positions."""
        min_positions = LOSS_CHUNK // 4 if self.on_gpu else LOSS_CHUNK
        return self.chunked_loss and self.loss_positions > min_positions

    @property
    def kv_width(self) -> int:
        """Width of the keys that attention gets per token; in fp32 on a GPU the kernel wants as many as queries."""
        repeats_kv = self.masked or (self.on_gpu and self.precision == "fp32")
        return self.decoder.query_width if repeats_kv else self.decoder.kv_width

    @property
    def attention_expansion(self) -> float:
        """Tokens in attention per token of the row: a shared prompt is copied before each of two answers."""
        return 2.0 - self.trained_fraction if self.shared_prompt else 1.0

    @property
    def compute_bytes(self) -> int:
        """Bytes per computed value."""
        return DTYPE_BYTES[self.precision]

    @property
    def param_bytes(self) -> int:
        """Bytes per weight."""
        return DTYPE_BYTES[self.param_dtype]

    @property
    def residual_bytes(self) -> int:
        """Bytes per value of the residual stream, which has the dtype of the weights a layer gets."""
        return self.param_bytes if self.sharding == "ddp" else min(self.compute_bytes, self.param_bytes)

    @property
    def fused_lora_mlp(self) -> bool:
        """Whether the fused LoRA MLP runs, which needs bf16 everywhere."""
        is_bf16 = self.precision == "bf16" and self.residual_bytes == 2 and self.quantization == "none"
        return self.trainable.fused_lora_mlp and self.on_gpu and is_bf16

    @property
    def recomputes_last_matmul(self) -> bool:
        """Whether recomputing a layer includes its last matmul: a norm follows it, or LoRA in an eager layer."""
        return self.decoder.traits.norms_per_layer > 2 or (self.trainable.lora_parameters > 0 and not self.compiled)

    @property
    def shard_degree(self) -> int:
        """Devices over which a weight is sharded."""
        return {"fsdp": self.world_size, "hsdp": self.per_node}.get(self.sharding, 1)


LOGIT_BYTES_BACKWARD, LOGIT_BYTES_FORWARD = 12, 10
"""Peak bytes per logit: three fp32 copies in backward; bf16 and two fp32 copies in forward."""
QUANTIZED_BYTES = {"nf4": 0.52, "int8": 1.01}
"""Bytes per quantized value, with the scales of its block."""
CUDA_CONTEXT = 0.6e9
"""Bytes of a CUDA process before the first tensor: context and library workspaces."""
CAPTURE_WORKSPACE = 0.05e9
"""Bytes of workspaces of a captured step, which has its own stream."""
RESERVE, FRAGMENTATION = 0.03, 0.10
"""Fraction of the required memory that stays free, and of the transient memory that fragmentation takes.

A step of 4 B weights with an estimated peak of 142 GB, 89 of them transient, ran out of 149.6 GB: at least 9 % of the
transient memory was not in the estimate. The allocator holds 5 to 10 % more than 20 GB or more of transient memory.
"""
GRAPH_POOL = 1e9
"""Bytes cached by the allocator that CUDA graphs cannot use: 1.1 GB for steps of 1 to 3 GB."""


@dataclass(frozen=True)
class MemoryCoefficients:
    """Factors of the memory estimate that are fitted to measured runs."""

    compiled: float = 0.64
    """Activations saved by a compiled layer, as a fraction of an eager one's."""
    compiled_fp8: float = 0.44
    """The same in fp8."""
    compiled_lora: float = 0.8
    """The same with LoRA."""
    fixed: float = 0.1e9
    """Bytes that nothing else covers: matmul workspaces, small tensors."""


DEFAULT_MEMORY = MemoryCoefficients()
"""Used where nothing was measured."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of one device."""

    components: dict[str, float]
    """Bytes by component at the peak of a step."""
    peak_phase: str
    """The phase with the most memory, of a step or of loading."""
    phases: dict[str, float]
    """Total bytes of each phase."""
    graph_bytes: float = 0.0
    """Bytes of CUDA graphs: for other row shapes, and for evaluation outside of them."""
    transient_bytes: float = 0.0
    """Bytes that are allocated and freed within a step."""

    @property
    def total(self) -> float:
        """Bytes of tensors at the peak."""
        return self.phases[self.peak_phase]

    @property
    def required(self) -> float:
        """Bytes the GPU must have: tensors, CUDA context and a reserve for the allocator."""
        return (self.total + self.graph_bytes + CUDA_CONTEXT) * (1 + RESERVE) + self.transient_bytes * FRAGMENTATION

    def as_json(self) -> dict[str, Any]:
        """Part of plan.json."""
        return {
            "bytes": round(self.total),
            "required_bytes": round(self.required),
            "peak_phase": self.peak_phase,
            "components": {name: round(size) for name, size in self.components.items() if size},
            "phases": {name: round(size) for name, size in self.phases.items()},
        }


def estimate_memory(work: StepWorkload, coefficients: MemoryCoefficients = DEFAULT_MEMORY) -> MemoryEstimate:
    """Estimate the peak memory of a step by component and phase."""
    persistent = _persistent_bytes(work)
    step_phases = _resnet_phases(work) if isinstance(work.shape, ResNetShape) else _decoder_phases(work, coefficients)
    phases = {name: {**persistent, **components} for name, components in step_phases.items()}
    if work.counts_loading and work.on_gpu and work.quantization == "none":
        phases["loading"] = {"weights": work.trainable.total * 4.0, "data": float(work.device_data_bytes)}
        if work.param_dtype == "bf16" and isinstance(work.shape, DecoderShape):  # one tensor after the other is split
            phases["loading"]["workspace"] = work.shape.embedding * (8.0 if work.trainable.lm_head else 2.0)
    fixed = coefficients.fixed + (CAPTURE_WORKSPACE if work.cuda_graphs else 0.0)
    for components in phases.values():
        components["workspace"] = components.get("workspace", 0.0) + fixed
    totals = {name: sum(components.values()) for name, components in phases.items()}
    peak_phase, peak_step_phase = (max(names, key=lambda name: totals[name]) for names in (totals, step_phases))
    transient_bytes = totals[peak_step_phase] - sum(persistent.values())
    graph_bytes = _graph_bytes(work, transient_bytes, step_phases) if work.cuda_graphs else 0.0
    return MemoryEstimate(phases[peak_step_phase], peak_phase, totals, graph_bytes, transient_bytes)


def _graph_bytes(work: StepWorkload, transient_bytes: float, phases: dict[str, dict[str, float]]) -> float:
    """Bytes beside the memory that all CUDA graphs share: evaluation and rare shapes run outside of graphs."""
    evaluation = sum(phases.get("evaluation", {}).values())
    return max(evaluation, transient_bytes if work.graph_shapes > 1 else 0.0) + GRAPH_POOL


def _persistent_bytes(work: StepWorkload) -> dict[str, float]:
    """Bytes of what is allocated in all phases."""
    trained, frozen = work.trainable.trained, work.trainable.total - work.trainable.trained
    weight_bytes = float((trained + frozen) * work.param_bytes)
    if work.quantization in QUANTIZED_BYTES and isinstance(work.shape, DecoderShape):
        weight_bytes -= work.shape.quantizable_parameters * (work.param_bytes - QUANTIZED_BYTES[work.quantization])
    return {
        "weights": weight_bytes / work.shard_degree,
        "optimizer": trained * work.optimizer.optimizer_bytes(work.param_dtype)[0] / work.shard_degree,
        "gradients": _gradient_bytes(work) if _gradients_persist(work) else 0.0,
        # the first graph's, which every other copies its own to
        "captured gradients": _gradient_bytes(work) if work.cuda_graphs and work.graph_shapes > 1 else 0.0,
        "communication": _communication_bytes(work),
        # hidden states of one micro-batch, in bf16
        "frozen-layer cache": work.tokens * work.decoder.hidden_size * 2.0 if work.cached_layers else 0.0,
        "data": float(work.device_data_bytes),
    }


def _gradient_bytes(work: StepWorkload) -> float:
    return work.trainable.trained * work.param_bytes / work.shard_degree


def _gradients_persist(work: StepWorkload) -> bool:
    """Whether gradients exist during the forward pass: with accumulation, and in DDP buckets."""
    return work.gradient_accumulation_steps > 1 or (work.world_size > 1 and work.sharding == "ddp")


def _communication_bytes(work: StepWorkload) -> float:
    """Bytes FSDP gathers: two layers in the compute dtype, their fp32 gradients, LM head and embeddings."""
    shape, alone = work.shape, work.shard_degree == 1 and work.world_size == 1
    if work.sharding == "ddp" or not isinstance(shape, DecoderShape) or alone:
        return 0.0
    ends = shape.embedding * (1 if work.trainable.tie_word_embeddings else 2)
    return (2 * shape.layer_parameters + ends) * work.compute_bytes + shape.layer_parameters * 4.0


def _decoder_phases(work: StepWorkload, coefficients: MemoryCoefficients) -> dict[str, dict[str, float]]:
    """Transient bytes of a language model by phase of a step."""
    shape, trainable = work.decoder, work.trainable
    is_mixed = work.compute_bytes < work.residual_bytes
    layer_cast, head_cast = (n * work.compute_bytes * is_mixed for n in (shape.layer_matrices, shape.embedding))
    one_layer = layer_activation_bytes(work, coefficients, trained=trainable.trained_layers > 0)
    saved, saved_casts = activation_bytes(work, coefficients), layer_cast * trainable.backward_layers + head_cast
    recomputed, forward_casts = 0.0, saved_casts
    if work.checkpointing:
        recomputed = max(0.0, one_layer - saved_matmul_bytes(work))
        saved_casts, forward_casts = head_cast, trainable.trained_layers * layer_cast + head_cast
    forward_logits, loss_logits = _logit_bytes(work)
    fresh_gradients = 0.0 if _gradients_persist(work) else 1.0
    gradients, embedding_gradients = _gradient_bytes(work), shape.embedding * work.param_bytes * trainable.embeddings
    untied_gradients = 0.0 if trainable.tie_word_embeddings else embedding_gradients * fresh_gradients
    first_casts = layer_cast if trainable.backward_layers else head_cast
    # tied weights: the gradients of embeddings and LM head are summed into a third tensor
    last_workspace = 2.0 * embedding_gradients if trainable.tie_word_embeddings else 0.0
    top = max(trainable.trained_layers and shape.layer_parameters * 4.0, trainable.lm_head and shape.embedding * 6.0)
    top *= fresh_gradients
    phases = {
        "forward": {"activations": saved, "casts": forward_casts, "logits": forward_logits},
        "loss": {"activations": saved, "casts": saved_casts, "logits": loss_logits},
        "backward begins": {"activations": saved + recomputed, "casts": saved_casts, "workspace": top},
        "first layer": {"gradients": gradients - untied_gradients / work.shard_degree, "activations": one_layer,
                        "casts": first_casts},
        "backward ends": {"gradients": gradients, "workspace": last_workspace},
    }  # fmt: skip
    if work.eval_micro_batch_size:
        eval_tokens = work.eval_micro_batch_size * (work.eval_seq_len or work.seq_len)
        all_logits = eval_tokens * work.trained_fraction * shape.vocab_size * LOGIT_BYTES_FORWARD
        # bytes per token inside one layer without saved activations
        inside = 3.0 * shape.intermediate_size * work.compute_bytes + 3.0 * shape.hidden_size * work.residual_bytes
        phases["evaluation"] = {"logits": forward_logits if work.chunked else all_logits,
                                "casts": head_cast + layer_cast, "activations": eval_tokens * inside}  # fmt: skip
    return phases


def _logit_bytes(work: StepWorkload) -> tuple[float, float]:
    """Bytes of logits in the forward pass, and in the loss with their gradient and the LM head's."""
    shape, trains_head = work.decoder, work.trainable.lm_head
    if work.chunked:
        return _chunked_loss_bytes(work), shape.embedding * 10.0 if trains_head else 0.0
    logits = work.loss_positions * shape.vocab_size
    if not work.chunked_loss and work.on_gpu and work.compute_bytes == 2:
        return logits * 2.0, logits * 4.0 + (shape.embedding * 2.0 if trains_head else 0.0)
    return logits * LOGIT_BYTES_FORWARD, logits * LOGIT_BYTES_BACKWARD


def _chunked_loss_bytes(work: StepWorkload) -> float:
    """Bytes of the chunked loss: logits of a chunk, their gradient, and those of the chunk before.

    With several chunks the LM head's gradient is summed in fp32, next to that of each chunk.
    """
    shape, positions = work.decoder, work.loss_positions
    head = shape.embedding * work.compute_bytes if work.trainable.lm_head else 0.0
    row_bytes = shape.vocab_size * work.compute_bytes
    if positions <= LOSS_CHUNK:
        return positions * row_bytes + max(positions * row_bytes, head)
    last = LOSS_CHUNK if positions >= 2 * LOSS_CHUNK else positions - LOSS_CHUNK
    return (LOSS_CHUNK + 2 * last) * row_bytes + head + (shape.embedding * 4.0 if work.trainable.lm_head else 0.0)


def activation_bytes(work: StepWorkload, coefficients: MemoryCoefficients) -> float:
    """Bytes saved for the backward pass by all layers and around the final norm."""
    trainable, row = work.trainable, work.decoder.hidden_size * work.residual_bytes
    head_row = work.decoder.hidden_size * (work.residual_bytes + work.compute_bytes)
    ends = work.tokens * row * 2.0 + work.loss_positions * head_row
    if work.checkpointing:
        return ends + trainable.backward_layers * (work.tokens * row + saved_matmul_bytes(work))
    trained, frozen = (layer_activation_bytes(work, coefficients, trained=trained) for trained in (True, False))
    frozen_layers = trainable.backward_layers - trainable.trained_layers
    return ends + trainable.trained_layers * trained + frozen_layers * frozen


def saved_matmul_bytes(work: StepWorkload) -> float:
    """Bytes of matmul and attention outputs that one layer saves under selective checkpointing."""
    if work.checkpointing != "selective":
        return 0.0
    shape = work.decoder
    outputs_per_token = sum(outputs for _, outputs in shape.linears.values())
    if not work.recomputes_last_matmul:
        outputs_per_token -= shape.hidden_size
    outputs = outputs_per_token + shape.query_width * work.attention_expansion
    return work.tokens * (work.compute_bytes * outputs + 4.0 * shape.num_attention_heads)


def layer_activation_bytes(work: StepWorkload, coefficients: MemoryCoefficients, trained: bool) -> float:
    """Bytes that one layer saves for its backward pass; a frozen layer saves no inputs of its linears."""
    shape, residual_bytes, compute_bytes = work.decoder, work.residual_bytes, work.compute_bytes
    is_mixed, lora = compute_bytes < residual_bytes, work.trainable.lora_parameters > 0
    hidden, intermediate, heads = shape.hidden_size, shape.intermediate_size, 4 * shape.num_attention_heads
    attention = compute_bytes * 2 * (shape.query_width + work.kv_width) * work.attention_expansion + heads
    if work.shared_prompt:  # the attention outputs are gathered into rows again
        attention += compute_bytes * shape.query_width
    if shape.traits.fused_qkv:
        inputs = (3 * hidden if trained or lora else 0) * compute_bytes
        inner = (2 if trained or lora else 1) * intermediate * compute_bytes
        bytes_per_token: float = residual_bytes * hidden + inputs + 6 * compute_bytes * hidden + heads + inner
    else:
        norm_bytes = 4 if shape.traits.fp32_norms else residual_bytes  # normalized values are fp32 in any case
        norms = shape.traits.norms_per_layer * hidden * (4 + (norm_bytes if trained else 0))
        if shape.traits.qk_norm:
            norms += norm_bytes * (2 * shape.query_width + 4 * shape.kv_width)
        inputs = compute_bytes * hidden * (5 if is_mixed else 2) if trained or lora else 0
        if lora:  # LoRA saves the inputs of frozen linears, as copies where dtypes differ
            inputs += compute_bytes * (intermediate + (shape.query_width if is_mixed else 0))
        mlp_tensors = (4 if trained else 3) if shape.traits.gated_mlp else (2 if trained else 1)
        bytes_per_token = norms + inputs + attention + compute_bytes * intermediate * mlp_tensors
    factor = 1.0
    if work.compiled and trained and not lora and not is_mixed and work.precision != "fp8":
        if not shape.traits.fused_qkv:  # fused ones save as much as eager ones, others the inputs of norms and linears
            before_rope = shape.query_width + work.kv_width if shape.traits.qk_norm else 0
            values = (shape.traits.norms_per_layer + 2) * hidden + before_rope
            values += intermediate * (3 if shape.traits.gated_mlp else 2)
            bytes_per_token = compute_bytes * values + attention
    elif work.compiled:
        factor = coefficients.compiled_lora if lora else coefficients.compiled
        factor = coefficients.compiled_fp8 if work.precision == "fp8" else factor
    # the fused LoRA MLP saves the outputs of gate and up only; a compiled layer saves one tensor more than that
    fused_bytes = compute_bytes * intermediate * (1 if work.compiled else 2) if work.fused_lora_mlp else 0
    return work.tokens * (bytes_per_token * factor - fused_bytes)


def _resnet_phases(work: StepWorkload) -> dict[str, dict[str, float]]:
    """Transient bytes at the loss, when all activations are saved, and at the end of the backward pass."""
    shape, batch = work.shape, work.micro_batch_size
    assert isinstance(shape, ResNetShape)
    copies = work.trainable.trained * work.compute_bytes if work.compute_bytes < 4 else 0.0
    image, widest = shape.channels * shape.image_size**2, batch * shape.width * shape.image_size**2 * work.compute_bytes
    saved = batch * (shape.saved_activations(work.on_gpu) + image) * work.compute_bytes
    # images are normalized in fp32 and then cast; on a CPU a step takes 21 to 24 of the widest tensors and saves 18
    workspace = batch * image * 8.0 + (0.0 if work.on_gpu else 4.0 * widest)
    return {
        "loss": {"activations": saved, "casts": copies, "workspace": workspace},
        "backward ends": {"gradients": _gradient_bytes(work), "casts": copies, "workspace": 5.0 * widest},
    }
