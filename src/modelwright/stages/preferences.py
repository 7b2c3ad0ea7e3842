"""Preferences: pairs of answers, held against what the model thought of them before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from modelwright.data import preferences
from modelwright.engine.loop import Engine
from modelwright.models import text
from modelwright.recipe.schema import Dpo
from modelwright.stages.compare import METRICS, compare
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built, Ingredients, Metrics
from modelwright.stages.lineage import Parent
from modelwright.stages.text import built, ready_model, set_aside, start_of
from modelwright.tasks.dpo import DpoTask
from modelwright.tasks.reference import set_reference


class PreferenceKind:
    """Stages that tune a language model on pairs of answers."""

    shown = frozenset(METRICS)

    def gather(self, context: Context, stage: str, parent: Parent | None) -> Ingredients:
        """The model to start from, and the pairs."""
        data = preferences.load(context.recipe.data_of(stage), context.recipe.seed, context.beside)
        set_aside(context, stage, data.aside)
        return Ingredients(**start_of(context, parent), data=data, data_fingerprint=data.fingerprint)

    def build(self, context: Context, found: Ingredients, stage: str) -> Built:
        """Load the model, say what moves, encode the pairs; the reference is measured when the engine stands."""
        settings = context.recipe.stages[stage]
        assert isinstance(settings, Dpo)
        model, tokenizer = ready_model(context, found, settings)
        task = DpoTask(model, tokenizer, found.data, settings, text.stop_tokens(model))
        facts: dict[str, Any] = {
            **found.data.manifest(context.recipe.data_of(stage)),
            "train": task.train_set.facts(),
            "held_out": task.held_out_set.facts(),
            "prompt_shared": task.not_shared is None,
        }

        def settle(engine: Engine, trunk: Path) -> str | None:
            for line in _told(task, found.data):
                context.journal.add("note", stage=stage, message=line)
            return set_reference(task, engine, context.folder.reference(stage), found.model_fingerprint)

        return replace(built(task, model, tokenizer, facts), settle=settle)

    def show(self, context: Context, found: Ingredients, stage: str) -> Metrics:
        """The same questions, before and after."""
        return compare(context, found, stage)


def _told(task: DpoTask, data: preferences.Preferences) -> list[str]:
    """What a person should know of the pairs."""
    cut, lost = (
        sum(side.facts()[name] for side in (task.train_set, task.held_out_set))
        for name in ("truncated_rows", "lost_tokens")
    )
    lines = [f"{data.same} rows are left out: their two answers are the same"] if data.same else []
    lines += [f"{cut} pairs are cut to max_length, {lost} tokens in all; none is dropped"] if cut else []
    return lines + ([f"each answer is computed with a prompt of its own: {task.not_shared}"] if task.not_shared else [])
