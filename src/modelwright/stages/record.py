"""What a run leaves for people and scripts: history, summary and the model's card, all from what was measured."""

from __future__ import annotations

import platform
from typing import Any

from modelwright import __version__
from modelwright.recipe.training import Parts
from modelwright.report.lines import plain
from modelwright.runs import journal
from modelwright.runs.folder import write_json, write_text
from modelwright.stages.context import Context
from modelwright.stages.gate import Verdict
from modelwright.stages.kinds import Ingredients, Metrics
from modelwright.stages.lineage import ancestors

STEP_FACTS = (
    *("step", "epoch", "loss", "eval_loss", "eval_accuracy", "learning_rate", "grad_norm"),
    *("tokens_per_second", "memory_bytes"),
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
            "verdict": verdict.as_json(),
            "lineage": ancestors(context, stage),
            "hardware": context.facts.name,
            "world": context.world.size,
            "versions": {
                "modelwright": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        },
    )


def write_card(context: Context, stage: str, found: Ingredients, metrics: Metrics, verdict: Verdict) -> None:
    """A model card that says only what is so."""
    recipe = context.recipe
    settings, data = recipe.stages[stage], recipe.data_of(stage).source
    library = "modelwright"
    if isinstance(settings, Parts):
        library = "peft" if settings.trainable.lora else "transformers"
    measured = "\n".join(f"| {name} | {value:.4g} |" for name, value in metrics.items() if value is not None)
    revision = f" at `{found.revision}`" if found.revision else ""
    card = f"""---
library_name: {library}
tags: [modelwright, {stage}]
---

# {recipe.name}

{recipe.description}

Base model: `{found.model_name}`{revision}. Stage: {stage}. Data: `{data}`.
Trained with Modelwright {__version__}; `recipe.yaml` in the run folder makes it again.

| measured | value |
|---|---|
{measured}

{_lineage(context, stage)}

Before and after: `demo_outputs/before_after.md` in the run folder. No claim is made beyond these measurements.
The licence of the base model and of the data hold for this model too.
"""
    write_text(context.folder.model(stage) / "README.md", card)


def _lineage(context: Context, stage: str) -> str:
    """How each gate on the way here stands, with the words of whoever accepted a closed one."""
    lines = []
    for known in ancestors(context, stage):
        said = f" Accepted all the same, with this reason: {plain(known['reason'])}." if known["reason"] else ""
        lines.append(f"- {known['letter']}.{said}")
    return "\n".join(lines)
