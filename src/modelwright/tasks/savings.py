"""Work that a fine-tune need not do twice: frozen layers below the first moving one, and a beginning all rows share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from modelwright.engine.loop import Engine
from modelwright.models.text import bare
from modelwright.models.trainable import Share, decoder_layers
from modelwright.models.trunk import Trunk, dropout_of, frozen_depth
from modelwright.plan.stage import StagePlan
from modelwright.recipe.schema import Sft
from modelwright.tasks.kept import Home
from modelwright.tasks.layout import LONGEST_SHARED_ROW, UNMASKED, shared_rows
from modelwright.tasks.sft import SftTask


@dataclass(frozen=True)
class Saver:
    """What a fine-tune saves, and what it says about it."""

    task: SftTask
    """The fine-tune."""
    settings: Sft
    """As the recipe wishes it."""
    trunk: Trunk | None
    """The frozen layers that are kept."""
    why_not: str | None
    """Why none are, where some parts of the model are frozen."""

    def lines(self, plan: StagePlan) -> tuple[str, ...]:
        """What is computed once, and the gain to expect, a line each."""
        told = [self.why_not] if self.why_not else []
        if self.trunk is not None:
            gain = self._trunk_gain(plan)
            told.append(
                f"{self.trunk.depth} of {self.trunk.layers} layers are frozen with all below them: computed once and "
                f"kept, about {gain:.1f} times less work over {plan.total_rows / plan.rows:.3g} epochs (keep_trunk)"
            )
        if self.task.beginning:
            told.append(
                f"{self.task.beginning} tokens begin every row: computed once for many rows, about "
                f"{self._prefix_gain(plan):.1f} times fewer tokens in a step (share_prefix)"
            )
        return tuple(told)

    def settle(self, engine: Engine, folder: Path, fingerprint: str) -> str | None:
        """Fill the kept states before the first step; returns a line about it."""
        if self.trunk is None:
            return None
        if engine.plan.sharding in ("fsdp", "hsdp"):
            return "the frozen layers are computed in every step: with fsdp no device has them whole"
        kept = self.task.keep(self.trunk, engine.world.device)
        home = Home(self.settings.keep_trunk, folder, f"{fingerprint}:{engine.precision.products}")
        return kept.fill(engine.world, engine.precision.autocast, home)

    def flops_per_token(self, share: Share) -> float:
        """Operations for one token, forward and backward; attention, padding and what is saved are not counted."""
        if self.trunk is None:
            return 4.0 * share.total + 2.0 * share.trained
        return 6.0 * share.trained

    def _trunk_gain(self, plan: StagePlan) -> float:
        assert self.trunk is not None
        layers = decoder_layers(bare(self.trunk.model))
        frozen = sum(map(_weights, layers[: self.trunk.depth]))
        moving = float(sum(map(_weights, layers[self.trunk.depth :])))
        head = bare(self.trunk.model).get_output_embeddings()
        facts = self.task.train_set.facts()
        moving += _weights(head) * facts["trained_tokens"] / facts["tokens"] if head is not None else 0
        epochs = plan.total_rows / plan.rows
        return float(epochs * (2 * frozen + 6 * moving) / (2 * frozen + epochs * 6 * moving))

    def _prefix_gain(self, plan: StagePlan) -> float:
        documents = len(self.task.train_set.rows) / self.task.rows * plan.per_device
        tokens = self.task.train_set.facts()["tokens"] / self.task.rows * plan.per_device
        after = tokens - documents * self.task.beginning
        rows = shared_rows(self.task.beginning, after, UNMASKED if self.task.paths else LONGEST_SHARED_ROW)
        return float(tokens / (rows * self.task.beginning + after))


def find_savings(task: SftTask, model: Any, settings: Sft) -> Saver:
    """What can be saved in this fine-tune without changing what is learnt."""
    if settings.keep_trunk == "off" or not settings.trainable.partial:
        return Saver(task, settings, None, None)
    depth, drops = frozen_depth(model), dropout_of(model)
    trunk = Trunk(model, depth) if depth and not drops else None
    why_not = None
    if _moves_embeddings(model):
        size = _weights(bare(model).get_output_embeddings()) / 1e6
        why_not = (
            "the head shares its weights with the embeddings, so training it changes what every layer is given and "
            f"sends gradients through all of them; untie_head: true gives it a copy of its own ({size:,.1f} M weights "
            "more to hold) and lets the frozen layers be computed once"
        )
    elif drops:
        why_not = f"the frozen layers are computed in every step: the model drops out at random ({drops})"
    elif trunk is not None and not trunk.is_exact():
        trunk, why_not = None, "the frozen layers are computed in every step: this family cannot be split exactly"
    return Saver(task, settings, trunk, why_not)


def _moves_embeddings(model: Any) -> bool:
    return any(weight.requires_grad for weight in bare(model).get_input_embeddings().parameters())


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
