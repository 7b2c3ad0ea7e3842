"""Run a few real steps and put memory and time beside the prediction: of a recipe's stages, or of the planner's cases.

modelwright plan RECIPE --measure     # measure_recipe: every training stage, as a run would build it
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

import torch

from modelwright.data.sources import EMBEDDED_DATASETS
from modelwright.engine.distributed import World
from modelwright.engine.memory_profiler import MemoryProfiler
from modelwright.engine.trainer import Engine
from modelwright.errors import DataError, UsageError, first_line
from modelwright.plan.calibrate import CPU_CASES, GPU_CASES, USER_FILE, PlanCase, calibration_for, fit
from modelwright.plan.hardware import gpu_spec_of, probe_device
from modelwright.plan.stage import StagePlan, plan_stage
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.schema import ColumnRole, DataConfig, Recipe
from modelwright.recipe.sections import CountOrFraction
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import RunFolder, write_json
from modelwright.runs.journal import Journal
from modelwright.stages.context import DEFAULT_OPTIONS, ParentModel, RunContext, StageInputs
from modelwright.stages.pipeline import BUILDERS
from modelwright.stages.planning import build_engine, fit_plan
from modelwright.stages.random_task import free_device, random_shards, random_weights, task_of

WARM_UP, TIMED, LONG, TIMED_IF_LONG = 5, 6, 0.4, 3
"""Steps before the clock counts, and on it; and how many of these where a step takes longer than so many seconds."""
CASE_STEPS = WARM_UP + TIMED + 1
STARVED = 0.75
"""Of the threads' time, the share below which other processes took the rest: the processor's own clock counts then."""
SEED = 42
STAND_INS: dict[str, tuple[str, dict[str, ColumnRole]]] = {
    "sft": ("field-guide", {"question": "prompt", "answer": "completion"}),
    "lora": ("field-guide", {"question": "prompt", "answer": "completion"}),
    "dpo": ("field-guide-pairs", {}),
}
"""Embedded rows that a stage is measured on where its own data is not on this machine."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class StepTimes:
    """Steps of an engine on the clock."""

    tokens: list[int]
    """Tokens of each step once warm."""
    seconds: list[float]
    """Seconds of each step once warm."""
    warm_up_seconds: float
    """Seconds of all steps before."""
    losses: list[float]
    """The loss of every step."""

    @property
    def tokens_per_second(self) -> float:
        """The median over the steps."""
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))


def measure_recipe(loaded: LoadedRecipe, steps: int, only: Sequence[str] = (), tell: Tell = print) -> dict[str, Any]:
    """Run each training stage of a recipe, or only those named; one that fails is reported and the others go on."""
    recipe = loaded.recipe
    if unknown := [stage for stage in only if stage not in recipe.stages]:
        raise UsageError(f"--stage is {unknown[0]!r}; it wants one of {', '.join(recipe.stages)}")
    rows: list[dict[str, Any]] = []
    for stage in only or recipe.stages:
        row: dict[str, Any] = {"stage": stage}
        with tempfile.TemporaryDirectory(prefix="modelwright-measure-") as place:
            try:
                row |= _measure_stage(_context(loaded, stage, steps, Path(place)), stage, steps, tell)
            except Exception as error:  # the next stage may still be measured
                row["failed"] = f"{type(error).__name__}: {first_line(error)[:300]}"
        free_device()
        rows.append(row)
    return {"recipe": recipe.name, "device": probe_device().name, "steps": steps, "stages": rows}


