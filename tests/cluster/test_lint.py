"""Mistakes that people make in manifests, each found, with the field named and what would do."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_jobs import cluster_job
from modelwright.cluster.admission import ADMISSION_RULES, AdmissionRule
from modelwright.cluster.documents import Manifest, load_manifests, parse_manifests
from modelwright.cluster.lint import LintFinding, claim_conflicts, lint
from modelwright.cluster.manifests import JobKind, build_job, documents, render
from modelwright.errors import ProblemsError
from modelwright.recipe.load import load

POD = "spec.pytorchReplicaSpecs.Master.template.spec"
MAIN = f"{POD}.containers[0]"
NODE = "spec.template.spec.replicatedJobs[0].template.spec.template.spec"
PYTORCHJOB = [
    ("  name: quickstart\n", "  name: Quick_Start\n", "metadata.name", "lower-case letter first"),
    ("  name: quickstart\n", f"  name: {'q' * 60}\n", "metadata.name", "60 characters"),
    ("      replicas: 1\n", "", "spec.pytorchReplicaSpecs.Master.replicas", "must be written"),
    ("      replicas: 1\n", "      replicas: 2\n", "spec.pytorchReplicaSpecs.Master.replicas", "is 2"),
    ("      replicas: 1\n", "      replica: 1\n", "spec.pytorchReplicaSpecs.Master.replica", "did you mean replicas?"),
    ("      replicas: 1\n", "      replicas: one\n", "spec.pytorchReplicaSpecs.Master.replicas", "a whole number"),
    ("      replicas: 3\n", "      replicas: 0\n", "spec.pytorchReplicaSpecs.Worker.replicas", "at least 1"),
    ("    Worker:\n", "    Workers:\n", "spec.pytorchReplicaSpecs.Workers", "Master and Worker"),
    ("    Master:\n", "    master:\n", "spec.pytorchReplicaSpecs", "Master is missing"),
    ("- name: pytorch\n", "- name: trainer\n", f"{MAIN}.name", "called pytorch"),
    ('nprocPerNode: "1"', "nprocPerNode: 1", "spec.nprocPerNode", 'in quotes: "1"'),
    ('nprocPerNode: "1"', 'nprocPerNode: "2"', "spec.nprocPerNode", "each pod has 1 GPU"),
    ("restartPolicy: OnFailure", "restartPolicy: Sometimes", "spec.pytorchReplicaSpecs.Master.restartPolicy",
     "OnFailure"),
    ("backoffLimit: 13", "backoffLimit: 3", "spec.runPolicy.backoffLimit", "it wants over 4"),
    ("backoffLimit: 13", "backofLimit: 13", "spec.runPolicy.backofLimit", "did you mean backoffLimit?"),
    ("cleanPodPolicy: None", "suspend: true", "spec.runPolicy.suspend", "Kueue sets it"),
    ("[ReadWriteMany]", "[ReadWriteOnce]", "spec.accessModes", "4 pods mount it"),
    ('sizeLimit: "4Gi"', 'sizeLimit: "64Gi"', f"{POD}.volumes[4].emptyDir.sizeLimit", "within the memory limit"),
    ("- name: NCCL_DEBUG", "- name: WORLD_SIZE", f"{MAIN}.env[15].name", "overwritten"),
    ("- name: NCCL_DEBUG", "- name: LOCAL_RANK", f"{MAIN}.env[15].name", "for each process"),
    ("- name: NCCL_DEBUG", "- name: HOME", f"{MAIN}.env[15].name", "a second time"),
    ("              value: INFO", "              value: 4", f"{MAIN}.env[15].value", 'in quotes: "4"'),
    ("              value: INFO", "              value: hf_abcdefghijklmnop", f"{MAIN}.env[15].value", "secretKeyRef"),
    ("- name: HOME\n", "- name: HOUSE\n", f"{MAIN}.env", "has no HOME"),
    ("value: /workspace/huggingface", "value: /nowhere/.cache", f"{MAIN}.env", "on no volume"),
    ("            - name: workspace\n              mountPath", "            - name: work\n              mountPath",
     f"{MAIN}.volumeMounts[2].name", "no volume of the pod"),
    ("mountPath: /workspace", "mountPath: /shared/models", f"{MAIN}.volumeMounts[2].mountPath", "second time"),
    ("volumeMounts:", "volumeMount:", f"{MAIN}.volumeMount", "did you mean volumeMounts?"),
    ("claimName: workspace", "claimName: workspaces", f"{POD}.volumes[2].persistentVolumeClaim.claimName", "Pending"),
    ("persistentVolumeClaim:\n              claimName: workspace", "hostPath:\n              path: /data",
     f"{POD}.volumes[2].hostPath", "refuses it"),
    ("runAsNonRoot: true", "runAsUser: 0", f"{POD}.securityContext.runAsUser", "own range"),
    ("runAsNonRoot: true", "fsGroup: 1000", f"{POD}.securityContext.fsGroup", "own range"),
    ("runAsNonRoot: true", "runAsNonRoot: false", f"{MAIN}.securityContext", "runAsNonRoot is False"),
    ("value: /shared/models/quickstart", "value: /elsewhere", f"{MAIN}.env", "OUTPUT_DIR is /elsewhere, on no volume"),
    ("automountServiceAccountToken: false", "hostNetwork: true", f"{POD}.hostNetwork", "refuses it"),
    ("allowPrivilegeEscalation: false", "privileged: true", f"{MAIN}.securityContext.privileged", "no privilege"),
    ("drop: [ALL]", "add: [SYS_ADMIN]", f"{MAIN}.securityContext.capabilities.add", "SYS_ADMIN"),
    ("command: [python, -m, modelwright.launch.torchrun, -m, modelwright]", "command: [python, train.py]",
     f"{MAIN}.command", "it wants torchrun"),
    ("command: [python, -m, modelwright.launch.torchrun, -m, modelwright]", "command: [accelerate, launch, train.py]",
     f"{MAIN}.command", "torchrun SCRIPT"),
    ("command: [python, -m, modelwright.launch.torchrun, -m, modelwright]", "command: [torchrun, --nnodes=4, train.py]",
     f"{MAIN}.command", "--nnodes"),
    ("command: [python, -m, modelwright.launch.torchrun, -m, modelwright]", "command: torchrun train.py",
     f"{MAIN}.command", "a list"),
    ('                nvidia.com/gpu: "1"\n', '                nvidia.com/gpu: "2"\n',
     f"{MAIN}.resources.requests.nvidia.com/gpu",
     "must be equal"),
    ('cpu: "6"', 'cpu: "60"', f"{MAIN}.resources.requests.cpu", "at most 6"),
    ('memory: "20Gi"', 'memory: "20 GB"', f"{MAIN}.resources.requests.memory", "such as 16Gi"),
    ("    kueue.x-k8s.io/queue-name: default\n  annotations:\n",
     "  annotations:\n    kueue.x-k8s.io/queue-name: default\n",
     "metadata.annotations.kueue.x-k8s.io/queue-name", "metadata.labels only"),
    ("namespace: modelwright", "namespace: other", "metadata.namespace", "see only their own"),
    ("apiVersion: kubeflow.org/v1\n", "apiVersion: kubeflow.org/v2\n", "apiVersion", "kubeflow.org/v1"),
    ("resources:\n    requests:\n      storage", "storageClass: gp3\n  resources:\n    requests:\n      storage",
     "spec.storageClass", "did you mean storageClassName?"),
]  # fmt: skip
TRAINJOB = [
    ("numProcPerNode: 1", "numProcPerNode: auto", "spec.trainer.numProcPerNode", "it wants a number"),
    ("numProcPerNode: 1", 'numProcPerNode: "1"', "spec.trainer.numProcPerNode", "without quotes"),
    ("numProcPerNode: 1", "numProcPerNode: 2", "spec.trainer.numProcPerNode", "it wants 1"),
    ("    numNodes: 4\n    numProc", "    numNode: 4\n    numProc", "spec.trainer.numNode", "did you mean numNodes?"),
    ("    kind: TrainingRuntime\n", "", "spec.runtimeRef", "kind: TrainingRuntime"),
    ("TrainingRuntime\n    name: quickstart", "TrainingRuntime\n    name: quick", "spec.runtimeRef.name",
     "not in this file"),
    ("  runtimeRef:\n", "  podTemplateOverrides: []\n  runtimeRef:\n", "spec.podTemplateOverrides", "Trainer 2.1"),
    ("  runtimeRef:\n", "  runtimePatches: []\n  runtimeRef:\n", "spec.runtimePatches", "Trainer 2.2 and later"),
    ("  runtimeRef:\n", "  suspend: true\n  runtimeRef:\n", "spec.suspend", "for ever"),
    ("- name: EPOCHS", "- name: PET_NNODES", "spec.trainer.env[0].name", "refused"),
    ("      - name: node\n", "      - name: trainer\n", "spec.template.spec.replicatedJobs", "called node"),
    ("- name: node\n                  image", "- name: main\n                  image",
     f"{NODE}.containers[0].name", "node"),
    ("trainjob-ancestor-step: trainer", "trainjob-ancestor-step: main", "spec.template.spec.replicatedJobs[0].template",
     "mark the trainer"),
    ("restartPolicy: Never", "restartPolicy: OnFailure", f"{NODE}.restartPolicy", "podFailurePolicy wants Never"),
    ("restartPolicy: Never", "restartPolicy: Always", f"{NODE}.restartPolicy", "Never or OnFailure"),
    ("command: [python, -m, modelwright.launch.torchrun, -m, modelwright]", "command: [python, train.py]",
     f"{NODE}.containers[0].command", "RANK is not set"),
]  # fmt: skip
MISTAKES = [("pytorchjob", *case) for case in PYTORCHJOB] + [("trainjob", *case) for case in TRAINJOB]


def errors_in(text: str) -> list[LintFinding]:
    return [finding for finding in lint(parse_manifests(text, "job.yaml")) if finding.is_error]


def sound(target: JobKind) -> str:
    return render(cluster_job("survival", target))


@pytest.fixture(scope="module")
def streams() -> dict[str, str]:
    return {target: sound(target) for target in ("pytorchjob", "trainjob")}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "old", "new", "field", "words"), MISTAKES, ids=lambda value: str(value)[:40].strip()
)
def test_a_mistake_is_found_and_its_field_named(
    streams: dict[str, str], target: str, old: str, new: str, field: str, words: str
) -> None:
    text = streams[target]
    job = text.index("kind: PyTorchJob" if target == "pytorchjob" else "kind: TrainingRuntime") - 60
    start = text.find(old, job)
    start = start if start >= 0 else text.find(old)
    assert start >= 0, f"{old!r} is not in the stream"
    broken = text[:start] + new + text[start + len(old) :]
    errors = errors_in(broken)
    right = [finding for finding in errors if finding.field == field and words in finding.message]
    assert right, f"wanted {field}: {words}; found " + "\n".join(f"{finding.field}: {finding}" for finding in errors)
    line = int(re.findall(r":(\d+)$", right[0].where)[0])
    assert 0 < line <= broken.count("\n")


def test_there_are_at_least_thirty_of_them() -> None:
    assert len(MISTAKES) >= 60


DOCUMENTS_OWN = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: survival-expert
  annotations: {metrics/enabled: "true"}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
          - name: pytorch
            image: pytorch/pytorch
            command: [python, /workspace/train.py]
            env:
            - {name: WORLD_SIZE, value: "4"}
            - {name: HF_TOKEN, value: hf_0123456789abcdef}
            resources: {limits: {nvidia.com/gpu: 1, memory: 20Gi}}
            volumeMounts: [{name: models, mountPath: /shared/models}]
          volumes: [{name: models, persistentVolumeClaim: {claimName: trained-models}}]
    Worker:
      replicas: 3
      restartPolicy: OnFailure
      template:
        spec:
          containers: [{name: pytorch, image: pytorch/pytorch, command: [python, /workspace/train.py]}]
"""


