"""Keep arrays that take long to make in the cache folder: decoded images, tokenized rows."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data.packing import NDArray
from modelwright.runs.caches import cache_dir, cache_lock

Arrays = Mapping[str, NDArray]
ArrayEntry = tuple[Arrays, Mapping[str, Any]]
"""Arrays by name, and facts for JSON."""
METADATA_FILE = "metadata.json"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError)
"""What a damaged entry raises."""
KEEP_SECONDS = 30 * 86_400
"""An entry that no run has used for so long is removed."""
MIN_FREE = 4
"""Free disk space that is left, in sizes of the entry."""


def load_or_compute(kind: str, key: str, compute: Callable[[], ArrayEntry]) -> ArrayEntry:
    """An entry of the cache, memory-mapped, so that the ranks of a node share its memory; or computed and kept.

    One process computes while the others of its machine wait. A damaged entry is replaced. kind: name and version.
    """
    folder = cache_dir() / f"{kind}-{key}"
    with suppress(*UNREADABLE):
        return _read(folder)
    with ExitStack() as stack:
        has_waited = False
        with suppress(OSError):
            has_waited = stack.enter_context(cache_lock(folder))
        with suppress(*UNREADABLE):  # another process may have written it meanwhile
            return _read(folder)
        if has_waited:  # the other one could not keep it, nor could this one: let the others compute too
            stack.close()
        entry = compute()
        with suppress(*UNREADABLE):  # a full or read-only disk only makes the next start slower
            _remove_unused(folder.parent, kind)
            _write(folder, *entry)
            return _read(folder)
        return entry


def _read(folder: Path) -> ArrayEntry:
    metadata = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
    arrays = {}
    for name, digest in metadata["hashes"].items():
        arrays[name] = np.lib.format.open_memmap(folder / f"{name}.npy", mode="c").view(np.ndarray)
        if xxhash.xxh3_128_hexdigest(arrays[name].data) != digest:
            raise ValueError(f"{folder} holds a flipped bit")
    with suppress(OSError):
        os.utime(folder)
    return arrays, metadata


def _write(folder: Path, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    if shutil.disk_usage(folder.parent).free < (1 + MIN_FREE) * sum(array.nbytes for array in arrays.values()):
        return
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        for name, array in contiguous.items():
            with (partial / f"{name}.npy").open("wb") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        hashes = {name: xxhash.xxh3_128_hexdigest(array.data) for name, array in contiguous.items()}
        (partial / METADATA_FILE).write_text(json.dumps({**facts, "hashes": hashes}), encoding="utf-8")
        with suppress(OSError):
            partial.rename(folder)  # no fsync: the hashes detect an incomplete entry
            return
        try:
            _read(folder)  # of a process that did not wait for this one; it is in use
        except UNREADABLE:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_unused(cache: Path, kind: str) -> None:
    """Remove entries of any version, and what killed processes left, that no process has used for a long time."""
    name = kind.partition("-")[0]
    for path in [*cache.glob(f"{name}-v*"), *cache.glob(f".{name}-v*")]:
        with suppress(OSError):  # not ours to remove
            if path.stat().st_mtime < time.time() - KEEP_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
