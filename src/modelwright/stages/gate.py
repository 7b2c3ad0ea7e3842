"""Decide whether a stage may be promoted: thresholds on measured metrics become a written verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from modelwright.errors import UsageError
from modelwright.recipe.judging import Threshold
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.runs.folder import open_run, read_json


@dataclass(frozen=True)
class Check:
    """One metric held against one limit."""

    metric: str
    """What was measured."""
    value: float | None
    """What it is; None where it was not measured or is no number."""
    wants: str
    """The limit in words, with its arithmetic."""
    passed: bool
    """Whether it holds."""
    where: str | None = None
    """Where it is asked for: a line of the recipe, or of its gates_file."""

    def __str__(self) -> str:
        found = "was not measured or is not finite" if self.value is None else f"{self.value:.4g}"
        where = f" ({self.where})" if self.where and not self.passed else ""
        return f"{self.metric} {found}, {'holds' if self.passed else 'needs'} {self.wants}{where}"


@dataclass(frozen=True)
class Verdict:
    """The judgement on a stage."""

    stage: str
    """Which stage."""
    open: bool
    """Whether its result may be used by the next."""
    checks: tuple[Check, ...]
    """Every limit and how it came out."""

    @property
    def letter(self) -> str:
        """The verdict in one line a person understands."""
        if not self.checks:
            return f"gate {self.stage} is open: nothing was asked of it"
        shown = self.checks if self.open else [check for check in self.checks if not check.passed]
        return f"gate {self.stage} is {'open' if self.open else 'closed'}: " + "; ".join(str(check) for check in shown)

    def as_json(self) -> dict[str, Any]:
        """The verdict for gates/STAGE.json."""
        return {**asdict(self), "letter": self.letter}


def judge(
    stage: str,
    thresholds: Mapping[str, Threshold],
    metrics: Mapping[str, float | None],
    places: Mapping[str, str] | None = None,
) -> Verdict:
    """Hold every metric against its limits; a missing or non-finite one never passes."""
    checks = []
    for metric, threshold in thresholds.items():
        value = _finite(metrics.get(metric))
        for word, limit in (("at most", threshold.at_most), ("at least", threshold.at_least)):
            if limit is not None:
                bound, wants = _bound(word, limit, threshold, metrics)
                holds = (
                    value is not None
                    and bound is not None
                    and (value <= bound if word == "at most" else value >= bound)
                )
                where = (places or {}).get(f"{metric}.{word.replace(' ', '_')}")
                checks.append(Check(metric, value, wants, holds, where))
    return Verdict(stage, all(check.passed for check in checks), tuple(checks))


def judge_again(run: str, stage: str | None) -> list[Verdict]:
    """Judge what was measured by the thresholds that the run's recipe has now; nothing heavy is loaded."""
    folder = open_run(run)
    loaded = load(folder.recipe, environ={})
    stages = [stage] if stage else [name for name in loaded.recipe.stages if folder.gate(name).exists()]
    verdicts = []
    for name in stages:
        if name not in loaded.recipe.stages or not folder.gate(name).exists():
            known = ", ".join(path.stem for path in sorted(folder.gate("x").parent.glob("*.json"))) or "none yet"
            raise UsageError(f"{run} has no verdict on {name!r}; stages that were measured: {known}")
        verdicts.append(verdict_on(loaded, name, read_json(folder.gate(name))["metrics"]))
    if not verdicts:
        raise UsageError(f"{run} has no verdict yet; finish it with: modelwright run")
    return verdicts


def verdict_on(loaded: LoadedRecipe, stage: str, metrics: Mapping[str, float | None]) -> Verdict:
    """Hold a stage's metrics against its gate, with the place of each limit."""
    start = f"gates.{stage}."
    places = {
        key.removeprefix(start): f"recipe line {origin.line}" if origin.kind == "recipe" else origin.where
        for key, origin in loaded.origins.items()
        if key.startswith(start) and origin.line
    }
    return judge(stage, loaded.recipe.gate_of(stage), metrics, places)


def _bound(
    word: str, limit: float, threshold: Threshold, metrics: Mapping[str, float | None]
) -> tuple[float | None, str]:
    """The limit as a number, and in words with its arithmetic."""
    if threshold.times is None and threshold.plus is None:
        return limit, f"{word} {limit:g}"
    name = threshold.times or threshold.plus or ""
    other = _finite(metrics.get(name))
    if other is None:
        sum_of = f"{limit:g} × {name}" if threshold.times else f"{name} {_signed(limit)}"
        return None, f"{word} {sum_of}, which was not measured"
    if threshold.times:
        return limit * other, f"{word} {limit * other:.4g} = {limit:g} × {name} {other:.4g}"
    return other + limit, f"{word} {other + limit:.4g} = {name} {other:.4g} {_signed(limit)}"


def _signed(limit: float) -> str:
    return f"{'-' if limit < 0 else '+'} {abs(limit):g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
