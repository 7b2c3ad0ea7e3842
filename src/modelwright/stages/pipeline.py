"""Run a recipe: every stage in order, each behind its gate; finished stages are verified and skipped.

A judged stage leaves training_history.json, training_summary.json and a model card."""

from __future__ import annotations

import gc
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from modelwright import __version__
from modelwright.data.row_formats import ROW_FORMATS
from modelwright.data.sources import is_embedded, is_hub_name, iter_rows, local_path
from modelwright.engine.distributed import World, init_distributed
from modelwright.errors import DataError, GateClosed, ModelwrightError, RecipeError, Refused, StorageError, UsageError
from modelwright.models import pretrained
from modelwright.models.save import atomic_model_folder
from modelwright.plan import hardware
from modelwright.recipe.load import LoadedRecipe, add_recipe_location, dump_yaml, load
from modelwright.recipe.sections import DataConfig, EvaluateConfig
from modelwright.recipe.stage_specs import ANSWER_METRICS, STAGES, TrainableConfig
from modelwright.report import html
from modelwright.report.history import read_history
from modelwright.report.model_card import render_model_card
from modelwright.report.trackers import start_trackers
from modelwright.runs.folder import (
    RUN_FORMAT,
    RunFolder,
    fsync_path,
    has_valid_checksum,
    read_json,
    run_lock,
    write_json,
    write_text,
)
from modelwright.runs.journal import EventListener, Journal
from modelwright.runs.journal import read as read_events
from modelwright.stages import evaluate, export, gate, prepare
from modelwright.stages.context import (
    CONTENT_KEYS,
    DEFAULT_OPTIONS,
    GracefulShutdown,
    Metrics,
    RunContext,
    RunOptions,
    StageBuilder,
    StageInputs,
    StageStatus,
    StageStatuses,
    build_resume_config,
    check_resume_config,
    stage_settings,
    validate_overrides,
)
from modelwright.stages.planning import describe_adapters
from modelwright.stages.specs import BUILDERS
from modelwright.stages.stage_runner import StageRunner
from modelwright.tasks import scoring, verifiers

NON_TRAINING_STAGES: dict[str, Callable[[RunContext], None]] = {
    "prepare": prepare.prepare_stage,
    "init": prepare.init_stage,
    "evaluate": evaluate.run,
}
"""Stages that train nothing; each skips by itself what is already complete."""


def run(
    loaded: LoadedRecipe, listener: EventListener | None = None, options: RunOptions = DEFAULT_OPTIONS
) -> RunFolder:
    """Run a recipe in its run folder; an interrupted run resumes."""
    _check_options(loaded, options)
    folder, shutdown = RunFolder(Path(loaded.recipe.run_dir)), GracefulShutdown()
    with shutdown.handle_signals(), init_distributed() as world, ExitStack() as stack:

        def lock_folder() -> str | None:
            folder.reject_unsafe_files()
            folder.check_format()
            folder.create()
            return stack.enter_context(run_lock(folder.lock))

        dead_holder = world.on_rank0_broadcast(lock_folder)
        tracked_listener = (
            stack.enter_context(start_trackers(loaded.recipe, folder, listener)) if world.is_main else None
        )
        journal = Journal(folder.journal if world.is_main else None, tracked_listener)
        stack.callback(journal.close)
        context = RunContext(loaded, folder, journal, world, _common_hardware(world), options)
        try:
            _run_stages(context, shutdown, dead_holder)
        except Exception as error:
            shutdown.finish_error()
            if isinstance(error, ModelwrightError):
                _log_stopped(journal, error)
                _write_report(context)
            raise
        _write_report(context)
    return folder


