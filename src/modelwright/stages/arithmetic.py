"""Whether a stage that asks for fp8 gets it: as this run decided before, as this machine found, or by a trial."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from modelwright.engine.loop import Engine
from modelwright.engine.shard import layers_of
from modelwright.engine.trial import Trial, try_fp8
from modelwright.errors import StorageError
from modelwright.plan.stage import StagePlan, choose_scalings
from modelwright.recipe.training import Training
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import is_sealed, read_json, write_json, write_sealed
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built

KEPT = "fp8.json"
"""What this machine found before, in its cache folder, by the shape of the work."""


def foretold(plan: StagePlan, stage: str, built: Built, context: Context) -> StagePlan:
    """The plan in the arithmetic that is known to be the better one; as it was where that is still to be found out."""
    known = _known(plan, stage, built, context) if _asks(plan, stage, context) else None
    return plan if known is None else _decided(plan, known)


def engine_of(plan: StagePlan, stage: str, built: Built, context: Context) -> Engine:
    """The engine of a stage; fp8 that nobody has tried here yet is tried in it, and what came of it is kept."""
    settings = context.recipe.stages[stage]
    tries = _asks(plan, stage, context) and _known(plan, stage, built, context) is None
    engine = Engine(built.task, settings, plan, context.world, context.recipe.seed)
    if tries:
        shape = shape_of(plan, stage, built, context)
        trial = try_fp8(engine, choose_scalings(settings))
        context.world.first(lambda: _keep(trial, shape, context.folder.trial(stage)))
        context.journal.add("fp8", stage=stage, found="now", **asdict(trial))
        engine.plan = _decided(engine.plan, trial)
    return engine


def shape_of(plan: StagePlan, stage: str, built: Built, context: Context) -> dict[str, Any]:
    """What the answer hangs on: the card, the work and the libraries."""
    settings = context.recipe.stages[stage]
    linears = [each for layer in layers_of(built.model) for each in layer.modules() if isinstance(each, nn.Linear)]
    sizes = Counter(f"{each.in_features} x {each.out_features}" for each in linears)
    return {
        "gpu": context.facts.name,
        "stage": type(settings).__name__,
        "linears": dict(sorted(sizes.items())),
        "parameters": [built.share.trained, built.share.total],
        "rows": plan.per_device,
        "length": getattr(settings, "max_length", None),
        "devices": [plan.world, plan.sharding],
        "kept_in": plan.weights,
        "scaling": settings.fp8_scaling,
        "settings": [settings.torch_compile, settings.cuda_graphs, plan.gradient_checkpointing],
        "versions": [torch.__version__, _torchao()],
    }


def _asks(plan: StagePlan, stage: str, context: Context) -> bool:
    return plan.precision == "fp8" and context.recipe.stages[stage].fp8_check == "auto"


def _decided(plan: StagePlan, trial: Trial) -> StagePlan:
    decided = replace(plan, reasons=(*plan.reasons, trial.why))
    return replace(decided, scaling=trial.scaling) if trial.kept else replace(decided, precision="bf16")


def _known(plan: StagePlan, stage: str, built: Built, context: Context) -> Trial | None:
    """What this run decided at its first start, else what this machine found; one answer for all ranks."""
    path, shape = context.folder.trial(stage), shape_of(plan, stage, built, context)

    def look() -> dict[str, Any] | None:
        if is_sealed(path) and _holds(kept := read_json(path), context.recipe.stages[stage]):
            return dict(kept["trial"])
        entry = _read(_cache()).get(_key(shape))
        if entry is None:
            return None
        trial = {**entry["trial"], "why": f"{entry['trial']['why']}, as found before"}
        write_sealed(path, {"trial": trial, "of": shape})
        context.journal.add("fp8", stage=stage, found="before", **trial)
        return trial

    found = context.world.first(look)
    return None if found is None else Trial(**found)


def _holds(kept: dict[str, Any], settings: Training) -> bool:
    """Whether what this run decided is still what is asked: a scaling that is no longer wished is tried anew."""
    trial, asked = kept["trial"], kept["of"].get("scaling", "auto")
    if trial["kept"]:
        return trial.get("scaling", "tensorwise") in choose_scalings(settings)
    return bool(asked == settings.fp8_scaling)


def _keep(trial: Trial, shape: dict[str, Any], path: Path) -> None:
    """In the run, so that a later start decides alike, and on this machine, so that a later run need not try."""
    write_sealed(path, {"trial": asdict(trial), "of": shape})
    if trial.speedup is not None:
        write_json(_cache(), {**_read(_cache()), _key(shape): {"trial": asdict(trial), "of": shape}})


def _cache() -> Path:
    return cache_dir() / KEPT


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
        return {key: entry for key, entry in found.items() if Trial(**entry["trial"])}
    except (OSError, StorageError, AttributeError, KeyError, TypeError):
        return {}  # none yet, or not ours


def _key(shape: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(shape, sort_keys=True).encode())


def _torchao() -> str:
    try:
        return version("torchao")
    except PackageNotFoundError:
        return "none"
