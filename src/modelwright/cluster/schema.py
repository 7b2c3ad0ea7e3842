"""Field types of the Kubernetes documents that we render, and their validation without a cluster.

Fields that Kubernetes has and we never render are known by name only, so that manifests of others may have them; an
unknown name is an error, and the closest known name is suggested."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from modelwright.cluster.documents import FieldPath

QUANTITY_PATTERN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?")


@dataclass(frozen=True)
class ScalarType:
    """A scalar type of the schema."""

    expected: str
    """What it wants, for the message."""


STRING, INTEGER, BOOLEAN = ScalarType("text"), ScalarType("a whole number"), ScalarType("true or false")
QUANTITY, INT_OR_STRING = ScalarType("an amount such as 16Gi"), ScalarType("a whole number or text")
ANY = ScalarType("anything")


@dataclass(frozen=True)
class ArrayOf:
    """Items that are all alike."""

    item: Schema


@dataclass(frozen=True)
class MapOf:
    """Free names, values that are all alike."""

    value: Schema


@dataclass(frozen=True)
class ObjectSchema:
    """A mapping with fixed names."""

    fields: dict[str, Schema]
    """What we render, and its type."""
    required: tuple[str, ...] = ()
    """What must be there."""
    other_fields: frozenset[str] = field(default_factory=frozenset)
    """Names that Kubernetes knows and we do not render."""


Schema = ScalarType | ArrayOf | MapOf | ObjectSchema


def validate(value: Any, schema: Schema, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    """Every field that is unknown, missing or of another type: its path, and the message that continues it."""
    if isinstance(schema, ScalarType):
        if not _is_of_type(value, schema):
            yield path, f" is {_format_value(value)}; it wants {schema.expected}{_advice(value, schema)}"
    elif isinstance(schema, ArrayOf):
        if not isinstance(value, list):
            yield path, f" is {_format_value(value)}; it wants a list, each item after a dash"
            return
        for index, item in enumerate(value):
            yield from validate(item, schema.item, (*path, index))
    elif not isinstance(value, dict):
        yield path, f" is {_format_value(value)}; it wants a mapping"
    elif isinstance(schema, MapOf):
        for key, item in value.items():
            yield from validate(item, schema.value, (*path, str(key)))
    else:
        yield from _validate_object(value, schema, path)


def _validate_object(value: dict[str, Any], schema: ObjectSchema, path: FieldPath) -> Iterator[tuple[FieldPath, str]]:
    suggested: set[str] = set()
    for key, item in value.items():
        if key in schema.fields:
            if item is not None:
                yield from validate(item, schema.fields[key], (*path, key))
        elif key not in schema.other_fields:
            close = difflib.get_close_matches(str(key), [*schema.fields, *schema.other_fields], n=1, cutoff=0.7)
            suggested |= set(close)
            none = f"there is no such field in {format_path(path) or 'a document'}"
            hint = f"did you mean {close[0]}?" if close else none
            yield (*path, str(key)), f" is unknown and would be dropped or refused; {hint}"
    for key in schema.required:
        if key not in suggested and value.get(key) is None:
            yield (*path, key), f" is missing; it wants {_expected(schema.fields[key])}"


def format_path(path: FieldPath) -> str:
    """A path as a person writes it: spec.containers[0].env."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def _expected(schema: Schema) -> str:
    if isinstance(schema, ScalarType):
        return schema.expected
    return "a list" if isinstance(schema, ArrayOf) else "a mapping"


def _is_of_type(value: Any, scalar_type: ScalarType) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if scalar_type is QUANTITY:
        return is_integer or (isinstance(value, str) and QUANTITY_PATTERN.fullmatch(value) is not None)
    matches = {"text": isinstance(value, str), "a whole number": is_integer, "true or false": isinstance(value, bool)}
    return matches.get(scalar_type.expected, scalar_type is ANY or is_integer or isinstance(value, str))


