"""Build the ConfigMap payload of a job: the resolved recipe, small data files, and the zipped package."""

from __future__ import annotations

import base64
import functools
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import modelwright
from modelwright.cluster.documents import dump_mapping
from modelwright.data.sources import CIFAR10_NAME, EMBEDDED_DATASETS, local_path
from modelwright.errors import UsageError
from modelwright.recipe.fields import canonical_key
from modelwright.recipe.schema import Recipe
from modelwright.recipe.sections import ClusterConfig, DataConfig

MAX_CONFIG_MAP_BYTES = 1_000_000
"""Bytes of data in a ConfigMap; the cluster's limit is 1 MiB including names."""
RECIPE_HEADER = """\
# Resolved by Modelwright for the cluster: bases and --set are in it, paths are those of the pods.
# The variables under env_overrides may still be set in the job."""
DATA_KEYS = ("dataset_name", "data_dir", "train_file", "validation_file")


@dataclass(frozen=True)
class ConfigMapPayload:
    """What a ConfigMap carries."""

    recipe: Recipe
    """The recipe as the pods mean it."""
    files: dict[str, bytes]
    """Data files in the ConfigMap, by name."""

    @property
    def recipe_yaml(self) -> str:
        """What the recipe says, as YAML; what it leaves to its defaults is the image's, whose version is pinned."""
        excluded = {"cluster", "gates_file"}
        settings = self.recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude=excluded)
        ordered = {key: settings[key] for key in Recipe.model_fields if key in settings}
        return f"{RECIPE_HEADER}\n{dump_mapping(ordered)}"

    def env(self) -> dict[str, str]:
        """The recipe's env_overrides with their current values, so that they can be changed in the job."""
        tree = self.recipe.model_dump(mode="json")
        values = {}
        for name, key in self.recipe.env_overrides.items():
            value: Any = tree
            for part in canonical_key(key).split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if isinstance(value, bool):
                values[name] = str(value).lower()
            elif isinstance(value, str | int | float):
                values[name] = f"{value:g}" if isinstance(value, float) else str(value)
        return values


def build_payload(recipe: Recipe, cluster: ClusterConfig, recipe_dir: Path) -> ConfigMapPayload:
    """Resolve a recipe for the pods: pod paths, and data files to embed."""
    files: dict[str, bytes] = {}

    def for_pods(data: DataConfig | None) -> DataConfig | None:
        paths = {key: _embed_file(getattr(data, key), key, cluster, recipe_dir, files) for key in DATA_KEYS if data}
        mix = dict(data.mix) if data else {}
        for name, source in mix.items():
            path = _embed_file(source.dataset_name or name, "mix", cluster, recipe_dir, files)
            mix[name] = source if path == name else source.model_copy(update={"dataset_name": path})
        if data and data.dataset_name == CIFAR10_NAME and not data.data_dir:
            paths["data_dir"] = cluster.mount_for("data")  # downloaded by the first job, read by the next
        return data.model_copy(update={**paths, **({"mix": mix} if mix else {})}) if data else None

    data = for_pods(recipe.data)
    stages = {name: stage.model_copy(update={"data": for_pods(stage.data)}) for name, stage in recipe.stages.items()}
    _check_model_reachable(recipe.model.model_name_or_path, cluster, recipe_dir)
    size = sum(len(content) for content in files.values())
    if size > MAX_CONFIG_MAP_BYTES:
        names = ", ".join(files)
        raise UsageError(
            f"data: {names} has {size:,} bytes, and a ConfigMap carries {MAX_CONFIG_MAP_BYTES:,}; copy it to a volume "
            f"once (oc rsync), and name it there, such as {_first_mount(cluster)}/{next(iter(files))}"
        )
    update = {"data": data, **stages, "output_dir": pod_run_dir(recipe, cluster)}
    return ConfigMapPayload(recipe.model_copy(update=update), files)


def pod_run_dir(recipe: Recipe, cluster: ClusterConfig) -> str:
    """Where the pods keep the run: on a volume, or it would go with the pod."""
    mounts = {name: volume.mount.rstrip("/") for name, volume in cluster.volumes.items()}
    output_dir = recipe.output_dir
    if output_dir and output_dir.startswith("/"):
        if not any(PurePosixPath(output_dir).is_relative_to(mount) for mount in mounts.values()):
            raise UsageError(
                f"output_dir is {output_dir!r}, which is on no volume and would be lost with the pod; "
                f"it wants a folder below {' or '.join(mounts.values())}"
            )
        return output_dir
    return f"{cluster.mount_for('models') or next(iter(mounts.values()))}/{recipe.name}"


def _embed_file(
    name: str | None, key: str, cluster: ClusterConfig, recipe_dir: Path, files: dict[str, bytes]
) -> str | None:
    """Embed a local data file next to the recipe; other names are resolved in the pods."""
    path = local_path(name, recipe_dir) if name and name not in EMBEDDED_DATASETS else None
    if name is None or path is None or _on_volume(name, cluster):
        return name
    if path.is_dir():
        raise UsageError(
            f"data.{key} is the folder {name} of this machine, which the pods do not have; copy it to a volume and "
            f"name it there, such as {_first_mount(cluster)}/{path.name}"
        )
    size = path.stat().st_size  # of a file that is too large only the size is needed, for the error
    files[path.name] = path.read_bytes() if size <= MAX_CONFIG_MAP_BYTES else b"\0" * size
    return path.name


def _check_model_reachable(name: str | None, cluster: ClusterConfig, recipe_dir: Path) -> None:
    path = local_path(name, recipe_dir) if name else None
    if name and path is not None and not name.startswith("/"):
        raise UsageError(
            f"model.model_name_or_path is the folder {name} of this machine, which the pods do not have; copy it to a "
            f"volume and name it there, such as {_first_mount(cluster)}/{path.name}, or give a hub id"
        )


def _first_mount(cluster: ClusterConfig) -> str:
    return next(iter(cluster.volumes.values())).mount


def _on_volume(name: str, cluster: ClusterConfig) -> bool:
    return any(PurePosixPath(name).is_relative_to(volume.mount) for volume in cluster.volumes.values())


def config_map_data(payload: ConfigMapPayload) -> dict[str, Any]:
    """The `data` and `binaryData` of a ConfigMap: text as text, so that a person can read it."""
    texts, binaries = {"recipe.yaml": payload.recipe_yaml}, {}
    for name, content in payload.files.items():
        try:
            texts[name] = content.decode("utf-8")
        except UnicodeDecodeError:
            binaries[name] = base64.b64encode(content).decode("ascii")
    return {"data": texts, **({"binaryData": binaries} if binaries else {})}


@functools.cache
def package_zip() -> bytes:
    """This package as a zip, the same bytes each time."""
    package = Path(modelwright.__file__).resolve().parent
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as opened:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"modelwright/{path.relative_to(package).as_posix()}"
                opened.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), path.read_bytes(), zipfile.ZIP_DEFLATED)
    content = archive.getvalue()
    if len(content) > MAX_CONFIG_MAP_BYTES:
        raise UsageError(
            f"cluster.code_source is configmap, but the program has {len(content):,} bytes and a ConfigMap carries "
            f"{MAX_CONFIG_MAP_BYTES:,}; it wants image or git+https://HOST/PATH@REVISION"
        )
    return content
