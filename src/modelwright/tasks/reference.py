"""How likely the answers were before training: measured once by the untrained model itself, kept on disk, verified.

A second model is never held in memory; under low-rank adapters the reference is the model with them switched off.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.numpy import load_file, save_file

from modelwright.data.stream import share
from modelwright.engine.loop import Engine
from modelwright.errors import StorageError, is_storage_failure
from modelwright.runs.folder import hash_file, read_json, sync, write_json
from modelwright.tasks.dpo import Array, DpoTask

TENSORS, FACTS = "reference.safetensors", "reference.json"
VERSION = 2
"""Raised when what is kept changes, so that an old file is not taken for a new one."""


def set_reference(task: DpoTask, engine: Engine, folder: Path, model: str) -> str | None:
    """Give the task its reference: from the folder where it is whole and of this model and data, else measured now.

    `model` is the fingerprint of the weights before training, which the engine must still hold. Returns what a person
    should know.
    """
    key = fingerprint(task, engine, model)
    problem = engine.world.first(lambda: _problem(folder, key))
    if problem:
        known = engine.world.first((folder / FACTS).exists)
        measured = measure(task, engine)
        engine.world.first(lambda: _keep(folder, key, measured))
    flat = load_file(folder / TENSORS)
    task.references = {side: _divided(flat[side], task, side) for side in task.sides}
    return f"the kept reference is not taken ({problem}); it was measured again" if problem and known else None


def measure(task: DpoTask, engine: Engine) -> dict[str, Array]:
    """The logarithm of each answer token's likelihood, for each side in one line: [count] float32."""
    model: Any = task.module.model
    off: AbstractContextManager[Any] = model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()
    with off:
        return {side: _line(task, engine, side) for side in task.sides}


def _line(task: DpoTask, engine: Engine, side: str) -> Array:
    pairs, world = task.sides[side], engine.world
    order = sorted(range(len(pairs)), key=lambda row: len(pairs[row]))  # like lengths together save padding
    mine = share(order, world.rank, world.size, engine.eval_rows)
    line = np.zeros(sum(_counts(task, side)), dtype=np.float32)
    places = _divided(line, task, side)  # views: what is written there stands in the line
    looked = engine.look(task.bare_batch(side, rows) for rows in mine)
    for rows, likely in zip(mine, looked, strict=True):
        parts = np.split(likely.numpy(), np.cumsum([len(places[row]) for row in rows])[:-1]) if rows else []
        for row, part in zip(rows, parts, strict=True):
            places[row][:] = part
    summed: Array = world.total(torch.from_numpy(line)).numpy()
    return summed


def fingerprint(task: DpoTask, engine: Engine, model: str) -> str:
    """Changes with the model, the arithmetic, and every token: so with data, template, lengths and cuts."""
    digest = xxhash.xxh3_128()
    digest.update(repr((VERSION, model, engine.precision.products, task.not_shared is None)).encode())
    for side, pairs in task.sides.items():
        digest.update(f"{side}:{len(pairs)}".encode())
        for pair in pairs:
            for answer in (pair.chosen, pair.rejected):
                digest.update(repr((len(pair.prompt), len(answer))).encode())
                digest.update(pair.prompt.tobytes() + answer.tokens.tobytes() + answer.trained.tobytes())
    return digest.hexdigest()


def _problem(folder: Path, key: str) -> str | None:
    """Why the kept reference cannot be taken; None where it can."""
    try:
        facts = read_json(folder / FACTS)
        if facts["fingerprint"] != key:
            return "it is of another model, other data or other arithmetic"
        return None if hash_file(folder / TENSORS) == facts["hash"] else f"{TENSORS} is damaged"
    except FileNotFoundError as error:
        return f"there is no {Path(error.filename).name}"
    except (OSError, StorageError, ValueError, KeyError, TypeError) as error:
        return f"it cannot be read ({error})"


def _keep(folder: Path, key: str, measured: dict[str, Array]) -> None:
    """Write the lines, then the facts that vouch for them."""
    partial = folder / f".{TENSORS}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FACTS).unlink(missing_ok=True)
        save_file(measured, partial)
        sync(partial)
        partial.replace(folder / TENSORS)
    except Exception as error:
        partial.unlink(missing_ok=True)
        if (isinstance(error, OSError) and is_storage_failure(error)) or "os error 28" in str(error):
            raise StorageError(f"{folder / TENSORS}: the reference could not be written ({error})") from None
        raise
    counts = {f"{side}_tokens": len(line) for side, line in measured.items()}
    write_json(folder / FACTS, {"fingerprint": key, "hash": hash_file(folder / TENSORS), **counts})


def _counts(task: DpoTask, side: str) -> list[int]:
    """Trained tokens of each pair."""
    return [int(pair.chosen.trained.sum() + pair.rejected.trained.sum()) for pair in task.sides[side]]


def _divided(line: Array, task: DpoTask, side: str) -> list[Array]:
    """One piece of the line for each pair."""
    counts = _counts(task, side)
    return np.split(line, np.cumsum(counts)[:-1]) if counts else []
