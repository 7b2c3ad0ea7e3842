"""Fit a stage's plan to this hardware, decide fp8 by a trial, and compare the prediction with what was measured."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from modelwright.errors import ModelError, RankOutOfMemory, StorageError, UsageError, first_line
from modelwright.launch.doctor import installed_version
from modelwright.models import activation_checkpoint, trainable
from modelwright.models.vision import ResNet18
from modelwright.plan.choose import CHECKPOINTINGS, StageEstimate, choose_plan
from modelwright.plan.hardware import Hardware, gpu_spec_of
from modelwright.plan.model_shape import ModelShape, ResNetShape, model_folders, shape_from_config
from modelwright.plan.stage import MIN_FP8_SPEEDUP, StagePlan, choose_fp8_scalings
from modelwright.recipe.schema import Recipe
from modelwright.recipe.stage_specs import RowStats, TrainableConfig, TrainingConfig, name_images
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import has_valid_checksum, read_json, write_json, write_json_with_checksum
from modelwright.stages.context import RunContext, StageParts

MAX_SAMPLED_LENGTHS = 20_000
"""Rows whose length is measured; a larger dataset is sampled at equal intervals."""
PROFILED_STEP = 3
"""The step that profile_memory records: by then the optimizer state is allocated."""
MAX_LOSS_DIFFERENCE = 0.005
"""Largest relative difference of the fp8 loss from the bf16 loss: the limit for every precision over 300 steps."""
SCALING_NAMES = {"tensorwise": "fp8", "rowwise": "fp8 rowwise"}
RANK0_DECIDES = ("micro_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "sharding", "precision",
                 "torch_compile", "eval_micro_batch_size")  # fmt: skip
"""What all ranks must do alike, of what the predicted memory and time decide."""
FP8_CACHE_FILE = "fp8.json"
"""Trial results of this machine in its cache folder, by a hash of `fp8_trial_key`."""


def fit_plan(
    plan: StagePlan, stage: str, parts: StageParts, context: RunContext, resumed_micro_batch: int | None = None
) -> StagePlan:
    """The plan changed to fit this hardware, with a reason for each change and the memory and time estimate."""
    fitted = _fit_to_memory(plan, stage, parts, context, resumed_micro_batch)
    if _wants_fp8_trial(fitted, stage, context) and (trial := _cached_trial(fitted, stage, parts, context)):
        fitted = _with_trial_result(fitted, trial)
    return fitted.revise(*parts.optimization_notes(fitted))


def describe_adapters(recipe: Recipe, recipe_dir: Path) -> list[str]:
    """What LoRA adapts in each stage, if the model is on this machine; raises ModelError where it cannot."""
    folders = model_folders(recipe.model.model_name_or_path or "", recipe_dir)
    folders = [path for path in folders if (path / "config.json").is_file()]
    stages = recipe.lora_stages.items() if folders else ()
    return [f"{stage}: {line}" for stage, each in stages for line in trainable.describe_lora(folders[0], each)]


def _fit_to_memory(
    plan: StagePlan, stage: str, parts: StageParts, context: RunContext, resumed: int | None
) -> StagePlan:
    settings, known = context.recipe.stages[stage], _known_micro_batch(stage, context, resumed)
    plan = plan.revise(padding_free=parts.task.padding_free)
    # dropout is drawn, and the experts of a router are balanced, in each micro-batch by itself
    has_router_loss = "router_aux_loss" in parts.task.metric_names
    may_merge = resumed != 0 and not has_router_loss and not activation_checkpoint.has_dropout(parts.model)
    if settings.may_use_fp8 and (reasons := _stay_in_bf16(stage, context)):
        plan, settings = plan.revise(*reasons), settings.model_copy(update={"precision": "bf16"})
    try:
        facts = _model_shape(parts), _row_stats(parts), _hardware(context)
        estimate = choose_plan(plan, settings, *facts, may_merge=may_merge)
        if known is not None and estimate.plan.micro_batch_size != known[0]:
            # the rest is decided as at the first start
            decided = {"torch_compile": estimate.plan.torch_compile, "precision": estimate.plan.precision}
            settings = settings.model_copy(update={"per_device_train_batch_size": known[0], **decided})
            plan = plan.with_micro_batch(known[0]).revise(known[1], **decided)
            estimate = choose_plan(plan, settings, *facts, may_merge=False)
    except ModelError as error:  # an architecture whose config says too little can still be trained
        plan = plan.with_micro_batch(known[0]).revise(known[1]) if known else plan
        return plan.revise(f"no memory or time prediction: {error}")
    chosen = estimate.plan if estimate.fits else estimate.plan.revise(_does_not_fit_message(estimate))
    # the nodes may be calibrated differently
    decided = context.world.on_rank0_broadcast(lambda: {name: getattr(estimate.plan, name) for name in RANK0_DECIDES})
    chosen = chosen.revise(**decided)
    if chosen.gradient_checkpointing != plan.gradient_checkpointing:
        if chosen.gradient_checkpointing == "selective" and not trainable.has_decoder_layers(parts.model):
            reason = "gradient checkpointing is full: the model's layers were not found, which selective asks for"
            chosen = chosen.revise(reason, gradient_checkpointing=True)
        activation_checkpoint.enable_activation_checkpointing(parts.model, chosen.gradient_checkpointing)
    return chosen.revise(prediction=estimate.prediction())


def _stay_in_bf16(stage: str, context: RunContext) -> tuple[str, ...]:
    """Why precision auto does not become fp8 here, whatever the prediction says; nothing where it may."""
    if not gpu_spec_of(context.hardware).fp8:
        return ()  # the planner says so
    if installed_version("torchao") is None:
        return ("bf16, not fp8: torchao is not installed; pip install 'modelwright[fp8]' (precision)",)
    path = context.folder.plan
    before = context.world.on_rank0_broadcast(lambda: read_json(path).get(stage, {}) if path.exists() else {})
    is_same = before.get("precision") == "bf16" and not context.folder.fp8_trial(stage).exists()
    return ("bf16, as at this run's earlier start (precision)",) if is_same else ()


@contextmanager
def explain_out_of_memory(
    current_plan: Callable[[], StagePlan], stage: str, parts: StageParts, context: RunContext
) -> Iterator[None]:
    """Turn an out-of-memory error into a message with settings that need less memory.

    On one device the engine has already halved its micro-batch; several ranks restart with a smaller one instead,
    since the other ranks are blocked in a collective.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        plan = current_plan()
        if not parts.task.module.training:
            raise UsageError(_eval_memory_message(stage, plan.eval_micro_batch_size)) from None
        if context.world.size > 1 and plan.micro_batch_size > 1:
            rows = _record_smaller_micro_batch(plan, stage, context)
            message = f"micro-batch {plan.micro_batch_size} runs out of memory"
            raise RankOutOfMemory(f"{message}; the next start takes {rows} and keeps the batch") from None
        raise UsageError(_train_memory_message(plan, context.recipe.stages[stage])) from None


