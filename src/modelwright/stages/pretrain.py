"""Raw text: packed shards from prepare, from a folder, or made here from the recipe's documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.data.shards import MANIFEST, PARTS, Layout, Shards
from modelwright.data.sources import local_path
from modelwright.data.texts import pack_texts
from modelwright.data.tokenizer import Encoder, padded
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import Pretrain
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built, Ingredients, Metrics
from modelwright.stages.lineage import Parent
from modelwright.stages.text import built, ready_model, start_of
from modelwright.tasks.pretrain import PretrainTask

MOST_READ_BACK = 32 * 10**9
"""Bytes of shards that are read back at every start; more would take minutes from a disk."""


@dataclass(frozen=True)
class Packed:
    """The two sides of a packed folder."""

    train: Shards
    """Rows that move the weights."""
    held_out: Shards
    """Rows that only measure."""


class PretrainKind:
    """Stages that train a language model on raw text."""

    shown: frozenset[str] = frozenset()

    def gather(self, context: Context, stage: str, parent: Parent | None) -> Ingredients:
        """The model to start from, and the shards, made by the main rank where they are not there yet."""
        start = start_of(context, parent)
        place = context.world.first(
            lambda: str(_verified(context, stage, _shards(context, stage, start["model"].path)))
        )
        packed = Packed(Shards.open(Path(place)), Shards.open(Path(place), "held_out"))
        return Ingredients(**start, data=packed, data_fingerprint=packed.train.fingerprint)

    def build(self, context: Context, found: Ingredients, stage: str) -> Built:
        """Load the model, say what moves, open the shards."""
        settings = context.recipe.stages[stage]
        assert isinstance(settings, Pretrain)
        model, tokenizer = ready_model(context, found, settings)
        train, held_out = found.data.train, found.data.held_out
        if train.vocab_size > padded(words := model.config.get_text_config().vocab_size):
            letter = f"its tokens go up to {train.vocab_size}, but the model knows {words}; prepare with its tokenizer"
            raise DataError([Problem(str(train.folder), letter)])
        task = PretrainTask(model, train, held_out, settings)
        facts: dict[str, Any] = {
            "source": train.manifest.get("source") or str(train.folder),
            "packed": {"rows": task.rows, "tokens": train.tokens, "documents": train.documents,
                       "length": settings.max_length, "lost_tokens": _lost(train)},
            "held_out": {"rows": task.held_out_rows, "tokens": held_out.tokens, "documents": held_out.documents},
            "bytes_per_token": round(train.text_bytes / max(1, train.tokens), 3),
            "fingerprint": train.fingerprint,
        }  # fmt: skip
        return built(task, model, tokenizer, facts)

    def show(self, context: Context, found: Ingredients, stage: str) -> Metrics:
        """Raw text asks no questions."""
        return {}


def _shards(context: Context, stage: str, model: Path) -> Path:
    """The folder of packed shards: what prepare left, what the recipe names, or what is made here."""
    settings = context.recipe.stages[stage]
    assert isinstance(settings, Pretrain)
    if context.recipe.prepare is not None:
        return context.folder.packed
    data = context.recipe.data_of(stage)
    named = local_path(data.source, context.beside)
    if named is not None and (named / MANIFEST).exists():
        return named
    encoder = Encoder.open(model)
    folder = context.folder.data(stage) / "packed"
    layout = Layout(settings.max_length, encoder.vocab_size)
    pack_texts(data, context.recipe.seed, context.beside, encoder, layout, folder)
    return folder


def _verified(context: Context, stage: str, folder: Path) -> Path:
    """Read shards back before they are learnt from: a flipped bit is another token, and nothing later would tell."""
    parts = [Shards.open(folder, part) for part in PARTS]
    size = sum(shards.bytes for shards in parts)
    if size <= MOST_READ_BACK:
        for shards in parts:
            shards.verify()
    else:
        note = f"{size / 1e9:.0f} GB of shards have the sizes that their manifest says; they are not read back"
        context.journal.add("note", stage=stage, message=note)
    return folder


def _lost(shards: Shards) -> int:
    return int(shards.manifest["parts"]["train"]["lost_tokens"])
