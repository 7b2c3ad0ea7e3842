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

ArrayEntry = tuple[Mapping[str, NDArray], Mapping[str, Any]]
"""Arrays by name, and facts for JSON."""
METADATA_FILE = "metadata.json"
KEEP_SECONDS = 30 * 86_400
"""An entry that no run has used for so long is removed."""
MIN_FREE = 4
"""Free disk space that is left, in sizes of the entry."""


def load_or_compute(kind: str, key: str, compute: Callable[[], ArrayEntry]) -> ArrayEntry:
    """An entry of the cache, memory-mapped, so that the ranks of a node share its memory; or computed and kept.

    One process computes while the others of its machine wait. A damaged entry is replaced.
    """
    folder = cache_dir() / f"{kind}-{key}"
    with suppress(OSError, ValueError, KeyError):
        return _read(folder)
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(cache_lock(folder))
        with suppress(OSError, ValueError, KeyError):  # another process may have written it meanwhile
            return _read(folder)
        entry = compute()
        with suppress(OSError, ValueError):  # a full or read-only disk only makes the next start slower
            _remove_unused(folder.parent, kind)
            _write(folder, *entry)
            return _read(folder)
        return entry


def _read(folder: Path) -> ArrayEntry:
    metadata = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
    arrays = {}
    for name, digest in metadata["hashes"].items():
        arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False).view(np.ndarray)
        if xxhash.xxh3_128_hexdigest(arrays[name].data) != digest:
            raise ValueError(f"{folder} holds a flipped bit")
    with suppress(OSError):
        os.utime(folder)
    return arrays, metadata


def _write(folder: Path, arrays: Mapping[str, NDArray], facts: Mapping[str, Any]) -> None:
    if shutil.disk_usage(folder.parent).free < (1 + MIN_FREE) * sum(array.nbytes for array in arrays.values()):
        return
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        for name, array in contiguous.items():
            np.save(partial / f"{name}.npy", array, allow_pickle=False)
        hashes = {name: xxhash.xxh3_128_hexdigest(array.data) for name, array in contiguous.items()}
        (partial / METADATA_FILE).write_text(json.dumps({**facts, "hashes": hashes}), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # it could not be read
        partial.rename(folder)  # no fsync: the hashes detect an incomplete entry
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_unused(cache: Path, kind: str) -> None:
    """Remove entries, and what a killed process left of them, that no process has used for a long time."""
    for path in [*cache.glob(f"{kind}-*/"), *cache.glob(f".{kind}-*.partial/")]:
        if path.stat().st_mtime < time.time() - KEEP_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