def _train_memory_message(plan: StagePlan, settings: TrainingConfig) -> str:
    """First what needs less memory for the same result, and where none is left, what changes the result."""
    alternatives: list[str] = []
    lighter = CHECKPOINTINGS[CHECKPOINTINGS.index(plan.gradient_checkpointing) + 1 :]
    if isinstance(settings, TrainableConfig) and lighter:
        alternatives.append("gradient_checkpointing: " + ", or ".join(str(mode).lower() for mode in lighter))
    if isinstance(settings, TrainableConfig) and not alternatives:
        alternatives += [*([] if settings.trainable.lora else ["trainable: lora"]), "shorter rows: max_length"]
        alternatives += ["more GPUs: distributed_strategy: fsdp"] if settings.quantization == "none" else []
    would_do = ", or ".join(alternatives) or "a smaller model.resnet_width"
    rows = f"{plan.micro_batch_size} row{'s' * (plan.micro_batch_size > 1)}"
    return f"the device is out of memory with {rows} at once; what would do: {would_do}"


def _eval_memory_message(stage: str, rows: int) -> str:
    if rows == 1:  # on one device the engine has halved it so far
        return f"{stage}: the device is out of memory measuring one row; shorter rows would do: max_length"
    return (
        f"{stage}: the device is out of memory measuring {rows} rows at once; "
        f"fewer would do: per_device_eval_batch_size: {rows // 2}"
    )


