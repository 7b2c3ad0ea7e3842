"""Check manifests, ours or anybody's, for what a cluster would refuse, drop in silence, or start and then fail."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.errors import Problem
from modelwright.launch import pod_rules
from modelwright.launch.fields import KINDS
from modelwright.launch.shapes import Path, mismatches, shown
from modelwright.launch.stream import Manifest
from modelwright.launch.views import Finding, Stream, get

JOBS = ("PyTorchJob", "TrainJob")
JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST_NAME = 52
"""`-worker-10` and `-node-0-0` come after it, and a name ends at 63."""
QUEUE = "kueue.x-k8s.io/queue-name"
OVERRIDES = {
    "podSpecOverrides": "Trainer 2.0",
    "podTemplateOverrides": "Trainer 2.1 (OpenShift AI 3.2 to 3.5)",
    "runtimePatches": "Trainer 2.2 and later (OpenShift AI 3.6)",
}
CONFIG_MAP_LIMIT = 1_048_576


@dataclass(frozen=True)
class Letter(Problem):
    """One finding in a manifest."""

    field: str = ""
    """The field, as spec.pytorchReplicaSpecs.Master.replicas."""
    serious: bool = True
    """False where the job may still be right; true where the cluster would refuse it or the job would fail."""


def check(manifests: Sequence[Manifest]) -> list[Letter]:
    """Everything that is wrong or doubtful, in the order of the file."""
    misfits = [(manifest, list(_shape(manifest))) for manifest in manifests]
    told = [_letter(Finding(manifest, path, text)) for manifest, each in misfits for path, text in each]
    fields = {(letter.where, letter.field) for letter in told}
    found: list[Letter] = []
    # the rules see only what has its right type: the rest is told already
    stream = Stream(tuple(_without(manifest, [path for path, _ in each]) for manifest, each in misfits))
    for manifest in stream.manifests:
        found += [_letter(finding) for rule in RULES.get(manifest.kind, ()) for finding in rule(stream, manifest)]
        found += [_letter(finding) for finding in _namespace(stream, manifest)]
    for view in stream.pods:
        found += [_letter(finding) for rule in pod_rules.RULES for finding in rule(stream, view)]
    if not any(manifest.kind in JOBS for manifest in manifests):
        where, wants = manifests[0].where(()), "no job is in this file; it wants a PyTorchJob or a TrainJob"
        found.append(Letter(where, wants, "kind"))
    kept = [letter for letter in found if (letter.where, letter.field) not in fields]
    return sorted(dict.fromkeys([*told, *kept]), key=lambda letter: (_line(letter), not letter.serious))


def _without(manifest: Manifest, paths: list[Path]) -> Manifest:
    """A document with nothing in the places of misfits."""
    body = copy.deepcopy(manifest.body)
    for path in paths:
        holder: Any = get(body, *path[:-1]) if path else None
        if get(holder, *path[-1:]) is not None:
            holder[path[-1]] = None
    return Manifest(manifest.file, body, manifest.line)


def _line(letter: Letter) -> int:
    number = letter.where.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _letter(finding: Finding) -> Letter:
    where = finding.manifest.where(finding.path)
    return Letter(where, finding.message, shown(finding.path), finding.serious)


def _shape(manifest: Manifest) -> Iterator[tuple[Path, str]]:
    """Fields that the schema does not have, and types that it has otherwise."""
    if manifest.kind not in KINDS:
        if not manifest.kind:
            yield (), "kind is missing; it wants a PyTorchJob or a TrainJob, and what belongs to it"
        return
    version, shape = KINDS[manifest.kind]
    found = manifest.body.get("apiVersion")
    if found is not None and found != version:
        yield ("apiVersion",), f"apiVersion is {found!r}; a {manifest.kind} wants {version}"
    yield from mismatches(manifest.body, shape)


def _namespace(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    here = get(manifest.body, "metadata", "namespace")
    job = next((get(each.body, "metadata", "namespace") for each in stream.manifests if each.kind in JOBS), None)
    if here and job and here != job:
        path = ("metadata", "namespace")
        yield Finding(
            manifest, path, f"metadata.namespace is {here!r}, and the job's is {job!r}; pods see only their own"
        )


def _job_name(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    path, name = ("metadata", "name"), manifest.name
    if not name:
        yield Finding(manifest, ("metadata",), "metadata.name is missing; it wants a name such as my-job")
    elif not JOB_NAME.fullmatch(name):
        wants = "it wants a lower-case letter first, then letters, digits and dashes"
        yield Finding(manifest, path, f"metadata.name is {name!r}; {wants}")
    elif len(name) > LONGEST_NAME:
        wants = f"it wants at most {LONGEST_NAME}, since the pods' names are longer"
        yield Finding(manifest, path, f"metadata.name has {len(name)} characters; {wants}")


def _queue(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    labels, annotations = get(manifest.body, "metadata", "labels"), get(manifest.body, "metadata", "annotations")
    if isinstance(annotations, dict) and QUEUE in annotations:
        path: Path = ("metadata", "annotations", QUEUE)
        yield Finding(manifest, path, f"{QUEUE} is an annotation; Kueue reads it among metadata.labels only")
    elif not isinstance(labels, dict) or QUEUE not in labels:
        note = f"metadata.labels has no {QUEUE}; without it the job does not appear under workload metrics"
        yield Finding(manifest, ("metadata",), note, serious=False)
    path = ("spec", "suspend") if manifest.kind == "TrainJob" else ("spec", "runPolicy", "suspend")
    if get(manifest.body, *path) is True:
        yield Finding(
            manifest,
            path,
            f"{shown(path)} is true; leave it out: Kueue sets it, and without Kueue the job waits for ever",
        )


def _metrics_annotation(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    annotations = get(manifest.body, "metadata", "annotations")
    for key in annotations if isinstance(annotations, dict) else ():
        if "metrics" in str(key) and not str(key).startswith("trainer.opendatahub.io/"):
            note = f"{key}: no annotation makes a job appear under project metrics; the label {QUEUE} does"
            yield Finding(manifest, ("metadata", "annotations", str(key)), note, serious=False)


def _replicas(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    base: Path = ("spec", "pytorchReplicaSpecs")
    specs = get(manifest.body, *base)
    if not isinstance(specs, dict):
        return
    for key in specs:
        if key not in ("Master", "Worker"):
            yield Finding(
                manifest, (*base, key), f"{shown((*base, key))} is unknown; it wants Master and Worker, so written"
            )
    if "Master" not in specs:
        wants = "it wants one, or MASTER_ADDR, RANK and WORLD_SIZE are not set"
        yield Finding(manifest, base, f"spec.pytorchReplicaSpecs.Master is missing; {wants}")
    for key in ("Master", "Worker"):
        if not isinstance(specs.get(key), dict):
            continue
        count, path = specs[key].get("replicas"), (*base, key, "replicas")
        if key == "Master" and count != 1:
            found = "is missing" if count is None else f"is {count}"
            yield Finding(manifest, path, f"{shown(path)} {found}; it must be written, and be 1")
        if key == "Worker" and isinstance(count, int) and count < 1:
            yield Finding(manifest, path, f"{shown(path)} is {count}; it wants at least 1, or no Worker at all")
        policy, path = specs[key].get("restartPolicy"), (*base, key, "restartPolicy")
        if policy is not None and policy not in ("Always", "OnFailure", "Never", "ExitCode"):
            wants = "it wants OnFailure, Never, Always or ExitCode"
            yield Finding(manifest, path, f"{shown(path)} is {policy!r}; {wants}")
        if policy == "ExitCode":
            note = "codes below 128 are not tried again, so a lost peer (1) or a stop (75) ends the job"
            yield Finding(manifest, path, f"{shown(path)} is ExitCode: {note}", serious=False)
    yield from _backoff(manifest, specs)


def _backoff(manifest: Manifest, specs: dict[str, object]) -> Iterator[Finding]:
    path = ("spec", "runPolicy", "backoffLimit")
    limit = get(manifest.body, *path)
    counts = [get(spec, "replicas") for spec in specs.values()]
    pods = sum(count for count in counts if isinstance(count, int))
    restarted = any(get(spec, "restartPolicy") in ("OnFailure", "Always") for spec in specs.values())
    if restarted and limit is None:
        yield Finding(
            manifest,
            ("spec",),
            "spec.runPolicy.backoffLimit is missing: a job that always fails starts for ever",
            False,
        )
    elif restarted and isinstance(limit, int) and pods > 1 and limit <= pods:
        wants = (
            f"one lost pod restarts all {pods}, and the job fails when the sum reaches the limit; it wants over {pods}"
        )
        yield Finding(manifest, path, f"{shown(path)} is {limit}; {wants}")


def _processes(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    """The number of processes is said, and is the number of GPUs."""
    field: Path = ("spec", "nprocPerNode") if manifest.kind == "PyTorchJob" else ("spec", "trainer", "numProcPerNode")
    said = get(manifest.body, *field)
    text = str(said) if said is not None else "auto"
    if text in ("auto", "cpu", "gpu"):
        found = f"is {text}" if said is not None else "is missing"
        wants = "it wants a number: auto is a process per core where there is no GPU, and Trainer 2.3 has no auto"
        yield Finding(
            manifest,
            field,
            f"{shown(field)} {found}; {wants}",
            serious=manifest.kind == "TrainJob" and said is not None,
        )
        return
    if manifest.kind == "TrainJob" and isinstance(said, str):
        yield Finding(
            manifest, field, f"{shown(field)} is {said!r}; it wants a whole number without quotes (Trainer 2.3)"
        )
    for view in stream.pods:
        if view.job is manifest and text.isdigit() and view.gpus not in (None, 0, int(text)):
            yield Finding(
                manifest, field, f"{shown(field)} is {text}, but each pod has {view.gpus} GPU(s); it wants {view.gpus}"
            )
            return


def _runtime_reference(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    path: Path = ("spec", "runtimeRef")
    name, kind = get(manifest.body, *path, "name"), get(manifest.body, *path, "kind") or "ClusterTrainingRuntime"
    here = [each.name for each in stream.manifests if each.kind == "TrainingRuntime"]
    if kind not in ("TrainingRuntime", "ClusterTrainingRuntime"):
        wants = "it wants TrainingRuntime or ClusterTrainingRuntime"
        yield Finding(manifest, (*path, "kind"), f"spec.runtimeRef.kind is {kind!r}; {wants}")
    elif kind == "ClusterTrainingRuntime" and name in here:
        wants = "the TrainingRuntime of that name in this file is not meant so; it wants kind: TrainingRuntime"
        yield Finding(manifest, path, f"spec.runtimeRef.kind is ClusterTrainingRuntime; {wants}")
    elif kind == "TrainingRuntime" and name and name not in here:
        note = f"spec.runtimeRef.name is {name!r}, which is not in this file; the namespace must have it"
        yield Finding(manifest, (*path, "name"), note, serious=bool(here))


def _overrides(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    for key, dialect in OVERRIDES.items():
        if get(manifest.body, "spec", key) is not None:
            wants = "other versions refuse or drop it; a TrainingRuntime of your own needs no override"
            yield Finding(manifest, ("spec", key), f"spec.{key} is known to {dialect} only; {wants}")


def _runtime(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    base: Path = ("spec", "template", "spec", "replicatedJobs")
    jobs = get(manifest.body, *base)
    for number, job in enumerate(jobs if isinstance(jobs, list) else ()):
        path: Path = (*base, number, "template")
        step = get(job, "template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step")
        if get(job, "name") == "node" and step != "trainer":
            wants = (
                "it wants trainer.kubeflow.org/trainjob-ancestor-step: trainer, or the job's settings do not reach it"
            )
            yield Finding(manifest, path, f"{shown((*path, 'metadata', 'labels'))} does not mark the trainer; {wants}")
        policy = get(job, "template", "spec", "template", "spec", "restartPolicy")
        if get(job, "template", "spec", "podFailurePolicy") and policy != "Never":
            where: Path = (*path, "spec", "template", "spec", "restartPolicy")
            yield Finding(manifest, where, f"{shown(where)} is {policy}; podFailurePolicy wants Never")
    if isinstance(jobs, list) and not any(get(job, "name") == "node" for job in jobs):
        yield Finding(manifest, base, f"{shown(base)} has none called node; the trainer's job must be called so")


def _claim(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    """A volume that several nodes mount must be one that several nodes can mount."""
    nodes = max((view.nodes for view in stream.pods if manifest.name in view.claims), default=1)
    modes, path = get(manifest.body, "spec", "accessModes"), ("spec", "accessModes")
    if isinstance(modes, list) and nodes > 1 and "ReadWriteMany" not in modes:
        wants = "it wants ReadWriteMany, or the pods of other nodes stay Pending"
        yield Finding(
            manifest, path, f"spec.accessModes is {', '.join(map(str, modes))} and {nodes} pods mount it; {wants}"
        )


def _config_map(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    texts, others = get(manifest.body, "data") or {}, get(manifest.body, "binaryData") or {}
    size = sum(len(str(text).encode()) for text in texts.values()) + sum(
        len(str(text)) * 3 // 4 for text in others.values()
    )
    if size > CONFIG_MAP_LIMIT:
        wants = f"a ConfigMap carries {CONFIG_MAP_LIMIT:,}; put the data on a volume"
        yield Finding(manifest, ("data",), f"data has {size:,} bytes; {wants}")


def _secret(stream: Stream, manifest: Manifest) -> Iterator[Finding]:
    for key in ("data", "stringData"):
        if get(manifest.body, key):
            wants = "keep it out of files: oc create secret generic NAME --from-file=HF_TOKEN=FILE"
            yield Finding(manifest, (key,), f"{key} of the Secret {manifest.name} holds the secret itself; {wants}")


Rule = Callable[[Stream, Manifest], Iterator[Finding]]
RULES: dict[str, tuple[Rule, ...]] = {
    "PyTorchJob": (_job_name, _queue, _metrics_annotation, _replicas, _processes),
    "TrainJob": (_job_name, _queue, _metrics_annotation, _processes, _runtime_reference, _overrides),
    "TrainingRuntime": (_runtime,),
    "PersistentVolumeClaim": (_claim,),
    "ConfigMap": (_config_map,),
    "Secret": (_secret,),
}
