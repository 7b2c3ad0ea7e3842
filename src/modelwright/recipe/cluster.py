"""What a recipe wishes of a cluster: pods, GPUs, storage, the image, and where the program comes from."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from modelwright.recipe.values import Frozen

AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i?)?")
FACTORS = {unit: 1000**power for power, unit in enumerate("KMGTPE", 1)} | {
    f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)
}
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A name that Kubernetes takes."""


def bytes_of(amount: str) -> int:
    """An amount such as 16Gi in bytes."""
    found = AMOUNT.fullmatch(amount)
    assert found is not None, amount
    return int(float(found[1]) * FACTORS.get(found[2] or "", 1))


def _is_amount(text: str) -> str:
    if AMOUNT.fullmatch(text) is None:
        raise PydanticCustomError("amount", "it wants an amount such as 16Gi")
    return text


def _is_code(text: str) -> str:
    if text in ("image", "configmap") or re.fullmatch(r"git\+https://[^\s@]+(@[\w./-]+)?", text):
        return text
    raise PydanticCustomError("code", "it wants image, configmap, or git+https://HOST/PATH@REVISION")


def _is_label(text: str) -> str:
    if LABEL.fullmatch(text) is None:
        raise PydanticCustomError("label", "it wants lower-case letters, digits and dashes")
    return text


IS_AMOUNT, IS_LABEL = AfterValidator(_is_amount), AfterValidator(_is_label)
Amount = Annotated[str, IS_AMOUNT]
"""Bytes as Kubernetes writes them."""
Label = Annotated[str, IS_LABEL]


class Volume(Frozen):
    """Storage that outlives the pods."""

    mount: str
    """Folder where the pods see it, such as /shared/models."""
    size: Amount = "20Gi"
    """Room that is asked for."""
    access_mode: Literal["auto", "ReadWriteMany", "ReadWriteOnce"] = "auto"
    """auto: ReadWriteMany for several nodes, ReadWriteOnce for one."""
    storage_class: str | None = None
    """Kind of storage; without it, the cluster's default."""


VOLUMES = {
    "training-data": Volume(mount="/shared/data"),
    "trained-models": Volume(mount="/shared/models", size="50Gi"),
    "workspace": Volume(mount="/workspace", size="50Gi"),
}


class Cluster(Frozen):
    """What launch --on openshift asks of the cluster."""

    namespace: Label = "modelwright"
    """Project the job runs in; its volumes are kept, so that each job builds on the last."""
    target: Literal["trainjob", "pytorchjob"] = "trainjob"
    """Kind of job: trainjob for OpenShift AI from 3.2, pytorchjob up to 3.5."""
    nodes: PositiveInt = 1
    """Pods that train together, one a node."""
    gpus_per_node: NonNegativeInt = 1
    """GPUs of each pod, and so its processes; 0 trains on the CPU."""
    gpu_product: str | None = None
    """GPU model by its node label, such as NVIDIA-L40S; pods wait for a node that has it."""
    cpu: PositiveInt = 4
    """Processor cores of each pod."""
    memory: Amount = "16Gi"
    """Memory of each pod."""
    shared_memory: Amount = "4Gi"
    """Size of /dev/shm, counted within memory."""
    image: str | None = None
    """Container image; without it, the one built in the namespace from the Containerfile."""
    code: Annotated[str, AfterValidator(_is_code)] = "image"
    """Where the program comes from: image, configmap, or git+https://HOST/PATH@REVISION."""
    volumes: dict[str, Volume] = VOLUMES
    """Claims by name; the run lies on trained-models, downloads on workspace, where there are such."""
    queue: Label | None = None
    """LocalQueue of Kueue; what makes the job appear under the project's workload metrics."""
    token_secret: Label | None = None
    """Secret whose key HF_TOKEN holds the hub's token; the token itself is written nowhere."""
    restarts: Annotated[int, Field(ge=0, le=20)] = 3
    """Times the job begins again after a lost pod; each goes on from the last checkpoint."""
    variables: dict[str, str] = {}
    """Further environment variables of the pods, such as NCCL_DEBUG: INFO."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, volume in self.volumes.items():
            if LABEL.fullmatch(name) is None:
                found = "has a volume {name}; it wants a name of lower-case letters, digits and dashes"
                raise PydanticCustomError("volume_name", found, {"name": repr(name)})
            if not volume.mount.startswith("/") or volume.mount == "/":
                found = "has volume {name} at {mount}; it wants a folder such as /shared/models"
                raise PydanticCustomError("volume_mount", found, {"name": name, "mount": repr(volume.mount)})
            if self.nodes > 1 and volume.access_mode == "ReadWriteOnce":
                found = "has {nodes} nodes and volume {name} ReadWriteOnce; it wants ReadWriteMany"
                raise PydanticCustomError("one_writer", found, {"nodes": self.nodes, "name": name})
        if bytes_of(self.shared_memory) >= bytes_of(self.memory):
            found = "has shared_memory {shm} within memory {memory}; it wants less than memory"
            raise PydanticCustomError("shm", found, {"shm": self.shared_memory, "memory": self.memory})
        if not self.volumes:
            raise PydanticCustomError("no_volume", "has no volume; it wants one at least, where the run is kept")
        return self
