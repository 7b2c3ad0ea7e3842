"""Fit a stage's plan to this hardware, decide fp8 by a trial, and compare the prediction with what was measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import xxhash
from torch import nn

from modelwright.engine.memory_profiler import MemoryProfiler
from modelwright.engine.parallel import repeated_layers
from modelwright.engine.task import StepReport
from modelwright.engine.trainer import Engine
from modelwright.errors import ModelError, RankOutOfMemory, StorageError, UsageError
from modelwright.models import activation_checkpoint, trainable
from modelwright.models.vision import ResNet18
from modelwright.plan.choose import CHECKPOINTINGS, StageEstimate, choose_plan
from modelwright.plan.hardware import Hardware, gpu_spec_of
from modelwright.plan.model_shape import ModelShape, ResNetShape, shape_from_config
from modelwright.plan.stage import StagePlan, choose_fp8_scalings, solve_batch
from modelwright.recipe.schema import TrainableConfig, TrainingConfig
from modelwright.recipe.sections import RowStats
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import has_valid_checksum, read_json, write_json, write_json_with_checksum
from modelwright.stages.context import RunContext, StageParts
from modelwright.stages.fp8_trial import Fp8Trial, run_fp8_trial

MAX_SAMPLED_LENGTHS = 20_000
"""Rows whose length is asked for; of a longer set, every so many-th."""
PROFILED_STEP = 3
"""The step whose memory is watched, where that is asked for: by then the optimizer has its moments."""


def fit_plan(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> StagePlan:
    """The plan as it can run here: what does not fit is changed, each change a line, and what it takes is foreseen."""
    fitted = _fit_to_memory(_apply_known_micro_batch(plan, stage, context), stage, parts, context)
    fitted = apply_known_fp8_trial(fitted, stage, parts, context)
    return replace(fitted, reasons=(*fitted.reasons, *parts.optimization_notes(fitted)))


def _fit_to_memory(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> StagePlan:
    settings = context.recipe.stages[stage]
    try:
        shape = _model_shape(parts)
        machines = _hardware(context)
        estimate = choose_plan(plan, settings, shape, _row_stats(parts, settings), machines)
    except ModelError as error:  # a family whose config says too little can still be trained
        return replace(plan, reasons=(*plan.reasons, f"no memory or time prediction: {error}"))
    chosen, reasons = estimate.plan, [] if estimate.fits else [_does_not_fit_message(estimate)]
    if chosen.gradient_checkpointing != plan.gradient_checkpointing:
        if chosen.gradient_checkpointing == "selective" and not trainable.has_decoder_layers(parts.model):
            chosen = replace(chosen, gradient_checkpointing=True)
            reasons.append(
                "gradient checkpointing is full: the model's layers were not found, which selective asks for"
            )
        activation_checkpoint.enable_activation_checkpointing(parts.model, chosen.gradient_checkpointing)
    return replace(chosen, reasons=(*chosen.reasons, *reasons), prediction=estimate.prediction())


@contextmanager
def explain_out_of_memory(
    current_plan: Callable[[], StagePlan], stage: str, parts: StageParts, context: RunContext
) -> Iterator[None]:
    """Where the device's memory does not hold a step, whatever was foreseen: say what would fit.

    One device alone has taken smaller bites by then; several ranks begin anew with them, since the others wait.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        plan = current_plan()
        if not parts.task.module.training:
            raise UsageError(_eval_memory_message(stage, context)) from None
        if context.world.size > 1 and plan.micro_batch_size > 1:
            rows = _record_smaller_micro_batch(plan, stage, context)
            raise RankOutOfMemory(
                f"micro-batch {plan.micro_batch_size} runs out of memory; the next start takes {rows} and keeps the batch"
            ) from None
        raise UsageError(_train_memory_message(plan, context.recipe.stages[stage])) from None


