"""Prepare: raw text becomes packed shards in the run folder, before a model is made or trained."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelwright.data import prepare
from modelwright.data.plan import Plan, Wish, finished
from modelwright.data.prepare import REPORT, Told
from modelwright.data.sources import local_path
from modelwright.data.workers import Crew, Processes, Ranks
from modelwright.errors import DataError, ModelError
from modelwright.recipe.columns import name_lines
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.preparing import Prepare
from modelwright.report.data_page import write_page
from modelwright.runs.folder import read_json

if TYPE_CHECKING:
    from modelwright.stages.context import Context

STAGE = "prepare"
TOLD_EVERY = 10.0
"""Seconds between two notes about the same step."""


def run(context: Context) -> None:
    """Leave the shards in the run folder; what stands already for the same wish is kept."""
    world = context.world
    crew: Crew = Ranks(world.rank, world.size) if world.size > 1 else processes(context.recipe.prepare)
    plan = plan_of(context.loaded, context.folder.packed)
    if finished(plan):
        note = "prepare is finished for the same text and settings; nothing is prepared again"
        context.journal.add("note", stage=STAGE, message=note)
        return
    context.journal.add("stage", stage=STAGE)
    last, step = time.monotonic(), ""
    for told in prepare_shards(plan, crew, context.loaded):
        if told.step != step or time.monotonic() - last > TOLD_EVERY:
            context.journal.add("note", stage=STAGE, message=f"{told.step}: {told.done} of {told.of} pieces")
            last, step = time.monotonic(), told.step
    report = read_json(plan.folder / REPORT)
    context.journal.add("note", stage=STAGE, message=sentence(report))
    context.journal.add("prepared", stage=STAGE, **{key: report[key] for key in ("documents", "parts", "rules")})


def prepare_shards(plan: Plan, crew: Crew, loaded: LoadedRecipe) -> Iterator[Told]:
    """Prepare, with letters that name the recipe's line, and the page beside the report."""
    try:
        yield from prepare.prepare(plan, crew)
    except DataError as error:
        raise DataError(name_lines(error.problems, loaded, "pretrain")) from None
    finally:
        crew.close()
    page = plan.folder / "report.html"
    crew.first(plan, page.exists, lambda: write_page(page, read_json(plan.folder / REPORT)))


def plan_of(loaded: LoadedRecipe, folder: Path) -> Plan:
    """What a recipe asks to be prepared, and how."""
    recipe, beside = loaded.recipe, loaded.path.parent
    settings = recipe.prepare or Prepare()
    wish = Wish(recipe.prepared_data, settings, recipe.seed, beside, _tokenizer(loaded, settings))
    return Plan.make(wish, folder)


def _tokenizer(loaded: LoadedRecipe, settings: Prepare) -> Path | None:
    """The folder of the tokenizer, or None where one is trained."""
    model, beside = loaded.recipe.model, loaded.path.parent
    name = model.tokenizer_name_or_path or model.model_name_or_path
    if settings.tokenizer == "train" or (settings.tokenizer == "auto" and name is None):
        return None
    if name is None:
        raise ModelError("prepare: tokenizer is 'model', but the recipe names no model or tokenizer that has one")
    folder = local_path(name, beside)
    if folder is None or not (folder / "tokenizer.json").exists():
        from modelwright.models import text

        folder = text.find(model, beside).path
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"prepare: {folder} has no tokenizer.json; save its tokenizer with save_pretrained first")
    return folder


def processes(settings: Prepare | None) -> Processes:
    """As many processes as the recipe says, or as there are cores."""
    return Processes((settings.workers if settings else None) or len(os.sched_getaffinity(0)))


def sentence(report: dict[str, Any]) -> str:
    """What a preparation did, in a line."""
    documents, parts = report["documents"], report["parts"]
    dropped = sum(rule["documents"] for rule in report["rules"].values())
    return (
        f"{documents['read']:,} documents: {dropped:,} dropped by rules, {documents['exact_duplicates']:,} the same "
        f"and {documents['near_duplicates']:,} nearly the same as others; {parts['train']['tokens']:,} tokens to train "
        f"on in {parts['train']['rows']:,} rows of {report['length']}, {parts['held_out']['tokens']:,} held out"
    )
