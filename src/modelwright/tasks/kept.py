"""What leaves the frozen layers of a model, computed once for every document and kept: in memory, else on disk.

On disk a fingerprint says what the states were computed from and a hash guards each part of them; what is damaged
is computed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from modelwright.data.chat import Encoded
from modelwright.engine.task import Batch
from modelwright.engine.world import World
from modelwright.errors import StorageError
from modelwright.models.attention import Paths
from modelwright.models.branches import paths_of
from modelwright.models.trunk import Trunk
from modelwright.plan.facts import free_memory
from modelwright.runs.folder import read_json, write_json
from modelwright.tasks.layout import (
    ALIGNED,
    LONGEST_SHARED_ROW,
    UNMASKED,
    Rows,
    behind,
    lay_out,
    places_of,
    side_by_side,
    without_mask,
)

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}
"""Tokens of one part: enough to keep the device busy, little enough to check and compute again."""
ON_GPU = 128
"""There rows and learnt places are padded to a multiple of this: a GPU plans each new shape anew, for a tenth of a
second, and its memory is cut up by sizes that never come again."""
STATES, MANIFEST = "states.bin", "manifest.json"
LARGEST_SHARE = 0.25
"""Of the memory that is free, kept states take at most this share."""


@dataclass(frozen=True)
class Part:
    """States that are computed together: they stand side by side, after those of the part before."""

    rows: Rows
    """The documents."""
    first: int
    """Where its states begin."""
    stop: int
    """Where those of the next part begin."""


@dataclass(frozen=True)
class Home:
    """Where states are kept."""

    wish: str
    """auto, memory or disk."""
    folder: Path
    """Where on disk, if there."""
    fingerprint: str
    """Changes when the model or the arithmetic does."""


class KeptStates:
    """The states of all documents, in parts; a shared beginning comes first, once."""

    def __init__(
        self, trunk: Trunk, documents: Sequence[Encoded], beginning: int, device: torch.device, paths: bool = False
    ) -> None:
        """paths: whether attention is told by them who sees whom, instead of by a mask."""
        self.trunk, self.documents, self.beginning, self._paths = trunk, documents, beginning, paths
        self.starts = [0] * len(documents)
        self.parts: list[Part] = []
        self.states: Tensor | None = None
        self._device = device
        self._multiple = ALIGNED if device.type == "cpu" else ON_GPU
        self._arrange(TOKENS_AT_ONCE[device.type])

    def _arrange(self, at_once: int) -> None:
        """Documents of like length share a part, whatever the world's size and the order of training."""
        waiting: list[int] = []
        first, size = 0, 0
        order = sorted(range(len(self.documents)), key=lambda number: (len(self.documents[number]), number))
        for number in order:
            length = len(self.documents[number]) - self.beginning
            if waiting and size + length > at_once:
                first = self._add_part(waiting, first)
                waiting, size = [], 0
            waiting.append(number)
            size += length
        self._add_part(waiting, first)

    def _add_part(self, numbers: Sequence[int], first: int) -> int:
        stop = first + (self.beginning if first == 0 else 0)
        for number in numbers:
            self.starts[number] = stop - self.beginning
            stop += len(self.documents[number]) - self.beginning
        if self.beginning:
            longest = UNMASKED if self._paths else LONGEST_SHARED_ROW
            rows = behind(self.beginning, numbers, self.documents, longest)
        else:
            rows = side_by_side([[number] for number in numbers], self.documents)
        self.parts.append(Part(rows, first, stop))
        return stop

    @property
    def places(self) -> int:
        """States in all."""
        return self.parts[-1].stop

    def compute(self, part: Part) -> Tensor:
        """The states of a part: [places, width], on the device."""
        laid = lay_out(part.rows, self.documents, self.beginning, self._multiple)
        batch, paths = laid.on(self._device), None
        if self._paths:
            keys, starts, longest = paths_of(laid.inputs["branches"])
            paths = Paths(keys.to(self._device), starts.to(self._device), longest)
        branches = None if self._paths else batch.get("branches")
        states = self.trunk.states(batch["tokens"], batch["positions"], branches, paths).flatten(0, 1)
        sources, wanted, offset = [], [], 0
        places = places_of(part.rows, self.starts, batch["tokens"].shape, self.beginning)
        for row, line in zip(part.rows, places, strict=True):
            used = sum(piece.stop - piece.start for piece in row)
            begin = self.beginning if part.first or offset else 0  # the shared beginning is taken from one row only
            sources.append(np.arange(offset + begin, offset + used))
            wanted.append(line[begin:used])
            offset += len(line)
        order = np.argsort(np.concatenate(wanted), kind="stable")
        return states[torch.from_numpy(np.concatenate(sources)[order]).to(self._device)]

    def batch(self, rows: Rows) -> Batch:
        """A batch whose states are looked up: by place where they are on the device, else brought along."""
        assert self.states is not None, "the states are kept before the first batch"
        batch = lay_out(rows, self.documents, self.beginning, self._multiple, spare=self._device.type != "cpu")
        batch = without_mask(batch) if self._paths else batch
        places = torch.from_numpy(places_of(rows, self.starts, batch.inputs["tokens"].shape, self.beginning))
        found = {"places": places} if self.states.device == self._device else {"states": self.states[places]}
        return Batch({**batch.inputs, **found}, batch.trained, batch.tokens)

    def fill(self, world: World, autocast: Callable[[], AbstractContextManager[Any]], home: Home) -> str:
        """Compute what is not there yet, each rank its share; returns a line that tells where it is kept."""
        began = time.monotonic()
        with autocast():
            first = self.compute(self.parts[0])
        size = self.places * first.shape[1] * first.element_size()
        where = choose_home(size, world, home.wish)
        missing = list(range(len(self.parts)))
        if where == "disk":
            fingerprint = self._fingerprint(home.fingerprint, first)
            missing = world.first(lambda: _missing(home.folder, fingerprint, self.parts, first))
            self.states = _mapped(home.folder / STATES, self.places, first)
        else:
            device = self._device if where == "memory of the device" else torch.device("cpu")
            self.states = torch.empty((self.places, first.shape[1]), dtype=first.dtype, device=device)
        for turn, number in enumerate(missing):
            part = self.parts[number]
            found = torch.empty((part.stop - part.first, first.shape[1]), dtype=first.dtype, device=self._device)
            if turn % world.size == world.rank:
                with autocast():
                    found = first if number == 0 else self.compute(part)
            if world.size > 1:
                dist.broadcast(found, turn % world.size)
            if where != "disk" or world.is_main:
                self.states[part.first : part.stop] = found.to(self.states.device)
        if where == "disk":
            world.first(lambda: _seal(home.folder, fingerprint, self.parts, self.states))
        told = f"{self.trunk.depth} frozen layers computed once for {len(self.documents)} rows"
        again = f", {len(missing)} of {len(self.parts)} parts anew" if where == "disk" else ""
        return f"{told}: {size / 1e9:.2f} GB in {where}{again}, {time.monotonic() - began:.1f} s"

    def _fingerprint(self, model: str, first: Tensor) -> str:
        how = f"{self.beginning}:{self._paths}:{self._device.type}"
        digest = xxhash.xxh3_128(f"{model}:{self.trunk.depth}:{how}".encode())
        digest.update(f"{first.dtype}:{tuple(first.shape)}:{torch.__version__}".encode())
        for document in self.documents:
            digest.update(document.tokens.tobytes())
            digest.update(b"\0")
        return digest.hexdigest()


