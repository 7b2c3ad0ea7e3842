"""Batch, steps and precision of one training stage, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from modelwright.errors import UsageError
from modelwright.plan.hardware import DeviceInfo
from modelwright.recipe.stage_specs import OPTIMIZERS, CheckpointingMode, RowStats, TrainingConfig

TARGET_STEPS = 16
"""Numbers of targets that packed rows of one length are padded to on a GPU, evenly from none to all of their tokens."""
MAX_EVAL_FRACTION = 0.05
"""Tokens of an evaluation beside those trained between two."""
EVAL_ROWS, MIN_EVAL_SAMPLES = 8, 256
"""Held-out rows at once, where neither recipe nor planner says; and rows that an evaluation takes in any case, where
there are so many: fewer give too noisy a loss."""

MIN_FP8_SPEEDUP = 1.05
"""fp8 must be at least this many times as fast as bf16: less is not worth the lost precision."""


@dataclass(frozen=True)
class StagePlan:
    """Every number the engine needs to train a stage; read-only: `revise` makes a new plan, and says why."""

    train_rows: int
    """Rows in one epoch (packed rows, where packing is on)."""
    total_samples: int
    """Rows over all epochs."""
    world_size: int
    """Number of ranks."""
    micro_batch_size: int
    """Rows per device and forward pass."""
    gradient_accumulation_steps: int
    """Micro-batches per device and step."""
    global_batch_size: int
    """Rows per step over all devices."""
    eval_micro_batch_size: int
    """Rows per device and forward pass of an evaluation."""
    steps: int
    """Optimizer steps of the stage."""
    warmup_steps: int
    """Steps of linear learning-rate warm-up."""
    decay_steps: int
    """Steps of learning-rate decay at the end, for warmup_stable_decay."""
    save_steps: int
    """Steps between checkpoints."""
    eval_steps: int
    """Steps between evaluations."""
    precision: str
    """Compute precision."""
    param_dtype: str
    """Dtype of the stored weights."""
    sharding: str
    """ddp, fsdp or hsdp."""
    learning_rate: float
    """Peak learning rate, scaled by the world size if the recipe asks for it."""
    deterministic: bool = True
    """Whether kernels are deterministic, so that the same command gives the same bits."""
    tf32: bool = False
    """Whether fp32 matmuls run on the tensor cores with 10 of 23 mantissa bits."""
    gradient_checkpointing: CheckpointingMode = False
    """Activation checkpointing: none, selective (matmuls and attention are kept) or full."""
    torch_compile: bool = False
    """Whether the layers are compiled."""
    cuda_graphs: bool = True
    """Whether steps may be captured as CUDA graphs, where the setting and the hardware allow it."""
    padding_free: bool = False
    """Whether the rows of a micro-batch stand end to end, without padding."""
    fp8_scaling: str = "tensorwise"
    """Granularity of fp8 scales: one per matrix (tensorwise) or one per row (rowwise)."""
    reasons: tuple[str, ...] = ()
    """What was chosen or changed, and why, a line each."""
    prediction: dict[str, Any] | None = None
    """Predicted memory and speed, compared with the measured ones after training."""

    @property
    def batch_arithmetic(self) -> str:
        """The global batch as a product of its factors."""
        devices = f"{self.world_size} device{'s' * (self.world_size > 1)}"
        per_device = f"{self.micro_batch_size} per device × {devices}"
        return f"batch {self.global_batch_size} = {per_device} × {self.gradient_accumulation_steps} accumulation"

    def as_json(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {**asdict(self), "batch_arithmetic": self.batch_arithmetic}

    def revise(self, *reasons: str, **changes: Any) -> StagePlan:
        """A new plan with these changes and the reasons for them; nothing else in the package changes a plan."""
        return replace(self, reasons=(*self.reasons, *reasons), **changes)

    def with_micro_batch(self, max_size: int) -> StagePlan:
        """The same global batch in micro-batches of at most this many rows."""
        size, accumulation = solve_batch(self.global_batch_size, max_size, self.world_size)
        return self.revise(micro_batch_size=size, gradient_accumulation_steps=accumulation)

    def halve_micro_batch(self, training: bool) -> StagePlan | None:
        """The plan after a micro-batch of training or evaluation ran out of memory; None if it was one row."""
        size = self.micro_batch_size if training else self.eval_micro_batch_size
        if size == 1:
            return None
        if not training:
            reason = f"evaluation micro-batch {size} runs out of memory; {size // 2} from now on"
            return self.revise(reason, eval_micro_batch_size=size // 2)
        smaller = self.with_micro_batch(size // 2)
        return smaller.revise(f"micro-batch {size} runs out of memory; {smaller.batch_arithmetic} keeps the batch")

    def changes_from(self, previous: StagePlan) -> dict[str, Any]:
        """What differs from an earlier plan, for the journal: {name: {"from": …, "to": …}}."""
        before, after = previous.as_json(), self.as_json()
        changed = [name for name in after if after[name] != before[name] and name != "reasons"]
        return {name: {"from": before[name], "to": after[name]} for name in changed}


def _warnings(
    settings: TrainingConfig, device_info: DeviceInfo, warmup_steps: int, steps: int, learning_rate: float
) -> Iterator[str]:
    """Settings that train slowly or hardly at all."""
    if settings.precision == "bf16" and device_info.device == "cpu" and not device_info.fast_bf16:
        yield "bf16, as set, is many times slower than fp32 on this processor; precision: auto takes fp32"
    if warmup_steps > steps:
        reached = f"{learning_rate * steps / warmup_steps:.1e} of {learning_rate:g}"
        yield f"warmup_steps {warmup_steps} are more than {steps} steps: the learning rate ends at {reached}"


def plan_stage(
    settings: TrainingConfig,
    train_rows: int | None,
    world_size: int,
    device_info: DeviceInfo,
    resumed_global_batch: int | None = None,
    caches_layers: bool | None = None,
) -> StagePlan:
    """Plan a stage; a resumed run keeps its global batch at any world size. train_rows None: they were not counted."""
    reasons: list[str] = []
    batch_layout = _batch_layout(settings, world_size, resumed_global_batch, reasons)
    micro_batch_size, accumulation, global_batch_size = batch_layout
    total_samples = max(1, round(settings.num_train_epochs * (train_rows or 1)))
    if settings.max_steps is not None:
        total_samples = settings.max_steps * global_batch_size
    steps = -(-total_samples // global_batch_size)
    if train_rows is not None and global_batch_size > train_rows:
        repeated = "rows come several times in one step"
        reasons.append(f"a step takes {global_batch_size} rows and there are {train_rows}: {repeated}")
    learning_rate = _scale_learning_rate(settings, global_batch_size, reasons)
    precision, reason = choose_precision(device_info) if settings.precision == "auto" else (settings.precision, "")
    param_dtype = choose_param_dtype(settings, precision, device_info)
    if reason:
        reasons.append(reason + ("; bf16 weights with exact fp32 masters" if param_dtype == "bf16" else ""))
    tf32, reason = choose_tf32(settings.tf32, precision, device_info)
    if reason:
        reasons.append(reason)
    reasons += [f"{name} has no effect with optim {settings.optim}" for name in settings.ignored_settings()]
    warmup_steps = settings.warmup_steps.resolve(steps)
    reasons += _warnings(settings, device_info, warmup_steps, steps if train_rows else warmup_steps, learning_rate)
    is_text, is_gpu = settings.spec.modality == "text", device_info.device == "cuda"
    checkpointing = settings.gradient_checkpointing if settings.gradient_checkpointing != "auto" else False
    if checkpointing and not is_text:
        reasons.append("gradient_checkpointing has no effect here: image stages save all activations")
    return StagePlan(
        train_rows=train_rows or 1,
        total_samples=total_samples,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        global_batch_size=global_batch_size,
        eval_micro_batch_size=EVAL_ROWS if (rows := settings.per_device_eval_batch_size) == "auto" else rows,
        steps=steps,
        warmup_steps=warmup_steps,
        decay_steps=settings.decay_steps.resolve(steps),
        save_steps=max(1, settings.save_steps.resolve(steps)),
        eval_steps=max(1, settings.eval_steps.resolve(steps)) if settings.eval_steps else steps,
        precision=precision,
        param_dtype=param_dtype,
        sharding="ddp" if settings.distributed_strategy == "auto" or world_size == 1 else settings.distributed_strategy,
        learning_rate=learning_rate,
        deterministic=settings.deterministic,
        tf32=tf32,
        gradient_checkpointing=checkpointing if is_text else False,
        torch_compile=settings.torch_compile is True,  # auto: decided with the time of a step
        padding_free=is_padding_free(settings, device_info.fast_bf16 and is_gpu and precision != "fp32", caches_layers),
        fp8_scaling=choose_fp8_scalings(settings)[0],
        reasons=tuple(reasons),
    )


def is_padding_free(settings: Any, has_varlen: bool, caches_layers: bool | None = None) -> bool:
    """Whether rows are laid end to end, as far as the settings decide it: the task asks the model too.

    has_varlen: whether attention runs in half precision on a GPU that has varlen kernels, Ampere or later.
    caches_layers: whether the output of frozen layers is cached; None: as in most models that are trained partly.
    """
    setting = getattr(settings, "padding_free", False)
    if not setting or getattr(settings, "packing", False):
        return False
    if settings.trainable.is_partial if caches_layers is None else caches_layers:
        return False
    return setting is True or (has_varlen and getattr(settings, "share_prompt", True))


@dataclass(frozen=True)
class BatchShapes:
    """The sizes that flat micro-batches of so many rows are rounded up to, so that few shapes occur.

    A compiled or captured step is made for one shape: with 32 rows of 217 tokens, a new length every step, eight sizes
    hold 99 % of the batches and waste 2 to 3 % of the tokens.
    """

    multiple: int
    """Of the number of tokens."""
    target_fraction: float
    """Trained targets of a size as a fraction of its tokens."""

    def size(self, tokens: int, targets: int) -> tuple[int, int]:
        """Tokens and targets of the smallest size that holds these, with one token of padding at least."""
        number = max(-(-(tokens + 1) // self.multiple), 1)
        while (capacity := self._targets(number * self.multiple)) < targets:
            number += 1
        return number * self.multiple, capacity

    def _targets(self, tokens: int) -> int:
        return -(-int(tokens * self.target_fraction) // TARGET_MULTIPLE) * TARGET_MULTIPLE


TOKEN_MULTIPLE, TARGET_MULTIPLE = 64, 16
USUAL_SHAPES, DRAWN_BATCHES = 8, 512


def batch_shapes(lengths: Sequence[int], targets: Sequence[int], rows: int, prefix_length: int = 0) -> BatchShapes:
    """The sizes for micro-batches of so many rows, from batches drawn among rows of these lengths and targets.

    prefix_length: tokens that the rows share, and that a micro-batch has once.
    """
    import numpy as np

    chosen = draw_rows(len(lengths), rows)
    tokens, trained = (np.asarray(each)[chosen].sum(1) for each in (lengths, targets))
    tokens = tokens - (rows - 1) * prefix_length
    low, high = np.quantile(tokens, [0.005, 0.995])
    multiple = TOKEN_MULTIPLE * max(1, math.ceil((high - low) / USUAL_SHAPES / TOKEN_MULTIPLE))
    rounded = np.ceil((tokens + 1) / multiple) * multiple
    return BatchShapes(multiple, max(1e-3, float(np.quantile(trained / rounded, 0.95))))


def draw_rows(count: int, rows: int) -> Any:
    """Numbers of the rows in batches drawn at random, always the same ones: [batches, rows] int64."""
    import numpy as np

    return np.random.default_rng(0).integers(0, count, (DRAWN_BATCHES, rows))


def draw_lengths(rows: RowStats, size: int, accumulation: int, padding_free: bool) -> tuple[int, int, float]:
    """Tokens of a row in the largest and the mean of drawn micro-batches, and the fraction that is not padding.

    A step's rows are sorted by length, so that similar ones are padded together.
    """
    import numpy as np

    lengths = np.asarray(rows.lengths)
    drawn = np.sort(lengths[draw_rows(len(lengths), size * accumulation)], axis=1)
    steps = drawn.sum(1)
    if rows.prefix_length or padding_free:
        tokens = (steps - drawn.shape[1] * rows.prefix_length)[:, None] / accumulation + rows.prefix_length
        multiple = batch_shapes(rows.lengths, rows.lengths, size).multiple if padding_free else 1
        tokens = np.ceil((tokens + padding_free) / multiple) * multiple
    else:
        tokens = drawn.reshape(len(drawn), accumulation, size).max(2) * size
    fill_fraction = float(steps.mean() / (tokens.mean() * accumulation))
    return max(1, round(tokens.max() / size)), max(1, round(tokens.mean() / size)), fill_fraction


def eval_samples(max_samples: int | None, plan: StagePlan, train_tokens: int, held_out: tuple[int, int]) -> int:
    """Held-out rows per evaluation, given the tokens of an epoch and the held-out (rows, tokens); 0 tokens: all rows.

    A count, not a time: the metrics of a gate must not depend on the machine.
    """
    rows, tokens = held_out
    if max_samples is None and tokens:
        tokens_between = train_tokens * plan.eval_steps * plan.global_batch_size / plan.train_rows
        max_samples = max(MIN_EVAL_SAMPLES, int(MAX_EVAL_FRACTION * tokens_between * rows / tokens))
    return min(rows, max_samples or rows)


def _batch_layout(
    settings: TrainingConfig, world_size: int, resumed_global_batch: int | None, reasons: list[str]
) -> tuple[int, int, int]:
    """Micro-batch size, accumulation steps and global batch; what differs from the recipe is added to `reasons`."""
    size, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    batch = resumed_global_batch or settings.global_batch_size
    if not batch or batch == size * accumulation * world_size:
        return size, accumulation, size * accumulation * world_size
    recipe_size, (size, accumulation) = size, solve_batch(batch, size, world_size)
    source = "this run's earlier start" if resumed_global_batch else "global_batch_size"
    change = f" instead of {recipe_size}" if size != recipe_size else ""
    reasons.append(f"{size} rows per device{change}, {accumulation} times, keep the batch of {batch} ({source})")
    slots = size * accumulation * world_size
    if slots > batch:
        empty = f"{slots - batch} of {slots} row slots per step are empty"
        reasons.append(f"{empty}: {world_size} do not divide {batch}")
    return size, accumulation, batch


def _scale_learning_rate(settings: TrainingConfig, global_batch_size: int, reasons: list[str]) -> float:
    if not settings.scale_lr_by_world_size:
        return settings.learning_rate
    # by the batch, not by the current world size: a run resumed on fewer devices keeps its batch and learning rate
    devices = global_batch_size / (settings.per_device_train_batch_size * settings.gradient_accumulation_steps)
    rate = settings.learning_rate * devices
    scaled = f"learning rate {rate:.3g} = {settings.learning_rate:.3g} × {devices:g} devices"
    reasons.append(f"{scaled} (scale_lr_by_world_size)")
    return rate


def solve_batch(global_batch_size: int, max_micro_batch_size: int, world_size: int) -> tuple[int, int]:
    """Micro-batch size and accumulation steps for a global batch: the largest size that divides the rows per device."""
    rows_per_device = -(-global_batch_size // world_size)
    largest = min(max_micro_batch_size, rows_per_device)
    size = next(size for size in range(largest, 0, -1) if rows_per_device % size == 0)
    return size, rows_per_device // size


def choose_param_dtype(settings: TrainingConfig, precision: str, device_info: DeviceInfo) -> str:
    """bf16 weights with exact fp32 masters for text in bf16 or fp8 on a GPU; else fp32, which batch norm needs."""
    suits = precision in ("bf16", "fp8") and OPTIMIZERS[settings.optim].bf16_params and settings.spec.modality == "text"
    if settings.param_dtype == "bf16" and not suits:
        actual = f"precision {precision} and optim {settings.optim}"
        suited = " or ".join(name for name, spec in OPTIMIZERS.items() if spec.bf16_params)
        raise UsageError(f"param_dtype: bf16 wants precision bf16 or fp8 with optim {suited}; here is {actual}")
    if settings.param_dtype == "auto":
        return "bf16" if suits and device_info.device == "cuda" else "fp32"
    return settings.param_dtype


def choose_fp8_scalings(settings: TrainingConfig) -> tuple[str, ...]:
    """The fp8 scalings to try, fastest first."""
    return settings.spec.fp8_scalings if settings.fp8_scaling == "auto" else (settings.fp8_scaling,)


def choose_tf32(setting: bool | str, precision: str, device_info: DeviceInfo) -> tuple[bool, str]:
    """Whether fp32 matmuls use tf32, with a line if they do, or if tf32 was requested and is not available."""
    if setting is False or (setting == "auto" and (precision != "fp32" or not device_info.has_tf32)):
        return False, ""
    if precision != "fp32":
        return False, f"tf32: true has no effect here: it is for precision fp32, not {precision}"
    if not device_info.has_tf32:
        return False, f"tf32: true has no effect here: {device_info.name} has no tf32"
    return True, "fp32 matmuls use tf32 (10 of 23 mantissa bits); tf32: false keeps all"


def choose_precision(device_info: DeviceInfo) -> tuple[str, str]:
    """The fastest compute precision of this device; the dtype of the weights is chosen separately."""
    if device_info.fast_bf16:
        return "bf16", f"bf16: fast on {device_info.name}"
    if device_info.device == "cuda":
        return "fp16", f"fp16 with a loss scaler: {device_info.name} has no fast bf16"
    return "fp32", "fp32: this processor computes bf16 no faster"
