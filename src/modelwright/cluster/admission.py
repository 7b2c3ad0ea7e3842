"""What API servers and operators refuse beyond their schemas, as data.

Each rule names the version and the function of the public source that it was read from. `lint` applies them to
manifests, and a test gives every rule the example that it must refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from modelwright.cluster.documents import FieldPath, get_field, get_items

ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
REQUIRED_CONTAINERS = {"trainer": "node"} | {name: name for name in ("dataset-initializer", "model-initializer")}
"""The container that Trainer wants in the job of each ancestor step."""
FAILURE_REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded",
                   "PodFailurePolicy")  # fmt: skip
ML_POLICIES = {"torch", "mpi", "jax", "xgboost", "flux"}
FAILURE_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
JOBSET, JOBS = "spec/template/spec", "spec/template/spec/replicatedJobs"
KEYS = "KEYS"
"""Last part of a path: the keys of the mapping, not its values."""


@dataclass(frozen=True)
class AdmissionRule:
    """One condition on one field."""

    kind: str
    """Kind of the document; Pod for the pods of any job, Any for every document."""
    path: str
    """The field, with * for each item of a list or mapping; pods: from the pod's spec."""
    accepts: Callable[[Any], bool]
    """Whether a value is accepted."""
    wants: str
    """What would be accepted, for the message."""
    refused: Any
    """An example that is refused, for the tests."""
    source: str
    """Where the rule was read: product, version, function."""


def select(node: Any, path: str) -> Iterator[tuple[FieldPath, Any]]:
    """The fields that a rule's path names, each with its own path."""
    part, _, rest = path.partition("/")
    if part == KEYS:
        yield from (((key,), key) for key in (node if isinstance(node, dict) else ()))
        return
    keys: Any = (part,)
    if part == "*":
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    elif part.isdigit():
        keys = (int(part),)
    for key in keys:
        if (value := get_field(node, key)) is not None:
            fields = select(value, rest) if rest else [((), value)]
            yield from (((key, *below), item) for below, item in fields)


def _matches(pattern: str, longest: int) -> Callable[[Any], bool]:
    regex = re.compile(pattern)
    return lambda value: not isinstance(value, str) or (len(value) <= longest and regex.fullmatch(value) is not None)


def _one_of(*choices: Any) -> Callable[[Any], bool]:
    return lambda value: value in choices


def _unique_names(items: Any) -> bool:
    names = [str(item.get("name")) for item in get_items({"items": items}, "items")]
    return len(names) == len(set(names))


def _ordered(codes: Any) -> bool:
    numbers = [code for code in codes if isinstance(code, int)]
    return numbers == sorted(set(numbers))


def _targets_exist(jobset: Any) -> bool:
    names = {item.get("name") for item in get_items(jobset, "replicatedJobs")}
    policies = [*get_items(jobset, "failurePolicy", "rules"), get_field(jobset, "successPolicy") or {}]
    targets = [get_field(policy, "targetReplicatedJobs") for policy in policies]
    return all(name in names for listed in targets if isinstance(listed, list) for name in listed)


def _has_ancestor_container(job: Any) -> bool:
    wanted = REQUIRED_CONTAINERS.get(str(get_field(job, "template", "metadata", "labels", ANCESTOR_LABEL)))
    containers = get_items(job, "template", "spec", "template", "spec", "containers")
    return wanted is None or wanted in [container.get("name") for container in containers]