def _common_hardware(world: World) -> hardware.DeviceInfo:
    """The device info for all ranks: the weakest device decides, so that all ranks make the same plan."""
    local = hardware.probe_device()
    on_gpu = local.device == "cuda"
    memory, fast_bf16, min_on_gpu, negative_max_on_gpu = world.all_reduce_min(
        local.memory, local.fast_bf16, on_gpu, -on_gpu
    )
    if min_on_gpu != -negative_max_on_gpu:
        raise UsageError(
            "some ranks have a GPU and some have none; give every node one, or hide those that are there with "
            "CUDA_VISIBLE_DEVICES="
        )
    name = world.on_rank0_broadcast(lambda: local.name)
    return replace(local, name=name, memory=int(memory), fast_bf16=bool(fast_bf16))


def _check_options(loaded: LoadedRecipe, options: RunOptions) -> None:
    """Reject stages and settings on the command line that the recipe does not have."""
    stages = list(loaded.recipe.pipeline)
    stage_options = [
        ("--from-stage", options.from_stage),
        ("--until-stage", options.until_stage),
        *(("--accept-gate", name) for name in options.accepted_gates),
    ]
    for option, stage in stage_options:
        if stage is not None and stage not in stages:
            raise UsageError(f"{option} {stage}: the stages of this recipe are {', '.join(stages)}")
    first, last = options.from_stage, options.until_stage
    if first and last and stages.index(first) > stages.index(last):
        raise UsageError(f"--from-stage {first} comes after --until-stage {last}; nothing would be done")
    if options.accepted_gates and not (options.accept_reason or "").strip():
        raise UsageError('--accept-gate wants a reason, which is recorded in the run: --reason "..."')
    validate_overrides(loaded.recipe, options.overrides)
    if loaded.recipe.evaluate and loaded.recipe.evaluate.answers:
        verifiers.require_trusted(loaded.recipe.evaluate.answers, loaded.path.parent, options.trusted_files)


def _run_stages(context: RunContext, shutdown: GracefulShutdown, dead_holder: str | None) -> None:
    recipe, journal, options = context.recipe, context.journal, context.options
    import_seconds = process_seconds() if options.is_command else 0.0
    started = time.monotonic() - import_seconds
    journal.add("run", recipe=recipe.name, folder=str(context.folder.path), stages=list(recipe.pipeline),
                world=context.world.size, device=context.hardware.name, modelwright=__version__,
                run_format=RUN_FORMAT, import_seconds=import_seconds)  # fmt: skip
    for line in (*context.loaded.notes, *([dead_holder] if dead_holder else [])):
        journal.add("note", message=line)
    statuses, names = StageStatuses(recipe.pipeline, journal), list(recipe.pipeline)
    with context.span("check", names[0]):
        context.world.on_rank0_broadcast(lambda: _check_before_start(context))
    first_index = names.index(options.from_stage) if options.from_stage else 0
    for stage in names[:first_index]:
        if stage in BUILDERS:
            context.world.on_rank0_broadcast(lambda stage=stage: gate.require_open_gate(context, stage))  # type: ignore[misc]
        statuses.set_status(stage, "done")
    for stage in names[first_index:]:
        statuses.set_status(stage, "running")
        if stage in NON_TRAINING_STAGES:
            with context.span(stage, stage):
                NON_TRAINING_STAGES[stage](context)
            statuses.set_status(stage, "done")
        else:
            _run_stage(context, statuses, stage, shutdown)
        if stage == options.until_stage:
            break
    journal.add("done", folder=str(context.folder.path), seconds=round(time.monotonic() - started, 1))


def _refuse_run_of_another_recipe(context: RunContext) -> None:
    """Refuse the folder of a run that shares no stage with this one: its summary and history would be replaced."""
    if not context.folder.recipe.exists():
        return
    try:
        saved, recipe = load(context.folder.recipe, environ={}).recipe, context.recipe
    except RecipeError:  # damaged, or of another version: written again
        return
    if saved.name != recipe.name and saved.stages and recipe.stages and not saved.stages.keys() & recipe.stages.keys():
        raise Refused(
            f"{context.folder.path} holds the run of {saved.name} ({', '.join(saved.stages)}), and this is "
            f"{recipe.name} ({', '.join(recipe.stages)}); choose another output_dir"
        )


