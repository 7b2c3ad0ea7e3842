"""Audits of whatever a recipe trains on, or of one file; and the same data as folders for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelwright.data import conversations, preferences, sets
from modelwright.data.audit import Audit, Frame, Kind, audit
from modelwright.data.files import Fault
from modelwright.data.named import load_named
from modelwright.data.sources import local_path
from modelwright.data.tokenizer import Encoder
from modelwright.errors import ModelError, Problem, UsageError
from modelwright.recipe.columns import name_lines
from modelwright.recipe.load import LoadedRecipe, load
from modelwright.recipe.schema import Data

KINDS: dict[str, Kind] = {"sft": "conversations", "lora": "conversations", "dpo": "pairs", "pretrain": "text"}


def audits(name: str, sets: Sequence[str]) -> Iterator[tuple[str, Audit]]:
    """The audit of each stage's data, or of data by its own name."""
    loaded = load_named(name, sets)
    for stage, data, frame in frames(loaded):
        found = audit(data, frame, loaded.path.parent)
        found.faults = [replace(fault, reason=_named(fault, loaded, stage)) for fault in found.faults]
        yield (name if data.source == name else f"{stage}: {data.source}"), found


def _named(fault: Fault, loaded: LoadedRecipe, stage: str) -> str:
    return name_lines([Problem(fault.where, fault.reason)], loaded, stage)[0].message


def frames(loaded: LoadedRecipe) -> Iterator[tuple[str, Data, Frame]]:
    """What each stage reads, and what for; the same data for the same use is looked at once."""
    recipe, encoder = loaded.recipe, _encoder(loaded)
    wanted: list[tuple[str, Data, Kind, Any]] = [
        (stage, recipe.data_of(stage), KINDS[stage], section)
        for stage, section in recipe.stages.items()
        if stage in KINDS
    ]
    if recipe.prepare and recipe.pretrain is None:
        wanted.append(("prepare", recipe.prepared_data, "text", None))
    seen: list[tuple[Data, Kind]] = []
    for stage, data, kind, section in wanted:
        if (data, kind) in seen:
            continue
        seen.append((data, kind))
        length, batch = getattr(section, "max_length", 2048), getattr(section, "per_device_train_batch_size", 8)
        for one in [Data(dataset_name=name, **_reading(data)) for name in data.mix] or [data]:
            yield stage, one, Frame(kind, length, batch, recipe.seed, encoder)


def _reading(data: Data) -> dict[str, Any]:
    return {key: getattr(data, key) for key in ("text_column", "split_by", "test_size", "max_rows")}


def _encoder(loaded: LoadedRecipe) -> Encoder | None:
    """The model's tokenizer, where its folder is at hand."""
    model = loaded.recipe.model
    folder = local_path(model.tokenizer_name_or_path or model.model_name_or_path or "", loaded.path.parent)
    try:
        return Encoder.open(folder) if folder and (folder / "tokenizer.json").exists() else None
    except ModelError:
        return None


def write_sets(name: str, folder: Path) -> dict[str, int]:
    """The conversations or pairs of a recipe as a folder that load_from_disk reads."""
    loaded = load(name)
    recipe = loaded.recipe
    for stage, read in (("sft", conversations.load), ("lora", conversations.load), ("dpo", preferences.load)):
        if stage in recipe.stages:
            found: Any = read(recipe.data_of(stage), recipe.seed, loaded.path.parent)
            return sets.save_set(found, folder)
    raise UsageError(f"{name} has no sft, lora or dpo; modelwright data prepare makes shards of raw text")
