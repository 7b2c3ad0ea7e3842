"""Decide whether a stage may be promoted: verdicts by thresholds, verification of model files, lineage, acceptances."""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from modelwright.errors import GateClosed, Refused, UsageError
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.recipe.schema import Threshold
from modelwright.runs.folder import RunFolder, hash_files, open_run, read_json, write_json
from modelwright.stages.context import CONTENT_KEYS, ParentModel, RunContext, check_resume_config


@dataclass(frozen=True)
class GateCheck:
    """One metric compared with one threshold."""

    metric: str
    """Name of the metric."""
    value: float | None
    """Its value; None where it was not measured or is not finite."""
    requirement: str
    """The threshold as text, with its arithmetic."""
    passed: bool
    """Whether the value satisfies it."""
    where: str | None = None
    """Where the threshold is set: a line of the recipe, or of its gates_file."""

    def __str__(self) -> str:
        value_text = "was not measured or is not finite" if self.value is None else f"{self.value:.4g}"
        where = f", {self.where}" if self.where and not self.passed else ""
        return f"{self.metric} {value_text} (needs {self.requirement}{where})"


@dataclass(frozen=True)
class Verdict:
    """The result of a stage's gate."""

    stage: str
    """The stage."""
    open: bool
    """Whether the next stage may use its model."""
    checks: tuple[GateCheck, ...]
    """Every threshold and its result."""
    note: str = ""
    """What is to know about the model that was judged."""

    @property
    def message(self) -> str:
        """The verdict in one line."""
        if not self.checks:
            return f"{self.stage} has no gate: its model is promoted as it is{self.note}"
        shown = self.checks if self.open else [check for check in self.checks if not check.passed]
        return f"gate {self.stage} is {'open' if self.open else 'closed'}: " + "; ".join(map(str, shown)) + self.note

    def as_json(self) -> dict[str, Any]:
        """The contents of gates/STAGE.json."""
        return {**asdict(self), "message": self.message}


def judge_metrics(
    stage: str,
    thresholds: Mapping[str, Threshold],
    metrics: Mapping[str, float | None],
    locations: Mapping[str, str] | None = None,
) -> Verdict:
    """Compare every metric with its thresholds; a missing or non-finite one never passes."""
    checks = []
    for metric, threshold in thresholds.items():
        value = _finite_or_none(metrics.get(metric))
        limits = ("at most", threshold.at_most, operator.le), ("at least", threshold.at_least, operator.ge)
        for comparison, limit, satisfies in limits:
            if limit is not None:
                bound, requirement = _bound(comparison, limit, threshold, metrics)
                passed = value is not None and bound is not None and satisfies(value, bound)
                where = (locations or {}).get(f"{metric}.{comparison.replace(' ', '_')}")
                checks.append(GateCheck(metric, value, requirement, passed, where))
    return Verdict(stage, all(check.passed for check in checks), tuple(checks))


def rejudge_run(run: str, stage: str | None) -> list[Verdict]:
    """Judge the saved metrics by the thresholds that the run's recipe has now, without torch."""
    folder = open_run(run)
    loaded = load(folder.recipe, environ={})
    stages = [stage] if stage else [name for name in loaded.recipe.stages if folder.gate(name).exists()]
    verdicts = []
    for name in stages:
        if name not in loaded.recipe.stages or not folder.gate(name).exists():
            judged = ", ".join(path.stem for path in sorted(folder.gate("x").parent.glob("*.json"))) or "none yet"
            raise UsageError(f"{run} has no verdict on {name!r}; stages that were measured: {judged}")
        verdict = judge_stage(loaded, name, read_json(folder.gate(name))["metrics"])
        parent = loaded.recipe.parent_stage(name)
        if parent and all(folder.result(each).exists() for each in (parent, name)):
            started_from = read_json(folder.result(name))["resume_config"].get(key := CONTENT_KEYS[1])
            if started_from != model_fingerprint(folder, parent):
                remedy = f"run with --allow-changed {key} trains it again"
                verdict = replace(verdict, note=f"; its model started from an earlier {parent} model ({remedy})")
        verdicts.append(verdict)
    if not verdicts:
        raise UsageError(f"{run} has no verdict yet; finish it with: modelwright run")
    return verdicts


def judge_stage(loaded: LoadedRecipe, stage: str, metrics: Mapping[str, float | None]) -> Verdict:
    """Judge a stage's metrics by its gate, with the recipe line of each threshold."""
    prefix = f"gates.{stage}."
    locations = {
        key.removeprefix(prefix): f"recipe line {origin.line}" if origin.kind == "recipe" else origin.location
        for key, origin in loaded.origins.items()
        if key.startswith(prefix) and origin.line
    }
    return judge_metrics(stage, loaded.recipe.gate_for(stage), metrics, locations)


def _bound(
    comparison: str, limit: float, threshold: Threshold, metrics: Mapping[str, float | None]
) -> tuple[float | None, str]:
    """The threshold as a number, and as text with its arithmetic."""
    if threshold.times is None and threshold.plus is None:
        return limit, f"{comparison} {limit:g}"
    name = threshold.times or threshold.plus or ""
    reference = _finite_or_none(metrics.get(name))
    if reference is None:
        formula = f"{limit:g} × {name}" if threshold.times else f"{name} {_format_signed(limit)}"
        return None, f"{comparison} {formula}, which was not measured"
    if threshold.times:
        return limit * reference, f"{comparison} {limit * reference:.4g} = {limit:g} × {name} {reference:.4g}"
    return reference + limit, f"{comparison} {reference + limit:.4g} = {name} {reference:.4g} {_format_signed(limit)}"


