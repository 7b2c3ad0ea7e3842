"""Download a run folder from a cluster's volume: list every file with its hash, copy what is missing, verify each.

`oc exec` may cut its stream and still exit 0: 2 of 11 pulls of 2.5 GB from a real cluster ended 3 to 5 MB short. So
only size and SHA-256 say that a file is complete."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from modelwright.cluster.client import ClusterError, KubectlClient, apply_manifests, pod_problem
from modelwright.cluster.documents import dump_documents
from modelwright.cluster.manifests import SECURITY_CONTEXT, ClusterJob, image
from modelwright.errors import Refused, UsageError
from modelwright.runs.folder import RunFolder

READER_TIMEOUT = 300.0
STALL_TIMEOUT = 300.0
"""A stream without a byte for so long is given up."""
MAX_ATTEMPTS = 6
"""Attempts in a row that bring nothing, until another reader pod is tried."""
MAX_READERS = 3
MAX_ARGS_CHARS = 4000
"""Paths in one exec: they travel in a URL."""
PARTS_DIR = ".pull"
FATAL_REASONS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
"""Why a container waits for what will not come."""
CHUNK = 1 << 20


@dataclass(frozen=True)
class RemoteEntry:
    """A file, folder or link of the run folder, as the pod lists it."""

    path: str
    """Below the run folder; a folder's ends with a slash."""
    size: int
    """Bytes."""
    sha256: str
    """Hash of that many bytes; empty for folders and links."""
    mtime: float
    """When it was written."""
    target: str | None
    """Where a link leads."""


def list_files(root: str) -> None:
    """Runs in the pod: print what is below the folder, one JSON array a line, and at the end the number of lines."""
    import hashlib
    import json
    import os
    import sys
    from pathlib import Path

    count = 0
    if not Path(root).is_dir():
        sys.exit(f"there is no folder {root}")
    for folder, folders, names in os.walk(root):
        for path in sorted(Path(folder, name) for name in (*folders, *names)):
            relative, size, digest, target = str(path.relative_to(root)), 0, "", None
            if path.is_symlink():
                target = str(path.readlink())
            elif path.is_dir():
                relative += "/"
            elif path.is_file():
                with path.open("rb") as file:
                    hashed, left = hashlib.sha256(), os.fstat(file.fileno()).st_size  # a journal may still grow
                    while left and (piece := file.read(min(left, 1 << 20))):
                        hashed.update(piece)
                        left, size = left - len(piece), size + len(piece)
                        print(end="" if size % (1 << 28) else "\n", flush=True)  # alive: 5 GB took 5 min on busy cores
                digest = hashed.hexdigest()
            print(json.dumps([relative, size, digest, path.lstat().st_mtime, target]), flush=True)
            count += 1
    print(count)


def send_ranges(root: str, *ranges: str) -> None:
    """Runs in the pod: write byte ranges of files, each START:END:PATH, one after the other."""
    import sys
    from pathlib import Path

    for text in ranges:
        start, end, path = text.split(":", 2)
        with Path(root, path).open("rb") as file:
            left = int(end) - file.seek(int(start))
            while left > 0:
                piece = file.read(min(left, 1 << 20))
                if not piece:
                    sys.exit(f"{path} is shorter than it was")
                left -= sys.stdout.buffer.write(piece)


