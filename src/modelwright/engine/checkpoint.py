"""Atomic, verified checkpoints: a streaming safetensors writer, rotation, and saving in the background."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from modelwright import __version__
from modelwright.engine.distributed import World
from modelwright.errors import Diverged, ModelwrightError, StorageError, UsageError
from modelwright.plan.hardware import available_memory
from modelwright.runs.folder import HASH_THREADS, fsync_path, hash_file

MANIFEST = "manifest.json"
STATE = "state.json"
LogFn = Callable[[str], None]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is gathered only when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    materialize: Callable[[], Tensor]
    """Returns the full tensor; a collective: every rank must call it, in the same order."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint before it is written."""

    step: int
    """Steps done."""
    state: dict[str, Any]
    """Plain values: cursor, spike guard, loss scaler, evaluations, fingerprints."""
    files: dict[str, list[LazyTensor]]
    """Tensors by file name."""
    is_local: bool = False
    """Whether this rank has all of each tensor, so that all files can be written at the same time."""

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.size for file in self.files.values() for tensor in file)

    def materializing_from(self, pending: deque[LazyTensor]) -> Snapshot:
        """The same, with tensors popped from `pending` as they are materialized."""

        def materialize_next() -> Tensor:
            return pending.popleft().materialize()

        next_tensor = partial(replace, materialize=materialize_next)
        return replace(self, files={name: list(map(next_tensor, file)) for name, file in self.files.items()})


