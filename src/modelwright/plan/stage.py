"""The arithmetic of one training stage: batch, steps, precision, each with its reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from modelwright.errors import UsageError
from modelwright.plan.facts import Facts
from modelwright.recipe.training import Checkpointing, Parts, Preference, Training


@dataclass(frozen=True)
class StagePlan:
    """Every number the engine needs, none of which a person had to write."""

    rows: int
    """Rows in one epoch (packed rows, where packing is on)."""
    total_rows: int
    """Rows over all epochs."""
    world: int
    """Devices that share the work."""
    per_device: int
    """Rows a device takes at once."""
    accumulation: int
    """Times it does so in a step."""
    global_batch: int
    """Rows in a step over all devices."""
    steps: int
    """Steps in the stage."""
    warmup: int
    """Steps of rising learning rate."""
    decay: int
    """Steps of falling learning rate at the end, for warmup_stable_decay."""
    save_every: int
    """Steps between checkpoints."""
    eval_every: int
    """Steps between measurements."""
    precision: str
    """What the arithmetic is done in."""
    weights: str
    """What the weights are kept in."""
    sharding: str
    """How devices share the model."""
    learning_rate: float
    """Peak learning rate, scaled where the recipe asks for it."""
    tf32: bool = False
    """Whether fp32 numbers are multiplied on the tensor cores, with 10 of their 23 bits."""
    gradient_checkpointing: Checkpointing = False
    """Whether activations are computed again in the backward pass: all, or all but products and attention."""
    scaling: str = "tensorwise"
    """What has a scale of its own where fp8 is computed in: each matrix, or each of its rows."""
    reasons: tuple[str, ...] = ()
    """What was chosen or changed, and why."""
    predicted: dict[str, Any] | None = None
    """Memory and speed as foreseen, to be held against what is measured."""

    @property
    def arithmetic(self) -> str:
        """The batch as a sum a person can check."""
        devices = f"{self.world} device{'s' * (self.world > 1)}"
        return (
            f"batch {self.global_batch} = {self.per_device} per device × {devices} × {self.accumulation} accumulation"
        )

    def as_json(self) -> dict[str, Any]:
        """The plan for plan.json."""
        return {**asdict(self), "arithmetic": self.arithmetic}


def plan_stage(settings: Training, rows: int, world: int, facts: Facts, kept_batch: int | None = None) -> StagePlan:
    """Plan a stage; a batch kept from an earlier start of the run holds at any world size."""
    reasons: list[str] = []
    per_device, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    wished = kept_batch or settings.global_batch_size
    if wished and wished != per_device * accumulation * world:
        asked, (per_device, accumulation) = per_device, solve(wished, per_device, world)
        source = "this run's earlier start" if kept_batch else "global_batch_size"
        rows_at_once = f"{per_device} rows per device" + (f" instead of {asked}" if per_device != asked else "")
        reasons.append(f"{rows_at_once}, {accumulation} times, keep the batch of {wished} ({source})")
        if empty := per_device * accumulation * world - wished:
            reasons.append(
                f"{empty} of {wished + empty} places in each step stay empty: {world} do not divide {wished}"
            )
    batch = wished or per_device * accumulation * world
    total = max(1, round(settings.num_train_epochs * rows))
    if settings.max_steps is not None:
        total = settings.max_steps * batch
    steps = -(-total // batch)
    if batch > rows:
        reasons.append(f"a step takes {batch} rows and there are {rows}: rows come several times in one step")
    learning_rate = settings.learning_rate
    if settings.scale_learning_rate_by_world:
        # by the batch, not by today's devices: a run that goes on with fewer of them keeps batch and rate
        made_for = batch / (settings.per_device_train_batch_size * settings.gradient_accumulation_steps)
        learning_rate *= made_for
        scaled = f"learning rate {learning_rate:.3g} = {settings.learning_rate:.3g} × {made_for:g} devices"
        reasons.append(f"{scaled} (scale_learning_rate_by_world)")
    precision, reason = choose_precision(facts) if settings.precision == "auto" else (settings.precision, "")
    weights = choose_weights(settings, precision, facts)
    if reason:
        reasons.append(reason + ("; weights are kept in bf16 with exact masters" if weights == "bf16" else ""))
    tf32, reason = choose_products(settings.tf32, precision, facts)
    if reason:
        reasons.append(reason)
    if settings.gradient_checkpointing and not isinstance(settings, Parts):
        reasons.append("gradient_checkpointing changes nothing here: images are trained with all activations kept")
    return StagePlan(
        rows=rows,
        total_rows=total,
        world=world,
        per_device=per_device,
        accumulation=accumulation,
        global_batch=batch,
        steps=steps,
        warmup=settings.warmup_steps.of(steps),
        decay=settings.decay_steps.of(steps),
        save_every=max(1, settings.save_steps.of(steps)),
        eval_every=max(1, settings.eval_steps.of(steps)) if settings.eval_steps else steps,
        precision=precision,
        weights=weights,
        sharding="ddp" if settings.sharding == "auto" else settings.sharding,
        learning_rate=learning_rate,
        tf32=tf32,
        gradient_checkpointing=settings.gradient_checkpointing if isinstance(settings, Parts) else False,
        scaling=choose_scalings(settings)[0],
        reasons=tuple(reasons),
    )


def solve(batch: int, per_device: int, world: int) -> tuple[int, int]:
    """Rows per device and accumulation for a batch: the most rows at once, up to per_device, that come out even."""
    share = -(-batch // world)
    rows = next(count for count in range(min(per_device, share), 0, -1) if share % count == 0)
    return rows, share // rows


def choose_weights(settings: Training, precision: str, facts: Facts) -> str:
    """bf16 weights with exact masters where a GPU computes text in bf16; else fp32, as batch norms want it."""
    suits = precision in ("bf16", "fp8") and settings.optim == "adamw_torch" and isinstance(settings, Parts)
    if settings.weights == "bf16" and not suits:
        found = f"precision {precision} and optim {settings.optim}"
        raise UsageError(f"weights: bf16 wants precision bf16 or fp8 with optim adamw_torch; here is {found}")
    if settings.weights == "auto":
        return "bf16" if suits and facts.device == "cuda" else "fp32"
    return settings.weights


def choose_scalings(settings: Training) -> tuple[str, ...]:
    """What has a scale of its own in fp8: the fastest way first, and what may be tried after it.

    Pairs have a scale for each row and nothing else: what is said of one then does not hang on the rows beside it, and
    its reference was measured in another batch.
    """
    if settings.fp8_scaling != "auto":
        return (settings.fp8_scaling,)
    return ("rowwise",) if isinstance(settings, Preference) else ("tensorwise", "rowwise")


def choose_products(wish: bool | str, precision: str, facts: Facts) -> tuple[bool, str]:
    """Whether fp32 products go to the tensor cores, with a line where that is so, or was wished and cannot be."""
    if wish is False or (wish == "auto" and (precision != "fp32" or not facts.has_tf32)):
        return False, ""
    if precision != "fp32":
        return False, f"tf32: true changes nothing here: it is for precision fp32, and this computes in {precision}"
    if not facts.has_tf32:
        return False, f"tf32: true changes nothing here: {facts.name} has no tf32, and multiplies fp32 exactly"
    return True, "fp32 products on the tensor cores (tf32), which keep 10 of 23 bits; tf32: false keeps all"


def choose_precision(facts: Facts) -> tuple[str, str]:
    """The fastest arithmetic that this device does well; what the weights are kept in is chosen apart."""
    if facts.fast_bf16:
        return "bf16", f"bf16 arithmetic: fast on {facts.name}"
    if facts.device == "cuda":
        return "fp16", f"fp16 arithmetic with a loss scaler: {facts.name} has no fast bf16"
    return "fp32", "fp32: this processor multiplies bf16 no faster"
