"""What a checkpoint of the engine holds, and how the engine goes on from one.

Random numbers need no state of their own: they are a function of the seed and the cursor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelwright.engine.checkpoint import Snapshot, read_state
from modelwright.engine.loop import Engine
from modelwright.engine.masters import REST, join, split
from modelwright.engine.shard import place, whole
from modelwright.engine.step import Cursor
from modelwright.engine.tensors import Lazy
from modelwright.errors import Refused

MODEL, OPTIMIZER, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"


def snapshot(engine: Engine, **beside: Any) -> Snapshot:
    """Everything that is needed to go on from here: moving weights, optimizer, cursor, guard, scaler."""
    parts = [
        _lazy(f"{name}.{part}", value)
        for name, weight in engine.weights.items()
        for part, value in engine.optimizer.state.get(weight, {}).items()
    ]
    state = {
        "cursor": asdict(engine.cursor),
        "seed": engine.seed,
        "guard": engine.guard.state(),
        "precision": engine.precision.state(),
        **beside,
    }
    files = {
        MODEL: [_lazy(*item) for item in {**engine.weights, **engine.buffers}.items()],
        OPTIMIZER: parts,
    }
    if engine.average.held:
        files[AVERAGE] = [_lazy(*item) for item in engine.average.held.items()]
    return Snapshot(engine.cursor.step, state, files)


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Tell a checkpoint that verifies and yet holds something else: made by others, or by another version."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        found = f"{type(error).__name__}: {str(error)[:100]}"
        raise Refused(
            f"checkpoint {folder} is whole, but not one of this stage ({found}); take it away, or choose another "
            "output_dir"
        ) from None


def restore(engine: Engine, folder: Path) -> dict[str, Any]:
    """Go on from a verified checkpoint; returns its plain values, those kept beside among them."""
    state = read_state(folder)
    rests = restore_weights(engine, folder)
    engine.optimizer.state.clear()
    keeps_rests = engine.precision.weights == "bf16"
    with safe_open(folder / OPTIMIZER, "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 (this is no dict)
            name, part = key.rsplit(".", 1)
            weight, value = engine.weights[name], stored.get_tensor(key)
            if part == REST:
                continue  # it went into the weights
            is_count = part == "step"  # AdamW counts on the weight's own device where it is fused
            engine.optimizer.state[weight][part] = value.to(weight.device) if is_count else place(value, weight)
    if keeps_rests:
        for name, rest in rests.items():
            engine.optimizer.state[engine.weights[name]][REST] = place(rest, engine.weights[name])
    engine.guard.restore(state["guard"])
    engine.precision.restore(state["precision"])
    engine.cursor = Cursor(**state["cursor"])
    engine.begin_anew()
    return state


@torch.no_grad()
def restore_weights(engine: Engine, folder: Path) -> dict[str, Tensor]:
    """Take the weights of a verified checkpoint, and their mean; returns what bf16 weights lost of their masters.

    A checkpoint of bf16 weights with rests gives fp32 weights where those are kept now, and the other way round.
    """
    rests: dict[str, Tensor] = {}
    with safe_open(folder / MODEL, "pt") as stored, safe_open(folder / OPTIMIZER, "pt") as moments:
        halves = {name.removesuffix(f".{REST}") for name in moments.keys() if name.endswith(f".{REST}")}  # noqa: SIM118
        for name, tensor in {**engine.weights, **engine.buffers}.items():
            value = stored.get_tensor(name)
            if name in halves:
                value = join(value, moments.get_tensor(f"{name}.{REST}"))
            if tensor.dtype is torch.bfloat16 and value.dtype is torch.float32:
                value, rests[name] = split(value)
            tensor.copy_(place(value, tensor))
    if engine.average.held:
        with safe_open(folder / AVERAGE, "pt") as stored:
            for name, mean in engine.average.held.items():
                mean.copy_(place(stored.get_tensor(name), mean))
    return rests


def _lazy(name: str, tensor: Tensor) -> Lazy:
    return Lazy(name, tuple(tensor.shape), tensor.dtype, lambda: whole(tensor))
