"""Send a job to the cluster, follow it, and bring its run home, through `oc` or `kubectl`, whichever is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.errors import ModelwrightError, UsageError
from modelwright.launch.manifests import Job
from modelwright.launch.pods import SECURE, image
from modelwright.launch.stream import write
from modelwright.launch.unpack import unpack

KINDS = {"trainjob": "trainjobs.trainer.kubeflow.org", "pytorchjob": "pytorchjobs.kubeflow.org"}
# by the server: a client's own apply keeps a copy in an annotation, which ends at 256 KiB
APPLY = ("apply", "--server-side", "--field-manager=modelwright")
RUNTIMES = "trainingruntimes.trainer.kubeflow.org"
WORDS = {"Complete": "Succeeded", "Succeeded": "Succeeded", "Failed": "Failed"}


class ClusterError(ModelwrightError):
    """The cluster refused, or could not be reached."""

    exit_code = 1


@dataclass(frozen=True)
class Client:
    """The command that speaks with the cluster."""

    program: str
    """oc or kubectl, with its path."""
    namespace: str
    """The project."""
    variables: Mapping[str, str] | None = None
    """Its variables, such as KUBECONFIG; None: ours."""

    def run(self, *words: str, given: str | None = None) -> str:
        """One command to its end; what it says on stderr becomes the letter when it fails."""
        command = [self.program, "--namespace", self.namespace, *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=self._env())
        if done.returncode:
            said = done.stderr.strip().splitlines()
            shown = " ".join([Path(self.program).name, *words[:4]])
            raise ClusterError(f"{shown}: {said[-1] if said else f'ended with {done.returncode}'}")
        return done.stdout

    def stream(self, *words: str) -> int:
        """A command whose output goes to ours as it comes."""
        return subprocess.run(
            [self.program, "--namespace", self.namespace, *words], check=False, env=self._env()
        ).returncode

    def fetch(self, *words: str) -> subprocess.Popen[bytes]:
        """A command whose output we read as bytes."""
        command = [self.program, "--namespace", self.namespace, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._env())

    def _env(self) -> dict[str, str] | None:
        return dict(self.variables) if self.variables is not None else None


def client(namespace: str, variables: Mapping[str, str] | None = None) -> Client:
    """Find oc or kubectl."""
    path = variables.get("PATH") if variables is not None else None
    for name in ("oc", "kubectl"):
        if found := shutil.which(name, path=path):
            return Client(found, namespace, variables)
    raise UsageError(
        "neither oc nor kubectl is on the PATH; --render writes what it would send, for oc apply --server-side -f"
    )


@dataclass(frozen=True)
class Status:
    """Where a job stands."""

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
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def submit(cluster: Client, text: str, job: Job) -> list[str]:
    """Ask the server whether it would take the stream, then let it; a job that is over is put aside first."""
    said = cluster.run(*APPLY, "--dry-run=server", "-f", "-", given=text)
    before = _job(cluster, job)
    if before is not None:
        status = _status_of(job.name, before, {})
        if not status.over:
            raise UsageError(
                f"{job.name} is {status.phase} on the cluster; cancel it first, or give the recipe another name"
            )
        cancel(cluster, job)
    lines = cluster.run(*APPLY, "-f", "-", given=text).splitlines()
    return [*(f"{line}" for line in said.splitlines()), *lines]


def status(cluster: Client, job: Job) -> Status:
    """Where the job stands, from its conditions and its pods."""
    found = _job(cluster, job)
    if found is None:
        raise UsageError(f"there is no {job.target} {job.name} in {cluster.namespace}; --submit sends it")
    listed = json.loads(cluster.run("get", "pods", "-l", _selector(job), "-o", "json"))
    return _status_of(job.name, found, {str(pod["metadata"]["name"]): _pod_phase(pod) for pod in listed["items"]})


def logs(cluster: Client, job: Job, follow: bool = False) -> int:
    """The first pod's log, where rank 0 writes."""
    return cluster.stream("logs", *(["-f"] if follow else []), first_pod(cluster, job))


def cancel(cluster: Client, job: Job) -> str:
    """Delete the job and its runtime; the volumes and what is on them stay."""
    said = cluster.run("delete", KINDS[job.target], job.name, "--ignore-not-found")
    if job.target == "trainjob":
        said += cluster.run("delete", RUNTIMES, job.name, "--ignore-not-found")
    return said.strip()


