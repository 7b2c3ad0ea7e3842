"""Every training stage of a recipe at its real shapes for a few steps: tokens a second and memory, nothing kept.

The model is made on the device from the recipe's architecture; pretraining reads shards of random tokens, the other
stages the embedded conversations and pairs, so that nothing has to be fetched and no checkpoint has to fit a disk.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.progress import Progress
from modelwright.data.sources import EMBEDDED
from modelwright.errors import UsageError, first_line
from modelwright.recipe.load import load
from modelwright.recipe.schema import Data, Part, Recipe
from modelwright.recipe.values import Steps

WARM_UP = 3
"""Steps before the clock counts: kernels are chosen and layers compiled in them."""
COLUMNS: dict[str, dict[str, Part]] = {
    "field-guide": {"question": "prompt", "answer": "completion"},
    "field-guide-pairs": {},
}


def measure(
    name: str, steps: int, precisions: Sequence[str], sets: Sequence[str] = (), only: Sequence[str] = ()
) -> dict[str, Any]:
    """Run each stage, or only those named, in each precision; one that fails is told and the others go on."""
    recipe = load(name, sets, {}).recipe
    if strange := [stage for stage in only if stage not in recipe.stages]:
        raise UsageError(f"--only is {strange[0]!r}; it wants one of {', '.join(recipe.stages)}")
    figures: dict[str, Any] = {"recipe": recipe.name, "steps": steps, "stages": []}
    with tempfile.TemporaryDirectory() as place:
        tokenizer = make_tokenizer(Path(place) / "tokenizer")
        for stage in only or recipe.stages:
            for precision in precisions:
                row: dict[str, Any] = {"stage": stage, "precision": precision}
                try:
                    row |= _run(recipe, stage, precision, steps, (Path(place), tokenizer))
                except Exception as error:  # the next stage may still be measured
                    row["failed"] = f"{type(error).__name__}: {first_line(error)[:200]}"
                figures["stages"].append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                _let_go()
    return figures


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as a table for people."""
    told = [f"{figures['recipe']}, {figures['steps']} steps of each stage"]
    for row in figures["stages"]:
        head = f"{row['stage']:<9} {row['precision']:<5}"
        if "failed" in row:
            told.append(f"{head} failed: {row['failed']}")
            continue
        told.append(
            f"{head} {row['tokens_per_second']:>10,.0f} tokens/s  {row['memory_gb']:>6.1f} GB  "
            f"loss {row['first_loss']:.3f} → {row['last_loss']:.3f}  {row['arithmetic']}"
        )
    return told


def make_tokenizer(folder: Path) -> Any:
    """A small tokenizer with a chat template, learnt from the embedded field guide."""
    from modelwright.data.tokenizer import train
    from modelwright.models.text import load_tokenizer

    train(EMBEDDED["field-guide"].read_text(encoding="utf-8").splitlines(), 1024, folder)
    return load_tokenizer(folder)


def _run(recipe: Recipe, stage: str, precision: str, steps: int, beside: tuple[Path, Any]) -> dict[str, Any]:
    import torch

    from modelwright.engine.loop import Engine
    from modelwright.engine.meter import memory_in_use
    from modelwright.engine.world import World
    from modelwright.plan.facts import probe
    from modelwright.plan.stage import plan_stage

    place, tokenizer = beside
    progress = Progress(f"{stage} in {precision}")
    wish = {"max_steps": steps, "precision": precision, "sharding": "ddp", "eval_steps": None}
    settings = recipe.stages[stage].model_copy(update=wish)
    world = World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    model = _model(recipe, tokenizer, settings, world.device)
    progress.tell("the model is made")
    task = _task(stage, model, tokenizer, settings, place)
    plan = plan_stage(settings, task.rows, 1, probe())
    if hasattr(task, "planned"):
        task.planned(plan.steps)
    engine = Engine(task, settings, plan, world, recipe.seed)
    progress.tell(f"ready for the first step, {plan.arithmetic}")
    if stage == "dpo":
        from modelwright.tasks.reference import set_reference

        set_reference(task, engine, place / "reference", f"random {precision}")
        progress.tell("the reference is measured")
    reports = []
    for report in engine.steps():
        reports.append(report)
        pace = f"{report.seconds:.2f} s, {report.tokens / report.seconds:,.0f} tokens/s, loss {report.loss:.3f}"
        progress.tell(f"step {report.step} of {plan.steps}, {pace}, {memory_in_use() / 1e9:.1f} GB")
    timed = reports[WARM_UP:] or reports
    return {
        "tokens_per_second": median(report.tokens / report.seconds for report in timed),
        "seconds_a_step": median(report.seconds for report in timed),
        "first_seconds": reports[0].seconds,
        "memory_gb": memory_in_use() / 1e9,
        "first_loss": reports[0].loss,
        "last_loss": reports[-1].loss,
        "health": sorted({report.health for report in reports}),
        "arithmetic": plan.arithmetic,
    }


def _model(recipe: Recipe, tokenizer: Any, settings: Any, device: Any) -> Any:
    """The recipe's architecture with random weights, made on the device itself."""
    import torch
    from transformers import AutoModelForCausalLM

    from modelwright.models import text, trainable
    from modelwright.models.scratch import configure

    assert recipe.model.architecture is not None, "the recipe has no architecture to make a model of"
    config = configure(recipe.model.architecture, tokenizer)
    torch.manual_seed(recipe.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    text.move(model, device, recipe.model.attn_implementation)
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing:
        trainable.recompute_activations(model, settings.gradient_checkpointing)
    return model


def _task(stage: str, model: Any, tokenizer: Any, settings: Any, place: Path) -> Any:
    """The stage's own task, on data that is at hand everywhere."""
    from modelwright.data import conversations, preferences
    from modelwright.data.shards import Shards
    from modelwright.models.text import stop_tokens
    from modelwright.tasks.dpo import DpoTask
    from modelwright.tasks.pretrain import PretrainTask
    from modelwright.tasks.sft import SftTask

    if stage == "pretrain":
        folder = place / "shards"
        if not folder.exists():
            random_shards(folder, settings.max_length, model.config.vocab_size)
        return PretrainTask(model, Shards.open(folder), Shards.open(folder, "held_out"), settings)
    source = "field-guide-pairs" if stage == "dpo" else "field-guide"
    data = Data(dataset_name=source, columns=COLUMNS[source], test_size=Steps(4))
    stops = stop_tokens(model)
    if stage == "dpo":
        return DpoTask(model, tokenizer, preferences.load(data, 42, Path()), settings, stops)
    return SftTask(model, tokenizer, conversations.load(data, 42, Path()), settings, stops)


def random_shards(folder: Path, length: int, words: int) -> None:
    """Shards of random tokens in documents of many lengths: speed does not ask for sense."""
    import numpy as np

    from modelwright.data.shard_writer import Block, Documents, write_part
    from modelwright.data.shards import Layout, seal

    draw = np.random.default_rng(42)
    layout = Layout(length, words)
    lengths = draw.integers(20, 2 * length, 512)
    made = Documents(draw.integers(0, words, int(lengths.sum())).astype(np.uint32), lengths, lengths * 4)
    parts = {"train": write_part(folder, "train", layout, {"random": [Block(len(made.tokens), lambda: made)]}, "r")}
    seal(folder, layout, parts, {"tokenizer": "random"})


def _let_go() -> None:
    """Free the model and its moments before the next one is made."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