def _require_data_of_later_stages(context: RunContext, unfinished: Sequence[str]) -> None:
    """Refuse missing data of later stages now, not after the stages before them; by the first row of each source."""
    names, last = list(context.recipe.pipeline), context.options.until_stage
    for stage in unfinished:
        data, row_format = context.recipe.data_for(stage), context.recipe.stages[stage].spec.row_format
        if row_format == "images" or (last and names.index(stage) > names.index(last)):
            continue
        for part in data.parts.values() if ROW_FORMATS[row_format].is_checked(context.recipe) else ():
            try:
                if not is_hub_name(part.source, context.recipe_dir):
                    next(iter_rows(part.source, part, context.recipe_dir), None)
            except UsageError as error:
                before = names[names.index(stage) - 1]
                raise UsageError(f"{stage}: {error}; --until-stage {before} trains without it") from None


def _check_before_start(context: RunContext) -> None:
    """Before any stage starts: refuse changed settings of finished stages, missing packages and unclear questions."""
    _refuse_run_of_another_recipe(context)
    results = {stage: context.folder.result(stage) for stage in context.recipe.pipeline}
    damaged = [stage for stage, path in results.items() if path.exists() and not has_valid_checksum(path)]
    unfinished = [stage for stage in context.recipe.stages if stage in damaged or not results[stage].exists()]
    for stage in unfinished:
        if isinstance(settings := context.recipe.stages[stage], TrainableConfig):
            pretrained.require_bitsandbytes(settings.quantization)
    if unfinished:
        describe_adapters(context.recipe, context.recipe_dir)
        _require_data_of_later_stages(context, unfinished[1:])
    if unfinished and (config := context.recipe.evaluate):
        if config.tasks:
            scoring.require_lm_eval()
        if config.multiple_choice:
            evaluate.read_questions(config, context.recipe_dir)
        evaluate.load_prompts(context.recipe, context.recipe_dir)
    names, allowed = list(context.recipe.pipeline), set(context.options.overrides)
    if first := context.options.from_stage:  # --fp8 and --no-fp8 are for the stages that are run
        allowed |= {
            f"{stage}.{name}" for stage in names[: names.index(first)] for name in ("precision", "fp8_validation")
        }
    for stage in context.recipe.stages:
        if stage not in unfinished:
            resume_config = read_json(results[stage])["resume_config"]
            saved = {key: value for key, value in resume_config.items() if key not in CONTENT_KEYS}
            check_resume_config(saved, stage_settings(context.recipe, stage), allowed)
    for stage in damaged:
        results[stage].replace(results[stage].with_name("result.damaged.json"))
        context.note(
            stage, f"the result of {stage} is damaged; the stage is finished again from its last good checkpoint"
        )


def _run_stage(context: RunContext, statuses: StageStatuses, stage: str, shutdown: GracefulShutdown) -> None:
    """Train a stage unless it is complete, then judge it."""
    builder, journal = BUILDERS[stage], context.journal
    parent_stage = context.recipe.parent_stage(stage)
    parent = gate.verified_parent(context.folder, parent_stage) if parent_stage else None
    name = f"the {parent_stage} model of this run" if parent_stage else context.recipe.model.display_name
    journal.add("loading", stage=stage, model=name, converting=pretrained.needs_conversion(name))
    context.world.heartbeat.set_phase("loading data")
    try:
        with context.span("load data", stage):
            inputs = builder.load_inputs(context, stage, parent)
    except DataError as error:
        raise DataError(add_recipe_location(error.problems, context.loaded, stage)) from None
    resume_config = build_resume_config(context.recipe, stage, inputs.data_fingerprint, inputs.model_fingerprint)
    result = context.world.on_rank0_broadcast(lambda: gate.completed_result(context, stage, resume_config))
    before = None
    if result is None:
        journal.add("stage_started", stage=stage)
        before = _train(context, builder, inputs, stage, shutdown)
    else:
        _save_resolved_recipe(context, inputs)
        context.note(stage, f"{stage} already complete and verified; skipped")
    try:
        status = context.world.on_rank0_broadcast(lambda: promote(context, builder, stage, inputs, before))
    except ModelwrightError:
        statuses.set_status(stage, "closed")
        raise
    statuses.set_status(stage, status)


