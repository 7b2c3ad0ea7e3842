"""Write the files of a finished run for people and scripts: training history, summary and model card."""

from __future__ import annotations

import platform
from typing import Any

from modelwright import __version__
from modelwright.report.history import read_history
from modelwright.report.model_card import render_model_card
from modelwright.runs import journal
from modelwright.runs.folder import write_json, write_text
from modelwright.stages.context import Metrics, RunContext
from modelwright.stages.gate import Verdict, ancestors

HISTORY_FIELDS = (
    *("step", "epoch", "loss", "eval_loss", "eval_accuracy", "learning_rate", "grad_norm"),
    *("tokens_per_second", "samples_per_second", "data_wait_fraction", "peak_memory_bytes"),
)


def write_history(context: RunContext) -> None:
    """Write training_history.json, each step once: of a step repeated after a kill, the last one."""
    stages = list(context.recipe.stages)
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    for event in journal.read(context.folder.journal):
        if event["event"] in ("step", "evaluation") and event.get("stage") in stages:
            step_key = (stages.index(event["stage"]), event["step"])
            entry = steps.setdefault(step_key, {"stage": event["stage"]})
            entry.update({key: event[key] for key in HISTORY_FIELDS if key in event})
    write_json(context.folder.history, [steps[step_key] for step_key in sorted(steps)])


def write_summary(context: RunContext, stage: str, plan: dict[str, Any], metrics: Metrics, verdict: Verdict) -> None:
    """Write training_summary.json: settings and results in one file."""
    import torch
    import transformers

    recipe, world = context.recipe, context.world
    backend = None if world.size == 1 else "nccl" if context.hardware.device == "cuda" else "gloo"
    distributed = {
        "devices": world.size, "sharding": plan["sharding"], "backend": backend,
        "rows_per_device": plan["micro_batch_size"], "rows_per_step": plan["global_batch_size"],
        "gradient_accumulation_steps": plan["gradient_accumulation_steps"],
    }  # fmt: skip
    versions = {"modelwright": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                "python": platform.python_version()}  # fmt: skip
    summary = {
        "recipe": recipe.name,
        "stage": stage,
        "model": recipe.model.display_name,
        "data": recipe.data_for(stage).source,
        "settings": recipe.stages[stage].model_dump(mode="json"),
        "batch": plan["batch_arithmetic"],
        "plan": plan,
        "metrics": metrics,
        "changes": metric_changes(metrics),
        "verdict": verdict.as_json(),
        "time": read_history(context.folder).time_breakdown.as_json(),
        "lineage": ancestors(context, stage),
        "hardware": context.hardware.name,
        "world": world.size,
        "distributed": distributed,
        "versions": versions,
    }
    write_json(context.folder.summary, summary)


def metric_changes(metrics: Metrics) -> dict[str, dict[str, float]]:
    """The metrics that exist before and after training, with their change."""
    return {
        name: {"before": before, "after": after, "change": after - before}
        for name, after in metrics.items()
        if after is not None and (before := metrics.get(f"base_{name}")) is not None
    }


def write_model_card(context: RunContext, stage: str) -> None:
    """Write the model card from the files of the run."""
    write_text(context.folder.model(stage) / "README.md", render_model_card(context.folder, stage))
