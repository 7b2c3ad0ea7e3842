"""Stages before training: pack raw text into shards, and initialize a model from the recipe's architecture."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from modelwright.data.prepare import pipeline
from modelwright.data.prepare.executors import Executor, ProcessExecutor, RankExecutor
from modelwright.data.prepare.job import PrepareJob, is_complete
from modelwright.data.prepare.pipeline import REPORT_FILE, PrepareProgress
from modelwright.data.row_formats import estimate_row_stats
from modelwright.data.sources import local_path, notes_on_files
from modelwright.errors import DataError, ModelError, UsageError
from modelwright.plan import table
from modelwright.plan.hardware import Hardware, gpu_spec_of
from modelwright.plan.model_shape import shape_from_config
from modelwright.recipe.load import LoadedRecipe, add_recipe_location
from modelwright.recipe.prepare_config import PrepareConfig
from modelwright.report.html import write_data_report
from modelwright.runs.folder import RunFolder, read_json, write_json_with_checksum
from modelwright.stages import gate
from modelwright.stages.context import RunContext, flatten_settings

PREPARE_STAGE = "prepare"
PROGRESS_INTERVAL_SECONDS = 10.0
"""Seconds between two notes about the same step."""


def prepare_stage(context: RunContext) -> None:
    """Pack the shards of the run; skipped where they are complete for the same text and settings."""
    world = context.world
    executor: Executor = (
        RankExecutor(world.rank, world.size) if world.size > 1 else process_executor(context.recipe.prepare)
    )
    job = build_prepare_job(context.loaded, context.folder.packed)
    for note in unread_files(job):
        context.note(PREPARE_STAGE, note)
    if is_complete(job):
        context.note(PREPARE_STAGE, "prepare already complete for the same text and settings; skipped")
        return
    context.journal.add("stage_started", stage=PREPARE_STAGE)
    last, step = time.monotonic(), ""
    for progress in run_prepare(job, executor, context.loaded):
        if progress.step != step or time.monotonic() - last > PROGRESS_INTERVAL_SECONDS:
            context.note(PREPARE_STAGE, f"{progress.step}: {progress.done}/{progress.total} tasks")
            last, step = time.monotonic(), progress.step
    report = read_json(job.folder / REPORT_FILE)
    context.note(PREPARE_STAGE, report_line(report))
    fields = {key: report[key] for key in ("documents", "splits", "filters")}
    context.journal.add("prepared", stage=PREPARE_STAGE, **fields)


def run_prepare(job: PrepareJob, executor: Executor, loaded: LoadedRecipe) -> Iterator[PrepareProgress]:
    """Run the preparation; errors name the recipe's line, and report.html is written next to the report."""
    try:
        yield from pipeline.run_pipeline(job, executor)
    except DataError as error:
        stage = loaded.recipe.text_stage or PREPARE_STAGE
        raise DataError(add_recipe_location(error.problems, loaded, stage)) from None
    finally:
        executor.close()
    page_path = job.folder / "report.html"
    executor.run_once(job, page_path.exists, lambda: write_data_report(page_path, read_json(job.folder / REPORT_FILE)))


def build_prepare_job(loaded: LoadedRecipe, folder: Path) -> PrepareJob:
    """The preparation job of a recipe."""
    recipe, recipe_dir = loaded.recipe, loaded.path.parent
    settings = recipe.prepare or PrepareConfig()
    tokenizer_dir = _prepare_tokenizer_dir(loaded, settings)
    return PrepareJob.make(folder, recipe.prepare_data, settings, recipe.seed, recipe_dir, tokenizer_dir)


def unread_files(job: PrepareJob) -> list[str]:
    """A line for each source that has files which are not prepared."""
    return [note for part in job.data.parts.values() for note in notes_on_files(part, job.recipe_dir)]


def _prepare_tokenizer_dir(loaded: LoadedRecipe, settings: PrepareConfig) -> Path | None:
    """The folder of the tokenizer to use, or None where one is trained."""
    model, recipe_dir = loaded.recipe.model, loaded.path.parent
    name = model.tokenizer_name_or_path or model.model_name_or_path
    if settings.tokenizer == "train" or (settings.tokenizer == "auto" and name is None):
        return None
    if name is None:
        raise ModelError("prepare: tokenizer is 'model', but the recipe names no model or tokenizer that has one")
    folder = local_path(name, recipe_dir)
    if folder is None or not (folder / "tokenizer.json").exists():
        from modelwright.models import pretrained

        folder = pretrained.resolve_model(model, recipe_dir).path
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"prepare: {folder} has no tokenizer.json; save its tokenizer with save_pretrained first")
    return folder