def test_all_mistakes_of_a_handwritten_manifest_are_reported_at_once() -> None:
    findings = lint(parse_manifests(DOCUMENTS_OWN, "survival.yaml"))
    output = "\n".join(map(str, findings))
    for words in ("starts python on 4 nodes", "WORLD_SIZE, which is overwritten", "HF_TOKEN for all to read",
                  "has no HOME", "allowPrivilegeEscalation is not set", "backoffLimit is missing",
                  "no annotation makes a job appear", "no kueue.x-k8s.io/queue-name",
                  "any GPU may be given"):  # fmt: skip
        assert words in output, words
    assert "survival.yaml:16: spec.pytorchReplicaSpecs.Master.template.spec.containers[0].command" in output
    assert "hf_0123456789abcdef" not in output, "a finding must not repeat the token"


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("a: [b", "job.yaml:1: is not YAML"),
        ("- 1\n", "no mapping"),
        ("", "holds no document"),
        ("kind: PyTorchJob\nkind: TrainJob\n", "is not YAML"),
    ],
)
def test_what_is_no_manifest_is_reported_without_a_traceback(text: str, finding: str) -> None:
    with pytest.raises(ProblemsError, match=re.escape(finding)):
        parse_manifests(text, "job.yaml")


def test_a_file_that_is_not_there_and_one_without_a_job_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match="cannot be read"):
        load_manifests(tmp_path / "none.yaml")
    (tmp_path / "map.yaml").write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n")
    assert "wants a PyTorchJob or a TrainJob" in str(lint(load_manifests(tmp_path / "map.yaml"))[0])


