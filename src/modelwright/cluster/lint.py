"""Rules for manifests, ours or anybody's: what a cluster would refuse, drop silently, or start and then fail."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.cluster.documents import (
    GPU,
    FieldFinding,
    FieldPath,
    Manifest,
    ManifestSet,
    PodTemplate,
    get_field,
    get_items,
)
from modelwright.cluster.schema import SCHEMAS, format_path, validate
from modelwright.errors import Problem, contains_secret, is_secret_name
from modelwright.recipe.sections import QUANTITY_RE, quantity_to_bytes

JOB_KINDS = ("PyTorchJob", "TrainJob")
JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MAX_JOB_NAME = 52
"""`-worker-10` and `-node-0-0` come after it, and a name ends at 63."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
OVERRIDE_FIELDS = {
    "podSpecOverrides": "Trainer 2.0",
    "podTemplateOverrides": "Trainer 2.1 (OpenShift AI 3.2 to 3.5)",
    "runtimePatches": "Trainer 2.2 and later (OpenShift AI 3.6)",
}
MAX_CONFIG_MAP_BYTES = 1_048_576


@dataclass(frozen=True)
class LintFinding(Problem):
    """One finding in a manifest."""

    field: str = ""
    """The field, as spec.pytorchReplicaSpecs.Master.replicas."""
    is_error: bool = True
    """Error (the cluster would refuse it or the job would fail), or only a warning."""


def lint(manifests: Sequence[Manifest]) -> list[LintFinding]:
    """All errors and warnings, in the order of the file."""
    invalid = [(manifest, list(_schema_findings(manifest))) for manifest in manifests]
    schema_findings = [
        _to_lint_finding(FieldFinding(manifest, path, text))
        for manifest, mismatches in invalid
        for path, text in mismatches
    ]
    reported = {(lint_finding.where, lint_finding.field) for lint_finding in schema_findings}
    rule_findings: list[LintFinding] = []
    # the rules see only fields of the right type: the rest is reported already
    manifest_set = ManifestSet(
        tuple(_drop_invalid(manifest, [path for path, _ in mismatches]) for manifest, mismatches in invalid)
    )
    for manifest in manifest_set.manifests:
        rule_findings += [
            _to_lint_finding(finding)
            for rule in DOCUMENT_RULES.get(manifest.kind, ())
            for finding in rule(manifest_set, manifest)
        ]
        rule_findings += [_to_lint_finding(finding) for finding in _namespace(manifest_set, manifest)]
    for template in manifest_set.pod_templates:
        rule_findings += [_to_lint_finding(finding) for rule in POD_RULES for finding in rule(manifest_set, template)]
    if not any(manifest.kind in JOB_KINDS for manifest in manifests):
        where, wants = manifests[0].location(()), "no job is in this file; it wants a PyTorchJob or a TrainJob"
        rule_findings.append(LintFinding(where, wants, "kind"))
    further = [
        lint_finding for lint_finding in rule_findings if (lint_finding.where, lint_finding.field) not in reported
    ]
    return sorted(
        dict.fromkeys([*schema_findings, *further]),
        key=lambda lint_finding: (_line(lint_finding), not lint_finding.is_error),
    )


def _drop_invalid(manifest: Manifest, paths: list[FieldPath]) -> Manifest:
    """A copy of the document without its invalid fields."""
    body = copy.deepcopy(manifest.body)
    for path in paths:
        holder: Any = get_field(body, *path[:-1]) if path else None
        if get_field(holder, *path[-1:]) is not None:
            holder[path[-1]] = None
    return Manifest(manifest.file, body, manifest.line)


def _line(lint_finding: LintFinding) -> int:
    number = lint_finding.where.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _to_lint_finding(finding: FieldFinding) -> LintFinding:
    where = finding.manifest.location(finding.path)
    return LintFinding(where, finding.message, format_path(finding.path), finding.is_error)


def _schema_findings(manifest: Manifest) -> Iterator[tuple[FieldPath, str]]:
    """Fields that the schema does not have, and types that it has otherwise."""
    if manifest.kind not in SCHEMAS:
        if not manifest.kind:
            yield (), "kind is missing; it wants a PyTorchJob or a TrainJob, and what belongs to it"
        return
    version, schema = SCHEMAS[manifest.kind]
    api_version = manifest.body.get("apiVersion")
    if api_version is not None and api_version != version:
        yield ("apiVersion",), f"apiVersion is {api_version!r}; a {manifest.kind} wants {version}"
    yield from validate(manifest.body, schema)