def _format_signed(limit: float) -> str:
    return f"{'-' if limit < 0 else '+'} {abs(limit):g}"


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def verified_parent(folder: RunFolder, stage: str) -> ParentModel:
    """The model of a finished stage, each file verified by the hashes in the stage's result."""
    if not folder.result(stage).exists():
        raise Refused(f"stage {stage} is not finished; begin with it, or leave --from-stage out")
    if name := first_damaged_file(folder, stage):
        raise Refused(f"{name} of the {stage} model is damaged; leave --from-stage out, and it is made again")
    return ParentModel(stage, folder.model(stage).resolve(), model_fingerprint(folder, stage))


def completed_result(context: RunContext, stage: str, resume_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of a finished stage, every file of its model verified; None where the stage must run."""
    path = context.folder.result(stage)
    if not path.exists():
        return None
    result: dict[str, Any] = read_json(path)
    if check_resume_config(result["resume_config"], resume_config, context.options.overrides):
        return None
    if name := first_damaged_file(context.folder, stage):
        context.note(stage, f"{name} of the {stage} model is damaged; it is made again")
        return None
    return result


def first_damaged_file(folder: RunFolder, stage: str) -> str | None:
    """The first file of a stage's model that differs from its hash in the result, or None."""
    files = {
        folder.model(stage) / name: (name, digest) for name, digest in read_json(folder.result(stage))["files"].items()
    }
    hashes = hash_files([path for path in files if path.is_file()])
    return next((str(name) for path, (name, digest) in files.items() if hashes.get(path) != digest), None)


def hash_model_files(model: Path) -> dict[str, str]:
    """The hash of every file of a stage's model, and of the base that was written for its adapter."""
    base = hash_folder(model.with_name("base")) if (model / "adapter_config.json").exists() else {}
    return {**hash_folder(model), **{f"../base/{name}": digest for name, digest in base.items()}}


def hash_folder(folder: Path) -> dict[str, str]:
    """The hash of every file of a folder, by its relative path; the model card may change."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return {str(path.relative_to(folder)): digest for path, digest in hash_files(paths).items()}


def model_fingerprint(folder: RunFolder, stage: str) -> str:
    """One hash for the model of a finished stage: over the names and hashes of its files."""
    files = read_json(folder.result(stage))["files"]
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


def promoted_stage(folder: RunFolder, stages: Iterable[str]) -> str:
    """The promoted stage; where no gate has opened yet, the last finished one."""
    best = folder.best_model.resolve().parent.name if folder.best_model.exists() else None
    for stage in (best, *reversed(list(stages))):
        if stage and folder.result(stage).exists():
            return stage
    raise UsageError(f"{folder.path} has no finished stage yet; finish it with: modelwright run")


def require_open_gate(context: RunContext, stage: str) -> None:
    """Refuse to build on a stage whose gate is closed by the current thresholds, unless the user accepted it."""
    path = context.folder.gate(stage)
    if not path.exists():
        raise Refused(f"stage {stage} was not judged yet; begin with it, or leave --from-stage out")
    verdict = judge_stage(context.loaded, stage, read_json(path)["metrics"])
    if not verdict.open and find_or_add_acceptance(context, verdict) is None:
        raise GateClosed(verdict.message)


def find_or_add_acceptance(context: RunContext, verdict: Verdict) -> dict[str, Any] | None:
    """The acceptance of this closed gate for this model and these thresholds, recorded earlier or by this command."""
    folder, stage = context.folder, verdict.stage
    saved = read_lineage(folder)
    model = model_fingerprint(folder, stage)
    failed = sorted(f"{check.metric} {check.requirement}" for check in verdict.checks if not check.passed)
    for entry in saved["accepted"]:
        if (entry["stage"], entry["model"], entry["failed"]) == (stage, model, failed):
            return dict(entry)
    if stage not in context.options.accepted_gates:
        return None
    entry = {
        "stage": stage,
        "reason": context.options.accept_reason,
        "message": verdict.message,
        "failed": failed,
        "model": model,
        "time": round(time.time(), 3),
    }
    write_json(folder.lineage, {**saved, "accepted": [*saved["accepted"], entry]})
    return entry


def record_lineage(context: RunContext, verdict: Verdict, base: str) -> None:
    """Record the parent of a judged stage's model, its fingerprint and the state of its gate."""
    folder, stage = context.folder, verdict.stage
    acceptance = None if verdict.open else find_or_add_acceptance(context, verdict)
    entry = {
        "parent": context.recipe.parent_stage(stage),
        "started_from": base,
        "parent_model": read_json(folder.result(stage))["resume_config"]["model.fingerprint"],
        "model": model_fingerprint(folder, stage),
        "gate": "open" if verdict.open else "accepted" if acceptance else "closed",
        "message": verdict.message,
        "reason": acceptance["reason"] if acceptance else None,
    }
    saved = read_lineage(folder)
    write_json(folder.lineage, {**saved, "stages": {**saved["stages"], stage: entry}})


def ancestors(context: RunContext, stage: str) -> list[dict[str, Any]]:
    """The lineage of a stage and all before it, oldest first."""
    stages = read_lineage(context.folder)["stages"]
    names = list(context.recipe.stages)
    return [{"stage": name, **stages[name]} for name in names[: names.index(stage) + 1] if name in stages]


def read_lineage(folder: RunFolder) -> dict[str, Any]:
    """The contents of lineage.json; empty where there is none."""
    saved: dict[str, Any] = read_json(folder.lineage) if folder.lineage.exists() else {}
    return {"stages": {}, "accepted": [], **saved}
