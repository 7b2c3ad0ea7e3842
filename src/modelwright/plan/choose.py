"""Predict a stage's memory, time and cost, choose the batch layout, checkpointing and sharding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from modelwright.errors import ModelError
from modelwright.plan.calibrate import Calibration, calibration_for
from modelwright.plan.hardware import GPUS, GpuSpec, Hardware
from modelwright.plan.memory import (
    AUTO_GRAPHS_MAX_PARAMS,
    MAX_GRAPH_SHAPES,
    MemoryEstimate,
    StepWorkload,
    estimate_memory,
)
from modelwright.plan.model_shape import DecoderShape, ModelShape, ResNetShape, TrainableSummary, count_trainable
from modelwright.plan.stage import (
    MIN_EVAL_SAMPLES,
    MIN_FP8_SPEEDUP,
    TARGET_STEPS,
    StagePlan,
    batch_shapes,
    draw_lengths,
)
from modelwright.plan.step_time import StepTime, step_time
from modelwright.recipe.stage_specs import (
    CheckpointingMode,
    PairConfig,
    ReuseConfig,
    RowStats,
    TrainableConfig,
    TrainableParts,
    TrainingConfig,
)

CHECKPOINTINGS: tuple[CheckpointingMode, ...] = (False, "selective", True)
"""From the fastest to the one with the least memory."""
GIB = 2**30
COMPILE_SECONDS, COMPILE_SECONDS_OF_OTHERS, COMPILE_RECOMPUTED = 8, 4, 1.8
"""Compiling the first kind of layer, and each other one, on the host of a GPU: Pythia, of one kind, began its second
step after 14 s, not compiled after 6; Gemma 3, of two, after 17. Last, the factor of full checkpointing: SmolLM3 with
two trained layers, four kinds, took 33 and 39 s (H200, 2026-11-18)."""
CACHED_COMPILING, MIN_COMPILE_SAVING = 0.2, 0.5
"""Part of it where torch's cache has the kernels (Pythia: 1.4 s instead of 7), and the part that the steps must save:
the next start of the recipe finds the cache."""
COMPARE_SECONDS = 60
"""Comparing fp8 with bf16 before the first step: both are compiled and timed."""
MIN_FP8_WIDTH = 2048
"""hidden_size from which fp8 may pay: measured on one H200, 1.27 × at 2048 and 0.97 × at 0.5 B, 0.78 × at 135 M."""
MIN_MERGE_SPEEDUP, MAX_MERGE_MEMORY = 1.1, 0.5
"""Larger micro-batches than the recipe's must be so much faster, and need at most this fraction of the memory."""
EVAL_TOKENS = 16384
"""Tokens at once in evaluations: with 8 rows of 217, 32 forward passes of a 0.6 B model took 1.4 s, all of it launches
(H200, 2026-11-18)."""
MIN_HINT_SPEEDUP = 1.05
"""Minimum speedup of lighter checkpointing for a hint."""
CHECKPOINTING_TEXT = {
    "selective": "selective gradient checkpointing: everything but matmuls and attention is recomputed",
    True: "full gradient checkpointing: activations are recomputed",
}


def choose_plan(
    plan: StagePlan, settings: TrainingConfig, shape: ModelShape, rows: RowStats, hardware: Hardware, *,
    may_merge: bool = True,
) -> StageEstimate:  # fmt: skip
    """The fastest plan that fits, with its estimate; if none fits, what would; may_merge: in larger micro-batches."""
    case = _Case(settings, shape, rows, hardware, may_merge)
    steps_known = rows.count is not None or settings.max_steps is not None
    requested = case.decide_fp8(case.decide_compile(for_gpu(plan, hardware.gpu), steps_known), steps_known)
    choice = case.fastest_fitting(requested)
    fits, chosen = choice is not None, case.merge_evaluation(choice) if choice else requested
    memory, time = case.estimate(chosen)
    relative_error, basis = case.calibration.uncertainty(hardware.gpu)
    merged = case.merge_reason(requested, chosen)
    lines = [*(merged or change_lines(requested, chosen, hardware)), *case.padding_free_reason(chosen)]
    lines += case.checkpointing_reason(chosen, memory.required) if fits else ()
    if fits and chosen.gradient_checkpointing == requested.gradient_checkpointing:
        lines += case.checkpointing_hint(chosen)
    if fits and settings.distributed_strategy == "auto" and hardware.world_size > 1:
        ddp, _ = case.estimate(chosen.revise(sharding="ddp"))
        lines.append(sharding_reason(requested, chosen, ddp.required, hardware))
    if hardware.nodes > 1:
        lines.append(link_line(time, hardware))
    return StageEstimate(
        plan=chosen.revise(*lines),
        hardware=hardware,
        trainable=trainable_of(shape, settings),
        memory=memory,
        time=time,
        fits=fits,
        alternatives=() if fits else case.alternatives(requested),
        relative_error=relative_error,
        basis=basis,
        price=None,
        steps_known=steps_known,
        compile_seconds=compile_seconds(shape, trainable_of(shape, settings), chosen),
    )


