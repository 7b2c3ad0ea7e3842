"""A real run in a real terminal (tmux): every number on the screen is the journal's at that moment.

    python -m pytest -s tests/report/test_terminal.py
    NIGHTLY=1 python -m pytest -s tests/report/test_terminal.py

The second also records quickstart, five minutes. The screen is read many times a second. What it shows must be what
some beginning of the journal says, no later than what is written and never earlier than on the screen before; where the
run is held, it must be the whole journal.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from modelwright.report.console import format_event
from modelwright.runs import journal
from tiny import tiny_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
NIGHTLY = bool(os.environ.get("NIGHTLY"))
START = "import sys; {first}; from modelwright.__main__ import main; main()"
HELD = "from tests.faults.injections import hold_after_step as hold, slow_steps as slow; slow(0.1); hold(7, 'go')"
"""Steps long enough to be seen, and a stop after the seventh."""
UNITS = {"s": 1, "min": 60, "h": 3600}


@dataclass
class Terminal:
    """A terminal of fixed size in which one command runs."""

    width: int
    height: int
    folder: Path
    name: str = field(default_factory=lambda: f"modelwright-{uuid.uuid4().hex[:8]}")

    def start(self, command: list[str]) -> None:
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # pytest's readline sets COLUMNS and LINES where it has no terminal
        unset = ["-u", "COLUMNS", "-u", "LINES"]
        words = ["env", *unset, *(f"{name}={value}" for name, value in environment.items()), *command]
        size = ["-x", str(self.width), "-y", str(self.height)]
        self.tmux("-f", os.devnull, "new-session", "-d", *size, "-c", str(self.folder), f"{shlex.join(words)}; cat")

    def tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self.name, *words], capture_output=True, text=True, check=True)
        return done.stdout

    def screen(self) -> list[str]:
        return self.tmux("capture-pane", "-p").splitlines()

    def is_done(self) -> bool:
        """Whether the summary is on the screen, which is printed last."""
        return "next:" in self.screen()


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[[int, int], Terminal]]:
    if not shutil.which("tmux"):
        pytest.skip("no tmux on this machine: apt-get install tmux")
    opened: list[Terminal] = []

    def open_one(width: int, height: int) -> Terminal:
        opened.append(Terminal(width, height, tmp_path))
        return opened[-1]

    yield open_one
    for terminal in opened:
        subprocess.run(["tmux", "-L", terminal.name, "kill-server"], check=False)


def panel_numbers(events: list[dict[str, Any]]) -> dict[str, str]:
    """What the panel has to show after these events, without the times that run."""
    stage = [event for event in events if event["event"] != "span"]
    last_load = max((n for n, event in enumerate(stage) if event["event"] == "loading"), default=0)
    stage = stage[last_load:]
    steps = [event for event in stage if event["event"] == "step"]
    losses = [
        event["eval_loss"] for event in stage if event["event"] == "evaluation" and event["eval_loss"] is not None
    ]
    if not steps:
        return {}
    step = steps[-1]
    shown = {
        "step": f"{step['step']}/{step['steps']}",
        "epoch": f"{step['epoch']:.2f}",
        "loss": f"{step['loss']:.4g}",
        "lr": f"{step['learning_rate']:.2e}",
        "grad_norm": f"{step['grad_norm']:.4g}",
        "memory": f"{step['peak_memory_bytes'] / 1e9:.1f} GB",
    }
    if step["tokens_per_second"]:
        shown["speed"] = f"{step['tokens_per_second']:,.0f}"
    if losses:
        shown["held-out"] = f"{losses[-1]:.4g} (best {min(losses):.4g})"
    return shown


PATTERNS = {
    "step": r"step (\d+/\d+)", "epoch": r"epoch ([\d.]+)", "loss": r"│ loss (\S+)", "lr": r"lr (\S+)",
    "grad_norm": r"grad_norm (\S+)", "memory": r"memory ([\d.]+ GB)", "speed": r"([\d,]+) tok/s",
    "held-out": r"held-out (\S+ \(best \S+\))",
}  # fmt: skip


def seconds(text: str) -> float:
    """`3 min 20 s` in seconds."""
    return sum(float(count) * UNITS[unit] for count, unit in re.findall(r"([\d.]+) (min|s|h)", text))


def squeeze(text: str) -> str:
    return re.sub(r"\s", "", text)


def printed_line(event: dict[str, Any]) -> str:
    """What is printed of an event above the panel, without spaces and line breaks."""
    return "" if event["event"] in ("step", "evaluating") else squeeze(format_event(event) or "")


@dataclass
class Recording:
    """Compares one screen after another with the journal."""

    terminal: Terminal
    journal: Path
    started: float = field(default_factory=time.time)
    frames: int = 0
    """Screens with a whole panel."""
    shown: list[str] = field(default_factory=list)
    """Each different screen."""
    num_events: int = 0
    """The least number of events that the last screen had to know."""
    lag_seconds: float = 0.0
    """The longest time for which a screen had not shown an event yet."""

    def events(self) -> list[dict[str, Any]]:
        return list(journal.read(self.journal)) if self.journal.exists() else []

    def compare(self) -> list[str] | None:
        """Compare the screen of this moment; None where there is no whole panel on it."""
        before, lines = time.time(), self.terminal.screen()
        now, events = time.time(), self.events()
        tops = [number for number, line in enumerate(lines) if line.startswith("╭─")]
        bottoms = [number for number, line in enumerate(lines) if line.startswith("╰─")]
        if not tops or not bottoms or bottoms[-1] < tops[-1]:  # while it is drawn again
            return None
        assert len(tops) == len(bottoms) == 1, "one panel:\n" + "\n".join(lines)
        panel, above = lines[tops[0] : bottoms[0] + 1], lines[: tops[0]]
        width = min(80, self.terminal.width)
        assert {len(line) for line in panel} == {width}, "no line of the panel breaks:\n" + "\n".join(panel)
        text = "\n".join(panel)
        numbers = {name: match[1] for name, pattern in PATTERNS.items() if (match := re.search(pattern, text))}
        known = [count for count in range(self.num_events, len(events) + 1) if panel_numbers(events[:count]) == numbers]
        assert known, f"the journal never said {numbers} after its event {self.num_events}:\n" + "\n".join(lines)
        self.num_events = known[0]
        self._compare_lines(above, events, known)
        self._compare_times(panel, events[: known[-1]], now)
        missed = [event["time"] for event in events[known[-1] :] if event["event"] in ("step", "evaluation")]
        self.lag_seconds = max(self.lag_seconds, before - missed[0] if missed else 0.0)
        self.frames += 1
        if text not in self.shown[-1:]:
            self.shown.append(text)
        return panel

    def _compare_lines(self, above: list[str], events: list[dict[str, Any]], known: list[int]) -> None:
        """The lines above the panel are the journal's, up to the event that the panel shows or the one before."""
        screen = squeeze("".join(above))
        printed = [
            squeeze(format_event(event) or "") if event["event"] not in ("step", "evaluating") else ""
            for event in events
        ]
        possible = {"".join(printed[:count]) for count in range(max(0, known[0] - 1), known[-1] + 1)}
        assert any(lines.endswith(screen) for lines in possible), f"not of the journal:\n{chr(10).join(above)}"

    def _compare_times(self, panel: list[str], events: list[dict[str, Any]], now: float) -> None:
        """What remains was counted down from the step's estimate; what has passed began after an event."""
        text = "\n".join(panel)
        if left := re.search(r"epoch [\d.]+  (.+?) left", text):
            step = next(event for event in reversed(events) if event["event"] == "step")
            assert step["step"] < step["steps"]
            assert step["eta_seconds"] - (now - step["time"]) - 1 <= seconds(left[1]) <= step["eta_seconds"] + 1, text
        if passed := re.search(r"  (\d[^│]*? s) +│$|│ (\d.*? s) since step", panel[-2]):
            is_before_run = "loading libraries" in text  # the first event comes after
            began = self.started if is_before_run else events[0]["time"]
            assert seconds(passed[1] or passed[2]) <= now - began + 1

    def record_until(self, done: Callable[[], bool], limit: float = 800.0) -> None:
        deadline = time.monotonic() + limit
        while not done():
            assert time.monotonic() < deadline, "\n".join(self.terminal.screen())
            self.compare()
            time.sleep(0.03)

    def summary(self) -> str:
        size = f"{self.terminal.width}x{self.terminal.height}"
        return f"{size}: {self.frames} screens, {len(self.shown)} different, at most {self.lag_seconds:.2f} s behind"


