"""What safety costs: a verified checkpoint beside a plain one of the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.fault import Bench, Fault, Outcome
from tests.faults.rig import Call

MEGABYTES, TURNS = 128, 9
MOST_TIMES, MOST_STALL = 1.25, 0.02
MINUTE = 60.0


def checkpoint_cost(bench: Bench) -> Outcome:
    """R26: seconds of our save beside those of the same bytes written as the library writes them."""
    folder = bench.place("cost")
    trial = bench.rig.fork(Call("tests.faults.cost", "measure_saves", (str(folder),)), folder)
    if trial.wait():
        return Outcome("it could not be measured", False, notes=(trial.output[-300:],))
    found: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    times, stall = found["verified"] / found["plain"], found["verified"] / MINUTE
    figure = (
        f"{times:.2f} × a plain save ({found['verified']:.2f} s beside {found['plain']:.2f} s for {MEGABYTES} MiB), "
        f"{stall:.1%} of the time with a save a minute"
    )
    numbers = {**found, "times_plain": round(times, 3), "stall_share": round(stall, 5)}
    return Outcome(figure, times <= MOST_TIMES and stall < MOST_STALL, numbers)


def measure_saves(folder: str) -> None:
    """Both kinds in turn, and the median of each; both are durable when they return."""
    import time
    from statistics import median

    import torch
    from safetensors.torch import save_file

    from modelwright.engine.checkpoint import CheckpointManager, LazyTensor, Snapshot
    from modelwright.runs.folder import fsync_path

    place = Path(folder)
    count = MEGABYTES // 8
    weights = {f"layer.{n}": torch.randn(1 << 21) for n in range(count)}  # 8 MiB each
    lazy = [LazyTensor(name, tuple(w.shape), w.dtype, lambda w=w: w) for name, w in weights.items()]  # type: ignore[misc]
    checkpoints = CheckpointManager(place / "verified", 2, lambda line: None)
    seconds: dict[str, list[float]] = {"plain": [], "verified": []}
    for turn in range(TURNS + 1):
        began = time.perf_counter()
        save_file(weights, place / "plain.safetensors")
        fsync_path(place / "plain.safetensors")
        middle = time.perf_counter()
        checkpoints.save(Snapshot(turn, {"cursor": {"step": turn}}, {"model.safetensors": lazy}), True)
        if turn:  # the first one warms up
            seconds["plain"].append(middle - began)
            seconds["verified"].append(time.perf_counter() - middle)
    (place / "answer.json").write_text(json.dumps({k: round(median(v), 4) for k, v in seconds.items()}), "utf-8")


FAULTS = (
    Fault("R26", "the cost of a checkpoint", f"{MEGABYTES} MiB saved in turn: verified, and plain with one sync",
          "at most 1.25 × a plain save, under 2 % of the time", "a prototype: 1.20 × (measured Nov 2026)",
          checkpoint_cost, 25),
)  # fmt: skip
