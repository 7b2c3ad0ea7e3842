"""Atomic, verified checkpoints: a streaming safetensors writer, rotation, and saving in the background."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from modelwright import __version__
from modelwright.engine.distributed import World
from modelwright.errors import Diverged, ModelwrightError, StorageError, UsageError
from modelwright.plan.hardware import available_memory
from modelwright.runs.folder import fsync_path, hash_file

MANIFEST = "manifest.json"
STATE = "state.json"
LogFn = Callable[[str], None]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is fetched only when it is written."""

    name: str
    """Its name in the file."""
    shape: tuple[int, ...]
    """Its full shape."""
    dtype: torch.dtype
    """Its type."""
    materialize: Callable[[], Tensor]
    """Brings the full tensor; every rank must call it, in the same order."""

    @property
    def size(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds, before it is written."""

    step: int
    """Steps done."""
    state: dict[str, Any]
    """Cursor, guard, scaler, evaluations, fingerprints: plain values."""
    files: dict[str, list[LazyTensor]]
    """Tensors by file name."""

    def materializing_from(self, pending: deque[LazyTensor]) -> Snapshot:
        """The same, but each tensor leaves the line of those still waiting as it is fetched."""

        def materialize_next() -> Tensor:
            return pending.popleft().materialize()

        files = {
            name: [replace(tensor, materialize=materialize_next) for tensor in file]
            for name, file in self.files.items()
        }
        return replace(self, files=files)


class CheckpointManager:
    """The checkpoints of one stage."""

    def __init__(self, folder: Path, save_total_limit: int, log: LogFn) -> None:
        """Keep so many, besides the best; `say` is told what was set aside."""
        self._folder, self._save_total_limit, self._log = folder, save_total_limit, log

    def save(self, snapshot: Snapshot, writes: bool, best_step: int | None = None) -> None:
        """Write a checkpoint; ranks that do not write only bring their shards."""
        pending = deque(tensor for file in snapshot.files.values() for tensor in file)
        if not writes:
            _materialize_rest(pending)
            return
        try:
            self._save(snapshot.materializing_from(pending), best_step)
        except Exception:
            _materialize_rest(
                pending
            )  # the other ranks bring theirs too: nobody is left waiting for the one that failed
            raise

    def _save(self, snapshot: Snapshot, best_step: int | None) -> None:
        final = self._folder / _checkpoint_name(snapshot.step)
        staged = final.with_name(f".{final.name}.partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clear_partials()
            self._check_free_space(snapshot)
            self._write(staged, snapshot)
            if final.exists():  # left by a run that was rolled back: the new one replaces it
                self._move_to_corrupt(final, "it is written again")
            staged.rename(final)
            fsync_path(self._folder)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise StorageError(
                f"checkpoint {final.name} could not be written ({error.strerror}); earlier ones are unharmed, "
                "and rerunning the same command resumes once there is space"
            ) from None
        except Diverged:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if reason := verify(final):
            raise StorageError(f"checkpoint {final.name} reads back damaged ({reason}); earlier ones are kept")
        self._rotate(best_step)

    def newest_valid(self) -> Path | None:
        """The newest checkpoint that verifies; bad ones before it are set aside."""
        for folder in sorted(self._step_folders(), reverse=True):
            reason = verify(folder)
            if reason is None:
                return folder
            self._move_to_corrupt(folder, reason)
        return None

    def import_from(self, folder: Path) -> int:
        """Copy a good checkpoint from elsewhere; returns its step."""
        if reason := verify(folder):
            raise UsageError(f"resume_from_checkpoint: {folder} is not a valid checkpoint: {reason}")
        step = int(json.loads((folder / MANIFEST).read_bytes())["step"])
        final = self._folder / _checkpoint_name(step)
        staged = final.with_name(f".{final.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(folder, staged)
        staged.rename(final)
        fsync_path(self._folder)
        return step

    def valid_at(self, step: int) -> Path | None:
        """The checkpoint of one step, where it is there and good."""
        folder = self._folder / _checkpoint_name(step)
        return folder if folder.exists() and verify(folder) is None else None

    def _step_folders(self) -> Iterator[Path]:
        return self._folder.glob("step-????????") if self._folder.exists() else iter(())

    def _write(self, staged: Path, snapshot: Snapshot) -> None:
        staged.mkdir()
        files: dict[str, dict[str, Any]] = {}
        for name, content in snapshot.files.items():
            digest = write_safetensors(staged / name, content)
            files[name] = {"size": (staged / name).stat().st_size, "xxh3": digest}
        text = json.dumps(snapshot.state, indent=1, allow_nan=False).encode()
        _write_bytes(staged / STATE, text)
        files[STATE] = {"size": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
        _write_bytes(
            staged / MANIFEST, with_checksum({"step": snapshot.step, "modelwright": __version__, "files": files})
        )
        fsync_path(staged)

    def _check_free_space(self, snapshot: Snapshot) -> None:
        needed = sum(total_bytes(file) for file in snapshot.files.values()) + 65536
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise StorageError(
                f"checkpoint {_checkpoint_name(snapshot.step)} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in "
                f"{self._folder}; earlier ones are unharmed, and rerunning the same command resumes once there is space"
            )

    def _rotate(self, best_step: int | None) -> None:
        """Forget the oldest, now that the newest has verified; never the best."""
        protected = {_checkpoint_name(best_step)} if best_step is not None else set()
        for folder in sorted(self._step_folders(), reverse=True)[self._save_total_limit :]:
            if folder.name not in protected:
                removed = folder.with_name(f".{folder.name}.partial")
                folder.rename(removed)  # so that a kill here leaves no half checkpoint under a good name
                shutil.rmtree(removed, ignore_errors=True)

    def _clear_partials(self) -> None:
        for partial in self._folder.glob(".step-*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def _move_to_corrupt(self, folder: Path, reason: str) -> None:
        corrupt_dir = self._folder / "corrupt"
        corrupt_dir.mkdir(exist_ok=True)
        shutil.rmtree(corrupt_dir / folder.name, ignore_errors=True)
        folder.rename(corrupt_dir / folder.name)
        self._log(f"checkpoint {folder.name} moved to corrupt/: {reason}")


def _materialize_rest(pending: deque[LazyTensor]) -> None:
    """Fetch what is left and let it go: sharded tensors come only when every rank asks."""
    while pending:
        pending.popleft().materialize()


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError:
        return "it has no manifest"
    try:
        manifest = json.loads(raw)
        files = {str(name): (entry["size"], entry["xxh3"]) for name, entry in manifest["files"].items()}
        is_valid = int(manifest["step"]) >= 0
        if not is_valid or with_checksum({key: value for key, value in manifest.items() if key != "checksum"}) != raw:
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


def with_checksum(body: dict[str, Any]) -> bytes:
    """The manifest's exact bytes, with a hash over itself: a flipped bit anywhere in it shows."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "checksum": checksum}, sort_keys=True, indent=1).encode()


def _checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def all_finite(data: Tensor) -> bool:
    """Whether every number is one; a finite sum says so for all at once: 0.01 s for 128 MiB, each by itself 0.15 s."""
    if not data.is_floating_point():
        return True
    return bool(torch.isfinite(data.sum())) or bool(torch.isfinite(data).all())


def total_bytes(tensors: Iterable[LazyTensor]) -> int:
    """Bytes that a file of these tensors takes, all but the head."""
    return sum(tensor.size for tensor in tensors)


def write_safetensors(path: Path, tensors: list[LazyTensor]) -> str:
    """Write a safetensors file, make it durable, and return its hash."""
    head: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        stop = offset + tensor.size
        head[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    # hashed and judged on a second core while the bytes go to the disk; the cost is row R26 of `bench reliability`
    with path.open("wb") as file, ThreadPoolExecutor(1) as executor:
        for prefix in (len(text).to_bytes(8, "little"), text):
            file.write(prefix)
            digest.update(prefix)
        for tensor in tensors:
            data = tensor.materialize().to("cpu").contiguous()
            view = data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else memoryview(b"")
            hash_future, finite_future = executor.submit(digest.update, view), executor.submit(all_finite, data)
            file.write(view)
            hash_future.result()
            if not finite_future.result():
                raise Diverged(f"{tensor.name} holds a number that is not finite; no checkpoint is written with it")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


MAX_COPY_FRACTION = 0.5
"""A copy may take so much of the free memory; a larger checkpoint is written while training waits."""


@dataclass(frozen=True)
class SaveResult:
    """A checkpoint that was written and verified."""

    step: int
    """The step it holds."""
    seconds: float
    """How long it took, copy, writing and verification."""
    blocked_seconds: float
    """How long training stood still for it at the end."""
    background: bool
    """Whether training went on meanwhile."""


@dataclass
class _PendingSave:
    """One save on its way."""

    step: int
    began: float
    thread: threading.Thread | None = None
    failure: BaseException | None = None
    ended: float = 0.0
    """When it was written; where another rank writes, when it began."""


class AsyncCheckpointer:
    """Saves a stage's checkpoints, one at a time."""

    def __init__(self, checkpoints: CheckpointManager, world: World, background: bool) -> None:
        self._checkpoints, self._world, self._background = checkpoints, world, background
        self._host_buffers: dict[tuple[str, str], Tensor] = {}
        self._pending: _PendingSave | None = None
        self._preallocation: threading.Thread | None = None

    def preallocate_buffers(self, snapshot: Callable[[], Snapshot]) -> None:
        """Make places for copies, once, while training goes on: pinning takes seconds, and the first save would wait.

        After the first step, that is: whoever pins holds up everybody else on the device.
        """
        if self._preallocation is not None or not self._background or not self._world.is_main:
            return
        current = snapshot()
        needed = (
            [(file, lazy) for file, content in current.files.items() for lazy in content]
            if self._fits_in_memory(current)
            else []
        )

        def allocate() -> None:
            with suppress(RuntimeError):  # where they cannot be had, the first save says so
                for file, lazy in needed:
                    self._buffer(file, lazy)

        # a process that ends waits for it: a thread that is cut off inside torch would end it with SIGABRT
        self._preallocation = threading.Thread(target=allocate, name="preallocate-buffers")
        self._preallocation.start()

    def save(self, snapshot: Snapshot, best_step: int | None) -> bool:
        """Save, or begin to; returns whether it goes on in the background. The save before must be settled."""
        assert self._pending is None
        now = time.monotonic()
        pending = self._pending = _PendingSave(snapshot.step, now, ended=now)
        if self._world.on_rank0_broadcast(lambda: self._background and self._fits_in_memory(snapshot)):
            host_snapshot = self._copy_to_host(snapshot)
            if self._world.is_main:
                args = (pending, host_snapshot, best_step)
                pending.thread = threading.Thread(target=self._write, args=args, name="saving", daemon=True)
                pending.thread.start()
            return True
        self._write(pending, snapshot, best_step)
        return False

    def is_done(self) -> bool:
        """Whether a save has come to its end and may be settled without waiting; ranks among others do not know."""
        thread = self._pending.thread if self._pending is not None and self._world.size == 1 else None
        return thread is not None and not thread.is_alive()

    def wait(self) -> SaveResult | None:
        """Wait for the save under way, if there is one; all ranks hear its letter where it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        began = time.monotonic()
        if pending.thread is not None:
            pending.thread.join()
        if pending.failure is not None and not isinstance(pending.failure, ModelwrightError):
            raise pending.failure
        self._world.on_rank0_broadcast(lambda: _raise_if_failed(pending.failure))
        background = pending.thread is not None
        blocked_seconds = time.monotonic() - began if background else pending.ended - pending.began
        return SaveResult(pending.step, pending.ended - pending.began, blocked_seconds, background)

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        """Let the save under way end, though something else went wrong; only an order to stop at once leaves it."""
        thread = self._pending.thread if self._pending is not None else None
        if thread is not None and (exc_type is None or issubclass(exc_type, Exception)):
            thread.join()

    def _write(self, pending: _PendingSave, snapshot: Snapshot, best_step: int | None) -> None:
        try:
            self._checkpoints.save(snapshot, self._world.is_main, best_step)
        except BaseException as error:
            pending.failure = error
            if not isinstance(error, Exception):  # told to stop at once: nobody asks again how it went
                raise
        pending.ended = time.monotonic()

    def _fits_in_memory(self, snapshot: Snapshot) -> bool:
        """Whether memory holds a copy: one that was made already, or a new one, whose places are powers of two."""
        sizes = [lazy.size for file in snapshot.files.values() for lazy in file if lazy.size]
        needed = sum(1 << (size - 1).bit_length() for size in sizes)
        return bool(self._host_buffers) or needed <= MAX_COPY_FRACTION * available_memory()

    def _copy_to_host(self, snapshot: Snapshot) -> Snapshot:
        """The same from memory of its own; every rank fetches, the main one keeps. The places are used again."""
        if self._preallocation is not None:
            self._preallocation.join()
        files = {name: list(self._host_copies(name, file)) for name, file in snapshot.files.items()}
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # the copies are made when the device says so
        return replace(snapshot, files=files)

    def _host_copies(self, file: str, tensors: Iterable[LazyTensor]) -> Iterable[LazyTensor]:
        for lazy in tensors:
            tensor = lazy.materialize()
            if self._world.is_main:
                buffer = self._buffer(file, lazy)
                buffer.copy_(tensor, non_blocking=True)
                yield replace(lazy, materialize=partial(_identity, buffer))

    def _buffer(self, file: str, lazy: LazyTensor) -> Tensor:
        key = (file, lazy.name)
        if key not in self._host_buffers:
            # a GPU copies into pinned memory at the link's speed, and into other memory at a tenth of it
            pinned = self._world.device.type == "cuda"
            self._host_buffers[key] = torch.empty(lazy.shape, dtype=lazy.dtype, pin_memory=pinned)
        return self._host_buffers[key]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _raise_if_failed(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
