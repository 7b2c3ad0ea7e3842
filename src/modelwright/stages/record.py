"""What a run leaves for people and scripts: history, summary and the model's card, all from what was measured."""

from __future__ import annotations

import platform
from typing import Any

from modelwright import __version__
from modelwright.report.ledger import ledger_of
from modelwright.report.model_card import model_card
from modelwright.runs import journal
from modelwright.runs.folder import write_json, write_text
from modelwright.stages.context import Context
from modelwright.stages.gate import Verdict
from modelwright.stages.kinds import Metrics
from modelwright.stages.lineage import ancestors

STEP_FACTS = (
    *("step", "epoch", "loss", "eval_loss", "eval_accuracy", "learning_rate", "grad_norm"),
    *("tokens_per_second", "samples_per_second", "waiting", "memory_bytes"),
)


def write_history(context: Context) -> None:
    """Step by step, each step once: what was redone after a kill counts in its last form."""
    stages = list(context.recipe.stages)
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    for event in journal.read(context.folder.journal):
        if event["event"] in ("step", "evaluation") and event.get("stage") in stages:
            place = (stages.index(event["stage"]), event["step"])
            known = steps.setdefault(place, {"stage": event["stage"]})
            known.update({key: event[key] for key in STEP_FACTS if key in event})
    write_json(context.folder.history, [steps[place] for place in sorted(steps)])


def write_summary(context: Context, stage: str, plan: dict[str, Any], metrics: Metrics, verdict: Verdict) -> None:
    """Settings and results in one file."""
    import torch
    import transformers

    write_json(
        context.folder.summary,
        {
            "recipe": context.recipe.name,
            "stage": stage,
            "model": context.recipe.model.name,
            "data": context.recipe.data_of(stage).source,
            "settings": context.recipe.stages[stage].model_dump(mode="json"),
            "batch": plan["arithmetic"],
            "plan": plan,
            "metrics": metrics,
            "changes": changes(metrics),
            "verdict": verdict.as_json(),
            "time": ledger_of(context.folder).as_json(),
            "lineage": ancestors(context, stage),
            "hardware": context.facts.name,
            "world": context.world.size,
            "distributed": {
                "devices": context.world.size,
                "sharding": plan["sharding"],
                "backend": None if context.world.size == 1 else "nccl" if context.facts.device == "cuda" else "gloo",
                "rows_per_device": plan["per_device"],
                "accumulation": plan["accumulation"],
                "rows_per_step": plan["global_batch"],
            },
            "versions": {
                "modelwright": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        },
    )


def changes(metrics: Metrics) -> dict[str, dict[str, float]]:
    """What was measured before and after, and by how much it changed."""
    return {
        name: {"before": before, "after": after, "change": after - before}
        for name, after in metrics.items()
        if after is not None and (before := metrics.get(f"base_{name}")) is not None
    }


def write_card(context: Context, stage: str) -> None:
    """A model card that says only what is so."""
    write_text(context.folder.model(stage) / "README.md", model_card(context.folder, stage))