DNS_1035, DNS_1123 = r"[a-z]([-a-z0-9]*[a-z0-9])?", r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{DNS_1123}(\.{DNS_1123})*"
LABEL_VALUE = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
LABEL_KEY = rf"({SUBDOMAIN}/)?([A-Za-z0-9][-A-Za-z0-9_.]{{0,61}})?[A-Za-z0-9]"
ENV_NAME = r"[ -<>-~]+"
FAILURE_RULE_NAME = r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"
CONFIG_MAP_KEY = r"[-._a-zA-Z0-9]+"
LABEL_WANTS = "at most 63 letters, digits, dashes, dots and _, such as NVIDIA-L40S"
KUBERNETES, JOB_SET = "Kubernetes 1.34", "JobSet 0.12.0"
TRAINER, OPERATOR = "Trainer 2.3.0", "training-operator 1.9.4"
FAILURE_POLICY, REPLICATED_JOBS = f"{JOB_SET}, validateFailurePolicy", f"{TRAINER}, validateReplicatedJobs"
POD_JOB = {"template": {"metadata": {"labels": {ANCESTOR_LABEL: "trainer"}}, "spec": {"template": {"spec": {}}}}}
_RULES: tuple[tuple[str, str, Callable[[Any], bool], str, Any, str], ...] = (
    ("Any", "metadata/name", _matches(SUBDOMAIN, 253), "lower-case letters, digits, dashes and dots", "My_Job",
     f"{KUBERNETES}, IsDNS1123Subdomain"),
    ("Any", "metadata/labels/*", _matches(LABEL_VALUE, 63), LABEL_WANTS, "NVIDIA L40S",
     f"{KUBERNETES}, IsValidLabelValue"),
    ("Any", f"metadata/labels/{KEYS}", _matches(LABEL_KEY, 317), "a name such as example.com/team", "my team",
     f"{KUBERNETES}, IsQualifiedName"),
    ("ConfigMap", f"data/{KEYS}", _matches(CONFIG_MAP_KEY, 253), "letters, digits, dashes, dots and _: rename the file",
     "my data.jsonl", f"{KUBERNETES}, IsConfigMapKey"),
    ("ConfigMap", f"binaryData/{KEYS}", _matches(CONFIG_MAP_KEY, 253),
     "letters, digits, dashes, dots and _: rename the file", "Fragebögen.parquet", f"{KUBERNETES}, IsConfigMapKey"),
    ("PersistentVolumeClaim", "spec/accessModes/*",
     _one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"), "ReadWriteOnce or ReadWriteMany",
     "RWX", f"{KUBERNETES}, ValidatePersistentVolumeClaimSpec"),
    ("Pod", "nodeSelector/*", _matches(LABEL_VALUE, 63), LABEL_WANTS, "NVIDIA L40S",
     f"{KUBERNETES}, IsValidLabelValue"),
    ("Pod", "volumes", _unique_names, "every name once: name the claim otherwise than the job's own volumes",
     [{"name": "scratch", "emptyDir": {}}, {"name": "scratch", "emptyDir": {}}], f"{KUBERNETES}, ValidateVolumes"),
    ("Pod", "volumes/*/name", _matches(DNS_1123, 63), "lower-case letters, digits and dashes", "My_Data",
     f"{KUBERNETES}, IsDNS1123Label"),
    ("Pod", "containers", _unique_names, "every name once", [{"name": "node"}, {"name": "node"}],
     f"{KUBERNETES}, validateContainers"),
    ("Pod", "containers/*/name", _matches(DNS_1123, 63), "lower-case letters, digits and dashes", "My_Container",
     f"{KUBERNETES}, IsDNS1123Label"),
    ("Pod", "containers/*/env/*/name", _matches(ENV_NAME, 4096), "printable ASCII without =", "NCCL_DEBUG=INFO",
     f"{KUBERNETES}, IsRelaxedEnvVarName"),
    ("Pod", "containers/*/ports/*/name", _matches(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*", 15),
     "at most 15 lower-case letters, digits and dashes", "a-port-of-the-job", f"{KUBERNETES}, IsValidPortName"),
    ("Pod", "containers/*/volumeMounts/*/mountPath", lambda value: ":" not in str(value), "a path without a colon",
     "/data:ro", f"{KUBERNETES}, ValidateVolumeMounts"),
    ("TrainJob", "spec/trainer/env/*/name", _matches(ENV_NAME, 4096), "printable ASCII without =", "EPOCHS=3",
     f"{KUBERNETES}, IsRelaxedEnvVarName"),
    ("TrainJob", "spec/managedBy", _one_of("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"),
     "trainer.kubeflow.org/trainjob-controller or kueue.x-k8s.io/multikueue", "me", f"{TRAINER}, rule of managedBy"),
    ("TrainingRuntime", f"{JOBSET}/failurePolicy/rules/*/name", _matches(FAILURE_RULE_NAME, 128),
     "a letter, then letters, digits and _, without dashes", "no-second-try", FAILURE_POLICY),
    ("TrainingRuntime", f"{JOBSET}/failurePolicy/rules", _unique_names, "every name once",
     [{"name": "a", "action": "FailJobSet"}] * 2, FAILURE_POLICY),
    ("TrainingRuntime", f"{JOBSET}/failurePolicy/rules/*/action", _one_of(*FAILURE_ACTIONS),
     " or ".join(FAILURE_ACTIONS), "RestartJob", FAILURE_POLICY),
    ("TrainingRuntime", f"{JOBSET}/failurePolicy/rules/*/onJobFailureReasons/*", _one_of(*FAILURE_REASONS),
     " or ".join(FAILURE_REASONS), "OOMKilled", FAILURE_POLICY),
    ("TrainingRuntime", f"{JOBSET}/failurePolicy/restartStrategy", _one_of("Recreate", "BlockingRecreate"),
     "Recreate or BlockingRecreate", "InPlaceRestart", f"{JOB_SET}, ValidateCreate"),
    ("TrainingRuntime", JOBSET, _targets_exist, "targetReplicatedJobs that are names of replicatedJobs",
     {"replicatedJobs": [], "successPolicy": {"operator": "All", "targetReplicatedJobs": ["node"]}}, FAILURE_POLICY),
    ("TrainingRuntime", f"{JOBS}/0/dependsOn", lambda value: False, "no dependsOn in the first job",
     [{"name": "node", "status": "Ready"}], f"{JOB_SET}, ValidateCreate"),
    ("TrainingRuntime", f"{JOBS}/*/name", _matches(DNS_1035, 20), "at most 20 lower-case letters, digits and dashes",
     "the-trainer-of-this-job", "Trainer 2.4, pull request 4394"),
    ("TrainingRuntime", f"{JOBS}/*/replicas", _one_of(1), "1: the number of pods is numNodes", 2, REPLICATED_JOBS),
    ("TrainingRuntime", f"{JOBS}/*", _has_ancestor_container, f"the container that {ANCESTOR_LABEL} stands for: "
     "node for trainer, or one of the step's own name", POD_JOB, REPLICATED_JOBS),
    ("TrainingRuntime", f"{JOBS}/*/template/spec/podFailurePolicy/rules/*/onExitCodes/values",
     _ordered, "exit codes in order, each once", [3, 2],
     f"{KUBERNETES}, validatePodFailurePolicyRuleOnExitCodes"),
    ("TrainingRuntime", "spec/mlPolicy", lambda value: len(set(value) & ML_POLICIES) <= 1,
     f"only one of {', '.join(sorted(ML_POLICIES))}", {"torch": {}, "mpi": {}}, f"{TRAINER}, rule of MLPolicySource"),
    ("PyTorchJob", "spec/runPolicy/managedBy", _one_of("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue"),
     "kubeflow.org/training-operator or kueue.x-k8s.io/multikueue", "me", f"{OPERATOR}, ValidateRunPolicy"),
    ("PyTorchJob", "spec/pytorchReplicaSpecs/*/template/spec/containers/*",
     lambda value: not isinstance(value, dict) or bool(value.get("image")), "an image", {"name": "sidecar"},
     f"{OPERATOR}, validatePyTorchReplicaSpecs"),
    ("PyTorchJob", "spec", lambda value: not get_field(value, "elasticPolicy")
     or "Worker" in (get_field(value, "pytorchReplicaSpecs") or {}), "a Worker where elasticPolicy is set",
     {"elasticPolicy": {"maxReplicas": 2}, "pytorchReplicaSpecs": {}}, f"{OPERATOR}, validateSpec"),
    ("PyTorchJob", "spec", lambda value: get_field(value, "elasticPolicy", "nProcPerNode") is None
     or get_field(value, "nprocPerNode") is None, "nprocPerNode without elasticPolicy.nProcPerNode",
     {"nprocPerNode": "1", "elasticPolicy": {"nProcPerNode": 1}}, f"{OPERATOR}, validateSpec"),
)  # fmt: skip
ADMISSION_RULES = tuple(AdmissionRule(*rule) for rule in _RULES)
