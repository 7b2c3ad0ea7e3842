"""Recipes of the three cluster systems in small, and what is rendered of them."""

from __future__ import annotations

from pathlib import Path

from modelwright.launch.manifests import Job, Target, job_of
from modelwright.recipe.load import load

VISION = ["cluster.memory=24Gi", "cluster.cpu=6"]
LYRICS = ["cluster.gpu_product=NVIDIA-L40S", "cluster.queue=default"]
SURVIVAL = [
    *("cluster.nodes=4", "cluster.cpu=6", "cluster.memory=20Gi", "cluster.gpu_product=NVIDIA-L40S"),
    *("cluster.queue=default", "cluster.token_secret=hub-token", "cluster.variables={NCCL_DEBUG: INFO}"),
    "cluster.volumes={trained-models: {mount: /shared/models, size: 50Gi}, workspace: {mount: /workspace}}",
]
SYSTEMS = {
    "vision": ("resnet18-cifar10", VISION),
    "lyrics": ("quickstart", LYRICS),
    "survival": ("quickstart", SURVIVAL),
}


def order(system: str, target: Target, *more: str, save_seconds: float | None = None) -> Job:
    """A system's job, with further settings."""
    recipe, sets = SYSTEMS[system]
    loaded = load(recipe, [*sets, *more], {})
    return job_of(loaded.recipe, Path.cwd(), target, save_seconds)
