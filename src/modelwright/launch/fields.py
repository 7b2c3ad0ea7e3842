"""The fields of the documents that we render, with their types: what a check can say without a cluster.

Fields that Kubernetes has and we never write are known by name only, so that a manifest written by hand is not
blamed for them; a name that is neither is a mistake, and the nearest known one is offered.
"""

from __future__ import annotations

from modelwright.launch.shapes import AMOUNT, ANY, TEXT, TRUTH, WHOLE, WHOLE_OR_TEXT, Field, ListOf, MapOf, Shape


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXTS = MapOf(TEXT)
METADATA = Shape(
    {"name": TEXT, "namespace": TEXT, "labels": TEXTS, "annotations": TEXTS},
    others=_names(
        "generateName finalizers ownerReferences uid resourceVersion creationTimestamp generation managedFields"
    ),
)
KEY = Shape({"name": TEXT, "key": TEXT}, ("key",), _names("optional"))
VARIABLE = Shape(
    {
        "name": TEXT,
        "value": TEXT,
        "valueFrom": Shape(
            {"secretKeyRef": KEY}, others=_names("configMapKeyRef fieldRef resourceFieldRef fileKeyRef")
        ),
    },
    ("name",),
)
RESOURCES = Shape({"requests": MapOf(AMOUNT), "limits": MapOf(AMOUNT)}, others=_names("claims"))
CAPABILITIES = Shape({"drop": ListOf(TEXT), "add": ListOf(TEXT)})
SECCOMP = Shape({"type": TEXT, "localhostProfile": TEXT}, ("type",))
CONTAINER_SECURITY = Shape(
    {
        "allowPrivilegeEscalation": TRUTH,
        "capabilities": CAPABILITIES,
        "runAsNonRoot": TRUTH,
        "seccompProfile": SECCOMP,
        "privileged": TRUTH,
        "runAsUser": WHOLE,
    },
    others=_names("appArmorProfile procMount readOnlyRootFilesystem runAsGroup seLinuxOptions windowsOptions"),
)
MOUNT = Shape(
    {"name": TEXT, "mountPath": TEXT, "readOnly": TRUTH, "subPath": TEXT},
    ("name", "mountPath"),
    _names("mountPropagation recursiveReadOnly subPathExpr"),
)
PORT = Shape({"name": TEXT, "containerPort": WHOLE}, ("containerPort",), _names("hostIP hostPort protocol"))
CONTAINER = Shape(
    {
        "name": TEXT,
        "image": TEXT,
        "command": ListOf(TEXT),
        "args": ListOf(TEXT),
        "workingDir": TEXT,
        "env": ListOf(VARIABLE),
        "ports": ListOf(PORT),
        "resources": RESOURCES,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": ListOf(MOUNT),
    },
    ("name",),
    _names(
        "envFrom imagePullPolicy lifecycle livenessProbe readinessProbe resizePolicy restartPolicy "
        "restartPolicyRules startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty "
        "volumeDevices"
    ),
)
VOLUME = Shape(
    {
        "name": TEXT,
        "configMap": Shape({"name": TEXT}, others=_names("defaultMode items optional")),
        "persistentVolumeClaim": Shape({"claimName": TEXT, "readOnly": TRUTH}, ("claimName",)),
        "emptyDir": Shape({"medium": TEXT, "sizeLimit": AMOUNT}),
    },
    ("name",),
    _names(
        "secret projected downwardAPI ephemeral csi hostPath nfs image awsElasticBlockStore azureDisk azureFile "
        "cephfs cinder fc flexVolume flocker gcePersistentDisk gitRepo glusterfs iscsi photonPersistentDisk "
        "portworxVolume quobyte rbd scaleIO storageos vsphereVolume"
    ),
)
TOLERATION = Shape({"key": TEXT, "operator": TEXT, "effect": TEXT, "value": TEXT}, others=_names("tolerationSeconds"))
POD = Shape(
    {
        "restartPolicy": TEXT,
        "terminationGracePeriodSeconds": WHOLE,
        "automountServiceAccountToken": TRUTH,
        "securityContext": Shape(
            {
                "runAsNonRoot": TRUTH,
                "seccompProfile": SECCOMP,
                "runAsUser": WHOLE,
                "fsGroup": WHOLE,
            },
            others=_names(
                "appArmorProfile fsGroupChangePolicy runAsGroup seLinuxChangePolicy seLinuxOptions "
                "supplementalGroups supplementalGroupsPolicy sysctls windowsOptions"
            ),
        ),
        "nodeSelector": TEXTS,
        "tolerations": ListOf(TOLERATION),
        "initContainers": ListOf(CONTAINER),
        "containers": ListOf(CONTAINER),
        "volumes": ListOf(VOLUME),
        "hostNetwork": TRUTH,
        "hostIPC": TRUTH,
        "hostPID": TRUTH,
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
TEMPLATE = Shape({"metadata": METADATA, "spec": POD}, ("spec",))
REPLICA = Shape({"replicas": WHOLE, "restartPolicy": TEXT, "template": TEMPLATE})
PYTORCH_JOB = Shape(
    {
        "nprocPerNode": TEXT,
        "runPolicy": Shape(
            {"cleanPodPolicy": TEXT, "backoffLimit": WHOLE, "suspend": TRUTH, "managedBy": TEXT},
            others=_names("activeDeadlineSeconds schedulingPolicy ttlSecondsAfterFinished"),
        ),
        "pytorchReplicaSpecs": MapOf(REPLICA),
    },
    ("pytorchReplicaSpecs",),
    _names("elasticPolicy"),
)
EXIT_CODES = Shape({"containerName": TEXT, "operator": TEXT, "values": ListOf(WHOLE)}, ("operator", "values"))
RULE = Shape({"action": TEXT, "onExitCodes": EXIT_CODES}, ("action",), _names("onPodConditions"))
BATCH_JOB = Shape(
    {
        "backoffLimit": WHOLE,
        "podFailurePolicy": Shape({"rules": ListOf(RULE)}, ("rules",)),
        "template": TEMPLATE,
    },
    ("template",),
    _names(
        "activeDeadlineSeconds backoffLimitPerIndex completionMode completions managedBy manualSelector "
        "maxFailedIndexes parallelism podReplacementPolicy selector successPolicy suspend ttlSecondsAfterFinished"
    ),
)
REPLICATED_JOB = Shape(
    {"name": TEXT, "template": Shape({"metadata": METADATA, "spec": BATCH_JOB}), "replicas": WHOLE},
    ("name", "template"),
    _names("dependsOn groupName"),
)
FAILURE_RULE = Shape(
    {"name": TEXT, "action": TEXT, "onJobFailureReasons": ListOf(TEXT)},
    ("name", "action"),
    _names("targetReplicatedJobs onJobFailureMessagePatterns"),
)
JOB_SET = Shape(
    {
        "failurePolicy": Shape({"maxRestarts": WHOLE, "rules": ListOf(FAILURE_RULE)}, others=_names("restartStrategy")),
        "replicatedJobs": ListOf(REPLICATED_JOB),
    },
    others=_names("coordinator managedBy network startupPolicy successPolicy suspend ttlSecondsAfterFinished"),
)
RUNTIME = Shape(
    {
        "mlPolicy": Shape({"numNodes": WHOLE, "torch": ANY}, others=_names("mpi flux jax xgboost")),
        "template": Shape({"spec": JOB_SET}, others=_names("metadata")),
    },
    ("template",),
    _names("podGroupPolicy"),
)
TRAIN_JOB = Shape(
    {
        "runtimeRef": Shape({"apiGroup": TEXT, "kind": TEXT, "name": TEXT}, ("name",)),
        "trainer": Shape(
            {
                "numNodes": WHOLE,
                "numProcPerNode": WHOLE_OR_TEXT,
                "resourcesPerNode": RESOURCES,
                "env": ListOf(VARIABLE),
                "image": TEXT,
                "command": ListOf(TEXT),
                "args": ListOf(TEXT),
            }
        ),
        "suspend": TRUTH,
        "managedBy": TEXT,
    },
    ("runtimeRef",),
    _names("initializer labels annotations podTemplateOverrides runtimePatches podSpecOverrides activeDeadlineSeconds"),
)
CLAIM = Shape(
    {
        "accessModes": ListOf(TEXT),
        "resources": Shape({"requests": MapOf(AMOUNT)}, others=_names("limits")),
        "storageClassName": TEXT,
    },
    ("accessModes", "resources"),
    _names("dataSource dataSourceRef selector volumeAttributesClassName volumeMode volumeName"),
)


def _document(version: str, spec: Field) -> tuple[str, Shape]:
    fields: dict[str, Field] = {"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": spec}
    return version, Shape(fields, ("apiVersion", "kind", "metadata", "spec"), _names("status"))


KINDS: dict[str, tuple[str, Shape]] = {
    "PyTorchJob": _document("kubeflow.org/v1", PYTORCH_JOB),
    "TrainJob": _document("trainer.kubeflow.org/v1alpha1", TRAIN_JOB),
    "TrainingRuntime": _document("trainer.kubeflow.org/v1alpha1", RUNTIME),
    "PersistentVolumeClaim": _document("v1", CLAIM),
    "ConfigMap": (
        "v1",
        Shape({"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "data": TEXTS, "binaryData": TEXTS},
              ("metadata",), _names("immutable")),
    ),
}  # fmt: skip
