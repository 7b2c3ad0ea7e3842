"""Run a recipe: every stage in order, each behind its gate; what is finished is verified and skipped."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from modelwright import __version__
from modelwright.data.sources import is_embedded, local_path
from modelwright.engine.world import joined
from modelwright.errors import GateClosed, ModelwrightError, StorageError
from modelwright.plan import facts
from modelwright.recipe.load import LoadedRecipe, dump
from modelwright.runs import lock
from modelwright.runs.folder import RunFolder, hash_file, read_json, write_json, write_text
from modelwright.runs.journal import Journal, Watcher
from modelwright.stages import record
from modelwright.stages.context import Context
from modelwright.stages.gate import verdict_on
from modelwright.stages.kinds import Ingredients, Kind
from modelwright.stages.signals import Stopper
from modelwright.stages.text import TextKind
from modelwright.stages.train import Training
from modelwright.stages.vision import VisionKind
from modelwright.stages.wishes import refuse_changes, wishes_of

KINDS: dict[str, Kind] = {"sft": TextKind(), "classify": VisionKind()}


def run(loaded: LoadedRecipe, watch: Watcher | None = None, overrides: Collection[str] = ()) -> RunFolder:
    """Run a recipe in its folder, from wherever it stands."""
    folder, stopper = RunFolder(Path(loaded.recipe.run_dir)), Stopper()
    with stopper.listening(), joined() as world, ExitStack() as held:

        def take_folder() -> str | None:
            folder.create()
            return held.enter_context(lock.hold(folder.lock))

        dead_holder = world.first(take_folder)
        journal = Journal(folder.journal if world.is_main else None, watch if world.is_main else None)
        held.callback(journal.close)
        context = Context(loaded, folder, journal, world, facts.probe(), frozenset(overrides))
        try:
            _run_stages(context, stopper, dead_holder)
        except ModelwrightError as error:
            _tell_end(journal, error)
            raise
    return folder


def _run_stages(context: Context, stopper: Stopper, dead_holder: str | None) -> None:
    began = time.monotonic()
    recipe, journal = context.recipe, context.journal
    journal.add("run", recipe=recipe.name, folder=str(context.folder.path), stages=list(recipe.stages),
                world=context.world.size, device=context.facts.name, modelwright=__version__)  # fmt: skip
    for line in (*context.loaded.notes, *([dead_holder] if dead_holder else [])):
        journal.add("note", message=line)
    kind = KINDS[next(iter(recipe.stages))]
    journal.add("gathering", model=recipe.model.model_name_or_path)
    found = kind.gather(context)
    for stage in recipe.stages:
        result = context.world.first(lambda stage=stage: finished(context, stage, found))  # type: ignore[misc]
        if result is None:
            journal.add("stage", stage=stage)
            _train(context, kind, found, stage, stopper)
        else:
            _keep_recipe(context, found)
            journal.add("note", stage=stage, message=f"{stage} is finished and verified; nothing is trained again")
        context.world.first(lambda stage=stage: _promote(context, kind, stage, found))  # type: ignore[misc]
    journal.add("done", folder=str(context.folder.path), seconds=round(time.monotonic() - began, 1))


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
    sources = ("dataset_name", "train_file", "validation_file")
    data = {key: _whole_path(getattr(recipe.data, key), beside) for key in sources}
    name = _whole_path(recipe.model.model_name_or_path, beside)
    model = {"model_name_or_path": name, "revision": found.revision}
    settled = recipe.model_copy(
        update={"data": recipe.data.model_copy(update=data), "model": recipe.model.model_copy(update=model)}
    )
    context.world.first(lambda: write_text(context.folder.recipe, dump(settled)))


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
    if refuse_changes(result["wishes"], now, context.overrides):
        return None
    model = context.folder.model(stage)
    for name, digest in result["files"].items():
        if not (model / name).is_file() or hash_file(model / name) != digest:
            context.journal.add(
                "note", stage=stage, message=f"{name} of the {stage} model is damaged; it is made again"
            )
            return None
    return result


def _promote(context: Context, kind: Kind, stage: str, found: Ingredients) -> None:
    """Compare, judge, record; a closed gate ends the run here."""
    result = read_json(context.folder.result(stage))
    metrics: dict[str, float | None] = dict(result["metrics"])
    last = list(context.recipe.stages)[-1]
    if stage == last or set(context.recipe.gate_of(stage)) & kind.shown:
        metrics |= kind.show(context, found, stage)
    verdict = verdict_on(context.loaded, stage, metrics)
    write_json(context.folder.gate(stage), {**verdict.as_json(), "metrics": metrics})
    record.write_history(context, stage)
    record.write_summary(context, stage, result["plan"], metrics, verdict)
    record.write_card(context, stage, found, metrics, verdict)
    context.journal.add("verdict", stage=stage, open=verdict.open, letter=verdict.letter, metrics=metrics)
    if not verdict.open:
        _unpoint(context.folder.best_model, context.folder.model(stage))
        raise GateClosed(verdict.letter)
    _point_to(context.folder.best_model, context.folder.model(stage))


def _point_to(link: Path, target: Path) -> None:
    """Make best_model mean this folder, in one movement."""
    fresh = link.with_name(".best_model.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    fresh.replace(link)


def _unpoint(link: Path, target: Path) -> None:
    """Take back what an earlier, kinder gate called best."""
    if link.is_symlink() and link.resolve() == target.resolve():
        link.unlink()


def _tell_end(journal: Journal, error: ModelwrightError) -> None:
    """Write down why the run ended; a full disk may not even take that."""
    with suppress(StorageError):
        journal.add("stopped", exit_code=error.exit_code, message=str(error))


def speaks() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"