def _train(
    context: RunContext, builder: StageBuilder, inputs: StageInputs, stage: str, shutdown: GracefulShutdown
) -> Any:
    """Train a stage and free its weights and optimizer state; returns the samples of its start model, if taken."""
    samples: list[Any] = []
    runner = StageRunner(context, builder, inputs, stage, shutdown)
    _save_resolved_recipe(context, inputs)
    if _is_compared(context, stage):
        runner.while_saving = lambda: samples.append(builder.sample_before(context, inputs, stage))
    runner.run()
    with context.span("free memory", stage):
        del runner
        free_device()
    return samples[0] if samples else None


def _is_compared(context: RunContext, stage: str) -> bool:
    """Whether samples of a stage's model are compared with those of its start model."""
    return stage == list(context.recipe.stages)[-1] or bool(context.recipe.gate_names(stage) & set(ANSWER_METRICS))


def free_device() -> None:
    """Free the memory of a deleted model and its optimizer state."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _save_resolved_recipe(context: RunContext, inputs: StageInputs) -> None:
    """Write the recipe with pinned revision and absolute paths, after every check has passed."""
    recipe, recipe_dir = context.recipe, context.recipe_dir
    model = {
        key: _absolute_path(getattr(recipe.model, key), recipe_dir)
        for key in ("model_name_or_path", "tokenizer_name_or_path")
    }
    resolved: dict[str, Any] = {
        "model": recipe.model.model_copy(update={**model, "revision": inputs.revision}),
        "data": _absolute_sources(recipe.data, recipe_dir),
        "evaluate": _absolute_evaluation(recipe.evaluate, recipe_dir),
        **{
            stage: section.model_copy(update={"data": _absolute_sources(section.data, recipe_dir)})
            for stage, section in recipe.stages.items()
        },
    }
    context.world.on_rank0_broadcast(
        lambda: write_text(context.folder.recipe, dump_yaml(recipe.model_copy(update=resolved)))
    )


def _absolute_evaluation(config: EvaluateConfig | None, recipe_dir: Path) -> EvaluateConfig | None:
    if config is None:
        return None
    names = ("perplexity_text", "multiple_choice")
    paths: dict[str, Any] = {name: _absolute_path(getattr(config, name), recipe_dir) for name in names}
    if answers := config.answers:
        files = {
            name: verifier.model_copy(update={"file": _absolute_path(verifier.file, recipe_dir)})
            for name, verifier in answers.verifiers.items()
        }
        dataset_name = _absolute_path(answers.dataset_name, recipe_dir)
        paths["answers"] = answers.model_copy(update={"verifiers": files, "dataset_name": dataset_name})
    return config.model_copy(update=paths)


def _absolute_sources(data: DataConfig | None, recipe_dir: Path) -> DataConfig | None:
    sources = ("dataset_name", "data_dir", "train_file", "validation_file")
    return data and data.model_copy(update={key: _absolute_path(getattr(data, key), recipe_dir) for key in sources})


def _absolute_path(name: str | None, recipe_dir: Path) -> str | None:
    """The absolute path of a local file or folder, so that the saved recipe runs from anywhere, or the name."""
    path = local_path(name, recipe_dir) if name and not is_embedded(name) else None
    return str(path.resolve()) if path else name


def _log_stopped(journal: Journal, error: ModelwrightError) -> None:
    """Log why the run ended, unless the disk is full."""
    with suppress(StorageError):
        journal.add("stopped", exit_code=error.exit_code, message=str(error))


def _write_report(context: RunContext) -> None:
    """Write report.html; an error is only logged, since training does not depend on it."""
    if context.world.is_main:
        try:
            html.write_report(context.folder)
        except Exception as error:
            with suppress(StorageError):
                context.journal.add("note", message=f"report.html was not written ({type(error).__name__}: {error})")


def process_seconds() -> float:
    """Seconds since this process was started; 0 where the kernel does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return round(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 2)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def is_rank_zero() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def promote(
    context: RunContext, builder: StageBuilder, stage: str, inputs: StageInputs, before: Any = None
) -> StageStatus:
    """Judge a finished stage by all its metrics; returns whether its gate is open or was accepted."""
    context.world.heartbeat.set_phase("comparing")
    result = read_json(context.folder.result(stage))
    metrics: Metrics = {**result["metrics"], **_parent_metrics(context, stage)}
    if _is_compared(context, stage):
        with context.span("answers", stage):
            metrics |= builder.compare(context, inputs, stage, before)
    if context.recipe.evaluate:
        with context.span("evaluate", stage):
            metrics |= evaluate.evaluation_metrics(context, stage)
    verdict = gate.judge_stage(context.loaded, stage, metrics)
    acceptance = None if verdict.open else gate.find_or_add_acceptance(context, verdict)
    write_json(context.folder.gate(stage), {**verdict.as_json(), "accepted": acceptance, "metrics": metrics})
    gate.record_lineage(context, verdict, inputs.model_name)
    write_history(context)
    write_summary(context, stage, result["plan"], metrics, verdict)
    write_text(context.folder.model(stage) / "README.md", render_model_card(context.folder, stage))
    context.journal.add("verdict", stage=stage, open=verdict.open, message=verdict.message, metrics=metrics,
                        thresholds=len(verdict.checks), accepted=acceptance and acceptance["reason"])  # fmt: skip
    _link_model(context.folder.last_model, context.folder.model(stage))
    is_promoted = verdict.open or acceptance is not None
    if context.recipe.save_pth and stage == list(context.recipe.stages)[-1]:
        _save_pth(context, stage, export.PTH_FILES if is_promoted else export.PTH_FILES[1:])
    if not is_promoted:
        _unlink_best_model(context.folder.best_model, context.folder.model(stage))
        context.note(stage, f"the gate is closed, so best_model is not this model; {context.folder.last_model} is")
        raise GateClosed(verdict.message)
    _link_model(context.folder.best_model, context.folder.model(stage))
    return "done" if verdict.open else "accepted"


