"""A full disk under two ranks; under one it is in tests/faults/test_reliability.py."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer
from tiny import tiny_recipe

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
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount_point)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode().strip()}")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)


@is_root
@pytest.mark.root
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_full_disk_ends_both_ranks_with_78_and_neither_waits(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, small_disk: Path, sharding: str
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, distributed_strategy=sharding, gradient_accumulation_steps=1)
    began = time.monotonic()
    command = ["run", str(recipe), "--set", f"output_dir={small_disk / 'run'}"]
    ranks = fork_server.run_ranks(command, tmp_path, 2, first=UNSUSPECTING)
    assert [code for code, _ in ranks] == [78, 78], ranks
    assert time.monotonic() - began < 240, "left to itself one would wait for ten minutes"