def lines(figures: dict[str, Any]) -> list[str]:
    """The measured stages as a table, and each one's memory at the peak by component."""
    rates, sizes = f"{'tokens/s':>10} {'predicted':>10} {'off':>5}", f"{'GiB':>7} {'predicted':>9} {'off':>5}"
    told = [f"{figures['recipe']} on {figures['device']}: {figures['steps']} steps of each stage"]
    told.append(f"{'stage':<9} {rates} {'s/step':>8} {sizes}")
    for row in figures["stages"]:
        if "failed" in row:
            told.append(f"{row['stage']:<9} failed: {row['failed']}")
            continue
        rate, memory = row["tokens_per_second"], row["memory_bytes"]
        told.append(
            f"{row['stage']:<9} {rate['measured']:>10,.0f} {_number(rate['predicted'], 10, ',.0f')} {_percent(rate)} "
            f"{row['step_seconds']:>8.3f} {memory['measured'] / 2**30:>7.2f} "
            f"{_number(memory['predicted'] and memory['predicted'] / 2**30, 9, '.2f')} {_percent(memory)}"
        )
        parts = ", ".join(f"{name} {_size(size)}" for name, size in sorted(row["parts"].items(), key=lambda p: -p[1]))
        told.append(f"  {row['arithmetic']}, {row['precision']}; at the peak, in {row['peak_in']}: {parts}")
        told += [f"  {note}" for note in row["notes"]]
    return told


def calibrate(tell: Tell = print) -> tuple[dict[str, Any], Path]:
    """Measure the planner's cases on this machine, fit its coefficients to them, and keep these for later plans."""
    facts = probe_device()
    gpu = gpu_spec_of(facts)
    runs: list[dict[str, Any]] = []
    for case in GPU_CASES if facts.device == "cuda" else CPU_CASES:
        plan = plan_stage(case_settings(case), 1, 1, facts)
        run = {"setting": asdict(case), "plan": plan.as_json(), **guarded_case(case, plan)}
        tell(f"{case.name}: {_case_line(run)}")
        runs.append(run)
    good = [run for run in runs if "peak_bytes" in run]
    if not good:
        raise UsageError("no case could be measured, so that nothing can be fitted; --debug shows the first error")
    fitted = fit(good, gpu, calibration_for(gpu))
    path = keep({fitted.card: fitted.as_json()})
    return {"device": asdict(facts), "runs": runs, "calibration": {fitted.card: fitted.as_json()}}, path


def keep(calibration: dict[str, Any]) -> Path:
    """Write fitted coefficients where the plans of this machine find them."""
    path = cache_dir() / USER_FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**known, **calibration})
    return path


def time_steps(engine: Engine, warm_up: int, steps: int | None = None) -> StepTimes:
    """Run steps and time those after the warm-up, `steps` of them or as many as their length asks for.

    A CPU that other processes use too is timed by its own clock. Ends early where the engine halves its micro-batch.
    """
    on_gpu, threads = engine.world.device.type == "cuda", torch.get_num_threads()
    marks, running = [(time.perf_counter(), time.process_time())], engine.steps()
    planned, wanted = engine.plan.micro_batch_size, warm_up + (steps or TIMED)
    tokens: list[int] = []
    losses: list[float] = []
    while len(tokens) < wanted and engine.plan.micro_batch_size == planned:
        report = next(running)
        tokens.append(report.tokens)
        losses.append(report.loss)
        marks.append((time.perf_counter(), time.process_time()))
        if steps is None and marks[-1][0] - marks[-2][0] >= LONG:
            wanted = warm_up + TIMED_IF_LONG
    seconds = []
    for (began, used), (ended, used_then) in pairwise(marks[warm_up:]):
        starved = not on_gpu and used_then - used < STARVED * threads * (ended - began)
        seconds.append((used_then - used) / threads if starved else ended - began)
    before = marks[min(warm_up, len(marks) - 1)][0] - marks[0][0]
    return StepTimes(tokens[warm_up:] or tokens[-1:], seconds or [math.inf], before, losses)


def peak_memory(engine: Engine) -> dict[str, Any]:
    """The most bytes of tensors so far: by the allocator on a GPU; on a CPU, and by component, over one more step."""
    peaks: dict[str, Any] = {}
    if engine.world.device.type == "cuda":
        peaks = {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "steady_bytes": torch.cuda.memory_allocated(),
        }
    profiler = MemoryProfiler(engine.task.module, engine.optimizer)
    with engine.eager(), profiler.profile_step():
        next(engine.steps())
    told = profiler.as_json()
    return {**{name: told[name] for name in ("peak_bytes", "peak_in", "parts")}, **peaks}


