"""What a checkpoint of the engine holds, and how the engine goes on from one.

Random numbers need no state of their own: they are a function of the seed and the cursor.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from modelwright.engine.checkpoint import Snapshot, read_state
from modelwright.engine.loop import Cursor, Engine
from modelwright.engine.shard import place, whole
from modelwright.engine.tensors import Lazy

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def snapshot(engine: Engine, **beside: Any) -> Snapshot:
    """Everything that is needed to go on from here: moving weights, optimizer, cursor, guard, scaler."""
    parts = {
        f"{name}.{part}": value
        for name, weight in engine.weights.items()
        for part, value in engine.optimizer.state.get(weight, {}).items()
    }
    state = {
        "cursor": asdict(engine.cursor),
        "seed": engine.seed,
        "guard": engine.guard.state(),
        "precision": engine.precision.state(),
        **beside,
    }
    files = {
        MODEL: [_lazy(*item) for item in {**engine.weights, **engine.buffers}.items()],
        OPTIMIZER: [_lazy(*item) for item in parts.items()],
    }
    return Snapshot(engine.cursor.step, state, files)


def restore(engine: Engine, folder: Path) -> dict[str, Any]:
    """Go on from a verified checkpoint; returns its plain values, those kept beside among them."""
    state = read_state(folder)
    restore_weights(engine, folder)
    engine.optimizer.state.clear()
    with safe_open(folder / OPTIMIZER, "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 (this is no dict)
            name, part = key.rsplit(".", 1)
            weight, value = engine.weights[name], stored.get_tensor(key)
            is_count = part == "step"  # AdamW counts on the weight's own device where it is fused
            engine.optimizer.state[weight][part] = value.to(weight.device) if is_count else place(value, weight)
    engine.guard.restore(state["guard"])
    engine.precision.restore(state["precision"])
    engine.cursor = Cursor(**state["cursor"])
    return state


@torch.no_grad()
def restore_weights(engine: Engine, folder: Path) -> None:
    """Take the weights of a verified checkpoint and nothing else."""
    with safe_open(folder / MODEL, "pt") as stored:
        for name, tensor in {**engine.weights, **engine.buffers}.items():
            tensor.copy_(place(stored.get_tensor(name), tensor))


def _lazy(name: str, tensor: Tensor) -> Lazy:
    return Lazy(name, tuple(tensor.shape), tensor.dtype, lambda: whole(tensor))
