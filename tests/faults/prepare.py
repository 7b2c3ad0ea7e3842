"""Trials of a preparation: killed at random moments, done by several workers, fed more than the memory holds."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common, data
from modelwright.runs.folder import hash_file

RECIPE = """\
name: bench-data
model: {{architecture: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}}}}
data: {{train_file: {source}, test_size: 1%}}
prepare: {{vocab_size: 8192, tokenizer_sample_mb: 4, num_proc: {workers}}}
"""
TRACE = "import json, sys; from tests.faults.data_trials import trace; print(json.dumps(trace(*sys.argv[1:])))"
KILLS = 20
LOOK_SECONDS = 0.2
"""Between two looks at the memory."""


def measure(gigabytes: Sequence[float] = (), megabytes: float = 100.0) -> dict[str, Any]:
    """Kills and workers on some megabytes, or memory and the cost of each step on some gigabytes."""
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), dict[str, Any]()
        if megabytes:
            source = folder / "raw.jsonl"
            data.write_jsonl(data.gather(megabytes), source, megabytes)
            found = _trials(folder, source, megabytes)
        return found | {"memory": [traced(folder, size) for size in gigabytes]}


def _trials(folder: Path, source: Path, megabytes: float) -> dict[str, Any]:
    whole = prepared(folder / "whole", source, 1)
    workers = {1: True} | {count: prepared(folder / f"workers-{count}", source, count)["checksums"]
                           == whole["checksums"] for count in (2, 4)}  # fmt: skip
    return {
        "megabytes": megabytes,
        "cpu_seconds": whole["cpu_seconds"],
        "mb_per_cpu_s": round(megabytes / whole["cpu_seconds"], 2),
        "files_compared": len(whole["checksums"]),
        "workers_equal": workers,
        **_killed(folder / "killed", source, whole),
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    said = []
    if "kills" in figures:
        said = [f"{figures['megabytes']:.0f} MB prepared in {figures['cpu_seconds']} CPU-s",
                f"workers 1, 2 and 4 leave the same {figures['files_compared']} files: {figures['workers_equal']}",
                f"{figures['kills']} kills in {figures['kill_rounds']} rounds, {figures['rounds_equal']} of them end "
                "with the same files"]  # fmt: skip
    for one in figures["memory"]:
        steps = ", ".join(f"{step} {seconds}" for step, seconds in one["cpu_seconds"].items())
        memory = f"at most {one['peak_mb']} MB in a process, {one['peak_mb_of_all']} MB in all three"
        said.append(f"{one['gigabytes']} GB: {memory}; CPU-seconds: {steps}")
    return said


def prepared(folder: Path, source: Path, workers: int) -> dict[str, Any]:
    """Prepare in processes of their own: checksums, CPU-seconds and peak memory."""
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
    recipe.write_text(RECIPE.format(source=source, workers=workers), encoding="utf-8")
    command = [sys.executable, "-m", "modelwright", "data", "prepare", str(recipe), "--output", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def _checksums(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hash_file(path)
            for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".lock")}  # fmt: skip


def _killed(folder: Path, source: Path, whole: dict[str, Any]) -> dict[str, Any]:
    """Kill every process of a preparation at random moments, as often as is asked, then let it end."""
    chance, kills, rounds, equal = random.Random(11), 0, 0, 0
    while kills < KILLS:
        place = folder / str(rounds)
        for _ in range(4):
            process = _start(place, source, 2)
            time.sleep(chance.uniform(0.5, max(2.0, whole["cpu_seconds"] / 2)))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
            process.wait()
        equal += prepared(place, source, 2)["checksums"] == whole["checksums"]
        shutil.rmtree(place)
        rounds += 1
    return {"kills": kills, "kill_rounds": rounds, "rounds_equal": equal}


def traced(folder: Path, gigabytes: float) -> dict[str, Any]:
    """The most memory that a preparation by two processes takes, and the CPU-seconds of each of its steps."""
    source, output = folder / "large.jsonl", folder / "large"
    rows = data.write_jsonl(data.gather(min(100.0, gigabytes * 1e3)), source, gigabytes * 1e3)
    recipe = folder / "large.yaml"
    recipe.write_text(RECIPE.format(source=source, workers=2), encoding="utf-8")
    command = [sys.executable, "-c", TRACE, str(recipe), str(output)]
    process, most = subprocess.Popen(command, env=common.environment({}), stdout=subprocess.PIPE, text=True), 0
    while process.poll() is None:
        most = max(most, _held(process.pid))
        time.sleep(LOOK_SECONDS)
    assert process.stdout is not None
    found = json.loads(process.stdout.read().splitlines()[-1])
    shutil.rmtree(output)
    source.unlink()
    return {"gigabytes": gigabytes, "rows": rows, **found, "peak_mb_of_all": most >> 20}


def _held(pid: int) -> int:
    """Bytes of a process and those it started; a page that several share is counted once."""
    total = 0
    try:
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(_held(int(child)) for child in listed.read_text().split())
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += next(int(line.split()[1]) << 10 for line in told.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it ended meanwhile
        return total
    return total


def trace(recipe: str, folder: str) -> dict[str, Any]:
    """Prepare from this very process, and look at the clock of all processes after each step."""
    from modelwright.recipe.load import load
    from modelwright.stages.prepare import build_prepare_job, process_executor, run_prepare

    loaded = load(recipe)
    seconds: dict[str, float] = {}
    step, begun = "plan", 0.0
    for told in run_prepare(build_prepare_job(loaded, Path(folder)), process_executor(loaded.recipe.prepare), loaded):
        now = _spent()
        seconds[step] = seconds.get(step, 0.0) + now - begun
        step, begun = told.step, now
    peaks = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"cpu_seconds": {name: round(value, 1) for name, value in seconds.items()}, "peak_mb": max(peaks)}


def _spent() -> float:
    """CPU-seconds of this process and of those it started, which are still at work."""
    total, tick = time.process_time(), os.sysconf("SC_CLK_TCK")
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in listed.read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / tick
    return total


def main(
    gigabytes: Annotated[
        list[float] | None, typer.Option("--gigabytes", help="Measure memory on so much; may be given often.")
    ] = None,
    megabytes: Annotated[float, typer.Option("--megabytes", help="Text for the kills; 0 leaves them out.")] = 100.0,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Kill a preparation at twenty random moments, vary its workers, and measure its memory."""
    name = "data-trials" if megabytes else "data-memory"
    common.report(name, lambda: measure(gigabytes or (), megabytes), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