@pytest.mark.parametrize(("width", "height"), [(80, 24), *([(100, 30), (60, 20)] if NIGHTLY else [])])
def test_every_number_on_the_screen_is_the_journal_s(
    open_terminal: Callable[[int, int], Terminal], model_folder: Path, tmp_path: Path, width: int, height: int
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=16, eval_steps=3, gradient_accumulation_steps=1)
    terminal = open_terminal(width, height)
    terminal.start([sys.executable, "-c", START.format(first=HELD), "run", str(recipe)])
    recording = Recording(terminal, tmp_path / "run" / "journal.jsonl")

    def is_held() -> bool:
        """The journal's last step is on the screen, and the time since then is counted."""
        last = [event for event in recording.events() if event["event"] == "step"][-1:]
        shown = recording.shown[-1] if recording.shown else ""
        return (
            bool(last) and last[0]["step"] == 7 and "step 7/16" in shown and re.search(r"[2-9] s since step 7", shown)
        )

    recording.record_until(is_held)
    (tmp_path / "go").touch()
    recording.record_until(terminal.is_done)
    print(recording.summary())
    steps = {match[1] for text in recording.shown if (match := re.search(r"step (\d+)/", text))}
    assert len(steps) >= 2 and "7" in steps, "steps were seen"
    _compare_the_end(terminal, recording)


@pytest.mark.skipif(not NIGHTLY, reason="five minutes: NIGHTLY=1")
@pytest.mark.timeout(1800)
def test_every_number_of_quickstart_is_the_journal_s(
    open_terminal: Callable[[int, int], Terminal], tmp_path: Path
) -> None:
    terminal = open_terminal(100, 30)
    terminal.start([sys.executable, "-m", "modelwright", "run", "quickstart", "--output", "run"])
    recording = Recording(terminal, tmp_path / "run" / "journal.jsonl")
    recording.record_until(terminal.is_done, limit=1700)
    print(recording.summary())
    assert any("held-out" in text for text in recording.shown)
    _compare_the_end(terminal, recording)


def _compare_the_end(terminal: Terminal, recording: Recording) -> None:
    """After the run the panel is gone, and the summary has the journal's last numbers."""
    screen = "\n".join(terminal.tmux("capture-pane", "-p", "-S", "-").splitlines())
    assert "╭─" not in screen and "s left" not in screen
    events = recording.events()
    losses = [event["eval_loss"] for event in events if event["event"] == "evaluation"]
    assert f"held-out loss    {losses[0]:.4g} → {losses[-1]:.4g}" in screen
    printed = "".join(
        squeeze(format_event(event) or "") for event in events if event["event"] not in ("step", "evaluating")
    )
    assert squeeze(screen.partition("──")[0]) == printed, "every event stands above, once and in order"
