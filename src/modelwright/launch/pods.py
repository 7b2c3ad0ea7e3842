"""The pod of a training job: one container that any user id may run, with everything it writes on volumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelwright import __version__
from modelwright.recipe.cluster import Cluster, Volume

RECIPE_FOLDER = "/etc/modelwright"
SCRATCH = "/scratch"
CODE_FOLDER = "/code"
CODE = "modelwright.zip"
"""The program's name in its ConfigMap."""
PROGRESS_PORT = 28080
"""Where OpenShift AI asks for progress."""
GPU = "nvidia.com/gpu"
SECURE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
COMMAND = ["python", "-m", "modelwright.launch.torchrun", "-m", "modelwright"]
CLONE = 'git init -q "$0" && git -C "$0" fetch -q --depth 1 "$1" "$2" && git -C "$0" checkout -q FETCH_HEAD'


@dataclass(frozen=True)
class Pod:
    """What makes one pod of a job."""

    job: str
    """Name of the job."""
    container: str
    """Name that the operator expects its container to have."""
    cluster: Cluster
    """What is asked of the cluster."""
    grace_seconds: int
    """Time between SIGTERM and SIGKILL."""
    variables: dict[str, str]
    """The recipe's own variables."""


def pod_spec(pod: Pod, main: dict[str, Any]) -> dict[str, Any]:
    """The pod around its container."""
    cluster = pod.cluster
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": pod.grace_seconds,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    if cluster.gpus_per_node:
        if cluster.gpu_product:
            spec["nodeSelector"] = {f"{GPU}.product": cluster.gpu_product}
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if cluster.code != "image":
        spec["initContainers"] = [_code_container(pod)]
    return spec | {"containers": [main], "volumes": _volumes(pod)}


def container(pod: Pod, ports: dict[str, int]) -> dict[str, Any]:
    """The container that trains."""
    return {
        "name": pod.container,
        "image": image(pod.cluster),
        "command": COMMAND,
        "args": ["run", f"{RECIPE_FOLDER}/recipe.yaml", "--log-format", "plain"],
        "workingDir": SCRATCH,
        "env": _environment(pod),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "securityContext": SECURE,
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
            *({"name": name, "mountPath": volume.mount} for name, volume in pod.cluster.volumes.items()),
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "dshm", "mountPath": "/dev/shm"},
            *([{"name": "code", "mountPath": CODE_FOLDER}] if pod.cluster.code != "image" else []),
        ],
    }


def image(cluster: Cluster) -> str:
    """The image that was asked for, or the one that a build in the namespace leaves in the cluster's own registry."""
    registry = "image-registry.openshift-image-registry.svc:5000"
    return cluster.image or f"{registry}/{cluster.namespace}/modelwright:{__version__}"


def resources(cluster: Cluster) -> dict[str, Any]:
    """What each pod asks for; a GPU is asked for and limited alike."""
    amounts: dict[str, Any] = {"cpu": str(cluster.cpu), "memory": cluster.memory}
    if cluster.gpus_per_node:
        amounts[GPU] = str(cluster.gpus_per_node)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _environment(pod: Pod) -> list[dict[str, Any]]:
    """Variables of the container: caches, the recipe's own, what the cluster section adds, the token by reference."""
    cluster = pod.cluster
    shared = cluster.volumes.get("workspace", Volume(mount=SCRATCH)).mount.rstrip("/")
    values = {
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "XDG_CACHE_HOME": f"{SCRATCH}/.cache",
        "HF_HOME": f"{shared}/huggingface",
        "HF_DATASETS_CACHE": f"{SCRATCH}/datasets",
        "MODELWRIGHT_CACHE": f"{shared}/modelwright",
        "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor",
        "TRITON_HOME": SCRATCH,
        "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
        "MPLCONFIGDIR": f"{SCRATCH}/matplotlib",
        # torchrun kills its ranks 30 s after SIGTERM unless told otherwise, whatever the pod's own grace
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(pod.grace_seconds - 10),
    }
    if pod.container == "node":
        values["MODELWRIGHT_PROGRESS_PORT"] = str(PROGRESS_PORT)
    if cluster.code == "configmap":
        values["PYTHONPATH"] = CODE_FOLDER
    elif cluster.code != "image":
        values["PYTHONPATH"] = f"{CODE_FOLDER}/source/src"
    env: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in {**values, **pod.variables, **cluster.variables}.items()
    ]
    if cluster.token_secret:
        reference = {"name": cluster.token_secret, "key": "HF_TOKEN"}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return env


def _code_container(pod: Pod) -> dict[str, Any]:
    """The init container that brings the program: cloned, or unpacked from its ConfigMap."""
    mounts = [{"name": "code", "mountPath": CODE_FOLDER}]
    if pod.cluster.code == "configmap":
        command = ["python", "-m", "zipfile", "-e", f"/etc/code/{CODE}", CODE_FOLDER]
        mounts.append({"name": "program", "mountPath": "/etc/code"})
    else:
        address, _, revision = pod.cluster.code.removeprefix("git+").partition("@")
        command = ["sh", "-c", CLONE, f"{CODE_FOLDER}/source", address, revision or "HEAD"]
    return {
        "name": "code",
        "image": image(pod.cluster),
        "command": command,
        "env": [{"name": "HOME", "value": CODE_FOLDER}],
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
        "securityContext": SECURE,
        "volumeMounts": mounts,
    }


def _volumes(pod: Pod) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": "recipe", "configMap": {"name": f"{pod.job}-recipe"}}]
    volumes += [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in pod.cluster.volumes]
    volumes.append({"name": "scratch", "emptyDir": {}})
    volumes.append({"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.cluster.shared_memory}})
    if pod.cluster.code != "image":
        volumes.append({"name": "code", "emptyDir": {}})
    if pod.cluster.code == "configmap":
        volumes.append({"name": "program", "configMap": {"name": f"{pod.job}-code"}})
    return volumes