def measure_case(case: PlanCase, plan: StagePlan) -> dict[str, Any]:
    """A few steps of the real engine on random rows: the peak of memory, and the median step once it is warm."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.manual_seed(SEED)
    settings = case_settings(case)
    task = task_of(case, settings, device)
    engine = Engine(task, settings, replace(plan, train_rows=task.rows), World(device=device), SEED)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = time_steps(engine, WARM_UP if on_gpu else 2)
    if engine.plan.micro_batch_size < plan.micro_batch_size:  # the engine would go on with a smaller micro-batch
        return {"ran_out": engine.plan_changes[-1]}
    return {
        "step_seconds": [round(value, 6) for value in times.seconds],
        "warm_up_seconds": round(times.warm_up_seconds, 3),
        "tokens_per_step": times.tokens[-1],
        "tokens_per_second": round(times.tokens[-1] / median(times.seconds), 2),
        "trained": sum(weight.numel() for weight in engine.trainable_params.values()),
        **peak_memory(engine),
    }


def guarded_case(case: PlanCase, plan: StagePlan) -> dict[str, Any]:
    """A measured case; one that fails does not take the others with it."""
    try:
        return measure_case(case, plan)
    except torch.OutOfMemoryError as error:
        return {"ran_out": first_line(error)[:200]}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {first_line(error)}"[:300]}
    finally:
        free_device()


def case_settings(case: PlanCase) -> Any:
    """What the recipe's section of a case would be."""
    from modelwright.recipe.schema import ClassifyConfig, DpoConfig, SftConfig

    kind: Any = {"sft": SftConfig, "dpo": DpoConfig, "classify": ClassifyConfig}[case.stage]
    known = {name: value for name, value in case.settings.items() if name in kind.model_fields}
    told = {"max_steps": CASE_STEPS, "lr_scheduler_type": "constant", "learning_rate": 1e-5, **known}
    return kind(per_device_train_batch_size=max(1, case.rows), **told)


def _context(loaded: LoadedRecipe, stage: str, steps: int, place: Path) -> RunContext:
    """The stage as a run of so many steps would see it, on this device alone and in a folder that is thrown away."""
    short = {"max_steps": steps + 1, "sharding": "ddp", "eval_steps": None, "profile_memory": False}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = RunContext(
        loaded, RunFolder(place / "run"), Journal(None), World(device=device), probe_device(), DEFAULT_OPTIONS
    )
    return _with_settings(context, stage, short)


def _with_settings(context: RunContext, stage: str, changes: dict[str, Any]) -> RunContext:
    recipe: Recipe = context.recipe
    section = recipe.stages[stage].model_copy(update=changes)
    return replace(context, loaded=replace(context.loaded, recipe=recipe.model_copy(update={stage: section})))


def _measure_stage(context: RunContext, stage: str, steps: int, tell: Tell) -> dict[str, Any]:
    kind, notes = BUILDERS[stage], list[str]()
    context, inputs = _inputs(context, stage, notes)
    if context.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    built = kind.build(context, inputs, stage)
    plan = fit_plan(
        plan_stage(context.recipe.stages[stage], built.task.rows, 1, context.hardware), stage, built, context
    )
    built.set_total_steps(plan.steps)
    engine = build_engine(plan, stage, built, context)
    if done := built.precompute(engine, context.folder.frozen_cache(stage)):
        notes.append(done)
    setup = time.perf_counter() - began
    tell(f"{stage}: {inputs.model_name}, {built.parameter_counts}; {plan.batch_arithmetic}; ready after {setup:.1f} s")
    warm_up = min(3 if context.world.device.type == "cuda" else 1, steps - 1)
    times = time_steps(engine, warm_up, steps - warm_up)
    if engine.plan.micro_batch_size < plan.micro_batch_size:
        notes.append(engine.plan_changes[-1])
    peak, predicted = peak_memory(engine), plan.prediction or {}
    return {
        "model": inputs.model_name,
        "precision": engine.plan.precision,
        "arithmetic": engine.plan.batch_arithmetic,
        "setup_seconds": round(setup, 2),
        "warm_up_seconds": round(times.warm_up_seconds, 3),
        "step_seconds": round(median(times.seconds), 6),
        "tokens_per_second": _beside(times.tokens_per_second, predicted.get("tokens_per_second")),
        "memory_bytes": _beside(peak["peak_bytes"], predicted.get("memory", {}).get("bytes")),
        "peak_in": peak["peak_in"],
        "parts": peak["parts"],
        "losses": [round(loss, 4) for loss in times.losses],
        "notes": notes,
    }


