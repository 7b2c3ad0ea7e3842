"""Run a few real steps and compare memory and time with the prediction: a recipe's stages, or the planner's cases.

modelwright plan RECIPE --measure     # measure_recipe: every training stage, built as a run builds it
modelwright plan --calibrate          # calibrate: random models and rows, to fit the planner to this machine
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from modelwright.data.chat_tokens import TokenizedRow
from modelwright.data.images import ImageDataset, ImageSplits
from modelwright.data.preferences import TokenizedPair
from modelwright.data.row_formats import ROW_FORMATS
from modelwright.data.shards import DocumentBatch, ShardLayout, write_manifest, write_split
from modelwright.data.sources import EMBEDDED_DATASETS
from modelwright.data.tokenizer import TokenizedDocuments, train_bpe
from modelwright.engine.distributed import World
from modelwright.engine.memory_profiler import MemoryProfiler
from modelwright.engine.task import MicroBatch, Task
from modelwright.engine.trainer import Engine
from modelwright.errors import DataError, UsageError, first_line
from modelwright.models import activation_checkpoint, pretrained, trainable
from modelwright.models.attention import unshared_layout
from modelwright.models.prefix_sharing import supports_layout
from modelwright.models.save import llama_config
from modelwright.models.vision import resnet18
from modelwright.plan.calibrate import CPU_CASES, GPU_CASES, USER_FILE, PlanCase, calibration_for, fit
from modelwright.plan.hardware import gpu_spec_of, probe_device
from modelwright.plan.model_shape import SHIPPED_CONFIGS
from modelwright.plan.stage import StagePlan, plan_stage
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.schema import Recipe
from modelwright.recipe.sections import round_up
from modelwright.recipe.stage_specs import name_images, throughput_unit
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import RunFolder, write_json
from modelwright.runs.journal import Journal
from modelwright.stages.context import DEFAULT_OPTIONS, ParentModel, RunContext, StageInputs
from modelwright.stages.pipeline import free_device
from modelwright.stages.planning import build_engine, fit_plan
from modelwright.stages.specs import BUILDERS
from modelwright.tasks.batching import collate_examples
from modelwright.tasks.classify import ClassifyTask
from modelwright.tasks.dpo import DpoLoss, collate_pairs, with_layout
from modelwright.tasks.sft import SftLoss

WARM_UP_STEPS, TIMED_STEPS = 5, 6
"""Steps before timing starts, and timed steps."""
LONG_STEP_SECONDS, TIMED_LONG_STEPS = 0.4, 3
"""Where a step takes this long, fewer are timed."""
CASE_STEPS = WARM_UP_STEPS + TIMED_STEPS + 1
MIN_CPU_FRACTION = 0.75
"""Where the threads get less than this part of the wall time, other processes took the rest: CPU time counts then."""
SEED = 42
Log = Callable[[str], None]


@dataclass(frozen=True)
class StepTimes:
    """Timed steps of an engine."""

    tokens: list[int]
    """Tokens of each timed step."""
    seconds: list[float]
    """Seconds of each timed step."""
    warm_up_seconds: float
    """Seconds of all warm-up steps."""
    losses: list[float]
    """The loss of every step."""

    @property
    def tokens_per_second(self) -> float:
        """The median over the timed steps."""
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))


def measure_recipe(loaded: LoadedRecipe, steps: int, only: Sequence[str] = (), log: Log = print) -> dict[str, Any]:
    """Measure each training stage of a recipe, or only those named; a stage that fails is reported."""
    recipe = loaded.recipe
    if unknown := [stage for stage in only if stage not in recipe.stages]:
        raise UsageError(f"--stage is {unknown[0]!r}; it wants one of {', '.join(recipe.stages)}")
    rows: list[dict[str, Any]] = []
    for stage in only or recipe.stages:
        row: dict[str, Any] = {"stage": stage}
        with tempfile.TemporaryDirectory(prefix="modelwright-measure-") as work_dir:
            try:
                row |= _measure_stage(_context(loaded, stage, steps, Path(work_dir)), stage, steps, log)
            except Exception as error:  # the next stage may still be measured
                row["failed"] = f"{type(error).__name__}: {first_line(error)[:300]}"
        free_device()
        rows.append(name_images(row, stage))
    return {"recipe": recipe.name, "device": probe_device().name, "steps": steps, "stages": rows}


def lines(figures: dict[str, Any]) -> list[str]:
    """The measured stages as a table, with the memory at each stage's peak by component."""
    unit = f"{throughput_unit(figures['stages'][0]['stage'])}/s"
    rates, sizes = f"{unit:>10} {'predicted':>10} {'off':>5}", f"{'GiB':>7} {'predicted':>9} {'off':>5}"
    table = [f"{figures['recipe']} on {figures['device']}: {figures['steps']} steps of each stage"]
    table.append(f"{'stage':<9} {rates} {'s/step':>8} {sizes}")
    for row in figures["stages"]:
        if "failed" in row:
            table.append(f"{row['stage']:<9} failed: {row['failed']}")
            continue
        rate, memory = row[f"{throughput_unit(row['stage'])}_per_second"], row["memory_bytes"]
        table.append(
            f"{row['stage']:<9} {rate['actual']:>10,.0f} {_number(rate['predicted'], 10, ',.0f')} {_percent(rate)} "
            f"{row['step_seconds']:>8.3f} {memory['actual'] / 2**30:>7.2f} "
            f"{_number(memory['predicted'] and memory['predicted'] / 2**30, 9, '.2f')} {_percent(memory)}"
        )
        by_size = sorted(row["components"].items(), key=lambda item: -item[1])
        components = ", ".join(f"{name} {_size(size)}" for name, size in by_size)
        table.append(
            f"  {row['batch_arithmetic']}, {row['precision']}; at the peak, in {row['peak_phase']}: {components}"
        )
        table += [f"  {note}" for note in row["notes"]]
    return table


