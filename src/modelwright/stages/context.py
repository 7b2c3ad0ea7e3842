"""What every stage is handed: the recipe, the run folder, the journal and the world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelwright.engine.world import World
from modelwright.plan.facts import Facts
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.schema import Recipe
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Journal


@dataclass(frozen=True)
class Orders:
    """What one start of a run is asked, beside its recipe."""

    overrides: frozenset[str] = frozenset()
    """Settings that may differ from those the run was started with."""
    first: str | None = None
    """The stage to begin with; those before it must be finished, and are only verified."""
    last: str | None = None
    """The stage to end with."""
    accepted: frozenset[str] = frozenset()
    """Stages whose closed gate a person accepts."""
    reason: str | None = None
    """Why it is accepted, in that person's words."""


NO_ORDERS = Orders()
"""Just the recipe."""


@dataclass(frozen=True)
class Context:
    """One run, as its stages see it."""

    loaded: LoadedRecipe
    """The recipe, and where each setting came from."""
    folder: RunFolder
    """Where everything is kept."""
    journal: Journal
    """Where everything is told."""
    world: World
    """Who is computing."""
    facts: Facts
    """What this machine can do."""
    orders: Orders
    """What this start was asked beside the recipe."""

    @property
    def recipe(self) -> Recipe:
        """The recipe itself."""
        return self.loaded.recipe

    @property
    def beside(self) -> Path:
        """The folder of the recipe file, where its relative paths may point."""
        return self.loaded.path.parent