def _save_pth(context: RunContext, stage: str, names: Sequence[str]) -> None:
    """Write the .pth files of these names into the run folder; behind a closed gate there is no best model."""
    with atomic_model_folder(folder := context.folder.path / "pth") as partial:
        export.write_pth_files(context.folder, context.recipe, stage, partial)
    for name in export.PTH_FILES:
        if name in names:
            (folder / name).replace(context.folder.path / name)
        else:
            (context.folder.path / name).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _parent_metrics(context: RunContext, stage: str) -> Metrics:
    """The final metrics of the parent stage, with the prefix parent_."""
    parent = context.recipe.parent_stage(stage)
    if parent is None or not context.folder.gate(parent).exists():
        return {}
    metrics: Metrics = read_json(context.folder.gate(parent))["metrics"]
    used = context.recipe.gate_names(parent)  # of the metrics before the parent, only what a gate uses
    names = (name for name in metrics if name in used or not name.startswith(("base_", "parent_")))
    return {f"parent_{name}": metrics[name] for name in names}


def _link_model(link: Path, target: Path) -> None:
    """Point the symlink best_model or last_model at a model folder, atomically."""
    new_link = link.with_name(f".{link.name}.partial")
    new_link.unlink(missing_ok=True)
    new_link.symlink_to(os.path.relpath(target, link.parent))
    new_link.replace(link)
    fsync_path(link.parent)


def _unlink_best_model(link: Path, target: Path) -> None:
    """Remove best_model where it points at a model whose gate is now closed."""
    if link.is_symlink() and link.resolve() == target.resolve():
        link.unlink()
        link.with_suffix(".pth").unlink(missing_ok=True)


HISTORY_FIELDS = ("step", "epoch", "loss", "train_accuracy", "learning_rate", "grad_norm", "tokens_per_second",
                  "samples_per_second", "data_wait_fraction", "peak_memory_bytes")  # fmt: skip
