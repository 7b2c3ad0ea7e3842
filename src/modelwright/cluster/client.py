"""Submit, watch and cancel a job through `oc` or `kubectl`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from modelwright.cluster.lint import claim_conflicts
from modelwright.cluster.manifests import ClusterJob, documents
from modelwright.errors import ModelwrightError, UsageError

RESOURCE_NAMES = {"trainjob": "trainjobs.trainer.kubeflow.org", "pytorchjob": "pytorchjobs.kubeflow.org"}
# by the server: a client's own apply keeps a copy in an annotation, which ends at 256 KiB
APPLY_ARGS = ("apply", "--server-side", "--field-manager=modelwright")
TRAINING_RUNTIMES = "trainingruntimes.trainer.kubeflow.org"
ANSWER_TIMEOUT = 15.0
"""Seconds for a question; a silent host took 214 s with the client's own limits."""
WRITE_TIMEOUT = 120.0
"""Seconds for what webhooks and finalizers take part in."""
KLOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:")
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
    context: str | None = None
    """Context of the kubeconfig; none: the current one."""

    def run(self, *args: str, stdin_text: str | None = None) -> str:
        """Run one command; the cause from its stderr becomes the error message when it fails."""
        limit = ANSWER_TIMEOUT if args[0] == "get" else WRITE_TIMEOUT
        # kubectl asks five times for what the server offers, so its own limit would be five times as long
        command = self._command((*args, f"--request-timeout={limit:g}s"))
        what = " ".join([Path(self.executable).name, *[arg for arg in args[:3] if not arg.startswith("-")]])
        try:
            done = subprocess.run(command, input=stdin_text, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"{what}: the cluster did not answer within {limit:g} s; check the network (VPN, proxy) and the server "
                f"of your kubeconfig ({Path(self.executable).name} config view --minify), or give --context"
            ) from None
        if done.returncode:
            raise ClusterError(f"{what}: {error_cause(done.stderr) or f'exited with {done.returncode}'}")
        return done.stdout

    def stream(self, *args: str) -> None:
        """Run a command whose output goes to ours, for as long as it takes."""
        done = subprocess.run(self._command(args), stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{args[0]}: {error_cause(done.stderr) or f'exited with {done.returncode}'}")

    def popen(self, *args: str, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command whose output we read as bytes."""
        return subprocess.Popen(self._command(args), stdout=subprocess.PIPE, stderr=stderr, bufsize=0)

    def _command(self, args: Sequence[str]) -> list[str]:
        context = ["--context", self.context] if self.context else []
        return [self.executable, "--namespace", self.namespace, *context, *args]


def error_cause(stderr: str) -> str:
    """What went wrong, from all of stderr: without the client's log lines, each line once, and how to log in again."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    causes = [line for line in lines if not KLOG_LINE.match(line) and not line.startswith("Warning:")]
    cause = "; ".join(dict.fromkeys(causes or lines[-1:])).replace(":; ", ": ")[:1000]
    if re.search(r"Unauthorized|must be logged in|provide credentials|token (has|is) expired", stderr):
        cause += "; your login has expired or is missing: oc login, then the same command again"
    return cause


def find_client(namespace: str, context: str | None = None) -> KubectlClient:
    """Find oc or kubectl."""
    for name in ("oc", "kubectl"):
        if executable := shutil.which(name):
            return KubectlClient(executable, namespace, context)
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
        status = _job_status(job, existing, [])
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
    pods = _pods(client, job)
    status = _job_status(job, resource, pods)
    if status.is_finished or status.phase == "Suspended" or any(map(pod_problem, pods)):
        return status
    if status.phase == "Running" and not status.reason:
        return status
    warning = _last_warning(client, job, resource)
    return replace(status, reason=f"{status.reason}; {warning}" if warning else status.reason)


def logs(client: KubectlClient, job: ClusterJob, follow: bool = False, previous: bool = False) -> None:
    """The first pod's log, where rank 0 writes; or that of its container before the last restart."""
    options = [*(["-f"] if follow else []), *(["--previous"] if previous else [])]
    client.stream("logs", *options, rank0_pod(client, job))


def cancel(client: KubectlClient, job: ClusterJob) -> str:
    """Delete the job and its runtime; the volumes and what is on them stay."""
    output = client.run("delete", RESOURCE_NAMES[job.job_kind], job.name, "--ignore-not-found")
    if job.job_kind == "trainjob":
        output += client.run("delete", TRAINING_RUNTIMES, job.name, "--ignore-not-found")
    return output.strip()


def rank0_pod(client: KubectlClient, job: ClusterJob) -> str:
    """Name of the pod that runs rank 0; Jobs add a random suffix to it."""
    names = sorted(str(pod["metadata"]["name"]) for pod in _pods(client, job))
    prefix = f"{job.name}-master-0" if job.job_kind == "pytorchjob" else f"{job.name}-node-0-0"
    matching = [name for name in names if name.startswith(prefix)]
    if not matching:
        raise UsageError(f"{job.name} has no pod yet; job status shows whether it waits for a queue or a node")
    return matching[-1]


def _pods(client: KubectlClient, job: ClusterJob) -> list[dict[str, Any]]:
    pods: list[dict[str, Any]] = json.loads(client.run("get", "pods", "-l", _selector(job), "-o", "json"))["items"]
    return pods


def _selector(job: ClusterJob) -> str:
    return f"app.kubernetes.io/instance={job.name}"


def _get_job(client: KubectlClient, job: ClusterJob) -> dict[str, Any] | None:
    text = client.run("get", RESOURCE_NAMES[job.job_kind], job.name, "--ignore-not-found", "-o", "json")
    resource: dict[str, Any] | None = json.loads(text) if text.strip() else None
    return resource


def _job_status(job: ClusterJob, resource: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> JobStatus:
    conditions = resource.get("status", {}).get("conditions") or []
    spec, nodes = resource.get("spec", {}), job.cluster.nodes
    problem = next(filter(None, map(pod_problem, pods)), "")
    running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    phase, reason = ("Running", "") if running else ("Pending", problem or "no pod runs yet")
    if 0 < running < nodes or (running and problem):
        reason = f"{running} of {nodes} pods running" + (f"; {problem}" if problem else "")
    if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):
        phase, reason = "Suspended", "waiting for Kueue" if job.cluster.local_queue else "spec.suspend is true"
    for condition in conditions:
        if condition.get("status") == "True" and condition.get("type") in PHASE_OF_CONDITION:
            phase = PHASE_OF_CONDITION[condition["type"]]
            reason = str(condition.get("message") or condition.get("reason") or "")
    phases = {str(pod["metadata"]["name"]): _pod_phase(pod) for pod in pods}
    return JobStatus(job.name, phase, reason, phases, _progress(resource))


def _progress(resource: Mapping[str, Any]) -> dict[str, Any]:
    text = (resource.get("metadata", {}).get("annotations") or {}).get("trainer.opendatahub.io/trainerStatus")
    progress = resource.get("status", {}).get("trainerStatus") or {}
    if text:
        try:
            progress = json.loads(text)
        except ValueError:
            progress = None
    return progress if isinstance(progress, dict) else {"malformed annotation": str(text)[:80]}


def _last_warning(client: KubectlClient, job: ClusterJob, resource: Mapping[str, Any]) -> str:
    """The last warning event of the job, its Jobs or its pods: why no pod was created, or what one waits for."""
    try:
        listed = json.loads(client.run("get", "events", "--field-selector", "type=Warning", "-o", "json"))["items"]
    except ClusterError:
        return ""  # the account may not read events
    name, since = re.escape(job.name), str(resource.get("metadata", {}).get("creationTimestamp") or "")
    warnings = [
        (str(event.get("lastTimestamp") or event.get("eventTime") or ""), f"{event['reason']}: {event['message']}")
        for event in listed
        if re.fullmatch(rf"{name}(-(node|master|worker)-.*)?", str(event.get("involvedObject", {}).get("name")))
    ]
    return max(((when, text) for when, text in warnings if when >= since), default=("", ""))[1]


def _pod_phase(pod: Mapping[str, Any]) -> str:
    state = pod.get("status", {})
    text = str(state.get("phase", "Unknown"))
    for container in state.get("containerStatuses") or []:
        terminated = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
        text += f", exited with {terminated.get('exitCode')}" if terminated else ""
        text += f", {container['restartCount']} restarts" if container.get("restartCount") else ""
    problem = pod_problem(pod)
    return f"{text}, {problem}" if problem else text


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
