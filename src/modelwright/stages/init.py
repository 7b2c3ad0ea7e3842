"""Init: make the model that the first training stage starts from, out of the recipe's architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from modelwright.data.size import size
from modelwright.data.sources import local_path
from modelwright.errors import ModelError
from modelwright.models.scratch import write_scratch
from modelwright.plan import sheet
from modelwright.plan.architecture import shape_of
from modelwright.plan.estimate import Rows
from modelwright.plan.facts import card
from modelwright.plan.gpus import Machines
from modelwright.runs.folder import hash_file, read_json, write_sealed
from modelwright.stages import lineage
from modelwright.stages.context import Context
from modelwright.stages.wishes import flat, refuse_changes

STAGE = "init"


def run(context: Context) -> None:
    """Write the fresh model, unless it stands already and verifies."""
    context.world.first(lambda: _run(context))


def tokenizer_folder(context: Context) -> Path:
    """The tokenizer the recipe names, or the one that prepare leaves in the run."""
    name = context.recipe.model.tokenizer_name_or_path
    if name is None:
        folder = context.folder.tokenizer
        if not (folder / "tokenizer.json").exists():
            raise ModelError(
                "model: an architecture wants tokenizer_name_or_path, or a section prepare that trains a tokenizer"
            )
        return folder
    found = local_path(name, context.beside)
    if found is None or not (found / "tokenizer.json").exists():
        raise ModelError(f"model: tokenizer_name_or_path is {name!r}; it wants a folder with a tokenizer.json")
    return found


def _run(context: Context) -> None:
    folder, recipe, source = context.folder, context.recipe, tokenizer_folder(context)
    architecture = recipe.model.architecture
    assert architecture is not None
    wishes = {
        **flat({"model.architecture": architecture.model_dump(mode="json")}),
        "seed": recipe.seed,
        "tokenizer.contents": xxhash.xxh3_128_hexdigest((source / "tokenizer.json").read_bytes()),
    }
    if _stands(context, wishes):
        context.journal.add("note", stage=STAGE, message="init is finished and verified; the model is not made again")
        return
    context.journal.add("stage", stage=STAGE)
    parameters = write_scratch(architecture, source, recipe.seed, folder.model(STAGE))
    paths = sorted(path for path in folder.model(STAGE).rglob("*") if path.is_file())
    files = {str(path.relative_to(folder.model(STAGE))): hash_file(path) for path in paths}
    write_sealed(folder.result(STAGE), {"metrics": {"parameters": parameters}, "wishes": wishes, "files": files})
    context.journal.add(
        "initialised",
        stage=STAGE,
        parameters=parameters,
        layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        bytes=4 * parameters,
        plan=_plan(context),
    )


def _plan(context: Context) -> list[str]:
    """What each stage is foreseen to take with this model on this machine, a line each."""
    recipe = context.recipe
    shape = shape_of(read_json(context.folder.model(STAGE) / "config.json"), recipe.name, "the model itself")
    place = Machines(1, context.world.size, card(context.facts))
    told = []
    for stage in recipe.stages:
        seen = size(recipe, stage, context.beside, tokenizer_folder(context))
        rows = Rows(seen.rows, seen.longest, seen.mean, seen.learnt, seen.source, seen.resident)
        told.append(sheet.line(sheet.stage_sheet(recipe, stage, shape, rows, (place,))))
    return told


def _stands(context: Context, wishes: dict[str, Any]) -> bool:
    path = context.folder.result(STAGE)
    if not path.exists():
        return False
    if refuse_changes(read_json(path)["wishes"], wishes, context.orders.overrides):
        return False
    return lineage.damaged(context.folder, STAGE) is None
