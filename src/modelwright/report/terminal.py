"""Follow a run in the terminal: a live panel where a person watches, plain lines where a file does."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from modelwright.report.lines import duration, line_of, number, unit_of
from modelwright.runs.journal import Event, Watcher

BARS = "▁▂▃▄▅▆▇█"
LogFormat = Literal["auto", "plain", "json"]


@contextmanager
def following(log_format: LogFormat, out: TextIO | None = None) -> Iterator[Watcher]:
    """A watcher for the journal that suits whoever reads the output."""
    stream = out or sys.stdout
    if log_format == "json":
        yield lambda event: _print(json.dumps(event, ensure_ascii=False), stream)
    elif log_format == "auto" and stream.isatty():
        with _Panel(stream) as panel:
            yield panel.show
    else:
        yield lambda event: _print(line_of(event), stream)


def sparkline(values: list[float]) -> str:
    """A curve in eight heights of bar."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[min(7, int((value - low) / span * 8))] for value in values)


def _print(line: str | None, stream: TextIO) -> None:
    if line is None:
        return
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:  # as with `| head`: the reader has enough, the run goes on without one
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Panel:
    """Steps move a panel of a few lines; everything else is printed above it and stays."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._losses: deque[float] = deque(maxlen=32)  # with both losses beside it, as much as a line holds
        self._held_out: list[float] = []

    def __enter__(self) -> _Panel:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def show(self, event: Event) -> None:
        """Draw a step, or print what happened above the panel."""
        if event["event"] == "evaluation" and event["eval_loss"] is not None:
            self._held_out.append(event["eval_loss"])
        if event["event"] == "step":
            if event["loss"] is not None:
                self._losses.append(event["loss"])
            self._live.update(self._draw(event))
        elif line := line_of(event):
            self._console.print(line, markup=False)

    def _draw(self, event: Event) -> Any:
        from rich.align import Align
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        left, speed, memory = event.get("eta_seconds"), event.get("tokens_per_second"), event.get("memory_bytes")
        head = f"step {event['step']}/{event['steps']}  epoch {event['epoch']:.2f}"
        head += f"  {duration(left)} left" if left is not None else ""
        held_out = (
            f"  held-out {number(self._held_out[-1])} (best {number(min(self._held_out))})" if self._held_out else ""
        )
        curve = sparkline(list(self._losses)) if self._losses else ""
        facts = f"lr {event['learning_rate']:.2e}  grad {number(event['grad_norm'])}"
        facts += f"  {speed:,.0f} {unit_of(event)}/s" if speed else ""
        facts += f"  mfu {event['mfu']:.1%}" if event.get("mfu") else ""
        facts += f"  memory {memory / 1e9:.1f} GB" if memory else ""
        lines = Group(
            Text(head),
            Align.left(ProgressBar(total=event["steps"], completed=event["step"], width=60)),  # a bar ends no line
            Text(f"loss {number(event['loss'])} {curve}{held_out}"),
            Text(facts, style="dim"),
        )
        return Panel(lines, title=f"{event['stage']}", title_align="left", width=80, subtitle="Ctrl-C saves and stops")
