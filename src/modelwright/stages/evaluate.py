"""Evaluate the base model and the model of every stage in the same way: perplexity, multiple choice, lm-eval tasks, samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from modelwright.data.multiple_choice import parse_questions
from modelwright.data.shards import MANIFEST, PackedDataset, iter_documents
from modelwright.data.sources import read_train_rows
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.errors import DataError, Problem, UsageError
from modelwright.models import pretrained
from modelwright.recipe.load import load
from modelwright.recipe.schema import DataConfig, ModelConfig
from modelwright.recipe.sections import EvaluateConfig
from modelwright.runs.folder import RunFolder, read_json, write_json
from modelwright.stages.context import RunContext
from modelwright.stages.gate import fingerprint_files
from modelwright.tasks import scoring
from modelwright.tasks.scoring import run_lm_eval

BASE = "base"
"""What the model that a run begins with is called in the comparison."""
STAGE = "evaluate"
Metrics = dict[str, float | None]


@dataclass(frozen=True)
class EvaluationJob:
    """What is measured, and where its files are."""

    config: EvaluateConfig
    """What to measure."""
    recipe_dir: Path
    """Where relative names may point."""
    held_out: Path | None = None
    """Packed shards whose held-out part is measured where the wish names no text."""


def evaluation_metrics(context: RunContext, stage: str) -> Metrics:
    """What evaluate measures of a stage's model, beside the same of the model the run began with."""
    if context.recipe.evaluate is None:
        return {}
    base = evaluate_cached(context, BASE)
    return {**evaluate_cached(context, stage), **{f"base_{name}": value for name, value in base.items()}}


def evaluate_cached(context: RunContext, name: str) -> Metrics:
    """The measurements of one model of the run, from the file where they stand already for this model and wish."""
    config = context.recipe.evaluate
    assert config is not None
    folder, fingerprint = resolve_stage_model(context, name)
    job = EvaluationJob(config, context.recipe_dir, find_held_out_shards(context.folder))
    key = xxhash.xxh3_128_hexdigest(json.dumps([fingerprint, config.model_dump(mode="json")], sort_keys=True).encode())
    path = context.folder.evaluation(name)
    if not path.exists() or read_json(path)["key"] != key:
        context.journal.add("evaluate_started", model=name)
        result = evaluate_model(folder, job)
        write_json(path, {"key": key, "model": str(folder), **result})
        context.journal.add("evaluate_result", model=name, **result)
    metrics: Metrics = read_json(path)["metrics"]
    return metrics


def run(context: RunContext) -> None:
    """The stage: every model of the run side by side, as JSON and in the journal."""

    def write_table() -> None:
        names = [BASE, *context.recipe.stages]
        table = {name: evaluate_cached(context, name) for name in names}
        write_json(context.folder.evaluation("comparison"), table)
        context.journal.add("evaluate_table", stage=STAGE, models=table)

    context.world.on_rank0_broadcast(write_table)


def evaluate_model(folder: Path, job: EvaluationJob) -> dict[str, Any]:
    """Everything the wish asks, of one model folder: metrics and samples."""
    config, recipe_dir = job.config, job.recipe_dir
    model, tokenizer = pretrained.load_model(folder), pretrained.load_tokenizer(folder)
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    metrics: Metrics = {}
    if config.perplexity_text is not None:
        data = DataConfig(dataset_name=config.perplexity_text, text_column=config.text_column, max_rows=config.max_rows)
        texts = list(iter_documents(read_train_rows(data, recipe_dir), data.text_column))
        if not texts:
            raise DataError([Problem(config.perplexity_text, "there is no text in it")])
        metrics |= scoring.score_texts(model, DocumentTokenizer.open(folder), texts, config.max_length)
    elif job.held_out is not None:
        shards = PackedDataset.open(job.held_out, "held_out")
        metrics |= scoring.score_shards(model, shards, config.max_length, config.max_rows)
    if config.multiple_choice is not None:
        rows = read_train_rows(DataConfig(dataset_name=config.multiple_choice, max_rows=config.max_rows), recipe_dir)
        metrics |= scoring.score_choices(model, tokenizer, parse_questions(rows), config.max_length)
    samples = [
        {"prompt": prompt, "text": _complete(model, tokenizer, prompt, config)} for prompt in config.completion_prompts
    ]
    if config.tasks:
        metrics |= run_lm_eval(model, tokenizer, config.tasks, config.max_rows, recipe_dir)
    return {"metrics": metrics, "samples": samples}


def resolve_stage_model(context: RunContext, name: str) -> tuple[Path, str]:
    """The folder and the fingerprint of a stage's model, or of the one that the run began with."""
    folder = context.folder
    if name == BASE and not context.recipe.model.architecture:
        resolved = pretrained.resolve_model(context.recipe.model, context.recipe_dir)
        return resolved.path, resolved.fingerprint()
    stage = "init" if name == BASE else name
    return folder.model(stage), fingerprint_files(read_json(folder.result(stage))["files"])


def find_held_out_shards(folder: RunFolder) -> Path | None:
    """Where pretrain's shards are, if something of them is held out."""
    for shards_dir in (folder.packed, folder.data("pretrain") / "packed"):
        if (shards_dir / MANIFEST).exists() and PackedDataset.open(shards_dir, "held_out").tokens:
            return shards_dir
    return None


@torch.inference_mode()
def _complete(model: Any, tokenizer: Any, prompt: str, config: EvaluateConfig) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    inputs.pop("token_type_ids", None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output_ids = model.generate(**inputs, max_new_tokens=config.max_new_tokens, do_sample=False, pad_token_id=pad)
    return str(tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def evaluate_folder(name: str, config: EvaluateConfig) -> dict[str, Any]:
    """Measure a model outside any run, by folder, hub id or embedded name."""
    if not config.is_configured:
        raise UsageError(f"nothing is to be measured of {name}; add --text, --multiple-choice, --prompt or --task")
    try:
        return evaluate_model(
            pretrained.resolve_model(ModelConfig(model_name_or_path=name), Path()).path, EvaluationJob(config, Path())
        )
    except DataError as error:
        raise DataError(error.problems[:5]) from None


def evaluate_run(run: RunFolder, config: EvaluateConfig) -> dict[str, Any]:
    """Measure every finished model of a run by this wish, or by the recipe's own where this one asks nothing."""
    loaded = load(run.recipe, environ={})
    job_config = config if config.is_configured else loaded.recipe.evaluate or config
    job = EvaluationJob(job_config, run.path, find_held_out_shards(run))
    if not (job_config.is_configured or job.held_out):
        raise UsageError(f"{run.path} says nothing to measure by; add --text, --multiple-choice, --prompt or --task")
    folders = {BASE: run.model("init") if loaded.recipe.model.architecture else None}
    folders |= {stage: run.model(stage) for stage in loaded.recipe.stages if run.result(stage).exists()}
    base = folders[BASE] or pretrained.resolve_model(loaded.recipe.model, run.path).path
    return {name: evaluate_model(folder or base, job) for name, folder in folders.items()}