def _format_value(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "empty" if value is None else repr(value) if isinstance(value, str) else str(value).lower()


def _advice(value: Any, scalar_type: ScalarType) -> str:
    if scalar_type is STRING and not isinstance(value, dict | list) and value is not None:
        return f', in quotes: "{_format_value(value)}"'
    return ""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


STRING_MAP = MapOf(STRING)
METADATA = ObjectSchema(
    {"name": STRING, "namespace": STRING, "labels": STRING_MAP, "annotations": STRING_MAP},
    other_fields=_names(
        "generateName finalizers ownerReferences uid resourceVersion creationTimestamp generation managedFields"
    ),
)
SECRET_KEY_REF = ObjectSchema({"name": STRING, "key": STRING}, ("key",), _names("optional"))
ENV_VAR = ObjectSchema(
    {
        "name": STRING,
        "value": STRING,
        "valueFrom": ObjectSchema(
            {"secretKeyRef": SECRET_KEY_REF},
            other_fields=_names("configMapKeyRef fieldRef resourceFieldRef fileKeyRef"),
        ),
    },
    ("name",),
)
RESOURCES = ObjectSchema({"requests": MapOf(QUANTITY), "limits": MapOf(QUANTITY)}, other_fields=_names("claims"))
CAPABILITIES = ObjectSchema({"drop": ArrayOf(STRING), "add": ArrayOf(STRING)})
SECCOMP = ObjectSchema({"type": STRING, "localhostProfile": STRING}, ("type",))
CONTAINER_SECURITY = ObjectSchema(
    {
        "allowPrivilegeEscalation": BOOLEAN,
        "capabilities": CAPABILITIES,
        "runAsNonRoot": BOOLEAN,
        "seccompProfile": SECCOMP,
        "privileged": BOOLEAN,
        "runAsUser": INTEGER,
    },
    other_fields=_names("appArmorProfile procMount readOnlyRootFilesystem runAsGroup seLinuxOptions windowsOptions"),
)
VOLUME_MOUNT = ObjectSchema(
    {"name": STRING, "mountPath": STRING, "readOnly": BOOLEAN, "subPath": STRING},
    ("name", "mountPath"),
    _names("mountPropagation recursiveReadOnly subPathExpr"),
)
CONTAINER_PORT = ObjectSchema(
    {"name": STRING, "containerPort": INTEGER}, ("containerPort",), _names("hostIP hostPort protocol")
)
CONTAINER = ObjectSchema(
    {
        "name": STRING,
        "image": STRING,
        "command": ArrayOf(STRING),
        "args": ArrayOf(STRING),
        "workingDir": STRING,
        "env": ArrayOf(ENV_VAR),
        "ports": ArrayOf(CONTAINER_PORT),
        "resources": RESOURCES,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": ArrayOf(VOLUME_MOUNT),
    },
    ("name",),
    _names(
        "envFrom imagePullPolicy lifecycle livenessProbe readinessProbe resizePolicy restartPolicy "
        "restartPolicyRules startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty "
        "volumeDevices"
    ),
)
VOLUME = ObjectSchema(
    {
        "name": STRING,
        "configMap": ObjectSchema({"name": STRING}, other_fields=_names("defaultMode items optional")),
        "persistentVolumeClaim": ObjectSchema({"claimName": STRING, "readOnly": BOOLEAN}, ("claimName",)),
        "emptyDir": ObjectSchema({"medium": STRING, "sizeLimit": QUANTITY}),
    },
    ("name",),
    _names(
        "secret projected downwardAPI ephemeral csi hostPath nfs image awsElasticBlockStore azureDisk azureFile "
        "cephfs cinder fc flexVolume flocker gcePersistentDisk gitRepo glusterfs iscsi photonPersistentDisk "
        "portworxVolume quobyte rbd scaleIO storageos vsphereVolume"
    ),
)
TOLERATION = ObjectSchema(
    {"key": STRING, "operator": STRING, "effect": STRING, "value": STRING}, other_fields=_names("tolerationSeconds")
)
POD_SPEC = ObjectSchema(
    {
        "restartPolicy": STRING,
        "terminationGracePeriodSeconds": INTEGER,
        "automountServiceAccountToken": BOOLEAN,
        "securityContext": ObjectSchema(
            {"runAsNonRoot": BOOLEAN, "seccompProfile": SECCOMP, "runAsUser": INTEGER, "fsGroup": INTEGER},
            other_fields=_names(
                "appArmorProfile fsGroupChangePolicy runAsGroup seLinuxChangePolicy seLinuxOptions "
                "supplementalGroups supplementalGroupsPolicy sysctls windowsOptions"
            ),
        ),
        "nodeSelector": STRING_MAP,
        "tolerations": ArrayOf(TOLERATION),
        "initContainers": ArrayOf(CONTAINER),
        "containers": ArrayOf(CONTAINER),
        "volumes": ArrayOf(VOLUME),
        "hostNetwork": BOOLEAN,
        "hostIPC": BOOLEAN,
        "hostPID": BOOLEAN,
    },
    ("containers",),
    _names(
        "activeDeadlineSeconds affinity dnsConfig dnsPolicy enableServiceLinks ephemeralContainers hostAliases "
        "hostUsers hostname hostnameOverride imagePullSecrets nodeName os overhead preemptionPolicy priority "
        "priorityClassName readinessGates resourceClaims resources runtimeClassName schedulerName schedulingGates "
        "serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain "
        "topologySpreadConstraints workloadRef"
    ),
)
POD_TEMPLATE = ObjectSchema({"metadata": METADATA, "spec": POD_SPEC}, ("spec",))
REPLICA_SPEC = ObjectSchema({"replicas": INTEGER, "restartPolicy": STRING, "template": POD_TEMPLATE})
PYTORCH_JOB = ObjectSchema(
    {
        "nprocPerNode": STRING,
        "runPolicy": ObjectSchema(
            {"cleanPodPolicy": STRING, "backoffLimit": INTEGER, "suspend": BOOLEAN, "managedBy": STRING},
            other_fields=_names("activeDeadlineSeconds schedulingPolicy ttlSecondsAfterFinished"),
        ),
        "pytorchReplicaSpecs": MapOf(REPLICA_SPEC),
    },
    ("pytorchReplicaSpecs",),
    _names("elasticPolicy"),
)
EXIT_CODES = ObjectSchema(
    {"containerName": STRING, "operator": STRING, "values": ArrayOf(INTEGER)}, ("operator", "values")
)
POD_FAILURE_RULE = ObjectSchema({"action": STRING, "onExitCodes": EXIT_CODES}, ("action",), _names("onPodConditions"))
BATCH_JOB = ObjectSchema(
    {
        "backoffLimit": INTEGER,
        "podFailurePolicy": ObjectSchema({"rules": ArrayOf(POD_FAILURE_RULE)}, ("rules",)),
        "template": POD_TEMPLATE,
    },
    ("template",),
    _names(
        "activeDeadlineSeconds backoffLimitPerIndex completionMode completions managedBy manualSelector "
        "maxFailedIndexes parallelism podReplacementPolicy selector successPolicy suspend ttlSecondsAfterFinished"
    ),
)
REPLICATED_JOB = ObjectSchema(
    {"name": STRING, "template": ObjectSchema({"metadata": METADATA, "spec": BATCH_JOB}), "replicas": INTEGER},
    ("name", "template"),
    _names("dependsOn groupName"),
)
JOBSET_FAILURE_RULE = ObjectSchema(
    {"name": STRING, "action": STRING, "onJobFailureReasons": ArrayOf(STRING)},
    ("name", "action"),
    _names("targetReplicatedJobs onJobFailureMessagePatterns"),
)
JOB_SET = ObjectSchema(
    {
        "failurePolicy": ObjectSchema(
            {"maxRestarts": INTEGER, "rules": ArrayOf(JOBSET_FAILURE_RULE)}, other_fields=_names("restartStrategy")
        ),
        "replicatedJobs": ArrayOf(REPLICATED_JOB),
    },
    other_fields=_names("coordinator managedBy network startupPolicy successPolicy suspend ttlSecondsAfterFinished"),
)
TRAINING_RUNTIME = ObjectSchema(
    {
        "mlPolicy": ObjectSchema({"numNodes": INTEGER, "torch": ANY}, other_fields=_names("mpi flux jax xgboost")),
        "template": ObjectSchema({"spec": JOB_SET}, other_fields=_names("metadata")),
    },
    ("template",),
    _names("podGroupPolicy"),
)
TRAIN_JOB = ObjectSchema(
    {
        "runtimeRef": ObjectSchema({"apiGroup": STRING, "kind": STRING, "name": STRING}, ("name",)),
        "trainer": ObjectSchema(
            {
                "numNodes": INTEGER,
                "numProcPerNode": INT_OR_STRING,
                "resourcesPerNode": RESOURCES,
                "env": ArrayOf(ENV_VAR),
                "image": STRING,
                "command": ArrayOf(STRING),
                "args": ArrayOf(STRING),
            }
        ),
        "suspend": BOOLEAN,
        "managedBy": STRING,
    },
    ("runtimeRef",),
    _names("initializer labels annotations podTemplateOverrides runtimePatches podSpecOverrides activeDeadlineSeconds"),
)
PVC_SPEC = ObjectSchema(
    {
        "accessModes": ArrayOf(STRING),
        "resources": ObjectSchema({"requests": MapOf(QUANTITY)}, other_fields=_names("limits")),
        "storageClassName": STRING,
    },
    ("accessModes", "resources"),
    _names("dataSource dataSourceRef selector volumeAttributesClassName volumeMode volumeName"),
)


def _document_schema(version: str, spec: Schema) -> tuple[str, ObjectSchema]:
    fields: dict[str, Schema] = {"apiVersion": STRING, "kind": STRING, "metadata": METADATA, "spec": spec}
    return version, ObjectSchema(fields, ("apiVersion", "kind", "metadata", "spec"), _names("status"))


CONFIG_MAP_FIELDS: dict[str, Schema] = {
    **{"apiVersion": STRING, "kind": STRING, "metadata": METADATA},
    **{"data": STRING_MAP, "binaryData": STRING_MAP},
}
SCHEMAS: dict[str, tuple[str, ObjectSchema]] = {
    "PyTorchJob": _document_schema("kubeflow.org/v1", PYTORCH_JOB),
    "TrainJob": _document_schema("trainer.kubeflow.org/v1alpha1", TRAIN_JOB),
    "TrainingRuntime": _document_schema("trainer.kubeflow.org/v1alpha1", TRAINING_RUNTIME),
    "PersistentVolumeClaim": _document_schema("v1", PVC_SPEC),
    "ConfigMap": ("v1", ObjectSchema(CONFIG_MAP_FIELDS, ("metadata",), _names("immutable"))),
}
