"""Small recipes of the three cluster systems, their jobs, and the schemas of the real operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelwright.cluster.manifests import ClusterJob, JobKind, build_job
from modelwright.recipe.load import load

VISION = ["cluster.memory=24Gi", "cluster.cpu=6"]
LYRICS = ["cluster.gpu_product=NVIDIA-L40S", "cluster.local_queue=default"]
SURVIVAL = [
    *("cluster.nodes=4", "cluster.cpu=6", "cluster.memory=20Gi", "cluster.gpu_product=NVIDIA-L40S"),
    *("cluster.local_queue=default", "cluster.hf_token_secret=hub-token", "cluster.env={NCCL_DEBUG: INFO}"),
    "cluster.volumes={trained-models: {mount: /shared/models, size: 50Gi}, workspace: {mount: /workspace}}",
]
SYSTEMS = {
    "vision": ("resnet18-cifar10", VISION),
    "lyrics": ("quickstart", LYRICS),
    "survival": ("quickstart", SURVIVAL),
}
CRDS = {
    "PyTorchJob": ["pytorchjob-1.9.4.json"],
    "TrainJob": ["trainjob-2.1.0.json", "trainjob-2.3.0.json"],
    "TrainingRuntime": ["trainingruntime-2.1.0.json", "trainingruntime-2.3.0.json"],
}


def cluster_job(system: str, target: JobKind, *overrides: str, save_seconds: float | None = None) -> ClusterJob:
    """The cluster job of a system, with further settings."""
    recipe, sets = SYSTEMS[system]
    loaded = load(recipe, [*sets, *overrides], {})
    return build_job(loaded.recipe, Path.cwd(), target, save_seconds)


def crd_schema(shared: Path, name: str) -> dict[str, Any]:
    """The schema of a CRD with unknown fields forbidden, as strict server-side validation has it."""
    definition = json.loads((shared / "crds" / name).read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}

    def forbid(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("x-kubernetes-int-or-string"):
                node.pop("type", None)
            known = "properties" in node and "additionalProperties" not in node
            if known and not node.get("x-kubernetes-preserve-unknown-fields"):
                node["additionalProperties"] = False
            for child in node.values():
                forbid(child)
        elif isinstance(node, list):
            for child in node:
                forbid(child)

    forbid(schema)
    return schema  # type: ignore[no-any-return]
