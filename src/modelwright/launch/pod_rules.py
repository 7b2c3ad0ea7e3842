"""Rules for the pods of a job: containers, commands, variables, volumes, GPUs, and what restricted-v2 allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from modelwright.errors import holds_secret, names_secret
from modelwright.launch.shapes import Path, shown
from modelwright.launch.views import GPU, Finding, PodView, Stream, entries, get
from modelwright.recipe.cluster import AMOUNT, bytes_of

PET = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
RESERVED: dict[str, tuple[str, ...]] = {
    "PyTorchJob": ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", *PET),
    "TrainJob": PET,
}
PER_PROCESS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torchrun sets for each process; in a pod's variables it is the same for all."""
ALLOWED_VOLUMES = {
    *(
        "configMap",
        "secret",
        "emptyDir",
        "persistentVolumeClaim",
        "projected",
        "downwardAPI",
        "ephemeral",
        "csi",
        "image",
    ),
}
TORCHRUN_FLAGS = ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--node_rank", "--node-rank", "--master_addr",
                  "--master-addr", "--master_port", "--master-port")  # fmt: skip


def _container(stream: Stream, view: PodView) -> Iterator[Finding]:
    path = (*view.path, "containers")
    if view.containers and view.main is None:
        names = ", ".join(str(each.get("name")) for each in view.containers)
        found = f"{shown((*path, 0, 'name'))} is {names!r}; the operator wants one called {view.main_name}"
        yield Finding(view.manifest, (*path, 0, "name"), found)
    elif view.main is not None and not view.main.get("image") and not get(view.job.body, "spec", "trainer", "image"):
        path = view.main_path
        yield Finding(view.manifest, path, f"{shown((*path, 'image'))} is missing; it wants the image that trains")
    policy = get(view.spec, "restartPolicy")
    if view.job.kind == "TrainJob" and policy not in (None, "Never", "OnFailure"):
        where = (*view.path, "restartPolicy")
        yield Finding(view.manifest, where, f"{shown(where)} is {policy!r}; a Job wants Never or OnFailure")


def _command(stream: Stream, view: PodView) -> Iterator[Finding]:
    """What starts the processes: torchrun, without flags that contradict the operator's variables."""
    manifest, path, words = view.command
    line = " ".join(words)
    launches = bool(re.search(r"\btorchrun\b|torch\.distributed\.run", line))
    many = view.nodes > 1 or (view.gpus or 0) > 1
    if "accelerate" in line.split() and "launch" in line.split():
        wants = "it reads none of the operator's variables; it wants torchrun SCRIPT, without flags"
        yield Finding(manifest, path, f"{shown(path)} is accelerate launch; {wants}")
    elif words and not launches and many and re.search(r"\bpython[0-9.]*\b", line):
        why = "RANK is not set" if view.job.kind == "TrainJob" else "RANK is the node's, and LOCAL_RANK is not set"
        yield Finding(
            manifest, path, f"{shown(path)} starts python on {view.nodes} nodes, where {why}; it wants torchrun SCRIPT"
        )
    for flag in TORCHRUN_FLAGS:
        if launches and re.search(rf"{flag}\b", line):
            wants = "leave it out: the operator's PET_ variables say it, and right for every pod"
            yield Finding(manifest, path, f"{shown(path)} has {flag}; {wants}")


def _variables(stream: Stream, view: PodView) -> Iterator[Finding]:
    seen: set[str] = set()
    for manifest, path, variable in view.variables:
        name, value = str(variable.get("name")), variable.get("value")
        where = (*path, "name")
        if name in RESERVED[view.job.kind]:
            does = "refused" if view.job.kind == "TrainJob" else "overwritten by the operator"
            yield Finding(manifest, where, f"{shown(where)} is {name}, which is {does}; leave it out")
        elif name in PER_PROCESS:
            yield Finding(
                manifest, where, f"{shown(where)} is {name}, which torchrun sets for each process; leave it out"
            )
        if name in seen:
            yield Finding(manifest, where, f"{shown(where)} is {name} a second time; the last one counts, keep one")
        seen.add(name)
        literal = isinstance(value, str) and value
        if literal and (names_secret(name) or holds_secret(str(value))):
            wants = f"it wants valueFrom: {{secretKeyRef: {{name: SECRET, key: {name}}}}}"
            yield Finding(
                manifest, (*path, "value"), f"{shown((*path, 'value'))} holds {name} for all to read; {wants}"
            )


