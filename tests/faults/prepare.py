"""Data preparation under faults: SIGKILL at random moments, and different numbers of workers, with equal output."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common, data
from modelwright.runs.folder import hash_file

KILLS = 20


def measure(megabytes: float = 100.0) -> dict[str, Any]:
    """Kills, and 1, 2 and 4 workers, on some megabytes of text."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "raw.jsonl"
        data.write_jsonl(data.read_corpus(megabytes), source, megabytes)
        return _trials(Path(name), source, megabytes)


def _trials(folder: Path, source: Path, megabytes: float) -> dict[str, Any]:
    reference = prepare(folder / "whole", source, 1)
    workers = {1: True} | {count: prepare(folder / f"workers-{count}", source, count)["checksums"]
                           == reference["checksums"] for count in (2, 4)}  # fmt: skip
    return {
        "megabytes": megabytes,
        "cpu_seconds": reference["cpu_seconds"],
        "mb_per_cpu_s": round(megabytes / reference["cpu_seconds"], 2),
        "files_compared": len(reference["checksums"]),
        "workers_equal": workers,
        **_kill_repeatedly(folder / "killed", source, reference),
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    return [
        f"{figures['megabytes']:.0f} MB prepared in {figures['cpu_seconds']} CPU-s",
        f"workers 1, 2 and 4 leave the same {figures['files_compared']} files: {figures['workers_equal']}",
        f"{figures['kills']} kills in {figures['kill_rounds']} rounds, {figures['rounds_equal']} of them end "
        "with the same files",
    ]


def prepare(folder: Path, source: Path, workers: int) -> dict[str, Any]:
    """Prepare in processes of their own: checksums and CPU-seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = _start(folder, source, workers)
    if process.wait():
        raise RuntimeError(f"the preparation ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"checksums": _checksums(folder), "cpu_seconds": round(seconds, 1)}


def _start(folder: Path, source: Path, workers: int) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder.parent / f"{folder.name}.yaml"
    recipe.write_text(data.PREPARE_RECIPE.format(source=source, workers=workers), encoding="utf-8")
    command = [sys.executable, "-m", "modelwright", "data", "prepare", str(recipe), "--output", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def _checksums(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hash_file(path)
            for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".lock")}  # fmt: skip


def _kill_repeatedly(folder: Path, source: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """SIGKILL to every process of a preparation at random moments, then let it finish."""
    rng, kills, rounds, equal = random.Random(11), 0, 0, 0
    while kills < KILLS:
        output = folder / str(rounds)
        for _ in range(4):
            process = _start(output, source, 2)
            time.sleep(rng.uniform(0.5, max(2.0, reference["cpu_seconds"] / 2)))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
            process.wait()
        equal += prepare(output, source, 2)["checksums"] == reference["checksums"]
        shutil.rmtree(output)
        rounds += 1
    return {"kills": kills, "kill_rounds": rounds, "rounds_equal": equal}


def main(
    megabytes: Annotated[float, typer.Option("--megabytes", help="Megabytes of text.")] = 100.0,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Kill a preparation at twenty random moments and vary its workers: its output must stay the same."""
    common.report("data-trials", lambda: measure(megabytes), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
