"""Which model came from which: a parent is verified before it is built upon, and what a person accepted is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from modelwright.errors import GateClosed, Refused
from modelwright.runs.folder import RunFolder, hash_file, read_json, write_json
from modelwright.stages.context import Context
from modelwright.stages.gate import Verdict, verdict_on


@dataclass(frozen=True)
class Parent:
    """The finished stage that another one starts from."""

    stage: str
    """Its name."""
    path: Path
    """The folder of its model."""
    fingerprint: str
    """Hash over the hashes of its files: changes when the model does."""


def parent_of(folder: RunFolder, stage: str) -> Parent:
    """The model of a finished stage, every file of it verified by the hashes in the stage's result."""
    if not folder.result(stage).exists():
        raise Refused(f"stage {stage} is not finished; begin with it, or leave --from out")
    if name := damaged(folder, stage):
        raise Refused(f"{name} of the {stage} model is damaged; leave --from out, and it is made again")
    return Parent(stage, folder.model(stage).resolve(), fingerprint_of(read_json(folder.result(stage))["files"]))


def damaged(folder: RunFolder, stage: str) -> str | None:
    """The first file of a stage's model that is not what the result says, or None."""
    model = folder.model(stage)
    for name, digest in read_json(folder.result(stage))["files"].items():
        if not (model / name).is_file() or hash_file(model / name) != digest:
            return str(name)
    return None


def fingerprint_of(files: Mapping[str, str]) -> str:
    """One hash for a model: over the names and hashes of its files."""
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


def refuse_closed(context: Context, stage: str) -> None:
    """Refuse to build on a stage whose gate is closed by the thresholds of now, unless a person accepted it."""
    path = context.folder.gate(stage)
    if not path.exists():
        raise Refused(f"stage {stage} was not judged yet; begin with it, or leave --from out")
    verdict = verdict_on(context.loaded, stage, read_json(path)["metrics"])
    if not verdict.open and accepted(context, verdict) is None:
        raise GateClosed(verdict.letter)


def accepted(context: Context, verdict: Verdict) -> dict[str, Any] | None:
    """What a person said to this closed gate, now or at an earlier start, for this model and these limits."""
    folder, stage = context.folder, verdict.stage
    kept = read(folder)
    model = fingerprint_of(read_json(folder.result(stage))["files"])
    failed = sorted(f"{check.metric} {check.wants}" for check in verdict.checks if not check.passed)
    for entry in kept["accepted"]:
        if (entry["stage"], entry["model"], entry["failed"]) == (stage, model, failed):
            return dict(entry)
    if stage not in context.orders.accepted:
        return None
    entry = {
        "stage": stage,
        "reason": context.orders.reason,
        "letter": verdict.letter,
        "failed": failed,
        "model": model,
        "time": round(time.time(), 3),
    }
    write_json(folder.lineage, {**kept, "accepted": [*kept["accepted"], entry]})
    return entry


def record(context: Context, verdict: Verdict, base: str) -> None:
    """Write down where a judged stage's model comes from, what it is, and how its gate stands."""
    folder, stage = context.folder, verdict.stage
    kept, result = read(folder), read_json(folder.result(stage))
    acceptance = None if verdict.open else accepted(context, verdict)
    entry = {
        "parent": context.recipe.parent_of(stage),
        "started_from": base,
        "parent_model": result["wishes"]["model.contents"],
        "model": fingerprint_of(result["files"]),
        "gate": "open" if verdict.open else "accepted" if acceptance else "closed",
        "letter": verdict.letter,
        "reason": acceptance["reason"] if acceptance else None,
    }
    kept = read(folder)
    write_json(folder.lineage, {**kept, "stages": {**kept["stages"], stage: entry}})


def ancestors(context: Context, stage: str) -> list[dict[str, Any]]:
    """What is known of a stage and every one before it, oldest first."""
    stages = read(context.folder)["stages"]
    names = list(context.recipe.stages)
    return [{"stage": name, **stages[name]} for name in names[: names.index(stage) + 1] if name in stages]


def read(folder: RunFolder) -> dict[str, Any]:
    """The lineage as it stands."""
    kept: dict[str, Any] = read_json(folder.lineage) if folder.lineage.exists() else {}
    return {"stages": {}, "accepted": [], **kept}