def _homes(stream: Stream, view: PodView) -> Iterator[Finding]:
    """A random user id cannot write to HOME, which is / for it."""
    if view.main is None:
        return
    values = {str(each.get("name")): each.get("value") for _, _, each in view.variables}
    mounts = [str(get(each, "mountPath")) for each in entries(view.main, "volumeMounts")]
    for name in ("HOME", "HF_HOME"):
        path = (*view.main_path, "env")
        if name not in values:
            wants = "it wants a folder on a volume: under restricted-v2 the home is /, where nothing can be written"
            yield Finding(view.manifest, path, f"{shown(path)} has no {name}; {wants}")
        elif isinstance(values[name], str) and not _below(str(values[name]), mounts):
            wants = f"it wants a folder below one of {', '.join(mounts) or 'the mounts'}"
            yield Finding(view.manifest, path, f"{shown(path)}: {name} is {values[name]}, on no volume; {wants}")


def _below(path: str, mounts: list[str]) -> bool:
    return any(path == mount or path.startswith(f"{mount.rstrip('/')}/") for mount in mounts) or path.startswith("/tmp")


def _mounts(stream: Stream, view: PodView) -> Iterator[Finding]:
    for path, each in view.all_containers:
        taken: set[str] = set()
        for number, mount in enumerate(entries(each, "volumeMounts")):
            where: Path = (*path, "volumeMounts", number)
            name, place = str(mount.get("name")), str(mount.get("mountPath"))
            if name not in view.volumes:
                known = ", ".join(view.volumes) or "none"
                found = f"{shown((*where, 'name'))} is {name!r}, which is no volume of the pod; it has {known}"
                yield Finding(view.manifest, (*where, "name"), found)
            if place in taken:
                yield Finding(
                    view.manifest, (*where, "mountPath"), f"{shown((*where, 'mountPath'))} is {place} a second time"
                )
            taken.add(place)


def _references(stream: Stream, view: PodView) -> Iterator[Finding]:
    """Claims and ConfigMaps that the pods need are in the file, or must be in the namespace already."""
    needed = (("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"), ("configMap", "name", "ConfigMap"))
    for number, volume in enumerate(entries(view.spec, "volumes")):
        for key, field, kind in needed:
            name, here = get(volume, key, field), stream.named(kind)
            if name and name not in here:
                path = (*view.path, "volumes", number, key, field)
                note = f"{shown(path)} is {name!r}, and no {kind} of that name is in this file"
                yield Finding(
                    view.manifest, path, f"{note}; the pods stay Pending unless the namespace has it", bool(here)
                )


def _shared_memory(stream: Stream, view: PodView) -> Iterator[Finding]:
    limit = get(view.resources[2], "limits", "memory")
    for number, volume in enumerate(entries(view.spec, "volumes")):
        size, path = get(volume, "emptyDir", "sizeLimit"), (*view.path, "volumes", number, "emptyDir", "sizeLimit")
        if get(volume, "emptyDir", "medium") != "Memory":
            continue
        if size is None:
            note = "a memory volume without it may take the whole limit, and the pod is killed"
            yield Finding(view.manifest, path[:-1], f"{shown(path)} is missing; {note}", serious=False)
        elif limit and _bytes(size) > _bytes(limit):
            wants = f"it counts within the memory limit, {limit}; it wants less"
            yield Finding(view.manifest, path, f"{shown(path)} is {size}; {wants}")
    mounted = {str(get(each, "mountPath")) for each in entries(view.main, "volumeMounts")}
    if view.main is not None and view.gpus and "/dev/shm" not in mounted:
        path = (*view.main_path, "volumeMounts")
        note = "the default 64 MB is too small for NCCL and for loader workers; it wants an emptyDir with medium Memory"
        yield Finding(view.manifest, path, f"{shown(path)} has nothing at /dev/shm; {note}", serious=False)


def _bytes(amount: Any) -> float:
    text = str(amount)
    return bytes_of(text) if AMOUNT.fullmatch(text) else 0.0


