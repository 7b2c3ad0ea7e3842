"""torchrun in a pod ends as its ranks ended, so that the cluster can tell a closed gate from a lost node."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.launch.torchrun import shell_exit_code

SOURCE = Path(__file__).parents[2] / "src"


def test_a_pod_ends_with_the_code_of_the_rank_that_failed() -> None:
    ranks = ["--standalone", "--nproc-per-node=2", "--no-python", "sh", "-c", 'test "$RANK" = 0 && exit 3; sleep 60']
    done = subprocess.run(
        [sys.executable, "-m", "modelwright.launch.torchrun", *ranks],
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(("status", "code"), [(0, 0), (76, 76), (-signal.SIGKILL, 137)])
def test_a_signal_becomes_the_exit_code_that_a_shell_gives(status: int, code: int) -> None:
    assert shell_exit_code(status) == code
