"""Render a recipe as a cluster job: volumes, ConfigMap, runtime and job, in one stream that a person can read."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modelwright.launch import parcel as parcels
from modelwright.launch.parcel import Parcel
from modelwright.launch.pods import CODE, PROGRESS_PORT, Pod, container, pod_spec, resources
from modelwright.launch.stream import Document, Remarks, write
from modelwright.recipe.cluster import Cluster
from modelwright.recipe.schema import Recipe
from modelwright.runs import journal

Target = Literal["trainjob", "pytorchjob"]
LONGEST_NAME = 48
"""Characters of a job's name: pods add `-node-0-0` to it, and names end at 63."""
GRACE_UNMEASURED = 120
"""Seconds for a last checkpoint where no save was measured."""
NO_SECOND_TRY = (2, 3, 76, 77)
"""Exit codes that a second start would only repeat: wrong recipe, closed gate, diverged, refused."""


@dataclass(frozen=True)
class Job:
    """A recipe as the cluster will run it."""

    name: str
    """Name of the job and of what belongs to it."""
    target: Target
    """Kind of job."""
    parcel: Parcel
    """What travels in the ConfigMap."""
    cluster: Cluster
    """What is asked of the cluster."""
    save_seconds: float | None = None
    """The longest save that a run of this recipe took, where one was measured."""

    @property
    def grace_seconds(self) -> int:
        """Time between SIGTERM and SIGKILL: three saves and half a minute for the step before, at least a minute."""
        if self.save_seconds is None:
            return GRACE_UNMEASURED
        return max(60, math.ceil(3 * self.save_seconds) + 30)

    @property
    def run_folder(self) -> str:
        return str(self.parcel.recipe.output_dir)


def job_of(recipe: Recipe, beside: Path, target: Target | None = None, save_seconds: float | None = None) -> Job:
    """What a recipe means on the cluster."""
    cluster = recipe.cluster or Cluster()
    packed = parcels.pack(recipe, cluster, beside)
    return Job(job_name(recipe.name), target or cluster.target, packed, cluster, save_seconds)


def job_name(name: str) -> str:
    """A recipe's name as Kubernetes takes it: it begins with a letter, and has no dots."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}"
    return label[:LONGEST_NAME].strip("-")


def measured_save(run: Path) -> float | None:
    """The longest save in a run's journal, in seconds."""
    path = run / "journal.jsonl"
    if not path.is_file():
        return None
    return max((float(event["seconds"]) for event in journal.read(path) if event.get("event") == "saved"), default=None)


def render(job: Job) -> str:
    """The whole stream with its comments."""
    return write(documents(job), _remarks(job))


def documents(job: Job) -> list[Document]:
    """Everything that is applied, in the order that it is needed."""
    found = [*(_claim(job, name) for name in job.cluster.volumes), _recipe_map(job)]
    if job.cluster.code == "configmap":
        content = base64.b64encode(parcels.program()).decode("ascii")
        found.append(_document(job, "v1", "ConfigMap", f"{job.name}-code") | {"binaryData": {CODE: content}})
    return [*found, *(_train_job(job) if job.target == "trainjob" else [_pytorch_job(job)])]


def _document(job: Job, version: str, kind: str, name: str, **metadata: Any) -> Document:
    labels = {"app.kubernetes.io/part-of": "modelwright", **metadata.pop("labels", {})}
    about = {"name": name, "namespace": job.cluster.namespace, "labels": labels, **metadata}
    return {"apiVersion": version, "kind": kind, "metadata": about}


def _claim(job: Job, name: str) -> Document:
    volume = job.cluster.volumes[name]
    mode = volume.access_mode
    if mode == "auto":
        mode = "ReadWriteMany" if job.cluster.nodes > 1 else "ReadWriteOnce"
    about = {"labels": {"opendatahub.io/dashboard": "true"}, "annotations": {"openshift.io/display-name": name}}
    spec: dict[str, Any] = {"accessModes": [mode], "resources": {"requests": {"storage": volume.size}}}
    if volume.storage_class:
        spec["storageClassName"] = volume.storage_class
    return _document(job, "v1", "PersistentVolumeClaim", name, **about) | {"spec": spec}


def _recipe_map(job: Job) -> Document:
    labels = {"app.kubernetes.io/instance": job.name, "opendatahub.io/dashboard": "true"}
    return _document(job, "v1", "ConfigMap", f"{job.name}-recipe", labels=labels) | parcels.config_data(job.parcel)


def _about_job(job: Job) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": job.name}
    if job.cluster.queue:
        labels["kueue.x-k8s.io/queue-name"] = job.cluster.queue
    annotations = {"opendatahub.io/display-name": job.parcel.recipe.name}
    if job.target == "trainjob":
        annotations["trainer.opendatahub.io/progression-tracking"] = "true"
        annotations["trainer.opendatahub.io/metrics-port"] = str(PROGRESS_PORT)
    return {"labels": labels, "annotations": annotations}


def _pod(job: Job, name: str, variables: dict[str, str]) -> Pod:
    return Pod(job.name, name, job.cluster, job.grace_seconds, variables)


