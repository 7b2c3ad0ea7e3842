"""Preferences: pairs of answers, held against what the model thought of them before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from modelwright.data import preferences
from modelwright.engine.loop import Engine
from modelwright.recipe.schema import Data
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built, Ingredients
from modelwright.stages.text import RowsKind, made_of
from modelwright.tasks.dpo import DpoTask
from modelwright.tasks.reference import set_reference


class PreferenceKind(RowsKind):
    """Stages that tune a language model on pairs of answers."""

    def read(self, data: Data, seed: int, beside: Path) -> Any:
        """Pairs of answers."""
        return preferences.load(data, seed, beside)

    def build(self, context: Context, found: Ingredients, stage: str) -> Built:
        """Load the model, say what moves, encode the pairs; the reference is measured when the engine stands."""
        task, made = made_of(context, found, stage, DpoTask)

        def settle(engine: Engine, trunk: Path) -> str | None:
            for line in _told(task, found.data):
                context.journal.add("note", stage=stage, message=line)
            return set_reference(task, engine, context.folder.reference(stage), found.model_fingerprint)

        facts = {**made.data_facts, "prompt_shared": task.not_shared is None}
        return replace(made, data_facts=facts, settle=settle)


def _told(task: DpoTask, data: preferences.Preferences) -> list[str]:
    """What a person should know of the pairs."""
    cut, lost = (
        sum(side.facts()[name] for side in (task.train_set, task.held_out_set))
        for name in ("truncated_rows", "lost_tokens")
    )
    lines = [f"{data.same} rows are left out: their two answers are the same"] if data.same else []
    lines += [f"{cut} pairs are cut to max_length, {lost} tokens in all; none is dropped"] if cut else []
    return lines + ([f"each answer is computed with a prompt of its own: {task.not_shared}"] if task.not_shared else [])
