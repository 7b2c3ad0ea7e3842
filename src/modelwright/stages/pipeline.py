"""Run a recipe: every stage in order, each behind its gate; what is finished is verified and skipped."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelwright import __version__
from modelwright.data.sources import is_embedded, local_path
from modelwright.engine.world import World, joined
from modelwright.errors import DataError, ModelwrightError, Refused, StorageError, UsageError
from modelwright.models import harness, quantized, smollm2
from modelwright.plan import facts
from modelwright.recipe.columns import name_lines
from modelwright.recipe.load import LoadedRecipe, dump
from modelwright.recipe.schema import Data
from modelwright.report import page
from modelwright.report.trackers import tracking
from modelwright.runs.lock import hold
from modelwright.runs.folder import RunFolder, is_sealed, is_without_seal, read_json, write_text
from modelwright.runs.journal import Journal, Watcher
from modelwright.stages import evaluate, init, lineage, prepare
from modelwright.stages.context import NO_ORDERS, Context, Orders
from modelwright.stages.flow import Flow
from modelwright.stages.kinds import Ingredients, Kind
from modelwright.stages.preferences import PreferenceKind
from modelwright.stages.pretrain import PretrainKind
from modelwright.stages.promote import promote
from modelwright.stages.signals import Stopper
from modelwright.stages.text import TextKind
from modelwright.stages.train import Training
from modelwright.stages.vision import VisionKind
from modelwright.stages.wishes import CONTENTS, check_overrides, refuse_changes, settings_of, wishes_of

KINDS: dict[str, Kind] = {
    "pretrain": PretrainKind(),
    "sft": TextKind(),
    "dpo": PreferenceKind(),
    "lora": TextKind(),
    "classify": VisionKind(),
}
"""What each training stage learns on."""
OTHERS: dict[str, Callable[[Context], None]] = {"prepare": prepare.run, "init": init.run, "evaluate": evaluate.run}
"""Stages that train nothing; each leaves its result in the run, and knows by itself what of it stands already."""


def run(loaded: LoadedRecipe, watch: Watcher | None = None, orders: Orders = NO_ORDERS) -> RunFolder:
    """Run a recipe in its folder, from wherever it stands."""
    _check_orders(loaded, orders)
    folder, stopper = RunFolder(Path(loaded.recipe.run_dir)), Stopper()
    with stopper.listening(), joined() as world, ExitStack() as held:

        def take_folder() -> str | None:
            folder.refuse_links()
            folder.create()
            return held.enter_context(hold(folder.lock))

        dead_holder = world.first(take_folder)
        told = held.enter_context(tracking(loaded.recipe, folder, watch)) if world.is_main else None
        journal = Journal(folder.journal if world.is_main else None, told)
        held.callback(journal.close)
        context = Context(loaded, folder, journal, world, _facts(world), orders)
        try:
            _run_stages(context, stopper, dead_holder)
        except Exception as error:
            stopper.leave()
            if isinstance(error, ModelwrightError):
                _tell_end(journal, error)
                _leave_report(context)
            raise
        _leave_report(context)
    return folder


def _facts(world: World) -> facts.Facts:
    """What every rank's device can do: the weakest decides, so that all ranks plan alike."""
    mine = facts.probe()
    on_gpu = mine.device == "cuda"
    memory, fast, least, most = world.least(mine.memory, mine.fast_bf16, on_gpu, -on_gpu)
    if least != -most:
        raise UsageError(
            "some ranks have a GPU and some have none; give every node one, or hide those that are there with "
            "CUDA_VISIBLE_DEVICES="
        )
    name = world.first(lambda: mine.name)
    return replace(mine, name=name, memory=int(memory), fast_bf16=bool(fast))


def _check_orders(loaded: LoadedRecipe, orders: Orders) -> None:
    """Everything that the command line names must be there."""
    stages = list(loaded.recipe.flow)
    named = [("--from", orders.first), ("--until", orders.last), *(("--accept-gate", name) for name in orders.accepted)]
    for option, stage in named:
        if stage is not None and stage not in stages:
            raise UsageError(f"{option} {stage}: the stages of this recipe are {', '.join(stages)}")
    if orders.first and orders.last and stages.index(orders.first) > stages.index(orders.last):
        raise UsageError(f"--from {orders.first} comes after --until {orders.last}; nothing would be done")
    if orders.accepted and not (orders.reason or "").strip():
        raise UsageError('--accept-gate wants a reason, which is kept for ever: --reason "..."')
    check_overrides(loaded.recipe, orders.overrides)


def _run_stages(context: Context, stopper: Stopper, dead_holder: str | None) -> None:
    began = time.monotonic()
    recipe, journal, orders = context.recipe, context.journal, context.orders
    journal.add("run", recipe=recipe.name, folder=str(context.folder.path), stages=list(recipe.flow),
                world=context.world.size, device=context.facts.name, modelwright=__version__)  # fmt: skip
    for line in (*context.loaded.notes, *([dead_holder] if dead_holder else [])):
        journal.add("note", message=line)
    context.world.first(lambda: _refuse_early(context))
    flow, names = Flow(recipe.flow, journal), list(recipe.flow)
    first = names.index(orders.first) if orders.first else 0
    for stage in names[:first]:
        if stage in KINDS:
            context.world.first(lambda stage=stage: lineage.refuse_closed(context, stage))  # type: ignore[misc]
        flow.mark(stage, "done")
    for stage in names[first:]:
        flow.mark(stage, "running")
        if stage in OTHERS:
            OTHERS[stage](context)
            flow.mark(stage, "done")
        else:
            _run_stage(context, flow, stage, stopper)
        if stage == orders.last:
            break
    journal.add("done", folder=str(context.folder.path), seconds=round(time.monotonic() - began, 1))


