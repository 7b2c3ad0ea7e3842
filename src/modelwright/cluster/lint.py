"""Rules for manifests, ours or anybody's: what a cluster would refuse, drop silently, or start and then fail."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from modelwright.cluster.admission import ADMISSION_RULES, ANCESTOR_LABEL, DNS_1035, select
from modelwright.cluster.documents import (
    GPU,
    Document,
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
MAX_LABEL = 63
"""Characters of a DNS label, and so of a pod's name."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
FRAMEWORK_LABEL = "trainer.kubeflow.org/framework"
OVERRIDE_FIELDS = {
    "podSpecOverrides": "Trainer 2.0",
    "podTemplateOverrides": "Trainer 2.1 (OpenShift AI 3.2 to 3.5)",
    "runtimePatches": "Trainer 2.2 and later (OpenShift AI 3.6)",
}
MAX_CONFIG_MAP_BYTES = 1_048_576
PET_ENV = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
OPERATOR_ENV: dict[str, tuple[str, ...]] = {
    "PyTorchJob": ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", *PET_ENV),
    "TrainJob": PET_ENV,
}
PER_RANK_ENV = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Set by torchrun for each process; a pod's variables would be the same for all of them."""
ALLOWED_VOLUMES = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected", "downwardAPI", "ephemeral",
                   "csi", "image"}  # fmt: skip
TORCHRUN_FLAGS = ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--node_rank", "--node-rank", "--master_addr",
                  "--master-addr", "--master_port", "--master-port")  # fmt: skip
NO_USER_ID = "leave it out: the namespace gives a user id of its own range"


@dataclass(frozen=True)
class LintFinding(Problem):
    """One finding in a manifest."""

    field: str = ""
    """The field, as spec.pytorchReplicaSpecs.Master.replicas."""
    is_error: bool = True
    """Error (the cluster would refuse it or the job would fail), or only a warning."""


Findings = Iterator[LintFinding]


def lint(manifests: Sequence[Manifest]) -> list[LintFinding]:
    """All errors and warnings, in the order of the file."""
    schema_findings, valid = [], []
    for manifest in manifests:
        mismatches = list(_schema_mismatches(manifest))
        schema_findings += [_finding(manifest, path, text) for path, text in mismatches]
        # the rules see only fields of the right type: the rest is reported already
        valid.append(_drop_invalid(manifest, [path for path, _ in mismatches]))
    manifest_set = ManifestSet(tuple(valid))
    rule_findings: list[LintFinding] = []
    for manifest in valid:
        rule_findings += _admission(manifest, manifest.kind, ())
        for document_rule in (*DOCUMENT_RULES.get(manifest.kind, ()), _namespace):
            rule_findings += document_rule(manifest_set, manifest)
    for template in manifest_set.pod_templates:
        rule_findings += _admission(template.manifest, "Pod", template.path)
        for pod_rule in POD_RULES:
            rule_findings += pod_rule(manifest_set, template)
    if not any(manifest.kind in JOB_KINDS for manifest in manifests):
        wants = "no job is in this file; it wants a PyTorchJob or a TrainJob"
        rule_findings.append(LintFinding(manifests[0].location(()), wants, "kind"))
    reported = {(finding.where, finding.field) for finding in schema_findings}
    further = [finding for finding in rule_findings if (finding.where, finding.field) not in reported]
    unique = dict.fromkeys([*schema_findings, *further])
    return sorted(unique, key=lambda finding: (_line(finding), not finding.is_error))


def _finding(manifest: Manifest, path: FieldPath, text: str, is_error: bool = True) -> LintFinding:
    """A finding about a field; its message is the field's path, continued by the text."""
    field = format_path(path)
    return LintFinding(manifest.location(path), f"{field}{text}", field, is_error)


def _line(finding: LintFinding) -> int:
    number = finding.where.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _drop_invalid(manifest: Manifest, paths: list[FieldPath]) -> Manifest:
    """A copy of the document without its invalid fields."""
    body = copy.deepcopy(manifest.body)
    for path in paths:
        holder: Any = get_field(body, *path[:-1]) if path else None
        if get_field(holder, *path[-1:]) is not None:
            holder[path[-1]] = None
    return Manifest(manifest.file, body, manifest.line)