def _train_memory_message(plan: StagePlan, settings: TrainingConfig) -> str:
    """What takes less than the plan does and learns the same; where that is used up, what else takes less."""
    alternatives: list[str] = []
    if plan.micro_batch_size > 1:
        half, batch = plan.micro_batch_size // 2, plan.global_batch_size
        smaller = f"per_device_train_batch_size: {half} with global_batch_size: {batch}"
        alternatives.append(f"same global batch, smaller micro-batch: {smaller}")
    lighter = CHECKPOINTINGS[CHECKPOINTINGS.index(plan.gradient_checkpointing) + 1 :]
    if isinstance(settings, TrainableConfig) and lighter:
        alternatives.append("gradient_checkpointing: " + ", or ".join(str(mode).lower() for mode in lighter))
    if isinstance(settings, TrainableConfig) and not alternatives:
        alternatives += [] if settings.trainable.lora else ["trainable: lora"]
        alternatives += ["shorter rows: max_length"]
        alternatives += ["more cards: distributed_strategy: fsdp"] if settings.quantization == "none" else []
    would_do = ", or ".join(alternatives) or "a smaller model.resnet_width"
    rows = f"{plan.micro_batch_size} row{'s' * (plan.micro_batch_size > 1)}"
    return f"the device is out of memory with {rows} at once; what would do: {would_do}"


def _eval_memory_message(stage: str, context: RunContext) -> str:
    rows = context.recipe.stages[stage].per_device_eval_batch_size
    if context.world.size == 1 or rows == 1:  # one device alone has tried fewer by then
        return f"{stage}: the device is out of memory measuring one row; shorter rows would do: max_length"
    return (
        f"{stage}: the device is out of memory measuring {rows} rows at once; "
        f"fewer would do: per_device_eval_batch_size: {rows // 2}"
    )


def _record_smaller_micro_batch(plan: StagePlan, stage: str, context: RunContext) -> int:
    """Half the rows for the next start, from the second time on a quarter: a launcher does not start again for ever."""
    path = context.folder.micro_batch(stage) / f"rank-{context.world.rank}.json"  # others may write theirs
    repeated = path.exists() and read_json(path)["where"] == _micro_batch_key(stage, context)
    rows, _ = solve_batch(
        plan.global_batch_size, max(1, plan.micro_batch_size // (4 if repeated else 2)), plan.world_size
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"rows": rows, "where": _micro_batch_key(stage, context)})
    return rows


def _apply_known_micro_batch(plan: StagePlan, stage: str, context: RunContext) -> StagePlan:
    """The plan with as few rows at once as an earlier start of these ranks found to fit; the batch is the same."""
    folder = context.folder.micro_batch(stage)
    records = context.world.on_rank0_broadcast(lambda: [read_json(path) for path in folder.glob("*.json")])
    rows = min(
        (record["rows"] for record in records if record["where"] == _micro_batch_key(stage, context)),
        default=plan.micro_batch_size,
    )
    if rows >= plan.micro_batch_size:
        return plan
    per_device, accumulation = solve_batch(plan.global_batch_size, rows, plan.world_size)
    smaller = replace(plan, micro_batch_size=per_device, gradient_accumulation_steps=accumulation)
    reason = (
        f"micro-batch {plan.micro_batch_size} ran out of memory before; {smaller.batch_arithmetic} keeps the batch "
        f"(without stages/{stage}/{folder.name} it is tried again)"
    )
    return replace(smaller, reasons=(*plan.reasons, reason))


def _micro_batch_key(stage: str, context: RunContext) -> list[Any]:
    """What it hangs on whether rows fit: the device, how many there are, and all that the recipe says."""
    recipe = context.recipe
    settings_json = recipe.stages[stage].model_dump_json() + recipe.model.model_dump_json()
    return [
        context.hardware.name,
        context.hardware.memory,
        context.world.size,
        xxhash.xxh3_64_hexdigest(settings_json.encode()),
    ]


def log_prediction_error(context: RunContext, stage: str, plan: StagePlan, speed: dict[str, Any]) -> None:
    """Put what was measured beside what was foreseen: into the journal and into plan.json."""
    if plan.prediction is None or speed.get("tokens_per_second") is None:
        return
    on_gpu = context.hardware.device == "cuda"
    peak, memory = speed["peak_memory_bytes"], plan.prediction["memory"]["bytes"]
    rate, predicted_rate = speed["tokens_per_second"], plan.prediction["tokens_per_second"]
    comparison = {
        "tokens_per_second": {
            "predicted": predicted_rate,
            "actual": rate,
            "relative_error": round(predicted_rate / rate - 1, 4),
        },
        "peak_memory_bytes": {
            "predicted": memory,
            "actual": peak,
            # a process on a CPU holds its libraries too, so that only tensors on a GPU can be held against tensors
            "relative_error": round(memory / peak - 1, 4) if on_gpu else None,
        },
    }
    context.journal.add("prediction", stage=stage, **comparison)
    path = context.folder.plan

    def write() -> None:
        saved = read_json(path)
        write_json(path, {**saved, stage: {**saved.get(stage, {}), "actual": comparison}})

    context.world.on_rank0_broadcast(write)


