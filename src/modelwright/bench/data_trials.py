"""Trials of a preparation: killed at random moments, done by several workers, fed more than the memory holds."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelwright.bench import corpus
from modelwright.runs.folder import hash_file

RECIPE = """\
name: bench-data
model: {{architecture: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}}}}
data: {{train_file: {source}, test_size: 1%}}
prepare: {{vocab_size: 8192, tokenizer_sample_mb: 4, workers: {workers}}}
"""
KILLS = 20


def measure(gigabytes: Sequence[float] = (), megabytes: float = 100.0) -> dict[str, Any]:
    """Kills and workers on some megabytes; memory on as many gigabytes as are asked for."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = folder / "raw.jsonl"
        corpus.write_jsonl(corpus.gather(megabytes), source, megabytes)
        whole = prepared(folder / "whole", source, 1)
        found: dict[str, Any] = {"megabytes": megabytes, "cpu_seconds": whole["cpu_seconds"]}
        found["mb_per_cpu_s"] = round(megabytes / whole["cpu_seconds"], 2)
        found["workers_equal"] = {count: prepared(folder / f"workers-{count}", source, count)["checksums"]
                                  == whole["checksums"] for count in (2, 4)}  # fmt: skip
        found |= _killed(folder / "killed", source, whole)
        found["memory"] = [_memory(folder, size) for size in gigabytes]
    return found


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    said = [f"{figures['megabytes']:.0f} MB prepared in {figures['cpu_seconds']} CPU-s",
            f"workers: {figures['workers_equal']}",
            f"{figures['kills']} kills, checksums equal: {figures['kills_equal']}"]  # fmt: skip
    return said + [f"{one['gigabytes']} GB: peak memory {one['peak_mb']:.0f} MB" for one in figures["memory"]]


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
    chance, kills, rounds, equal = random.Random(11), 0, 0, True
    while kills < KILLS:
        place = folder / str(rounds)
        for _ in range(4):
            process = _start(place, source, 2)
            time.sleep(chance.uniform(0.5, max(2.0, whole["cpu_seconds"] / 2)))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
            process.wait()
        equal = equal and prepared(place, source, 2)["checksums"] == whole["checksums"]
        rounds += 1
    return {"kills": kills, "kill_rounds": rounds, "kills_equal": equal}


def _memory(folder: Path, gigabytes: float) -> dict[str, Any]:
    """The most memory that one process of a preparation took."""
    source = folder / "large.jsonl"
    rows = corpus.write_jsonl(corpus.gather(100), source, gigabytes * 1e3)
    recipe = folder / "large.yaml"
    recipe.write_text(RECIPE.format(source=source, workers=1), encoding="utf-8")
    code = ("import resource, sys, json\nfrom modelwright.cli.main import main\ntry: main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "print(json.dumps({'kb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))")  # fmt: skip
    command = [sys.executable, "-c", code, "data", "prepare", str(recipe), "--output", str(folder / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = json.loads(done.stdout.splitlines()[-1])["kb"] / 1024
    return {"gigabytes": gigabytes, "rows": rows, "peak_mb": round(peak)}
