"""Download a run folder from a cluster's volume: list every file with its hash, copy what is missing, verify each.

`oc exec` may cut its stream and still exit 0: 2 of 11 pulls of 2.5 GB from a real cluster ended 3 to 5 MB short. So
only size and SHA-256 say that a file is complete."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

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
CUT = "the stream ended early"
PARTS_DIR = ".pull"
POD_IMPORTS = "import hashlib, json, os, sys\nfrom pathlib import Path"
FATAL_REASONS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
"""Why a container waits for what will not come."""


class RemoteEntry(NamedTuple):
    """A file, folder or link of the run folder, as the pod lists it."""

    path: str  # below the run folder; a folder's ends with a slash
    size: int
    sha256: str  # of that many bytes; empty for folders and links
    mtime: float
    target: str | None  # where a link leads


def list_files(root: str) -> None:
    """Runs in the pod: print what is below the folder, one JSON array a line, and at the end the number of lines."""
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
    for text in ranges:
        start, end, path = text.split(":", 2)
        with Path(root, path).open("rb") as file:
            left = int(end) - file.seek(int(start))
            while left > 0:
                if not (piece := file.read(min(left, 1 << 20))):
                    sys.exit(f"{path} is shorter than it was")
                left -= sys.stdout.buffer.write(piece)


def pull(
    client: KubectlClient, job: ClusterJob, into: Path, overwrite: bool = False, log: Callable[[str], object] = str
) -> list[RemoteEntry]:
    """Download the run folder through a small pod that mounts its volumes; returns the files, each of them verified."""
    RunFolder(into).reject_unsafe_files()
    for _ in range(MAX_READERS):
        with _reader(client, job) as reader:
            entries = reader.list_entries()
            paths = {entry: _local_path(entry, into) for entry in entries}
            missing = {entry: path for entry, path in paths.items() if entry.sha256 and not _is_complete(path, entry)}
            newer = [
                file.path for file, path in missing.items() if path.exists() and path.stat().st_mtime > file.mtime + 1
            ]
            if newer and not overwrite:
                raise UsageError(
                    f"{into} has files that differ from the job's and are newer ({', '.join(newer[:3])}"
                    f"{', …' if len(newer) > 3 else ''}); pull into another folder with --output, or give --overwrite"
                )
            try:
                if not (error := _download(reader, missing, into / PARTS_DIR, log)):
                    _make_folders_and_links(paths)
                    shutil.rmtree(into / PARTS_DIR, ignore_errors=True)
                    return [entry for entry in entries if entry.sha256]
            except OSError as cause:
                raise Refused(f"{into}: what was pulled could not be written ({cause})") from None
        log(f"{error}; listing {job.run_dir} again")
    raise ClusterError(f"{into} is not complete: {error}; the same command continues where this one ended")


def _download(reader: _Reader, missing: Mapping[RemoteEntry, Path], parts: Path, log: Callable[[str], object]) -> str:
    """Copy into parts, and move each to its place once it is verified; returns why files are missing, or an empty text.

    A part is named by path and hash: what a stopped pull has left is continued."""
    parts.mkdir(parents=True, exist_ok=True)
    pending = {entry: parts / hashlib.sha256(f"{entry.path}:{entry.sha256}".encode()).hexdigest() for entry in missing}
    failures, error, changed = 0, "", ""
    while pending and failures < MAX_ATTEMPTS:
        chars = itertools.accumulate(len(entry.path) + 20 for entry in pending)
        batch = dict(itertools.islice(pending.items(), max(1, sum(count <= MAX_ARGS_CHARS for count in chars))))
        received, message = reader.receive(batch)
        for entry, part in batch.items():
            if part.stat().st_size >= entry.size:  # more where two pulls wrote to it
                del pending[entry]
                if _is_complete(part, entry):
                    os.utime(part, (entry.mtime, entry.mtime))
                    missing[entry].parent.mkdir(parents=True, exist_ok=True)
                    part.replace(missing[entry])
                else:
                    part.unlink()
                    changed = f"{entry.path} was changed while it was read"
        if not batch.keys().isdisjoint(pending):
            error = message
            log(f"{error}, {received / 1e6:,.1f} MB later; {len(pending)} files are left, continuing")
            failures = 0 if received else failures + 1
            time.sleep(min(5.0, 0.1 * 2**failures) if failures else 0.0)
    return error if pending else changed


class _Reader(NamedTuple):
    """A running pod that mounts the volumes; its image needs nothing but Python."""

    client: KubectlClient
    pod: str
    root: str  # the run folder on the volume

    def list_entries(self) -> list[RemoteEntry]:
        """What is in the run folder; a list without its last line was cut, and is asked for again."""
        for _ in range(MAX_ATTEMPTS):
            errors: list[str] = []
            lines = b"".join(self._exec(errors, list_files)).decode().splitlines()
            *rows, last = list(filter(None, lines)) or [""]
            if last == str(len(rows)):
                return [_parse_entry(row) for row in rows]
            if errors and errors[0].startswith("there is no folder"):
                raise ClusterError(f"{self.pod}: {errors[0]}; the job has not written anything yet")
            time.sleep(0.2)
        raise ClusterError(f"{self.pod}: {self.root} could not be listed: {(errors or [CUT])[0]}")

    def receive(self, batch: Mapping[RemoteEntry, Path]) -> tuple[int, str]:
        """Append what one exec brings to the parts: the number of bytes, and why no more came."""
        errors: list[str] = []
        sizes = [part.stat().st_size if part.exists() else 0 for part in batch.values()]
        ranges = [f"{size}:{entry.size}:{entry.path}" for size, entry in zip(sizes, batch, strict=True)]
        received, piece = 0, b""
        with closing(self._exec(errors, send_ranges, *ranges)) as pieces:
            for entry, part in batch.items():
                with part.open("ab") as file:
                    while (left := entry.size - file.tell()) > 0 and (piece := piece or next(pieces, b"")):
                        received += (written := file.write(piece[:left]))
                        piece = piece[written:]
        return received, (errors or [CUT])[0]

    def _exec(self, errors: list[str], function: Callable[..., None], *args: str) -> Generator[bytes]:
        """The output of one of our functions, run in the pod; at its end the last line of stderr is in `errors`."""
        source = f"{POD_IMPORTS}\n{inspect.getsource(function)}\n{function.__name__}(*sys.argv[1:])"
        command = ("exec", self.pod, "--", "python", "-c", source, self.root, *args)
        with tempfile.TemporaryFile() as stderr, self.client.popen(*command, stderr=stderr) as process:
            stdout = process.stdout
            assert stdout is not None
            try:
                while select.select([stdout], [], [], STALL_TIMEOUT)[0] and (piece := stdout.read(1 << 20)):
                    yield piece
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5.0)
            finally:
                process.kill()
            stderr.seek(0)
            errors += stderr.read().decode(errors="replace").strip().splitlines()[-1:]


@contextmanager
def _reader(client: KubectlClient, job: ClusterJob) -> Iterator[_Reader]:
    """A reader with its own name each time, since an earlier one may still be terminating."""
    name = f"{job.name}-reader-{uuid.uuid4().hex[:5]}"
    apply_manifests(client, [dump_documents([_reader_pod(job, name)])])
    try:
        _wait_until_running(client, name)
        yield _Reader(client, name, job.run_dir)
    finally:
        client.run("delete", "pod", name, "--ignore-not-found", "--wait=false")


def _reader_pod(job: ClusterJob, name: str) -> dict[str, Any]:
    volumes = job.cluster.volumes
    container = {
        "name": "reader",
        "image": image(job.cluster),
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": SECURITY_CONTEXT,
        "volumeMounts": [{"name": claim, "mountPath": volume.mount} for claim, volume in volumes.items()],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": 3600,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in volumes],
    }
    metadata = {"name": name, "namespace": job.cluster.namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


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


def _parse_entry(row: str) -> RemoteEntry:
    """One line of the list; a pod may say anything."""
    with suppress(ValueError, TypeError):
        path, size, sha256, mtime, target = json.loads(row)
        entry = RemoteEntry(str(path), int(size), str(sha256), float(mtime), None if target is None else str(target))
        if entry.size >= 0 and re.fullmatch(r"([0-9a-f]{64})?", entry.sha256):
            return entry
    raise Refused(f"the pod's list of files has a line that is none of ours: {row[:80]!r}")


def _local_path(entry: RemoteEntry, into: Path) -> Path:
    """Where it goes; refused where that, or what a link leads to, is not below the folder."""
    path, parts = into / entry.path, PurePosixPath(entry.path).parts
    inside = bool(parts) and parts[0] not in ("/", PARTS_DIR) and ".." not in parts and "\0" not in entry.path
    target = os.path.normpath(path.parent / (entry.target or ""))
    if not inside or not Path(target).is_relative_to(os.path.normpath(into)):
        what = f"a link to {entry.target}" if inside else entry.path
        raise Refused(f"the pod lists {what[:80]!r}, which leads out of the folder; nothing is pulled")
    return path


def _is_complete(path: Path, entry: RemoteEntry) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def _make_folders_and_links(paths: Mapping[RemoteEntry, Path]) -> None:
    """After the files, so that none is written through a link."""
    for entry, path in paths.items():
        if entry.target is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                path.unlink()
            if not path.exists():
                path.symlink_to(entry.target)
        elif not entry.sha256:
            path.mkdir(parents=True, exist_ok=True)