def profile_one_step(
    engine: Engine, steps: Iterator[StepReport], context: RunContext, stage: str
) -> Iterator[StepReport]:
    """The same steps, one of them watched: its memory by component goes into the stage's folder and the journal."""
    for step_index, report in enumerate(steps, 1):
        yield report
        if step_index != min(PROFILED_STEP, engine.plan.steps) - 1:
            continue
        profiler = MemoryProfiler(engine.task.module, engine.optimizer)
        with engine.eager(), profiler.profile_step():
            profiled = next(steps, None)
        if profiled is None:
            return
        profile = profiler.as_json()
        context.world.on_rank0_broadcast(partial(write_json, context.folder.memory_profile(stage), profile))
        context.journal.add("memory", stage=stage, peak_bytes=profile["peak_bytes"], peak_phase=profile["peak_phase"],
                            components=profile["components"], device_bytes=context.hardware.memory)  # fmt: skip
        yield profiled


def _hardware(context: RunContext) -> Hardware:
    """The world as the arithmetic knows it; ranks on a CPU share its memory."""
    world, gpu = context.world, gpu_spec_of(context.hardware)
    if context.hardware.device == "cpu":
        gpu = replace(gpu, memory=gpu.memory / world.local_world_size)
    return Hardware(world.size // world.local_world_size, world.local_world_size, gpu)


def _model_shape(parts: StageParts) -> ModelShape:
    """The shape of the model that is really there."""
    model: Any = parts.model
    if isinstance(model, ResNet18):
        return ResNetShape("resnet18", "the model itself", model.width, model.channels, model.classes)
    return shape_from_config(model.config.to_dict(), "model", "the model itself")


def _row_stats(parts: StageParts, settings: Any) -> RowStats:
    """The rows as the task has them."""
    task, train_stats = parts.task, parts.data_manifest.get("train", {})
    lengths = [task.row_length(row) for row in range(0, task.rows, max(1, task.rows // MAX_SAMPLED_LENGTHS))]
    max_length = min(max(lengths), int(getattr(settings, "max_length", max(lengths))))
    trained_fraction = train_stats["trained_tokens"] / train_stats["tokens"] if train_stats.get("tokens") else 1.0
    device_bytes = sum(buffer.numel() * buffer.element_size() for buffer in task.module.buffers())
    return RowStats(
        task.rows, max(1, max_length), max(1.0, mean(lengths)), trained_fraction, "the rows themselves", device_bytes
    )


def _does_not_fit_message(estimate: StageEstimate) -> str:
    required_gib, available_gib = estimate.memory.required / 2**30, estimate.hardware.gpu.memory / 2**30
    alternatives = f"; would fit: {' | '.join(estimate.alternatives)}" if estimate.alternatives else ""
    return f"predicted to need {required_gib:.1f} GiB of {available_gib:.1f}: it may run out of memory{alternatives}"


FP8_CACHE_FILE = "fp8.json"
"""What this machine found before, in its cache folder, by the shape of the work."""


def apply_known_fp8_trial(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> StagePlan:
    """The plan in the arithmetic that is known to be the better one; as it was where that is still to be found out."""
    cached = _cached_trial(plan, stage, parts, context) if _wants_fp8_trial(plan, stage, context) else None
    return plan if cached is None else _with_trial_result(plan, cached)


def build_engine(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> Engine:
    """The engine of a stage; fp8 that nobody has tried here yet is tried in it, and what came of it is kept."""
    settings = context.recipe.stages[stage]
    needs_trial = _wants_fp8_trial(plan, stage, context) and _cached_trial(plan, stage, parts, context) is None
    engine = Engine(parts.task, settings, plan, context.world, context.recipe.seed)
    if needs_trial:
        key = fp8_trial_key(plan, stage, parts, context)
        trial = run_fp8_trial(engine, choose_fp8_scalings(settings))
        context.world.on_rank0_broadcast(lambda: _save_trial(trial, key, context.folder.fp8_trial(stage)))
        context.journal.add("fp8_trial", stage=stage, cached=False, **asdict(trial))
        engine.plan = _with_trial_result(engine.plan, trial)
    return engine


def fp8_trial_key(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> dict[str, Any]:
    """What the answer hangs on: the card, the work and the libraries."""
    settings = context.recipe.stages[stage]
    linears = [
        linear for layer in repeated_layers(parts.model) for linear in layer.modules() if isinstance(linear, nn.Linear)
    ]
    sizes = Counter(f"{linear.in_features} x {linear.out_features}" for linear in linears)
    return {
        "gpu": context.hardware.name,
        "stage": type(settings).__name__,
        "linears": dict(sorted(sizes.items())),
        "parameters": [parts.parameter_counts.trained, parts.parameter_counts.total],
        "rows": plan.micro_batch_size,
        "length": getattr(settings, "max_length", None),
        "devices": [plan.world_size, plan.sharding],
        "param_dtype": plan.param_dtype,
        "scaling": settings.fp8_scaling,
        "settings": [settings.torch_compile, settings.cuda_graphs, plan.gradient_checkpointing],
        "versions": [torch.__version__, _torchao_version()],
    }


def _wants_fp8_trial(plan: StagePlan, stage: str, context: RunContext) -> bool:
    return plan.precision == "fp8" and context.recipe.stages[stage].fp8_validation == "auto"


def _with_trial_result(plan: StagePlan, trial: Fp8Trial) -> StagePlan:
    with_reason = replace(plan, reasons=(*plan.reasons, trial.reason))
    return replace(with_reason, fp8_scaling=trial.scaling) if trial.use_fp8 else replace(with_reason, precision="bf16")


def _cached_trial(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> Fp8Trial | None:
    """What this run decided at its first start, else what this machine found; one answer for all ranks."""
    path, key = context.folder.fp8_trial(stage), fp8_trial_key(plan, stage, parts, context)

    def read_trial() -> dict[str, Any] | None:
        if has_valid_checksum(path) and _is_still_valid(saved := read_json(path), context.recipe.stages[stage]):
            return dict(saved["trial"])
        entry = _read_cache(_cache_path()).get(_hash_key(key))
        if entry is None:
            return None
        trial = {**entry["trial"], "reason": f"{entry['trial']['reason']}, as found before"}
        write_json_with_checksum(path, {"trial": trial, "of": key})
        context.journal.add("fp8_trial", stage=stage, cached=True, **trial)
        return trial

    result = context.world.on_rank0_broadcast(read_trial)
    return None if result is None else Fp8Trial(**result)


def _is_still_valid(saved: dict[str, Any], settings: TrainingConfig) -> bool:
    """Whether what this run decided is still what is asked: a scaling that is no longer wished is tried anew."""
    trial, saved_scaling = saved["trial"], saved["of"].get("scaling", "auto")
    if trial["use_fp8"]:
        return trial.get("scaling", "tensorwise") in choose_fp8_scalings(settings)
    return bool(saved_scaling == settings.fp8_scaling)


def _save_trial(trial: Fp8Trial, key: dict[str, Any], path: Path) -> None:
    """In the run, so that a later start decides alike, and on this machine, so that a later run need not try."""
    write_json_with_checksum(path, {"trial": asdict(trial), "of": key})
    if trial.speedup is not None:
        write_json(_cache_path(), {**_read_cache(_cache_path()), _hash_key(key): {"trial": asdict(trial), "of": key}})


def _cache_path() -> Path:
    return cache_dir() / FP8_CACHE_FILE


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        entries = read_json(path)
        return {key: entry for key, entry in entries.items() if Fp8Trial(**entry["trial"])}
    except (OSError, StorageError, AttributeError, KeyError, TypeError):
        return {}  # none yet, or not ours


def _hash_key(key: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())


def _torchao_version() -> str:
    try:
        return version("torchao")
    except PackageNotFoundError:
        return "none"