def _train_job(job: Job) -> list[Document]:
    """A runtime of our own and a thin job: no override field, so that Trainer 2.1 and 2.3 take the same job."""
    cluster, pod = job.cluster, _pod(job, "node", {})
    spec = {"restartPolicy": "Never", **pod_spec(pod, container(pod, ports={"progress": PROGRESS_PORT}))}
    no_second_try = {"containerName": "node", "operator": "In", "values": list(NO_SECOND_TRY)}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": no_second_try}]},
                "template": {"metadata": {"labels": {"app.kubernetes.io/instance": job.name}}, "spec": spec},
            },
        },
    }
    rule = {"name": "no-second-try", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobset = {"failurePolicy": {"maxRestarts": cluster.restarts, "rules": [rule]}, "replicatedJobs": [node]}
    version = "trainer.kubeflow.org/v1alpha1"
    runtime = _document(job, version, "TrainingRuntime", job.name) | {
        "spec": {"mlPolicy": {"numNodes": cluster.nodes, "torch": {}}, "template": {"spec": jobset}}
    }
    trainer: dict[str, Any] = {
        "numNodes": cluster.nodes,
        "numProcPerNode": max(1, cluster.gpus_per_node),
        "resourcesPerNode": resources(cluster),
    }
    if variables := job.parcel.variables():
        trainer["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    thin = _document(job, version, "TrainJob", job.name, **_about_job(job))
    return [runtime, thin | {"spec": {"runtimeRef": reference, "trainer": trainer}}]


def _pytorch_job(job: Job) -> Document:
    cluster = job.cluster
    pod = _pod(job, "pytorch", job.parcel.variables())
    main = container(pod, ports={"pytorchjob-port": 23456}) | {"resources": resources(cluster)}
    about = {"labels": {"app.kubernetes.io/instance": job.name}}
    replica = {
        "restartPolicy": "OnFailure" if cluster.restarts else "Never",
        "template": {"metadata": about, "spec": pod_spec(pod, main)},
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if cluster.nodes > 1:
        replicas["Worker"] = {"replicas": cluster.nodes - 1, **replica}
    policy = {"cleanPodPolicy": "None", "backoffLimit": cluster.restarts * cluster.nodes + 1}
    spec = {
        "nprocPerNode": str(max(1, cluster.gpus_per_node)),
        "runPolicy": policy,
        "pytorchReplicaSpecs": replicas,
    }
    return _document(job, "kubeflow.org/v1", "PyTorchJob", job.name, **_about_job(job)) | {"spec": spec}


def _remarks(job: Job) -> Remarks:
    cluster = job.cluster
    world = cluster.nodes * max(1, cluster.gpus_per_node)
    measured = f"the longest save took {job.save_seconds:.1f} s" if job.save_seconds else "no save was measured yet"
    top = [
        f"{job.name}: {cluster.nodes} pod{'s' * (cluster.nodes > 1)} × {max(1, cluster.gpus_per_node)} process"
        f"{'es' * (cluster.gpus_per_node > 1)} = world {world}. Rendered by modelwright launch.",
        f"The namespace is made once and kept: oc new-project {cluster.namespace}",
    ]
    if cluster.token_secret:
        top.append(
            f"The token comes from a Secret: oc create secret generic {cluster.token_secret} --from-file=HF_TOKEN=FILE"
        )
    if cluster.queue:
        top.append(f"The queue {cluster.queue} is a LocalQueue that the administrator binds to a ClusterQueue.")
    else:
        top.append("Without cluster.queue the job does not appear under the project's workload metrics (Kueue).")
    return Remarks("\n".join(top) + "\n", _OF_DOCUMENTS, {
        **_OF_KEYS,
        "backoffLimit": _BACKOFF[job.target].format(restarts=cluster.restarts, nodes=cluster.nodes),
        "terminationGracePeriodSeconds": f"SIGTERM saves a checkpoint and ends with 75; {measured}.",
    })  # fmt: skip


_BACKOFF = {
    "trainjob": "One lost pod ends this Job, and failurePolicy begins them all again, from the last checkpoint.",
    "pytorchjob": "Counts the restarts of all pods, and one lost pod restarts all of them: {restarts} × {nodes} + 1.",
}
_OF_DOCUMENTS = {
    "PersistentVolumeClaim": "Kept when the job is deleted.",
    "ConfigMap": "What the pods run; they see it under /etc/modelwright.",
    "TrainingRuntime": "How the pods look; it belongs to this job alone.",
    "TrainJob": "The job itself; OpenShift AI 3.2 and later. No override field, so Trainer 2.1 and 2.3 take it alike.",
    "PyTorchJob": "The job itself; OpenShift AI up to 3.5 (gone in 3.6: use --target trainjob there).",
}
_OF_KEYS = {
    "accessModes": "Several nodes write to it only with ReadWriteMany.",
    "podFailurePolicy": "Wrong recipe (2), closed gate (3), diverged (76), refused (77): a second start ends the same.",
    "PyTorchJob restartPolicy": "Whatever ends a pod early, it starts again and goes on from the last checkpoint.",
    "TrainingRuntime restartPolicy": "podFailurePolicy asks for it; failurePolicy above makes the new pods.",
    "command": "torchrun without flags, which the operator's PET_ variables replace; it ends with the run's exit code.",
    "TrainJob env": "Settings of the recipe under the names that its environment map gives them.",
    "env": "HOME and caches lie where a random user id can write.",
    "nodeSelector": "Another GPU model is not taken in its place; the pods wait instead.",
    "nprocPerNode": "A string, and never auto: on a node of 64 cores auto would be 64 processes.",
    "secretKeyRef": "The token stays in the Secret.",
    "securityContext": "What restricted-v2 and the Pod Security profile restricted ask for; no user id is named.",
    "replicas": "Must be written; the job succeeds when the Master does.",
    "kueue.x-k8s.io/queue-name": "This label, no annotation, makes the job appear under workload metrics.",
    "trainer.opendatahub.io/progression-tracking": "OpenShift AI asks the first pod for progress on this port.",
}
