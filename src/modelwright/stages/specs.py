"""Builders of the training stages, in `BUILDERS`: load model and data, build the task, render samples."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from modelwright.data.images import read_images
from modelwright.data.readers import EXAMPLES_SHOWN, QUARANTINE_FILE, Quarantine, write_quarantine
from modelwright.data.row_formats import ROW_FORMATS, RenderedSample, render_shards, truncation_advice
from modelwright.data.shards import MANIFEST, SPLITS, PackedDataset, ShardLayout, pack_raw_text
from modelwright.data.sources import local_path
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.engine.task import MicroBatch, Task
from modelwright.errors import DataError, ModelError, Problem, UsageError
from modelwright.models import activation_checkpoint, attention, pretrained, trainable
from modelwright.models.save import save_model
from modelwright.models.trainable import count_parameters
from modelwright.models.vision import load_vision, resnet18, save_vision
from modelwright.plan.model_shape import model_folders
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.recipe.schema import ModelConfig
from modelwright.recipe.sections import round_up
from modelwright.recipe.stage_specs import ClassifyConfig, PairConfig, PretrainConfig, SftConfig
from modelwright.runs.folder import RunFolder, has_valid_checksum, read_json, write_json, write_json_with_checksum
from modelwright.stages.compare import answers_before, compare_answers
from modelwright.stages.context import Metrics, ParentModel, RunContext, StageBuilder, StageInputs, StageParts
from modelwright.stages.gate import hash_folder
from modelwright.stages.prepare import resolve_tokenizer_dir
from modelwright.tasks.classify import ClassifyLoss, ClassifyTask, PixelStats, confusion_matrix, worst_mistakes
from modelwright.tasks.dpo import DpoTask, PairTask, precompute_ref_log_probs
from modelwright.tasks.orpo import OrpoTask
from modelwright.tasks.pretrain import PretrainTask
from modelwright.tasks.sft import SftTask, find_compute_reuse

TextStage = PretrainConfig | SftConfig | PairConfig
RowsTask = TypeVar("RowsTask", bound=SftTask | PairTask)


def load_rows(context: RunContext, stage: str, parent: ParentModel | None) -> StageInputs:
    """The start model and the rows."""
    row_format = ROW_FORMATS[context.recipe.stages[stage].spec.row_format]
    data = row_format.load(context.recipe.data_for(stage), context.recipe.seed, context.recipe_dir)
    report_quarantine(context, stage, data.quarantine)
    return StageInputs(**resolve_start_model(context, parent), data=data, data_fingerprint=data.fingerprint)


def build_sft(context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
    """Load the model, set its trainable parameters, tokenize the conversations."""
    settings = cast(SftConfig, context.recipe.stages[stage])
    task, parts = build_row_task(context, inputs, stage, SftTask)
    if opening := sum(item.messages[0]["role"] == "assistant" for item in inputs.data.train if item.messages):
        context.note(stage, f"{opening} rows open with a turn of the assistant, which has no prompt and is not trained")
    reuse = find_compute_reuse(task, parts.model, settings)
    return replace(
        parts,
        data_manifest={**parts.data_manifest, "packed_rows": task.rows if settings.packing else None},
        flops_per_token=lambda plan: reuse.flops_per_token(parts.parameter_counts, plan.micro_batch_size),
        optimization_notes=reuse.describe,
        precompute=lambda engine, folder: reuse.precompute(engine, folder, inputs.model_fingerprint),
    )


def report_quarantine(context: RunContext, stage: str, quarantine: Quarantine) -> None:
    """Log how rows were read and which are left out; write those that cannot be used to quarantine.jsonl."""
    path = context.folder.data(stage) / QUARANTINE_FILE
    if invalid_rows := quarantine.invalid_rows:
        context.world.on_rank0_broadcast(lambda: write_quarantine(path, invalid_rows))
    for line in quarantine.lines(str(path)):
        context.note(stage, line)


def resolve_start_model(context: RunContext, parent: ParentModel | None) -> dict[str, Any]:
    """The model that a stage starts from: the parent's, or the recipe's, which rank 0 downloads first."""
    model_config = _pin_revision(context)
    if parent is not None:
        base = pretrained.ResolvedModel(f"the {parent.stage} model of this run", parent.path, model_config.revision)
        fingerprint = parent.fingerprint
    else:
        context.world.on_rank0_broadcast(lambda: str(pretrained.resolve_model(model_config, context.recipe_dir).path))
        base = pretrained.resolve_model(model_config, context.recipe_dir)
        fingerprint = base.fingerprint()
    revision = base.revision or model_config.revision
    fingerprint += pretrained.chat_template_fingerprint(context.recipe.model)
    return {"model": base, "model_name": base.name, "revision": revision, "model_fingerprint": fingerprint}


def load_trainable_model(context: RunContext, inputs: StageInputs, stage: str) -> tuple[Any, Any, bool]:
    """The model with its trainable parameters set, its tokenizer, and whether it has LoRA or was merged or resized."""
    settings = cast(TextStage, context.recipe.stages[stage])
    with context.span("load tokenizer", stage):
        tokenizer = pretrained.load_tokenizer(inputs.model.path, context.recipe.model)
    is_adapter = (inputs.model.path / "adapter_config.json").exists()
    if is_adapter and settings.quantization != "none":
        raise ModelError(
            f"quantization: {settings.quantization} wants a whole model to start from, and {inputs.model_name} is an "
            "adapter; merge it first, or use quantization: none"
        )
    attn_implementation, device = context.recipe.model.attn_implementation, context.world.device
    load_model = inputs.load_model or pretrained.load_model
    packed = getattr(settings, "packing", isinstance(settings, PretrainConfig))
    packed = packed or (isinstance(settings, SftConfig) and settings.padding_free is True)
    with context.span("load model", stage):
        model = load_model(inputs.model.path, attn_implementation, settings.quantization, device)
        model = trainable.merge_lora(model)  # of a parent stage
        pretrained.prepare_model(model, device, attn_implementation, packed)
    if attn_implementation == "auto" and model.config._attn_implementation == "eager":
        context.journal.add("note", message="this family has no SDPA: attention runs eager (attn_implementation)")
    _check_rope(context, model, settings.max_length)
    torch.manual_seed(context.recipe.seed)  # new weights, such as LoRA's, are the same at every start
    if num_added := pretrained.resize_embeddings(model, tokenizer):
        note = f"the tokenizer has {num_added} tokens more than the model: embeddings resized to {len(tokenizer)}"
        context.journal.add("note", message=note)
    is_modified = is_adapter or num_added > 0 or settings.trainable.untie_lm_head
    if settings.trainable.lora and is_modified and inputs.load_model is None:
        if settings.quantization != "none":
            wants = "wants a tokenizer no larger than the model, and no untie_lm_head"
            raise ModelError(f"quantization: {settings.quantization} {wants}")
        if settings.trainable.untie_lm_head:
            trainable.untie_head(model)
        _save_lora_base(context, inputs, stage, model, tokenizer)
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing and settings.gradient_checkpointing != "auto":
        activation_checkpoint.enable_activation_checkpointing(model, settings.gradient_checkpointing)
    return model, tokenizer, is_modified or settings.trainable.lora


def _check_rope(context: RunContext, model: Any, max_length: int) -> None:
    """Note or refuse rows so long that they change the positions of the other rows of their micro-batch."""
    limit = attention.rope_limit(model)
    if limit is None or max_length <= limit.max_length:
        return
    if limit.rope_type == "dynamic":  # it keeps the longest row so far, which no checkpoint has
        raise ModelError(
            f"model: its dynamic RoPE makes rows depend on longer ones before them; it wants max_length of at most "
            f"{limit.max_length}, and it is {max_length}"
        )
    note = f"longrope: a row of more than {limit.max_length} tokens gives all rows of its micro-batch the long factors"
    context.journal.add("note", message=note)


def _save_lora_base(context: RunContext, inputs: StageInputs, stage: str, model: Any, tokenizer: Any) -> None:
    """Write the weights that LoRA is added to, for the adapter to name; a valid folder of an earlier start is kept."""
    folder = context.folder.lora_base(stage)
    manifest = folder.with_suffix(".json")
    key = f"{inputs.model_fingerprint}:{len(tokenizer)}:{model.config.tie_word_embeddings}:{context.recipe.seed}"

    def write() -> None:
        saved = read_json(manifest) if has_valid_checksum(manifest) else {}
        if saved.get("key") != key or saved["files"] != hash_folder(folder):
            save_model(model, tokenizer, dict(model.state_dict()), folder)
            write_json_with_checksum(manifest, {"key": key, "files": hash_folder(folder)})

    context.world.on_rank0_broadcast(write)
    model.name_or_path = str(folder.resolve())  # peft writes it into the adapter's config


def _list_examples(splits: Iterable[dict[str, Any]], key: str) -> str:
    """The first rows of a kind in all splits, for a note."""
    examples = [example for split in splits for example in split.get(key, ())]
    return f": {', '.join(examples[:EXAMPLES_SHOWN])}" if examples else ""


def build_row_task(
    context: RunContext, inputs: StageInputs, stage: str, task_class: Callable[..., RowsTask]
) -> tuple[RowsTask, StageParts]:
    """The task of rows tokenized with the model's own tokenizer, and its stage parts."""
    settings = cast(TextStage, context.recipe.stages[stage])
    model, tokenizer, is_modified = load_trainable_model(context, inputs, stage)
    with context.span("tokenize", stage):
        task = task_class(model, tokenizer, inputs.data, settings, pretrained.eos_token_ids(model))
    stats = {"train": task.train_set.stats(), "held_out": task.held_out_set.stats()}
    for split in stats.values() if settings.spec.loss_on_prompt else ():
        split["trained_tokens"] = split["tokens"]
    data_manifest = {**inputs.data.manifest(context.recipe.data_for(stage)), **stats}
    counts = ("truncated_rows", "truncated_tokens", "dropped_rows")
    truncated, tokens, dropped = (sum(split.get(name, 0) for split in stats.values()) for name in counts)
    if truncated or dropped:
        cut, lost = (_list_examples(stats.values(), f"{kind}_examples") for kind in ("truncated", "dropped"))
        rows = sum(split["rows"] + split.get("dropped_rows", 0) for split in stats.values())
        note = f"{truncated} of {rows} rows are cut to max_length {settings.max_length}, {tokens} tokens in all{cut}"
        advice = truncation_advice(rows, truncated, tokens, max(split["longest_row"] for split in stats.values()))
        context.note(stage, f"{note}; {dropped or 'none'} dropped{lost}{f'; max_length {advice}' if advice else ''}")
    parts = stage_parts(task, model, tokenizer, data_manifest)
    return task, replace(parts, check_batch=_check_batch(task) if is_modified else None)


