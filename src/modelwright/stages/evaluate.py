"""Evaluate: measure the model a run begins with and the model of every stage in the same way, each once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from modelwright.data.choices import choices
from modelwright.data.shards import MANIFEST, Shards
from modelwright.data.sources import read_training
from modelwright.data.texts import documents
from modelwright.data.tokenizer import Encoder
from modelwright.errors import DataError, Problem, UsageError
from modelwright.models import text
from modelwright.models.harness import run_tasks
from modelwright.recipe.evaluation import Evaluate
from modelwright.recipe.load import load
from modelwright.recipe.schema import Data, Model
from modelwright.runs.folder import RunFolder, read_json, write_json
from modelwright.stages.context import Context
from modelwright.stages.lineage import fingerprint_of
from modelwright.tasks import measure

BASE = "base"
"""What the model that a run begins with is called in the comparison."""
STAGE = "evaluate"
Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Measuring:
    """What is measured, and where its files are."""

    wish: Evaluate
    """What to measure."""
    beside: Path
    """Where relative names may point."""
    held_out: Path | None = None
    """Packed shards whose held-out part is measured where the wish names no text."""


def metrics_of(context: Context, stage: str) -> Metrics:
    """What evaluate measures of a stage's model, beside the same of the model the run began with."""
    if context.recipe.evaluate is None:
        return {}
    base = evaluated(context, BASE)
    return {**evaluated(context, stage), **{f"base_{name}": value for name, value in base.items()}}


def evaluated(context: Context, name: str) -> Metrics:
    """The measurements of one model of the run, from the file where they stand already for this model and wish."""
    wish = context.recipe.evaluate
    assert wish is not None
    folder, fingerprint = model_of(context, name)
    measuring = Measuring(wish, context.beside, held_out_shards(context.folder))
    key = xxhash.xxh3_128_hexdigest(json.dumps([fingerprint, wish.model_dump(mode="json")], sort_keys=True).encode())
    path = context.folder.evaluation(name)
    if not path.exists() or read_json(path)["key"] != key:
        context.journal.add("evaluating", model=name)
        found = measure_model(folder, measuring)
        write_json(path, {"key": key, "model": str(folder), **found})
        context.journal.add("evaluated", model=name, **found)
    metrics: Metrics = read_json(path)["metrics"]
    return metrics


def run(context: Context) -> None:
    """The stage: every model of the run side by side, as JSON and in the journal."""

    def side_by_side() -> None:
        names = [BASE, *context.recipe.stages]
        table = {name: evaluated(context, name) for name in names}
        write_json(context.folder.evaluation("comparison"), table)
        context.journal.add("comparison", stage=STAGE, models=table)

    context.world.first(side_by_side)


def measure_model(folder: Path, measuring: Measuring) -> dict[str, Any]:
    """Everything the wish asks, of one model folder: metrics and samples."""
    wish, beside = measuring.wish, measuring.beside
    model, tokenizer = text.load_model(folder), text.load_tokenizer(folder)
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    metrics: Metrics = {}
    if wish.text is not None:
        data = Data(dataset_name=wish.text, text_column=wish.text_column, max_rows=wish.max_rows)
        texts = list(documents(read_training(data, beside), data.text_column))
        if not texts:
            raise DataError([Problem(wish.text, "there is no text in it")])
        metrics |= measure.loss_of_texts(model, Encoder.open(folder), texts, wish.max_length)
    elif measuring.held_out is not None:
        shards = Shards.open(measuring.held_out, "held_out")
        metrics |= measure.loss_of_shards(model, shards, wish.max_length, wish.max_rows)
    if wish.multiple_choice is not None:
        rows = read_training(Data(dataset_name=wish.multiple_choice, max_rows=wish.max_rows), beside)
        metrics |= measure.accuracy_of_choices(model, tokenizer, choices(rows), wish.max_length)
    samples = [{"prompt": prompt, "text": _go_on(model, tokenizer, prompt, wish)} for prompt in wish.prompts]
    if wish.tasks:
        metrics |= run_tasks(model, tokenizer, wish.tasks, wish.max_rows, beside)
    return {"metrics": metrics, "samples": samples}


def model_of(context: Context, name: str) -> tuple[Path, str]:
    """The folder and the fingerprint of a stage's model, or of the one that the run began with."""
    folder = context.folder
    if name == BASE and not context.recipe.model.architecture:
        found = text.find(context.recipe.model, context.beside)
        return found.path, found.fingerprint()
    stage = "init" if name == BASE else name
    return folder.model(stage), fingerprint_of(read_json(folder.result(stage))["files"])


def held_out_shards(folder: RunFolder) -> Path | None:
    """Where pretrain's shards are, if something of them is held out."""
    for place in (folder.packed, folder.data("pretrain") / "packed"):
        if (place / MANIFEST).exists() and Shards.open(place, "held_out").tokens:
            return place
    return None


@torch.inference_mode()
def _go_on(model: Any, tokenizer: Any, prompt: str, wish: Evaluate) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    inputs.pop("token_type_ids", None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    made = model.generate(**inputs, max_new_tokens=wish.max_new_tokens, do_sample=False, pad_token_id=pad)
    return str(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def evaluate_folder(name: str, wish: Evaluate) -> dict[str, Any]:
    """Measure a model outside any run, by folder, hub id or embedded name."""
    if not wish.asks:
        raise UsageError(f"nothing is to be measured of {name}; add --text, --multiple-choice, --prompt or --task")
    try:
        return measure_model(text.find(Model(model_name_or_path=name), Path()).path, Measuring(wish, Path()))
    except DataError as error:
        raise DataError(error.problems[:5]) from None


def evaluate_run(run: RunFolder, wish: Evaluate) -> dict[str, Any]:
    """Measure every finished model of a run by this wish, or by the recipe's own where this one asks nothing."""
    loaded = load(run.recipe, environ={})
    asked = wish if wish.asks else loaded.recipe.evaluate or wish
    measuring = Measuring(asked, run.path, held_out_shards(run))
    if not (asked.asks or measuring.held_out):
        raise UsageError(f"{run.path} says nothing to measure by; add --text, --multiple-choice, --prompt or --task")
    folders = {BASE: run.model("init") if loaded.recipe.model.architecture else None}
    folders |= {stage: run.model(stage) for stage in loaded.recipe.stages if run.result(stage).exists()}
    base = folders[BASE] or text.find(loaded.recipe.model, run.path).path
    return {name: measure_model(folder or base, measuring) for name, folder in folders.items()}
