"""What a stage is foreseen to take on the machine that is really there, and afterwards what it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
import xxhash

from modelwright.engine.loop import Engine
from modelwright.engine.profile import Profiler
from modelwright.engine.step import StepReport
from modelwright.errors import ModelError, OutOfRoom, UsageError
from modelwright.models import trainable
from modelwright.models.vision import ResNet18
from modelwright.plan.architecture import Shape, VisionShape, shape_of
from modelwright.plan.choose import CHECKPOINTINGS, choose
from modelwright.plan.estimate import Estimate, Rows
from modelwright.plan.facts import card
from modelwright.plan.gpus import Machines
from modelwright.plan.stage import StagePlan, solve
from modelwright.recipe.training import Parts, Training
from modelwright.runs.folder import read_json, write_json
from modelwright.stages.arithmetic import foretold
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built

MOST_LENGTHS = 20_000
"""Rows whose length is asked for; of a longer set, every so many-th."""
PROFILED = 3
"""The step whose memory is watched, where that is asked for: by then the optimizer has its moments."""


def foreseen(plan: StagePlan, stage: str, built: Built, context: Context) -> StagePlan:
    """The plan as it can run here: what does not fit is changed, each change a line, and what it takes is foreseen."""
    fitted = _fitted(_bites_that_fit(plan, stage, context), stage, built, context)
    fitted = foretold(fitted, stage, built, context)
    return replace(fitted, reasons=(*fitted.reasons, *built.savings(fitted)))


def _fitted(plan: StagePlan, stage: str, built: Built, context: Context) -> StagePlan:
    settings = context.recipe.stages[stage]
    try:
        shape = _shape(built)
        machines = _machines(context)
        found = choose(plan, settings, shape, _rows(built, settings), machines)
    except ModelError as error:  # a family whose config says too little can still be trained
        return replace(plan, reasons=(*plan.reasons, f"memory and time are not foreseen: {error}"))
    chosen, lines = found.plan, [] if found.fits else [_not_fitting(found)]
    if chosen.gradient_checkpointing != plan.gradient_checkpointing:
        if chosen.gradient_checkpointing == "selective" and not trainable.finds_layers(built.model):
            chosen = replace(chosen, gradient_checkpointing=True)
            lines.append("gradient checkpointing is full: the model's layers were not found, which selective asks for")
        trainable.recompute_activations(built.model, chosen.gradient_checkpointing)
    return replace(chosen, reasons=(*chosen.reasons, *lines), predicted=found.predicted())


@contextmanager
def memory_told(plan: Callable[[], StagePlan], stage: str, built: Built, context: Context) -> Iterator[None]:
    """Where the device's memory does not hold a step, whatever was foreseen: say what would fit.

    One device alone has taken smaller bites by then; several ranks begin anew with them, since the others wait.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        now = plan()
        if not built.task.module.training:
            raise UsageError(_too_much_to_measure(stage, context)) from None
        if context.world.size > 1 and now.per_device > 1:
            rows = _write_down_less(now, stage, context)
            raise OutOfRoom(
                f"{now.per_device} rows at once do not fit the memory; the next start takes {rows} and keeps the batch"
            ) from None
        raise UsageError(_too_much_to_train(now, context.recipe.stages[stage])) from None


def _too_much_to_train(plan: StagePlan, settings: Training) -> str:
    """What takes less than the plan does and learns the same; where that is used up, what else takes less."""
    ways: list[str] = []
    if plan.per_device > 1:
        half, batch = plan.per_device // 2, plan.global_batch
        bites = f"per_device_train_batch_size: {half} with global_batch_size: {batch}"
        ways.append(f"the same batch in smaller bites: {bites}")
    lighter = CHECKPOINTINGS[CHECKPOINTINGS.index(plan.gradient_checkpointing) + 1 :]
    if isinstance(settings, Parts) and lighter:
        ways.append("gradient_checkpointing: " + ", or ".join(str(word).lower() for word in lighter))
    if isinstance(settings, Parts) and not ways:
        ways += [] if settings.trainable.lora else ["trainable: lora"]
        ways += ["shorter rows: max_length"]
        ways += ["more cards: sharding: fsdp"] if settings.quantization == "none" else []
    would_do = ", or ".join(ways) or "a smaller model.width"
    rows = f"{plan.per_device} row{'s' * (plan.per_device > 1)}"
    return f"the device is out of memory with {rows} at once; what would do: {would_do}"


def _too_much_to_measure(stage: str, context: Context) -> str:
    rows = context.recipe.stages[stage].per_device_eval_batch_size
    if context.world.size == 1 or rows == 1:  # one device alone has tried fewer by then
        return f"{stage}: the device is out of memory measuring one row; shorter rows would do: max_length"
    return (
        f"{stage}: the device is out of memory measuring {rows} rows at once; "
        f"fewer would do: per_device_eval_batch_size: {rows // 2}"
    )