def _inputs(context: RunContext, stage: str, notes: list[str]) -> tuple[RunContext, StageInputs]:
    """The stage's inputs as a run loads them; random weights or tokens in place of what an earlier stage would make."""
    recipe, parent = context.recipe, None
    if recipe.model.architecture is not None:
        parent = _unmade_model(context)
        notes.append("the weights are random: the recipe's architecture, before init and the stages before this one")
    elif recipe.parent_stage(stage) is not None:
        notes.append(
            f"starts from {recipe.model.display_name}, not from the {recipe.parent_stage(stage)} model of a run"
        )
    if stage == "pretrain" and recipe.pretrain is not None and recipe.prepare is not None:
        random_shards(context.folder.packed, recipe.pretrain.max_length, _vocab_size(recipe) or 1024)
        notes.append("the tokens are random: nothing is prepared yet")
    try:
        inputs = BUILDERS[stage].load_inputs(context, stage, parent)
    except (DataError, UsageError) as error:  # not on this machine, or not readable here
        if stage not in STAND_INS:
            raise
        name, columns = STAND_INS[stage]
        data = DataConfig(dataset_name=name, columns=columns, test_size=CountOrFraction(4))
        context = _with_settings(context, stage, {"data": data})
        inputs = BUILDERS[stage].load_inputs(context, stage, parent)
        notes.append(f"measured on the embedded {name}, since its own data is not here: {first_line(error)}")
    return context, replace(inputs, load_model=random_weights) if parent else inputs


def _unmade_model(context: RunContext) -> ParentModel:
    """A folder with the configuration and a tokenizer of the recipe's architecture, and no weights."""
    from modelwright.data.tokenizer import train_bpe
    from modelwright.models.from_scratch import llama_config
    from modelwright.models.pretrained import load_tokenizer

    architecture, folder = context.recipe.model.architecture, context.folder.model("init")
    words = _vocab_size(context.recipe)
    assert architecture is not None
    train_bpe(
        EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines(), min(1024, words or 1024), folder
    )
    sized = architecture.model_copy(update={"vocab_size": words})
    llama_config(sized, load_tokenizer(folder)).save_pretrained(folder)
    return ParentModel("init", folder, "random weights")


def _vocab_size(recipe: Recipe) -> int | None:
    """The vocabulary that the recipe's architecture or its tokenizer will have."""
    from modelwright.recipe.sections import round_up

    prepared = round_up(recipe.prepare.vocab_size) if recipe.prepare is not None else None
    return (recipe.model.architecture and recipe.model.architecture.vocab_size) or prepared


def _beside(measured: float, predicted: float | None) -> dict[str, float | None]:
    off = round(predicted / measured - 1, 4) if predicted else None
    return {"measured": round(measured, 1), "predicted": predicted, "off": off}


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _number(value: float | None, width: int, form: str) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:>{width}{form}}"


def _percent(row: dict[str, float | None]) -> str:
    return f"{'–':>5}" if row["off"] is None else f"{row['off']:>+5.0%}"


def _case_line(run: dict[str, Any]) -> str:
    if "peak_bytes" not in run:
        return str(run.get("ran_out") or run["failed"])
    return f"{run['tokens_per_second']:,.0f} tokens/s, {run['peak_bytes'] / 2**30:.2f} GiB"
