"""Builders of the training stages (pretrain, sft, dpo, lora, classify): load model and data, build the task, compare and render samples."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from modelwright.data import chat, preferences
from modelwright.data.audit import RenderedSample, render_conversations, render_pairs, render_shards
from modelwright.data.images import read_images
from modelwright.data.readers import QUARANTINE_FILE, Quarantine, write_quarantine
from modelwright.data.shards import MANIFEST, SPLITS, PackedDataset, ShardLayout, pack_raw_text
from modelwright.data.sources import local_path
from modelwright.data.tokenizer import DocumentTokenizer, pad_vocab_size
from modelwright.engine.task import Task
from modelwright.engine.trainer import Engine
from modelwright.errors import DataError, ModelError, Problem, UsageError
from modelwright.models import activation_checkpoint, pretrained, trainable
from modelwright.models.save import save_model
from modelwright.models.trainable import count_parameters
from modelwright.models.vision import load_vision, resnet18, save_vision
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.recipe.schema import ClassifyConfig, DataConfig, DpoConfig, ModelConfig, PretrainConfig, SftConfig
from modelwright.runs.folder import RunFolder, read_json, write_json
from modelwright.stages.compare import ANSWER_METRICS, compare_answers
from modelwright.stages.context import Metrics, ParentModel, RunContext, StageInputs, StageParts
from modelwright.tasks.classify import ClassifyLoss, ClassifyTask, PixelStats, confusion_matrix, worst_mistakes
from modelwright.tasks.dpo import DpoTask, precompute_ref_log_probs
from modelwright.tasks.pretrain import PretrainTask
from modelwright.tasks.sft import SftTask, find_compute_reuse

TextStage = PretrainConfig | SftConfig | DpoConfig
RowsTask = TypeVar("RowsTask", SftTask, DpoTask)


class _ChatBuilder(ABC):
    """Stages that tune a language model on rows of text that questions can be asked about."""

    comparison_metrics = frozenset(ANSWER_METRICS)

    @abstractmethod
    def load_rows(self, data: DataConfig, seed: int, recipe_dir: Path) -> Any:
        """The rows of both sides."""

    def load_inputs(self, context: RunContext, stage: str, parent: ParentModel | None) -> StageInputs:
        """The model to start from, and the rows."""
        data = self.load_rows(context.recipe.data_for(stage), context.recipe.seed, context.recipe_dir)
        report_quarantine(context, stage, data.quarantine)
        return StageInputs(**resolve_start_model(context, parent), data=data, data_fingerprint=data.fingerprint)

    def compare(self, context: RunContext, inputs: StageInputs, stage: str) -> Metrics:
        """The same questions, before and after."""
        return compare_answers(context, inputs, stage)


class SftBuilder(_ChatBuilder):
    """Stages that tune a language model on conversations."""

    def load_rows(self, data: DataConfig, seed: int, recipe_dir: Path) -> Any:
        """Conversations."""
        return chat.load_conversations(data, seed, recipe_dir)

    def build(self, context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
        """Load the model, say what moves, encode the conversations."""
        settings = context.recipe.stages[stage]
        assert isinstance(settings, SftConfig)
        task, parts = build_row_task(context, inputs, stage, SftTask)
        splits = parts.data_manifest["train"], parts.data_manifest["held_out"]
        cut, truncated = (sum(split[name] for split in splits) for name in ("truncated_rows", "truncated_tokens"))
        if cut:
            note = f"{cut} rows are cut to max_length, {truncated} tokens in all"
            context.journal.add("note", stage=stage, message=note)
        reuse = find_compute_reuse(task, parts.model, settings)
        return replace(
            parts,
            data_manifest={**parts.data_manifest, "packed_rows": task.rows if settings.packing else None},
            flops_per_token=reuse.flops_per_token(parts.parameter_counts),
            optimization_notes=reuse.describe,
            precompute=lambda engine, folder: reuse.precompute(engine, folder, inputs.model_fingerprint),
        )


def report_quarantine(context: RunContext, stage: str, quarantine: Quarantine) -> None:
    """List the rows that cannot be used beside the manifest, and say so."""
    if quarantine.invalid_rows:
        path = context.folder.data(stage) / QUARANTINE_FILE
        context.world.on_rank0_broadcast(lambda: write_quarantine(path, quarantine.invalid_rows))
        first = quarantine.invalid_rows[0]
        note = f"{len(quarantine.invalid_rows):,} of {quarantine.rows_read:,} rows quarantined in {path}; {first.where}: {first.reason}"
        context.journal.add("note", stage=stage, message=note)


def resolve_start_model(context: RunContext, parent: ParentModel | None) -> dict[str, Any]:
    """Where a stage starts: the parent's model, or the recipe's own; the main rank fetches it first."""
    model_config = _pin_revision(context)
    if parent is not None:
        base = pretrained.ResolvedModel(f"the {parent.stage} model of this run", parent.path, model_config.revision)
        fingerprint = parent.fingerprint
    else:
        context.world.on_rank0_broadcast(lambda: str(pretrained.resolve_model(model_config, context.recipe_dir).path))
        base = pretrained.resolve_model(model_config, context.recipe_dir)
        fingerprint = base.fingerprint()
    return {
        "model": base,
        "model_name": base.name,
        "revision": base.revision or model_config.revision,
        "model_fingerprint": fingerprint,
    }


def load_trainable_model(context: RunContext, inputs: StageInputs, settings: TextStage) -> tuple[Any, Any]:
    """The model and its tokenizer, checked, with what moves and what is frozen decided."""
    tokenizer = pretrained.load_tokenizer(inputs.model.path)
    is_adapter = (inputs.model.path / "adapter_config.json").exists()
    if is_adapter and settings.quantization != "none":
        raise ModelError(
            f"quantization: {settings.quantization} wants a whole model to start from, and {inputs.model_name} is an "
            "adapter; merge it first, or use quantization: none"
        )
    attn_implementation, device = context.recipe.model.attn_implementation, context.world.device
    model = (inputs.load_model or pretrained.load_model)(
        inputs.model.path, attn_implementation, settings.quantization, device
    )
    if hasattr(model, "merge_and_unload"):  # a parent that is an adapter: its matrices become part of the weights
        model = model.merge_and_unload()
    pretrained.prepare_model(model, device, attn_implementation)
    torch.manual_seed(context.recipe.seed)  # new weights, such as LoRA's, begin the same at every start
    if num_added := pretrained.resize_embeddings(model, tokenizer):
        note = (
            f"the tokenizer knows {num_added} tokens more than the model: its embeddings have grown to {len(tokenizer)}"
        )
        context.journal.add("note", message=note)
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing:
        activation_checkpoint.enable_activation_checkpointing(model, settings.gradient_checkpointing)
    return model, tokenizer


def build_row_task(
    context: RunContext, inputs: StageInputs, stage: str, task_class: Callable[..., RowsTask]
) -> tuple[RowsTask, StageParts]:
    """The task of rows that are encoded with the model's own tokenizer, and the stage around it."""
    settings = context.recipe.stages[stage]
    assert isinstance(settings, SftConfig | DpoConfig)
    model, tokenizer = load_trainable_model(context, inputs, settings)
    task = task_class(model, tokenizer, inputs.data, settings, pretrained.eos_token_ids(model))
    data_manifest = {
        **inputs.data.manifest(context.recipe.data_for(stage)),
        "train": task.train_set.stats(),
        "held_out": task.held_out_set.stats(),
    }
    return task, stage_parts(task, model, tokenizer, data_manifest)


