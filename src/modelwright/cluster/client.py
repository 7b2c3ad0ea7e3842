"""Submit, watch and cancel a job through `oc` or `kubectl`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from modelwright.cluster.lint import claim_conflicts
from modelwright.cluster.manifests import ClusterJob, documents
from modelwright.errors import ModelwrightError, UsageError

RESOURCE_NAMES = {"trainjob": "trainjobs.trainer.kubeflow.org", "pytorchjob": "pytorchjobs.kubeflow.org"}
# by the server: a client's own apply keeps a copy in an annotation, which ends at 256 KiB
APPLY_ARGS = ("apply", "--server-side", "--field-manager=modelwright")
TRAINING_RUNTIMES = "trainingruntimes.trainer.kubeflow.org"
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

    def popen(self, *args: str, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command whose output we read as bytes."""
        return subprocess.Popen(self._command(args), stdout=subprocess.PIPE, stderr=stderr, bufsize=0)

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
    claims = json.loads(client.run("get", "persistentvolumeclaims", "-o", "json") or '{"items": []}')["items"]
    if conflicts := claim_conflicts(documents(job), claims):
        raise UsageError("; ".join(conflicts))
    manifests = [part for part in re.split(r"^---$", text, flags=re.MULTILINE) if part.strip()]
    runtimes = [part for part in manifests if "\nkind: TrainingRuntime\n" in part]
    jobs = [part for part in manifests if re.search(r"^kind: (TrainJob|PyTorchJob)$", part, re.MULTILINE)]
    others = [part for part in manifests if part not in [*runtimes, *jobs]]
    output = apply_manifests(client, others, "--dry-run=server")
    if existing is not None or runtimes:  # a runtime may outlive its job, and both have immutable fields
        cancel(client, job)
    output += apply_manifests(client, runtimes)
    try:
        output += apply_manifests(client, jobs, "--dry-run=server")
    except ClusterError:
        if runtimes:
            cancel(client, job)
        raise
    return [*output, *apply_manifests(client, [*others, *jobs])]


def apply_manifests(client: KubectlClient, manifests: Sequence[str], *options: str) -> list[str]:
    """Apply them on the server; returns what it did with each."""
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


def pod_problem(pod: Mapping[str, Any]) -> str:
    """Why a pod does not run, as the kubelet or the scheduler says it; empty where nothing is wrong."""
    state = pod.get("status") or {}
    for container in [*(state.get("initContainerStatuses") or []), *(state.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for condition in state.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"FailedScheduling: {condition.get('message', '')}".rstrip(": ")
    return ""