JUNK: list[Any] = [None, [], {}, 7, "text", [[]], {"a": {"b": [1, {}]}}]


def field_paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    yield path
    for step, child in node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ()):
        yield from field_paths(child, (*path, step))


@pytest.mark.parametrize("target", ["pytorchjob", "trainjob"])
def test_junk_in_any_field_is_reported_and_never_a_crash(target: JobKind) -> None:
    bodies = documents(cluster_job("survival", target))
    tried = 0
    for number, body in enumerate(bodies):
        for path in [path for path in field_paths(body) if path and "env" not in path[:-2]]:
            for junk in JUNK[tried % 7 :: 7]:
                broken = copy.deepcopy(body)
                holder = broken
                for step in path[:-1]:
                    holder = holder[step]
                holder[path[-1]] = junk
                stream = [Manifest("job.yaml", broken if i == number else each, 1) for i, each in enumerate(bodies)]
                lint(stream)
                tried += 1
    assert tried > 100


def with_value(node: Any, parts: list[str], value: Any) -> Any:
    """A copy of a document with a value at a rule's path: a first item or key where the path has a *."""
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if part == "KEYS":
        return {**(node or {}), value: "text"}
    if part.isdigit() or (part == "*" and (isinstance(node, list) or not isinstance(node, dict))):
        items = list(node or [None])
        return [with_value(items[0] if items else None, rest, value), *items[1:]]
    key = next(iter(node), "key") if part == "*" else part
    return {**(node or {}), key: with_value((node or {}).get(key), rest, value)}


