"""A signal while answers are sampled is obeyed within five seconds, by one process and by ranks; a rerun finishes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkedProcess, ForkServer
from tiny import tiny_recipe

ANNOUNCE = """
from pathlib import Path
from modelwright.serve.decoder import Decoder
step, calls = Decoder.step, []
def announced(self):
    calls.append(1)
    if len(calls) == 20:
        Path("sampling").touch()
    return step(self)
Decoder.step = announced
"""
"""Leaves a file once 20 tokens are sampled."""
STOP_SECONDS = 5.0
"""Of processor time: a busy machine may take longer by the clock."""


def cpu_seconds(process: ForkedProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_ended(process: ForkedProcess) -> float:
    """Processor time of a process that has ended and was not waited for yet."""
    deadline = time.monotonic() + 60
    while ") Z " not in Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, f"still running: {process.output}"
        time.sleep(0.02)
    return cpu_seconds(process)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_answers_are_sampled_is_obeyed_within_five_seconds(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200_000}), encoding="utf-8")
    recipe = tiny_recipe(tmp_path, model, max_steps=2, global_batch_size=4, gradient_accumulation_steps=1)
    command = ["run", str(recipe), "--set"]
    processes = fork_server.start_ranks([*command, "compare.max_new_tokens=100000"], tmp_path, ranks, ANNOUNCE)
    deadline = time.monotonic() + 240
    while not (tmp_path / "sampling").exists():
        assert time.monotonic() < deadline, processes[0].output
        time.sleep(0.02)
    used = [cpu_seconds(process) for process in processes]
    for process in processes:
        os.kill(process.pid, number)
    took = [wait_until_ended(process) - before for process, before in zip(processes, used, strict=True)]
    assert max(took) < STOP_SECONDS
    assert [process.wait() for process in processes] == [75] * ranks, processes[0].output
    assert "rerun the same command to resume" in processes[0].output
    code, output = fork_server.run([*command, "compare.max_new_tokens=4"], tmp_path)
    assert code == 0, output
    assert (tmp_path / "run/demo_outputs/before_after.json").exists()
