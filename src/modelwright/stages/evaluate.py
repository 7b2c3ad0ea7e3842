"""Evaluate the base model and every stage's model alike: perplexity, choices, judged answers, lm-eval, samples."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash

from modelwright.data import chat, preferences
from modelwright.data.multiple_choice import MultipleChoiceQuestion, parse_questions
from modelwright.data.shards import MANIFEST, PackedDataset, rows_to_documents
from modelwright.data.sources import iter_train_rows, read_train_rows
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.engine.checkpoint import part_paths, stored_tensors, verify
from modelwright.engine.precision import PARAM_REMAINDER, join_fp32_master
from modelwright.engine.trainer import EMA_FILE, MODEL_FILE, OPTIMIZER_FILE, explain_mismatch
from modelwright.errors import DataError, Diverged, Problem, UsageError
from modelwright.models import pretrained, trainable
from modelwright.models.save import save_model
from modelwright.recipe.load import load
from modelwright.recipe.schema import ModelConfig, Recipe
from modelwright.recipe.sections import DataConfig, EvaluateConfig
from modelwright.recipe.stage_specs import STAGES, TrainableConfig, first_stage
from modelwright.runs.folder import RunFolder, read_json, write_json
from modelwright.serve.generate import TextGenerator
from modelwright.stages.compare import base_model_dir
from modelwright.stages.context import Metrics, RunContext
from modelwright.stages.gate import model_fingerprint
from modelwright.tasks import scoring, verifiers
from modelwright.tasks.scoring import run_lm_eval
from modelwright.tasks.verifiers import AnswerPrompt, JudgedAnswers

ANSWER_BATCH = 64
"""Prompts that are answered as one batch."""
SHOWN = 3
"""Judged answers in the journal; all are in the file of the evaluation."""
BASE = "base"
"""Name of the start model in the results."""
STAGE = "evaluate"


@dataclass(frozen=True)
class EvaluationJob:
    """What is evaluated, and on which files."""

    config: EvaluateConfig
    """The evaluate section."""
    recipe_dir: Path
    """The folder for relative paths."""
    held_out: Path | None = None
    """Packed shards whose held-out split is scored where perplexity_text is not set."""
    prompts: Sequence[AnswerPrompt] = ()
    """Prompts of evaluate.answers."""
    seed: int = 0
    """Seed of sampled answers."""
    precision: str = "auto"
    """Precision of the training, which answers are generated in on a GPU."""


def evaluation_metrics(context: RunContext, stage: str) -> Metrics:
    """The evaluate metrics of a stage's model, and those of the start model with the prefix base_."""
    if context.recipe.evaluate is None:
        return {}
    base = evaluate_cached(context, BASE)
    return {**evaluate_cached(context, stage), **{f"base_{name}": value for name, value in base.items()}}


def evaluation_job(context: RunContext) -> EvaluationJob:
    """What the recipe of a run wants to be evaluated."""
    assert context.recipe.evaluate is not None
    prompts = load_prompts(context.recipe, context.recipe_dir)
    shards = find_held_out_shards(context.folder)
    seed, precision = context.recipe.seed, context.recipe.answers_precision
    return EvaluationJob(context.recipe.evaluate, context.recipe_dir, shards, prompts, seed, precision)


def evaluate_cached(context: RunContext, name: str) -> Metrics:
    """The metrics of one model of the run, cached for the same model and settings."""
    config = context.recipe.evaluate
    assert config is not None
    folder, fingerprint = resolve_stage_model(context, name)
    job = evaluation_job(context)
    measured: list[Any] = [fingerprint, config.model_dump(mode="json")]
    if config.answers:
        sources = verifiers.verifier_sources(config.answers, context.recipe_dir)
        measured += [sources, context.recipe.seed, [[row.messages, row.reference] for row in job.prompts]]
    key = xxhash.xxh3_128_hexdigest(json.dumps(measured, sort_keys=True).encode())
    path = context.folder.evaluation(name)
    if not path.exists() or read_json(path)["key"] != key:
        context.journal.add("evaluate_started", model=name)
        result = evaluate_model(folder, job)
        write_json(path, {"key": key, "model": str(folder), **result})
        context.journal.add("evaluate_result", model=name, **{**result, "answers": failures_first(result)[:SHOWN]})
    metrics: Metrics = read_json(path)["metrics"]
    return metrics


