"""Batch, steps and precision of one training stage, each with its reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from modelwright.errors import UsageError
from modelwright.plan.hardware import DeviceInfo
from modelwright.recipe.schema import CheckpointingMode, PreferenceConfig, TrainableConfig, TrainingConfig


@dataclass(frozen=True)
class StagePlan:
    """Every number the engine needs, none of which a person had to write."""

    train_rows: int
    """Rows in one epoch (packed rows, where packing is on)."""
    total_samples: int
    """Rows over all epochs."""
    world_size: int
    """Devices that share the work."""
    micro_batch_size: int
    """Micro-batch size per device."""
    gradient_accumulation_steps: int
    """Times it does so in a step."""
    global_batch_size: int
    """Rows in a step over all devices."""
    steps: int
    """Steps in the stage."""
    warmup_steps: int
    """Steps of rising learning rate."""
    decay_steps: int
    """Steps of falling learning rate at the end, for warmup_stable_decay."""
    save_steps: int
    """Steps between checkpoints."""
    eval_steps: int
    """Steps between measurements."""
    precision: str
    """What the arithmetic is done in."""
    param_dtype: str
    """What the weights are kept in."""
    sharding: str
    """How devices share the model."""
    learning_rate: float
    """Peak learning rate, scaled where the recipe asks for it."""
    tf32: bool = False
    """Whether fp32 numbers are multiplied on the tensor cores, with 10 of their 23 bits."""
    gradient_checkpointing: CheckpointingMode = False
    """Whether activations are computed again in the backward pass: all, or all but products and attention."""
    fp8_scaling: str = "tensorwise"
    """What has a scale of its own where fp8 is computed in: each matrix, or each of its rows."""
    reasons: tuple[str, ...] = ()
    """What was chosen or changed, and why."""
    prediction: dict[str, Any] | None = None
    """Memory and speed as foreseen, to be held against what is measured."""

    @property
    def batch_arithmetic(self) -> str:
        """The batch as a sum a person can check."""
        devices = f"{self.world_size} device{'s' * (self.world_size > 1)}"
        return f"batch {self.global_batch_size} = {self.micro_batch_size} per device × {devices} × {self.gradient_accumulation_steps} accumulation"

    def as_json(self) -> dict[str, Any]:
        """The plan for plan.json."""
        return {**asdict(self), "batch_arithmetic": self.batch_arithmetic}


def plan_stage(
    settings: TrainingConfig,
    train_rows: int,
    world_size: int,
    device_info: DeviceInfo,
    resumed_global_batch: int | None = None,
) -> StagePlan:
    """Plan a stage; a batch kept from an earlier start of the run holds at any world size."""
    reasons: list[str] = []
    micro_batch_size, gradient_accumulation_steps = (
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
    )
    wanted_batch = resumed_global_batch or settings.global_batch_size
    if wanted_batch and wanted_batch != micro_batch_size * gradient_accumulation_steps * world_size:
        recipe_micro_batch, (micro_batch_size, gradient_accumulation_steps) = (
            micro_batch_size,
            solve_batch(wanted_batch, micro_batch_size, world_size),
        )
        source = "this run's earlier start" if resumed_global_batch else "global_batch_size"
        rows_at_once = f"{micro_batch_size} rows per device" + (
            f" instead of {recipe_micro_batch}" if micro_batch_size != recipe_micro_batch else ""
        )
        reasons.append(
            f"{rows_at_once}, {gradient_accumulation_steps} times, keep the batch of {wanted_batch} ({source})"
        )
        if empty_slots := micro_batch_size * gradient_accumulation_steps * world_size - wanted_batch:
            reasons.append(
                f"{empty_slots} of {wanted_batch + empty_slots} row slots per step are empty: {world_size} do not divide {wanted_batch}"
            )
    global_batch_size = wanted_batch or micro_batch_size * gradient_accumulation_steps * world_size
    total_samples = max(1, round(settings.num_train_epochs * train_rows))
    if settings.max_steps is not None:
        total_samples = settings.max_steps * global_batch_size
    steps = -(-total_samples // global_batch_size)
    if global_batch_size > train_rows:
        reasons.append(
            f"a step takes {global_batch_size} rows and there are {train_rows}: rows come several times in one step"
        )
    learning_rate = settings.learning_rate
    if settings.scale_lr_by_world_size:
        # by the batch, not by today's devices: a run that goes on with fewer of them keeps batch and rate
        batch_devices = global_batch_size / (
            settings.per_device_train_batch_size * settings.gradient_accumulation_steps
        )
        learning_rate *= batch_devices
        scaled = f"learning rate {learning_rate:.3g} = {settings.learning_rate:.3g} × {batch_devices:g} devices"
        reasons.append(f"{scaled} (scale_lr_by_world_size)")
    precision, reason = choose_precision(device_info) if settings.precision == "auto" else (settings.precision, "")
    param_dtype = choose_param_dtype(settings, precision, device_info)
    if reason:
        reasons.append(reason + ("; weights are kept in bf16 with exact masters" if param_dtype == "bf16" else ""))
    tf32, reason = choose_tf32(settings.tf32, precision, device_info)
    if reason:
        reasons.append(reason)
    if settings.gradient_checkpointing and not isinstance(settings, TrainableConfig):
        reasons.append("gradient_checkpointing has no effect here: images are trained with all activations kept")
    return StagePlan(
        train_rows=train_rows,
        total_samples=total_samples,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        global_batch_size=global_batch_size,
        steps=steps,
        warmup_steps=settings.warmup_steps.resolve(steps),
        decay_steps=settings.decay_steps.resolve(steps),
        save_steps=max(1, settings.save_steps.resolve(steps)),
        eval_steps=max(1, settings.eval_steps.resolve(steps)) if settings.eval_steps else steps,
        precision=precision,
        param_dtype=param_dtype,
        sharding="ddp" if settings.distributed_strategy == "auto" else settings.distributed_strategy,
        learning_rate=learning_rate,
        tf32=tf32,
        gradient_checkpointing=settings.gradient_checkpointing if isinstance(settings, TrainableConfig) else False,
        fp8_scaling=choose_fp8_scalings(settings)[0],
        reasons=tuple(reasons),
    )


def solve_batch(global_batch_size: int, max_micro_batch_size: int, world_size: int) -> tuple[int, int]:
    """Rows per device and accumulation for a batch: the most rows at once, up to per_device, that come out even."""
    rows_per_device = -(-global_batch_size // world_size)
    micro_batch_size = next(
        count for count in range(min(max_micro_batch_size, rows_per_device), 0, -1) if rows_per_device % count == 0
    )
    return micro_batch_size, rows_per_device // micro_batch_size


def choose_param_dtype(settings: TrainingConfig, precision: str, device_info: DeviceInfo) -> str:
    """bf16 weights with exact masters where a GPU computes text in bf16; else fp32, as batch norms want it."""
    suits = precision in ("bf16", "fp8") and settings.optim == "adamw_torch" and isinstance(settings, TrainableConfig)
    if settings.param_dtype == "bf16" and not suits:
        actual = f"precision {precision} and optim {settings.optim}"
        raise UsageError(f"param_dtype: bf16 wants precision bf16 or fp8 with optim adamw_torch; here is {actual}")
    if settings.param_dtype == "auto":
        return "bf16" if suits and device_info.device == "cuda" else "fp32"
    return settings.param_dtype


def choose_fp8_scalings(settings: TrainingConfig) -> tuple[str, ...]:
    """What has a scale of its own in fp8: the fastest way first, and what may be tried after it.

    Pairs have a scale for each row and nothing else: what is said of one then does not hang on the rows beside it, and
    its reference was measured in another batch.
    """
    if settings.fp8_scaling != "auto":
        return (settings.fp8_scaling,)
    return ("rowwise",) if isinstance(settings, PreferenceConfig) else ("tensorwise", "rowwise")


def choose_tf32(setting: bool | str, precision: str, device_info: DeviceInfo) -> tuple[bool, str]:
    """Whether fp32 products go to the tensor cores, with a line where that is so, or was wished and cannot be."""
    if setting is False or (setting == "auto" and (precision != "fp32" or not device_info.has_tf32)):
        return False, ""
    if precision != "fp32":
        return False, f"tf32: true has no effect here: it is for precision fp32, and this computes in {precision}"
    if not device_info.has_tf32:
        return False, f"tf32: true has no effect here: {device_info.name} has no tf32, and multiplies fp32 exactly"
    return True, "fp32 products on the tensor cores (tf32), which keep 10 of 23 bits; tf32: false keeps all"


def choose_precision(device_info: DeviceInfo) -> tuple[str, str]:
    """The fastest arithmetic that this device does well; what the weights are kept in is chosen apart."""
    if device_info.fast_bf16:
        return "bf16", f"bf16 arithmetic: fast on {device_info.name}"
    if device_info.device == "cuda":
        return "fp16", f"fp16 arithmetic with a loss scaler: {device_info.name} has no fast bf16"
    return "fp32", "fp32: this processor multiplies bf16 no faster"