@pytest.mark.parametrize("rule", ADMISSION_RULES, ids=lambda rule: f"{rule.kind} {rule.path}")
def test_every_rule_of_the_operators_refuses_its_example_and_names_its_source(rule: AdmissionRule) -> None:
    bodies = documents(cluster_job("survival", "pytorchjob" if rule.kind == "PyTorchJob" else "trainjob"))
    kind = {"Any": "ConfigMap", "Pod": "TrainingRuntime"}.get(rule.kind, rule.kind)
    path = f"{NODE.replace('[0]', '/0').replace('.', '/')}/{rule.path}" if rule.kind == "Pod" else rule.path
    number = next(i for i, body in enumerate(bodies) if body["kind"] == kind)
    assert re.search(r"\d+\.\d+.*, \S", rule.source), "product, version, function"
    before = lint([Manifest("job.yaml", body, 1) for body in bodies])
    assert not [finding for finding in before if finding.is_error]
    bodies[number] = with_value(bodies[number], path.split("/"), rule.refused)
    findings = lint([Manifest("job.yaml", body, 1) for body in bodies])
    assert [finding for finding in findings if finding.is_error and rule.source in finding.message]


def test_a_job_name_leaves_room_for_the_names_of_its_pods() -> None:
    text = sound("trainjob").replace("name: quickstart\n", f"name: {'q' * 50}\n")
    assert any("at most 48: its pods are called qqq…-node-0-3-abcde" in str(finding) for finding in errors_in(text))