def run(context: RunContext) -> None:
    """The stage evaluate: all models of the run in one table, as JSON and in the journal."""

    def write_table() -> None:
        names = [BASE, *context.recipe.stages]
        table = {name: evaluate_cached(context, name) for name in names}
        write_json(context.folder.evaluation("comparison"), table)
        context.journal.add("evaluate_table", stage=STAGE, models=table)

    context.world.on_rank0_broadcast(write_table)


def evaluate_model(folder: Path, job: EvaluationJob) -> dict[str, Any]:
    """Metrics and samples of one model folder."""
    config, recipe_dir = job.config, job.recipe_dir
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = pretrained.load_model(folder, device=device), pretrained.load_tokenizer(folder)
    generates = model if pretrained.inference_dtype(device, job.precision) is torch.float32 else None
    judged = judge_model(folder, job, model=generates) if config.answers else None
    pretrained.prepare_model(model.eval(), device, model.config._attn_implementation, packed=False)
    metrics: Metrics = {}
    if config.perplexity_text is not None:
        data = DataConfig(dataset_name=config.perplexity_text, text_column=config.text_column, max_rows=config.max_rows)
        texts = [document.text for document in rows_to_documents(read_train_rows(data, recipe_dir), data)]
        if not texts:
            raise DataError([Problem(config.perplexity_text, "there is no text in it")])
        metrics |= scoring.score_texts(model, DocumentTokenizer.open(folder), texts, config.max_length)
    elif job.held_out is not None:
        shards = PackedDataset.open(job.held_out, "held_out")
        metrics |= scoring.score_shards(model, shards, config.max_length, config.max_rows)
    if config.multiple_choice is not None:
        metrics |= scoring.score_choices(model, tokenizer, read_questions(config, recipe_dir), config.max_length)
    samples = [
        {"prompt": prompt, "text": _complete(model, tokenizer, prompt, config)} for prompt in config.completion_prompts
    ]
    if config.tasks:
        metrics |= run_lm_eval(model, tokenizer, config.tasks, config.max_rows, recipe_dir)
    if judged is None:
        return {"metrics": metrics, "samples": samples}
    return {"metrics": {**metrics, **judged.metrics}, "samples": samples, **judged.as_json()}


def judge_model(
    folder: Path, job: EvaluationJob, stop_requested: Callable[[], bool] = lambda: False, model: Any = None
) -> JudgedAnswers:
    """Answer the prompts of evaluate.answers with the model of a folder, and judge its answers."""
    config = job.config.answers
    assert config is not None
    sampling = config.max_new_tokens, config.temperature, job.seed
    generator = TextGenerator(folder, *sampling, precision=job.precision, model=model)
    conversations = [[dict(message) for message in row.messages] for row in job.prompts]
    batches = [conversations[start : start + ANSWER_BATCH] for start in range(0, len(conversations), ANSWER_BATCH)]
    answers = [text for batch in batches for text in generator.generate(batch, stop_requested)]
    return verifiers.judge_answers(config, job.prompts, answers, job.recipe_dir)


