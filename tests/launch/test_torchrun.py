"""torchrun in a pod ends as its ranks ended, so that the cluster can tell a closed gate from a lost node."""

from __future__ import annotations

import signal
import socket
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


@pytest.mark.parametrize(("node", "awaited"), [("0", "node 1"), ("1", "node 0 at 127.0.0.1:")])
def test_a_pod_that_waits_says_for_whom_and_obeys_sigterm(node: str, awaited: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program = "import sys; from modelwright.launch import torchrun as t; t.WAIT_LOG_INTERVAL = 0.5; sys.exit(t.main())"
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": node, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    pod = subprocess.Popen(
        [sys.executable, "-c", program, "--no-python", "sleep", "60"],
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert pod.stderr is not None
    line = next((line for line in pod.stderr if f"node {node} is waiting for {awaited}" in line), None)
    assert line is not None
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=120) == 75
