"""Bring a published file to this machine: resumed where it broke off, tried again, checked, whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from modelwright import __version__
from modelwright.errors import DataError, Problem, StorageError, is_storage_failure

CHUNK = 1 << 20
TIMEOUT_SECONDS = 30.0
PAUSES = (1.0, 3.0, 10.0, 30.0)
"""Seconds between the tries; one try more than there are pauses."""


@dataclass(frozen=True)
class Published:
    """A file on the network that cannot change without being noticed."""

    address: str
    """Where its publisher keeps it."""
    size: int
    """Bytes in it."""
    sha256: str
    """Its checksum."""
    kept_as: str | None = None
    """Its name in the folder; without it, its own."""
    token: str | None = field(default=None, repr=False)
    """What its publisher, and nobody he sends us on to, is shown."""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rsplit("/", 1)[-1]

    @property
    def remedy(self) -> str:
        """What a person can do who cannot reach it."""
        return f"put {self.name} beside the recipe" if self.kept_as is None else "download it, and name it train_file"


class Denied(DataError):
    """The publisher does not give it to us, or its certificate is not trusted here; another client may do better."""


class _Broken(Exception):
    """One try came to nothing; another may do better."""


def fetch(file: Published, folder: Path, pauses: tuple[float, ...] = PAUSES) -> Path:
    """The file in that folder, brought there now if it is not there yet; what a broken try left is gone on with."""
    target = folder / (file.kept_as or file.name)
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("ab") as opened:
            with suppress(OSError):  # a file system without locks: two at once are found by the checksum
                fcntl.flock(opened, fcntl.LOCK_EX)
            if target.exists():  # another process brought it while this one waited
                partial.unlink(missing_ok=True)
                return target
            _bring(file, opened, partial, pauses)
            os.fsync(opened.fileno())
            partial.replace(target)
    except OSError as error:
        if is_storage_failure(error):
            raise StorageError(f"{folder}: {file.name} could not be written ({error.strerror})") from None
        raise
    return target


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bring(file: Published, opened: BinaryIO, partial: Path, pauses: tuple[float, ...]) -> None:
    """Try until it is whole; a try that came further than all before it is not counted against it."""
    reasons: list[str] = []
    furthest, left = opened.seek(0, 2), list(pauses)
    while True:
        try:
            _go_on(file, opened)
            found = sha256_of(partial)
            if found == file.sha256:
                return
            opened.truncate(0)  # nothing of it can be trusted
            raise _Broken(f"its sha256 is {found[:12]}…, not {file.sha256[:12]}…")
        except _Broken as error:
            reasons.append(str(error))
        reached = opened.seek(0, 2)
        if reached > furthest:
            furthest, left = reached, list(pauses)
        elif left:
            time.sleep(left.pop(0))
        else:
            break
    tries = f"{len(reasons)} tries" if len(reasons) > 1 else "one try"
    letter = f"{file.name} did not arrive in {tries} (last: {reasons[-1]})"
    remedy = f"the same command goes on where this one ended, or {file.remedy}"
    raise DataError([Problem(file.address, f"{letter}; {remedy}")])


def _go_on(file: Published, opened: BinaryIO) -> None:
    """Ask for what is still missing and append it; raises _Broken when the end was not reached."""
    start = opened.seek(0, 2)
    if start > file.size:
        start = opened.truncate(0)
    if start == file.size:
        return
    headers = {"User-Agent": f"modelwright/{__version__}", **({"Range": f"bytes={start}-"} if start else {})}
    request = urllib.request.Request(file.address, headers=headers)
    if file.token:
        request.add_unredirected_header("Authorization", f"Bearer {file.token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            if answer.status != 206 or not str(answer.headers.get("Content-Range")).startswith(f"bytes {start}-"):
                start = opened.truncate(0)  # the server sends the whole file again, whatever was asked
            while piece := answer.read(CHUNK):
                start += opened.write(piece)
                if start > file.size:
                    opened.truncate(0)
                    raise _Broken(f"more than its {file.size:,} bytes were sent")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            opened.truncate(0)
        if error.code < 500 and error.code not in (408, 416, 425, 429):
            letter = f"the server answers {error.code} {error.reason}; {file.remedy}"
            raise Denied([Problem(file.address, letter)]) from None
        raise _Broken(f"the server answers {error.code} {error.reason}") from None
    except (http.client.HTTPException, OSError) as error:
        if isinstance(error, OSError) and is_storage_failure(error):
            raise
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise Denied([Problem(file.address, f"{reason.verify_message}; {file.remedy}")]) from None
        raise _Broken(str(reason) or type(error).__name__) from None
    finally:
        opened.flush()
    if start < file.size:
        raise _Broken(f"the connection ended after {start:,} of {file.size:,} bytes")