"""Fields of every stage; those of evaluations are its metrics."""
STEP_COUNTS = ("tokens", "trained_tokens", "images", "trained_images", "seconds")
"""Of one step or evaluation, not of its epoch."""


def write_history(context: RunContext) -> None:
    """Write training_history.json by epoch and by step: of a step repeated after a kill, the last one."""
    stages = list(context.recipe.stages)
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    for event in read_events(context.folder.journal):
        if event["event"] in ("step", "evaluation") and event.get("stage") in stages:
            step_key = (stages.index(event["stage"]), event["step"])
            entry = steps.setdefault(step_key, {"stage": event["stage"]})
            entry.update({key: event[key] for key in HISTORY_FIELDS if key in event})
            entry.update({key: value for key, value in event.items() if _is_metric(key, event["stage"])})
    entries = [steps[step_key] for step_key in sorted(steps)]
    write_json(context.folder.history, {"epochs": epoch_history(entries), "steps": entries})


def _is_metric(name: str, stage: str) -> bool:
    """Whether this is a metric of the stage, of one source of its mixture such as eval_loss.sums, or of its answers."""
    return name.partition(".")[0] in (*STAGES[stage].metrics, "answers")


def epoch_history(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per epoch: its last step, means over its logged steps, the last measurements in it and their step."""
    epochs: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    last: dict[str, float] = {}  # a step that was measured and not logged is of the epoch of the one before it
    for entry in entries:
        last[entry["stage"]] = entry.get("epoch", last.get(entry["stage"], 0.0))
        epochs.setdefault((entry["stage"], math.ceil(last[entry["stage"]] - 1e-9)), []).append(entry)
    history = []
    for (stage, epoch), steps in epochs.items():
        means = {name: fmean(values) for name in ("loss", "train_accuracy", "samples_per_second")
                 if (values := [step[name] for step in steps if step.get(name) is not None])}  # fmt: skip
        measured = {name: value for step in steps for name, value in step.items()
                    if _is_metric(name, stage) and name not in STEP_COUNTS}  # fmt: skip
        if measured:
            measured["eval_step"] = [step["step"] for step in steps if not measured.keys().isdisjoint(step)][-1]
        history.append({"stage": stage, "epoch": epoch, "step": steps[-1].get("step"), **means, **measured})
    return history


def write_summary(
    context: RunContext, stage: str, plan: dict[str, Any], metrics: Metrics, verdict: gate.Verdict
) -> None:
    """Write training_summary.json: settings and results in one file."""
    import transformers

    recipe, world = context.recipe, context.world
    backend = None if world.size == 1 else "nccl" if context.hardware.device == "cuda" else "gloo"
    distributed = {
        "devices": world.size, "sharding": plan["sharding"], "backend": backend,
        "rows_per_device": plan["micro_batch_size"], "rows_per_step": plan["global_batch_size"],
        "gradient_accumulation_steps": plan["gradient_accumulation_steps"],
    }  # fmt: skip
    versions = {"modelwright": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                "python": platform.python_version()}  # fmt: skip
    summary = {
        "recipe": recipe.name,
        "stage": stage,
        "model": recipe.model.display_name,
        "data": recipe.data_for(stage).source,
        "settings": recipe.stages[stage].model_dump(mode="json"),
        "batch": plan["batch_arithmetic"],
        "plan": plan,
        "metrics": metrics,
        "changes": metric_changes(metrics),
        "verdict": verdict.as_json(),
        "time": read_history(context.folder).time_breakdown.as_json(),
        "lineage": gate.ancestors(context, stage),
        "hardware": context.hardware.name,
        "world": world.size,
        "distributed": distributed,
        "versions": versions,
    }
    write_json(context.folder.summary, summary)


def metric_changes(metrics: Metrics) -> dict[str, dict[str, float]]:
    """The metrics that exist before and after training, with their change."""
    return {
        name: {"before": before, "after": after, "change": after - before}
        for name, after in metrics.items()
        if after is not None and (before := metrics.get(f"base_{name}")) is not None
    }