def choose_home(size: int, world: World, wish: str) -> str:
    """Where so many bytes are kept: on the device, in the machine's memory, on disk."""
    if wish == "disk":
        return "disk"
    if world.device.type == "cuda" and size <= LARGEST_SHARE * torch.cuda.mem_get_info(world.device)[0]:
        return "memory of the device"
    if size * world.size <= LARGEST_SHARE * free_memory() or wish == "memory":
        return "memory" if world.device.type == "cuda" else "memory of the device"
    return "disk"


def _mapped(path: Path, places: int, like: Tensor) -> Tensor:
    width = like.shape[1]
    return torch.from_file(str(path), shared=True, size=places * width, dtype=like.dtype).view(places, width)


def _missing(folder: Path, fingerprint: str, parts: Sequence[Part], like: Tensor) -> list[int]:
    """The parts that are not on disk as they were written; makes the file where there is none."""
    size = parts[-1].stop * like.shape[1] * like.element_size()
    kept: dict[str, Any] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists() and (folder / STATES).exists():
            kept = read_json(folder / MANIFEST)
        if kept.get("fingerprint") != fingerprint or (folder / STATES).stat().st_size != size:
            kept = {}
            with (folder / STATES).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows now, not as a fault in mapped memory
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder}: {size / 1e9:.2f} GB of kept states do not fit ({error})") from None
    hashes = kept.get("parts", [])
    if len(hashes) != len(parts):
        return list(range(len(parts)))
    states = _mapped(folder / STATES, parts[-1].stop, like)
    return [number for number, part in enumerate(parts) if _hash(states, part) != hashes[number]]


def _seal(folder: Path, fingerprint: str, parts: Sequence[Part], states: Tensor | None) -> None:
    assert states is not None
    write_json(folder / MANIFEST, {"fingerprint": fingerprint, "parts": [_hash(states, part) for part in parts]})


def _hash(states: Tensor, part: Part) -> str:
    return xxhash.xxh3_128_hexdigest(states[part.first : part.stop].contiguous().view(torch.uint8).numpy().data)
