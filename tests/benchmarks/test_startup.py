"""The command whose start is measured is ended as soon as it has shown enough, whoever ends the measurement."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from benchmarks import startup

STAND_IN = """
import json, os, signal, sys, time
parent, recipe = int(sys.argv[1]), json.load(open(sys.argv[3]))
with open(PIDS, "a") as pids:
    print(os.getpid(), file=pids)
if recipe["name"] == CUT:
    os.kill(parent, signal.SIGTERM)
    time.sleep(600)
rates = {"step_seconds": 1.0, "tokens_per_second": 5.0, "data_wait_fraction": 0.003}
step = lambda n: {"event": "step", "step": n, **rates}
saving = lambda n: {"event": "checkpoint_started", "step": n, "seconds": 0.1}
saved = lambda n: {"event": "checkpoint_saved", "step": n, "seconds": 0.9, "blocked_seconds": 0.0}
events = [{"event": "run"}, step(1), step(2), saving(2), saved(2), step(3), step(4)]
events += [saving(4), saved(4), step(5), step(6)]
os.makedirs(recipe["output_dir"])
with open(recipe["output_dir"] + "/journal.jsonl", "w") as journal:
    for second, event in enumerate(events):
        print(json.dumps({"time": time.time() + second, **event}), file=journal, flush=True)
time.sleep(600)
"""
"""In place of `modelwright run`: logs a few steps and two saves, and would go on for ten minutes."""


@pytest.mark.parametrize("cut", ["", "warm"])
def test_the_result_is_printed_and_no_process_is_left_running(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(
        startup, "RUN_WITH_PDEATHSIG", STAND_IN.replace("PIDS", repr(str(pids))).replace("CUT", repr(cut))
    )
    monkeypatch.setattr(startup, "_write_inputs", lambda folder, work: None)
    before = signal.getsignal(signal.SIGTERM)
    figures = startup.measure_first_step((), 2, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert figures["cold"]["first_step_seconds"] == 1.0
    if not cut:
        assert [save["step"] for save in figures["saves"]] == [2, 4]
    stderr, table = capsys.readouterr().err, "\n".join(startup.first_step_lines(figures))
    assert "cold: the first step is done after" in stderr
    assert ("warm: save at step 4" in stderr) is not bool(cut)
    assert ("then 5 tokens/s in the command itself, 0.30% of the time waiting for rows" in table) is not bool(cut)
    assert ("warm start: cut short before its first step" in table) is bool(cut)
    assert list(tmp_path.iterdir()) == [pids]
