"""The workload of one device in a step, and the memory that step takes by component and phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelwright.plan.model_shape import DecoderShape, ModelShape, ResNetShape, TrainableSummary
from modelwright.recipe.schema import (
    CheckpointingMode,
)

AUTO_GRAPHS_MAX_PARAMS, MAX_GRAPH_SHAPES = 2_000_000_000, 4
"""Parameters below which a step is recorded, and how many shapes of rows are, as the engine has it."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of a number while it is computed with; fp8 products leave bf16 behind."""
LOSS_CHUNK = 4096
"""Places whose logits stand in memory together, where the loss is computed in chunks."""


@dataclass(frozen=True)
class StepWorkload:
    """One stage as one device sees it."""

    shape: ModelShape
    """The model."""
    trainable: TrainableSummary
    """Which of its weights move."""
    micro_batch_size: int
    """Rows (or images) the device takes at once."""
    seq_len: int = 1
    """Tokens in the longest row."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in a step."""
    trained_fraction: float = 1.0
    """Share of places whose next token is trained, which is where the head runs."""
    eval_micro_batch_size: int = 0
    """Rows the device takes at once when measuring."""
    precision: str = "bf16"
    """What is multiplied."""
    tf32: bool = False
    """Whether fp32 numbers are multiplied on tensor cores."""
    rowwise_fp8: bool = False
    """Whether each row of an fp8 matrix has a scale of its own, and not the matrix one."""
    param_dtype: str = "fp32"
    """What the weights are kept in."""
    optimizer: str = "adamw_torch"
    """AdamW keeps two numbers for each weight that moves, sgd one."""
    checkpointing: CheckpointingMode = False
    """Whether activations are computed again in the backward pass: all, or all but products and attention."""
    compiled: bool = False
    """Whether layers are compiled."""
    chunked_loss: bool = True
    """Whether the task computes the head's loss in chunks where there are many places, so that logits never stand."""
    cached_layers: int = 0
    """Frozen layers whose states were computed once and kept, so that no step computes them."""
    masked: bool = False
    """Whether attention is given a mask: pairs with a shared prompt, where nothing better is there."""
    shared_prompt: bool = False
    """Whether two answers share a prompt without a mask: for attention they are then laid apart."""
    on_gpu: bool = True
    """Whether a GPU computes."""
    cuda_graphs: bool = False
    """Whether steps are recorded and replayed: the host has next to nothing to do, and gradients stay in place."""
    graph_shapes: int = 1
    """Shapes of rows that are recorded, each with memory of its own."""
    exp_avg_bytes: int = 4
    """Bytes of the gradients' mean that AdamW keeps."""
    quantization: str = "none"
    """What frozen matrices of the layers are kept in: nf4, int8, or as the other weights."""
    sharding: str = "ddp"
    """How devices share the model: ddp keeps it whole, fsdp splits it over all, hsdp over each machine."""
    world_size: int = 1
    """Devices in all."""
    per_node: int = 1
    """Devices in a machine."""
    device_data_bytes: int = 0
    """Bytes of data that live on the device, such as an image set."""
    counts_loading: bool = True
    """Whether the weights come to the device first, whole and in fp32, before they are halved or split."""

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def loss_positions(self) -> float:
        """Places where the head runs."""
        return self.tokens * self.trained_fraction

    @property
    def chunked(self) -> bool:
        """Whether the loss is computed in chunks: with many places, and not in fp16, whose gradients want scaling."""
        return (
            self.chunked_loss
            and self.loss_positions > (LOSS_CHUNK // 4 if self.on_gpu else LOSS_CHUNK)
            and self.precision != "fp16"
        )

    @property
    def kv_width(self) -> int:
        """Numbers in the keys that attention is given for each token, and as many in the values."""
        shape = self.shape
        assert isinstance(shape, DecoderShape)
        if self.masked or (self.on_gpu and self.precision == "fp32"):  # the kernel wants as many as there are queries
            return shape.query_width
        return shape.kv_width

    @property
    def attention_expansion(self) -> float:
        """Tokens that attention is given for each one there is: a prompt that two answers share is laid before each."""
        return 2.0 - self.trained_fraction if self.shared_prompt else 1.0

    @property
    def compute_bytes(self) -> int:
        """Bytes of a computed number."""
        return DTYPE_BYTES[self.precision]

    @property
    def param_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPE_BYTES[self.param_dtype]

    @property
    def residual_bytes(self) -> int:
        """Bytes of a number in the stream between layers: as wide as the weights that a layer is given."""
        return self.param_bytes if self.sharding == "ddp" else min(self.compute_bytes, self.param_bytes)

    @property
    def fused_lora_mlp(self) -> bool:
        """Whether low-rank products of gate and up are added as the gate is read, which takes bf16 all through."""
        is_bf16 = self.precision == "bf16" and self.residual_bytes == 2 and self.quantization == "none"
        return self.trainable.fused_lora_mlp and self.on_gpu and is_bf16

    @property
    def recomputes_last_matmul(self) -> bool:
        """Whether a layer that is computed again asks for its last product: a norm stands behind it, or an eager layer
        computes it before the low-rank products that are asked for."""
        assert isinstance(self.shape, DecoderShape)
        return self.shape.traits.norms_per_layer > 2 or (self.trainable.lora_parameters > 0 and not self.compiled)

    @property
    def shard_degree(self) -> int:
        """Devices that a weight is split over."""
        return {"fsdp": self.world_size, "hsdp": self.per_node}.get(self.sharding, 1)


OPTIMIZER_BYTES = {"adamw_torch": 8, "sgd": 4}
"""Bytes an optimizer keeps for each weight that moves, in fp32."""
LOGIT_BYTES_BACKWARD, LOGIT_BYTES_FORWARD = 12, 10
"""Bytes per logit at the fullest moment of the loss: three fp32 copies backward; bf16 and two fp32 forward."""
QUANTIZED_BYTES = {"nf4": 0.52, "int8": 1.01}
"""Bytes of a quantised number, with the scales of its block."""
CUDA_CONTEXT = 0.6e9
"""Bytes a CUDA process takes before the first tensor: the context, the libraries' workspaces."""
CAPTURE_WORKSPACE = 0.05e9
"""Bytes of workspaces that a recorded step has of its own, since it is recorded on a stream of its own."""
RESERVE, FRAGMENTATION = 0.03, 0.10
"""Share of a plan that stays free on the card, and more of what comes and goes in a step: the allocator leaves gaps.

A step of 4 B weights whose tensors are counted as 142 GB at its peak, 89 of them for a while only, ran out of 149.6:
what is not counted was 9 % of those or more. Where there is room, the allocator holds 5 to 10 % more of what comes and
goes where that is 20 GB and more, 1 to 3 GB where it is less.
"""
GRAPH_POOL = 1e9
"""Bytes that stay with the allocator beside a recording, which cannot use them: 1.1 GB where a step takes 1 to 3."""


@dataclass(frozen=True)
class MemoryCoefficients:
    """What measured runs teach about memory: factors on what cannot be derived."""

    compiled: float = 0.64
    """Share of an eager layer's activations that a compiled one keeps."""
    compiled_fp8: float = 0.44
    """The same where matrices are multiplied in fp8."""
    compiled_lora: float = 0.8
    """The same with low-rank matrices beside frozen ones."""
    fixed: float = 0.1e9
    """Bytes beside everything that is counted: workspaces of matrix products, small tensors."""


DEFAULT_MEMORY = MemoryCoefficients()
"""Before anything was measured."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The fullest moment on one device."""

    components: dict[str, float]
    """Bytes by component at the fullest moment of a step."""
    peak_phase: str
    """When most is held: in a step, or when the weights arrive."""
    phases: dict[str, float]
    """Bytes in all at each moment that was looked at."""
    graph_bytes: float = 0.0
    """Bytes that recordings keep to themselves: for rows of other lengths, and for measuring beside them."""
    transient_bytes: float = 0.0
    """Bytes that come and go in a step."""

    @property
    def total(self) -> float:
        """Bytes of tensors at the peak."""
        return self.phases[self.peak_phase]

    @property
    def required(self) -> float:
        """Bytes a card must have: the tensors, the process, and room for the allocator."""
        return (self.total + self.graph_bytes + CUDA_CONTEXT) * (1 + RESERVE) + self.transient_bytes * FRAGMENTATION

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        return {
            "bytes": round(self.total),
            "required_bytes": round(self.required),
            "peak_phase": self.peak_phase,
            "components": {name: round(size) for name, size in self.components.items() if size},
            "phases": {name: round(size) for name, size in self.phases.items()},
        }


def estimate_memory(work: StepWorkload, coefficients: MemoryCoefficients = DEFAULT_MEMORY) -> MemoryEstimate:
    """The components of a step's memory at its fullest moment."""
    persistent = _persistent_bytes(work)
    step_phases = _resnet_phases(work) if isinstance(work.shape, ResNetShape) else _decoder_phases(work, coefficients)
    phases = {name: {**persistent, **components} for name, components in step_phases.items()}
    if work.counts_loading and work.on_gpu and work.quantization == "none":
        phases["loading"] = {"weights": work.trainable.total * 4.0, "data": float(work.device_data_bytes)}
    for components in phases.values():
        components["workspace"] = (
            components.get("workspace", 0.0) + coefficients.fixed + (CAPTURE_WORKSPACE if work.cuda_graphs else 0.0)
        )
    totals = {name: sum(components.values()) for name, components in phases.items()}
    peak_phase, peak_step_phase = (max(names, key=lambda name: totals[name]) for names in (totals, step_phases))
    components = phases[peak_step_phase]
    transient_bytes = totals[peak_step_phase] - sum(persistent.values())
    return MemoryEstimate(
        components,
        peak_phase,
        totals,
        _graph_bytes(work, transient_bytes, step_phases) if work.cuda_graphs else 0.0,
        transient_bytes,
    )


def _graph_bytes(work: StepWorkload, transient_bytes: float, phases: dict[str, dict[str, float]]) -> float:
    """Bytes of recordings beside the one that is counted: each has memory and gradients of its own.

    Micro-batches that add to gradients are recorded apart from the first, and what is measured is not recorded.
    """
    extra_graphs = work.graph_shapes * (2 if work.gradient_accumulation_steps > 1 else 1) - 1
    evaluation = sum(phases.get("evaluation", {}).values())
    return transient_bytes * extra_graphs + _gradient_bytes(work) * (work.graph_shapes - 1) + evaluation + GRAPH_POOL


def _frozen_cache_bytes(work: StepWorkload) -> float:
    """Hidden states of the cached layers for one micro-batch, in bf16."""
    return (
        work.tokens * work.shape.hidden_size * 2.0
        if isinstance(work.shape, DecoderShape) and work.cached_layers
        else 0.0
    )


def _persistent_bytes(work: StepWorkload) -> dict[str, float]:
    """What is there at every moment."""
    trained, frozen = work.trainable.trained, work.trainable.total - work.trainable.trained
    weight_bytes = float((trained + frozen) * work.param_bytes)
    if work.quantization in QUANTIZED_BYTES and isinstance(work.shape, DecoderShape):
        matrix_numbers = work.shape.num_hidden_layers * work.shape.layer_matrices
        weight_bytes -= matrix_numbers * (work.param_bytes - QUANTIZED_BYTES[work.quantization])
    return {
        "weights": weight_bytes / work.shard_degree,
        "optimizer": trained * _optimizer_bytes(work) / work.shard_degree,
        "gradients": _gradient_bytes(work) if _gradients_persist(work) else 0.0,
        "communication": _communication_bytes(work),
        "frozen-layer cache": _frozen_cache_bytes(work),
        "data": float(work.device_data_bytes),
    }


def _optimizer_bytes(work: StepWorkload) -> float:
    """Bytes of optimizer state for a weight; beside bf16 weights stand the 16 bits they have lost."""
    if work.param_dtype == "bf16":
        return 4 + work.exp_avg_bytes + 2
    return OPTIMIZER_BYTES[work.optimizer]


def _gradient_bytes(work: StepWorkload) -> float:
    return work.trainable.trained * work.param_bytes / work.shard_degree


def _gradients_persist(work: StepWorkload) -> bool:
    """Whether gradients are there in the forward pass: under accumulation, and in DDP's buckets."""
    return work.gradient_accumulation_steps > 1 or (work.world_size > 1 and work.sharding == "ddp")


def _communication_bytes(work: StepWorkload) -> float:
    """What sharding gathers: two layers in the computed width, their fp32 gradients, and head and embeddings."""
    shape = work.shape
    if (
        work.sharding == "ddp"
        or not isinstance(shape, DecoderShape)
        or (work.shard_degree == 1 and work.world_size == 1)
    ):
        return 0.0
    ends = shape.embedding * (1 if work.trainable.tie_word_embeddings else 2)
    return (2 * shape.layer_parameters + ends) * work.compute_bytes + shape.layer_parameters * 4.0


def _decoder_phases(work: StepWorkload, coefficients: MemoryCoefficients) -> dict[str, dict[str, float]]:
    """The moments at which a language model's step may be fullest."""
    shape, trainable = work.shape, work.trainable
    assert isinstance(shape, DecoderShape)
    low = work.compute_bytes < work.residual_bytes
    copies = shape.layer_matrices * work.compute_bytes if low else 0.0
    head_copy = shape.embedding * work.compute_bytes if low else 0.0
    backward_layers = trainable.backward_layers
    one_layer = layer_activation_bytes(work, coefficients, trained=trainable.trained_layers > 0)
    saved, saved_casts = activation_bytes(work, coefficients), copies * backward_layers + head_copy
    fresh_gradients = 0.0 if _gradients_persist(work) else 1.0
    gradients, logits = _gradient_bytes(work), work.loss_positions * shape.vocab_size
    recomputed = max(0.0, one_layer - saved_matmul_bytes(work)) if work.checkpointing else 0.0
    if work.checkpointing:
        saved_casts = head_copy
    forward_logits, loss_logits = logits * LOGIT_BYTES_FORWARD, logits * LOGIT_BYTES_BACKWARD
    if (
        not work.chunked_loss and work.on_gpu and work.compute_bytes == 2
    ):  # held once; then their gradient, and the head's
        forward_logits, loss_logits = logits * 2.0, logits * 4.0 + (shape.embedding * 2.0 if trainable.lm_head else 0.0)
    if work.chunked:
        forward_logits = _chunked_loss_bytes(work)
        loss_logits = shape.embedding * 10.0 if trainable.lm_head else 0.0
    forward_casts = trainable.trained_layers * copies + head_copy if work.checkpointing else saved_casts
    embedding_gradients = shape.embedding * work.param_bytes if trainable.embeddings else 0.0
    first = {"gradients": gradients - embedding_gradients * (0 if trainable.tie_word_embeddings else 1) * fresh_gradients / work.shard_degree,
             "activations": one_layer, "casts": copies if backward_layers else head_copy}  # fmt: skip
    # the gradients of embeddings and of a head that is the same matrix meet, and their sum is a third one
    last = {"gradients": gradients, "workspace": 2.0 * embedding_gradients if trainable.tie_word_embeddings else 0.0}
    top = max(trainable.trained_layers and shape.layer_parameters * 4.0, trainable.lm_head and shape.embedding * 6.0)
    phases = {
        "forward": {"activations": saved, "casts": forward_casts, "logits": forward_logits},
        "loss": {"activations": saved, "casts": saved_casts, "logits": loss_logits},
        "backward begins": {"activations": saved + recomputed, "casts": saved_casts, "workspace": top * fresh_gradients},
        "first layer": first,
        "backward ends": last,
    }  # fmt: skip
    if work.eval_micro_batch_size:
        eval_tokens = work.eval_micro_batch_size * work.seq_len
        logits = (
            forward_logits
            if work.chunked
            else eval_tokens * work.trained_fraction * shape.vocab_size * LOGIT_BYTES_FORWARD
        )
        phases["evaluation"] = {"logits": logits, "casts": head_copy + copies,
                              "activations": eval_tokens * _transient_bytes(shape, work)}  # fmt: skip
    return phases


def _chunked_loss_bytes(work: StepWorkload) -> float:
    """Bytes where logits are told a chunk at a time: theirs, their gradient's, and those of the chunk before.

    The head's own gradient is added up in fp32 where there are several chunks, beside the part of each.
    """
    shape = work.shape
    assert isinstance(shape, DecoderShape)
    head = shape.embedding * work.compute_bytes if work.trainable.lm_head else 0.0
    row_bytes = shape.vocab_size * work.compute_bytes
    if work.loss_positions <= LOSS_CHUNK:
        return work.loss_positions * row_bytes + max(work.loss_positions * row_bytes, head)
    last = LOSS_CHUNK if work.loss_positions >= 2 * LOSS_CHUNK else work.loss_positions - LOSS_CHUNK
    return (LOSS_CHUNK + 2 * last) * row_bytes + head + (shape.embedding * 4.0 if work.trainable.lm_head else 0.0)


def _transient_bytes(shape: DecoderShape, work: StepWorkload) -> float:
    """Bytes per token inside one layer when nothing is kept."""
    return 3.0 * shape.intermediate_size * work.compute_bytes + 3.0 * shape.hidden_size * work.residual_bytes


def activation_bytes(work: StepWorkload, coefficients: MemoryCoefficients) -> float:
    """Bytes kept between forward and backward over all layers, and around the last norm."""
    shape, trainable = work.shape, work.trainable
    assert isinstance(shape, DecoderShape)
    ends = work.tokens * shape.hidden_size * 2.0 * work.residual_bytes + work.loss_positions * shape.hidden_size * (
        work.residual_bytes + work.compute_bytes
    )
    if work.checkpointing:
        return ends + trainable.backward_layers * (
            work.tokens * shape.hidden_size * work.residual_bytes + saved_matmul_bytes(work)
        )
    frozen = trainable.backward_layers - trainable.trained_layers
    return (
        ends
        + trainable.trained_layers * layer_activation_bytes(work, coefficients, trained=True)
        + frozen * layer_activation_bytes(work, coefficients, trained=False)
    )


def saved_matmul_bytes(work: StepWorkload) -> float:
    """Bytes of products and attention that one layer keeps where all else in it is computed again."""
    shape = work.shape
    assert isinstance(shape, DecoderShape)
    if work.checkpointing != "selective":
        return 0.0
    outputs_per_token = sum(outputs for _, outputs in shape.linears.values())
    if not work.recomputes_last_matmul:
        outputs_per_token -= shape.hidden_size
    return work.tokens * (
        work.compute_bytes * (outputs_per_token + shape.query_width * work.attention_expansion)
        + 4.0 * shape.num_attention_heads
    )


def layer_activation_bytes(work: StepWorkload, coefficients: MemoryCoefficients, trained: bool) -> float:
    """Bytes that one layer keeps for its backward pass; a frozen layer keeps no inputs of its matrices."""
    shape = work.shape
    assert isinstance(shape, DecoderShape)
    residual_bytes, compute_bytes = work.residual_bytes, work.compute_bytes
    is_mixed, lora = compute_bytes < residual_bytes, work.trainable.lora_parameters > 0
    attention = (
        compute_bytes * 2 * (shape.query_width + work.kv_width) * work.attention_expansion
        + 4 * shape.num_attention_heads
    )
    if work.shared_prompt:  # what attention says is brought together again
        attention += compute_bytes * shape.query_width
    if shape.traits.fused_qkv:
        inputs = (3 * shape.hidden_size if trained or lora else 0) * compute_bytes
        inner = (2 if trained or lora else 1) * shape.intermediate_size * compute_bytes
        bytes_per_token: float = (
            residual_bytes * shape.hidden_size
            + inputs
            + 6 * compute_bytes * shape.hidden_size
            + 4 * shape.num_attention_heads
            + inner
        )
    else:
        norm_bytes = 4 if shape.traits.fp32_norms else residual_bytes
        norms = (
            shape.traits.norms_per_layer * shape.hidden_size * (4 + (norm_bytes if trained else 0))
        )  # normed in fp32 in any case
        if shape.traits.qk_norm:
            norms += norm_bytes * (2 * shape.query_width + 4 * shape.kv_width)
        inputs = compute_bytes * shape.hidden_size * (5 if is_mixed else 2) if trained or lora else 0
        if lora:  # low-rank matrices keep the inputs of frozen ones, in copies of their own where types differ
            inputs += compute_bytes * (shape.intermediate_size + (shape.query_width if is_mixed else 0))
        inner = (
            compute_bytes
            * shape.intermediate_size
            * ((4 if trained else 3) if shape.traits.gated_mlp else (2 if trained else 1))
        )
        bytes_per_token = norms + inputs + attention + inner
    factor = 1.0
    if work.compiled:
        factor = coefficients.compiled_lora if lora else coefficients.compiled
        factor = coefficients.compiled_fp8 if work.precision == "fp8" else factor
    # with the gate's own kernels only both products are kept, not what comes of them: compiled layers keep one of those
    fused_bytes = compute_bytes * shape.intermediate_size * (1 if work.compiled else 2) if work.fused_lora_mlp else 0
    return work.tokens * (bytes_per_token * factor - fused_bytes)


def _resnet_phases(work: StepWorkload) -> dict[str, dict[str, float]]:
    """All is kept when the loss is known; at the end of the backward pass only what the widest layer needs."""
    shape = work.shape
    assert isinstance(shape, ResNetShape)
    copies = work.trainable.trained * work.compute_bytes if work.compute_bytes < 4 else 0.0
    image, widest = (
        shape.channels * shape.image_size**2,
        work.micro_batch_size * shape.width * shape.image_size**2 * work.compute_bytes,
    )
    # images are made fp32, scaled and shifted, and then take the computed width; on a CPU what each place of the
    # first layers saw is laid side by side, nine times as wide, while their own activations are still kept
    at_the_end = 5.0 if work.on_gpu else 21.0
    return {
        "loss": {"activations": work.micro_batch_size * (shape.saved_activations(work.on_gpu) + image) * work.compute_bytes, "casts": copies,
                 "workspace": work.micro_batch_size * image * 8.0},
        "backward ends": {"gradients": _gradient_bytes(work), "casts": copies, "workspace": at_the_end * widest},
    }  # fmt: skip
