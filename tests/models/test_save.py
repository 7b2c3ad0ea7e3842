"""A model folder is written atomically, and other users can read it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import StorageError
from modelwright.models.pretrained import load_model
from modelwright.models.save import save_model


def test_every_file_may_be_read_by_others(model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = load_model(model_folder)
    save_model(model, tokenizer, model.state_dict(), tmp_path / "model")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(modes)
    assert set(modes.values()) == {0o644}


def test_the_configuration_that_was_loaded_is_the_one_that_is_saved(
    model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    model = load_model(model_folder)
    save_model(model, tokenizer, model.state_dict(), tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (model_folder / name).read_bytes(), name


def test_saving_again_replaces_what_was_there(model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    target, model = tmp_path / "model", load_model(model_folder)
    target.mkdir()
    (target / "old.txt").write_text("old", encoding="utf-8")
    save_model(model, tokenizer, model.state_dict(), target)
    assert not (target / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
def test_a_full_disk_is_reported_and_the_earlier_model_stays(
    model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        (disk / "model").mkdir()
        (disk / "model" / "config.json").write_text("{}", encoding="utf-8")
        model = load_model(model_folder)
        with pytest.raises(StorageError, match=r"the model could not be written \(.*\); the checkpoints are unharmed"):
            save_model(model, tokenizer, model.state_dict(), disk / "model")
        assert [path.name for path in disk.iterdir()] == ["model"]
        assert (disk / "model" / "config.json").read_text(encoding="utf-8") == "{}"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