def _namespace(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    namespace = get_field(manifest.body, "metadata", "namespace")
    job_namespace = next(
        (
            get_field(document.body, "metadata", "namespace")
            for document in manifest_set.manifests
            if document.kind in JOB_KINDS
        ),
        None,
    )
    if namespace and job_namespace and namespace != job_namespace:
        path = ("metadata", "namespace")
        yield FieldFinding(
            manifest,
            path,
            f"metadata.namespace is {namespace!r}, and the job's is {job_namespace!r}; pods see only their own",
        )


def _job_name(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    path, name = ("metadata", "name"), manifest.name
    if not name:
        yield FieldFinding(manifest, ("metadata",), "metadata.name is missing; it wants a name such as my-job")
    elif not JOB_NAME.fullmatch(name):
        wants = "it wants a lower-case letter first, then letters, digits and dashes"
        yield FieldFinding(manifest, path, f"metadata.name is {name!r}; {wants}")
    elif len(name) > MAX_JOB_NAME:
        wants = f"it wants at most {MAX_JOB_NAME}, since the pods' names are longer"
        yield FieldFinding(manifest, path, f"metadata.name has {len(name)} characters; {wants}")


def _queue(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    labels, annotations = (
        get_field(manifest.body, "metadata", "labels"),
        get_field(manifest.body, "metadata", "annotations"),
    )
    if isinstance(annotations, dict) and QUEUE_LABEL in annotations:
        path: FieldPath = ("metadata", "annotations", QUEUE_LABEL)
        yield FieldFinding(manifest, path, f"{QUEUE_LABEL} is an annotation; Kueue reads it among metadata.labels only")
    elif not isinstance(labels, dict) or QUEUE_LABEL not in labels:
        note = f"metadata.labels has no {QUEUE_LABEL}; without it the job does not appear under workload metrics"
        yield FieldFinding(manifest, ("metadata",), note, is_error=False)
    path = ("spec", "suspend") if manifest.kind == "TrainJob" else ("spec", "runPolicy", "suspend")
    if get_field(manifest.body, *path) is True:
        yield FieldFinding(
            manifest,
            path,
            f"{format_path(path)} is true; leave it out: Kueue sets it, and without Kueue the job waits for ever",
        )


def _metrics_annotation(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    annotations = get_field(manifest.body, "metadata", "annotations")
    for key in annotations if isinstance(annotations, dict) else ():
        if "metrics" in str(key) and not str(key).startswith("trainer.opendatahub.io/"):
            note = f"{key}: no annotation makes a job appear under project metrics; the label {QUEUE_LABEL} does"
            yield FieldFinding(manifest, ("metadata", "annotations", str(key)), note, is_error=False)


def _replicas(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    base: FieldPath = ("spec", "pytorchReplicaSpecs")
    specs = get_field(manifest.body, *base)
    if not isinstance(specs, dict):
        return
    for key in specs:
        if key not in ("Master", "Worker"):
            yield FieldFinding(
                manifest,
                (*base, key),
                f"{format_path((*base, key))} is unknown; it wants Master and Worker, so written",
            )
    if "Master" not in specs:
        wants = "it wants one, or MASTER_ADDR, RANK and WORLD_SIZE are not set"
        yield FieldFinding(manifest, base, f"spec.pytorchReplicaSpecs.Master is missing; {wants}")
    for key in ("Master", "Worker"):
        if not isinstance(specs.get(key), dict):
            continue
        count, path = specs[key].get("replicas"), (*base, key, "replicas")
        if key == "Master" and count != 1:
            problem = "is missing" if count is None else f"is {count}"
            yield FieldFinding(manifest, path, f"{format_path(path)} {problem}; it must be written, and be 1")
        if key == "Worker" and isinstance(count, int) and count < 1:
            yield FieldFinding(
                manifest, path, f"{format_path(path)} is {count}; it wants at least 1, or no Worker at all"
            )
        policy, path = specs[key].get("restartPolicy"), (*base, key, "restartPolicy")
        if policy is not None and policy not in ("Always", "OnFailure", "Never", "ExitCode"):
            wants = "it wants OnFailure, Never, Always or ExitCode"
            yield FieldFinding(manifest, path, f"{format_path(path)} is {policy!r}; {wants}")
        if policy == "ExitCode":
            note = "codes below 128 are not tried again, so a lost peer (1) or a stop (75) ends the job"
            yield FieldFinding(manifest, path, f"{format_path(path)} is ExitCode: {note}", is_error=False)
    yield from _backoff(manifest, specs)


def _backoff(manifest: Manifest, specs: dict[str, object]) -> Iterator[FieldFinding]:
    path = ("spec", "runPolicy", "backoffLimit")
    limit = get_field(manifest.body, *path)
    counts = [get_field(spec, "replicas") for spec in specs.values()]
    pods = sum(count for count in counts if isinstance(count, int))
    restarted = any(get_field(spec, "restartPolicy") in ("OnFailure", "Always") for spec in specs.values())
    if restarted and limit is None:
        yield FieldFinding(
            manifest,
            ("spec",),
            "spec.runPolicy.backoffLimit is missing: a job that always fails starts for ever",
            False,
        )
    elif restarted and isinstance(limit, int) and pods > 1 and limit <= pods:
        wants = (
            f"one lost pod restarts all {pods}, and the job fails when the sum reaches the limit; it wants over {pods}"
        )
        yield FieldFinding(manifest, path, f"{format_path(path)} is {limit}; {wants}")


def _processes(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    """The number of processes is said, and is the number of GPUs."""
    field: FieldPath = (
        ("spec", "nprocPerNode") if manifest.kind == "PyTorchJob" else ("spec", "trainer", "numProcPerNode")
    )
    value = get_field(manifest.body, *field)
    text = str(value) if value is not None else "auto"
    if text in ("auto", "cpu", "gpu"):
        problem = f"is {text}" if value is not None else "is missing"
        wants = "it wants a number: auto is a process per core where there is no GPU, and Trainer 2.3 has no auto"
        yield FieldFinding(
            manifest,
            field,
            f"{format_path(field)} {problem}; {wants}",
            is_error=manifest.kind == "TrainJob" and value is not None,
        )
        return
    if manifest.kind == "TrainJob" and isinstance(value, str):
        yield FieldFinding(
            manifest, field, f"{format_path(field)} is {value!r}; it wants a whole number without quotes (Trainer 2.3)"
        )
    for template in manifest_set.pod_templates:
        if template.job is manifest and text.isdigit() and template.gpus not in (None, 0, int(text)):
            yield FieldFinding(
                manifest,
                field,
                f"{format_path(field)} is {text}, but each pod has {template.gpus} GPU(s); it wants {template.gpus}",
            )
            return


def _runtime_reference(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    path: FieldPath = ("spec", "runtimeRef")
    name, kind = (
        get_field(manifest.body, *path, "name"),
        get_field(manifest.body, *path, "kind") or "ClusterTrainingRuntime",
    )
    runtimes = [document.name for document in manifest_set.manifests if document.kind == "TrainingRuntime"]
    if kind not in ("TrainingRuntime", "ClusterTrainingRuntime"):
        wants = "it wants TrainingRuntime or ClusterTrainingRuntime"
        yield FieldFinding(manifest, (*path, "kind"), f"spec.runtimeRef.kind is {kind!r}; {wants}")
    elif kind == "ClusterTrainingRuntime" and name in runtimes:
        wants = "the TrainingRuntime of that name in this file is not meant so; it wants kind: TrainingRuntime"
        yield FieldFinding(manifest, path, f"spec.runtimeRef.kind is ClusterTrainingRuntime; {wants}")
    elif kind == "TrainingRuntime" and name and name not in runtimes:
        note = f"spec.runtimeRef.name is {name!r}, which is not in this file; the namespace must have it"
        yield FieldFinding(manifest, (*path, "name"), note, is_error=bool(runtimes))


def _overrides(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    for key, dialect in OVERRIDE_FIELDS.items():
        if get_field(manifest.body, "spec", key) is not None:
            wants = "other versions refuse or drop it; a TrainingRuntime of your own needs no override"
            yield FieldFinding(manifest, ("spec", key), f"spec.{key} is known to {dialect} only; {wants}")


def _runtime(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    base: FieldPath = ("spec", "template", "spec", "replicatedJobs")
    jobs = get_field(manifest.body, *base)
    for index, job in enumerate(jobs if isinstance(jobs, list) else ()):
        path: FieldPath = (*base, index, "template")
        step = get_field(job, "template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step")
        if get_field(job, "name") == "node" and step != "trainer":
            wants = (
                "it wants trainer.kubeflow.org/trainjob-ancestor-step: trainer, or the job's settings do not reach it"
            )
            yield FieldFinding(
                manifest, path, f"{format_path((*path, 'metadata', 'labels'))} does not mark the trainer; {wants}"
            )
        policy = get_field(job, "template", "spec", "template", "spec", "restartPolicy")
        if get_field(job, "template", "spec", "podFailurePolicy") and policy != "Never":
            where: FieldPath = (*path, "spec", "template", "spec", "restartPolicy")
            yield FieldFinding(manifest, where, f"{format_path(where)} is {policy}; podFailurePolicy wants Never")
    if isinstance(jobs, list) and not any(get_field(job, "name") == "node" for job in jobs):
        yield FieldFinding(
            manifest, base, f"{format_path(base)} has none called node; the trainer's job must be called so"
        )


def _claim(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    """A volume that several nodes mount must be one that several nodes can mount."""
    num_nodes = max(
        (template.num_nodes for template in manifest_set.pod_templates if manifest.name in template.pvc_names),
        default=1,
    )
    modes, path = get_field(manifest.body, "spec", "accessModes"), ("spec", "accessModes")
    if isinstance(modes, list) and num_nodes > 1 and "ReadWriteMany" not in modes:
        wants = "it wants ReadWriteMany, or the pods of other nodes stay Pending"
        yield FieldFinding(
            manifest, path, f"spec.accessModes is {', '.join(map(str, modes))} and {num_nodes} pods mount it; {wants}"
        )


def _config_map(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    texts, others = get_field(manifest.body, "data") or {}, get_field(manifest.body, "binaryData") or {}
    size = sum(len(str(text).encode()) for text in texts.values()) + sum(
        len(str(text)) * 3 // 4 for text in others.values()
    )
    if size > MAX_CONFIG_MAP_BYTES:
        wants = f"a ConfigMap carries {MAX_CONFIG_MAP_BYTES:,}; put the data on a volume"
        yield FieldFinding(manifest, ("data",), f"data has {size:,} bytes; {wants}")


def _secret(manifest_set: ManifestSet, manifest: Manifest) -> Iterator[FieldFinding]:
    for key in ("data", "stringData"):
        if get_field(manifest.body, key):
            wants = "keep it out of files: oc create secret generic NAME --from-file=HF_TOKEN=FILE"
            yield FieldFinding(
                manifest, (key,), f"{key} of the Secret {manifest.name} holds the secret itself; {wants}"
            )


DocumentRule = Callable[[ManifestSet, Manifest], Iterator[FieldFinding]]
DOCUMENT_RULES: dict[str, tuple[DocumentRule, ...]] = {
    "PyTorchJob": (_job_name, _queue, _metrics_annotation, _replicas, _processes),
    "TrainJob": (_job_name, _queue, _metrics_annotation, _processes, _runtime_reference, _overrides),
    "TrainingRuntime": (_runtime,),
    "PersistentVolumeClaim": (_claim,),
    "ConfigMap": (_config_map,),
    "Secret": (_secret,),
}
PET_ENV = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
OPERATOR_ENV: dict[str, tuple[str, ...]] = {
    "PyTorchJob": ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", *PET_ENV),
    "TrainJob": PET_ENV,
}
PER_RANK_ENV = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
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


def _container(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    path = (*template.path, "containers")
    if template.containers and template.training_container is None:
        names = ", ".join(str(container.get("name")) for container in template.containers)
        message = (
            f"{format_path((*path, 0, 'name'))} is {names!r}; the operator wants one called {template.container_name}"
        )
        yield FieldFinding(template.manifest, (*path, 0, "name"), message)
    elif (
        template.training_container is not None
        and not template.training_container.get("image")
        and not get_field(template.job.body, "spec", "trainer", "image")
    ):
        path = template.container_path
        yield FieldFinding(
            template.manifest, path, f"{format_path((*path, 'image'))} is missing; it wants the image that trains"
        )
    policy = get_field(template.spec, "restartPolicy")
    if template.job.kind == "TrainJob" and policy not in (None, "Never", "OnFailure"):
        where = (*template.path, "restartPolicy")
        yield FieldFinding(
            template.manifest, where, f"{format_path(where)} is {policy!r}; a Job wants Never or OnFailure"
        )


def _command(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    """What starts the processes: torchrun, without flags that contradict the operator's variables."""
    manifest, path, args = template.command
    line = " ".join(args)
    launches = bool(re.search(r"\btorchrun\b|torch\.distributed\.run", line))
    distributed = template.num_nodes > 1 or (template.gpus or 0) > 1
    if "accelerate" in line.split() and "launch" in line.split():
        wants = "it reads none of the operator's variables; it wants torchrun SCRIPT, without flags"
        yield FieldFinding(manifest, path, f"{format_path(path)} is accelerate launch; {wants}")
    elif args and not launches and distributed and re.search(r"\bpython[0-9.]*\b", line):
        why = "RANK is not set" if template.job.kind == "TrainJob" else "RANK is the node's, and LOCAL_RANK is not set"
        yield FieldFinding(
            manifest,
            path,
            f"{format_path(path)} starts python on {template.num_nodes} nodes, where {why}; it wants torchrun SCRIPT",
        )
    for flag in TORCHRUN_FLAGS:
        if launches and re.search(rf"{flag}\b", line):
            wants = "leave it out: the operator's PET_ variables say it, and right for every pod"
            yield FieldFinding(manifest, path, f"{format_path(path)} has {flag}; {wants}")


def _env(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    used_names: set[str] = set()
    for manifest, path, variable in template.env:
        name, value = str(variable.get("name")), variable.get("value")
        where = (*path, "name")
        if name in OPERATOR_ENV[template.job.kind]:
            consequence = "refused" if template.job.kind == "TrainJob" else "overwritten by the operator"
            yield FieldFinding(manifest, where, f"{format_path(where)} is {name}, which is {consequence}; leave it out")
        elif name in PER_RANK_ENV:
            yield FieldFinding(
                manifest, where, f"{format_path(where)} is {name}, which torchrun sets for each process; leave it out"
            )
        if name in used_names:
            yield FieldFinding(
                manifest, where, f"{format_path(where)} is {name} a second time; the last one counts, keep one"
            )
        used_names.add(name)
        literal = isinstance(value, str) and value
        if literal and (is_secret_name(name) or contains_secret(str(value))):
            wants = f"it wants valueFrom: {{secretKeyRef: {{name: SECRET, key: {name}}}}}"
            yield FieldFinding(
                manifest, (*path, "value"), f"{format_path((*path, 'value'))} holds {name} for all to read; {wants}"
            )


def _writable_home(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    """A random user id cannot write to HOME, which is / for it."""
    if template.training_container is None:
        return
    values = {str(item.get("name")): item.get("value") for _, _, item in template.env}
    mounts = [str(get_field(item, "mountPath")) for item in get_items(template.training_container, "volumeMounts")]
    for name in ("HOME", "HF_HOME"):
        path = (*template.container_path, "env")
        if name not in values:
            wants = "it wants a folder on a volume: under restricted-v2 the home is /, where nothing can be written"
            yield FieldFinding(template.manifest, path, f"{format_path(path)} has no {name}; {wants}")
        elif isinstance(values[name], str) and not _below(str(values[name]), mounts):
            wants = f"it wants a folder below one of {', '.join(mounts) or 'the mounts'}"
            yield FieldFinding(
                template.manifest, path, f"{format_path(path)}: {name} is {values[name]}, on no volume; {wants}"
            )


def _below(path: str, mounts: list[str]) -> bool:
    return any(path == mount or path.startswith(f"{mount.rstrip('/')}/") for mount in mounts) or path.startswith("/tmp")


def _mounts(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    for path, container in template.all_containers:
        mount_paths: set[str] = set()
        for index, mount in enumerate(get_items(container, "volumeMounts")):
            where: FieldPath = (*path, "volumeMounts", index)
            name, mount_path = str(mount.get("name")), str(mount.get("mountPath"))
            if name not in template.volumes:
                known = ", ".join(template.volumes) or "none"
                message = f"{format_path((*where, 'name'))} is {name!r}, which is no volume of the pod; it has {known}"
                yield FieldFinding(template.manifest, (*where, "name"), message)
            if mount_path in mount_paths:
                yield FieldFinding(
                    template.manifest,
                    (*where, "mountPath"),
                    f"{format_path((*where, 'mountPath'))} is {mount_path} a second time",
                )
            mount_paths.add(mount_path)


def _references(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    """Claims and ConfigMaps that the pods need are in the file, or must be in the namespace already."""
    reference_fields = (
        ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
        ("configMap", "name", "ConfigMap"),
    )
    for index, volume in enumerate(get_items(template.spec, "volumes")):
        for key, field, kind in reference_fields:
            name, in_file = get_field(volume, key, field), manifest_set.names_of_kind(kind)
            if name and name not in in_file:
                path = (*template.path, "volumes", index, key, field)
                note = f"{format_path(path)} is {name!r}, and no {kind} of that name is in this file"
                yield FieldFinding(
                    template.manifest, path, f"{note}; the pods stay Pending unless the namespace has it", bool(in_file)
                )


def _shared_memory(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    limit = get_field(template.resources[2], "limits", "memory")
    for index, volume in enumerate(get_items(template.spec, "volumes")):
        size, path = (
            get_field(volume, "emptyDir", "sizeLimit"),
            (*template.path, "volumes", index, "emptyDir", "sizeLimit"),
        )
        if get_field(volume, "emptyDir", "medium") != "Memory":
            continue
        if size is None:
            note = "a memory volume without it may take the whole limit, and the pod is killed"
            yield FieldFinding(template.manifest, path[:-1], f"{format_path(path)} is missing; {note}", is_error=False)
        elif limit and _bytes(size) > _bytes(limit):
            wants = f"it counts within the memory limit, {limit}; it wants less"
            yield FieldFinding(template.manifest, path, f"{format_path(path)} is {size}; {wants}")
    mounted = {str(get_field(mount, "mountPath")) for mount in get_items(template.training_container, "volumeMounts")}
    if template.training_container is not None and template.gpus and "/dev/shm" not in mounted:
        path = (*template.container_path, "volumeMounts")
        note = "the default 64 MB is too small for NCCL and for loader workers; it wants an emptyDir with medium Memory"
        yield FieldFinding(
            template.manifest, path, f"{format_path(path)} has nothing at /dev/shm; {note}", is_error=False
        )


def _bytes(amount: Any) -> float:
    text = str(amount)
    return quantity_to_bytes(text) if QUANTITY_RE.fullmatch(text) else 0.0


def _gpus(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    manifest, path, resources = template.resources
    requested, limit = get_field(resources, "requests", GPU), get_field(resources, "limits", GPU)
    if requested is not None and limit is None:
        yield FieldFinding(
            manifest, (*path, "requests", GPU), f"{format_path(path)}.requests has {GPU}; it must stand in limits, too"
        )
    elif requested is not None and str(requested) != str(limit):
        where = (*path, "requests", GPU)
        yield FieldFinding(
            manifest,
            where,
            f"{format_path(path)}.requests has {requested} of {GPU} and limits {limit}; they must be equal",
        )
    if limit is not None and not str(limit).isdigit():
        where = (*path, "limits", GPU)
        yield FieldFinding(
            manifest, where, f"{format_path(path)}.limits has {limit!r} of {GPU}; it wants a whole number of GPUs"
        )
    for name in ("cpu", "memory"):
        request, maximum = get_field(resources, "requests", name), get_field(resources, "limits", name)
        if request is not None and maximum is not None and _amount(request) > _amount(maximum):
            where = (*path, "requests", name)
            yield FieldFinding(
                manifest,
                where,
                f"{format_path(where)} is {request}, above its limit {maximum}; it wants at most {maximum}",
            )
    if not template.gpus:
        return
    if not any(
        toleration.get("key") == GPU or toleration.get("operator") == "Exists"
        for toleration in get_items(template.spec, "tolerations")
    ):
        note = f"has no toleration for {GPU}; where GPU nodes are tainted, the pods stay Pending"
        yield FieldFinding(
            template.manifest, template.path, f"{format_path((*template.path, 'tolerations'))} {note}", is_error=False
        )
    if not get_field(template.spec, "nodeSelector", f"{GPU}.product") and not get_field(template.spec, "affinity"):
        note = f"names no {GPU}.product; any GPU may be given, an L4 in place of an L40S"
        yield FieldFinding(
            template.manifest, template.path, f"{format_path((*template.path, 'nodeSelector'))} {note}", is_error=False
        )


def _amount(value: Any) -> float:
    """A quantity as a number; cores in thousandths such as 500m too."""
    text = str(value)
    if text.endswith("m") and text[:-1].isdigit():
        return int(text[:-1]) / 1000
    return float(quantity_to_bytes(text)) if QUANTITY_RE.fullmatch(text) else 0.0


def _restricted(manifest_set: ManifestSet, template: PodTemplate) -> Iterator[FieldFinding]:
    """What the restricted profiles refuse."""
    spec, path, why = template.spec, template.path, "restricted-v2 refuses it"
    for key in ("hostNetwork", "hostIPC", "hostPID"):
        if get_field(spec, key):
            yield FieldFinding(
                template.manifest, (*path, key), f"{format_path((*path, key))} is true; {why}, leave it out"
            )
    for key in ("runAsUser", "fsGroup", "runAsGroup", "supplementalGroups"):
        if get_field(spec, "securityContext", key) is not None:
            where: FieldPath = (*path, "securityContext", key)
            wants = "leave it out: the namespace gives a user id of its own range"
            yield FieldFinding(
                template.manifest, where, f"{format_path(where)} is {get_field(spec, 'securityContext', key)}; {wants}"
            )
    for index, volume in enumerate(get_items(spec, "volumes")):
        for key in volume:
            if key != "name" and key not in ALLOWED_VOLUMES:
                where = (*path, "volumes", index, key)
                yield FieldFinding(
                    template.manifest,
                    where,
                    f"{format_path(where)}: {why}; it wants a persistentVolumeClaim or an emptyDir",
                )
    for where, container in template.all_containers:
        yield from _restricted_container(template, where, container)


def _restricted_container(template: PodTemplate, path: FieldPath, container: dict[str, Any]) -> Iterator[FieldFinding]:
    own, pod = container.get("securityContext") or {}, get_field(template.spec, "securityContext") or {}
    base: FieldPath = (*path, "securityContext")
    if get_field(own, "privileged"):
        yield FieldFinding(
            template.manifest,
            (*base, "privileged"),
            f"{format_path((*base, 'privileged'))} is true; it wants no privilege",
        )
    if get_field(own, "runAsUser") is not None:
        where = (*base, "runAsUser")
        wants = "leave it out: the namespace gives a user id of its own range"
        yield FieldFinding(template.manifest, where, f"{format_path(where)} is {get_field(own, 'runAsUser')}; {wants}")
    if added := [str(name) for name in get_field(own, "capabilities", "add") or [] if name != "NET_BIND_SERVICE"]:
        where = (*base, "capabilities", "add")
        yield FieldFinding(
            template.manifest, where, f"{format_path(where)} is {', '.join(added)}; restricted-v2 allows none of them"
        )
    requirements = (
        ("allowPrivilegeEscalation", get_field(own, "allowPrivilegeEscalation") is False, "false"),
        ("capabilities.drop", "ALL" in (get_field(own, "capabilities", "drop") or []), "[ALL]"),
        (
            "runAsNonRoot",
            True in (get_field(own, "runAsNonRoot"), get_field(pod, "runAsNonRoot")),
            "true, here or for the pod",
        ),
        (
            "seccompProfile",
            bool(get_field(own, "seccompProfile") or get_field(pod, "seccompProfile")),
            "{type: RuntimeDefault}",
        ),
    )
    for key, satisfied, wants in requirements:
        if not satisfied:
            yield FieldFinding(
                template.manifest, base, f"{format_path(base)}.{key} is not said; Pod Security restricted wants {wants}"
            )


PodRule = Callable[[ManifestSet, PodTemplate], Iterator[FieldFinding]]
POD_RULES: tuple[PodRule, ...] = (
    *(_container, _command, _env, _writable_home, _mounts, _references, _shared_memory, _gpus, _restricted),
)