def calibrate(log: Log = print) -> tuple[dict[str, Any], Path]:
    """Measure the planner's cases on this machine, fit its coefficients to them, and save these for later plans."""
    device = probe_device()
    gpu = gpu_spec_of(device)
    runs: list[dict[str, Any]] = []
    for case in GPU_CASES if device.device == "cuda" else CPU_CASES:
        plan = plan_stage(case_settings(case), 1, 1, device)
        run = {"setting": asdict(case), "plan": plan.as_json(), **measure_case_or_error(case, plan)}
        log(f"{case.name}: {_case_line(run)}")
        runs.append(run)
    measured = [run for run in runs if "peak_bytes" in run]
    if not measured:
        raise UsageError("no case could be measured, so that nothing can be fitted; --debug shows the first error")
    fitted = fit(measured, gpu, calibration_for(gpu))
    calibration, path = {fitted.device: fitted.as_json()}, cache_dir() / USER_FILE
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**saved, **calibration})
    return {"device": asdict(device), "runs": runs, "calibration": calibration}, path


def time_steps(engine: Engine, warm_up: int, steps: int | None = None) -> StepTimes:
    """Run steps and time those after the warm-up: `steps` of them, or fewer where a step takes long.

    On a CPU that other processes use too, CPU time counts. Ends early where the engine halves its micro-batch.
    """
    on_gpu, threads = engine.world.device.type == "cuda", torch.get_num_threads()
    clocks, running = [(time.perf_counter(), time.process_time())], engine.steps()
    micro_batch_size, total = engine.plan.micro_batch_size, warm_up + (steps or TIMED_STEPS)
    tokens: list[int] = []
    losses: list[float] = []
    while len(tokens) < total and engine.plan.micro_batch_size == micro_batch_size:
        report = next(running)
        tokens.append(report.tokens)
        losses.append(report.loss)
        clocks.append((time.perf_counter(), time.process_time()))
        if steps is None and clocks[-1][0] - clocks[-2][0] >= LONG_STEP_SECONDS:
            total = warm_up + TIMED_LONG_STEPS
    seconds = []
    for (wall_start, cpu_start), (wall_end, cpu_end) in pairwise(clocks[warm_up:]):
        wall, cpu = wall_end - wall_start, (cpu_end - cpu_start) / threads
        seconds.append(cpu if not on_gpu and cpu < MIN_CPU_FRACTION * wall else wall)
    warm_up_seconds = clocks[min(warm_up, len(clocks) - 1)][0] - clocks[0][0]
    return StepTimes(tokens[warm_up:] or tokens[-1:], seconds or [math.inf], warm_up_seconds, losses)


