"""What a first answer costs: CPU-seconds of help and of a typing mistake, beside TRL's own command."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRIES = 3
OURS_MISTYPED = """\
name: typo
model: {model_name_or_path: smollm2-135m-instruct}
data: {dataset_name: field-guide, columns: {question: prompt, answer: completion}}
sft: {learning_rat: 1e-4}
"""
THEIRS_MISTYPED = "model_name_or_path: some/model\ndataset_name: some/data\nlearning_rat: 1e-4\n"


def measure() -> dict[str, Any]:
    """Both programs in the same two situations; the ratio says how many times as much theirs takes."""
    ours, theirs = [sys.executable, "-m", "modelwright"], [str(Path(sys.executable).with_name("trl")), "sft"]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        our_file, their_file = Path(place) / "ours.yaml", Path(place) / "theirs.yaml"
        our_file.write_text(OURS_MISTYPED, encoding="utf-8")
        their_file.write_text(THEIRS_MISTYPED, encoding="utf-8")
        for name, us, them in (
            ("help", [*ours, "--help"], [*theirs, "--help"]),
            ("typo", [*ours, "check", str(our_file)], [*theirs, "--config", str(their_file)]),
        ):
            figures[name] = {"modelwright": cost(us)}
            if Path(theirs[0]).exists():
                figures[name]["trl"] = cost(them)
                pair = [figures[name][side]["cpu_seconds"] for side in ("trl", "modelwright")]
                figures[name]["ratio"] = round(pair[0] / pair[1], 1)
    return figures


def cost(command: Sequence[str]) -> dict[str, Any]:
    """Run a command a few times and take the least CPU time, since noise only ever adds; and its last words."""
    least = float("inf")
    for _ in range(TRIES):
        before = _children_seconds()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        least = min(least, _children_seconds() - before)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [""]
    return {"cpu_seconds": round(least, 3), "exit_code": done.returncode, "last_line": said[-1].strip()}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    told = []
    for name, found in figures.items():
        line = f"{name}: modelwright {found['modelwright']['cpu_seconds']:.2f} CPU-s"
        peer = found.get("trl")
        beside = f", trl sft {peer['cpu_seconds']:.2f} CPU-s, {found['ratio']:.0f} times as much" if peer else ""
        told.append(line + (beside or "; trl is not installed, so there is nothing to hold it against"))
    return told


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