@pytest.mark.parametrize(
    "words",
    ["Kueue 0.17 and later wants Trainer 2.2", "the Kubeflow SDK's list_jobs fails in this namespace"],
)
def test_notes_about_other_programs_do_not_fail_the_check(words: str) -> None:
    stream = sound("trainjob").replace("    trainer.kubeflow.org/framework: torch\n", "")
    notes = [str(finding) for finding in lint(parse_manifests(stream, "job.yaml")) if not finding.is_error]
    assert any(words in note for note in notes)


def test_what_restricted_v2_fills_in_itself_is_no_error_in_a_handwritten_manifest() -> None:
    text = sound("pytorchjob")
    for line in ("runAsNonRoot: true", "allowPrivilegeEscalation: false", "type: RuntimeDefault"):
        text = re.sub(rf"^ *{line}\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(capabilities|seccompProfile):\n( *drop: .ALL.\n)?", "", text, flags=re.MULTILINE)
    findings = lint(parse_manifests(text, "job.yaml"))
    assert [str(finding) for finding in findings if finding.is_error] == []
    assert sum("restricted-v2 fills it in" in str(finding) for finding in findings) == 8


def test_data_dir_leads_to_a_volume() -> None:
    volumes = "cluster.volumes={trained-models-pvc: {mount: /shared/models}, workspace-pvc: {mount: /workspace}}"
    job = cluster_job("vision", "pytorchjob", volumes, "data.data_dir=/shared/data")
    assert [
        finding.message
        for finding in errors_in(render(job))
        if "DATA_DIR is /shared/data, on no volume" in str(finding)
    ]
    mounted = cluster_job("vision", "pytorchjob", "data.data_dir=/shared/data")
    assert errors_in(render(mounted)) == []


def test_a_data_file_of_the_container_image_is_no_error() -> None:
    """The survival document copies its Parquet file into the image."""
    recipe = load("survival-smollm3", ["data.dataset_name=/data/qa_dataset.parquet"], {}).recipe
    job = build_job(recipe, Path.cwd(), "pytorchjob", None)
    findings = lint(parse_manifests(render(job), "job.yaml"))
    assert [str(finding) for finding in findings if finding.is_error] == []
    assert any("on no volume; it must be in the container image" in str(finding) for finding in findings)


@pytest.mark.parametrize(
    ("have", "want", "size", "words"),
    [
        ("ReadWriteOnce", "ReadWriteMany", "50Gi", "name another claim: cluster.volumes: {models: null"),
        ("ReadWriteMany", "ReadWriteOnce", "50Gi", "--set cluster.volumes.models.access_mode=ReadWriteMany"),
        ("ReadWriteMany", "ReadWriteMany", "100Gi", "--set cluster.volumes.models.size=100Gi"),
        ("ReadWriteMany", "ReadWriteMany", "20Gi", ""),
    ],
)
def test_a_claim_of_the_namespace_is_compared_with_the_rendered_one(
    have: str, want: str, size: str, words: str
) -> None:
    def claim(mode: str, amount: str) -> dict[str, Any]:
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": amount}}}
        return {"kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": spec}

    conflicts = claim_conflicts([claim(want, "50Gi")], [claim(have, size)])
    assert len(conflicts) == bool(words) and all(words in conflict for conflict in conflicts)


def test_the_rendered_runtime_names_its_framework_for_the_kubeflow_sdk() -> None:
    runtime = next(body for body in documents(cluster_job("lyrics", "trainjob")) if body["kind"] == "TrainingRuntime")
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"


def test_a_misspelt_key_of_a_policy_is_one_error(streams: dict[str, str]) -> None:
    (error,) = errors_in(streams["trainjob"].replace("numNodes: 4\n    torch", "numNode: 4\n    torch"))
    assert error.field == "spec.mlPolicy.numNode"