def peak_memory(engine: Engine) -> dict[str, Any]:
    """Peak tensor memory so far, by the allocator on a GPU; on a CPU, and by component, of one more step."""
    allocator: dict[str, Any] = {}
    if engine.world.device.type == "cuda":
        allocator = {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "steady_bytes": torch.cuda.memory_allocated(),
        }
    profiler = MemoryProfiler(engine.task.module, engine.optimizer)
    with engine.eager(), profiler.profile_step():
        next(engine.steps())
    profile = profiler.log.as_json()
    return {**{name: profile[name] for name in ("peak_bytes", "peak_phase", "components")}, **allocator}


def measure_case(case: PlanCase, plan: StagePlan) -> dict[str, Any]:
    """A few steps of the engine on random rows: peak memory and the time of each step after the warm-up."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.manual_seed(SEED)
    settings = case_settings(case)
    task = case_task(case, settings, device)
    engine = Engine(task, settings, plan, World(device=device), SEED)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = time_steps(engine, WARM_UP_STEPS if on_gpu else 2)
    if engine.plan.micro_batch_size < plan.micro_batch_size:
        return {"ran_out": engine.plan.reasons[-1]}
    return {
        "step_seconds": [round(value, 6) for value in times.seconds],
        "warm_up_seconds": round(times.warm_up_seconds, 3),
        "tokens_per_step": times.tokens[-1],
        "tokens_per_second": round(times.tokens[-1] / median(times.seconds), 2),
        "trained": sum(weight.numel() for weight in engine.trainable_params.values()),
        **peak_memory(engine),
    }


def measure_case_or_error(case: PlanCase, plan: StagePlan) -> dict[str, Any]:
    """A measured case, or the error that ended it."""
    try:
        return measure_case(case, plan)
    except torch.OutOfMemoryError as error:
        return {"ran_out": first_line(error)[:200]}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {first_line(error)}"[:300]}
    finally:
        free_device()


def case_settings(case: PlanCase) -> Any:
    """The stage section of a case."""
    return case.stage_settings(max_steps=CASE_STEPS, lr_scheduler_type="constant", learning_rate=1e-5,
                               per_device_train_batch_size=max(1, case.rows))  # fmt: skip


def _context(loaded: LoadedRecipe, stage: str, steps: int, work_dir: Path) -> RunContext:
    """The context of a run of so many steps on this device alone, in a temporary folder."""
    settings = {"max_steps": steps + 1, "distributed_strategy": "ddp", "eval_steps": None, "profile_memory": False}
    world = World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    context = RunContext(loaded, RunFolder(work_dir / "run"), Journal(None), world, probe_device(), DEFAULT_OPTIONS)
    return _with_settings(context, stage, settings)


def _with_settings(context: RunContext, stage: str, changes: dict[str, Any]) -> RunContext:
    recipe: Recipe = context.recipe
    section = recipe.stages[stage].model_copy(update=changes)
    return replace(context, loaded=replace(context.loaded, recipe=recipe.model_copy(update={stage: section})))


def _measure_stage(context: RunContext, stage: str, steps: int, log: Log) -> dict[str, Any]:
    on_gpu, notes = context.world.device.type == "cuda", list[str]()
    context, inputs = _load_inputs(context, stage, notes)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    parts = BUILDERS[stage].build(context, inputs, stage)
    plan = plan_stage(context.recipe.stages[stage], parts.task.epoch_rows, 1, context.hardware)
    plan = fit_plan(plan, stage, parts, context)
    engine = build_engine(plan, stage, parts, context)
    if note := parts.precompute(engine, context.folder.frozen_cache(stage)):
        notes.append(note)
    setup = time.perf_counter() - started
    log(f"{stage}: {inputs.model_name}, {parts.parameter_counts}; {plan.batch_arithmetic}; ready after {setup:.1f} s")
    warm_up = min(3 if on_gpu else 1, steps - 1)
    times = time_steps(engine, warm_up, steps - warm_up)
    notes += engine.plan.reasons[len(plan.reasons) :]
    peak, prediction = peak_memory(engine), plan.prediction or {}
    return {
        "model": inputs.model_name,
        "precision": engine.plan.precision,
        "batch_arithmetic": engine.plan.batch_arithmetic,
        "setup_seconds": round(setup, 2),
        "warm_up_seconds": round(times.warm_up_seconds, 3),
        "step_seconds": round(median(times.seconds), 6),
        "tokens_per_second": _compare(times.tokens_per_second, prediction.get("tokens_per_second")),
        "memory_bytes": _compare(peak["peak_bytes"], prediction.get("memory", {}).get("bytes")),
        "peak_phase": peak["peak_phase"],
        "components": peak["components"],
        "losses": [round(loss, 4) for loss in times.losses],
        "notes": notes,
    }


def _load_inputs(context: RunContext, stage: str, notes: list[str]) -> tuple[RunContext, StageInputs]:
    """The stage's inputs as a run loads them, with random weights or tokens for what an earlier stage would make."""
    recipe, parent = context.recipe, None
    if recipe.model.architecture is not None:
        parent = _untrained_model(context)
        notes.append("the weights are random: the recipe's architecture, before init and the stages before this one")
    elif parent_stage := recipe.parent_stage(stage):
        notes.append(f"starts from {recipe.model.display_name}, not from the {parent_stage} model of a run")
    settings: Any = recipe.stages[stage]
    row_format = ROW_FORMATS[settings.spec.row_format]
    if row_format.is_packed and recipe.prepare is not None:
        random_shards(context.folder.packed, settings.max_length, _vocab_size(recipe) or 1024)
        notes.append("the tokens are random: nothing is prepared yet")
    try:
        inputs = BUILDERS[stage].load_inputs(context, stage, parent)
    except (DataError, UsageError) as error:  # not on this machine, or not readable here
        if row_format.embedded is None:
            raise
        context = _with_settings(context, stage, {"data": row_format.embedded})
        inputs = BUILDERS[stage].load_inputs(context, stage, parent)
        source = f"the embedded {row_format.embedded.source}"
        notes.append(f"measured on {source}, since its own data is not here: {first_line(error)}")
    return context, replace(inputs, load_model=load_random_model) if parent else inputs


