"""Download one file with resume and checksum, or a dataset from the Hugging Face hub with retries."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from modelwright import __version__
from modelwright.errors import DataError, Problem, StorageError, UsageError, first_line, is_storage_failure
from modelwright.runs.folder import read_json, write_json

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 30.0
RETRY_DELAYS = (1.0, 3.0, 10.0, 30.0)
"""Seconds between the attempts; there is one attempt more than delays."""

RETRYABLE_STATUS = (408, 425, 429)
"""HTTP status codes below 500 that are worth a retry."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on the network with its size and checksum."""

    url: str
    """Where it is published."""
    size: int
    """Bytes in it."""
    checksum: str
    """Its SHA-256; of a small file on the hub, the SHA-1 of its git blob."""
    filename: str | None = None
    """Name to save it as; by default the last part of the URL."""
    token: str | None = field(default=None, repr=False)
    """Bearer token; not sent to hosts that the server redirects to."""
    manual_dir: str | None = "next to the recipe"
    """Where to put it by hand when the download fails; None for a file that a recipe names as data."""

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def manual_hint(self) -> str:
        """What to do by hand when the download fails."""
        return f"put {self.name} {self.manual_dir}" if self.manual_dir else "download it, and name it train_file"


class DownloadDenied(DataError):
    """The server refuses the file, or its certificate is not trusted here; another client may succeed."""


class _TransferError(Exception):
    """One attempt failed; another may succeed."""


def download(file: RemoteFile, folder: Path, retry_delays: tuple[float, ...] = RETRY_DELAYS) -> Path:
    """Download the file into the folder unless it is there; an interrupted download is resumed."""
    target = folder / (file.filename or file.name)
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("ab") as opened:
            with suppress(OSError):  # file system without locks: the checksum detects two writers
                fcntl.flock(opened, fcntl.LOCK_EX)
            if target.exists():  # another process downloaded it meanwhile
                partial.unlink(missing_ok=True)
                return target
            _download_with_retries(file, opened, partial, retry_delays)
            os.fsync(opened.fileno())
            partial.replace(target)
    except OSError as error:
        if is_storage_failure(error):
            raise StorageError(f"{folder}: {file.name} could not be written ({error.strerror})") from None
        raise
    return target


def sha256_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_like(expected: str, path: Path) -> str:
    """The checksum of a file, of the kind of another one: SHA-256, or 40 digits for the SHA-1 of a git blob."""
    if len(expected) != 40:
        return sha256_file(path)
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _download_with_retries(file: RemoteFile, opened: BinaryIO, partial: Path, retry_delays: tuple[float, ...]) -> None:
    """Retry until the file is complete; an attempt that made progress resets the delays."""
    reasons: list[str] = []
    max_received, remaining_delays = opened.seek(0, 2), list(retry_delays)
    while True:
        try:
            _resume_transfer(file, opened)
            digest = _checksum_like(file.checksum, partial)
            if digest == file.checksum:
                return
            opened.truncate(0)  # no part of it can be trusted
            raise _TransferError(f"its checksum is {digest[:12]}…, not {file.checksum[:12]}…")
        except _TransferError as error:
            reasons.append(str(error))
        received = opened.seek(0, 2)
        if received > max_received:
            max_received, remaining_delays = received, list(retry_delays)
        elif remaining_delays:
            time.sleep(remaining_delays.pop(0))
        else:
            break
    raise DataError([Problem(file.url, f"{file.name} {_failed_attempts(reasons)}, or {file.manual_hint}")])


def _failed_attempts(reasons: Sequence[str]) -> str:
    attempts = f"{len(reasons)} tries" if len(reasons) > 1 else "one try"
    return f"did not arrive in {attempts} (last: {reasons[-1]}); the same command resumes where this one ended"


