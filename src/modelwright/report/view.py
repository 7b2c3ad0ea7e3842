"""All values that a page or a table shows of one run, or of two runs compared."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.errors import ModelwrightError
from modelwright.recipe.explain import SettingValue, list_settings, non_default_settings
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.report.formatting import (
    format_metric,
    format_setting,
    single_line,
)
from modelwright.report.history import RunHistory, StageHistory
from modelwright.runs.folder import RunFolder

MAX_JSON_BYTES = 8_000_000
"""Bytes of a JSON file of the run that a page reads; a larger one is not ours."""
MAX_IMAGE_BYTES = 20_000
MAX_IMAGES = 25


@dataclass(frozen=True)
class RunView:
    """One run, ready to be drawn."""

    folder: RunFolder
    """Where it lies."""
    history: RunHistory
    """What its journal says."""
    loaded: LoadedRecipe | None
    """Its recipe, where it is kept already."""
    settings: tuple[tuple[SettingValue, Any], ...] = ()
    """Settings that differ from the defaults, with those."""
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The verdicts, by stage."""
    plan: dict[str, Any] = field(default_factory=dict)
    """What was planned, by stage."""
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the model saw, by stage."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Settings and results in one."""
    misclassified: dict[str, Any] = field(default_factory=dict)
    """What an image classifier got wrong."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each finished stage wrote, by stage."""
    lineage: dict[str, Any] = field(default_factory=dict)
    """Which model came from which, and what a person accepted."""

    @property
    def name(self) -> str:
        """What the run is called."""
        recipe_name = self.history.last_events.get("run", {}).get("recipe")
        return self.loaded.recipe.name if self.loaded else str(recipe_name or self.folder.path.name)

    @property
    def description(self) -> str:
        """The recipe's own line."""
        return self.loaded.recipe.description if self.loaded else ""

    @property
    def stages(self) -> list[StageHistory]:
        """Every stage the recipe asks for, those not begun too."""
        requested = (
            list(self.loaded.recipe.stages)
            if self.loaded
            else self.history.last_events.get("run", {}).get("stages", [])
        )
        names = dict.fromkeys([*(str(name) for name in requested), *self.history.stages])
        return [self.history.stages.get(name) or StageHistory(name) for name in names]

    @property
    def current(self) -> StageHistory | None:
        """The last stage that has begun."""
        return next((stage for stage in reversed(self.stages) if stage.steps or stage.last_events), None)

    @property
    def metrics(self) -> dict[str, Any]:
        """What was measured last."""
        for stage in reversed(self.stages):
            verdict = stage.last_events.get("verdict") or self.gates.get(stage.name)
            if verdict and isinstance(verdict.get("metrics"), dict):
                return dict(verdict["metrics"])
        return {}

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The last verdict told."""
        return next((s.last_events["verdict"] for s in reversed(self.stages) if "verdict" in s.last_events), None)

    @property
    def state(self) -> str:
        """Finished, stopped, closed, or going on."""
        stopped = self.history.last_events.get("stopped", {})
        if self.history.state == "stopped" and stopped.get("exit_code") == 3:
            return "gate closed"
        return self.history.state

    @property
    def misclassified_images(self) -> list[dict[str, Any]]:
        """The surest mistakes that have a picture, each as a data address."""
        images = []
        for mistake in self.misclassified.get("surest_mistakes", [])[:MAX_IMAGES]:
            path = self.folder.demo_outputs / "mistakes" / f"{mistake.get('row')}.png"
            if path.is_file() and path.stat().st_size < MAX_IMAGE_BYTES:
                encoded = base64.b64encode(path.read_bytes()).decode()
                images.append({**mistake, "data_url": f"data:image/png;base64,{encoded}"})
        return images


def load_run_view(folder: RunFolder, history: RunHistory) -> RunView:
    """Read what a page needs; each part that is missing or damaged is left out."""
    loaded = _load_recipe(folder)
    stages = [*history.stages]
    return RunView(
        folder=folder,
        history=history,
        loaded=loaded,
        settings=non_default_settings(loaded) if loaded else (),
        gates={stage: content for stage in stages if (content := _load_json(folder.gate(stage)))},
        plan=_load_json(folder.plan),
        data={stage: content for stage in stages if (content := _load_json(folder.data_manifest(stage)))},
        summary=_load_json(folder.summary),
        misclassified=_load_json(folder.demo_outputs / "mistakes.json"),
        lineage=_load_json(folder.lineage),
        results={stage: content for stage in stages if (content := _load_json(folder.result(stage)))},
    )


def _load_recipe(folder: RunFolder) -> LoadedRecipe | None:
    try:
        return load(folder.recipe, environ={}) if folder.recipe.exists() else None
    except (ModelwrightError, OSError):
        return None


def _load_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


IDENTITY_KEYS = frozenset({"name", "description", "output_dir"})
"""Settings in which any two runs differ, and which decide nothing."""


@dataclass(frozen=True)
class RunComparison:
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


def compare_runs(first: RunView, second: RunView) -> RunComparison:
    """Hold two runs against each other."""
    views = (first, second)
    metrics = [
        {
            **view.metrics,
            "goodput": view.history.time_breakdown.goodput,
            "time": view.history.time_breakdown.total_seconds,
        }
        for view in views
    ]
    settings = [_settings(view) for view in views]
    gates = [_gate_states(view) for view in views]
    return RunComparison(
        names=(str(first.folder.path), str(second.folder.path)),
        metrics=_pairs(*metrics),
        settings={key: pair for key, pair in _pairs(*settings).items() if pair[0] != pair[1]},
        gates=_pairs(*gates),
    )


def comparison_lines(comparison: RunComparison) -> list[str]:
    """The two runs for a terminal: a table of three columns."""
    table: list[tuple[str, str, str]] = [("", *comparison.names), ("", "", "")]
    table += [
        (metric, format_metric(metric, one), format_metric(metric, two))
        for metric, (one, two) in comparison.metrics.items()
    ]
    table += [("", "", ""), *((f"gate {stage}", one, two) for stage, (one, two) in comparison.gates.items())]
    if comparison.settings:
        table.append(("", "", ""))
    table += [(key, _format_cell(one), _format_cell(two)) for key, (one, two) in comparison.settings.items()]
    cells = [
        tuple(single_line(cell) for cell in row) for row in table
    ]  # names and settings may hold what a terminal obeys
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in cells]


def _format_cell(value: Any) -> str:
    return "" if value is None else format_setting(value)[:44]


def _settings(view: RunView) -> dict[str, Any]:
    return (
        {row.key: row.value for row in list_settings(view.loaded) if row.key not in IDENTITY_KEYS}
        if view.loaded
        else {}
    )


def _gate_states(view: RunView) -> dict[str, str]:
    verdicts = {stage.name: stage.last_events.get("verdict") for stage in view.stages}
    return {
        stage: "not judged" if verdict is None else "open" if verdict.get("open")
        else f"accepted ({verdict['accepted']})" if verdict.get("accepted") else "closed"
        for stage, verdict in verdicts.items()
    }  # fmt: skip


def _pairs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])}


def _lists(pairs: dict[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    return {key: list(pair) for key, pair in pairs.items()}
