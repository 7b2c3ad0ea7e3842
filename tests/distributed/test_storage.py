"""A full disk, a read-only one, a home that cannot be written: told in one letter, and nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import Rig, trace
from stranger import as_user, impossible
from tiny import tiny_recipe

SOURCE = Path(__file__).parents[2] / "src"
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and other user ids")
UNSUSPECTING = """
import shutil
from collections import namedtuple
usage = namedtuple("usage", "total used free")
shutil.disk_usage = lambda path: usage(1 << 40, 0, 1 << 40)
"""
"""Hides the full disk from the look before a save, so that the write itself meets it."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of a few megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@is_root
@pytest.mark.root
@pytest.mark.parametrize("first", ["", UNSUSPECTING], ids=["seen before", "met in the write"])
def test_a_full_disk_stops_with_78_harms_nothing_and_goes_on_with_room(
    rig: Rig, uninterrupted: Path, model_folder: Path, tmp_path: Path, small_disk: Path, first: str
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    command = ["run", str(recipe), "--set", f"output_dir={small_disk / 'run'}"]
    code, output = rig.run(command, tmp_path, first=first)
    assert code == 78, output
    assert "earlier ones are unharmed" in output
    assert "Traceback" not in output
    checkpoints = small_disk / "run/stages/sft/checkpoints"
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["step-00000003", "step-00000006"]
    subprocess.run(["mount", "-o", "remount,size=30m", str(small_disk)], check=True)
    code, output = rig.run(command, tmp_path)
    assert code == 0, output
    assert "sft goes on from step 6 of 12" in output
    assert trace(small_disk / "run") == trace(uninterrupted)


@is_root
@pytest.mark.root
def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(
    rig: Rig, model_folder: Path, tmp_path: Path, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    recipe = tiny_recipe(tmp_path, model_folder)
    began = time.monotonic()
    code, output = rig.run(["run", str(recipe), "--set", f"output_dir={small_disk / 'run'}"], tmp_path)
    assert code == 78, output
    assert "Read-only file system" in output and "step 1" not in output
    assert time.monotonic() - began < 5


@is_root
@pytest.mark.root
@pytest.mark.slow
def test_a_random_user_with_no_home_runs_the_whole_thing(model_folder: Path) -> None:
    """As on OpenShift: a user id nobody knows, group 0, and a home that cannot be written."""
    if why := impossible():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="nobody-"))
    try:
        shutil.copytree(model_folder, folder / "model")
        recipe = tiny_recipe(folder, folder / "model")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        where = ["env", "-i", "HOME=/", "PATH=/usr/bin:/bin", f"PYTHONPATH={SOURCE}", "PYTHONDONTWRITEBYTECODE=1"]
        command = [*as_user(1_000_680_000, 0), *where, sys.executable, "-m", "modelwright", "run", str(recipe)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert "sft step 12/12" in done.stdout
    finally:
        shutil.rmtree(folder)


@is_root
@pytest.mark.root
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_full_disk_ends_both_ranks_with_78_and_neither_waits(
    rig: Rig, model_folder: Path, tmp_path: Path, small_disk: Path, sharding: str
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, sharding=sharding, gradient_accumulation_steps=1)
    began = time.monotonic()
    command = ["run", str(recipe), "--set", f"output_dir={small_disk / 'run'}"]
    ranks = rig.run_ranks(command, tmp_path, 2, first=UNSUSPECTING)
    assert [code for code, _ in ranks] == [78, 78], ranks
    assert time.monotonic() - began < 30
