"""Text: conversations, a causal language model, and the same questions answered before and after."""

from __future__ import annotations

from typing import Any

import torch

from modelwright.data import conversations
from modelwright.models import text, trainable
from modelwright.models.export import save_model
from modelwright.recipe.load import load
from modelwright.recipe.schema import Model, Sft
from modelwright.stages.compare import METRICS, compare
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built, Ingredients, Metrics
from modelwright.tasks.sft import SftTask


class TextKind:
    """Recipes that train a language model."""

    shown = frozenset(METRICS)

    def gather(self, context: Context) -> Ingredients:
        """The main rank first, so that nothing is fetched or converted twice."""
        wish = _pinned(context)
        context.world.first(lambda: str(text.find(wish, context.beside).path))
        base = text.find(wish, context.beside)
        data = conversations.load(context.recipe.data, context.recipe.seed, context.beside)
        return Ingredients(
            model=base,
            model_name=base.name,
            revision=base.revision or wish.revision,
            data=data,
            model_fingerprint=base.fingerprint(),
            data_fingerprint=data.fingerprint,
        )

    def build(self, context: Context, found: Ingredients, stage: str) -> Built:
        """Load the model, say what moves, encode the conversations."""
        settings = context.recipe.stages[stage]
        assert isinstance(settings, Sft)
        tokenizer = text.load_tokenizer(found.model.path)
        model = text.load_model(found.model.path, context.recipe.model.attn_implementation)
        text.check_forward(model)
        torch.manual_seed(context.recipe.seed)  # new weights, such as LoRA's, begin the same at every start
        model = trainable.set_trainable(model, settings)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        task = SftTask(model, tokenizer, found.data, settings, text.stop_tokens(model))
        share = trainable.share(model)
        facts: dict[str, Any] = {
            **found.data.manifest(context.recipe.data),
            "train": task.train_set.facts(),
            "held_out": task.held_out_set.facts(),
            "packed_rows": task.rows if settings.packing else None,
        }
        return Built(
            task=task,
            model=model,
            share=share,
            flops_per_token=4.0 * share.total + 2.0 * share.trained,  # attention and padding not counted
            data_facts=facts,
            save=lambda weights, folder: save_model(model, tokenizer, weights, folder),
        )

    def show(self, context: Context, found: Ingredients, stage: str) -> Metrics:
        """The same questions, before and after."""
        return compare(context, found, stage)


def _pinned(context: Context) -> Model:
    """The model as this run first found it: a hub name means the same commit at every start."""
    wish = context.recipe.model
    if wish.revision is None and context.folder.recipe.exists():
        before = load(context.folder.recipe, environ={}).recipe.model
        if before.model_name_or_path == wish.model_name_or_path:
            return before
    return wish
