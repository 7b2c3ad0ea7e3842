"""Take data by its own name where a recipe could stand: the smallest recipe that reads it is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelwright.data.files import SUFFIXES, Row
from modelwright.data.shards import MANIFEST
from modelwright.data.sources import files_in, is_embedded, is_hub_name, is_stored_set, read
from modelwright.errors import UsageError
from modelwright.recipe.load import LoadedRecipe, load, made, shipped
from modelwright.recipe.schema import Data

MODEL = {"model_name_or_path": "smollm2-135m-instruct"}
"""Whose words samples are shown in where nobody named a model."""
NO_MODEL = {"architecture": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1}}
"""None that is meant: a tokenizer is trained on the data."""


def load_named(name: str, sets: Sequence[str], preparing: bool = False) -> LoadedRecipe:
    """The recipe of that name, or one that reads the data of that name as its columns say."""
    if not is_data(name):
        return load(name, sets)
    wish: dict[str, Any] = {
        "name": re.sub(r"[^a-z0-9._-]+", "-", Path(name).stem.lower()).strip("-._") or "data",
        "model": NO_MODEL if preparing else MODEL,
        "data": {"dataset_name": name},
    }
    if preparing:
        return made({**wish, "prepare": {}}, Path(name), sets)
    about = [each for each in sets if not each.startswith(("dpo.", "pretrain."))]
    stage = _stage_of(made({**wish, "sft": {}}, Path(name), about).recipe.data_of("sft"))
    return made({**wish, stage: {}}, Path(name), sets)


def is_data(name: str) -> bool:
    """Whether a name means data: a file by its suffix, a folder of such, an embedded set, a set on the hub."""
    path = Path(name)
    if path.suffix in SUFFIXES:
        if not path.exists():
            raise UsageError(f"{name}: there is no such file")
        return True
    if path.is_dir():
        return not (path / "recipe.yaml").exists() and (is_stored_set(path) or bool(files_in(path)))
    if path.exists() or name in shipped():
        return False
    return is_embedded(name) or (is_hub_name(name, Path()) and not path.parent.is_dir())


def _stage_of(data: Data) -> str:
    """What data without a recipe is for, by its columns."""
    if (Path(data.source) / MANIFEST).exists():
        return "pretrain"
    first = next(iter(read(data.source, data, Path())), None)
    columns = {data.columns.get(name, name) for name in first.values} if isinstance(first, Row) else set()
    if {"chosen", "rejected"} <= columns:
        return "dpo"
    return "pretrain" if data.text_column in columns and not {"prompt", "messages"} & columns else "sft"