def _resume_transfer(file: RemoteFile, opened: BinaryIO) -> None:
    """Request the missing bytes and append them; raises _TransferError when the end is not reached."""
    start = opened.seek(0, 2)
    if start > file.size:
        start = opened.truncate(0)
    if start == file.size:
        return
    headers = {"User-Agent": f"modelwright/{__version__}", **({"Range": f"bytes={start}-"} if start else {})}
    request = urllib.request.Request(file.url, headers=headers)
    if file.token:
        request.add_unredirected_header("Authorization", f"Bearer {file.token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            if response.status != 206 or not str(response.headers.get("Content-Range")).startswith(f"bytes {start}-"):
                start = opened.truncate(0)  # the server ignores the range and sends the file from its start
            while chunk := response.read(CHUNK_BYTES):
                start += opened.write(chunk)
                if start > file.size:
                    opened.truncate(0)
                    raise _TransferError(f"more than its {file.size:,} bytes were sent")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            opened.truncate(0)
        if error.code < 500 and error.code not in (416, *RETRYABLE_STATUS):
            message = f"the server answers {error.code} {error.reason}; {file.manual_hint}"
            raise DownloadDenied([Problem(file.url, message)]) from None
        raise _TransferError(f"the server answers {error.code} {error.reason}") from None
    except (http.client.HTTPException, OSError) as error:
        if isinstance(error, OSError) and is_storage_failure(error):
            raise
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DownloadDenied([Problem(file.url, f"{reason.verify_message}; {file.manual_hint}")]) from None
        raise _TransferError(str(reason) or type(error).__name__) from None
    finally:
        opened.flush()
    if start < file.size:
        raise _TransferError(f"the connection ended after {start:,} of {file.size:,} bytes")


RETRYABLE_ERRORS = ("ReadError", "ReadTimeout", "RemoteProtocolError")
"""Exception types of the hub client for a connection that broke."""
RESUMABLE_MIN_BYTES = 10_000_000
"""Size from which downloads are made resumable; the hub client starts again in every process."""
PARALLEL_DOWNLOADS = 4
"""Large files downloaded at once."""


def load_hub_dataset(name: str, config: str | None, split: str, retry_delays: tuple[float, ...] = RETRY_DELAYS) -> Any:
    """A split of a hub dataset, as the datasets library returns it."""
    from datasets import load_dataset_builder

    reasons: list[str] = []
    for delay in (*retry_delays, None):
        try:
            builder = load_dataset_builder(name, config)
            with suppress(DownloadDenied):  # the hub client may have access, or reports its own error
                _prefetch_large_files(builder, retry_delays)
            builder.download_and_prepare()
            return builder.as_dataset(split=split)
        except (DataError, StorageError):
            raise
        except Exception as error:  # the hub client raises many types; each becomes one message
            reason = first_line(error)
            if not any(map(_is_retryable, _exception_chain(error))):
                raise UsageError(
                    f"data: {name!r} is no local file or folder, and the hub gave no data set of that name ({reason}); "
                    "check the name, dataset_config_name and dataset_split, the network, and HF_TOKEN for a gated set"
                ) from None
            reasons.append(reason)
        if delay is not None:
            time.sleep(delay)
    raise DataError([Problem(name, f"the data set {_failed_attempts(reasons)}")])


@cache
def split_names(name: str, config: str | None) -> tuple[str, ...]:
    """The splits of a hub dataset; none where the hub does not answer, which reading the rows reports."""
    from datasets import get_dataset_split_names

    try:
        return tuple(map(str, get_dataset_split_names(name, config)))
    except Exception:  # the hub client raises many types
        return ()


def _prefetch_large_files(builder: Any, retry_delays: tuple[float, ...]) -> None:
    """Download the large files of a dataset into the hub cache, where the client finds them by checksum."""
    if not Path(builder.cache_dir).exists():  # else the dataset is prepared already
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            list(pool.map(lambda entry: download(entry[0], entry[1], retry_delays), _large_files(builder)))


def _large_files(builder: Any) -> Iterator[tuple[RemoteFile, Path]]:
    """The large files of a dataset, each with its folder in the hub cache."""
    from huggingface_hub import HfApi, HfFileSystem, get_token, hf_hub_url
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    paths_by_repo: dict[tuple[str, str, str], list[str]] = {}
    for name in (str(name) for names in (builder.config.data_files or {}).values() for name in names):
        if name.startswith("hf://datasets/"):  # not a bucket
            resolved: Any = HfFileSystem().resolve_path(name)
            repo = (resolved.repo_type, resolved.repo_id, resolved.revision)
            paths_by_repo.setdefault(repo, []).append(resolved.path_in_repo)
    for (repo_type, repo_id, revision), paths in paths_by_repo.items():
        blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type=repo_type) / "blobs"
        for file in HfApi().get_paths_info(repo_id, paths, revision=revision, repo_type=repo_type):
            lfs = getattr(file, "lfs", None)
            if lfs is not None and lfs.size >= RESUMABLE_MIN_BYTES:
                url = hf_hub_url(repo_id, file.path, repo_type=repo_type, revision=revision)
                yield RemoteFile(url, lfs.size, lfs.sha256, lfs.sha256, get_token(), manual_dir=None), blobs


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_retryable(error: BaseException) -> bool:
    """Whether the error is transient: the hub was reached, but the transfer broke."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status >= 500 or status in RETRYABLE_STATUS)
    corrupt = isinstance(error, OSError) and "onsistency check failed" in str(error)
    return corrupt or type(error).__name__ in RETRYABLE_ERRORS


CORPORA = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT"),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "tinystories": ("roneneldan/TinyStories", "data"),
}
"""Open corpora for pretraining by name: the data set on the hub, and its folder with files of text rows."""
CORPUS_MANIFEST = ".download.json"
HELD_OUT_NAMES = ("test", "valid", "dev")
"""How files of a corpus begin that are no training text."""
CORPUS_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".csv", ".txt")


def download_corpus(name: str, folder: Path, max_files: int | None, log: Callable[[str], None]) -> dict[str, Any]:
    """Fill a folder with the training files of a corpus; the same call resumes, and mends files that are damaged.

    name: one of `CORPORA`, or OWNER/NAME or OWNER/NAME/FOLDER on the hub. Returns the manifest that is written.
    """
    repo, within = CORPORA.get(name) or ("/".join(name.split("/")[:2]), "/".join(name.split("/")[2:]))
    if repo.count("/") != 1:
        raise UsageError(
            f"data download: {name!r} is no corpus; it wants {', '.join(CORPORA)}, or OWNER/NAME on the hub"
        )
    path = folder / CORPUS_MANIFEST
    before: dict[str, Any] = read_json(path) if path.exists() else {}
    if before and before["name"] != name:
        raise UsageError(f"{folder} holds {before['name']}; another corpus wants another --output")
    revision, files = _corpus_files(repo, within, before.get("revision"), log)
    files = [replace(file, manual_dir=f"into {folder} as {file.filename}") for file in files[:max_files]]
    sums = {str(file.filename): {"bytes": file.size, "checksum": file.checksum} for file in files}
    manifest = {"name": name, "repository": repo, "revision": revision, "files": sums}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, manifest)
    for number, file in enumerate(files, 1):
        target = folder / str(file.filename)
        if target.exists() and _checksum_like(file.checksum, target) != file.checksum:
            log(f"{target.name} is damaged; it is downloaded again")
            target.unlink()
        log(f"{number}/{len(files)} {target.name}, {file.size / 1e6:,.1f} MB")
        download(file, folder)
    return manifest


def _corpus_files(
    repo: str, within: str, revision: str | None, log: Callable[[str], None]
) -> tuple[str, list[RemoteFile]]:
    """A commit of a hub data set, by default the newest, and the training files in one of its folders at it."""
    from huggingface_hub import HfApi, get_token, hf_hub_url

    try:
        commit = revision or str(HfApi().dataset_info(repo).sha)
        entries: list[Any] = list(HfApi().list_repo_tree(
            repo, within or None, recursive=True, revision=commit, repo_type="dataset"))  # fmt: skip
    except Exception as error:  # the hub client raises many types
        by_hand = "check the name, the network and HF_TOKEN, or put text files into the folder by hand"
        raise DataError([Problem(repo, f"the hub did not list it ({first_line(error)}); {by_hand}")]) from None
    files, held_out = [], []
    for entry in entries:
        relative = entry.path.removeprefix(within).strip("/")
        if not entry.path.endswith(CORPUS_SUFFIXES):
            continue
        if relative.lower().startswith(HELD_OUT_NAMES):
            held_out.append(relative)
            continue
        lfs = getattr(entry, "lfs", None)
        url = hf_hub_url(repo, entry.path, repo_type="dataset", revision=commit)
        checksum = lfs.sha256 if lfs else entry.blob_id
        files.append(RemoteFile(url, entry.size, checksum, relative.replace("/", "-"), get_token()))
    if not files:
        problem = f"{len(entries)} entries, none for training; it wants {', '.join(CORPUS_SUFFIXES)}"
        raise DataError([Problem(f"{repo}/{within}".rstrip("/"), problem)])
    if held_out:
        log(f"left out as held-out data: {', '.join(sorted(held_out))}")
    return commit, sorted(files, key=lambda file: str(file.filename))