def pull(
    client: KubectlClient,
    job: ClusterJob,
    into: Path,
    overwrite: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> list[RemoteEntry]:
    """Download the run folder through a small pod that mounts its volumes; returns the files, each of them verified."""
    RunFolder(into).reject_outside_symlinks()
    for _ in range(MAX_READERS):
        with _reader(client, job) as pod:
            entries = _list(client, pod, job.run_dir)
            download = _Download(client, pod, job.run_dir, into, log)
            try:
                if error := download.run(entries, overwrite):
                    log(f"{error}; listing {job.run_dir} again")
                    continue
            except OSError as cause:
                raise Refused(f"{into}: what was pulled could not be written ({cause})") from None
        shutil.rmtree(into / PARTS_DIR, ignore_errors=True)
        return [entry for entry in entries if entry.sha256]
    raise ClusterError(f"{into} is not complete: {error}; the same command continues where this one ended")


class _Download:
    """Copies what is missing into files named by their hash, and moves each to its place once it is verified."""

    def __init__(self, client: KubectlClient, pod: str, root: str, into: Path, log: Callable[[str], None]) -> None:
        self._client, self._pod, self._root, self._into, self._log = client, pod, root, into, log
        self._parts = into / PARTS_DIR

    def run(self, entries: Sequence[RemoteEntry], overwrite: bool) -> str:
        """Download; returns why files are missing, or an empty text."""
        paths = {entry: _safe_path(entry.path, self._into) for entry in entries}
        for entry in entries:
            if entry.target is not None:
                _check_symlink(paths[entry], entry.target, self._into)
        files = [entry for entry in entries if entry.sha256 and not _is_complete(paths[entry], entry)]
        newer = [entry.path for entry in files if _is_newer(paths[entry], entry)]
        if newer and not overwrite:
            raise UsageError(
                f"{self._into} has files that differ from the job's and are newer ({', '.join(newer[:3])}"
                f"{', …' if len(newer) > 3 else ''}); pull into another folder with --output, or give --overwrite"
            )
        self._parts.mkdir(parents=True, exist_ok=True)
        error = self._fetch({entry.sha256: entry for entry in files}, {entry: paths[entry] for entry in files})
        for entry in entries if not error else ():
            if entry.path.endswith("/"):
                paths[entry].mkdir(parents=True, exist_ok=True)
            elif entry.target is not None:
                _make_symlink(paths[entry], entry.target)
        return error

    def _fetch(self, pending: dict[str, RemoteEntry], paths: dict[RemoteEntry, Path]) -> str:
        failures, error, changed = 0, "", ""
        while pending and failures < MAX_ATTEMPTS:
            batch = _batch(list(pending.values()))
            received, message = self._receive(batch)
            done = [entry for entry in batch if self._part(entry).stat().st_size == entry.size]
            for entry in done:
                if _sha256(self._part(entry)) == entry.sha256:
                    self._move_verified(entry, [path for file, path in paths.items() if file.sha256 == entry.sha256])
                else:
                    self._part(entry).unlink()
                    changed = f"{entry.path} was changed while it was read"
                del pending[entry.sha256]
            if len(done) < len(batch):
                error = message or "the stream ended early"
                self._log(f"{error}, {received / 1e6:,.1f} MB later; {len(pending)} files are left, continuing")
                failures = 0 if received else failures + 1
                time.sleep(min(5.0, 0.1 * 2**failures) if failures else 0.0)
        return error if pending else changed

    def _receive(self, batch: Sequence[RemoteEntry]) -> tuple[int, str]:
        """Append what one exec brings to the parts: the number of bytes, and what it said on stderr."""
        received = 0
        sizes = [self._part_size(entry) for entry in batch]
        ranges = [f"{start}:{entry.size}:{entry.path}" for start, entry in zip(sizes, batch, strict=True)]
        with _exec(self._client, self._pod, send_ranges, self._root, *ranges) as stream:
            for entry in batch:
                with self._part(entry).open("ab") as part:
                    while (left := entry.size - part.tell()) and (piece := stream.read(min(left, CHUNK))):
                        received += part.write(piece)
        return received, stream.error

    def _part(self, entry: RemoteEntry) -> Path:
        return self._parts / entry.sha256

    def _part_size(self, entry: RemoteEntry) -> int:
        part = self._part(entry)
        if part.is_symlink() or (part.exists() and part.stat().st_size > entry.size):
            part.unlink()
        return part.stat().st_size if part.exists() else 0

    def _move_verified(self, entry: RemoteEntry, destinations: Sequence[Path]) -> None:
        part = self._part(entry)
        for path in destinations:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.utime(part, (entry.mtime, entry.mtime))
            if path == destinations[-1]:
                part.replace(path)
            else:  # several files have this content
                Path(shutil.copy2(part, part.with_suffix(".copy"))).replace(path)


@dataclass
class _Stream:
    """The output of a command in the pod."""

    process: subprocess.Popen[bytes]
    error: str = ""
    """The last line of stderr, known at the end."""

    def read(self, count: int) -> bytes:
        """Up to so many bytes; none at the end, or when the stream has stalled."""
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], STALL_TIMEOUT)[0]
        return os.read(self.process.stdout.fileno(), count) if ready else b""


@contextmanager
def _exec(client: KubectlClient, pod: str, function: Callable[..., None], *args: str) -> Iterator[_Stream]:
    """Run one of our functions in the pod, whose image needs nothing but Python for it."""
    source = f"{inspect.getsource(function)}\nimport sys\n{function.__name__}(*sys.argv[1:])"
    with tempfile.TemporaryFile() as errors:
        stream = _Stream(client.popen("exec", pod, "--", "python", "-c", source, *args, stderr=errors))
        with stream.process:
            try:
                yield stream
                stream.process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                pass
            finally:
                stream.process.kill()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        stream.error = lines[-1] if lines else ""


