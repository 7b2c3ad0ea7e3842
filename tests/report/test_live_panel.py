"""A run is followed as a live panel by a person, as plain lines by a file, as JSON by a program."""

from __future__ import annotations

import io
import json
import os
import pty
from typing import Any

import pytest
from rich.live import Live

from modelwright.report.console import console_watcher, sparkline

STEP: dict[str, Any] = {
    "event": "step", "stage": "sft", "step": 1, "steps": 2, "epoch": 0.5, "loss": 2.5, "grad_norm": 1.0,
    "learning_rate": 1e-3, "health": "ok", "tokens_per_second": 100.0, "mfu": None, "eta_seconds": 5.0,
    "peak_memory_bytes": 10**9,
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"event": "stage_started", "stage": "sft"},
    {"event": "evaluation", "stage": "sft", "step": 0, "eval_loss": 3.0},
    STEP,
    {**STEP, "step": 2, "loss": None},
    {"event": "note", "message": "[bold]no markup[/bold]"},
    {"event": "done", "seconds": 3.0},
]


def test_a_file_gets_plain_lines() -> None:
    out = io.StringIO()
    with console_watcher("auto", out) as watch:
        for event in EVENTS:
            watch(event)
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[-1] == "note: [bold]no markup[/bold]"
    assert "\x1b" not in out.getvalue()


def test_a_program_gets_every_event_as_json() -> None:
    out = io.StringIO()
    with console_watcher("json", out) as watch:
        for event in EVENTS:
            watch(event)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == EVENTS


def test_a_person_gets_a_panel_and_the_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    update = Live.update  # draws in a thread, four times a second; here at once, however busy the machine is
    monkeypatch.setattr(Live, "update", lambda live, panel: update(live, panel, refresh=True))
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal, console_watcher("auto", terminal) as watch:
        for event in EVENTS:
            watch(event)
    shown = _read_all(ours)
    for text in ("step 1/2", "5 s left", "loss 2.5", "held-out 3 (best 3)", "100 tok/s", "1.0 GB", "Ctrl-C saves"):
        assert text in shown, text
    assert "[bold]no markup[/bold]" in shown
    assert "loss not finite" in shown


def _read_all(descriptor: int) -> str:
    read = b""
    try:
        while chunk := os.read(descriptor, 65536):
            read += chunk
    except OSError:  # how a closed terminal ends
        pass
    os.close(descriptor)
    return read.decode("utf-8", "replace")


def test_plain_stays_plain_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal, console_watcher("plain", terminal) as watch:
        watch(STEP)
    assert _read_all(ours).startswith("sft step 1/2  loss 2.5")


def test_a_curve_rises_and_falls_with_its_values() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 1.0, 2.0]) == "█▁▅"


def test_a_curve_without_height_is_flat() -> None:
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([2.0]) == "▁"