def _untrained_model(context: RunContext) -> ParentModel:
    """A folder with the configuration and a tokenizer of the recipe's architecture, and no weights."""
    architecture, folder = context.recipe.model.architecture, context.folder.model("init")
    vocab_size = _vocab_size(context.recipe)
    assert architecture is not None
    texts = EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines()
    train_bpe(texts, min(1024, vocab_size or 1024), folder)
    sized = architecture.model_copy(update={"vocab_size": vocab_size})
    llama_config(sized, pretrained.load_tokenizer(folder)).save_pretrained(folder)
    return ParentModel("init", folder, "random weights")


def _vocab_size(recipe: Recipe) -> int | None:
    """The vocabulary size that the recipe's architecture or its tokenizer will have."""
    prepared = round_up(recipe.prepare.vocab_size) if recipe.prepare is not None else None
    return (recipe.model.architecture and recipe.model.architecture.vocab_size) or prepared


def _compare(actual: float, predicted: float | None) -> dict[str, float | None]:
    relative_error = round(predicted / actual - 1, 4) if predicted else None
    return {"predicted": predicted, "actual": round(actual, 1), "relative_error": relative_error}


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _number(value: float | None, width: int, spec: str) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:>{width}{spec}}"


def _percent(row: dict[str, float | None]) -> str:
    return f"{'–':>5}" if row["relative_error"] is None else f"{row['relative_error']:>+5.0%}"


def _case_line(run: dict[str, Any]) -> str:
    if "peak_bytes" not in run:
        return str(run.get("ran_out") or run["failed"])
    return f"{run['tokens_per_second']:,.0f} tokens/s, {run['peak_bytes'] / 2**30:.2f} GiB"


def case_task(case: PlanCase, settings: Any, device: torch.device) -> Any:
    """The task of a case over random rows, its model prepared as a stage prepares it."""
    if settings.spec.modality == "image":
        return _random_image_task(case.rows * 8, case.smaller.get("width", 64), settings)
    model = _random_model(case_config(case), "auto", device)
    pretrained.prepare_model(model, device, "auto", packed=False)
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing and settings.gradient_checkpointing != "auto":
        activation_checkpoint.enable_activation_checkpointing(model, settings.gradient_checkpointing)
    rows = case.rows * settings.gradient_accumulation_steps
    return RandomTokenTask(model.to(device), settings, rows, case.length)