def _gpus(stream: Stream, view: PodView) -> Iterator[Finding]:
    manifest, path, resources = view.resources
    asked, limit = get(resources, "requests", GPU), get(resources, "limits", GPU)
    if asked is not None and limit is None:
        yield Finding(
            manifest, (*path, "requests", GPU), f"{shown(path)}.requests has {GPU}; it must stand in limits, too"
        )
    elif asked is not None and str(asked) != str(limit):
        where = (*path, "requests", GPU)
        yield Finding(
            manifest, where, f"{shown(path)}.requests has {asked} of {GPU} and limits {limit}; they must be equal"
        )
    if limit is not None and not str(limit).isdigit():
        where = (*path, "limits", GPU)
        yield Finding(manifest, where, f"{shown(path)}.limits has {limit!r} of {GPU}; it wants a whole number of GPUs")
    for name in ("cpu", "memory"):
        least, most = get(resources, "requests", name), get(resources, "limits", name)
        if least is not None and most is not None and _amount(least) > _amount(most):
            where = (*path, "requests", name)
            yield Finding(
                manifest, where, f"{shown(where)} is {least}, above its limit {most}; it wants at most {most}"
            )
    if not view.gpus:
        return
    if not any(
        each.get("key") == GPU or each.get("operator") == "Exists" for each in entries(view.spec, "tolerations")
    ):
        note = f"has no toleration for {GPU}; where GPU nodes are tainted, the pods stay Pending"
        yield Finding(view.manifest, view.path, f"{shown((*view.path, 'tolerations'))} {note}", serious=False)
    if not get(view.spec, "nodeSelector", f"{GPU}.product") and not get(view.spec, "affinity"):
        note = f"names no {GPU}.product; any GPU may be given, an L4 in place of an L40S"
        yield Finding(view.manifest, view.path, f"{shown((*view.path, 'nodeSelector'))} {note}", serious=False)


def _amount(value: Any) -> float:
    """A quantity as a number; cores in thousandths such as 500m too."""
    text = str(value)
    if text.endswith("m") and text[:-1].isdigit():
        return int(text[:-1]) / 1000
    return float(bytes_of(text)) if AMOUNT.fullmatch(text) else 0.0


def _restricted(stream: Stream, view: PodView) -> Iterator[Finding]:
    """What the restricted profiles refuse."""
    spec, path, why = view.spec, view.path, "restricted-v2 refuses it"
    for key in ("hostNetwork", "hostIPC", "hostPID"):
        if get(spec, key):
            yield Finding(view.manifest, (*path, key), f"{shown((*path, key))} is true; {why}, leave it out")
    for key in ("runAsUser", "fsGroup", "runAsGroup", "supplementalGroups"):
        if get(spec, "securityContext", key) is not None:
            where: Path = (*path, "securityContext", key)
            wants = "leave it out: the namespace gives a user id of its own range"
            yield Finding(view.manifest, where, f"{shown(where)} is {get(spec, 'securityContext', key)}; {wants}")
    for number, volume in enumerate(entries(spec, "volumes")):
        for key in volume:
            if key != "name" and key not in ALLOWED_VOLUMES:
                where = (*path, "volumes", number, key)
                yield Finding(
                    view.manifest, where, f"{shown(where)}: {why}; it wants a persistentVolumeClaim or an emptyDir"
                )
    for where, each in view.all_containers:
        yield from _restricted_container(view, where, each)


def _restricted_container(view: PodView, path: Path, each: dict[str, Any]) -> Iterator[Finding]:
    own, pod = each.get("securityContext") or {}, get(view.spec, "securityContext") or {}
    base: Path = (*path, "securityContext")
    if get(own, "privileged"):
        yield Finding(
            view.manifest, (*base, "privileged"), f"{shown((*base, 'privileged'))} is true; it wants no privilege"
        )
    if get(own, "runAsUser") is not None:
        where = (*base, "runAsUser")
        wants = "leave it out: the namespace gives a user id of its own range"
        yield Finding(view.manifest, where, f"{shown(where)} is {get(own, 'runAsUser')}; {wants}")
    if added := [str(name) for name in get(own, "capabilities", "add") or [] if name != "NET_BIND_SERVICE"]:
        where = (*base, "capabilities", "add")
        yield Finding(view.manifest, where, f"{shown(where)} is {', '.join(added)}; restricted-v2 allows none of them")
    asked = (
        ("allowPrivilegeEscalation", get(own, "allowPrivilegeEscalation") is False, "false"),
        ("capabilities.drop", "ALL" in (get(own, "capabilities", "drop") or []), "[ALL]"),
        ("runAsNonRoot", True in (get(own, "runAsNonRoot"), get(pod, "runAsNonRoot")), "true, here or for the pod"),
        ("seccompProfile", bool(get(own, "seccompProfile") or get(pod, "seccompProfile")), "{type: RuntimeDefault}"),
    )
    for key, right, wants in asked:
        if not right:
            yield Finding(
                view.manifest, base, f"{shown(base)}.{key} is not said; Pod Security restricted wants {wants}"
            )


PodRule = Callable[[Stream, PodView], Iterator[Finding]]
RULES: tuple[PodRule, ...] = (
    *(_container, _command, _variables, _homes, _mounts, _references, _shared_memory, _gpus, _restricted),
)