def failures_first(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The judged answers of an evaluation, the worst first."""
    return sorted(result.get("answers", []), key=lambda row: row["scores"]["score"])


def load_prompts(recipe: Recipe, recipe_dir: Path) -> list[AnswerPrompt]:
    """The prompts of evaluate.answers with their reference answers: those of its data set, or the held-out rows."""
    config = recipe.evaluate.answers if recipe.evaluate else None
    if config is None:
        return []
    stage = recipe.answers_stage
    assert stage is not None
    data = recipe.data_for(stage)
    is_pairs = recipe.stages[stage].spec.row_format == "pairs"
    items: Sequence[Any]
    if config.dataset_name:
        settings = {name: getattr(data, name) for name in ("columns", "derived_columns", "system_prompt")}
        data = DataConfig(dataset_name=config.dataset_name, **settings)
        parse = preferences.rows_to_pairs if is_pairs else chat.rows_to_conversations
        items = parse(iter_train_rows(data, recipe_dir), data)
    else:
        load_rows = preferences.load_preferences if is_pairs else chat.load_conversations
        items = load_rows(data, recipe.seed, recipe_dir).held_out
    items = [item for item in items if len(item.messages) > 1 and item.messages[-1]["role"] == "assistant"]
    if not items:
        raise DataError([Problem(data.source, "evaluate.answers finds no prompt with an answer in its held-out rows")])
    chosen = random.Random(recipe.seed).sample(range(len(items)), min(config.max_prompts, len(items)))
    prompts = []
    for item in (items[index] for index in sorted(chosen)):
        *messages, answer = item.messages
        reference = json.dumps(answer["tool_calls"]) if answer.get("tool_calls") else answer["content"]
        prompts.append(AnswerPrompt(item.where, tuple(messages), reference))
    verifiers.check_references(config, prompts)
    return prompts


def read_questions(config: EvaluateConfig, recipe_dir: Path) -> list[MultipleChoiceQuestion]:
    """The questions of evaluate.multiple_choice."""
    rows = read_train_rows(DataConfig(dataset_name=config.multiple_choice, max_rows=config.max_rows), recipe_dir)
    return parse_questions(rows, config.question_template)


def resolve_stage_model(context: RunContext, name: str) -> tuple[Path, str]:
    """The folder and the fingerprint of a stage's model, or of the start model."""
    folder = context.folder
    if name == BASE and not context.recipe.model.architecture:
        resolved = pretrained.resolve_model(context.recipe.model, context.recipe_dir)
        return resolved.path, resolved.fingerprint()
    stage = "init" if name == BASE else name
    return folder.model(stage), model_fingerprint(folder, stage)


def find_held_out_shards(folder: RunFolder) -> Path | None:
    """The folder of the shards that a stage trained on, if it has held-out rows."""
    for shards_dir in (folder.packed, folder.data(first_stage("text")) / "packed"):
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
    """Evaluate a model outside any run, by folder, hub id or embedded name."""
    if not config.is_configured:
        raise UsageError(f"nothing is to be measured of {name}; add --text, --multiple-choice, --prompt or --task")
    try:
        folder = pretrained.resolve_model(ModelConfig(model_name_or_path=name), Path()).path
        return evaluate_model(folder, EvaluationJob(config, Path()))
    except DataError as error:
        raise DataError(error.problems[:5]) from None


def checkpoint_model(run: RunFolder, checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint as a folder: the model its stage started from, with the weights of that step."""
    if reason := verify(checkpoint):
        raise UsageError(f"{checkpoint} is not a valid checkpoint: {reason}")
    recipe, stage = load(run.recipe, environ={}).recipe, checkpoint.parent.parent.name
    settings: Any = recipe.stages.get(stage)
    if not isinstance(settings, TrainableConfig) or settings.quantization != "none":
        raise UsageError(f"{checkpoint}: eval reads checkpoints of text stages without quantization")
    parent = recipe.parent_stage(stage)
    start = run.model(parent) if parent else base_model_dir(run, recipe)
    model, tokenizer = pretrained.load_model(start), pretrained.load_tokenizer(start, recipe.model)
    model = trainable.merge_lora(model)  # of the parent stage
    pretrained.resize_embeddings(model, tokenizer)
    if settings.trainable.lora and settings.trainable.untie_lm_head:
        trainable.untie_head(model)
    model = trainable.set_trainable(model, settings)
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with explain_mismatch(checkpoint):
        for name, tensor in read_weights(checkpoint).items():
            targets[name].data.copy_(tensor)
    model = trainable.merge_lora(model)
    save_model(model, tokenizer, dict(model.state_dict()), folder)


def read_weights(checkpoint: Path) -> dict[str, Any]:
    """The fp32 weights of a checkpoint by their names in the model; the averaged ones where it has an EMA."""
    weights: dict[str, Any] = {}
    name = EMA_FILE if part_paths(checkpoint, EMA_FILE) else MODEL_FILE
    remainders = stored_tensors(checkpoint, OPTIMIZER_FILE) if name == MODEL_FILE else {}
    for key, read in stored_tensors(checkpoint, name).items():
        value, remainder = read(), f"{key}.{PARAM_REMAINDER}"
        if remainder in remainders:
            value = join_fp32_master(value, remainders[remainder]())
        weights[key.removeprefix("model.")] = value  # the loss module holds the model under this name
    return weights


def evaluate_run(
    run: RunFolder, config: EvaluateConfig, trusted_files: Collection[str] = (), only: Path | None = None
) -> dict[str, Any]:
    """Evaluate every finished model of a run, or only one of its models or checkpoints, by this config or, if it is
    empty, the recipe's."""
    loaded = load(run.recipe, environ={})
    job_config = config if config.is_configured else loaded.recipe.evaluate or config
    if job_config.answers:
        verifiers.require_trusted(job_config.answers, run.path, trusted_files)
    prompts = load_prompts(loaded.recipe, run.path) if job_config.answers else []
    seed, precision = loaded.recipe.seed, loaded.recipe.answers_precision
    job = EvaluationJob(job_config, run.path, find_held_out_shards(run), prompts, seed, precision)
    if not (job_config.is_configured or job.held_out):
        raise UsageError(f"{run.path} says nothing to measure by; add --text, --multiple-choice, --prompt or --task")
    if only is not None and only.name == "model":
        return {only.parent.name: evaluate_model(only, job)}
    if only is not None:
        with TemporaryDirectory(prefix="checkpoint-") as temporary:
            checkpoint_model(run, only, folder := Path(temporary) / "model")
            return {f"{only.parent.parent.name} {only.name}": evaluate_model(folder, job)}
    folders = {BASE: base_model_dir(run, loaded.recipe)}
    folders |= {stage: run.model(stage) for stage in loaded.recipe.stages if run.result(stage).exists()}
    return {name: evaluate_model(folder, job) for name, folder in folders.items()}


def diverged(what: str) -> Diverged:
    """The error of a stage that diverged, with what is kept and what to try."""
    return Diverged(f"{what}; the last good checkpoint is kept. A lower learning_rate is the first thing to try")


class EvalHistory:
    """Every evaluation of a stage with its step; step 0 is before training."""

    def __init__(self, stage: str, metric: str) -> None:
        """`metric` decides which step is the best."""
        self._stage, self._metric = stage, metric
        self._sign = -1.0 if STAGES[stage].best_metrics.get(metric, "max") == "max" else 1.0
        self.records: list[dict[str, Any]] = []

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Record an evaluation; a non-finite value is divergence."""
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            raise diverged(f"{self._stage} diverged by step {step}: {bad[0]} is not finite")
        self.records.append({"step": step, **values})
        return self.records[-1]

    def evaluated_at(self, step: int) -> bool:
        """Whether the last evaluation is of this step."""
        return bool(self.records) and self.last_step() == step

    def last_step(self) -> int:
        """The step of the last evaluation; 0 also where there is none."""
        return int(self.records[-1]["step"]) if self.records else 0

    def best_step(self) -> int | None:
        """The step with the best metric after step 0."""
        reached = [item for item in self.records if item["step"] > 0]
        return int(min(reached, key=lambda item: self._sign * item[self._metric])["step"]) if reached else None

    def evaluations_without_improvement(self, threshold: float) -> int:
        """The last evaluations in a row that were not better than the best before them by more than a threshold."""
        best, count = math.inf, 0
        for value in (self._sign * item[self._metric] for item in self.records if item["step"] > 0):
            count = 0 if value < best - threshold else count + 1
            best = min(best, value)
        return count

    def drop_step(self, step: int) -> None:
        """Forget a step whose checkpoint is damaged."""
        self.records = [item for item in self.records if item["step"] != step]

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics of a step, and those before training with the prefix base_."""
        by_step = {item["step"]: item for item in self.records}
        return {
            f"{prefix}{name}": value
            for prefix, item in (("", by_step.get(step, {})), ("base_", by_step.get(0, {})))
            for name, value in item.items()
            if name != "step"
        }
