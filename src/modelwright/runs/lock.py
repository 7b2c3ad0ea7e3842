"""One writer per run: a second process is refused at once, a dead one's place is taken over.

The kernel's own lock decides on one machine (it vanishes with its holder, whatever killed it). Where a
shared file system does not carry locks between machines, the holder's heartbeat in the file decides:
it is watched rather than compared with a clock, since clocks of two machines may differ.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelwright.errors import Refused, StorageError

BEAT_SECONDS = 0.5
WATCH_SECONDS = 3.0


@contextmanager
def hold(path: Path) -> Iterator[str | None]:
    """Hold the run while the block runs; yields a line about a dead holder whose place was taken, if any."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"{path}: the lock cannot be written ({error.strerror})") from None
    try:
        previous = _take(descriptor, path)
        stop = threading.Event()
        beat = threading.Thread(target=_beat, args=(descriptor, stop), daemon=True, name="run-lock")
        _write(descriptor, 0)
        beat.start()
        try:
            yield previous
        finally:
            stop.set()
            beat.join()
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> str | None:
    locked = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _read(path)) from None
    except OSError:
        locked = False  # no locks on this file system: the heartbeat alone decides
    holder = _read(path)
    if not holder:
        return None
    if not locked or holder.get("host") != socket.gethostname():
        deadline = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 2)
            if _read(path).get("beat") != holder.get("beat"):
                raise _in_use(path, holder)
    return f"process {holder.get('pid')} on {holder.get('host')} died without finishing; its place is taken over"


def _in_use(path: Path, holder: dict[str, object]) -> Refused:
    who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another process"
    return Refused(f"{path.parent} is in use by {who}; wait for it, stop it, or choose another output_dir")


def _read(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes() or b"{}")  # opened anew: a network file system then asks the server
    except (ValueError, OSError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(descriptor: int, beat: int) -> None:
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "beat": beat})
    os.pwrite(descriptor, text.ljust(256).encode(), 0)


def _beat(descriptor: int, stop: threading.Event) -> None:
    beat = 0
    while not stop.wait(BEAT_SECONDS):
        beat += 1
        try:
            _write(descriptor, beat)
        except OSError:
            return  # a full disk is told by the checkpoint, not by the lock
