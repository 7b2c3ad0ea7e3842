"""Choose micro-batch, accumulation, checkpointing, sharding and precision for the cards that are there.

What a recipe asks for is kept where it fits. Where it does not, the global batch is kept and the fastest way that fits
is taken; each change is one line.
"""

from __future__ import annotations

from dataclasses import replace

from modelwright.errors import ModelError
from modelwright.plan.architecture import Shape, TextShape, VisionShape
from modelwright.plan.calibration import Calibration, calibration_for
from modelwright.plan.estimate import Estimate, Rows, estimate, moves_of, work_of
from modelwright.plan.gpus import GPUS, Gpu, Machines
from modelwright.plan.memory import Memory
from modelwright.plan.stage import StagePlan
from modelwright.plan.time import StepTime
from modelwright.recipe.training import Checkpointing, Parts, Trainable, Training

CHECKPOINTINGS: tuple[Checkpointing, ...] = (False, "selective", True)
"""From the fastest to the one that takes least memory."""
WORTH_SAYING = 1.05
"""How many times as fast it has to be with less computed again, for a line to say so."""
RECOMPUTED = {"selective": "selective gradient checkpointing: all but products and attention is computed again",
              True: "full gradient checkpointing: activations are computed again"}  # fmt: skip


def choose(plan: StagePlan, settings: Training, shape: Shape, rows: Rows, machines: Machines) -> Estimate:
    """The plan as it can run on these machines, with what it takes; an unfit one says what would fit."""
    calibration = calibration_for(machines.gpu)
    asked = for_card(plan, settings, machines.gpu)
    choice = _fastest(asked, settings, shape, rows, machines)
    fits = choice is not None
    chosen = choice or asked
    memory, time = _estimated(chosen, settings, shape, rows, machines, calibration)
    sure, why = calibration.sureness(machines.gpu)
    told = list(changes(asked, chosen, machines))
    if fits and chosen.gradient_checkpointing == asked.gradient_checkpointing:
        told += faster_with_less(chosen, settings, shape, rows, machines)
    if fits and settings.sharding == "auto" and machines.world > 1:
        copied = replace(chosen, sharding="ddp")
        copy, _ = _estimated(copied, settings, shape, rows, machines, calibration)
        told.append(why_shared(asked, chosen, copy.needed, machines))
    return Estimate(
        plan=replace(chosen, reasons=(*chosen.reasons, *told)),
        machines=machines,
        moves=moves_of(shape, settings),
        memory=memory,
        time=time,
        fits=fits,
        mends=() if fits else mends(asked, settings, shape, rows, machines),
        sure=sure,
        why_sure=why,
        price=None,
        counted=rows.count is not None or settings.max_steps is not None,
    )


def for_card(plan: StagePlan, settings: Training, gpu: Gpu) -> StagePlan:
    """The plan in a precision that the card has."""
    lacks = {"bf16": not gpu.bf16, "fp8": not gpu.fp8}
    if not lacks.get(plan.precision, False) or gpu.name == "CPU":
        return plan
    wide = "bf16" if gpu.bf16 else "fp16"
    reason = f"{wide} instead of {plan.precision}: {gpu.name} has no {plan.precision}"
    weights = plan.weights if wide == "bf16" else "fp32"
    return replace(plan, precision=wide, weights=weights, reasons=(*plan.reasons, reason))


