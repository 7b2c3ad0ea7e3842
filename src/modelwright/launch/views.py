"""Manifests seen as a whole: which pods a job makes, how many, with which volumes, variables and GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modelwright.launch.shapes import Path
from modelwright.launch.stream import Manifest, Step

GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Finding:
    """Something to tell about a field."""

    manifest: Manifest
    """The document it is in."""
    path: Path
    """The field."""
    message: str
    """What was found and what would do."""
    serious: bool = True
    """Whether the job would be refused or fail."""


def get(node: Any, *steps: Step) -> Any:
    """What lies at a path; nothing where the path ends early."""
    for step in steps:
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and isinstance(step, int) and step < len(node):
            node = node[step]
        else:
            return None
    return node


def entries(node: Any, *steps: Step) -> list[dict[str, Any]]:
    """The mappings in a list at a path."""
    found = get(node, *steps)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


@dataclass(frozen=True)
class PodView:
    """Pods that one template makes."""

    manifest: Manifest
    """The document that holds the template."""
    path: Path
    """Where the pod's spec is in it."""
    job: Manifest
    """The job that they belong to."""
    replicas: int
    """Pods of this template."""
    nodes: int
    """Pods of the whole job."""
    main_name: str
    """What the operator expects the container to be called."""

    @property
    def spec(self) -> Any:
        return get(self.manifest.body, *self.path)

    @property
    def main(self) -> dict[str, Any] | None:
        """The container that trains."""
        return next((each for each in self.containers if each.get("name") == self.main_name), None)

    @property
    def main_path(self) -> Path:
        number = next((i for i, each in enumerate(self.containers) if each.get("name") == self.main_name), 0)
        return (*self.path, "containers", number)

    @property
    def containers(self) -> list[dict[str, Any]]:
        return entries(self.spec, "containers")

    @property
    def all_containers(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Every container with its path, those of the beginning too."""
        for key in ("initContainers", "containers"):
            for number, each in enumerate(entries(self.spec, key)):
                yield (*self.path, key, number), each

    @property
    def volumes(self) -> dict[str, dict[str, Any]]:
        return {str(each.get("name")): each for each in entries(self.spec, "volumes")}

    @property
    def claims(self) -> set[str]:
        """Names of the volume claims that the pods mount."""
        names = (get(volume, "persistentVolumeClaim", "claimName") for volume in self.volumes.values())
        return {str(name) for name in names if name}

    @property
    def resources(self) -> tuple[Manifest, Path, Any]:
        """Requests and limits of the container that trains, and where they are said."""
        said: Path = ("spec", "trainer", "resourcesPerNode")
        if self.job.kind == "TrainJob" and (found := get(self.job.body, *said)):
            return self.job, said, found
        return self.manifest, (*self.main_path, "resources"), (self.main or {}).get("resources")

    @property
    def gpus(self) -> int | None:
        """GPUs of each pod; None where the amount is no number."""
        amount = get(self.resources[2], "limits", GPU)
        return 0 if amount is None else int(amount) if str(amount).isdigit() else None

    @property
    def variables(self) -> list[tuple[Manifest, Path, dict[str, Any]]]:
        """Variables of the container that trains, wherever they are said."""
        found = [
            (self.manifest, (*self.main_path, "env", number), each)
            for number, each in enumerate(entries(self.main, "env"))
        ]
        if self.job.kind == "TrainJob":
            for number, each in enumerate(entries(self.job.body, "spec", "trainer", "env")):
                found.append((self.job, ("spec", "trainer", "env", number), each))
        return found

    @property
    def command(self) -> tuple[Manifest, Path, list[str]]:
        """The whole command line, and where it is said."""
        for manifest, path in ((self.job, ("spec", "trainer")), (self.manifest, self.main_path)):
            if self.job.kind != "TrainJob" and manifest is self.job and path == ("spec", "trainer"):
                continue
            words = [get(manifest.body, *path, key) for key in ("command", "args")]
            line = [str(word) for part in words if isinstance(part, list) for word in part]
            if line:
                return manifest, (*path, "command"), line
        return self.manifest, (*self.main_path, "command"), []


@dataclass(frozen=True)
class Stream:
    """All documents that are applied together."""

    manifests: tuple[Manifest, ...]
    """In the order of the file."""

    @cached_property
    def pods(self) -> list[PodView]:
        """The pods of every job in the stream."""
        return [view for manifest in self.manifests for view in self._pods_of(manifest)]

    def named(self, kind: str) -> set[str]:
        """Names of the documents of a kind."""
        return {each.name for each in self.manifests if each.kind == kind}

    def _pods_of(self, manifest: Manifest) -> Iterator[PodView]:
        if manifest.kind == "PyTorchJob":
            specs = get(manifest.body, "spec", "pytorchReplicaSpecs")
            roles = (
                {key: spec for key, spec in specs.items() if isinstance(spec, dict)} if isinstance(specs, dict) else {}
            )
            counts = {key: _count(spec.get("replicas"), 1) for key, spec in roles.items()}
            for key, count in counts.items():
                path: Path = ("spec", "pytorchReplicaSpecs", key, "template", "spec")
                yield PodView(manifest, path, manifest, count, sum(counts.values()), "pytorch")
        if manifest.kind == "TrainJob":
            yield from self._runtime_pods(manifest)

    def _runtime_pods(self, job: Manifest) -> Iterator[PodView]:
        name = get(job.body, "spec", "runtimeRef", "name")
        runtime = next((each for each in self.manifests if each.kind == "TrainingRuntime" and each.name == name), None)
        if runtime is None:
            return
        default = _count(get(runtime.body, "spec", "mlPolicy", "numNodes"), 1)
        nodes = _count(get(job.body, "spec", "trainer", "numNodes"), default)
        base: Path = ("spec", "template", "spec", "replicatedJobs")
        for number, each in enumerate(entries(runtime.body, *base)):
            if each.get("name") == "node":
                path = (*base, number, "template", "spec", "template", "spec")
                yield PodView(runtime, path, job, nodes, nodes, "node")


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