def pull(cluster: Client, job: Job, into: Path, patience: float = 300.0) -> Path:
    """Bring the run folder home through a small pod that reads its volume; nothing of it overwrites a newer file."""
    reader = _reader(job)
    name = str(reader["metadata"]["name"])
    cluster.run(*APPLY, "-f", "-", given=write([reader]))
    try:
        _wait_for(cluster, name, patience)
        sent = cluster.fetch("exec", name, "--", "tar", "--create", "--file=-", f"--directory={job.run_folder}", ".")
        assert sent.stdout is not None and sent.stderr is not None
        with sent:  # what is refused is not read to its end
            unpack(sent.stdout, into)
            said = sent.communicate()[1].decode(errors="replace").strip()
        if sent.returncode:
            raise ClusterError(f"tar in {name}: {said}")
    finally:
        cluster.run("delete", "pod", name, "--ignore-not-found", "--wait=false")
    return into


def first_pod(cluster: Client, job: Job) -> str:
    """The name of the pod that rank 0 runs in; Jobs add letters of their own to it."""
    if job.target == "pytorchjob":
        return f"{job.name}-master-0"
    listed = json.loads(cluster.run("get", "pods", "-l", _selector(job), "-o", "json"))
    names = sorted(str(pod["metadata"]["name"]) for pod in listed["items"])
    found = [name for name in names if name.startswith(f"{job.name}-node-0-0")]
    if not found:
        raise UsageError(f"{job.name} has no pod yet; status tells whether it waits for a queue or a node")
    return found[-1]


def _selector(job: Job) -> str:
    return f"app.kubernetes.io/instance={job.name}"


def _job(cluster: Client, job: Job) -> dict[str, Any] | None:
    text = cluster.run("get", KINDS[job.target], job.name, "--ignore-not-found", "-o", "json")
    found: dict[str, Any] | None = json.loads(text) if text.strip() else None
    return found


def _status_of(name: str, found: Mapping[str, Any], pods: dict[str, str]) -> Status:
    conditions = found.get("status", {}).get("conditions") or []
    holding = [each for each in conditions if each.get("status") == "True"]
    suspended = found.get("spec", {}).get("suspend") or found.get("spec", {}).get("runPolicy", {}).get("suspend")
    phase, reason = ("Suspended", "waits for its queue") if suspended else ("Pending", "no pod runs yet")
    if any(text.startswith("Running") for text in pods.values()):
        phase, reason = "Running", ""
    for each in holding:
        if each["type"] in WORDS:
            phase, reason = WORDS[each["type"]], str(each.get("message") or each.get("reason") or "")
    told = (found.get("metadata", {}).get("annotations") or {}).get("trainer.opendatahub.io/trainerStatus")
    progress = json.loads(told) if told else found.get("status", {}).get("trainerStatus") or {}
    return Status(name, phase, reason, pods, progress)


def _pod_phase(pod: Mapping[str, Any]) -> str:
    state = pod.get("status", {})
    text = str(state.get("phase", "Unknown"))
    for each in state.get("containerStatuses") or []:
        ended = each.get("state", {}).get("terminated") or each.get("lastState", {}).get("terminated")
        text += f", ended with {ended['exitCode']}" if ended else ""
        text += f", {each['restartCount']} restarts" if each.get("restartCount") else ""
    return text


def _reader(job: Job) -> dict[str, Any]:
    """A pod that mounts the volumes and waits to be read."""
    mounts = [{"name": name, "mountPath": volume.mount} for name, volume in job.cluster.volumes.items()]
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
                    "resources": {
                        "requests": {"cpu": "100m", "memory": "128Mi"},
                        "limits": {"cpu": "1", "memory": "1Gi"},
                    },
                    "securityContext": SECURE,
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in job.cluster.volumes],
        },
    }


def _wait_for(cluster: Client, pod: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = json.loads(cluster.run("get", "pod", pod, "-o", "json"))
        if found.get("status", {}).get("phase") == "Running":
            return
        time.sleep(1.0)
    raise ClusterError(f"{pod} does not run after {patience:.0f} s; oc describe pod {pod} tells why")