def _list(client: KubectlClient, pod: str, root: str) -> list[RemoteEntry]:
    """What is in the run folder; a list without its last line was cut, and is asked for again."""
    for _ in range(MAX_ATTEMPTS):
        with _exec(client, pod, list_files, root) as stream:
            pieces = list(iter(lambda: stream.read(CHUNK), b""))
        *rows, last = list(filter(None, b"".join(pieces).decode().splitlines())) or [""]
        if last == str(len(rows)):
            return [_parse_entry(row) for row in rows]
        if stream.error.startswith("there is no folder"):
            raise ClusterError(f"{pod}: {stream.error}; the job has not written anything yet")
        time.sleep(0.2)
    raise ClusterError(f"{pod}: {root} could not be listed: {stream.error or 'the stream ended early'}")


def _parse_entry(row: str) -> RemoteEntry:
    """One line of the list; a pod may say anything."""
    try:
        path, size, sha256, mtime, target = json.loads(row)
        entry = RemoteEntry(str(path), int(size), str(sha256), float(mtime), None if target is None else str(target))
    except (ValueError, TypeError):
        raise Refused(f"the pod's list of files has a line that is none of ours: {row[:80]!r}") from None
    if entry.size < 0 or not re.fullmatch(r"([0-9a-f]{64})?", entry.sha256):
        raise Refused(f"the pod's list of files has a line that is none of ours: {row[:80]!r}")
    return entry


def _batch(entries: Sequence[RemoteEntry]) -> list[RemoteEntry]:
    """The first entries, as many as fit into one command."""
    batch, chars = [entries[0]], len(entries[0].path)
    for entry in entries[1:]:
        chars += len(entry.path) + 20
        if chars > MAX_ARGS_CHARS:
            break
        batch.append(entry)
    return batch


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_complete(path: Path, entry: RemoteEntry) -> bool:
    regular = path.is_file() and not path.is_symlink()
    return regular and path.stat().st_size == entry.size and _sha256(path) == entry.sha256


def _is_newer(path: Path, entry: RemoteEntry) -> bool:
    return os.path.lexists(path) and path.lstat().st_mtime > entry.mtime + 1.0


def _safe_path(name: str, into: Path) -> Path:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or not parts or parts[0] == PARTS_DIR:
        raise Refused(f"the pod lists {name[:80]!r}, which leads out of the folder; nothing is pulled")
    return into.joinpath(*parts)


def _check_symlink(path: Path, target: str, into: Path) -> None:
    destination = os.path.normpath(path.parent / target)
    if target.startswith("/") or not Path(destination).is_relative_to(os.path.normpath(into)):
        raise Refused(f"the pod lists a link to {target[:80]!r}, which leads out of the folder; nothing is pulled")


def _make_symlink(path: Path, target: str) -> None:
    """Links come last, so that no file is written through one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.symlink_to(target)


@contextmanager
def _reader(client: KubectlClient, job: ClusterJob) -> Iterator[str]:
    """A running pod that mounts the volumes; its own name each time, since an earlier one may still be terminating."""
    pod = _reader_pod(job, f"{job.name}-reader-{uuid.uuid4().hex[:5]}")
    name = str(pod["metadata"]["name"])
    apply_manifests(client, [dump_documents([pod])])
    try:
        _wait_until_running(client, name)
        yield name
    finally:
        client.run("delete", "pod", name, "--ignore-not-found", "--wait=false")


def _reader_pod(job: ClusterJob, name: str) -> dict[str, Any]:
    mounts = [{"name": name, "mountPath": volume.mount} for name, volume in job.cluster.volumes.items()]
    resources = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": job.cluster.namespace},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 3600,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "reader",
                    "image": image(job.cluster),
                    "command": ["sleep", "3600"],
                    "resources": resources,
                    "securityContext": SECURITY_CONTEXT,
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in job.cluster.volumes],
        },
    }


def _wait_until_running(client: KubectlClient, pod: str) -> None:
    deadline, problem = time.monotonic() + READER_TIMEOUT, ""
    while time.monotonic() < deadline:
        resource = json.loads(client.run("get", "pod", pod, "-o", "json"))
        phase, problem = resource.get("status", {}).get("phase"), pod_problem(resource)
        if phase == "Running":
            return
        if phase in ("Failed", "Succeeded") or problem.startswith(FATAL_REASONS):
            raise ClusterError(f"the pod {pod}, which reads the volume, cannot start: {problem or phase}")
        time.sleep(1.0)
    raise ClusterError(f"the pod {pod}, which reads the volume, is not running after {READER_TIMEOUT:.0f} s: {problem}")
