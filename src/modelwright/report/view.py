"""All values that a page or a table shows of one run, or of runs compared."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from modelwright.errors import GateClosed, ModelwrightError
from modelwright.recipe.explain import SettingValue, list_settings, non_default_settings
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.report.formatting import format_metric, format_setting, format_table
from modelwright.report.history import RunHistory, StageHistory
from modelwright.runs.folder import RunFolder, read_json_object

MAX_JSON_BYTES = 8_000_000
"""Largest JSON file of a run that is read."""
MAX_IMAGE_BYTES = 20_000
MAX_IMAGES = 25
IDENTITY_KEYS = frozenset({"name", "description", "output_dir"})
"""Settings that differ between any two runs and do not affect training."""


@dataclass(frozen=True)
class JudgedComparison:
    """Judged answers of a trained model beside those of the model before training."""

    rows: list[dict[str, Any]]
    """Prompt, reference, answers before and after, and whether each is right; wrong ones first, then changed ones."""
    right_before: int | None
    """Right answers before training; None where they were not judged."""
    right: int
    """Right answers of the trained model, by every verifier."""

    @property
    def summary(self) -> str:
        """How many are right: `0 of 60 right → 58 of 60 right`."""
        counts = [count for count in (self.right_before, self.right) if count is not None]
        return " → ".join(f"{count} of {len(self.rows)} right" for count in counts)


def judged_answers(folder: RunFolder, stage: str) -> JudgedComparison | None:
    """The judged answers of a stage's model; None where nothing was judged, or its file is damaged."""
    try:
        after, before = (_judged_rows(folder, name) for name in (stage, "base"))
    except (KeyError, TypeError, AttributeError):
        return None
    if not after:
        return None
    comparable = [row["prompt"] for row in before] == [row["prompt"] for row in after]
    if comparable:
        after = [{**row, "before": old["answer"], "right_before": old["right"]}
                 for row, old in zip(after, before, strict=True)]  # fmt: skip
    rows = sorted(after, key=lambda row: (row["right"], row["right"] == row.get("right_before")))
    right_before = sum(row["right"] for row in before) if comparable else None
    return JudgedComparison(rows, right_before, sum(row["right"] for row in rows))


def _judged_rows(folder: RunFolder, model: str) -> list[dict[str, Any]]:
    answers = _load_json(folder.evaluation(model)).get("answers", [])
    return [{**{name: str(row[name]) for name in ("prompt", "reference", "answer")},
             "right": row["scores"]["score"] == 1} for row in answers]  # fmt: skip