def _check_batch(task: Task) -> MicroBatch:
    """Two held-out rows, or training rows where there are none; of pairs without the reference, for log-probs."""
    rows = range(min(2, task.held_out_rows or task.rows))
    if isinstance(task, PairTask):
        return task.collate("held_out" if task.held_out_rows else "train", rows)
    return task.held_out_batch(rows) if task.held_out_rows else task.time_trial_batch(rows)


def stage_parts(task: Task, model: Any, tokenizer: Any, data_manifest: dict[str, Any]) -> StageParts:
    """The parts of a text stage."""
    counts = trainable.count_parameters(model)
    return StageParts(
        task=task,
        model=model,
        parameter_counts=counts,
        flops_per_token=lambda plan: 4.0 * counts.total + 2.0 * counts.trained,  # attention and padding not counted
        data_manifest=data_manifest,
        save=lambda weights, folder: save_model(model, tokenizer, weights, folder),
    )


def _pin_revision(context: RunContext) -> ModelConfig:
    """The model with the revision of this run's first start: a hub id means the same commit at every start."""
    model_config = context.recipe.model
    if model_config.revision is None and context.folder.recipe.exists():
        saved = load(context.folder.recipe, environ={}).recipe.model
        if saved.model_name_or_path == model_config.model_name_or_path:
            return saved
    return model_config


