"""Samples of what each stage of a recipe learns from, as the model sees them."""

from __future__ import annotations

from pathlib import Path

from modelwright.data import conversations, preferences
from modelwright.data.shards import MANIFEST
from modelwright.data.show import Sample, show_conversations, show_pairs, show_shards
from modelwright.data.sources import local_path
from modelwright.errors import UsageError
from modelwright.models import text
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.schema import Sft
from modelwright.runs.folder import RunFolder


def samples(loaded: LoadedRecipe, count: int) -> dict[str, list[Sample]]:
    """A few samples of each stage; packed shards are shown once they are there."""
    recipe, beside = loaded.recipe, loaded.path.parent
    found: dict[str, list[Sample]] = {}
    for stage, section in recipe.stages.items():
        data = recipe.data_of(stage)
        if isinstance(section, Sft):
            train = conversations.load(data, recipe.seed, beside).train[:count]
            found[stage] = show_conversations(train, _tokenizer(loaded), section.assistant_only_loss)
        elif stage == "dpo":
            found[stage] = show_pairs(preferences.load(data, recipe.seed, beside).train[:count], _tokenizer(loaded))
        elif stage == "pretrain" and (packed := _packed(loaded, data.source)):
            found[stage] = show_shards(packed, count)
    if recipe.prepare and not recipe.pretrain and (packed := _packed(loaded, "")):
        found["prepare"] = show_shards(packed, count)
    if not found:
        raw = recipe.prepare or recipe.pretrain
        wish = "; modelwright data prepare makes shards of it that can be shown" if raw else ""
        raise UsageError(f"{loaded.path.name} has nothing to show{wish}")
    return found


def _tokenizer(loaded: LoadedRecipe) -> object:
    """The tokenizer of the model, or the one that its first stages left in the run."""
    model = loaded.recipe.model
    if model.architecture is None:
        return text.load_tokenizer(text.find(model, loaded.path.parent).path)
    folder = RunFolder(Path(loaded.recipe.run_dir)).tokenizer
    named = local_path(model.tokenizer_name_or_path, loaded.path.parent) if model.tokenizer_name_or_path else folder
    if named is None or not (named / "tokenizer.json").exists():
        raise UsageError(
            "the tokenizer is trained by prepare, which has not run yet; start with modelwright data prepare"
        )
    return text.load_tokenizer(named)


def _packed(loaded: LoadedRecipe, source: str) -> Path | None:
    folders = [
        RunFolder(Path(loaded.recipe.run_dir)).packed,
        local_path(source, loaded.path.parent) if source else None,
    ]
    return next((folder for folder in folders if folder and (folder / MANIFEST).exists()), None)
