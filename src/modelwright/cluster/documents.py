"""Kubernetes documents: dump them as commented YAML, load them with line numbers, find the pod templates of a job."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from modelwright.errors import Problem, ProblemsError, first_line

PathKey = str | int
FieldPath = tuple[PathKey, ...]
Document = dict[str, Any]
PLAIN_SCALAR = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./@+-]*(:[A-Za-z0-9_./@+-]+)*")
YAML_KEYWORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
"""Plain scalars that some YAML parser reads as bool or null."""
MAX_FILE_BYTES = 4_000_000
MAX_FLOW_WIDTH = 90
"""Longest list that is written on one line."""


@dataclass(frozen=True)
class YamlComments:
    """Comments in the rendered YAML."""

    header: str = ""
    """Before everything."""
    by_document: Mapping[str, str] = field(default_factory=dict)
    """By the kind and name of a document: `PersistentVolumeClaim workspace`, or the kind alone."""
    by_key: Mapping[str, str] = field(default_factory=dict)
    """By key, or by kind and key as in `TrainJob env`; written where the key occurs first in a document."""


def dump_documents(documents: Sequence[Document], comments: YamlComments | None = None) -> str:
    """All documents as YAML that YAML 1.1 and 1.2 parsers read alike."""
    comments = comments or YamlComments()
    parts = [_comment(comments.header)]
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        comment = comments.by_document.get(f"{kind} {name}") or comments.by_document.get(kind, "")
        prefix = f"{kind} "
        own = {key.removeprefix(prefix): text for key, text in comments.by_key.items() if key.startswith(prefix)}
        parts.append("---\n" + _comment(comment) + "\n".join(_lines(document, 0, {**comments.by_key, **own})) + "\n")
    return "".join(parts)


def dump_mapping(mapping: dict[str, Any]) -> str:
    """One mapping as YAML, without comments."""
    return "\n".join(_lines(mapping, 0, {})) + "\n"


def _comment(text: str, indent: int = 0) -> str:
    return "".join(f"{' ' * indent}# {line}".rstrip() + "\n" for line in text.splitlines())


def _lines(value: Any, indent: int, comments: dict[str, str]) -> Iterator[str]:
    """The lines of a mapping or a list; each comment is written once."""
    pad = " " * indent
    if isinstance(value, list):
        for item in value:
            rest = list(_lines(item, indent + 2, comments)) if item and isinstance(item, dict | list) else []
            if not rest:
                yield f"{pad}- {_scalar(item)}"
                continue
            while rest[0].lstrip().startswith("#"):  # a comment about the first key goes before the dash
                yield pad + rest.pop(0).lstrip()
            yield f"{pad}- {rest[0].lstrip()}"
            yield from rest[1:]
        return
    for key, item in value.items():
        if key in comments:
            yield from _comment(comments.pop(key), indent).splitlines()
        name = _scalar(key)
        if item and isinstance(item, dict):
            yield f"{pad}{name}:"
            yield from _lines(item, indent + 2, comments)
        elif item and isinstance(item, list) and not _is_short(item):
            yield f"{pad}{name}:"  # comments are about the container that trains
            yield from _lines(item, indent, {} if key == "initContainers" else comments)
        elif isinstance(item, str) and _is_block(item):
            yield f"{pad}{name}: |"
            yield from (f"{pad}  {line}".rstrip() for line in item.splitlines())
        else:
            yield f"{pad}{name}: {_scalar(item)}"


def _is_short(items: list[Any]) -> bool:
    """Whether a list reads better on one line."""
    return not any(isinstance(item, dict | list) for item in items) and len(_scalar(items)) < MAX_FLOW_WIDTH


def _is_block(text: str) -> bool:
    """Whether multi-line text survives a literal block unchanged."""
    lines = text.split("\n")
    printable = all(line == line.rstrip() and line.isprintable() for line in lines)
    one_end = text.endswith("\n") and not text.endswith("\n\n")
    return len(lines) > 2 and printable and text[:1] not in (" ", "") and one_end


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN_SCALAR.fullmatch(value) and value.lower() not in YAML_KEYWORDS:
        return value
    if isinstance(value, list):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Manifest:
    """One document of a file, with the line of each field."""

    file: str
    """The file it came from, as shown in messages."""
    body: Any
    """Its content."""
    line: int
    """Where it begins."""

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        metadata = self.body.get("metadata")
        return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""

    def location(self, path: Sequence[PathKey]) -> str:
        """File and line of a field, or of the nearest thing around it that is written."""
        node, line = self.body, self.line
        for key in path:
            positions = getattr(getattr(node, "lc", None), "data", None) or {}
            if key not in positions:
                break
            line = positions[key][0] + 1
            node = node[key]
        return f"{self.file}:{line}"


def load_manifests(path: Path) -> list[Manifest]:
    """Load a file of documents; a YAML error is reported with its line."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ProblemsError([Problem(str(path), f"is over {MAX_FILE_BYTES // 1_000_000} MB; no manifest is")])
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProblemsError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise ProblemsError([Problem(str(path), "is not UTF-8; save it as UTF-8")]) from None
    return parse_manifests(text, str(path))


def parse_manifests(text: str, name: str) -> list[Manifest]:
    """Parse a YAML stream of documents."""
    reader = YAML(typ="rt", pure=True)
    try:
        bodies = [body for body in reader.load_all(text) if body is not None]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ProblemsError([Problem(f"{name}:{line}", f"is not YAML: {error.problem or error.context}")]) from None
    except YAMLError as error:
        raise ProblemsError([Problem(name, f"is not YAML: {first_line(error)}")]) from None
    manifests = []
    for body in bodies:
        if not isinstance(body, CommentedMap):
            raise ProblemsError([Problem(name, "a document is no mapping; it wants apiVersion, kind and metadata")])
        line = min((position[0] for position in (body.lc.data or {}).values()), default=0) + 1
        manifests += _items(body, name, line)
    if not manifests:
        raise ProblemsError([Problem(name, "holds no document; it wants a PyTorchJob or a TrainJob")])
    return manifests


def _items(body: CommentedMap, name: str, line: int) -> list[Manifest]:
    """A `List` is replaced by its items."""
    items = body.get("items")
    if body.get("kind") == "List" and isinstance(items, CommentedSeq):
        return [Manifest(name, item, items.lc.data[i][0] + 1) for i, item in enumerate(items)]
    return [Manifest(name, body, line)]


GPU = "nvidia.com/gpu"


def get_field(node: Any, *keys: PathKey) -> Any:
    """The value at a path, or None."""
    for key in keys:
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        else:
            return None
    return node


def get_items(node: Any, *keys: PathKey) -> list[dict[str, Any]]:
    """The mappings in a list at a path."""
    items = get_field(node, *keys)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


@dataclass(frozen=True)
class PodTemplate:
    """A pod template of a job."""

    manifest: Manifest
    """The document that holds the template."""
    path: FieldPath
    """Where the pod's spec is in it."""
    job: Manifest
    """The job that they belong to."""
    replicas: int
    """Pods of this template."""
    num_nodes: int
    """Pods of the whole job."""
    container_name: str
    """What the operator expects the container to be called."""

    @property
    def spec(self) -> Any:
        return get_field(self.manifest.body, *self.path)

    @property
    def training_container(self) -> dict[str, Any] | None:
        """The container that trains."""
        return next((container for container in self.containers if container.get("name") == self.container_name), None)

    @property
    def container_path(self) -> FieldPath:
        names = [container.get("name") for container in self.containers]
        return (*self.path, "containers", names.index(self.container_name) if self.container_name in names else 0)

    @property
    def containers(self) -> list[dict[str, Any]]:
        return get_items(self.spec, "containers")

    @property
    def all_containers(self) -> Iterator[tuple[FieldPath, dict[str, Any]]]:
        """Every container with its path, init containers included."""
        for key in ("initContainers", "containers"):
            for index, container in enumerate(get_items(self.spec, key)):
                yield (*self.path, key, index), container

    @property
    def volumes(self) -> dict[str, dict[str, Any]]:
        return {str(volume.get("name")): volume for volume in get_items(self.spec, "volumes")}

    @property
    def pvc_names(self) -> set[str]:
        """Names of the volume claims that the pods mount."""
        names = (get_field(volume, "persistentVolumeClaim", "claimName") for volume in self.volumes.values())
        return {str(name) for name in names if name}

    @property
    def resources(self) -> tuple[Manifest, FieldPath, Any]:
        """Requests and limits of the training container, and their path."""
        trainer_path: FieldPath = ("spec", "trainer", "resourcesPerNode")
        if self.job.kind == "TrainJob" and (trainer_resources := get_field(self.job.body, *trainer_path)):
            return self.job, trainer_path, trainer_resources
        return self.manifest, (*self.container_path, "resources"), (self.training_container or {}).get("resources")

    @property
    def gpus(self) -> int | None:
        """GPUs of each pod; None where the amount is no number."""
        amount = get_field(self.resources[2], "limits", GPU)
        return 0 if amount is None else int(amount) if str(amount).isdigit() else None

    @property
    def env(self) -> list[tuple[Manifest, FieldPath, dict[str, Any]]]:
        """Environment of the training container, with the path of each entry."""
        result = [
            (self.manifest, (*self.container_path, "env", index), variable)
            for index, variable in enumerate(get_items(self.training_container, "env"))
        ]
        if self.job.kind == "TrainJob":
            trainer_env = get_items(self.job.body, "spec", "trainer", "env")
            result += [(self.job, ("spec", "trainer", "env", i), variable) for i, variable in enumerate(trainer_env)]
        return result

    @property
    def command(self) -> tuple[Manifest, FieldPath, list[str]]:
        """The complete command line, and its path."""
        sources: list[tuple[Manifest, FieldPath]] = [(self.manifest, self.container_path)]
        if self.job.kind == "TrainJob":
            sources.insert(0, (self.job, ("spec", "trainer")))
        for manifest, path in sources:
            parts = [get_field(manifest.body, *path, key) for key in ("command", "args")]
            args = [str(arg) for part in parts if isinstance(part, list) for arg in part]
            if args:
                return manifest, (*path, "command"), args
        return self.manifest, (*self.container_path, "command"), []


@dataclass(frozen=True)
class ManifestSet:
    """All documents that are applied together."""

    manifests: tuple[Manifest, ...]
    """In the order of the file."""

    @cached_property
    def pod_templates(self) -> list[PodTemplate]:
        """The pods of every job in the stream."""
        return [template for manifest in self.manifests for template in self._job_pod_templates(manifest)]

    def names_of_kind(self, kind: str) -> set[str]:
        """Names of the documents of a kind."""
        return {manifest.name for manifest in self.manifests if manifest.kind == kind}

    def _job_pod_templates(self, manifest: Manifest) -> Iterator[PodTemplate]:
        if manifest.kind == "PyTorchJob":
            specs = get_field(manifest.body, "spec", "pytorchReplicaSpecs")
            roles = specs.items() if isinstance(specs, dict) else ()
            counts = {key: _count(spec.get("replicas"), 1) for key, spec in roles if isinstance(spec, dict)}
            for key, count in counts.items():
                path: FieldPath = ("spec", "pytorchReplicaSpecs", key, "template", "spec")
                yield PodTemplate(manifest, path, manifest, count, sum(counts.values()), "pytorch")
        if manifest.kind == "TrainJob":
            yield from self._runtime_pod_templates(manifest)

    def _runtime_pod_templates(self, job: Manifest) -> Iterator[PodTemplate]:
        name = get_field(job.body, "spec", "runtimeRef", "name")
        runtimes = (manifest for manifest in self.manifests if manifest.kind == "TrainingRuntime")
        runtime = next((manifest for manifest in runtimes if manifest.name == name), None)
        if runtime is None:
            return
        default = _count(get_field(runtime.body, "spec", "mlPolicy", "numNodes"), 1)
        num_nodes = _count(get_field(job.body, "spec", "trainer", "numNodes"), default)
        base: FieldPath = ("spec", "template", "spec", "replicatedJobs")
        for index, replicated_job in enumerate(get_items(runtime.body, *base)):
            if replicated_job.get("name") == "node":
                path = (*base, index, "template", "spec", "template", "spec")
                yield PodTemplate(runtime, path, job, num_nodes, num_nodes, "node")


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
