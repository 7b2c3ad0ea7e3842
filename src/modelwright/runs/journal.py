"""The journal: everything that happened in a run, one JSON object per line, append-only."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from modelwright.errors import NotRegularFile, StorageError, is_storage_failure

Event = dict[str, Any]
EventListener = Callable[[Event], None]
MAX_LINE_BYTES = 1 << 24
"""Longest line of a journal; a longer one is skipped."""
MAX_DEPTH = 32
"""Nesting levels of an event."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; anything else is refused, since a FIFO would block and a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFile(path)
    return os.fdopen(descriptor, "rb")


class Journal:
    """Appends events to a run's journal and passes them to a listener."""

    def __init__(self, path: Path | None, listener: EventListener | None = None) -> None:
        """Open the journal for appending; without a path (other ranks) events are dropped."""
        self._listener = listener
        self._lock = threading.RLock()  # checkpoints are logged by a thread; listeners hear events in the file's order
        self._descriptor: int | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_fifo():
                raise NotRegularFile(path)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            _end_torn_line(self._descriptor)
        except OSError as error:
            raise StorageError(f"{path}: the journal cannot be written ({error.strerror})") from None

    def add(self, event: str, **fields: Any) -> None:
        """Write one event; NaN and infinities are written as null, so that every line is JSON."""
        with self._lock:
            record: Event = {"time": round(time.time(), 3), "event": event}
            record |= {name: _json_safe(value) for name, value in fields.items()}
            self._write(record)
            if self._listener is not None:
                try:
                    self._listener(record)
                except Exception:  # a closed pipe or a broken terminal does not end the run
                    self._listener = None

    def _write(self, record: Event) -> None:
        if self._descriptor is None:
            return
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")
        try:
            while line:  # a disk that fills up writes part of a line before it fails
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            if is_storage_failure(error):
                raise StorageError(f"journal.jsonl: {error.strerror}; the checkpoints are unharmed") from None
            raise

    def close(self) -> None:
        """Stop writing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read(path: Path) -> Iterator[Event]:
    """Read a journal; a line torn by a kill is skipped."""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if (event := parse_line(line)) is not None:
                yield event


def parse_line(line: bytes) -> Event | None:
    """The event of a line; None where the line is damaged, or holds what no journal does."""
    try:
        event = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and _is_plain(event) else None


def _is_plain(value: dict[str, Any] | list[Any], depth: int = 0) -> bool:
    """Whether numbers are finite and fit in 64 bits, and nothing is nested deep."""
    for item in value.values() if isinstance(value, dict) else value:
        kind = type(item)
        if kind is float:
            if not math.isfinite(item):
                return False
        elif kind is int:
            if not -(1 << 63) <= item < 1 << 63:
                return False
        elif (kind is dict or kind is list) and (depth + 1 >= MAX_DEPTH or not _is_plain(item, depth + 1)):
            return False
    return True


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value


def _end_torn_line(descriptor: int) -> None:
    """End a line that a kill tore, so that the next event starts a new line."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
