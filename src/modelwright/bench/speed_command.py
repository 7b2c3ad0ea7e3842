"""What the command itself takes: seconds from `modelwright run` to the first step, and how long saving holds it up.

A model and shards of random tokens are put on disk; the command runs twice as a process of its own. The second time
finds what the first has compiled, and goes on to save its checkpoints in the background.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from modelwright.bench.speed_works import SEED, WORKS, Work, build
from modelwright.bench.stages import make_tokenizer, random_shards
from modelwright.runs.folder import write_text
from modelwright.runs.journal import read

MINUTE = 60.0
SAVES = 3
"""Checkpoints in the second run; the first of them also makes room for its copies."""
LONGEST_SECONDS = 240
EVENTS = ("run", "gathering", "stage", "model", "plan", "step")
"""What the journal tells on the way to the first step, in order."""


def measure(ways: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> dict[str, Any]:
    """Start cold, start warm; steps: those between two saves of the warm run."""
    import torch

    on_gpu = torch.cuda.is_available()
    work = WORKS["0.5b" if on_gpu else "tiny"]
    with tempfile.TemporaryDirectory(dir=data) as place:
        folder = Path(place)
        prepare(folder, work)
        cold = _run(folder, work, "cold", {"max_steps": 4, "save_steps": 4})
        warm = _run(folder, work, "warm", {"max_steps": (SAVES + 1) * steps, "save_steps": steps})
    return {"cold": cold[0], "warm": warm[0], "saves": stalls(warm[1])}


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The figures as sentences."""
    for name in ("cold", "warm"):
        told = figures[name]
        marks = ", ".join(f"{event} {second:.1f}" for event, second in told["marks"].items())
        yield f"  {name} start: {told['seconds']:.1f} s from the command to the end of the first step ({marks})"
    rate = figures["warm"]["tokens_per_second"]
    yield f"  then {rate:,.0f} tokens/s in the command itself" if rate else "  too few steps to tell their speed"
    for save in figures["saves"]:
        yield (
            f"  save at step {save['step']}: training stood still {save['still']:.3f} s, and lost {save['slower']:.3f} "
            f"s in the {save['steps_meanwhile']} steps meanwhile, {save['share_of_a_minute']:.2%} of a minute; written "
            f"and read back in {save['written']:.1f} s"
        )


def prepare(folder: Path, work: Work) -> None:
    """The model with its tokenizer, and shards of random tokens."""
    import torch

    model = build(work).to("cpu", torch.float32)
    make_tokenizer(folder / "model")
    model.save_pretrained(folder / "model")
    random_shards(folder / "shards", work.length, work.words)


def stalls(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each save in the background cost: standing still, and steps that were slower while it was written."""
    steps = [event for event in events if event["event"] == "step"]
    usual = median(step["seconds"] for step in steps)
    found = []
    for begun in (event for event in events if event["event"] == "saving"):
        ended = next((e for e in events if e["event"] == "saved" and e["step"] == begun["step"]), None)
        if ended is None or begun["step"] == steps[-1]["step"]:
            continue  # the last one ends the stage: nothing is trained meanwhile
        meanwhile = [step for step in steps if begun["time"] < step["time"] <= ended["time"] + usual]
        slower = sum(max(0.0, step["seconds"] - usual) for step in meanwhile)
        still = begun["seconds"] + ended["waited"]
        found.append({
            "step": begun["step"], "still": round(still, 4), "slower": round(slower, 4),
            "steps_meanwhile": len(meanwhile), "written": ended["seconds"],
            "share_of_a_minute": round((still + slower) / MINUTE, 5),
        })  # fmt: skip
    return found


def _run(folder: Path, work: Work, name: str, length: dict[str, int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The command as a process of its own; its figures and its journal."""
    import torch

    on_gpu = torch.cuda.is_available()
    recipe = folder / f"{name}.yaml"
    section = {
        "max_length": work.length, "per_device_train_batch_size": work.rows, "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "logging_steps": 1, "torch_compile": on_gpu, "save_total_limit": 2,
        "save_in_background": "always", **length,
    }  # fmt: skip
    wish = {
        "name": name, "seed": SEED, "output_dir": str(folder / name), "pretrain": section,
        "model": {"model_name_or_path": str(folder / "model")}, "data": {"dataset_name": str(folder / "shards")},
    }  # fmt: skip
    write_text(recipe, json.dumps(wish))
    began = time.time()
    command = [sys.executable, "-m", "modelwright", "run", str(recipe), "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS)
    if done.returncode:
        raise RuntimeError(f"modelwright run ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    events = list(read(folder / name / "journal.jsonl"))
    firsts = {kind: next(e["time"] for e in events if e["event"] == kind) - began for kind in EVENTS}
    last = [event for event in events if event["event"] == "step"][-1]
    told = {
        "seconds": round(firsts["step"], 2),
        "marks": {kind: round(second, 2) for kind, second in firsts.items()},
        "first_step_seconds": next(e["seconds"] for e in events if e["event"] == "step"),
        "tokens_per_second": last.get("tokens_per_second"),
        "whole_seconds": round(time.time() - began, 1),
    }
    return told, events
