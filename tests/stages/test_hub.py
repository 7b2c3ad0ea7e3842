"""A hub id means one commit for a run, even if the hub's main branch moves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tiny import tiny_recipe

FIRST, LATER = "a" * 40, "b" * 40


def test_a_hub_id_is_pinned_to_its_commit_at_the_first_start(model_folder: Path, tmp_path: Path) -> None:
    """The real hub client, offline, over a cache laid out as it lays one out; no hub is asked."""
    repository = tmp_path / "hf/hub/models--someone--tiny"
    for commit in (FIRST, LATER):
        shutil.copytree(model_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    recipe = tiny_recipe(tmp_path / "home", model_folder, max_steps=2)
    command = [
        sys.executable,
        "-m",
        "modelwright",
        "run",
        str(recipe),
        "--set",
        "model.model_name_or_path=someone/tiny",
    ]
    environ = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    for now in (FIRST, LATER):
        (repository / "refs/main").write_text(now)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"revision: {FIRST}" in (tmp_path / "home/run/recipe.yaml").read_text()
    assert "already complete and verified" in done.stdout
