"""What the benchmarks share: results with their date, commit and machine, and the command line."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from modelwright.errors import ModelwrightError
from modelwright.launch.supervisor import python_path
from modelwright.runs.caches import prepare_environment
from modelwright.runs.folder import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
PACKAGES = ("modelwright", "torch", "transformers", "trl", "torchtitan")
Save = Annotated[bool, typer.Option("--save", help="Write the result to benchmarks/results.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def run(main: Callable[..., None]) -> None:
    """Run a benchmark's `main` as a command; what is wrong with its options is printed without a traceback."""
    prepare_environment()
    try:
        typer.run(main)
    except ModelwrightError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def report(
    name: str,
    measure: Callable[[], dict[str, Any]],
    lines: Callable[[dict[str, Any]], Iterable[str]],
    save_result: bool,
    as_json: bool,
    merge: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Measure, print, and save; `merge` puts the figures among those that were saved before."""
    with redirect_stdout(sys.stderr):  # peers print while they train; the result is the only object on stdout
        figures = measure()
    measured = result(name, figures)
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(lines(figures)))
    if save_result:
        measured["figures"] = merge(figures) if merge else figures
        print(f"saved to {save(measured)}", file=sys.stderr)


def result(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """One measurement, ready to be kept."""
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "figures": figures,
    }


def kept(name: str) -> dict[str, Any] | None:
    """What was kept under a name before, where there is something."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    found: dict[str, Any] | None = read_json(path) if path.exists() else None
    return found


def save(measured: dict[str, Any]) -> Path:
    """Write a result to benchmarks/results/NAME.json."""
    path = ROOT / "benchmarks" / "results" / f"{measured['name']}.json"
    write_json(path, measured)
    return path


def installed(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """What computed; the machine's own name is left out, since it tells nobody anything."""
    return {
        "architecture": platform.machine(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
    }


def cpu_model() -> str | None:
    """What the processor calls itself (on ARM only lscpu knows)."""
    lines = _output(["lscpu"]).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), None)


def commit() -> str | None:
    """The commit of the checkout, with ``-dirty`` where files differ from it; None outside of one."""
    return _output(["git", "describe", "--always", "--dirty", "--exclude=*"], ROOT).strip() or None


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: this very package, one thread, no hub."""
    paths = os.pathsep.join([python_path(), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _output(command: list[str], folder: Path | None = None) -> str:
    """What a command prints; nothing where it fails or is not there."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def children_of(pid: int) -> list[int]:
    """Every process below one, by the kernel's own list."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            below = [int(word) for word in tasks.read_text(encoding="utf-8").split()]
            found += below
            waiting += below
    return found