def _record_smaller_micro_batch(plan: StagePlan, stage: str, context: RunContext) -> int:
    """Save half the micro-batch for the next start, from the second time on a quarter: restarts are limited."""
    path = context.folder.micro_batch(stage) / f"rank-{context.world.rank}.json"  # other ranks may write theirs
    key = _micro_batch_key(stage, context)
    divisor = 4 if path.exists() and read_json(path)["where"] == key else 2
    rows = plan.with_micro_batch(max(1, plan.micro_batch_size // divisor)).micro_batch_size
    write_json(path, {"rows": rows, "where": key})
    return rows


def _known_micro_batch(stage: str, context: RunContext, resumed: int | None) -> tuple[int, str] | None:
    """The micro-batch of the checkpoint, or one that was saved after a larger one ran out of memory, with a reason."""
    folder, key = context.folder.micro_batch(stage), _micro_batch_key(stage, context)
    records = context.world.on_rank0_broadcast(lambda: [read_json(path) for path in folder.glob("*.json")])
    fitting = [record["rows"] for record in records if record["where"] == key]
    rows = min([*fitting, *([resumed] if resumed else [])], default=None)
    if rows is None:
        return None
    if rows in fitting:
        return rows, f"more than {rows} rows at once ran out of memory before (stages/{stage}/{folder.name})"
    return rows, f"{rows} rows at once, as at this run's earlier start"


def _micro_batch_key(stage: str, context: RunContext) -> list[Any]:
    """What decides whether a micro-batch fits: the device, the number of devices, the stage and the model."""
    recipe, hardware = context.recipe, context.hardware
    settings_json = recipe.stages[stage].model_dump_json() + recipe.model.model_dump_json()
    settings_hash = xxhash.xxh3_64_hexdigest(settings_json.encode())
    return [hardware.name, hardware.memory, context.world.size, settings_hash]


def log_prediction_error(context: RunContext, stage: str, plan: StagePlan, speed: dict[str, Any]) -> None:
    """Write prediction, measurement and relative error to the journal and to plan.json."""
    if plan.prediction is None or speed.get("tokens_per_second") is None:
        return
    on_gpu = context.hardware.device == "cuda"  # on a CPU the measured memory includes libraries, not tensors alone
    comparison = {
        name: {
            "predicted": predicted,
            "actual": actual,
            "relative_error": round(predicted / actual - 1, 4) if on_gpu or name == "tokens_per_second" else None,
        }
        for name, predicted, actual in (
            ("tokens_per_second", plan.prediction["tokens_per_second"], speed["tokens_per_second"]),
            ("peak_memory_bytes", plan.prediction["memory"]["bytes"], speed["peak_memory_bytes"]),
        )
    }
    context.journal.add("prediction", stage=stage, **name_images(comparison, stage))
    update_plan_file(context, stage, {"actual": comparison})


def update_plan_file(context: RunContext, stage: str, record: dict[str, Any]) -> None:
    """Update the stage's part of plan.json."""

    def write() -> None:
        saved = read_json(context.folder.plan) if context.folder.plan.exists() else {}
        write_json(context.folder.plan, {**saved, stage: {**saved.get(stage, {}), **name_images(record, stage)}})

    context.world.on_rank0_broadcast(write)


def profile_one_step(
    engine: Engine, steps: Iterator[StepReport], context: RunContext, stage: str
) -> Iterator[StepReport]:
    """The same steps, one of them under the memory profiler: its memory by component goes to a file and the journal."""
    for step_index, report in enumerate(steps, 1):
        yield report
        if step_index != min(PROFILED_STEP, engine.plan.steps) - 1:
            continue
        profiler = MemoryProfiler(engine.task.module, engine.optimizer)
        with engine.eager(), profiler.profile_step():
            profiled = next(steps, None)
        if profiled is None:
            return
        profile = profiler.log.as_json()
        context.world.on_rank0_broadcast(partial(write_json, context.folder.memory_profile(stage), profile))
        context.journal.add("memory", stage=stage, peak_bytes=profile["peak_bytes"], peak_phase=profile["peak_phase"],
                            components=profile["components"], device_bytes=context.hardware.memory)  # fmt: skip
        yield profiled


def _hardware(context: RunContext) -> Hardware:
    """The devices of this run for the planner; ranks on a CPU share its memory."""
    world, gpu = context.world, gpu_spec_of(context.hardware)
    if context.hardware.device == "cpu":
        gpu = replace(gpu, memory=gpu.memory / world.local_world_size)
    return Hardware(world.size // world.local_world_size, world.local_world_size, gpu)


def _model_shape(parts: StageParts) -> ModelShape:
    """The shape of the loaded model."""
    model: Any = parts.model
    if isinstance(model, ResNet18):
        return ResNetShape("resnet18", "the model itself", model.width, model.channels, model.classes)
    return shape_from_config(model.config.to_dict(), "model", "the model itself")


def _row_stats(parts: StageParts) -> RowStats:
    """Row count and token lengths of the task's training rows."""
    task, train_stats = parts.task, parts.data_manifest.get("train", {})
    lengths = [task.row_length(row) for row in range(0, task.rows, max(1, task.rows // MAX_SAMPLED_LENGTHS))]
    trained_fraction = train_stats["trained_tokens"] / train_stats["tokens"] if train_stats.get("tokens") else 1.0
    device_bytes = sum(buffer.numel() * buffer.element_size() for buffer in task.module.buffers())
    tokens = max(1, max(lengths)), max(1.0, mean(lengths))  # a pair may be longer than max_length, with two answers
    stats = RowStats(task.epoch_rows, *tokens, trained_fraction, "the rows themselves", device_bytes)
    return replace(stats, lengths=tuple(lengths), prefix_length=task.prefix_length)


def _does_not_fit_message(estimate: StageEstimate) -> str:
    required_gib, available_gib = estimate.memory.required / 2**30, estimate.hardware.gpu.memory / 2**30
    alternatives = f"; would fit: {' | '.join(estimate.alternatives)}" if estimate.alternatives else ""
    return f"predicted to need {required_gib:.1f} GiB of {available_gib:.1f}: it may run out of memory{alternatives}"


@dataclass(frozen=True)
class Fp8Trial:
    """The result of timing fp8 against bf16."""

    use_fp8: bool
    """Whether the stage trains in fp8."""
    reason: str
    """The reason in a line."""
    speedup: float | None = None
    """How many times as fast as bf16 fp8 was."""
    loss_difference: float | None = None
    """Relative difference of the fp8 loss from the bf16 loss."""
    scaling: str = "tensorwise"
    """What has its own scale: each matrix (tensorwise) or each row of it (rowwise)."""


@dataclass(frozen=True)
class TimedPass:
    """Time and loss of one precision."""

    seconds: float
    """The fastest pass over the trial batches, summed over the ranks."""
    loss: float
    """Loss summed over the trial batches."""


def build_engine(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> Engine:
    """The engine of a stage; runs the fp8 trial in it where no result is cached, and saves the result."""
    settings = context.recipe.stages[stage]
    needs_trial = _wants_fp8_trial(plan, stage, context) and _cached_trial(plan, stage, parts, context) is None
    engine = Engine(parts.task, settings, plan, context.world, context.recipe.seed)
    if needs_trial:
        key = fp8_trial_key(plan, stage, parts, context)
        try:
            trial = run_fp8_trial(engine, choose_fp8_scalings(settings))
        except Exception as error:
            # of several ranks one may fail alone; the recipe does not name fp8, so the next start is in bf16
            if settings.precision == "auto" and not isinstance(error, torch.OutOfMemoryError):
                reason = f"bf16 instead of fp8: fp8 failed here ({first_line(error)[:160]})"
                _save_trial(Fp8Trial(False, reason), key, context.folder.fp8_trial(stage))
            raise
        context.world.on_rank0_broadcast(lambda: _save_trial(trial, key, context.folder.fp8_trial(stage)))
        context.journal.add("fp8_trial", stage=stage, cached=False, **asdict(trial))
        engine.adopt(_with_trial_result(engine.plan, trial))
    return engine


def run_fp8_trial(engine: Engine, scalings: Sequence[str]) -> Fp8Trial:
    """Time a few batches in both precisions.

    Rowwise scaling is more exact and slower than tensorwise: the next scaling is tried where one is fast enough but
    its loss is too far off.
    """
    bf16 = time_precision(engine, "bf16", scalings[0])
    trial = _try_scaling(engine, bf16, scalings[0])
    for scaling in scalings[1:]:
        if not trial.use_fp8 and (trial.speedup or 0.0) >= MIN_FP8_SPEEDUP:
            trial = _try_scaling(engine, bf16, scaling)
            trial = replace(trial, reason=f"{trial.reason}; with tensorwise scaling its loss was too far off")
    return trial


def _try_scaling(engine: Engine, bf16: TimedPass, scaling: str) -> Fp8Trial:
    try:
        fp8 = time_precision(engine, "fp8", scaling)
    except Exception as error:  # unsupported by the GPU, torchao or the compiler; bf16 has just worked
        if engine.world.size > 1 or isinstance(error, torch.OutOfMemoryError):
            raise
        engine.reset_step_state()  # partial gradients must not enter the first step
        return Fp8Trial(False, f"bf16 instead of fp8: fp8 failed here ({first_line(error)[:160]})", scaling=scaling)
    return Fp8Trial(**engine.world.on_rank0_broadcast(lambda: asdict(decide(bf16, fp8, scaling))))


def time_precision(engine: Engine, precision: str, scaling: str) -> TimedPass:
    """Time and loss of a precision on the first batches, the same on every rank."""
    engine.set_precision(precision, scaling)
    sums, seconds = engine.time_trial()
    metrics = dict(zip(engine.task.metric_names, sums, strict=True))
    return TimedPass(*engine.world.all_reduce_sum(seconds, metrics[engine.task.fp8_check_metric]))


def decide(bf16: TimedPass, fp8: TimedPass, scaling: str) -> Fp8Trial:
    """Choose fp8 where it is faster than bf16 and its loss agrees."""
    speedup, loss_difference = bf16.seconds / fp8.seconds, abs(fp8.loss / bf16.loss - 1) if bf16.loss else math.nan
    is_finite = math.isfinite(loss_difference)
    use_fp8 = speedup >= MIN_FP8_SPEEDUP and loss_difference <= MAX_LOSS_DIFFERENCE
    loss_text = f"{loss_difference:.2%} off (at most {MAX_LOSS_DIFFERENCE:.1%})" if is_finite else "is not finite"
    result = f"{SCALING_NAMES[scaling]} is {speedup:.2f} × as fast as bf16 here (needs {MIN_FP8_SPEEDUP:g})"
    reason = f"{'fp8 is kept' if use_fp8 else 'bf16 instead of fp8'}: {result}, its loss {loss_text}"
    return Fp8Trial(use_fp8, reason, round(speedup, 3), loss_difference if is_finite else None, scaling)


def fp8_trial_key(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> dict[str, Any]:
    """What the result depends on: the GPU, the matrix sizes, the plan and the library versions."""
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
        "settings": [plan.torch_compile, settings.cuda_graphs, plan.gradient_checkpointing],
        "versions": [torch.__version__, installed_version("torchao")],
    }


def _wants_fp8_trial(plan: StagePlan, stage: str, context: RunContext) -> bool:
    return plan.precision == "fp8" and context.recipe.stages[stage].fp8_validation == "auto"


def _with_trial_result(plan: StagePlan, trial: Fp8Trial) -> StagePlan:
    return plan.revise(trial.reason, **({"fp8_scaling": trial.scaling} if trial.use_fp8 else {"precision": "bf16"}))


def _cached_trial(plan: StagePlan, stage: str, parts: StageParts, context: RunContext) -> Fp8Trial | None:
    """The result that this run saved at its first start, else the one in this machine's cache; equal on all ranks."""
    path, key = context.folder.fp8_trial(stage), fp8_trial_key(plan, stage, parts, context)

    def read_trial() -> dict[str, Any] | None:
        if has_valid_checksum(path) and _is_still_valid(saved := read_json(path), context.recipe.stages[stage]):
            return dict(saved["trial"])
        entry = _read_cache(cache_dir() / FP8_CACHE_FILE).get(_hash_key(key))
        if entry is None:
            return None
        trial = {**entry["trial"], "reason": f"{entry['trial']['reason']}, as found before"}
        write_json_with_checksum(path, {"trial": trial, "of": key})
        context.journal.add("fp8_trial", stage=stage, cached=True, **trial)
        return trial

    result = context.world.on_rank0_broadcast(read_trial)
    return None if result is None else Fp8Trial(**result)


def _is_still_valid(saved: dict[str, Any], settings: TrainingConfig) -> bool:
    """Whether a saved result still applies: a change of fp8_scaling needs a new trial."""
    trial = saved["trial"]
    if trial["use_fp8"]:
        return trial["scaling"] in choose_fp8_scalings(settings)
    return bool(saved["of"]["scaling"] == settings.fp8_scaling)


def _save_trial(trial: Fp8Trial, key: dict[str, Any], path: Path) -> None:
    """Save a result in the run, for its later starts, and in this machine's cache, for later runs."""
    record = {"trial": asdict(trial), "of": key}
    write_json_with_checksum(path, record)
    if trial.speedup is not None:
        cache_path = cache_dir() / FP8_CACHE_FILE
        write_json(cache_path, {**_read_cache(cache_path), _hash_key(key): record})


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        entries = read_json(path)
        return {key: entry for key, entry in entries.items() if Fp8Trial(**entry["trial"])}
    except (OSError, StorageError, AttributeError, KeyError, TypeError):
        return {}  # no cache yet, or not ours


def _hash_key(key: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
