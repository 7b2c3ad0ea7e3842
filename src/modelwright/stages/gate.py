"""Decide whether a stage may be promoted: thresholds on measured metrics become a written verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from modelwright.errors import UsageError
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.recipe.schema import Threshold
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
    line: int | None = None
    """Line of the recipe that asks for it."""

    def __str__(self) -> str:
        found = "was not measured or is not finite" if self.value is None else f"{self.value:.4g}"
        where = f" (recipe line {self.line})" if self.line and not self.passed else ""
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
    lines: Mapping[str, int | None] | None = None,
) -> Verdict:
    """Hold every metric against its limits; a missing or non-finite one never passes."""
    checks = []
    for metric, threshold in thresholds.items():
        value = _finite(metrics.get(metric))
        for word, limit in (("at most", threshold.at_most), ("at least", threshold.at_least)):
            if limit is not None:
                bound, wants = _bound(word, limit, threshold.times, metrics)
                holds = (
                    value is not None
                    and bound is not None
                    and (value <= bound if word == "at most" else value >= bound)
                )
                line = (lines or {}).get(f"{metric}.{word.replace(' ', '_')}")
                checks.append(Check(metric, value, wants, holds, line))
    return Verdict(stage, all(check.passed for check in checks), tuple(checks))


def judge_again(run: str, stage: str | None) -> list[Verdict]:
    """Judge what was measured by the thresholds that the run's recipe has now; nothing heavy is loaded."""
    folder = open_run(run)
    loaded = load(folder.recipe, environ={})
    stages = [stage] if stage else [name for name in loaded.recipe.stages if folder.gate(name).exists()]
    verdicts = []
    for name in stages:
        if not folder.gate(name).exists():
            known = ", ".join(path.stem for path in sorted(folder.gate("x").parent.glob("*.json"))) or "none yet"
            raise UsageError(f"{run} has no verdict on {name!r}; stages that were measured: {known}")
        verdicts.append(verdict_on(loaded, name, read_json(folder.gate(name))["metrics"]))
    if not verdicts:
        raise UsageError(f"{run} has no verdict yet; finish it with: modelwright run")
    return verdicts


def verdict_on(loaded: LoadedRecipe, stage: str, metrics: Mapping[str, float | None]) -> Verdict:
    """Hold a stage's metrics against its gate, with the line of each limit."""
    start = f"gates.{stage}."
    lines = {key.removeprefix(start): origin.line for key, origin in loaded.origins.items() if key.startswith(start)}
    return judge(stage, loaded.recipe.gate_of(stage), metrics, lines)


def _bound(word: str, limit: float, times: str | None, metrics: Mapping[str, float | None]) -> tuple[float | None, str]:
    if times is None:
        return limit, f"{word} {limit:g}"
    other = _finite(metrics.get(times))
    if other is None:
        return None, f"{word} {limit:g} × {times}, which was not measured"
    return limit * other, f"{word} {limit * other:.4g} = {limit:g} × {times} {other:.4g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
