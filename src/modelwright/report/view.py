"""Everything a page shows of a run, as plain values: its story and what lies in its folder, where it is there."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.errors import ModelwrightError
from modelwright.recipe.explain import Row, differing
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.report.story import StageStory, Story, cut
from modelwright.runs.folder import RunFolder

LARGEST_FILE = 8_000_000
"""Bytes of a JSON file of the run that a page reads; a larger one is not ours."""
LARGEST_PICTURE = 20_000
MOST_PICTURES = 25


@dataclass(frozen=True)
class View:
    """One run, ready to be drawn."""

    folder: RunFolder
    """Where it lies."""
    story: Story
    """What its journal says."""
    loaded: LoadedRecipe | None
    """Its recipe, where it is kept already."""
    settings: tuple[tuple[Row, Any], ...] = ()
    """Settings that differ from the defaults, with those."""
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The verdicts, by stage."""
    plan: dict[str, Any] = field(default_factory=dict)
    """What was planned, by stage."""
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the model saw, by stage."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Settings and results in one."""
    mistakes: dict[str, Any] = field(default_factory=dict)
    """What an image classifier got wrong."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each finished stage wrote, by stage."""
    lineage: dict[str, Any] = field(default_factory=dict)
    """Which model came from which, and what a person accepted."""

    @property
    def name(self) -> str:
        """What the run is called."""
        told = self.story.facts.get("run", {}).get("recipe")
        return self.loaded.recipe.name if self.loaded else str(told or self.folder.path.name)

    @property
    def description(self) -> str:
        """The recipe's own line."""
        return self.loaded.recipe.description if self.loaded else ""

    @property
    def stages(self) -> list[StageStory]:
        """Every stage the recipe asks for, those not begun too."""
        asked = list(self.loaded.recipe.stages) if self.loaded else self.story.facts.get("run", {}).get("stages", [])
        names = dict.fromkeys([*(str(name) for name in asked), *self.story.stages])
        return [self.story.stages.get(name) or StageStory(name) for name in names]

    @property
    def current(self) -> StageStory | None:
        """The last stage that has begun."""
        return next((stage for stage in reversed(self.stages) if stage.steps or stage.facts), None)

    @property
    def metrics(self) -> dict[str, Any]:
        """What was measured last."""
        for stage in reversed(self.stages):
            found = stage.facts.get("verdict") or self.gates.get(stage.name)
            if found and isinstance(found.get("metrics"), dict):
                return dict(found["metrics"])
        return {}

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The last verdict told."""
        return next((s.facts["verdict"] for s in reversed(self.stages) if "verdict" in s.facts), None)

    @property
    def state(self) -> str:
        """Finished, stopped, closed, or going on."""
        stopped = self.story.facts.get("stopped", {})
        if self.story.state == "stopped" and stopped.get("exit_code") == 3:
            return "gate closed"
        return self.story.state

    @property
    def pictures(self) -> list[dict[str, Any]]:
        """The surest mistakes that have a picture, each as a data address."""
        shown = []
        for mistake in self.mistakes.get("surest_mistakes", [])[:MOST_PICTURES]:
            path = self.folder.demo_outputs / "mistakes" / f"{mistake.get('row')}.png"
            if path.is_file() and path.stat().st_size < LARGEST_PICTURE:
                coded = base64.b64encode(path.read_bytes()).decode()
                shown.append({**mistake, "picture": f"data:image/png;base64,{coded}"})
        return shown


def view_of(folder: RunFolder, story: Story) -> View:
    """Read what a page needs; each part that is missing or damaged is left out."""
    loaded = _recipe(folder)
    stages = [*story.stages]
    return View(
        folder=folder,
        story=story,
        loaded=loaded,
        settings=differing(loaded) if loaded else (),
        gates={stage: found for stage in stages if (found := _json(folder.gate(stage)))},
        plan=_json(folder.plan),
        data={stage: found for stage in stages if (found := _json(folder.data_manifest(stage)))},
        summary=_json(folder.summary),
        mistakes=_json(folder.demo_outputs / "mistakes.json"),
        lineage=_json(folder.lineage),
        results={stage: found for stage in stages if (found := _json(folder.result(stage)))},
    )


def shown(value: Any) -> str:
    """A setting's value in few words."""
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 400)


def _recipe(folder: RunFolder) -> LoadedRecipe | None:
    try:
        return load(folder.recipe, environ={}) if folder.recipe.exists() else None
    except (ModelwrightError, OSError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_FILE:
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
