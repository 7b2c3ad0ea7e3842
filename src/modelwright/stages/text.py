"""Text: conversations, a causal language model, and the same questions answered before and after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from modelwright.data import conversations
from modelwright.data.quarantine import QUARANTINE, Aside, write
from modelwright.engine.task import Task
from modelwright.errors import ModelError
from modelwright.models import text, trainable
from modelwright.models.export import save_model
from modelwright.recipe.load import load
from modelwright.recipe.schema import Data, Dpo, Model, Pretrain, Sft
from modelwright.stages.compare import METRICS, compare
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built, Ingredients, Metrics
from modelwright.stages.lineage import Parent
from modelwright.tasks.dpo import DpoTask
from modelwright.tasks.savings import find_savings
from modelwright.tasks.sft import SftTask

TextStage = Pretrain | Sft | Dpo
RowsTask = TypeVar("RowsTask", SftTask, DpoTask)


class RowsKind(ABC):
    """Stages that tune a language model on rows of text that questions can be asked about."""

    shown = frozenset(METRICS)

    @abstractmethod
    def read(self, data: Data, seed: int, beside: Path) -> Any:
        """The rows of both sides."""

    def gather(self, context: Context, stage: str, parent: Parent | None) -> Ingredients:
        """The model to start from, and the rows."""
        data = self.read(context.recipe.data_of(stage), context.recipe.seed, context.beside)
        set_aside(context, stage, data.aside)
        return Ingredients(**start_of(context, parent), data=data, data_fingerprint=data.fingerprint)

    def show(self, context: Context, found: Ingredients, stage: str) -> Metrics:
        """The same questions, before and after."""
        return compare(context, found, stage)


class TextKind(RowsKind):
    """Stages that tune a language model on conversations."""

    def read(self, data: Data, seed: int, beside: Path) -> Any:
        """Conversations."""
        return conversations.load(data, seed, beside)

    def build(self, context: Context, found: Ingredients, stage: str) -> Built:
        """Load the model, say what moves, encode the conversations."""
        settings = context.recipe.stages[stage]
        assert isinstance(settings, Sft)
        task, made = made_of(context, found, stage, SftTask)
        sides = made.data_facts["train"], made.data_facts["held_out"]
        cut, lost = (sum(side[name] for side in sides) for name in ("truncated_rows", "lost_tokens"))
        if cut:
            told = f"{cut} rows are cut to max_length, {lost} tokens in all"
            context.journal.add("note", stage=stage, message=told)
        saver = find_savings(task, made.model, settings)
        return replace(
            made,
            data_facts={**made.data_facts, "packed_rows": task.rows if settings.packing else None},
            flops_per_token=saver.flops_per_token(made.share),
            savings=saver.lines,
            settle=lambda engine, folder: saver.settle(engine, folder, found.model_fingerprint),
        )


def set_aside(context: Context, stage: str, aside: Aside) -> None:
    """List the rows that cannot be used beside the manifest, and say so."""
    if aside.faults:
        path = context.folder.data(stage) / QUARANTINE
        context.world.first(lambda: write(path, aside.faults))
        first = aside.faults[0]
        told = f"{len(aside.faults):,} of {aside.rows:,} rows are set aside in {path}; {first.where}: {first.reason}"
        context.journal.add("note", stage=stage, message=told)


def start_of(context: Context, parent: Parent | None) -> dict[str, Any]:
    """Where a stage starts: the parent's model, or the recipe's own; the main rank fetches it first."""
    wish = _pinned(context)
    if parent is not None:
        base = text.Found(f"the {parent.stage} model of this run", parent.path, wish.revision)
        fingerprint = parent.fingerprint
    else:
        context.world.first(lambda: str(text.find(wish, context.beside).path))
        base = text.find(wish, context.beside)
        fingerprint = base.fingerprint()
    return {
        "model": base,
        "model_name": base.name,
        "revision": base.revision or wish.revision,
        "model_fingerprint": fingerprint,
    }


def ready_model(context: Context, found: Ingredients, settings: TextStage) -> tuple[Any, Any]:
    """The model and its tokenizer, checked, with what moves and what is frozen decided."""
    tokenizer = text.load_tokenizer(found.model.path)
    is_adapter = (found.model.path / "adapter_config.json").exists()
    if is_adapter and settings.quantization != "none":
        raise ModelError(
            f"quantization: {settings.quantization} wants a whole model to start from, and {found.model_name} is an "
            "adapter; merge it first, or use quantization: none"
        )
    attending, device = context.recipe.model.attn_implementation, context.world.device
    model = (found.load_model or text.load_model)(found.model.path, attending, settings.quantization, device)
    if hasattr(model, "merge_and_unload"):  # a parent that is an adapter: its matrices become part of the weights
        model = model.merge_and_unload()
    text.move(model, device, attending)
    torch.manual_seed(context.recipe.seed)  # new weights, such as LoRA's, begin the same at every start
    if grown := text.grow_embeddings(model, tokenizer):
        told = f"the tokenizer knows {grown} tokens more than the model: its embeddings have grown to {len(tokenizer)}"
        context.journal.add("note", message=told)
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing:
        trainable.recompute_activations(model, settings.gradient_checkpointing)
    return model, tokenizer


def made_of(context: Context, found: Ingredients, stage: str, make: Callable[..., RowsTask]) -> tuple[RowsTask, Built]:
    """The task of rows that are encoded with the model's own tokenizer, and the stage around it."""
    settings = context.recipe.stages[stage]
    assert isinstance(settings, Sft | Dpo)
    model, tokenizer = ready_model(context, found, settings)
    task = make(model, tokenizer, found.data, settings, text.stop_tokens(model))
    facts = {
        **found.data.manifest(context.recipe.data_of(stage)),
        "train": task.train_set.facts(),
        "held_out": task.held_out_set.facts(),
    }
    return task, built(task, model, tokenizer, facts)


def built(task: Task, model: Any, tokenizer: Any, facts: dict[str, Any]) -> Built:
    """A text stage ready to be trained."""
    share = trainable.share(model)
    return Built(
        task=task,
        model=model,
        share=share,
        flops_per_token=4.0 * share.total + 2.0 * share.trained,  # attention and padding not counted
        data_facts=facts,
        save=lambda weights, folder: save_model(model, tokenizer, weights, folder),
        planned=getattr(task, "planned", lambda steps: None),
    )


def _pinned(context: Context) -> Model:
    """The model as this run first found it: a hub name means the same commit at every start."""
    wish = context.recipe.model
    if wish.revision is None and context.folder.recipe.exists():
        before = load(context.folder.recipe, environ={}).recipe.model
        if before.model_name_or_path == wish.model_name_or_path:
            return before
    return wish