def build_dpo(context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
    """As for pairs; the reference log-probs come before step 1."""
    parts, cache = build_pairs(context, inputs, stage, DpoTask), context.folder.ref_log_probs(stage)
    task, model = cast(DpoTask, parts.task), inputs.model_fingerprint
    return replace(parts, precompute=lambda engine, _: precompute_ref_log_probs(task, engine, cache, model))


def build_pairs(context: RunContext, inputs: StageInputs, stage: str, task_class: type[PairTask]) -> StageParts:
    """Load the model, set its trainable parameters, tokenize the pairs."""
    task, parts = build_row_task(context, inputs, stage, task_class)
    if identical := inputs.data.counts["identical_pairs"]:
        context.note(stage, f"{identical} rows are left out: their two answers are the same")
    if task.sharing_blocker:
        context.note(stage, f"prompt not shared between chosen and rejected: {task.sharing_blocker}")
    return replace(parts, data_manifest={**parts.data_manifest, "shared_prompt": task.sharing_blocker is None})


VERIFY_MAX_BYTES = 32 * 10**9
"""Shards up to this size are verified at every start; reading more would take minutes."""


class PackedSplits(NamedTuple):
    """The two splits of a folder of packed shards."""

    train: PackedDataset
    held_out: PackedDataset


def load_shards(context: RunContext, stage: str, parent: ParentModel | None) -> StageInputs:
    """The start model and the shards, which rank 0 packs where there are none yet."""
    start = resolve_start_model(context, parent)
    shards_dir = context.world.on_rank0_broadcast(
        lambda: str(_verify_checksums(context, stage, _find_or_pack_shards(context, stage, start["model"].path)))
    )
    packed = PackedSplits(PackedDataset.open(Path(shards_dir)), PackedDataset.open(Path(shards_dir), "held_out"))
    return StageInputs(**start, data=packed, data_fingerprint=packed.train.fingerprint)


def build_pretrain(context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
    """Load the model, set its trainable parameters, open the shards."""
    settings = cast(PretrainConfig, context.recipe.stages[stage])
    model, tokenizer, is_modified = load_trainable_model(context, inputs, stage)
    train, held_out = inputs.data.train, inputs.data.held_out
    if train.vocab_size > round_up(vocab_size := model.config.get_text_config().vocab_size):
        message = f"its token ids go up to {train.vocab_size}, the model's to {vocab_size}"
        raise DataError([Problem(str(train.folder), f"{message}; prepare with its tokenizer")])
    measuring = inputs.load_model is not None  # with random weights and tokens
    if not measuring and train.tokenizer_fingerprint != DocumentTokenizer.open(inputs.model.path).fingerprint:
        message = f"it was tokenized by another tokenizer.json than that of {inputs.model_name}"
        raise DataError([Problem(str(train.folder), f"{message}; prepare with its tokenizer")])
    task = PretrainTask(model, train, held_out, settings)
    dropped_tokens = int(train.manifest["splits"]["train"]["dropped_tokens"])
    data_manifest: dict[str, Any] = {
        "source": train.manifest.get("source") or str(train.folder),
        "packed": {"rows": task.rows, "tokens": train.tokens, "documents": train.documents,
                   "sequence_length": settings.max_length, "dropped_tokens": dropped_tokens},
        "held_out": {"rows": task.held_out_rows, "tokens": held_out.tokens, "documents": held_out.documents},
        "bytes_per_token": round(train.text_bytes / max(1, train.tokens), 3),
        "fingerprint": train.fingerprint,
        **train.manifest.get("text_rows", {}),
    }  # fmt: skip
    parts = stage_parts(task, model, tokenizer, data_manifest)
    return replace(parts, check_batch=_check_batch(task) if is_modified else None)


def _find_or_pack_shards(context: RunContext, stage: str, model_dir: Path) -> Path:
    """The folder of packed shards: of the stage prepare, of the recipe's data, or packed here."""
    settings = cast(PretrainConfig, context.recipe.stages[stage])
    if context.recipe.prepare is not None:
        return context.folder.packed
    data = context.recipe.data_for(stage)
    source_dir = local_path(data.source, context.recipe_dir)
    if source_dir is not None and (source_dir / MANIFEST).exists():
        return source_dir
    tokenizer = DocumentTokenizer.open(model_dir)
    folder = context.folder.data(stage) / "packed"
    layout = ShardLayout(settings.max_length, tokenizer.vocab_size)
    quarantine = pack_raw_text(data, context.recipe.seed, context.recipe_dir, tokenizer, layout, folder)
    path = context.folder.data(stage) / QUARANTINE_FILE
    if quarantine.invalid_rows:
        write_quarantine(path, quarantine.invalid_rows)
    for line in quarantine.lines(str(path)):
        context.note(stage, line)
    return folder


def _verify_checksums(context: RunContext, stage: str, folder: Path) -> Path:
    """Verify shards before training: a flipped bit is another token, which nothing later would detect."""
    datasets = [PackedDataset.open(folder, split) for split in SPLITS]
    size = sum(shards.size_bytes for shards in datasets)
    if size <= VERIFY_MAX_BYTES:
        for shards in datasets:
            shards.verify()
    else:
        context.note(stage, f"the checksums of {size / 1e9:.0f} GB of shards are not verified, only their sizes")
    return folder


RESNET = "resnet18"
FLOPS_PER_IMAGE = 3 * 2 * 555.4e6
"""Forward and backward of ResNet-18 on 32 × 32: 555 million multiply-adds forward, twice that backward."""


def load_images(context: RunContext, stage: str, parent: ParentModel | None) -> StageInputs:
    """Read the images; rank 0 first, so that nothing is downloaded or decoded twice."""
    recipe, data = context.recipe, context.recipe.data_for(stage)
    if recipe.model.model_name_or_path != RESNET:
        raise ModelError(f"model: {recipe.model.display_name!r} classifies no images; it wants {RESNET}")
    read = partial(read_images, data.source, context.recipe_dir, data.data_dir)
    context.world.on_rank0_broadcast(lambda: len(read().train))
    images = read()
    if data.max_rows:
        images = replace(images, train=images.train.subsample(data.max_rows))
    return StageInputs(
        model=None,
        model_name=f"{RESNET}, width {recipe.model.resnet_width}, from scratch",
        revision=None,
        data=images,
        model_fingerprint=f"{RESNET} width {recipe.model.resnet_width} seed {recipe.seed}",
        data_fingerprint=images.fingerprint(),
    )


def build_classify(context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
    """A model initialized with the recipe's seed, and the images on the device."""
    settings, images = cast(ClassifyConfig, context.recipe.stages[stage]), inputs.data
    torch.manual_seed(context.recipe.seed)
    width = context.recipe.model.resnet_width
    model = resnet18(len(images.train.classes), width, images.train.images.shape[3])
    task = ClassifyTask(model, images, settings, context.recipe.seed)
    config = {"mean": task.pixel_stats.mean, "std": task.pixel_stats.std, "class_names": images.train.classes,
              "source": images.train.source}  # fmt: skip
    return StageParts(
        task=task,
        model=model,
        parameter_counts=count_parameters(model),
        flops_per_token=lambda plan: FLOPS_PER_IMAGE * (width / 64) ** 2,
        data_manifest=images.manifest(),
        save=lambda weights, folder: save_vision(model, folder, config, weights),
    )


def compare_images(context: RunContext, inputs: StageInputs, stage: str, before: Any = None) -> Metrics:
    """The confusion matrix and the most confident mistakes on the test images, as JSON."""
    files = read_json(context.folder.result(stage))["files"]
    path = context.folder.demo_outputs / "mistakes.json"
    if not path.exists() or read_json(path).get("model") != files:
        misclassified = _find_misclassified(context, inputs, stage)
        _save_misclassified_images(path.with_suffix(""), inputs.data.test.images, misclassified["surest_mistakes"])
        write_json(path, {"model": files, **misclassified})
    saved = read_json(path)
    context.journal.add("misclassified", stage=stage, accuracy=saved["accuracy"], source=saved["source"])
    return {}


def _find_misclassified(context: RunContext, inputs: StageInputs, stage: str) -> dict[str, Any]:
    model, config = load_vision(context.folder.model(stage))
    settings, images = cast(ClassifyConfig, context.recipe.stages[stage]), inputs.data
    pixels = PixelStats(tuple(config["mean"]), tuple(config["std"]))
    classifier = ClassifyLoss(model, images, pixels, settings).to(context.world.device)
    probabilities, labels = classifier.probabilities(), torch.from_numpy(images.test.labels)
    confusion_table = confusion_matrix(probabilities, labels)
    names = images.test.classes
    return {
        "source": images.test.source,
        "accuracy": float(confusion_table.diagonal().sum() / confusion_table.sum()),
        "classes": list(names),
        "confusion": confusion_table.tolist(),
        "surest_mistakes": [
            {"row": m.row, "truth": names[m.truth], "answer": names[m.answer], "confidence": round(m.confidence, 4)}
            for m in worst_mistakes(probabilities, labels)
        ],
    }


def _save_misclassified_images(folder: Path, images: Any, misclassified: list[dict[str, Any]]) -> None:
    """Save the images of the most confident mistakes for the report, in place of those of another model."""
    from PIL import Image

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for example in misclassified:
        pixels = images[example["row"]]
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(folder / f"{example['row']}.png")


BUILDERS: dict[str, StageBuilder] = {
    "pretrain": StageBuilder(load_shards, build_pretrain),
    "sft": StageBuilder(load_rows, build_sft, compare_answers, answers_before),
    "dpo": StageBuilder(load_rows, build_dpo, compare_answers, answers_before),
    "orpo": StageBuilder(load_rows, partial(build_pairs, task_class=OrpoTask), compare_answers, answers_before),
    "lora": StageBuilder(load_rows, build_sft, compare_answers, answers_before),
    "classify": StageBuilder(load_images, build_classify, compare_images),
}
"""The builder of each training stage."""


def render_samples(loaded: LoadedRecipe, count: int) -> tuple[dict[str, list[RenderedSample]], list[str]]:
    """A few samples of each stage, and how rows are read; packed shards are shown once they exist."""
    recipe, recipe_dir = loaded.recipe, loaded.path.parent
    rendered: dict[str, list[RenderedSample]] = {}
    lines: list[str] = []
    for stage, section in recipe.stages.items():
        data, row_format = recipe.data_for(stage), ROW_FORMATS[section.spec.row_format]
        if row_format.render:
            dataset = row_format.load(data, recipe.seed, recipe_dir)
            tokenizer = _load_tokenizer(loaded)
            template_line = pretrained.describe_chat_template(tokenizer, recipe.model)
            lines += [f"{stage}: {line}" for line in (*dataset.quarantine.lines(), template_line)]
            row_format.render(row_format.rows_to_render([*dataset.train, *dataset.held_out]), tokenizer, section)
            rendered[stage] = row_format.render(dataset.train[:count], tokenizer, section)
        elif row_format.is_packed and (packed := _find_shards(loaded, data.source)):
            rendered[stage] = render_shards(packed, count)
    if recipe.prepare and not recipe.text_stage and (packed := _find_shards(loaded, "")):
        rendered["prepare"] = render_shards(packed, count)
    if not rendered:
        raw = recipe.prepare or recipe.text_stage
        hint = "; modelwright data prepare makes shards of it that can be shown" if raw else ""
        raise UsageError(f"{loaded.path.name} has nothing to show{hint}")
    return rendered, lines


def find_template_problems(loaded: LoadedRecipe, stage: str, rows: Sequence[Any]) -> list[Problem]:
    """Why the model's chat template does not render some of these rows, if its tokenizer is on this machine."""
    recipe, section = loaded.recipe, loaded.recipe.stages[stage]
    render = ROW_FORMATS[section.spec.row_format].render
    folders = model_folders(recipe.model.model_name_or_path or "", loaded.path.parent)
    has_tokenizer = any((folder / "tokenizer_config.json").is_file() for folder in folders)
    if not rows or render is None or not has_tokenizer:
        return []
    tokenizer = _load_tokenizer(loaded)
    problems: list[Problem] = []
    for row in rows:
        try:
            render([row], tokenizer, section)
        except DataError as error:
            problems += error.problems
    return problems


def _load_tokenizer(loaded: LoadedRecipe) -> Any:
    """The tokenizer of the model, or of its architecture."""
    model, architecture = loaded.recipe.model, loaded.recipe.model.architecture
    resolved = pretrained.resolve_model(model, loaded.path.parent).path if architecture is None else None
    return pretrained.load_tokenizer(resolved or resolve_tokenizer_dir(loaded), model)


def _find_shards(loaded: LoadedRecipe, source: str) -> Path | None:
    packed = RunFolder(Path(loaded.recipe.run_dir)).packed
    folders = packed, local_path(source, loaded.path.parent) if source else None
    return next((folder for folder in folders if folder and (folder / MANIFEST).exists()), None)
