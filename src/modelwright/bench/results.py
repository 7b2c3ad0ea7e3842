"""Figures with what they stand on: the day, the commit and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from modelwright.runs.folder import read_json, write_json

PACKAGES = ("modelwright", "torch", "transformers", "trl", "torchtitan")


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
    path = (checkout() or Path()) / "bench" / "results" / f"{name}.json"
    found: dict[str, Any] | None = read_json(path) if path.exists() else None
    return found


def save(measured: dict[str, Any]) -> Path:
    """Keep a result as bench/results/NAME.json, in the checkout where there is one, else here."""
    path = (checkout() or Path()) / "bench" / "results" / f"{measured['name']}.json"
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
    folder = checkout()
    return (
        _output(["git", "describe", "--always", "--dirty", "--exclude=*"], folder).strip() or None if folder else None
    )


def checkout() -> Path | None:
    """The repository this package runs from, where it does."""
    package = Path(__file__).resolve().parents[1]
    return package.parents[1] if package.parent.name == "src" else None


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