@dataclass(frozen=True)
class _Case:
    """A stage on given hardware, for which plans are compared."""

    settings: TrainingConfig
    shape: ModelShape
    rows: RowStats
    hardware: Hardware
    may_merge: bool = True

    @cached_property
    def calibration(self) -> Calibration:
        return calibration_for(self.hardware.gpu)

    @property
    def is_micro_batch_free(self) -> bool:
        """Whether the recipe sets the global batch and leaves the micro-batch size to the planner."""
        is_set = "per_device_train_batch_size" in self.settings.model_fields_set
        return self.settings.global_batch_size is not None and not is_set

    def estimate(self, plan: StagePlan) -> tuple[MemoryEstimate, StepTime]:
        """Memory of a plan for the largest micro-batch, and time for the mean one."""
        if isinstance(self.shape, ResNetShape) and self.settings.spec.modality == "text":
            raise ModelError("model: a resnet is trained by classify, not by a text stage")
        work = workload_of(self.shape, self.settings, plan, self.rows, self.hardware)
        largest, mean_length, fill_fraction = self.row_lengths(plan)
        typical, work = replace(work, seq_len=mean_length), replace(work, seq_len=largest)
        bandwidth = self.hardware.slowest_bandwidth
        time = step_time(typical, self.hardware.gpu, self.calibration.time, bandwidth, fill_fraction)
        return estimate_memory(work, self.calibration.memory), time

    def row_lengths(self, plan: StagePlan) -> tuple[int, int, float]:
        """Tokens of a row in the largest micro-batch and in the mean one, and the fraction that is not padding."""
        rows, layout = self.rows, (plan.micro_batch_size, plan.gradient_accumulation_steps, plan.padding_free)
        if rows.mean_length >= rows.max_length or not rows.lengths:
            fill_fraction = 1.0 if rows.mean_length >= rows.max_length else FILL_WITH_PADDING
            typical = max(1, min(rows.max_length, round(rows.mean_length / fill_fraction)))
            return rows.max_length, typical, fill_fraction
        if layout not in self.drawn:
            self.drawn[layout] = draw_lengths(rows, *layout)
        return self.drawn[layout]

    @cached_property
    def drawn(self) -> dict[tuple[int, int, bool], tuple[int, int, float]]:
        """Row lengths of drawn micro-batches, by layout."""
        return {}

    def padding_free_reason(self, plan: StagePlan) -> tuple[str, ...]:
        """A line with what it saves, where rows stand end to end."""
        if not plan.padding_free or not self.rows.lengths or self.rows.prefix_length:
            return ()
        padded, flat = (self.row_lengths(plan.revise(padding_free=each))[2] for each in (False, True))
        multiple = batch_shapes(self.rows.lengths, self.rows.lengths, plan.micro_batch_size).multiple
        share = f"{1 - flat:.0%} of the tokens are padding, of padded rows {1 - padded:.0%}"
        return (f"rows end to end, rounded up to {multiple} tokens: {share} (padding_free)",)

    def checkpointing_reason(self, plan: StagePlan, required: float) -> tuple[str, ...]:
        """A line where a GPU keeps all activations, which was not asked for."""
        on_gpu, is_auto = self.hardware.gpu.name != "CPU", self.settings.gradient_checkpointing == "auto"
        if not on_gpu or not is_auto or plan.gradient_checkpointing or len(set(self.rows.lengths)) < 2:
            return ()
        memory = f"{required / GIB:.0f} of {self.hardware.gpu.memory / GIB:.0f} GiB suffice"
        return (f"activations are kept: {memory} (gradient_checkpointing)",)

    def decide_compile(self, plan: StagePlan, steps_known: bool) -> StagePlan:
        """The plan with compiled layers where the setting is auto and all steps together save half of what it takes."""
        on_gpu, is_text = self.hardware.gpu.name != "CPU", self.settings.spec.modality == "text"
        if self.settings.torch_compile != "auto" or not on_gpu or not is_text or plan.precision == "fp8":
            return plan
        plans = (plan, plan.revise(torch_compile=True))
        fitting = [self.fastest_fitting(each) or each for each in plans]
        eager, compiled = map(self.seconds, fitting)
        per_step = f"{eager:.3g} s a step without torch.compile, {compiled:.3g} with"
        if not steps_known:
            return plans[1].revise(f"layers are compiled: {per_step} (torch_compile)") if compiled < eager else plan
        saved = (eager - compiled) * plan.steps
        compiling = compile_seconds(self.shape, trainable_of(self.shape, self.settings), fitting[1])
        takes = f"compiling takes about {compiling}, the next time {compiling * CACHED_COMPILING:.0f}"
        steps = f"{plan.steps:,} steps save {max(0.0, saved):,.0f} s, {takes}"
        if saved > compiling * MIN_COMPILE_SAVING:
            return plans[1].revise(f"layers are compiled: {steps}; {per_step} (torch_compile)")
        return plan.revise(f"layers are not compiled: {steps}; {per_step} (torch_compile)")

    def decide_fp8(self, plan: StagePlan, steps_known: bool) -> StagePlan:
        """The plan in fp8 where precision is auto and the prediction says that it pays; the run then checks it."""
        gpu = self.hardware.gpu
        if plan.precision != "bf16" or not self.settings.may_use_fp8 or gpu.name == "CPU":
            return plan
        if not gpu.fp8:
            return plan.revise(f"bf16, not fp8: {gpu.name} has no fp8 (precision)")
        if isinstance(self.shape, DecoderShape) and self.shape.hidden_size < MIN_FP8_WIDTH:
            width = f"hidden_size {self.shape.hidden_size} is too small to gain, needs {MIN_FP8_WIDTH}"
            return plan.revise(f"bf16, not fp8: {width} (precision)")
        plans = (plan, plan.revise(precision="fp8"))
        bf16, fp8 = (self.seconds(self.fastest_fitting(each) or each) for each in plans)
        speedup = f"predicted {bf16 / fp8:.2f} × as fast as bf16 on {gpu.name}"
        if bf16 / fp8 < MIN_FP8_SPEEDUP:
            return plan.revise(f"bf16, not fp8: fp8 is {speedup}, needs {MIN_FP8_SPEEDUP:g} (precision)")
        if steps_known and (saved := (bf16 - fp8) * plan.steps) < COMPARE_SECONDS:
            steps = f"{plan.steps:,} steps save {saved:,.0f} s, comparing takes about {COMPARE_SECONDS}"
            return plan.revise(f"bf16, not fp8: {steps} (precision)")
        return plans[1].revise(f"fp8: {speedup}; the run compares both before its first step (precision)")

    def candidates(self, plan: StagePlan) -> list[StagePlan]:
        """All layouts of the same global batch: micro-batch sizes, checkpointing modes and shardings."""
        rows_per_device = plan.micro_batch_size * plan.gradient_accumulation_steps
        max_size = rows_per_device if self.is_micro_batch_free else plan.micro_batch_size
        shardings, checkpointings = [plan.sharding], [plan.gradient_checkpointing]
        if self.settings.distributed_strategy == "auto" and plan.sharding == "ddp":
            shardings += shardings_for(self.settings, self.hardware)
        if self.settings.spec.modality == "text":
            checkpointings = list(CHECKPOINTINGS[CHECKPOINTINGS.index(plan.gradient_checkpointing) :])
        graphs = (True, False) if self.settings.cuda_graphs == "auto" and self.hardware.gpu.name != "CPU" else (True,)
        sizes = [size for size in range(max_size, 0, -1) if rows_per_device % size == 0]
        layouts = [plan.revise(micro_batch_size=n, gradient_accumulation_steps=rows_per_device // n) for n in sizes]
        return [
            layout.revise(gradient_checkpointing=checkpointing, sharding=sharding, cuda_graphs=captured)
            for sharding in shardings
            for checkpointing in checkpointings
            for captured in graphs
            for layout in layouts
        ]

    def fastest_fitting(self, plan: StagePlan) -> StagePlan | None:
        """The requested plan, perhaps in larger micro-batches, else the fastest that fits; None if none does."""
        fitting: list[tuple[float, StagePlan]] = []
        for index, candidate in enumerate([plan, *self.candidates(plan)]):
            memory, time = self.estimate(candidate)
            if memory.required > self.hardware.gpu.memory:
                continue
            if index == 0 and not self.is_micro_batch_free:
                return self.merge_micro_batches(candidate)
            fitting.append((time.tokens_per_second, candidate))
        # communication is the least certain part of the estimate: weights are sharded only if they do not fit otherwise
        requested = (plan.sharding, plan.gradient_checkpointing)
        if any((each.sharding, each.gradient_checkpointing) == requested for _, each in fitting):
            fitting = [(rate, each) for rate, each in fitting if each.sharding == plan.sharding]
        best: tuple[float, StagePlan] | None = None
        for rate, candidate in fitting:
            if best is None or rate > best[0] * 1.01:
                best = (rate, candidate)
        return best[1] if best else None

    def merge_micro_batches(self, plan: StagePlan) -> StagePlan:
        """The plan with fewer and larger micro-batches of the same batch, where small ones leave a GPU waiting.

        Not with batch norm or dropout, which train something else in a larger micro-batch. Communication is not
        counted: any number of GPUs takes the same, over any link.
        """

        def seconds(plan: StagePlan) -> float:
            time = self.estimate(plan)[1]
            return time.seconds - time.communication

        settings, gpu = self.settings, self.hardware.gpu
        has_dropout = getattr(settings, "lora_dropout", 0) and not getattr(settings, "disable_dropout", False)
        if gpu.name == "CPU" or not self.may_merge or settings.spec.modality != "text" or has_dropout:
            return plan
        rows = plan.micro_batch_size * plan.gradient_accumulation_steps
        sizes = [size for size in range(plan.micro_batch_size + 1, rows + 1) if rows % size == 0]
        larger = [plan.revise(micro_batch_size=size, gradient_accumulation_steps=rows // size) for size in sizes]
        larger = [each for each in larger if self.estimate(each)[0].required <= MAX_MERGE_MEMORY * gpu.memory]
        best = min(larger, key=seconds, default=plan)
        return best if seconds(best) * MIN_MERGE_SPEEDUP <= seconds(plan) else plan

    def merge_evaluation(self, plan: StagePlan) -> StagePlan:
        """The plan with as many rows at once in evaluations as keep a GPU busy, unless the recipe sets a number.

        Not padded ones, which waste more the more they are; nor so many that a rank has none, or that they need more
        memory than training does.
        """
        settings, gpu = self.settings, self.hardware.gpu
        is_padded = not plan.padding_free and self.rows.mean_length < self.rows.max_length
        is_free = settings.per_device_eval_batch_size == "auto" and settings.spec.modality == "text"
        if not is_free or gpu.name == "CPU" or is_padded:
            return plan
        while 2 * plan.eval_micro_batch_size * self.rows.mean_length <= EVAL_TOKENS:
            larger = plan.revise(eval_micro_batch_size=2 * plan.eval_micro_batch_size)
            if larger.eval_micro_batch_size * plan.world_size > MIN_EVAL_SAMPLES:
                break
            memory = self.estimate(larger)[0]
            if memory.peak_phase == "evaluation" or memory.required > gpu.memory:
                break
            plan = larger
        return plan

    def merge_reason(self, requested: StagePlan, chosen: StagePlan) -> tuple[str, ...]:
        """A line where the micro-batches are larger than the recipe's."""
        if self.is_micro_batch_free or chosen.micro_batch_size <= requested.micro_batch_size:
            return ()
        seconds = f"{self.seconds(chosen):.3g} s a step instead of {self.seconds(requested):.3g}"
        rows = f"{chosen.micro_batch_size} rows at once instead of {requested.micro_batch_size}"
        return (f"{rows}: {seconds}; the batch of {chosen.global_batch_size} is kept (per_device_train_batch_size)",)

    def seconds(self, plan: StagePlan) -> float:
        """Predicted seconds of a step."""
        return self.estimate(plan)[1].seconds

    def checkpointing_hint(self, plan: StagePlan) -> tuple[str, ...]:
        """A line if lighter checkpointing than the recipe's would fit and be faster."""
        rate = self.estimate(plan)[1].tokens_per_second
        best, name = rate * MIN_HINT_SPEEDUP, ""
        for lighter in CHECKPOINTINGS[: CHECKPOINTINGS.index(plan.gradient_checkpointing)]:
            candidate = self.fastest_fitting(plan.revise(gradient_checkpointing=lighter))
            if candidate is None or (candidate.gradient_checkpointing, candidate.sharding) != (lighter, plan.sharding):
                continue
            other = self.estimate(candidate)[1].tokens_per_second
            if other >= best:
                best, name = other, str(lighter).lower()
        return (f"gradient_checkpointing: {name} would fit too, {best / rate:.2f} × as fast",) if name else ()

    def alternatives(self, plan: StagePlan) -> tuple[str, ...]:
        """The smallest changes that would fit: a smaller evaluation batch, LoRA, more GPUs, a larger GPU."""
        options, settings, hardware = [], self.settings, self.hardware
        is_text = isinstance(self.shape, DecoderShape)
        eval_rows = plan.eval_micro_batch_size
        while eval_rows := eval_rows // 2:
            if self.fastest_fitting(plan.revise(eval_micro_batch_size=eval_rows)):
                options.append(f"per_device_eval_batch_size: {eval_rows}")
                break
        if is_text and isinstance(settings, TrainableConfig) and not settings.trainable.lora:
            lighter = settings.model_copy(update={"trainable": TrainableParts(lora=True)})
            if replace(self, settings=lighter).fastest_fitting(plan):
                options.append("trainable: lora")
        num_gpus, accumulation = 2 * hardware.world_size, max(1, plan.gradient_accumulation_steps // 2)
        while num_gpus <= 64 and is_text:
            larger = replace(self, hardware=Hardware(-(-num_gpus // 8), min(num_gpus, 8), hardware.gpu))
            sharded = plan.revise(world_size=num_gpus, sharding="fsdp", gradient_accumulation_steps=accumulation)
            if larger.fastest_fitting(sharded):
                options.append(f"distributed_strategy: fsdp over {num_gpus} × {hardware.gpu.name}")
                break
            num_gpus *= 2
        larger_gpus = [gpu for gpu in GPUS.values() if gpu.memory > hardware.gpu.memory]
        for gpu in sorted(larger_gpus, key=lambda each: each.memory):
            if replace(self, hardware=replace(hardware, gpu=gpu)).fastest_fitting(for_gpu(plan, gpu)):
                options.append(f"{hardware.world_size} × {gpu.name}")
                break
        return tuple(options)


def for_gpu(plan: StagePlan, gpu: GpuSpec) -> StagePlan:
    """The plan in a precision that the GPU supports."""
    lacks = {"bf16": not gpu.bf16, "fp8": not gpu.fp8}
    if not lacks.get(plan.precision, False) or gpu.name == "CPU":
        return plan
    fallback = "bf16" if gpu.bf16 else "fp16"
    reason = f"{fallback} instead of {plan.precision}: {gpu.name} has no {plan.precision}"
    param_dtype = plan.param_dtype if fallback == "bf16" else "fp32"
    return plan.revise(reason, precision=fallback, param_dtype=param_dtype)


def shardings_for(settings: TrainingConfig, hardware: Hardware) -> list[str]:
    """The possible shardings besides ddp: none for images and quantized weights."""
    if hardware.world_size == 1 or not isinstance(settings, TrainableConfig) or settings.quantization != "none":
        return []
    return ["fsdp"] if hardware.nodes == 1 or hardware.per_node == 1 else ["hsdp", "fsdp"]


def sharding_reason(requested: StagePlan, chosen: StagePlan, required_bytes: float, hardware: Hardware) -> str:
    """One line with the sharding and its reason; `required_bytes` are those of ddp."""
    budget = f"{required_bytes / 2**30:.1f} GiB of the {hardware.gpu.memory / 2**30:.1f} of {hardware.gpu.name}"
    if chosen.sharding == "ddp":
        return f"ddp: each of {hardware.world_size} devices holds a copy, {budget}"
    split = f"split over {hardware.world_size} GPUs"
    if chosen.sharding == "hsdp":
        split = f"split over the {hardware.per_node} GPUs of each of {hardware.nodes} machines"
    reason = f"a copy on each GPU would take {budget}; the weights are {split}"
    return f"{chosen.sharding} instead of {requested.sharding}: {reason}"


def link_line(time: StepTime, hardware: Hardware) -> str:
    """The link that is assumed between nodes, and what waiting for it costs."""
    speedup = hardware.world_size * (1 - time.communication / time.seconds)
    link = f"{hardware.network_bandwidth * 8 / 1e9:g} Gbit/s between nodes is assumed"
    waiting = f"{time.communication:.3g} s of each step of {time.seconds:.3g} s wait for it"
    return f"{link}: {waiting}, so {hardware.world_size} GPUs do the work of {speedup:.1f} without a network"


def change_lines(requested: StagePlan, chosen: StagePlan, hardware: Hardware) -> tuple[str, ...]:
    """What differs from the requested plan, a line each."""
    lines = []
    budget = f"{hardware.gpu.memory / 2**30:.0f} GiB of {hardware.gpu.name}"
    if requested.micro_batch_size != chosen.micro_batch_size:
        lines.append(
            f"micro-batch {chosen.micro_batch_size} × {chosen.gradient_accumulation_steps} accumulation "
            f"instead of {requested.micro_batch_size} × {requested.gradient_accumulation_steps}, for the {budget}; "
            f"the batch of {chosen.global_batch_size} is kept"
        )
    if requested.gradient_checkpointing != chosen.gradient_checkpointing:
        lines.append(f"{CHECKPOINTING_TEXT[chosen.gradient_checkpointing]}, for the {budget}")
    if requested.cuda_graphs != chosen.cuda_graphs:
        lines.append(f"steps are not captured as CUDA graphs, for the {budget} (cuda_graphs)")
    return tuple(lines)


FILL_WITH_PADDING = 0.93
"""Fraction of positions that are not padding with length-grouped batches, measured on short answers."""


@dataclass(frozen=True)
class StageEstimate:
    """The prediction of one stage on one hardware."""

    plan: StagePlan
    """Batch, steps, precision and sharding, with reasons."""
    hardware: Hardware
    """The hardware."""
    trainable: TrainableSummary
    """Trainable parameters."""
    memory: MemoryEstimate
    """Peak memory of one GPU."""
    time: StepTime
    """Seconds of a step."""
    fits: bool
    """Whether it fits the GPU memory."""
    alternatives: tuple[str, ...]
    """Changes that would fit, if it does not."""
    relative_error: float
    """Expected error of the predicted rate, as a fraction."""
    basis: str
    """What the coefficients were fitted to."""
    price: float | None
    """Dollars per GPU-hour."""
    steps_known: bool
    """Whether the number of steps is known, from rows or max_steps."""
    compile_seconds: int = 0
    """What compiling the layers would take."""

    @property
    def seconds(self) -> float | None:
        """Seconds of all steps, and of compiling."""
        is_compiled = self.plan.torch_compile and self.hardware.gpu.name != "CPU"
        return self.time.seconds * self.plan.steps + self.compile_seconds * is_compiled if self.steps_known else None

    @property
    def gpu_hours(self) -> float | None:
        """Hours × GPUs."""
        return None if self.seconds is None else self.seconds / 3600 * self.hardware.world_size

    @property
    def cost(self) -> float | None:
        """Dollars for all GPU-hours."""
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    def as_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        gpu = self.hardware.gpu
        return {
            "on": str(self.hardware),
            "trained_parameters": self.trainable.trained,
            "parameters": self.trainable.total,
            "plan": {name: value for name, value in self.plan.as_json().items() if name != "prediction"},
            "fits": self.fits,
            "would_fit": list(self.alternatives),
            "memory": {**self.memory.as_json(), "card_bytes": round(gpu.memory)},
            "step_seconds": round(self.time.seconds, 5),
            "tokens_per_second": round(self.time.tokens_per_second, 1),
            "mfu": round(self.time.flops / self.time.seconds / max(gpu.bf16, gpu.fp16), 4),
            "bottleneck": self.time.bottleneck,
            "hours": _rounded(self.seconds and self.seconds / 3600, 4),
            "gpu_hours": _rounded(self.gpu_hours, 4),
            "cost": _rounded(self.cost, 2),
            "price_per_gpu_hour": self.price,
            "relative_error": round(self.relative_error, 3),
            "basis": self.basis,
        }

    def prediction(self) -> dict[str, Any]:
        """What a run records, to compare with what it measures."""
        return {
            "memory": self.memory.as_json(),
            "tokens_per_second": round(self.time.tokens_per_second, 1),
            "step_seconds": round(self.time.seconds, 5),
            "seconds": _rounded(self.seconds, 2),
            "relative_error": round(self.relative_error, 3),
            "basis": self.basis,
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def trainable_of(shape: ModelShape, settings: TrainingConfig) -> TrainableSummary:
    """Trainable parameters of a stage."""
    if isinstance(shape, DecoderShape):
        assert isinstance(settings, TrainableConfig)
        return count_trainable(shape, settings)
    return TrainableSummary(shape.parameters, shape.parameters, 0, 0, True, False, False)


def compile_seconds(shape: ModelShape, trainable: TrainableSummary, plan: StagePlan) -> int:
    """What torch.compile takes for the layers of a model: each kind by itself, trained and frozen ones apart."""
    kinds = shape.layer_kinds if isinstance(shape, DecoderShape) else 1
    has_both = 0 < trainable.trained_layers < trainable.backward_layers
    seconds = COMPILE_SECONDS + COMPILE_SECONDS_OF_OTHERS * (kinds * (1 + has_both) - 1)
    return round(seconds * (COMPILE_RECOMPUTED if plan.gradient_checkpointing is True else 1))


def num_cached_layers(shape: ModelShape, settings: TrainingConfig) -> int:
    """Frozen layers whose output is computed once."""
    caches_layers = isinstance(settings, ReuseConfig) and settings.cache_frozen_layers != "off"
    if not caches_layers or not isinstance(shape, DecoderShape):
        return 0
    trainable = trainable_of(shape, settings)
    return 0 if trainable.embeddings else shape.num_hidden_layers - trainable.backward_layers


def uses_cuda_graphs(setting: str, trained_parameters: int, plan: StagePlan, on_gpu: bool) -> bool:
    """Whether the engine replays its steps as CUDA graphs."""
    if not plan.cuda_graphs or not on_gpu or plan.world_size > 1 or plan.precision == "fp16" or plan.sharding != "ddp":
        return False
    return trained_parameters < AUTO_GRAPHS_MAX_PARAMS if setting == "auto" else setting == "always"


def workload_of(
    shape: ModelShape, settings: TrainingConfig, plan: StagePlan, rows: RowStats, hardware: Hardware
) -> StepWorkload:
    """The workload of a planned stage, with rows of the maximum length."""
    on_gpu, trainable = hardware.gpu.name != "CPU", trainable_of(shape, settings)
    shared = isinstance(settings, PairConfig) and settings.share_prompt
    half_precision = on_gpu and plan.precision != "fp32"
    trained_fraction = rows.trained_fraction
    if half_precision and getattr(settings, "packing", False):
        trained_fraction = math.ceil(trained_fraction * TARGET_STEPS) / TARGET_STEPS
    return StepWorkload(
        shape=shape,
        trainable=trainable,
        micro_batch_size=plan.micro_batch_size,
        seq_len=rows.max_length,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        trained_fraction=trained_fraction,
        eval_micro_batch_size=plan.eval_micro_batch_size if settings.spec.modality == "text" else 0,
        precision=plan.precision,
        tf32=plan.tf32,
        rowwise_fp8=plan.precision == "fp8" and plan.fp8_scaling == "rowwise",
        param_dtype=plan.param_dtype,
        optimizer=settings,
        checkpointing=plan.gradient_checkpointing,
        compiled=plan.torch_compile or (on_gpu and plan.precision == "fp8"),
        on_gpu=on_gpu,
        # padded rows have a new shape almost every step, which is not captured
        cuda_graphs=uses_cuda_graphs(settings.cuda_graphs, trainable.trained, plan, on_gpu)
        and (plan.padding_free or rows.mean_length >= rows.max_length or not rows.lengths),
        graph_shapes=MAX_GRAPH_SHAPES if rows.mean_length < rows.max_length else 1,
        eval_seq_len=rows.max_length,
        cached_layers=num_cached_layers(shape, settings),
        masked=shared and not half_precision,
        shared_prompt=shared and half_precision,
        chunked_loss=not settings.spec.full_logits,
        quantization=settings.quantization if isinstance(settings, TrainableConfig) else "none",
        sharding=plan.sharding,
        world_size=plan.world_size,
        per_node=hardware.per_node,
        device_data_bytes=rows.device_bytes,
    )