def case_config(case: PlanCase) -> Any:
    """The transformers config of a case's shape."""
    from transformers import CONFIG_MAPPING

    config = {**SHIPPED_CONFIGS[case.model], **case.smaller}
    model_type = str(config.pop("model_type"))
    if model_type == "gpt_neox":
        config = {key: value for key, value in config.items() if key not in ("num_key_value_heads", "head_dim")}
    config["max_position_embeddings"] = max(case.length, 512)
    return CONFIG_MAPPING[model_type](**config, bos_token_id=0, eos_token_id=0, pad_token_id=0)


def load_random_model(path: Path, attn_implementation: str, quantization: str, device: torch.device) -> Any:
    """A model of a folder's configuration with random weights, created on the device: a 7B needs no disk."""
    from transformers import AutoConfig

    if quantization != "none":
        raise UsageError(f"quantization: {quantization} wants weights that are there; train the stages before it first")
    return _random_model(AutoConfig.from_pretrained(path), attn_implementation, device)


def _random_model(config: Any, attn_implementation: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    pretrained.silence_transformers()
    implementation = "sdpa" if attn_implementation == "auto" else attn_implementation
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)


def random_shards(folder: Path, length: int, vocab_size: int) -> None:
    """Write shards of random tokens in documents of many lengths."""
    rng = np.random.default_rng(SEED)
    layout = ShardLayout(length, vocab_size)
    lengths = rng.integers(20, 2 * length, 512)
    token_ids = rng.integers(0, vocab_size, int(lengths.sum())).astype(np.uint32)
    documents = TokenizedDocuments(token_ids, lengths, lengths * 4)
    batch = DocumentBatch(len(token_ids), lambda: documents)
    splits = {"train": write_split(folder, "train", layout, {"random": [batch]}, "r")}
    write_manifest(folder, layout, splits, {"tokenizer": "random"})


class RandomTokenTask(Task):
    """Rows of random tokens for the loss of sft or dpo."""

    rows = held_out_rows = 0

    def __init__(self, model: Any, settings: Any, rows: int, length: int) -> None:
        self.rows, self._length, self._has_pairs = rows, length, settings.spec.row_format == "pairs"
        vocab_size = model.config.get_text_config().vocab_size
        self._tokens = np.random.default_rng(SEED).integers(1, vocab_size, (rows, length)).astype(np.int32)
        self._use_layout = self._has_pairs and supports_layout(model, unshared_layout)
        self.module: Any = DpoLoss(model, settings) if self._has_pairs else SftLoss(model)
        self.metric_names: tuple[str, ...] = DpoLoss.metric_names if self._has_pairs else ("loss",)

    def row_length(self, row: int) -> int:
        return self._length

    def held_out_batch(self, rows: Sequence[int]) -> Any:
        """No row is held out: only the empty batch is ever requested."""
        return self.batch(rows)

    def batch(self, rows: Sequence[int], step: int = 0) -> Any:
        """Every token is trained; a pair has a prompt of half a row and two answers of a quarter each."""
        tokens = self._tokens[list(rows)]
        if not self._has_pairs:
            loss_mask = np.arange(self._length) > 0
            return collate_examples([[TokenizedRow(row, loss_mask)] for row in tokens])
        half, quarter = self._length // 2, self._length // 4
        loss_mask = np.ones(quarter, dtype=bool)
        pairs = []
        for row in tokens:
            prompt, *answers = np.split(row, [half, half + quarter, half + 2 * quarter])
            chosen, rejected = (TokenizedRow(answer, loss_mask) for answer in answers[:2])
            pairs.append(TokenizedPair(prompt, chosen, rejected))
        batch = with_layout(unshared_layout, collate_pairs(pairs)) if self._use_layout else collate_pairs(pairs)
        ref_logps = torch.zeros(batch.inputs["positions_and_targets"].shape[1])
        return MicroBatch({**batch.inputs, "ref_logps": ref_logps}, batch.trained_tokens, batch.tokens)


def _random_image_task(rows: int, width: int, settings: Any) -> ClassifyTask:
    rng, classes = np.random.default_rng(SEED), tuple(f"class {index}" for index in range(10))

    def random_images(count: int) -> ImageDataset:
        images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        return ImageDataset(images, rng.integers(0, 10, count, dtype=np.int64), classes, "random pixels")

    return ClassifyTask(resnet18(10, width, 3), ImageSplits(random_images(rows), random_images(64)), settings, SEED)
