"""A checkpoint is complete and verified, or absent.

Staged folder → files → fsync → manifest with size and hash of each → fsync → rename → fsync of the parent.
Loading goes from the newest to the oldest, verifies, sets bad ones aside and says so.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from modelwright import __version__
from modelwright.engine import tensors
from modelwright.engine.tensors import Lazy
from modelwright.errors import Diverged, StorageError, UsageError
from modelwright.runs.folder import hash_file, sync

MANIFEST = "manifest.json"
STATE = "state.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds, before it is written."""

    step: int
    """Steps done."""
    state: dict[str, Any]
    """Cursor, guard, scaler, evaluations, fingerprints: plain values."""
    files: dict[str, list[Lazy]]
    """Tensors by file name."""

    def fetching_from(self, waiting: deque[Lazy]) -> Snapshot:
        """The same, but each tensor leaves the line of those still waiting as it is fetched."""

        def fetch() -> Tensor:
            return waiting.popleft().fetch()

        files = {name: [replace(tensor, fetch=fetch) for tensor in file] for name, file in self.files.items()}
        return replace(self, files=files)


class Checkpoints:
    """The checkpoints of one stage."""

    def __init__(self, folder: Path, keep: int, say: Say) -> None:
        """Keep so many, besides the best; `say` is told what was set aside."""
        self._folder, self._keep, self._say = folder, keep, say

    def save(self, snapshot: Snapshot, writes: bool, best_step: int | None = None) -> None:
        """Write a checkpoint; ranks that do not write only bring their shards."""
        waiting = deque(tensor for file in snapshot.files.values() for tensor in file)
        if not writes:
            _bring(waiting)
            return
        try:
            self._save(snapshot.fetching_from(waiting), best_step)
        except Exception:
            _bring(waiting)  # the other ranks bring theirs too: nobody is left waiting for the one that failed
            raise

    def _save(self, snapshot: Snapshot, best_step: int | None) -> None:
        final = self._folder / _name(snapshot.step)
        staged = final.with_name(f".{final.name}.partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clear_partials()
            self._need_room(snapshot)
            self._write(staged, snapshot)
            if final.exists():  # left by a run that was rolled back: the new one replaces it
                self._set_aside(final, "it is written again")
            staged.rename(final)
            sync(self._folder)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise StorageError(
                f"checkpoint {final.name} could not be written ({error.strerror}); earlier ones are unharmed, "
                "and the same command continues once there is room"
            ) from None
        except Diverged:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if reason := verify(final):
            raise StorageError(f"checkpoint {final.name} reads back damaged ({reason}); earlier ones are kept")
        self._rotate(best_step)

    def newest_good(self) -> Path | None:
        """The newest checkpoint that verifies; bad ones before it are set aside."""
        for folder in sorted(self._present(), reverse=True):
            reason = verify(folder)
            if reason is None:
                return folder
            self._set_aside(folder, reason)
        return None

    def take(self, folder: Path) -> int:
        """Copy a good checkpoint from elsewhere; returns its step."""
        if reason := verify(folder):
            raise UsageError(f"resume_from_checkpoint: {folder} is no whole checkpoint: {reason}")
        step = int(json.loads((folder / MANIFEST).read_bytes())["step"])
        final = self._folder / _name(step)
        staged = final.with_name(f".{final.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(folder, staged)
        staged.rename(final)
        sync(self._folder)
        return step

    def at(self, step: int) -> Path | None:
        """The checkpoint of one step, where it is there and good."""
        folder = self._folder / _name(step)
        return folder if folder.exists() and verify(folder) is None else None

    def _present(self) -> Iterator[Path]:
        return self._folder.glob("step-????????") if self._folder.exists() else iter(())

    def _write(self, staged: Path, snapshot: Snapshot) -> None:
        staged.mkdir()
        files: dict[str, dict[str, Any]] = {}
        for name, content in snapshot.files.items():
            digest = tensors.write(staged / name, content)
            files[name] = {"size": (staged / name).stat().st_size, "xxh3": digest}
        text = json.dumps(snapshot.state, indent=1, allow_nan=False).encode()
        _write_bytes(staged / STATE, text)
        files[STATE] = {"size": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
        _write_bytes(staged / MANIFEST, sealed({"step": snapshot.step, "modelwright": __version__, "files": files}))
        sync(staged)

    def _need_room(self, snapshot: Snapshot) -> None:
        needed = sum(tensors.size_of(file) for file in snapshot.files.values()) + 65536
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise StorageError(
                f"checkpoint {_name(snapshot.step)} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in "
                f"{self._folder}; earlier ones are unharmed, and the same command continues once there is room"
            )

    def _rotate(self, best_step: int | None) -> None:
        """Forget the oldest, now that the newest has verified; never the best."""
        kept = {_name(best_step)} if best_step is not None else set()
        for folder in sorted(self._present(), reverse=True)[self._keep :]:
            if folder.name not in kept:
                doomed = folder.with_name(f".{folder.name}.partial")
                folder.rename(doomed)  # so that a kill here leaves no half checkpoint under a good name
                shutil.rmtree(doomed, ignore_errors=True)

    def _clear_partials(self) -> None:
        for left in self._folder.glob(".step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)

    def _set_aside(self, folder: Path, reason: str) -> None:
        aside = self._folder / "set-aside"
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / folder.name, ignore_errors=True)
        folder.rename(aside / folder.name)
        self._say(f"checkpoint {folder.name} is set aside: {reason}")


def _bring(waiting: deque[Lazy]) -> None:
    """Fetch what is left and let it go: sharded tensors come only when every rank asks."""
    while waiting:
        waiting.popleft().fetch()


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError:
        return "it has no manifest"
    try:
        manifest = json.loads(raw)
        files = {str(name): (facts["size"], facts["xxh3"]) for name, facts in manifest["files"].items()}
        whole = int(manifest["step"]) >= 0
        if not whole or sealed({key: value for key, value in manifest.items() if key != "seal"}) != raw:
            return "its manifest is damaged"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return "its manifest is damaged"
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    if present != set(files):
        missing = sorted(set(files) - present)
        return f"{missing[0]} is missing" if missing else f"{sorted(present - set(files))[0]} does not belong to it"
    for name, (size, digest) in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is no file of its own"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if hash_file(path) != digest:
            return f"{name} is damaged (its hash differs)"
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint."""
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return state


def sealed(body: dict[str, Any]) -> bytes:
    """The manifest's exact bytes, with a hash over itself: a flipped bit anywhere in it shows."""
    seal = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "seal": seal}, sort_keys=True, indent=1).encode()


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