@dataclass(frozen=True)
class RunView:
    """Everything that is shown of one run."""

    folder: RunFolder
    """The run folder."""
    history: RunHistory
    """Its journal, replayed."""
    loaded: LoadedRecipe | None
    """Its recipe, if written already."""
    settings: tuple[tuple[SettingValue, Any], ...] = ()
    """Settings that differ from the defaults, each with its default."""
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Verdicts by stage."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Plans by stage."""
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Data manifests by stage."""
    summary: dict[str, Any] = field(default_factory=dict)
    """training_summary.json."""
    misclassified: dict[str, Any] = field(default_factory=dict)
    """Mistakes of an image classifier."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Results of finished stages."""
    lineage: dict[str, Any] = field(default_factory=dict)
    """Parent of each model, and gates accepted manually."""

    @property
    def name(self) -> str:
        """Name of the run."""
        recipe_name = self.history.last_events.get("run", {}).get("recipe")
        return self.loaded.recipe.name if self.loaded else str(recipe_name or self.folder.path.name)

    @property
    def description(self) -> str:
        """The recipe's description."""
        return self.loaded.recipe.description if self.loaded else ""

    @property
    def stages(self) -> list[StageHistory]:
        """Every stage of the recipe, also those not started."""
        recorded = self.history.last_events.get("run", {}).get("stages", [])
        requested = self.loaded.recipe.pipeline if self.loaded else recorded
        names = dict.fromkeys([*map(str, requested), *self.history.stages])
        return [self.history.stages.get(name) or StageHistory(name) for name in names]

    @property
    def current(self) -> StageHistory | None:
        """The last stage that was started, except evaluate, which has no steps."""
        started = (stage for stage in reversed(self.stages) if stage.steps or stage.last_events)
        return next((stage for stage in started if stage.name != "evaluate"), None)

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the last judged stage."""
        for stage in reversed(self.stages):
            verdict = stage.last_events.get("verdict") or self.gates.get(stage.name)
            if verdict and isinstance(verdict.get("metrics"), dict):
                return dict(verdict["metrics"])
        return {}

    @property
    def state(self) -> str:
        """State of the history, or `gate closed`."""
        stopped = self.history.last_events.get("stopped", {})
        if self.history.state == "stopped" and stopped.get("exit_code") == GateClosed.exit_code:
            return "gate closed"
        return self.history.state

    @property
    def judged(self) -> JudgedComparison | None:
        """The judged answers of the last stage that has some."""
        comparisons = (judged_answers(self.folder, stage.name) for stage in reversed(self.stages))
        return next((comparison for comparison in comparisons if comparison), None)

    @property
    def misclassified_images(self) -> list[dict[str, Any]]:
        """The most confident mistakes that have an image, each as a data: URL."""
        images = []
        for mistake in self.misclassified.get("surest_mistakes", [])[:MAX_IMAGES]:
            path = self.folder.demo_outputs / "mistakes" / f"{mistake.get('row')}.png"
            if path.is_file() and path.stat().st_size < MAX_IMAGE_BYTES:
                encoded = base64.b64encode(path.read_bytes()).decode()
                images.append({**mistake, "data_url": f"data:image/png;base64,{encoded}"})
        return images


def load_run_view(folder: RunFolder, history: RunHistory, stages: Sequence[str] | None = None) -> RunView:
    """Read a run folder; missing and damaged files are left out."""
    loaded = _load_recipe(folder)
    stages = [*history.stages] if stages is None else stages
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
    except OSError:
        return {}
    return read_json_object(path)


@dataclass(frozen=True)
class RunComparison:
    """Runs compared; each tuple holds one value per run."""

    names: tuple[str, ...]
    """Their folders."""
    metrics: dict[str, tuple[Any, ...]]
    """All metrics."""
    settings: dict[str, tuple[Any, ...]]
    """Settings that differ."""
    gates: dict[str, tuple[str, ...]]
    """State of each stage's gate."""

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {"runs": self.names, "metrics": self.metrics, "settings": self.settings, "gates": self.gates}


def compare_runs(*views: RunView) -> RunComparison:
    """Compare metrics, gates and settings of runs."""
    settings = _by_key(map(_settings, views))
    return RunComparison(
        names=tuple(str(view.folder.path) for view in views),
        metrics=_by_key(map(_metrics, views)),
        settings={key: values for key, values in settings.items() if any(value != values[0] for value in values)},
        gates=_by_key(map(_gate_states, views)),
    )


def comparison_lines(comparison: RunComparison) -> list[str]:
    """Runs as a text table: metrics, gates, settings that differ."""
    blank = ("",) * (len(comparison.names) + 1)
    table: list[tuple[str, ...]] = [("", *comparison.names), blank]
    for metric, values in comparison.metrics.items():
        table.append((metric, *(format_metric(metric, value) for value in values)))
    table += [blank, *((f"gate {stage}", *states) for stage, states in comparison.gates.items())]
    table += [blank] if comparison.settings else []
    table += [(key, *map(_format_cell, values)) for key, values in comparison.settings.items()]
    return format_table(table)


def _format_cell(value: Any) -> str:
    return "" if value is None else format_setting(value)[:44]


def _metrics(view: RunView) -> dict[str, Any]:
    time = view.history.time_breakdown
    return {**view.metrics, "goodput": time.goodput, "time": time.total_seconds}


def _settings(view: RunView) -> dict[str, Any]:
    rows = list_settings(view.loaded) if view.loaded else ()
    # an empty mapping has no key to compare; the keys of the other run are shown
    return {row.key: row.value for row in rows if row.key not in IDENTITY_KEYS and row.value != {}}


def _gate_states(view: RunView) -> dict[str, str]:
    judged = [stage for stage in view.stages if stage.name not in ("prepare", "init", "evaluate")]
    verdicts = {stage.name: stage.last_events.get("verdict") for stage in judged}
    return {
        stage: "not judged" if verdict is None
        else "no gate" if verdict.get("thresholds") == 0 else "open" if verdict.get("open")
        else f"accepted ({verdict['accepted']})" if verdict.get("accepted") else "closed"
        for stage, verdict in verdicts.items()
    }  # fmt: skip


def _by_key(runs: Iterable[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    columns = list(runs)
    return {key: tuple(column.get(key) for column in columns) for key in dict.fromkeys(chain(*columns))}