def stage_parts(task: Task, model: Any, tokenizer: Any, data_manifest: dict[str, Any]) -> StageParts:
    """A text stage ready to be trained."""
    counts = trainable.count_parameters(model)
    return StageParts(
        task=task,
        model=model,
        parameter_counts=counts,
        flops_per_token=4.0 * counts.total + 2.0 * counts.trained,  # attention and padding not counted
        data_manifest=data_manifest,
        save=lambda weights, folder: save_model(model, tokenizer, weights, folder),
        set_total_steps=getattr(task, "set_total_steps", lambda steps: None),
    )


def _pin_revision(context: RunContext) -> ModelConfig:
    """The model as this run first found it: a hub name means the same commit at every start."""
    model_config = context.recipe.model
    if model_config.revision is None and context.folder.recipe.exists():
        saved = load(context.folder.recipe, environ={}).recipe.model
        if saved.model_name_or_path == model_config.model_name_or_path:
            return saved
    return model_config


class DpoBuilder(_ChatBuilder):
    """Stages that tune a language model on pairs of answers."""

    def load_rows(self, data: DataConfig, seed: int, recipe_dir: Path) -> Any:
        """Pairs of answers."""
        return preferences.load_preferences(data, seed, recipe_dir)

    def build(self, context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
        """Load the model, say what moves, encode the pairs; the reference is measured when the engine stands."""
        task, parts = build_row_task(context, inputs, stage, DpoTask)

        def precompute(engine: Engine, cache_dir: Path) -> str | None:
            for line in _pair_notes(task, inputs.data):
                context.journal.add("note", stage=stage, message=line)
            return precompute_ref_log_probs(task, engine, context.folder.ref_log_probs(stage), inputs.model_fingerprint)

        data_manifest = {**parts.data_manifest, "shared_prompt": task.sharing_blocker is None}
        return replace(parts, data_manifest=data_manifest, precompute=precompute)


def _pair_notes(task: DpoTask, data: preferences.PreferenceDataset) -> list[str]:
    """What a person should know of the pairs."""
    cut, truncated = (
        sum(split.stats()[name] for split in (task.train_set, task.held_out_set))
        for name in ("truncated_rows", "truncated_tokens")
    )
    lines = (
        [f"{data.identical_pairs} rows are left out: their two answers are the same"] if data.identical_pairs else []
    )
    lines += [f"{cut} pairs are cut to max_length, {truncated} tokens in all; none is dropped"] if cut else []
    return lines + (
        [f"prompt not shared between chosen and rejected: {task.sharing_blocker}"] if task.sharing_blocker else []
    )


VERIFY_MAX_BYTES = 32 * 10**9
"""Bytes of shards that are read back at every start; more would take minutes from a disk."""


@dataclass(frozen=True)
class PackedSplits:
    """The two sides of a packed folder."""

    train: PackedDataset
    """Rows that move the weights."""
    held_out: PackedDataset
    """Rows that only measure."""


class PretrainBuilder:
    """Stages that train a language model on raw text."""

    comparison_metrics: frozenset[str] = frozenset()

    def load_inputs(self, context: RunContext, stage: str, parent: ParentModel | None) -> StageInputs:
        """The model to start from, and the shards, made by the main rank where they are not there yet."""
        start = resolve_start_model(context, parent)
        shards_dir = context.world.on_rank0_broadcast(
            lambda: str(_verify_checksums(context, stage, _find_or_pack_shards(context, stage, start["model"].path)))
        )
        packed = PackedSplits(PackedDataset.open(Path(shards_dir)), PackedDataset.open(Path(shards_dir), "held_out"))
        return StageInputs(**start, data=packed, data_fingerprint=packed.train.fingerprint)

    def build(self, context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
        """Load the model, say what moves, open the shards."""
        settings = context.recipe.stages[stage]
        assert isinstance(settings, PretrainConfig)
        model, tokenizer = load_trainable_model(context, inputs, settings)
        train, held_out = inputs.data.train, inputs.data.held_out
        if train.vocab_size > pad_vocab_size(vocab_size := model.config.get_text_config().vocab_size):
            message = (
                f"its tokens go up to {train.vocab_size}, but the model knows {vocab_size}; prepare with its tokenizer"
            )
            raise DataError([Problem(str(train.folder), message)])
        task = PretrainTask(model, train, held_out, settings)
        data_manifest: dict[str, Any] = {
            "source": train.manifest.get("source") or str(train.folder),
            "packed": {"rows": task.rows, "tokens": train.tokens, "documents": train.documents,
                       "sequence_length": settings.max_length, "dropped_tokens": _dropped_tokens(train)},
            "held_out": {"rows": task.held_out_rows, "tokens": held_out.tokens, "documents": held_out.documents},
            "bytes_per_token": round(train.text_bytes / max(1, train.tokens), 3),
            "fingerprint": train.fingerprint,
        }  # fmt: skip
        return stage_parts(task, model, tokenizer, data_manifest)

    def compare(self, context: RunContext, inputs: StageInputs, stage: str) -> Metrics:
        """Raw text asks no questions."""
        return {}


def _find_or_pack_shards(context: RunContext, stage: str, model_dir: Path) -> Path:
    """The folder of packed shards: what prepare left, what the recipe names, or what is made here."""
    settings = context.recipe.stages[stage]
    assert isinstance(settings, PretrainConfig)
    if context.recipe.prepare is not None:
        return context.folder.packed
    data = context.recipe.data_for(stage)
    source_dir = local_path(data.source, context.recipe_dir)
    if source_dir is not None and (source_dir / MANIFEST).exists():
        return source_dir
    tokenizer = DocumentTokenizer.open(model_dir)
    folder = context.folder.data(stage) / "packed"
    layout = ShardLayout(settings.max_length, tokenizer.vocab_size)
    pack_raw_text(data, context.recipe.seed, context.recipe_dir, tokenizer, layout, folder)
    return folder


def _verify_checksums(context: RunContext, stage: str, folder: Path) -> Path:
    """Read shards back before they are learnt from: a flipped bit is another token, and nothing later would tell."""
    datasets = [PackedDataset.open(folder, split) for split in SPLITS]
    size = sum(shards.size_bytes for shards in datasets)
    if size <= VERIFY_MAX_BYTES:
        for shards in datasets:
            shards.verify()
    else:
        note = f"{size / 1e9:.0f} GB of shards have the sizes that their manifest says; they are not read back"
        context.journal.add("note", stage=stage, message=note)
    return folder


def _dropped_tokens(shards: PackedDataset) -> int:
    return int(shards.manifest["splits"]["train"]["dropped_tokens"])


RESNET = "resnet18"
FLOPS_PER_IMAGE = 3 * 2 * 555.4e6
"""Forward and backward of the full ResNet-18 on 32 × 32: 555 million multiplications forward, twice that backward."""


class ClassifyBuilder:
    """Recipes that train an image classifier."""

    comparison_metrics: frozenset[str] = frozenset()

    def load_inputs(self, context: RunContext, stage: str, parent: ParentModel | None) -> StageInputs:
        """Read the images; the main rank first, so that nothing is fetched or decoded twice."""
        recipe, data = context.recipe, context.recipe.data_for(stage)
        if recipe.model.model_name_or_path != RESNET:
            raise ModelError(f"model: {recipe.model.display_name!r} classifies no images; it wants {RESNET}")
        name = data.dataset_name or data.train_file or ""
        context.world.on_rank0_broadcast(lambda: len(read_images(name, context.recipe_dir).train))
        images = read_images(name, context.recipe_dir)
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

    def build(self, context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
        """A fresh model by the recipe's seed, and the set on the device."""
        settings, images = context.recipe.stages[stage], inputs.data
        assert isinstance(settings, ClassifyConfig)
        torch.manual_seed(context.recipe.seed)
        width = context.recipe.model.resnet_width
        model = resnet18(len(images.train.classes), width, images.train.images.shape[3])
        task = ClassifyTask(model, images, settings, context.recipe.seed)
        config = {"mean": task.pixel_stats.mean, "std": task.pixel_stats.std, "class_names": images.train.classes,
                  "source": images.train.source}  # fmt: skip
        data_manifest = {
            "source": images.train.source,
            "train_rows": len(images.train),
            "held_out_rows": len(images.test),
            "classes": list(images.train.classes),
            "fingerprint": inputs.data_fingerprint,
        }
        return StageParts(
            task=task,
            model=model,
            parameter_counts=count_parameters(model),
            flops_per_token=FLOPS_PER_IMAGE * (width / 64) ** 2,
            data_manifest=data_manifest,
            save=lambda weights, folder: save_vision(model, folder, config, weights),
        )

    def compare(self, context: RunContext, inputs: StageInputs, stage: str) -> Metrics:
        """The confusion matrix and the surest mistakes on the test images, as JSON."""
        files = read_json(context.folder.result(stage))["files"]
        path = context.folder.demo_outputs / "mistakes.json"
        if not path.exists() or read_json(path).get("model") != files:
            misclassified = self._misclassified(context, inputs, stage)
            _save_misclassified_images(path.with_suffix(""), inputs.data.test.images, misclassified["surest_mistakes"])
            write_json(path, {"model": files, **misclassified})
        saved = read_json(path)
        context.journal.add("misclassified", stage=stage, accuracy=saved["accuracy"], source=saved["source"])
        return {}

    def _misclassified(self, context: RunContext, inputs: StageInputs, stage: str) -> dict[str, Any]:
        model, config = load_vision(context.folder.model(stage))
        settings, images = context.recipe.stages[stage], inputs.data
        assert isinstance(settings, ClassifyConfig)
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
    """The images of the surest mistakes, for the report; those of another model go."""
    from PIL import Image

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for example in misclassified:
        pixels = images[example["row"]]
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(folder / f"{example['row']}.png")


def render_samples(loaded: LoadedRecipe, count: int) -> dict[str, list[RenderedSample]]:
    """A few samples of each stage; packed shards are shown once they are there."""
    recipe, recipe_dir = loaded.recipe, loaded.path.parent
    rendered: dict[str, list[RenderedSample]] = {}
    for stage, section in recipe.stages.items():
        data = recipe.data_for(stage)
        if isinstance(section, SftConfig):
            train = chat.load_conversations(data, recipe.seed, recipe_dir).train[:count]
            rendered[stage] = render_conversations(train, _load_tokenizer(loaded), section.assistant_only_loss)
        elif stage == "dpo":
            rendered[stage] = render_pairs(
                preferences.load_preferences(data, recipe.seed, recipe_dir).train[:count], _load_tokenizer(loaded)
            )
        elif stage == "pretrain" and (packed := _find_shards(loaded, data.source)):
            rendered[stage] = render_shards(packed, count)
    if recipe.prepare and not recipe.pretrain and (packed := _find_shards(loaded, "")):
        rendered["prepare"] = render_shards(packed, count)
    if not rendered:
        raw = recipe.prepare or recipe.pretrain
        hint = "; modelwright data prepare makes shards of it that can be shown" if raw else ""
        raise UsageError(f"{loaded.path.name} has nothing to show{hint}")
    return rendered


def _load_tokenizer(loaded: LoadedRecipe) -> object:
    """The tokenizer of the model, or the one that its first stages left in the run."""
    model = loaded.recipe.model
    if model.architecture is None:
        return pretrained.load_tokenizer(pretrained.resolve_model(model, loaded.path.parent).path)
    folder = RunFolder(Path(loaded.recipe.run_dir)).tokenizer
    tokenizer_dir = (
        local_path(model.tokenizer_name_or_path, loaded.path.parent) if model.tokenizer_name_or_path else folder
    )
    if tokenizer_dir is None or not (tokenizer_dir / "tokenizer.json").exists():
        raise UsageError(
            "the tokenizer is trained by prepare, which has not run yet; start with modelwright data prepare"
        )
    return pretrained.load_tokenizer(tokenizer_dir)


def _find_shards(loaded: LoadedRecipe, source: str) -> Path | None:
    folders = [
        RunFolder(Path(loaded.recipe.run_dir)).packed,
        local_path(source, loaded.path.parent) if source else None,
    ]
    return next((folder for folder in folders if folder and (folder / MANIFEST).exists()), None)
