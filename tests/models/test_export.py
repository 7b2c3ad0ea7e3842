"""A model folder is written whole or not at all, and others may read it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import StorageError
from modelwright.models.export import save_model
from modelwright.models.text import load_model

SAVE_WITH_A_LIMIT = """
import resource, signal, sys
from pathlib import Path
from modelwright.errors import StorageError
from modelwright.models.export import save_model
from modelwright.models.text import load_model, load_tokenizer
base, target = Path(sys.argv[1]), Path(sys.argv[2])
model, tokenizer = load_model(base), load_tokenizer(base)
os_limit = int(sys.argv[3])
"""


def test_every_file_may_be_read_by_others(model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = load_model(model_folder)
    save_model(model, tokenizer, model.state_dict(), tmp_path / "model")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(modes)
    assert set(modes.values()) == {0o644}


def test_saving_again_replaces_what_was_there(model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    target, model = tmp_path / "model", load_model(model_folder)
    target.mkdir()
    (target / "old.txt").write_text("old", encoding="utf-8")
    save_model(model, tokenizer, model.state_dict(), target)
    assert not (target / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
