"""Two runs side by side: what was measured, the settings in which they differ, how their gates stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelwright.recipe.explain import rows
from modelwright.report import charts
from modelwright.report.charts import Line
from modelwright.report.lines import duration, number, plain
from modelwright.report.view import View, shown

OURS = frozenset({"name", "description", "output_dir"})
"""Settings in which any two runs differ, and which decide nothing."""


@dataclass(frozen=True)
class Beside:
    """Two runs, row by row."""

    names: tuple[str, str]
    """What they are called."""
    metrics: dict[str, tuple[Any, Any]]
    """What was measured in either."""
    settings: dict[str, tuple[Any, Any]]
    """Settings that differ."""
    gates: dict[str, tuple[str, str]]
    """How each stage's gate stands."""

    def as_json(self) -> dict[str, Any]:
        """For machines; the first run's value stands first."""
        return {"runs": list(self.names), "metrics": _lists(self.metrics), "settings": _lists(self.settings),
                "gates": _lists(self.gates)}  # fmt: skip


def beside(first: View, second: View) -> Beside:
    """Hold two runs against each other."""
    views = (first, second)
    metrics = [
        {**view.metrics, "goodput": view.story.ledger.goodput, "time": view.story.ledger.whole} for view in views
    ]
    settings = [_settings(view) for view in views]
    gates = [_gates(view) for view in views]
    return Beside(
        names=(str(first.folder.path), str(second.folder.path)),
        metrics=_pairs(*metrics),
        settings={key: pair for key, pair in _pairs(*settings).items() if pair[0] != pair[1]},
        gates=_pairs(*gates),
    )


def overlay(first: View, second: View) -> str:
    """The curves of two runs in one picture for each stage and measure."""
    drawn = []
    for stage in first.stages:
        other = second.story.stages.get(stage.name)
        if other is None:
            continue
        for curve, title in (("loss", "Training loss"), ("eval_loss", "Held-out loss"), ("grad_norm", "Gradient norm"),
                             ("tokens_per_second", "Tokens a second")):  # fmt: skip
            lines = [Line(view.folder.path.name, each.curves[curve].points, (), colour)
                     for view, each, colour in ((first, stage, 1), (second, other, 2))]  # fmt: skip
            drawn.append(charts.curves(f"{title}, {stage.name}", lines))
    return f'<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""


def lines(found: Beside) -> list[str]:
    """The two runs for a terminal: a table of three columns."""
    told: list[tuple[str, str, str]] = [("", *found.names), ("", "", "")]
    told += [(metric, said(metric, one), said(metric, two)) for metric, (one, two) in found.metrics.items()]
    told += [("", "", ""), *((f"gate {stage}", one, two) for stage, (one, two) in found.gates.items())]
    if found.settings:
        told.append(("", "", ""))
    told += [(key, _setting(one), _setting(two)) for key, (one, two) in found.settings.items()]
    cells = [tuple(plain(cell) for cell in row) for row in told]  # names and settings may hold what a terminal obeys
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in cells]


def said(metric: str, value: Any) -> str:
    """A metric as a person reads it."""
    if value is None:
        return "–"
    if metric in ("time", "seconds"):
        return duration(value)
    if metric in ("steps", "tokens", "trained_tokens"):
        return f"{value:,.0f}"
    return f"{value:.1%}" if metric == "goodput" else number(value)


def _setting(value: Any) -> str:
    return "" if value is None else shown(value)[:44]


def _settings(view: View) -> dict[str, Any]:
    return {row.key: row.value for row in rows(view.loaded) if row.key not in OURS} if view.loaded else {}


def _gates(view: View) -> dict[str, str]:
    told = {stage.name: stage.facts.get("verdict") for stage in view.stages}
    return {
        stage: "not judged" if verdict is None else "open" if verdict.get("open")
        else f"accepted ({verdict['accepted']})" if verdict.get("accepted") else "closed"
        for stage, verdict in told.items()
    }  # fmt: skip


def _pairs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])}


def _lists(pairs: dict[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    return {key: list(pair) for key, pair in pairs.items()}
