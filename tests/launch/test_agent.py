"""The interpreter that ranks are forked from is reached through a socket, whose name may have 107 characters."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FORKS = """
import multiprocessing, os, tempfile
from multiprocessing import forkserver
from modelwright.launch.agent import short_socket_dir
with short_socket_dir():
    forkserver.ensure_running()
ranks = multiprocessing.get_context("forkserver")
rank = ranks.Process(target=os._exit, args=(7,))
rank.start()
rank.join()
print(rank.exitcode, tempfile.gettempdir())
"""


@pytest.mark.parametrize("characters", [20, 75, 76, 180])
def test_ranks_are_forked_whatever_the_length_of_the_temporary_folder(characters: int) -> None:
    drawn = len("/tmp/12345678")
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="x" * (characters - drawn)))
    assert len(str(folder)) == characters
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", str(folder)]
    folder.rmdir()  # nothing is left in it
