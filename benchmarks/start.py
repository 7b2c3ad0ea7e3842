"""What a first answer costs: CPU-seconds of help and of a typing mistake, beside TRL's own command."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

TRIES = 3
OURS_MISTYPED = """\
name: typo
model: {model_name_or_path: smollm2-135m-instruct}
data: {dataset_name: field-guide, columns: {question: prompt, answer: completion}}
sft: {learning_rat: 1e-4}
"""
MISTAKE = "learning_rat"
# without use_cpu a machine without a GPU is answered about that, and the mistake is never seen
THEIRS_MISTYPED = "model_name_or_path: some/model\ndataset_name: some/data\nuse_cpu: true\nlearning_rat: 1e-4\n"


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
                figures[name]["ratio"] = _ratio(**figures[name], mistake=MISTAKE if name == "typo" else "")
    return figures


def cost(command: Sequence[str]) -> dict[str, Any]:
    """Run a command a few times and take the least CPU time, since noise only ever adds; and its last words."""
    least = float("inf")
    for _ in range(TRIES):
        before = _children_seconds()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        least = min(least, _children_seconds() - before)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [""]
    last = said[-1].replace(f"{tempfile.gettempdir()}/", "").strip()
    return {"cpu_seconds": round(least, 3), "exit_code": done.returncode, "last_line": last}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    return [f"{name}: modelwright {found['modelwright']['cpu_seconds']:.2f} CPU-s{_beside(found)}"
            for name, found in figures.items()]  # fmt: skip


def _beside(found: dict[str, Any]) -> str:
    peer = found.get("trl")
    if peer is None:
        return "; trl is not installed, so there is nothing to hold it against"
    if found["ratio"] is None:
        return f"; trl sft said something else ({peer['last_line']}), so the two cannot be held against each other"
    return f", trl sft {peer['cpu_seconds']:.2f} CPU-s, {found['ratio']:.0f} times as much"


def _ratio(modelwright: dict[str, Any], trl: dict[str, Any], mistake: str) -> float | None:
    """How many times as much theirs takes; None where one of them did not answer the mistake."""
    answered = all(mistake in side["last_line"] for side in (modelwright, trl))
    return round(trl["cpu_seconds"] / modelwright["cpu_seconds"], 1) if answered else None


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(save: common.Save = False, as_json: common.Json = False) -> None:
    """CPU-seconds of help and of a typing mistake, beside the command of TRL."""
    common.report("start", measure, lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