def candidates(plan: StagePlan, settings: Training, machines: Machines) -> list[StagePlan]:
    """The plan as asked, and every other way to the same global batch."""
    share = plan.per_device * plan.accumulation
    free = settings.global_batch_size is not None and "per_device_train_batch_size" not in settings.model_fields_set
    most = share if free else plan.per_device
    sizes = [size for size in range(most, 0, -1) if share % size == 0]
    shardings = [plan.sharding]
    if settings.sharding == "auto" and plan.sharding == "ddp":
        shardings += splits(settings, machines)
    checkpointings = [plan.gradient_checkpointing]
    if isinstance(settings, Parts):
        checkpointings = list(CHECKPOINTINGS[CHECKPOINTINGS.index(plan.gradient_checkpointing) :])
    return [
        replace(plan, per_device=size, accumulation=share // size, gradient_checkpointing=again, sharding=how)
        for how in shardings
        for again in checkpointings
        for size in sizes
    ]


def splits(settings: Training, machines: Machines) -> list[str]:
    """The ways to split the weights over these cards: not those of images, nor what is kept in quantised blocks."""
    if machines.world == 1 or not isinstance(settings, Parts) or settings.quantization != "none":
        return []
    return ["fsdp"] if machines.nodes == 1 or machines.per_node == 1 else ["hsdp", "fsdp"]


def why_shared(asked: StagePlan, chosen: StagePlan, needed: float, machines: Machines) -> str:
    """In one line how the cards share the model, and why so; `needed` are the bytes of a copy on each card."""
    room = f"{needed / 2**30:.1f} GiB of the {machines.gpu.memory / 2**30:.1f} of {machines.gpu.name}"
    if chosen.sharding == "ddp":
        return f"ddp: each of {machines.world} devices holds a copy, {room}"
    way = f"split over {machines.world} cards"
    if chosen.sharding == "hsdp":
        way = f"split over the {machines.per_node} cards of each of {machines.nodes} machines"
    why = f"a copy on each card would take {room}; the weights are {way}"
    return f"{chosen.sharding} instead of {asked.sharding}: {why}"


def changes(asked: StagePlan, chosen: StagePlan, machines: Machines) -> tuple[str, ...]:
    """What differs from the wish, a line each."""
    told = []
    room = f"{machines.gpu.memory / 2**30:.0f} GiB of {machines.gpu.name}"
    if asked.per_device != chosen.per_device:
        told.append(
            f"{chosen.per_device} row{'s' * (chosen.per_device > 1)} at once × {chosen.accumulation} "
            f"instead of {asked.per_device} × {asked.accumulation}, for the {room}; "
            f"the batch of {chosen.global_batch} is kept"
        )
    if asked.gradient_checkpointing != chosen.gradient_checkpointing:
        told.append(f"{RECOMPUTED[chosen.gradient_checkpointing]}, for the {room}")
    return tuple(told)


def faster_with_less(
    plan: StagePlan, settings: Training, shape: Shape, rows: Rows, machines: Machines
) -> tuple[str, ...]:
    """A line where the recipe has more computed again than these cards ask for, and pays for it with time."""
    calibration = calibration_for(machines.gpu)
    rate = _estimated(plan, settings, shape, rows, machines, calibration)[1].rate
    best, name = rate * WORTH_SAYING, ""
    for less in CHECKPOINTINGS[: CHECKPOINTINGS.index(plan.gradient_checkpointing)]:
        way = _fastest(replace(plan, gradient_checkpointing=less), settings, shape, rows, machines)
        if way is None or (way.gradient_checkpointing, way.sharding) != (less, plan.sharding):
            continue
        other = _estimated(way, settings, shape, rows, machines, calibration)[1].rate
        if other >= best:
            best, name = other, str(less).lower()
    return (f"gradient_checkpointing: {name} would fit too, {best / rate:.2f} × as fast",) if name else ()


def mends(plan: StagePlan, settings: Training, shape: Shape, rows: Rows, machines: Machines) -> tuple[str, ...]:
    """The smallest changes that would make it fit: fewer rows measured, other weights moved, more or other cards."""
    found = []
    measured = settings.per_device_eval_batch_size
    while measured := measured // 2:
        brief = settings.model_copy(update={"per_device_eval_batch_size": measured})
        if _fastest(plan, brief, shape, rows, machines):
            found.append(f"per_device_eval_batch_size: {measured}")
            break
    if isinstance(shape, TextShape) and isinstance(settings, Parts) and not settings.trainable.lora:
        lighter = settings.model_copy(update={"trainable": Trainable(lora=True)})
        if _fastest(plan, lighter, shape, rows, machines):
            found.append("trainable: lora")
    cards = 2 * machines.world
    while cards <= 64 and isinstance(shape, TextShape):
        more = Machines(-(-cards // 8), min(cards, 8), machines.gpu)
        spread = replace(plan, world=cards, sharding="fsdp", accumulation=max(1, plan.accumulation // 2))
        if _fastest(spread, settings, shape, rows, more):
            found.append(f"sharding: fsdp over {cards} × {machines.gpu.name}")
            break
        cards *= 2
    for gpu in sorted(GPUS.values(), key=lambda each: each.memory):
        if gpu.memory > machines.gpu.memory and _fastest(
            for_card(plan, settings, gpu), settings, shape, rows, replace(machines, gpu=gpu)
        ):
            found.append(f"{machines.world} × {gpu.name}")
            break
    return tuple(found)


def _fastest(plan: StagePlan, settings: Training, shape: Shape, rows: Rows, machines: Machines) -> StagePlan | None:
    """The plan as asked where it fits, else the fastest candidate that does; None where nothing fits."""
    calibration = calibration_for(machines.gpu)
    fitting: list[tuple[float, StagePlan]] = []
    free = settings.global_batch_size is not None and "per_device_train_batch_size" not in settings.model_fields_set
    for place, candidate in enumerate([plan, *candidates(plan, settings, machines)]):
        memory, time = _estimated(candidate, settings, shape, rows, machines, calibration)
        if memory.needed > machines.gpu.memory:
            continue
        if place == 0 and not free:
            return candidate
        fitting.append((time.rate, candidate))
    # exchanges are the least sure part of the arithmetic: copies are split only where they do not fit as asked
    asked = (plan.sharding, plan.gradient_checkpointing)
    if any((each.sharding, each.gradient_checkpointing) == asked for _, each in fitting):
        fitting = [(rate, each) for rate, each in fitting if each.sharding == plan.sharding]
    best: tuple[float, StagePlan] | None = None
    for rate, candidate in fitting:
        if best is None or rate > best[0] * 1.01:
            best = (rate, candidate)
    return best[1] if best else None


def _estimated(
    plan: StagePlan, settings: Training, shape: Shape, rows: Rows, machines: Machines, calibration: Calibration
) -> tuple[Memory, StepTime]:
    if isinstance(shape, VisionShape) and isinstance(settings, Parts):
        raise ModelError("model: a resnet is trained by classify, not by a text stage")
    work = work_of(shape, settings, plan, rows, machines)
    return estimate(work, rows, plan, machines, calibration)