def _schema_mismatches(manifest: Manifest) -> Iterator[tuple[FieldPath, str]]:
    """Fields that the schema does not have or has with another type, each with the rest of its message."""
    if manifest.kind not in SCHEMAS:
        if not manifest.kind:
            yield (), "kind is missing; it wants a PyTorchJob or a TrainJob, and what belongs to it"
        return
    version, schema = SCHEMAS[manifest.kind]
    api_version = manifest.body.get("apiVersion")
    if api_version is not None and api_version != version:
        yield ("apiVersion",), f" is {api_version!r}; a {manifest.kind} wants {version}"
    yield from validate(manifest.body, schema)


def _admission(manifest: Manifest, kind: str, base: FieldPath) -> Findings:
    """What the API server and the operators refuse beyond their schemas."""
    body = get_field(manifest.body, *base)
    for rule in ADMISSION_RULES:
        if rule.kind == kind or (rule.kind == "Any" and not base):
            for path, value in select(body, rule.path):
                if not rule.accepts(value):
                    is_text = isinstance(value, str | int) and value != path[-1]
                    problem = f" is {value!r}; it wants" if is_text else ": it wants"
                    yield _finding(manifest, (*base, *path), f"{problem} {rule.wants} ({rule.source})")


def _namespace(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    path = ("metadata", "namespace")
    namespace = get_field(manifest.body, *path)
    job = next((document for document in manifest_set.manifests if document.kind in JOB_KINDS), None)
    job_namespace = get_field(job.body, *path) if job else None
    if namespace and job_namespace and namespace != job_namespace:
        yield _finding(
            manifest, path, f" is {namespace!r}, and the job's is {job_namespace!r}; pods see only their own"
        )


def _job_name(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    """Trainer 2.3.0, rule of TrainJob; training-operator 1.9.4, validatePyTorchJob; JobSet 0.12.0, ValidateCreate."""
    path, name = ("metadata", "name"), manifest.name
    num_nodes = max((template.num_nodes for template in manifest_set.pod_templates), default=1)
    suffix = f"-node-0-{num_nodes - 1}-abcde" if manifest.kind == "TrainJob" else f"-worker-{num_nodes - 1}"
    longest = MAX_LABEL - len(suffix)
    if not name:
        yield _finding(manifest, path, " is missing; it wants a name such as my-job")
    elif not re.fullmatch(DNS_1035, name):
        wants = "it wants a lower-case letter first, then letters, digits and dashes"
        yield _finding(manifest, path, f" is {name!r}; {wants}")
    elif len(name) > longest:
        wants = f"it wants at most {longest}: its pods are called {name[:3]}…{suffix}, with {MAX_LABEL} at most"
        yield _finding(manifest, path, f" has {len(name)} characters; {wants}")


def _queue(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    metadata = get_field(manifest.body, "metadata") or {}
    if QUEUE_LABEL in (get_field(metadata, "annotations") or {}):
        path: FieldPath = ("metadata", "annotations", QUEUE_LABEL)
        yield _finding(manifest, path, " is an annotation; Kueue reads it among metadata.labels only")
    elif QUEUE_LABEL not in (get_field(metadata, "labels") or {}):
        note = f".labels has no {QUEUE_LABEL}; without it the job does not appear under workload metrics"
        yield _finding(manifest, ("metadata",), note, is_error=False)
    elif manifest.kind == "TrainJob":
        note = "OpenShift AI up to 3.5 ships Trainer 2.1: with a newer Kueue there, use a PyTorchJob"
        label: FieldPath = ("metadata", "labels", QUEUE_LABEL)
        yield _finding(manifest, label, f": Kueue 0.17 and later wants Trainer 2.2 or later; {note}", is_error=False)
    path = ("spec", "suspend") if manifest.kind == "TrainJob" else ("spec", "runPolicy", "suspend")
    if get_field(manifest.body, *path) is True:
        wants = "leave it out: Kueue sets it, and without Kueue the job waits for ever"
        yield _finding(manifest, path, f" is true; {wants}")


def _metrics_annotation(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    for key in get_field(manifest.body, "metadata", "annotations") or {}:
        if "metrics" in str(key) and not str(key).startswith("trainer.opendatahub.io/"):
            note = f": no annotation makes a job appear under project metrics; the label {QUEUE_LABEL} does"
            yield _finding(manifest, ("metadata", "annotations", str(key)), note, is_error=False)


def _replicas(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    """training-operator 1.9.4, validatePyTorchReplicaSpecs."""
    base: FieldPath = ("spec", "pytorchReplicaSpecs")
    specs = get_field(manifest.body, *base)
    if not isinstance(specs, dict):
        return
    for key in specs:
        if key not in ("Master", "Worker"):
            yield _finding(manifest, (*base, key), " is unknown; it wants Master and Worker, so written")
    if "Master" not in specs:
        wants = "it wants one, or MASTER_ADDR, RANK and WORLD_SIZE are not set"
        yield _finding(manifest, base, f".Master is missing; {wants}")
    for key in ("Master", "Worker"):
        if not isinstance(specs.get(key), dict):
            continue
        count, path = specs[key].get("replicas"), (*base, key, "replicas")
        if key == "Master" and count != 1:
            problem = "is missing" if count is None else f"is {count}"
            yield _finding(manifest, path, f" {problem}; it must be written, and be 1")
        if key == "Worker" and isinstance(count, int) and count < 1:
            yield _finding(manifest, path, f" is {count}; it wants at least 1, or no Worker at all")
        policy, path = specs[key].get("restartPolicy"), (*base, key, "restartPolicy")
        if policy is not None and policy not in ("Always", "OnFailure", "Never", "ExitCode"):
            yield _finding(manifest, path, f" is {policy!r}; it wants OnFailure, Never, Always or ExitCode")
        if policy == "ExitCode":
            note = "codes below 128 are not retried, so a lost peer (1) or a stop (75) ends the job"
            yield _finding(manifest, path, f" is ExitCode: {note}", is_error=False)
    yield from _backoff(manifest, specs)


def _backoff(manifest: Manifest, specs: dict[str, object]) -> Findings:
    path = ("spec", "runPolicy", "backoffLimit")
    limit = get_field(manifest.body, *path)
    counts = [get_field(spec, "replicas") for spec in specs.values()]
    pods = sum(count for count in counts if isinstance(count, int))
    restarted = any(get_field(spec, "restartPolicy") in ("OnFailure", "Always") for spec in specs.values())
    if restarted and limit is None:
        yield _finding(manifest, path, " is missing: a job that always fails restarts for ever", is_error=False)
    elif restarted and isinstance(limit, int) and pods > 1 and limit <= pods:
        why = f"one lost pod restarts all {pods}, and the job fails when the sum reaches the limit"
        yield _finding(manifest, path, f" is {limit}; {why}; it wants over {pods}")


def _processes(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    """The number of processes is written, and equals the number of GPUs."""
    is_train_job = manifest.kind == "TrainJob"
    path: FieldPath = ("spec", "trainer", "numProcPerNode") if is_train_job else ("spec", "nprocPerNode")
    value = get_field(manifest.body, *path)
    text = str(value) if value is not None else "auto"
    if text in ("auto", "cpu", "gpu"):
        problem = f"is {text}" if value is not None else "is missing"
        wants = "it wants a number: auto is a process per core where there is no GPU, and Trainer 2.3 has no auto"
        yield _finding(manifest, path, f" {problem}; {wants}", is_error=is_train_job and value is not None)
        return
    if is_train_job and isinstance(value, str):
        yield _finding(manifest, path, f" is {value!r}; it wants a whole number without quotes (Trainer 2.3)")
    for template in manifest_set.pod_templates:
        if template.job is manifest and text.isdigit() and template.gpus not in (None, 0, int(text)):
            gpus = template.gpus
            yield _finding(manifest, path, f" is {text}, but each pod has {gpus} GPU(s); it wants {gpus}")
            return


def _runtime_reference(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    path: FieldPath = ("spec", "runtimeRef")
    name = get_field(manifest.body, *path, "name")
    kind = get_field(manifest.body, *path, "kind") or "ClusterTrainingRuntime"
    runtimes = manifest_set.names_of_kind("TrainingRuntime")
    if kind not in ("TrainingRuntime", "ClusterTrainingRuntime"):
        wants = "it wants TrainingRuntime or ClusterTrainingRuntime"
        yield _finding(manifest, (*path, "kind"), f" is {kind!r}; {wants}")
    elif kind == "ClusterTrainingRuntime" and name in runtimes:
        wants = "it does not mean the TrainingRuntime of that name in this file; it wants kind: TrainingRuntime"
        yield _finding(manifest, path, f".kind is ClusterTrainingRuntime; {wants}")
    elif kind == "TrainingRuntime" and name and name not in runtimes:
        note = f" is {name!r}, which is not in this file; the namespace must have it"
        yield _finding(manifest, (*path, "name"), note, is_error=bool(runtimes))


def _overrides(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    for key, dialect in OVERRIDE_FIELDS.items():
        if get_field(manifest.body, "spec", key) is not None:
            wants = "other versions refuse or drop it; a TrainingRuntime of your own needs no override"
            yield _finding(manifest, ("spec", key), f" is known to {dialect} only; {wants}")


def _runtime(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    base: FieldPath = ("spec", "template", "spec", "replicatedJobs")
    jobs = get_field(manifest.body, *base)
    for index, job in enumerate(jobs if isinstance(jobs, list) else ()):
        path: FieldPath = (*base, index, "template")
        step = get_field(job, "template", "metadata", "labels", ANCESTOR_LABEL)
        if get_field(job, "name") == "node" and step != "trainer":
            wants = f"{ANCESTOR_LABEL}: trainer, or the job's settings do not reach it"
            yield _finding(manifest, path, f".metadata.labels does not mark the trainer; it wants {wants}")
        policy = get_field(job, "template", "spec", "template", "spec", "restartPolicy")
        if get_field(job, "template", "spec", "podFailurePolicy") and policy != "Never":
            path = (*path, "spec", "template", "spec", "restartPolicy")
            yield _finding(manifest, path, f" is {policy}; podFailurePolicy wants Never")
    if isinstance(jobs, list) and not any(get_field(job, "name") == "node" for job in jobs):
        yield _finding(manifest, base, " has none called node; the trainer's job must be called so")
    if not get_field(manifest.body, "metadata", "labels", FRAMEWORK_LABEL):
        note = f".labels has no {FRAMEWORK_LABEL}; without it the Kubeflow SDK's list_jobs fails in this namespace"
        yield _finding(manifest, ("metadata",), f"{note}; it wants torch", is_error=False)


def _claim(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    """A volume that several nodes mount must be ReadWriteMany."""
    templates = [template for template in manifest_set.pod_templates if manifest.name in template.pvc_names]
    num_nodes = max((template.num_nodes for template in templates), default=1)
    modes, path = get_field(manifest.body, "spec", "accessModes"), ("spec", "accessModes")
    if isinstance(modes, list) and num_nodes > 1 and "ReadWriteMany" not in modes:
        wants = "it wants ReadWriteMany, or the pods of other nodes stay Pending"
        yield _finding(manifest, path, f" is {', '.join(map(str, modes))} and {num_nodes} pods mount it; {wants}")


def claim_conflicts(manifests: Sequence[Document], existing: Sequence[Document]) -> list[str]:
    """Claims of the namespace that cannot become the rendered ones: what differs is immutable, or cannot shrink."""
    by_name = {get_field(claim, "metadata", "name"): claim for claim in existing}
    problems = []
    for claim in manifests:
        name = get_field(claim, "metadata", "name")
        if claim.get("kind") != "PersistentVolumeClaim" or name not in by_name:
            continue
        have, want = (get_field(body, "spec", "accessModes") or [] for body in (by_name[name], claim))
        if set(have) != set(want):
            setting = f"cluster.volumes.{name}.access_mode={'|'.join(have)}"
            advice = f"use it as it is: --set {setting}"
            if "ReadWriteMany" in want:
                advice = f"name another claim: cluster.volumes: {{{name}: null, {name}-shared: {{mount: PATH}}}}"
            modes = f"{', '.join(have)} in the namespace, and the job wants {', '.join(want)}"
            problems.append(f"claim {name} is {modes}, which cannot be changed; {advice}")
        sizes = [get_field(body, "spec", "resources", "requests", "storage") for body in (by_name[name], claim)]
        if all(sizes) and _quantity(sizes[1]) < _quantity(sizes[0]):
            advice = f"--set cluster.volumes.{name}.size={sizes[0]}"
            problems.append(f"claim {name} has {sizes[0]} in the namespace and cannot shrink to {sizes[1]}; {advice}")
    return problems


def _config_map(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    texts, binaries = get_field(manifest.body, "data") or {}, get_field(manifest.body, "binaryData") or {}
    size = sum(len(str(text).encode()) for text in texts.values())
    size += sum(len(str(text)) * 3 // 4 for text in binaries.values())
    if size > MAX_CONFIG_MAP_BYTES:
        wants = f"a ConfigMap carries {MAX_CONFIG_MAP_BYTES:,}; put the data on a volume"
        yield _finding(manifest, ("data",), f" has {size:,} bytes; {wants}")


def _secret(manifest_set: ManifestSet, manifest: Manifest) -> Findings:
    for key in ("data", "stringData"):
        if get_field(manifest.body, key):
            wants = "keep it out of files: oc create secret generic NAME --from-file=HF_TOKEN=FILE"
            yield _finding(manifest, (key,), f" of the Secret {manifest.name} holds the secret itself; {wants}")


DOCUMENT_RULES: dict[str, tuple[Callable[[ManifestSet, Manifest], Findings], ...]] = {
    "PyTorchJob": (_job_name, _queue, _metrics_annotation, _replicas, _processes),
    "TrainJob": (_job_name, _queue, _metrics_annotation, _processes, _runtime_reference, _overrides),
    "TrainingRuntime": (_runtime,),
    "PersistentVolumeClaim": (_claim,),
    "ConfigMap": (_config_map,),
    "Secret": (_secret,),
}


def _container(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    manifest, trains = template.manifest, template.training_container
    if template.containers and trains is None:
        names = ", ".join(str(container.get("name")) for container in template.containers)
        path = (*template.path, "containers", 0, "name")
        yield _finding(manifest, path, f" is {names!r}; the operator wants one called {template.container_name}")
    elif trains is not None and not (trains.get("image") or get_field(template.job.body, "spec", "trainer", "image")):
        yield _finding(manifest, template.container_path, ".image is missing; it wants the image that trains")
    policy = get_field(template.spec, "restartPolicy")
    if template.job.kind == "TrainJob" and policy not in (None, "Never", "OnFailure"):
        yield _finding(manifest, (*template.path, "restartPolicy"), f" is {policy!r}; a Job wants Never or OnFailure")


def _command(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    """The command starts torchrun, without flags that contradict the operator's variables."""
    manifest, path, args = template.command
    line = " ".join(args)
    launches = bool(re.search(r"\btorchrun\b|torch\.distributed\.run", line))
    distributed = template.num_nodes > 1 or (template.gpus or 0) > 1
    if "accelerate" in line.split() and "launch" in line.split():
        wants = "it reads none of the operator's variables; it wants torchrun SCRIPT, without flags"
        yield _finding(manifest, path, f" is accelerate launch; {wants}")
    elif args and not launches and distributed and re.search(r"\bpython[0-9.]*\b", line):
        why = "RANK is not set" if template.job.kind == "TrainJob" else "RANK is the node's, and LOCAL_RANK is not set"
        problem = f" starts python on {template.num_nodes} nodes, where {why}"
        yield _finding(manifest, path, f"{problem}; it wants torchrun SCRIPT")
    for flag in TORCHRUN_FLAGS:
        if launches and re.search(rf"{flag}\b", line):
            wants = "leave it out: the operator's PET_ variables set it, correctly for every pod"
            yield _finding(manifest, path, f" has {flag}; {wants}")


def _env(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    used_names: set[str] = set()
    for manifest, path, variable in template.env:
        name, value = str(variable.get("name")), variable.get("value")
        name_path = (*path, "name")
        if name in OPERATOR_ENV[template.job.kind]:
            consequence = "refused" if template.job.kind == "TrainJob" else "overwritten by the operator"
            yield _finding(manifest, name_path, f" is {name}, which is {consequence}; leave it out")
        elif name in PER_RANK_ENV:
            yield _finding(manifest, name_path, f" is {name}, which torchrun sets for each process; leave it out")
        if name in used_names:
            yield _finding(manifest, name_path, f" is {name} a second time; the last one counts, keep one")
        used_names.add(name)
        if isinstance(value, str) and value and (is_secret_name(name) or contains_secret(value)):
            wants = f"it wants valueFrom: {{secretKeyRef: {{name: SECRET, key: {name}}}}}"
            yield _finding(manifest, (*path, "value"), f" holds {name} for all to read; {wants}")


def _writable_home(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    """A random user id cannot write to HOME, which is / for it."""
    if template.training_container is None:
        return
    values = {str(item.get("name")): item.get("value") for _, _, item in template.env}
    mounts = [str(get_field(item, "mountPath")) for item in get_items(template.training_container, "volumeMounts")]
    path = (*template.container_path, "env")
    for name in ("HOME", "HF_HOME"):
        if name not in values:
            wants = "it wants a folder on a volume: under restricted-v2 the home is /, where nothing can be written"
            yield _finding(template.manifest, path, f" has no {name}; {wants}")
    for name in ("HOME", "HF_HOME", "DATA_DIR", "OUTPUT_DIR"):
        value = values.get(name)
        if isinstance(value, str) and value.startswith("/") and not _below(value, mounts):
            in_image = name == "DATA_DIR" and bool(PurePosixPath(value).suffix)  # a file that an image may contain
            wants = f"it wants a folder below one of {', '.join(mounts) or 'the mounts'}"
            wants = "it must be in the container image" if in_image else wants
            yield _finding(template.manifest, path, f": {name} is {value}, on no volume; {wants}", not in_image)


def _below(path: str, mounts: list[str]) -> bool:
    return any(path == mount or path.startswith(f"{mount.rstrip('/')}/") for mount in mounts) or path.startswith("/tmp")


def _mounts(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    for container_path, container in template.all_containers:
        mount_paths: set[str] = set()
        for index, mount in enumerate(get_items(container, "volumeMounts")):
            path: FieldPath = (*container_path, "volumeMounts", index)
            name, mount_path = str(mount.get("name")), str(mount.get("mountPath"))
            if name not in template.volumes:
                known = ", ".join(template.volumes) or "none"
                problem = f" is {name!r}, which is no volume of the pod; it has {known}"
                yield _finding(template.manifest, (*path, "name"), problem)
            if mount_path in mount_paths:
                yield _finding(template.manifest, (*path, "mountPath"), f" is {mount_path} a second time")
            mount_paths.add(mount_path)


def _references(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    """Claims and ConfigMaps that the pods need are in the file, or must be in the namespace already."""
    reference_fields = (
        ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
        ("configMap", "name", "ConfigMap"),
    )
    for index, volume in enumerate(get_items(template.spec, "volumes")):
        for key, field, kind in reference_fields:
            name, in_file = get_field(volume, key, field), manifest_set.names_of_kind(kind)
            if name and name not in in_file:
                note = f" is {name!r}, and no {kind} of that name is in this file"
                path = (*template.path, "volumes", index, key, field)
                pending = "the pods stay Pending unless the namespace has it"
                yield _finding(template.manifest, path, f"{note}; {pending}", is_error=bool(in_file))


def _shared_memory(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    limit = get_field(template.resources[2], "limits", "memory")
    for index, volume in enumerate(get_items(template.spec, "volumes")):
        path = (*template.path, "volumes", index, "emptyDir", "sizeLimit")
        size = get_field(volume, "emptyDir", "sizeLimit")
        if get_field(volume, "emptyDir", "medium") != "Memory":
            continue
        if size is None:
            note = "a memory volume without it may take the whole limit, and the pod is killed"
            yield _finding(template.manifest, path, f" is missing; {note}", is_error=False)
        elif limit and _quantity(size) > _quantity(limit):
            wants = f"it counts within the memory limit, {limit}; it wants less"
            yield _finding(template.manifest, path, f" is {size}; {wants}")
    mounted = {str(get_field(mount, "mountPath")) for mount in get_items(template.training_container, "volumeMounts")}
    if template.training_container is not None and template.gpus and "/dev/shm" not in mounted:
        path = (*template.container_path, "volumeMounts")
        note = "the default 64 MB is too small for NCCL and for loader workers; it wants an emptyDir with medium Memory"
        yield _finding(template.manifest, path, f" has nothing at /dev/shm; {note}", is_error=False)


def _quantity(value: Any) -> float:
    """A quantity as a number; cores in thousandths such as 500m too."""
    text = str(value)
    if text.endswith("m") and text[:-1].isdigit():
        return int(text[:-1]) / 1000
    return float(quantity_to_bytes(text)) if QUANTITY_RE.fullmatch(text) else 0.0


def _gpus(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    manifest, path, resources = template.resources
    requests, limits = get_field(resources, "requests"), get_field(resources, "limits")
    requested, limit = get_field(requests, GPU), get_field(limits, GPU)
    if requested is not None and limit is None:
        yield _finding(manifest, (*path, "requests", GPU), " is set; it must be in limits, too")
    elif requested is not None and str(requested) != str(limit):
        problem = f" is {requested} and its limit {limit}; they must be equal"
        yield _finding(manifest, (*path, "requests", GPU), problem)
    if limit is not None and not str(limit).isdigit():
        yield _finding(manifest, (*path, "limits", GPU), f" is {limit!r}; it wants a whole number of GPUs")
    for name in ("cpu", "memory"):
        request, maximum = get_field(requests, name), get_field(limits, name)
        if request is not None and maximum is not None and _quantity(request) > _quantity(maximum):
            problem = f" is {request}, above its limit {maximum}; it wants at most {maximum}"
            yield _finding(manifest, (*path, "requests", name), problem)
    if not template.gpus:
        return
    tolerations = get_items(template.spec, "tolerations")
    if not any(item.get("key") == GPU or item.get("operator") == "Exists" for item in tolerations):
        note = f".tolerations has no toleration for {GPU}; where GPU nodes are tainted, the pods stay Pending"
        yield _finding(template.manifest, template.path, note, is_error=False)
    if not get_field(template.spec, "nodeSelector", f"{GPU}.product") and not get_field(template.spec, "affinity"):
        note = f".nodeSelector names no {GPU}.product; any GPU may be given, an L4 in place of an L40S"
        yield _finding(template.manifest, template.path, note, is_error=False)


def _restricted(manifest_set: ManifestSet, template: PodTemplate) -> Findings:
    """What the restricted profiles refuse."""
    spec, path, manifest = template.spec, template.path, template.manifest
    for key in ("hostNetwork", "hostIPC", "hostPID"):
        if get_field(spec, key):
            yield _finding(manifest, (*path, key), " is true; restricted-v2 refuses it, leave it out")
    for key in ("runAsUser", "fsGroup", "runAsGroup", "supplementalGroups"):
        if (value := get_field(spec, "securityContext", key)) is not None:
            yield _finding(manifest, (*path, "securityContext", key), f" is {value}; {NO_USER_ID}")
    for index, volume in enumerate(get_items(spec, "volumes")):
        for key in volume:
            if key != "name" and key not in ALLOWED_VOLUMES:
                wants = "restricted-v2 refuses it; it wants a persistentVolumeClaim or an emptyDir"
                yield _finding(manifest, (*path, "volumes", index, key), f": {wants}")
    for container_path, container in template.all_containers:
        yield from _restricted_container(template, (*container_path, "securityContext"), container)


def _restricted_container(template: PodTemplate, path: FieldPath, container: dict[str, Any]) -> Findings:
    own, pod = container.get("securityContext") or {}, get_field(template.spec, "securityContext") or {}
    manifest = template.manifest
    if get_field(own, "privileged"):
        yield _finding(manifest, (*path, "privileged"), " is true; it wants no privilege")
    if (user := get_field(own, "runAsUser")) is not None:
        yield _finding(manifest, (*path, "runAsUser"), f" is {user}; {NO_USER_ID}")
    if added := [str(name) for name in get_field(own, "capabilities", "add") or [] if name != "NET_BIND_SERVICE"]:
        problem = f" is {', '.join(added)}; restricted-v2 allows none of them"
        yield _finding(manifest, (*path, "capabilities", "add"), problem)
    escalation = get_field(own, "allowPrivilegeEscalation")
    non_root = get_field(own, "runAsNonRoot")
    non_root = get_field(pod, "runAsNonRoot") if non_root is None else non_root
    dropped = get_field(own, "capabilities", "drop")
    seccomp = get_field(own, "seccompProfile") or get_field(pod, "seccompProfile")
    requirements = (
        ("allowPrivilegeEscalation", escalation, escalation is False, "false"),
        ("capabilities.drop", dropped, "ALL" in (dropped or []), "[ALL]"),
        ("runAsNonRoot", non_root, non_root is True, "true, here or for the pod"),
        ("seccompProfile", seccomp, bool(seccomp), "{type: RuntimeDefault}"),
    )
    for key, value, satisfied, wants in requirements:
        if value is not None and not satisfied:
            yield _finding(manifest, path, f".{key} is {value}; restricted-v2 wants {wants}")
        elif not satisfied:
            note = f".{key} is not set; restricted-v2 fills it in, Pod Security restricted elsewhere wants {wants}"
            yield _finding(manifest, path, note, is_error=False)


POD_RULES: tuple[Callable[[ManifestSet, PodTemplate], Findings], ...] = (
    *(_container, _command, _env, _writable_home, _mounts, _references, _shared_memory, _gpus, _restricted),
)