def _refuse_early(context: Context) -> None:
    """Refuse changed settings of any finished stage, and what a later one lacks, before the first one is touched."""
    damaged = [stage for stage in context.recipe.flow if _is_damaged(context.folder.result(stage))]
    left = [stage for stage in context.recipe.stages if stage in damaged or not context.folder.result(stage).exists()]
    for stage in left:
        quantized.require(getattr(context.recipe.stages[stage], "quantization", "none"))
    if left and context.recipe.evaluate is not None and context.recipe.evaluate.tasks:
        harness.require()
    for stage in context.recipe.stages:
        if stage not in left:
            now = settings_of(context.recipe, stage)
            kept = read_json(context.folder.result(stage))["wishes"]
            refuse_changes({key: kept[key] for key in kept if key not in CONTENTS}, now, context.orders.overrides)
    for stage in damaged:
        path = context.folder.result(stage)
        path.replace(path.with_name("result.damaged.json"))
        note = f"the result of {stage} is damaged; the stage is finished again from its last good checkpoint"
        context.journal.add("note", stage=stage, message=note)


def _is_damaged(result: Path) -> bool:
    """Whether a result is not as it was written, and so says nothing any more; one that was never sealed is refused."""
    if not result.exists() or is_sealed(result):
        return False
    if is_without_seal(result, "metrics", "wishes", "plan", "files"):
        raise Refused(
            f"{result} was written by an earlier modelwright, which set no seal by which damage is found; nothing was "
            "changed. Choose another output_dir, or go on with the modelwright that began it; delete this file to have "
            "the stage finished again from its last checkpoint"
        )
    return True


def _run_stage(context: Context, flow: Flow, stage: str, stopper: Stopper) -> None:
    """Train a stage unless that is done already, then judge it."""
    kind, journal = KINDS[stage], context.journal
    before = context.recipe.parent_of(stage)
    parent = lineage.parent_of(context.folder, before) if before else None
    name = f"the {before} model of this run" if before else context.recipe.model.name
    journal.add("gathering", stage=stage, model=name, converts=smollm2.converts(name))
    context.world.beat.at("gathering")
    try:
        found = kind.gather(context, stage, parent)
    except DataError as error:
        raise DataError(name_lines(error.problems, context.loaded, stage)) from None
    result = context.world.first(lambda: finished(context, stage, found))
    if result is None:
        journal.add("stage", stage=stage)
        _train(context, kind, found, stage, stopper)
    else:
        _keep_recipe(context, found)
        journal.add("note", stage=stage, message=f"{stage} is finished and verified; nothing is trained again")
    try:
        state = context.world.first(lambda: promote(context, kind, stage, found))
    except ModelwrightError:
        flow.mark(stage, "closed")
        raise
    flow.mark(stage, state)


def _train(context: Context, kind: Kind, found: Ingredients, stage: str, stopper: Stopper) -> None:
    """Train a stage, and let go of its weights and moments before anything else needs the room."""
    training = Training(context, kind, found, stage, stopper)
    _keep_recipe(context, found)
    training.run()
    del training
    gc.collect()
    if context.world.device.type == "cuda":
        torch.cuda.empty_cache()


def _keep_recipe(context: Context, found: Ingredients) -> None:
    """Write the recipe as this run means it: revision pinned, paths whole; only once nothing in it was refused."""
    recipe, beside = context.recipe, context.beside
    model = {
        key: _whole_path(getattr(recipe.model, key), beside) for key in ("model_name_or_path", "tokenizer_name_or_path")
    }
    settled: dict[str, Any] = {
        "model": recipe.model.model_copy(update={**model, "revision": found.revision}),
        "data": _whole_paths(recipe.data, beside),
        **{
            stage: section.model_copy(update={"data": _whole_paths(section.data, beside)})
            for stage, section in recipe.stages.items()
        },
    }
    context.world.first(lambda: write_text(context.folder.recipe, dump(recipe.model_copy(update=settled))))


def _whole_paths(data: Data | None, beside: Path) -> Data | None:
    sources = ("dataset_name", "train_file", "validation_file")
    return data and data.model_copy(update={key: _whole_path(getattr(data, key), beside) for key in sources})


def _whole_path(name: str | None, beside: Path) -> str | None:
    """A local file's or folder's whole path, so that the saved recipe runs from anywhere; other names as they are."""
    path = local_path(name, beside) if name and not is_embedded(name) else None
    return str(path.resolve()) if path else name


def finished(context: Context, stage: str, found: Ingredients) -> dict[str, Any] | None:
    """The result of a stage that is done, verified file by file; None where there is still something to do."""
    path = context.folder.result(stage)
    if not path.exists():
        return None
    result: dict[str, Any] = read_json(path)
    now = wishes_of(context.recipe, stage, found.data_fingerprint, found.model_fingerprint)
    if refuse_changes(result["wishes"], now, context.orders.overrides):
        return None
    if name := lineage.damaged(context.folder, stage):
        context.journal.add("note", stage=stage, message=f"{name} of the {stage} model is damaged; it is made again")
        return None
    return result


def _tell_end(journal: Journal, error: ModelwrightError) -> None:
    """Write down why the run ended; a full disk may not even take that."""
    with suppress(StorageError):
        journal.add("stopped", exit_code=error.exit_code, message=str(error))


def _leave_report(context: Context) -> None:
    """Write report.html; training never depends on it, so whatever goes wrong is told and no more."""
    if context.world.is_main:
        try:
            page.write(context.folder)
        except Exception as error:
            with suppress(StorageError):
                context.journal.add("note", message=f"report.html was not written ({type(error).__name__}: {error})")


def speaks() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"