class CheckpointManager:
    """The checkpoints of one stage."""

    def __init__(self, folder: Path, save_total_limit: int, log: LogFn) -> None:
        """Keep save_total_limit checkpoints and the best one; `log` receives messages about corrupt ones."""
        self._folder, self._save_total_limit, self._log = folder, save_total_limit, log

    def save(self, snapshot: Snapshot, writes: bool, best_step: int | None = None) -> None:
        """Write a checkpoint; ranks other than the writer only take part in gathering shards."""
        pending = deque(tensor for file in snapshot.files.values() for tensor in file)
        if not writes:
            _materialize_rest(pending)
            return
        try:
            self._save(snapshot if snapshot.is_local else snapshot.materializing_from(pending), best_step)
        except Exception:
            _materialize_rest(pending)  # the other ranks are in the same collectives and must not hang
            raise

    def _save(self, snapshot: Snapshot, best_step: int | None) -> None:
        final, staged = self._paths(snapshot.step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(".step-*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)
            self._check_free_space(snapshot)
            self._write(staged, snapshot)
            if final.exists():  # left by a run that was rolled back
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
        """The newest checkpoint that verifies; invalid newer ones move to corrupt/."""
        for folder in sorted(self._step_folders(), reverse=True):
            reason = verify(folder)
            if reason is None:
                return folder
            self._move_to_corrupt(folder, reason)
        return None

    def import_from(self, folder: Path) -> int:
        """Copy a valid checkpoint from another folder; returns its step."""
        if reason := verify(folder):
            if (folder / "trainer_state.json").exists():
                reason = "Transformers' Trainer wrote it; its weights are a start: model_name_or_path names this folder"
            raise UsageError(f"resume_from_checkpoint: {folder} is not a valid checkpoint: {reason}")
        step = int(json.loads((folder / MANIFEST).read_bytes())["step"])
        final, staged = self._paths(step)
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(folder, staged)
        staged.rename(final)
        fsync_path(self._folder)
        return step

    def valid_at(self, step: int) -> Path | None:
        """The checkpoint of one step, if it exists and verifies."""
        folder = self._folder / _checkpoint_name(step)
        return folder if folder.exists() and verify(folder) is None else None

    def _paths(self, step: int) -> tuple[Path, Path]:
        """Folder of a checkpoint, and the folder it is staged in before it is renamed."""
        return self._folder / _checkpoint_name(step), self._folder / f".{_checkpoint_name(step)}.partial"

    def _step_folders(self) -> Iterator[Path]:
        return self._folder.glob("step-????????") if self._folder.exists() else iter(())

    def _write(self, staged: Path, snapshot: Snapshot) -> None:
        staged.mkdir()
        parts = split_files(snapshot.files)
        paths = [staged / name for name in parts]
        with ThreadPoolExecutor(max(1, min(len(paths), MAX_WRITERS))) as executor:
            run: Any = executor.map if snapshot.is_local else map
            digests = run(write_safetensors, paths, parts.values())
            files = {
                path.name: {"size": path.stat().st_size, "xxh3": digest}
                for path, digest in zip(paths, digests, strict=True)
            }
        text = json.dumps(snapshot.state, indent=1, allow_nan=False).encode()
        _write_bytes(staged / STATE, text)
        files[STATE] = {"size": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
        manifest = {"step": snapshot.step, "modelwright": __version__, "files": files}
        _write_bytes(staged / MANIFEST, with_checksum(manifest))
        fsync_path(staged)

    def _check_free_space(self, snapshot: Snapshot) -> None:
        needed = snapshot.size + 65536
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise StorageError(
                f"checkpoint {_checkpoint_name(snapshot.step)} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB "
                f"are free in {self._folder}; earlier ones are unharmed, and rerunning the same command resumes once "
                "there is space"
            )

    def _rotate(self, best_step: int | None) -> None:
        """Remove the oldest checkpoints, after the newest has verified; never the best."""
        protected = {_checkpoint_name(best_step)} if best_step is not None else set()
        for folder in sorted(self._step_folders(), reverse=True)[self._save_total_limit :]:
            if folder.name not in protected:
                removed = folder.with_name(f".{folder.name}.partial")
                folder.rename(removed)  # so that a kill here leaves no partial checkpoint under a valid name
                shutil.rmtree(removed, ignore_errors=True)

    def _move_to_corrupt(self, folder: Path, reason: str) -> None:
        corrupt_dir = self._folder / "corrupt"
        corrupt_dir.mkdir(exist_ok=True)
        shutil.rmtree(corrupt_dir / folder.name, ignore_errors=True)
        folder.rename(corrupt_dir / folder.name)
        self._log(f"checkpoint {folder.name} moved to corrupt/: {reason}")


def _materialize_rest(pending: deque[LazyTensor]) -> None:
    """Materialize and drop the rest: gathering a sharded tensor needs every rank."""
    while pending:
        pending.popleft().materialize()


def verify(folder: Path) -> str | None:
    """Why a checkpoint is invalid, or None."""
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
    for name, (size, _) in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is not a regular file"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    with ThreadPoolExecutor(HASH_THREADS) as executor:
        digests = executor.map(hash_file, [folder / name for name in files])
        damaged = [name for name, digest in zip(files, digests, strict=True) if digest != files[name][1]]
    return f"{damaged[0]} is damaged (its hash differs)" if damaged else None


def read_state(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint (state.json)."""
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return state


def with_checksum(body: dict[str, Any]) -> bytes:
    """The manifest's bytes, with a checksum over itself."""
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


MAX_WRITERS = 8
"""Files that are written at the same time; each thread has OpenMP threads of its own, and a pod may limit them."""
STAGING_BYTES = 1 << 25
"""Pinned memory through which a thread writes tensors that are on a GPU, twice."""
PART_BYTES, MAX_PARTS = 1 << 29, min(MAX_WRITERS, (os.cpu_count() or 1) // 2)
"""Files of a GB and more are divided into parts, which are written and read back at the same time on many cores."""


def split_files(files: dict[str, list[LazyTensor]]) -> dict[str, list[LazyTensor]]:
    """Divide each large file, in the order of its tensors, into parts such as optimizer-1-of-8.safetensors."""
    parts: dict[str, list[LazyTensor]] = {}
    for name, tensors in files.items():
        total, offset = sum(tensor.size for tensor in tensors), 0
        count = max(1, min(MAX_PARTS, total // PART_BYTES))
        groups: list[list[LazyTensor]] = [[] for _ in range(count)]
        for tensor in tensors:
            groups[min(count - 1, offset * count // max(1, total))].append(tensor)
            offset += tensor.size
        groups = [group for group in groups if group] or [[]]
        for number, group in enumerate(groups, 1):
            path = Path(name)
            part = path.with_stem(f"{path.stem}-{number}-of-{len(groups)}") if len(groups) > 1 else path
            parts[part.name] = group
    return parts


def part_paths(folder: Path, name: str) -> list[Path]:
    """The files of a checkpoint that hold one of its files: itself, or its parts."""
    path = folder / name
    return [path] if path.exists() else sorted(folder.glob(f"{path.stem}-*-of-*{path.suffix}"))


def stored_tensors(folder: Path, name: str) -> dict[str, Callable[[], Tensor]]:
    """The tensors of a file of a checkpoint, or of the parts it was divided into: functions that read them."""
    files: list[Any] = [safe_open(path, "pt") for path in part_paths(folder, name) or [folder / name]]
    return {key: partial(file.get_tensor, key) for file in files for key in file.keys()}  # noqa: SIM118 (it is no dict)


def all_finite(data: Tensor) -> bool:
    """Whether all values are finite; checks the sum first: 0.01 s for 128 MiB, elementwise 0.15 s."""
    if not data.is_floating_point():
        return True
    return bool(torch.isfinite(data.sum())) or bool(torch.isfinite(data).all())


def _host_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The numbers of a tensor in host memory: of one on a GPU through a small pinned buffer, part by part."""
    flat = tensor.contiguous().reshape(-1)
    if flat.device.type != "cuda":
        yield from [flat] * bool(len(flat))
        return
    buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True).view(flat.dtype)
    for part in torch.split(flat, len(buffer)):
        yield buffer[: len(part)].copy_(part)


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in CPU memory; from a GPU through pinned memory: 12 instead of 1.6 GB/s (H200, 2026-11-18)."""
    if tensor.device.type != "cuda":
        return tensor
    host, start = torch.empty(tensor.shape, dtype=tensor.dtype), 0
    for data in _host_chunks(tensor):
        host.view(-1)[start : start + len(data)] = data
        start += len(data)
    return host


def write_safetensors(path: Path, tensors: list[LazyTensor]) -> str:
    """Write and fsync a safetensors file tensor by tensor; returns its hash."""
    head: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        stop = offset + tensor.size
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        head[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    # hashed and checked on a second core while the bytes go to disk
    with path.open("wb") as file, ThreadPoolExecutor(1) as executor:
        for prefix in (len(text).to_bytes(8, "little"), text):
            file.write(prefix)
            digest.update(prefix)
        for tensor in tensors:
            value = tensor.materialize()
            # on a GPU in no time; on a CPU each of these threads has OpenMP threads of its own
            is_finite = not value.is_cuda or all_finite(value)
            for data in _host_chunks(value):
                view = data.view(torch.uint8).numpy().data
                hash_future = executor.submit(digest.update, view)
                finite_future = None if value.is_cuda else executor.submit(all_finite, data)
                file.write(view)
                hash_future.result()
                if not (is_finite and (finite_future is None or finite_future.result())):
                    raise Diverged(f"{tensor.name} holds a number that is not finite; no checkpoint is written with it")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


TIMED_STEPS, LONG_STEP = 4, 1.0
"""Steps after which the time of a step is known, and seconds from which the first one shows it."""
MAX_COPY_FRACTION = 0.5
"""Largest fraction of free memory for a host copy; a larger checkpoint is saved synchronously."""
BYTES_PER_SECOND = 1 << 30
"""About what a checkpoint is written and read back with."""


@dataclass(frozen=True)
class SaveResult:
    """A checkpoint that was written and verified."""

    step: int
    seconds: float
    """Time of copy, writing and verification."""
    blocked_seconds: float
    """Time training waited for it at the end."""
    background: bool
    """Whether training continued meanwhile."""


@dataclass
class _PendingSave:
    """A save in progress."""

    step: int
    began: float
    thread: threading.Thread | None = None
    failure: BaseException | None = None
    ended: float = 0.0
    """When it was written; on ranks that do not write, when it began."""


class AsyncCheckpointer:
    """Saves the checkpoints of a stage, one at a time, in the background where memory allows."""

    def __init__(self, checkpoints: CheckpointManager, world: World, background: bool) -> None:
        self._checkpoints, self._world, self._background = checkpoints, world, background
        self._host_buffers: dict[tuple[str, str], Tensor] = {}
        self._copied_step: int | None = None
        self._pending: _PendingSave | None = None
        self._preallocation: threading.Thread | None = None
        self._size: int | None = None
        """Bytes of a checkpoint, known after some steps; 0 if a copy does not fit into memory."""
        self._step_seconds: deque[float] = deque(maxlen=2 * TIMED_STEPS)

    def preallocate_buffers(self, snapshot: Callable[[], Snapshot], step_seconds: float, steps_left: float) -> None:
        """Allocate pinned host buffers in a thread, which takes seconds, before the first save; not if training ends so
        soon after it, in `steps_left` steps, that it is not made. Called after each step."""
        if self._preallocation is not None or not self._background or not self._world.is_main:
            return
        self._step_seconds.append(step_seconds)
        fastest, is_sure = min(self._step_seconds), steps_left == math.inf
        if not is_sure and fastest < LONG_STEP and len(self._step_seconds) < TIMED_STEPS:
            return
        if self._size is None:
            self._size = snapshot().size
        if self._is_late(steps_left * fastest):
            return
        current = snapshot()
        files = current.files if self._fits_in_memory(current) else {}
        self._size = current.size if files else 0

        def allocate() -> None:
            with suppress(RuntimeError):  # if memory is short, the first save reports it
                for file, content in files.items():
                    for lazy in content:
                        self._buffer(file, lazy)

        # no daemon: a thread cut off inside torch ends the process with SIGABRT
        self._preallocation = threading.Thread(target=allocate, name="preallocate-buffers")
        self._preallocation.start()

    def save(self, snapshot: Snapshot, best_step: int | None, is_last: bool = False) -> bool:
        """Save or start saving; returns whether it runs in the background. Call `wait` before the next save.

        is_last: nothing changes the weights before `wait`, so that they are written without a copy.
        """
        assert self._pending is None
        now = time.monotonic()
        pending = self._pending = _PendingSave(snapshot.step, now, ended=now)
        needs_no_copy = is_last and self._world.size == 1 and not self._host_buffers
        if self._world.on_rank0_broadcast(
            lambda: self._background and (needs_no_copy or self._fits_in_memory(snapshot))
        ):
            copy = replace(snapshot, is_local=True) if needs_no_copy else self._copy_to_host(snapshot)
            if self._world.is_main:
                args = (pending, copy, best_step)
                pending.thread = threading.Thread(target=self._write, args=args, name="saving", daemon=True)
                pending.thread.start()
            return True
        self._write(pending, snapshot, best_step)
        return False

    def would_wait(self, seconds_left: float) -> bool:
        """Whether a save now would wait for the one before or for its buffers, or the save at the end of training, in
        so many seconds, for this one; the same on all ranks."""
        threads = (self._preallocation, self._pending.thread if self._pending is not None else None)
        has_no_buffers = self._background and self._preallocation is None
        is_late = has_no_buffers or self._is_late(seconds_left)
        return self._world.on_rank0_broadcast(
            lambda: is_late or any(thread and thread.is_alive() for thread in threads)
        )

    def _is_late(self, seconds_left: float) -> bool:
        """Whether a save that begins so many seconds before the end of training is not written by then."""
        return (self._size or 0) > seconds_left * BYTES_PER_SECOND

    def is_done(self) -> bool:
        """Whether the save in progress has finished: `wait` returns at once. Always False with several ranks."""
        thread = self._pending.thread if self._pending is not None and self._world.size == 1 else None
        return thread is not None and not thread.is_alive()

    def wait(self) -> SaveResult | None:
        """Wait for the save in progress, if any; all ranks raise its error."""
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
        """Wait for the save in progress, also after an error; KeyboardInterrupt and SystemExit do not wait."""
        thread = self._pending.thread if self._pending is not None else None
        if thread is not None and (exc_type is None or issubclass(exc_type, Exception)):
            thread.join()

    def _write(self, pending: _PendingSave, snapshot: Snapshot, best_step: int | None) -> None:
        try:
            self._checkpoints.save(snapshot, self._world.is_main, best_step)
        except BaseException as error:
            pending.failure = error
            if not isinstance(error, Exception):  # the process is being stopped
                raise
        pending.ended = time.monotonic()

    def _fits_in_memory(self, snapshot: Snapshot) -> bool:
        """Whether a host copy fits: buffers exist, or new ones fit; pinned sizes are powers of two."""
        sizes = [lazy.size for file in snapshot.files.values() for lazy in file if lazy.size]
        needed = sum(1 << (size - 1).bit_length() for size in sizes)
        return bool(self._host_buffers) or needed <= MAX_COPY_FRACTION * available_memory()

    def _copy_to_host(self, snapshot: Snapshot) -> Snapshot:
        """A copy in host memory; every rank gathers, rank 0 keeps. Buffers are reused."""
        if self._preallocation is not None:
            self._preallocation.join()
        files = {name: list(self._host_copies(name, file)) for name, file in snapshot.files.items()}
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # wait for the non-blocking copies
        self._copied_step = snapshot.step
        return replace(snapshot, files=files, is_local=True)

    def host_copies(self, step: int, file: str, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """The copies that the save of this step made of tensors in one file, by their addresses; none if ranks share
        the tensors."""
        is_current = step == self._copied_step and self._world.size == 1
        return {tensor.data_ptr(): self._host_buffers[file, name] for name, tensor in tensors.items() if is_current}

    def _host_copies(self, file: str, tensors: Iterable[LazyTensor]) -> Iterable[LazyTensor]:
        for lazy in tensors:
            tensor = lazy.materialize()
            if self._world.is_main:
                buffer = self._buffer(file, lazy)
                buffer.copy_(tensor, non_blocking=True)
                yield replace(lazy, materialize=buffer.detach)

    def _buffer(self, file: str, lazy: LazyTensor) -> Tensor:
        key = (file, lazy.name)
        if key not in self._host_buffers:
            # copies to pinned memory run at link speed, to pageable memory at a tenth of it
            pinned = self._world.device.type == "cuda"
            self._host_buffers[key] = torch.empty(lazy.shape, dtype=lazy.dtype, pin_memory=pinned)
        return self._host_buffers[key]


def _raise_if_failed(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