def process_executor(settings: PrepareConfig | None) -> ProcessExecutor:
    """As many processes as num_proc says, or as there are cores."""
    return ProcessExecutor((settings.num_proc if settings else None) or len(os.sched_getaffinity(0)))


def report_line(report: dict[str, Any]) -> str:
    """The result of a preparation in a line."""
    documents, train, held_out = report["documents"], report["splits"]["train"], report["splits"]["held_out"]
    dropped = sum(filter_stats["documents"] for filter_stats in report["filters"].values())
    return (
        f"{documents['read']:,} documents: {dropped:,} dropped by rules, {documents['exact_duplicates']:,} exact "
        f"and {documents['near_duplicates']:,} near duplicates; {train['tokens']:,} training tokens "
        f"in {train['rows']:,} rows of {report['sequence_length']}, {held_out['tokens']:,} held out"
    )


INIT_STAGE = "init"


def init_stage(context: RunContext) -> None:
    """Write the initialized model, unless it is complete and verified."""
    context.world.on_rank0_broadcast(lambda: _init_model(context))


def resolve_tokenizer_dir(loaded: LoadedRecipe) -> Path:
    """The tokenizer of an architecture: the one the recipe names, or the one that prepare writes into the run."""
    recipe, name = loaded.recipe, loaded.recipe.model.tokenizer_name_or_path
    folder = local_path(name, loaded.path.parent) if name else RunFolder(Path(recipe.run_dir)).tokenizer
    if folder is not None and (folder / "tokenizer.json").exists():
        return folder
    if name:
        raise ModelError(f"model: tokenizer_name_or_path is {name!r}; it wants a folder with a tokenizer.json")
    if recipe.prepare:
        raise UsageError(
            "the tokenizer is trained by prepare, which has not run yet; start with modelwright data prepare"
        )
    raise ModelError(
        "model: an architecture wants tokenizer_name_or_path, or a section prepare that trains a tokenizer"
    )


def _init_model(context: RunContext) -> None:
    from modelwright.models.save import write_initial_model  # torch

    folder, recipe, source = context.folder, context.recipe, resolve_tokenizer_dir(context.loaded)
    architecture = recipe.model.architecture
    assert architecture is not None
    resume_config = {
        **flatten_settings({"model.architecture": architecture.model_dump(mode="json")}),
        "seed": recipe.seed,
        "tokenizer.fingerprint": xxhash.xxh3_128_hexdigest((source / "tokenizer.json").read_bytes()),
    }
    if gate.completed_result(context, INIT_STAGE, resume_config):
        context.note(INIT_STAGE, "init already complete and verified; skipped")
        return
    context.journal.add("stage_started", stage=INIT_STAGE)
    parameters = write_initial_model(architecture, source, recipe.seed, folder.model(INIT_STAGE))
    result = {"metrics": {"parameters": parameters}, "resume_config": resume_config,
              "files": gate.hash_model_files(folder.model(INIT_STAGE))}  # fmt: skip
    write_json_with_checksum(folder.result(INIT_STAGE), result)
    context.journal.add(
        "model_initialized", stage=INIT_STAGE, parameters=parameters, layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size, bytes=4 * parameters, plan=_predict_stages(context),
    )  # fmt: skip


def _predict_stages(context: RunContext) -> list[str]:
    """A line for each stage: predicted memory and time with this model on this machine."""
    recipe = context.recipe
    config = read_json(context.folder.model(INIT_STAGE) / "config.json")
    shape = shape_from_config(config, recipe.name, "the model itself")
    hardware = Hardware(1, context.world.size, gpu_spec_of(context.hardware))
    lines = []
    for stage in recipe.stages:
        row_stats = estimate_row_stats(recipe, stage, context.recipe_dir, resolve_tokenizer_dir(context.loaded))
        lines.append(table.summary_line(table.plan_table(recipe, stage, shape, row_stats, (hardware,))))
    return lines
