"""Promote a stage: compare, judge, record; a closed gate ends the run here unless a person accepts it."""

from __future__ import annotations

import os
from pathlib import Path

from modelwright.errors import GateClosed
from modelwright.runs.folder import read_json, sync, write_json
from modelwright.stages import evaluate, lineage, record
from modelwright.stages.context import Context
from modelwright.stages.flow import State
from modelwright.stages.gate import verdict_on
from modelwright.stages.kinds import Ingredients, Kind, Metrics


def promote(context: Context, kind: Kind, stage: str, found: Ingredients) -> State:
    """Judge a finished stage by everything that was measured; says whether its gate is open or was accepted."""
    context.world.beat.at("comparing")
    result = read_json(context.folder.result(stage))
    metrics: Metrics = {**result["metrics"], **_of_parent(context, stage)}
    last = list(context.recipe.stages)[-1]
    if stage == last or set(context.recipe.gate_of(stage)) & kind.shown:
        metrics |= kind.show(context, found, stage)
    metrics |= evaluate.metrics_of(context, stage)
    verdict = verdict_on(context.loaded, stage, metrics)
    acceptance = None if verdict.open else lineage.accepted(context, verdict)
    told = {**verdict.as_json(), "accepted": acceptance, "metrics": metrics}
    write_json(context.folder.gate(stage), told)
    lineage.record(context, verdict, found.model_name)
    record.write_history(context)
    record.write_summary(context, stage, result["plan"], metrics, verdict)
    record.write_card(context, stage)
    context.journal.add("verdict", stage=stage, open=verdict.open, letter=verdict.letter, metrics=metrics,
                        accepted=acceptance and acceptance["reason"])  # fmt: skip
    if not (verdict.open or acceptance):
        _unpoint(context.folder.best_model, context.folder.model(stage))
        raise GateClosed(verdict.letter)
    _point_to(context.folder.best_model, context.folder.model(stage))
    return "done" if verdict.open else "accepted"


def _of_parent(context: Context, stage: str) -> Metrics:
    """What the stage before measured in the end, by names that begin with parent_."""
    parent = context.recipe.parent_of(stage)
    judged = parent is not None and context.folder.gate(parent).exists()
    measured: Metrics = read_json(context.folder.gate(parent))["metrics"] if parent and judged else {}
    return {f"parent_{name}": value for name, value in measured.items() if not name.startswith(("base_", "parent_"))}


def _point_to(link: Path, target: Path) -> None:
    """Make best_model mean this folder, in one movement."""
    fresh = link.with_name(".best_model.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    fresh.replace(link)
    sync(link.parent)


def _unpoint(link: Path, target: Path) -> None:
    """Take back what an earlier, kinder gate called best."""
    if link.is_symlink() and link.resolve() == target.resolve():
        link.unlink()