def _write_down_less(plan: StagePlan, stage: str, context: Context) -> int:
    """Half the rows for the next start, from the second time on a quarter: a launcher does not start again for ever."""
    path = context.folder.rows_at_once(stage) / f"rank-{context.world.rank}.json"  # others may write theirs
    again = path.exists() and read_json(path)["where"] == _where(stage, context)
    rows, _ = solve(plan.global_batch, max(1, plan.per_device // (4 if again else 2)), plan.world)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"rows": rows, "where": _where(stage, context)})
    return rows


def _bites_that_fit(plan: StagePlan, stage: str, context: Context) -> StagePlan:
    """The plan with as few rows at once as an earlier start of these ranks found to fit; the batch is the same."""
    folder = context.folder.rows_at_once(stage)
    kept = context.world.first(lambda: [read_json(path) for path in folder.glob("*.json")])
    rows = min((known["rows"] for known in kept if known["where"] == _where(stage, context)), default=plan.per_device)
    if rows >= plan.per_device:
        return plan
    per_device, accumulation = solve(plan.global_batch, rows, plan.world)
    smaller = replace(plan, per_device=per_device, accumulation=accumulation)
    reason = (
        f"{plan.per_device} rows at once did not fit the memory before; {smaller.arithmetic} keeps the batch "
        f"(without stages/{stage}/{folder.name} it is tried again)"
    )
    return replace(smaller, reasons=(*plan.reasons, reason))


def _where(stage: str, context: Context) -> list[Any]:
    """What it hangs on whether rows fit: the device, how many there are, and all that the recipe says."""
    recipe = context.recipe
    said = recipe.stages[stage].model_dump_json() + recipe.model.model_dump_json()
    return [context.facts.name, context.facts.memory, context.world.size, xxhash.xxh3_64_hexdigest(said.encode())]


def held_against(context: Context, stage: str, plan: StagePlan, speed: dict[str, Any]) -> None:
    """Put what was measured beside what was foreseen: into the journal and into plan.json."""
    if plan.predicted is None or speed.get("tokens_per_second") is None:
        return
    on_gpu = context.facts.device == "cuda"
    peak, memory = speed["memory_bytes"], plan.predicted["memory"]["bytes"]
    rate, foreseen_rate = speed["tokens_per_second"], plan.predicted["tokens_per_second"]
    told = {
        "tokens_per_second": {"foreseen": foreseen_rate, "measured": rate, "off": round(foreseen_rate / rate - 1, 4)},
        "memory_bytes": {
            "foreseen": memory,
            "measured": peak,
            # a process on a CPU holds its libraries too, so that only tensors on a GPU can be held against tensors
            "off": round(memory / peak - 1, 4) if on_gpu else None,
        },
    }
    context.journal.add("foreseen", stage=stage, **told)
    path = context.folder.plan

    def write() -> None:
        kept = read_json(path)
        write_json(path, {**kept, stage: {**kept.get(stage, {}), "measured": told}})

    context.world.first(write)


def watched(engine: Engine, steps: Iterator[StepReport], context: Context, stage: str) -> Iterator[StepReport]:
    """The same steps, one of them watched: its memory by component goes into the stage's folder and the journal."""
    for number, report in enumerate(steps, 1):
        yield report
        if number != min(PROFILED, engine.plan.steps) - 1:
            continue
        profiler = Profiler(engine.task.module, engine.optimizer)
        with engine.as_it_comes(), profiler.watching():
            seen = next(steps, None)
        if seen is None:
            return
        told = profiler.as_json()
        context.world.first(lambda told=told: write_json(context.folder.memory(stage), told))  # type: ignore[misc]
        context.journal.add("memory", stage=stage, peak_bytes=told["peak_bytes"], peak_in=told["peak_in"],
                            parts=told["parts"], room=context.facts.memory)  # fmt: skip
        yield seen


def _machines(context: Context) -> Machines:
    """The world as the arithmetic knows it; ranks on a CPU share its memory."""
    world, gpu = context.world, card(context.facts)
    if context.facts.device == "cpu":
        gpu = replace(gpu, memory=gpu.memory / world.per_node)
    return Machines(world.size // world.per_node, world.per_node, gpu)


def _shape(built: Built) -> Shape:
    """The shape of the model that is really there."""
    model: Any = built.model
    if isinstance(model, ResNet18):
        return VisionShape("resnet18", "the model itself", model.width, model.channels, model.classes)
    return shape_of(model.config.to_dict(), "model", "the model itself")


def _rows(built: Built, settings: Any) -> Rows:
    """The rows as the task has them."""
    task, facts = built.task, built.data_facts.get("train", {})
    lengths = [task.length(row) for row in range(0, task.rows, max(1, task.rows // MOST_LENGTHS))]
    longest = min(max(lengths), int(getattr(settings, "max_length", max(lengths))))
    learnt = facts["trained_tokens"] / facts["tokens"] if facts.get("tokens") else 1.0
    resident = sum(each.numel() * each.element_size() for each in task.module.buffers())
    return Rows(task.rows, max(1, longest), max(1.0, mean(lengths)), learnt, "the rows themselves", resident)


def _not_fitting(found: Estimate) -> str:
    needed, room = found.memory.needed / 2**30, found.machines.gpu.memory / 2**30
    mends = f"; would fit: {' | '.join(found.mends)}" if found.mends else ""
    return f"foreseen to need {needed:.1f} GiB of {room:.1f}: it may run out of memory{mends}"
