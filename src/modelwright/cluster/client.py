"""Submit, watch, cancel and pull a job through `oc` or `kubectl`; safe extraction of the tar stream of a pod."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from modelwright.cluster.documents import dump_documents
from modelwright.cluster.manifests import SECURITY_CONTEXT, ClusterJob, image
from modelwright.errors import ModelwrightError, Refused, UsageError
from modelwright.runs.folder import RunFolder

RESOURCE_NAMES = {"trainjob": "trainjobs.trainer.kubeflow.org", "pytorchjob": "pytorchjobs.kubeflow.org"}
# by the server: a client's own apply keeps a copy in an annotation, which ends at 256 KiB
APPLY_ARGS = ("apply", "--server-side", "--field-manager=modelwright")
TRAINING_RUNTIMES = "trainingruntimes.trainer.kubeflow.org"
READER_TIMEOUT = 300.0
PHASE_OF_CONDITION = {"Complete": "Succeeded", "Succeeded": "Succeeded", "Failed": "Failed"}


class ClusterError(ModelwrightError):
    """The cluster refused, or could not be reached."""

    exit_code = 1


@dataclass(frozen=True)
class KubectlClient:
    """The oc or kubectl command line."""

    executable: str
    """oc or kubectl, with its path."""
    namespace: str
    """The project."""

    def run(self, *args: str, stdin_text: str | None = None) -> str:
        """Run one command; its stderr becomes the error message when it fails."""
        done = subprocess.run(self._command(args), input=stdin_text, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exited with {done.returncode}"]
            raise ClusterError(f"{' '.join([Path(self.executable).name, *args[:4]])}: {lines[-1]}")
        return done.stdout

    def stream(self, *args: str) -> int:
        """Run a command whose output goes to ours; returns its exit code."""
        return subprocess.run(self._command(args), check=False).returncode

    def popen(self, *args: str) -> subprocess.Popen[bytes]:
        """Start a command whose output we read as bytes."""
        return subprocess.Popen(self._command(args), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _command(self, args: Sequence[str]) -> list[str]:
        return [self.executable, "--namespace", self.namespace, *args]


def find_client(namespace: str) -> KubectlClient:
    """Find oc or kubectl."""
    for name in ("oc", "kubectl"):
        if executable := shutil.which(name):
            return KubectlClient(executable, namespace)
    raise UsageError(
        "neither oc nor kubectl is on the PATH; --render writes what it would send, for oc apply --server-side -f"
    )


@dataclass(frozen=True)
class JobStatus:
    """Status of a job."""

    name: str
    """The job."""
    phase: str
    """Pending, Suspended, Running, Succeeded or Failed."""
    reason: str
    """What the cluster says about it."""
    pods: dict[str, str] = field(default_factory=dict)
    """Pods and their phases, with the last exit code."""
    progress: dict[str, Any] = field(default_factory=dict)
    """What the job itself says: step, loss, time left."""

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def submit(client: KubectlClient, text: str, job: ClusterJob) -> list[str]:
    """Try the manifests by a server-side dry run, then apply them; a finished job of that name is deleted first.

    The runtime is created before the TrainJob is tried: Trainer's webhook refuses a TrainJob whose runtime does not
    exist, and a dry run creates none. If the TrainJob is refused, the runtime is deleted again.
    """
    existing = _get_job(client, job)
    if existing is not None:
        status = _job_status(job.name, existing, {})
        if not status.is_finished:
            raise UsageError(
                f"{job.name} is {status.phase} on the cluster; cancel it first, or give the recipe another name"
            )
    manifests = [part for part in re.split(r"^---$", text, flags=re.MULTILINE) if part.strip()]
    runtimes = [part for part in manifests if "\nkind: TrainingRuntime\n" in part]
    jobs = [part for part in manifests if re.search(r"^kind: (TrainJob|PyTorchJob)$", part, re.MULTILINE)]
    others = [part for part in manifests if part not in [*runtimes, *jobs]]
    output = _apply(client, others, "--dry-run=server")
    if existing is not None or runtimes:  # a runtime may outlive its job, and both have immutable fields
        cancel(client, job)
    output += _apply(client, runtimes)
    try:
        output += _apply(client, jobs, "--dry-run=server")
    except ClusterError:
        if runtimes:
            cancel(client, job)
        raise
    return [*output, *_apply(client, [*others, *jobs])]


def _apply(client: KubectlClient, manifests: Sequence[str], *options: str) -> list[str]:
    if not manifests:
        return []
    return client.run(*APPLY_ARGS, *options, "-f", "-", stdin_text="---".join(manifests)).splitlines()


def status(client: KubectlClient, job: ClusterJob) -> JobStatus:
    """Status of the job, from its conditions and its pods."""
    resource = _get_job(client, job)
    if resource is None:
        raise UsageError(f"there is no {job.job_kind} {job.name} in {client.namespace}; --submit sends it")
    listed = json.loads(client.run("get", "pods", "-l", _selector(job), "-o", "json"))
    return _job_status(job.name, resource, {str(pod["metadata"]["name"]): _pod_phase(pod) for pod in listed["items"]})


def logs(client: KubectlClient, job: ClusterJob, follow: bool = False) -> int:
    """The first pod's log, where rank 0 writes."""
    return client.stream("logs", *(["-f"] if follow else []), rank0_pod(client, job))


def cancel(client: KubectlClient, job: ClusterJob) -> str:
    """Delete the job and its runtime; the volumes and what is on them stay."""
    output = client.run("delete", RESOURCE_NAMES[job.job_kind], job.name, "--ignore-not-found")
    if job.job_kind == "trainjob":
        output += client.run("delete", TRAINING_RUNTIMES, job.name, "--ignore-not-found")
    return output.strip()


