"""A run is followed as a live panel by a person, as plain lines by a file, as JSON by a program."""

from __future__ import annotations

import io
import json
import os
import pty
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from modelwright.report import console
from modelwright.report.console import _LivePanel, console_watcher, sparkline
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Journal

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


class Clock:
    """A clock that a test sets, in place of the module time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(console, "time", clock := Clock())
    return clock


def drawn(panel: _LivePanel) -> str:
    """What the panel shows at this moment."""
    out = io.StringIO()
    Console(file=out, width=100, highlight=False).print(panel)
    return out.getvalue()


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"event": "evaluation", "stage": "sft", "step": step, "eval_loss": loss}


def test_the_panel_shows_a_held_out_loss_as_soon_as_it_is_measured(clock: Clock) -> None:
    panel = _LivePanel(io.StringIO())
    for event in (evaluation(0, 3.89), {**STEP, "step": 2}, evaluation(2, 2.8)):
        panel.on_event(event)
    assert "held-out 2.8 (best 2.8)" in drawn(panel)


def test_the_panel_forgets_the_losses_of_the_stage_before(clock: Clock) -> None:
    panel = _LivePanel(io.StringIO())
    for event in (evaluation(0, 0.1), {"event": "loading", "stage": "dpo", "model": "m"}, evaluation(0, 0.7), STEP):
        panel.on_event(event)
    assert "held-out 0.7 (best 0.7)" in drawn(panel)


def test_the_panel_of_a_resumed_run_knows_the_best_loss_of_all_its_starts(clock: Clock, tmp_path: Path) -> None:
    journal = Journal(RunFolder(tmp_path).journal, (panel := _LivePanel(io.StringIO())).on_event)
    first = {"recipe": "x", "folder": str(tmp_path), "stages": ["sft"]}
    for event in (evaluation(0, 3.5), evaluation(1, 1.5), evaluation(2, 0.5)):  # the third is after the checkpoint
        Journal(RunFolder(tmp_path).journal).add(**event)
    journal.add("run", **first)
    journal.add("loading", stage="sft", model="m")
    journal.add("resumed", stage="sft", step=1, steps=2)
    panel.on_event({**STEP, "step": 2})
    assert "held-out 1.5 (best 1.5)" in drawn(panel)
    panel.on_event(evaluation(2, 2.5))
    assert "held-out 2.5 (best 1.5)" in drawn(panel)


def test_after_the_last_step_the_panel_names_what_is_done_instead_of_0_s_left(clock: Clock) -> None:
    panel = _LivePanel(io.StringIO())
    panel.on_event({**STEP, "step": 2, "eta_seconds": 0.0})
    clock.now = 70
    shown = drawn(panel)
    assert " left" not in shown and "measuring and saving  1 min 10 s" in shown
    panel.on_event({"event": "sampling", "stage": "sft", "questions": 5})
    clock.now = 75
    assert "answering 5 prompts before and after training  5 s" in drawn(panel)


def test_the_panel_moves_inside_a_long_step_and_a_long_evaluation(clock: Clock) -> None:
    panel = _LivePanel(io.StringIO())
    panel.on_event({**STEP, "eta_seconds": 100.0})
    assert "1 min 40 s left" in drawn(panel) and "since step" not in drawn(panel)
    clock.now = 30
    assert "1 min 10 s left" in drawn(panel) and "30 s since step 1" in drawn(panel)
    panel.on_event({"event": "evaluating", "stage": "sft", "step": 1, "fraction": 0.25})
    clock.now = 40
    panel.on_event({"event": "evaluating", "stage": "sft", "step": 1, "fraction": 0.5})
    clock.now = 42
    assert "measuring the held-out rows, 50% done  12 s" in drawn(panel)


def test_the_panel_shows_that_a_model_is_loaded(clock: Clock) -> None:
    panel = _LivePanel(io.StringIO())
    assert drawn(panel).strip() == ""
    panel.on_event({"event": "loading", "stage": "sft", "model": "m"})
    clock.now = 9
    assert "loading model and data  9 s" in drawn(panel)