def pull(client: KubectlClient, job: ClusterJob, into: Path) -> Path:
    """Download the run folder through a small pod that mounts its volume; local files of the same name are replaced."""
    reader = _reader_pod(job)
    name = str(reader["metadata"]["name"])
    client.run(*APPLY_ARGS, "-f", "-", stdin_text=dump_documents([reader]))
    try:
        _wait_until_running(client, name)
        process = client.popen("exec", name, "--", "tar", "--create", "--file=-", f"--directory={job.run_dir}", ".")
        assert process.stdout is not None and process.stderr is not None
        with process:  # what is refused is not read to its end
            extract_tar(process.stdout, into)
            stderr_text = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode:
            raise ClusterError(f"tar in {name}: {stderr_text}")
    finally:
        client.run("delete", "pod", name, "--ignore-not-found", "--wait=false")
    return into


def rank0_pod(client: KubectlClient, job: ClusterJob) -> str:
    """Name of the pod that runs rank 0; Jobs add a random suffix to it."""
    if job.job_kind == "pytorchjob":
        return f"{job.name}-master-0"
    listed = json.loads(client.run("get", "pods", "-l", _selector(job), "-o", "json"))
    names = sorted(str(pod["metadata"]["name"]) for pod in listed["items"])
    matching = [name for name in names if name.startswith(f"{job.name}-node-0-0")]
    if not matching:
        raise UsageError(f"{job.name} has no pod yet; job status shows whether it waits for a queue or a node")
    return matching[-1]


def _selector(job: ClusterJob) -> str:
    return f"app.kubernetes.io/instance={job.name}"


def _get_job(client: KubectlClient, job: ClusterJob) -> dict[str, Any] | None:
    text = client.run("get", RESOURCE_NAMES[job.job_kind], job.name, "--ignore-not-found", "-o", "json")
    resource: dict[str, Any] | None = json.loads(text) if text.strip() else None
    return resource


def _job_status(name: str, resource: Mapping[str, Any], pods: dict[str, str]) -> JobStatus:
    conditions = resource.get("status", {}).get("conditions") or []
    active = [condition for condition in conditions if condition.get("status") == "True"]
    suspended = resource.get("spec", {}).get("suspend") or resource.get("spec", {}).get("runPolicy", {}).get("suspend")
    phase, reason = ("Suspended", "waiting for Kueue") if suspended else ("Pending", "no pod runs yet")
    if any(text.startswith("Running") for text in pods.values()):
        phase, reason = "Running", ""
    for condition in active:
        if condition["type"] in PHASE_OF_CONDITION:
            phase = PHASE_OF_CONDITION[condition["type"]]
            reason = str(condition.get("message") or condition.get("reason") or "")
    annotation = (resource.get("metadata", {}).get("annotations") or {}).get("trainer.opendatahub.io/trainerStatus")
    progress = json.loads(annotation) if annotation else resource.get("status", {}).get("trainerStatus") or {}
    return JobStatus(name, phase, reason, pods, progress)


def _pod_phase(pod: Mapping[str, Any]) -> str:
    state = pod.get("status", {})
    text = str(state.get("phase", "Unknown"))
    for container in state.get("containerStatuses") or []:
        terminated = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
        text += f", exited with {terminated['exitCode']}" if terminated else ""
        text += f", {container['restartCount']} restarts" if container.get("restartCount") else ""
    return text


def _reader_pod(job: ClusterJob) -> dict[str, Any]:
    """A pod that mounts the volumes and waits to be read."""
    mounts = [{"name": name, "mountPath": volume.mount} for name, volume in job.cluster.volumes.items()]
    resources = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job.name}-reader", "namespace": job.cluster.namespace},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 3600,
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
    deadline = time.monotonic() + READER_TIMEOUT
    while time.monotonic() < deadline:
        resource = json.loads(client.run("get", "pod", pod, "-o", "json"))
        if resource.get("status", {}).get("phase") == "Running":
            return
        time.sleep(1.0)
    raise ClusterError(f"{pod} is not running after {READER_TIMEOUT:.0f} s; oc describe pod {pod} says why")


def extract_tar(archive: IO[bytes], into: Path) -> None:
    """Write every member below the folder; one that would land elsewhere, or is no file, folder or link, is refused.

    Links are created last, so that no file is written through one: tarfile's own filter follows links while it
    extracts and could be led out of the folder (CVE-2025-4517).
    """
    RunFolder(into).reject_outside_symlinks()
    into.mkdir(parents=True, exist_ok=True)
    links: dict[Path, str] = {}
    try:
        with tarfile.open(fileobj=archive, mode="r|") as opened:
            for member in opened:
                path = _safe_path(member.name, into)
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif member.isreg():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _extract_file(opened, member, path)
                elif member.issym():
                    links[path] = member.linkname
                else:
                    raise Refused(f"the archive holds {member.name[:80]!r}, which is no file, folder or link")
    except tarfile.ReadError:
        return  # an empty stream: the sender's stderr says why
    except (OSError, tarfile.TarError) as error:
        raise Refused(f"{into}: the archive could not be unpacked ({str(error)[:200]})") from None
    for path, target in links.items():
        _make_symlink(path, target, into)


def _safe_path(name: str, into: Path) -> Path:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Refused(f"the archive holds {name[:80]!r}, which leads out of the folder; nothing more is unpacked")
    return into.joinpath(*parts)


def _extract_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    with path.open("wb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    os.utime(path, (member.mtime, member.mtime))


def _make_symlink(path: Path, target: str, into: Path) -> None:
    destination = os.path.normpath(path.parent / target)
    if target.startswith("/") or not Path(destination).is_relative_to(os.path.normpath(into)):
        raise Refused(f"the archive holds a link to {target[:80]!r}, which leads out of the folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.symlink_to(target)
