"""Pack what travels to the cluster beside the image: the resolved recipe, small data files, and the program."""

from __future__ import annotations

import base64
import functools
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import modelwright
from modelwright.data.sources import EMBEDDED, local_path
from modelwright.errors import UsageError
from modelwright.launch.stream import as_yaml
from modelwright.recipe.aliases import our_key
from modelwright.recipe.cluster import Cluster
from modelwright.recipe.schema import Data, Recipe

LARGEST = 1_000_000
"""Bytes in a ConfigMap; the cluster takes a MiB with names and all."""
HEAD = """\
# Resolved by Modelwright for the cluster: bases and --set are in it, paths are those of the pods.
# The variables under environment may still be set in the job."""
SOURCES = ("dataset_name", "train_file", "validation_file")


@dataclass(frozen=True)
class Parcel:
    """What a ConfigMap carries."""

    recipe: Recipe
    """The recipe as the pods mean it."""
    files: dict[str, bytes]
    """Data files that travel with it, by name."""

    @property
    def text(self) -> str:
        """What the recipe says, as YAML; what it leaves to its defaults is the image's, whose version is pinned."""
        said = self.recipe.model_dump(
            mode="json", exclude_unset=True, exclude_none=True, exclude={"cluster", "gates_file"}
        )
        return f"{HEAD}\n{as_yaml({key: said[key] for key in Recipe.model_fields if key in said})}"

    def variables(self) -> dict[str, str]:
        """The recipe's environment map with the values it has now, to be seen and changed in the job."""
        tree = self.recipe.model_dump(mode="json")
        found = {}
        for name, key in self.recipe.environment.items():
            value: Any = tree
            for step in our_key(key).split("."):
                value = value.get(step) if isinstance(value, dict) else None
            if isinstance(value, bool):
                found[name] = str(value).lower()
            elif isinstance(value, str | int | float):
                found[name] = f"{value:g}" if isinstance(value, float) else str(value)
        return found


def pack(recipe: Recipe, cluster: Cluster, beside: Path) -> Parcel:
    """Turn a recipe into what the pods will read: paths of the pods, files that travel."""
    files: dict[str, bytes] = {}

    def moved(data: Data | None) -> Data | None:
        said = {key: _travels(getattr(data, key), key, cluster, beside, files) for key in SOURCES if data}
        return data.model_copy(update=said) if data else None

    data = moved(recipe.data)
    stages = {name: stage.model_copy(update={"data": moved(stage.data)}) for name, stage in recipe.stages.items()}
    _model_is_reachable(recipe.model.model_name_or_path, cluster, beside)
    size = sum(len(content) for content in files.values())
    if size > LARGEST:
        names = ", ".join(files)
        raise UsageError(
            f"data: {names} has {size:,} bytes, and a ConfigMap carries {LARGEST:,}; copy it to a volume once "
            f"(oc rsync), and name it there, such as {next(iter(cluster.volumes.values())).mount}/{next(iter(files))}"
        )
    update = {"data": data, **stages, "output_dir": run_folder(recipe, cluster)}
    return Parcel(recipe.model_copy(update=update), files)


def run_folder(recipe: Recipe, cluster: Cluster) -> str:
    """Where the pods keep the run: on a volume, or it would go with the pod."""
    mounts = {name: volume.mount.rstrip("/") for name, volume in cluster.volumes.items()}
    wish = recipe.output_dir
    if wish and wish.startswith("/"):
        if not any(PurePosixPath(wish).is_relative_to(mount) for mount in mounts.values()):
            raise UsageError(
                f"output_dir is {wish!r}, which is on no volume and would be lost with the pod; "
                f"it wants a folder below {' or '.join(mounts.values())}"
            )
        return wish
    return f"{mounts.get('trained-models', next(iter(mounts.values())))}/{recipe.name}"


def _travels(name: str | None, key: str, cluster: Cluster, beside: Path, files: dict[str, bytes]) -> str | None:
    """A data file that is here travels beside the recipe; other names are left to the pods."""
    path = local_path(name, beside) if name and name not in EMBEDDED else None
    if name is None or path is None or _on_volume(name, cluster):
        return name
    if path.is_dir():
        raise UsageError(
            f"data.{key} is the folder {name} of this machine, which the pods do not have; copy it to a volume and "
            f"name it there, such as {next(iter(cluster.volumes.values())).mount}/{path.name}"
        )
    if path.stat().st_size <= LARGEST:
        files[path.name] = path.read_bytes()
    else:
        files[path.name] = b"\0" * path.stat().st_size  # told by its size; its bytes are not needed for that
    return path.name


def _model_is_reachable(name: str | None, cluster: Cluster, beside: Path) -> None:
    path = local_path(name, beside) if name else None
    if name and path is not None and not name.startswith("/"):
        mount = next(iter(cluster.volumes.values())).mount
        raise UsageError(
            f"model.model_name_or_path is the folder {name} of this machine, which the pods do not have; copy it to a "
            f"volume and name it there, such as {mount}/{path.name}, or give a hub id"
        )


def _on_volume(name: str, cluster: Cluster) -> bool:
    return any(PurePosixPath(name).is_relative_to(volume.mount) for volume in cluster.volumes.values())


def config_data(parcel: Parcel) -> dict[str, Any]:
    """The `data` and `binaryData` of a ConfigMap: text as text, so that a person can read it."""
    texts, others = {"recipe.yaml": parcel.text}, {}
    for name, content in parcel.files.items():
        try:
            texts[name] = content.decode("utf-8")
        except UnicodeDecodeError:
            others[name] = base64.b64encode(content).decode("ascii")
    return {"data": texts, **({"binaryData": others} if others else {})}


@functools.cache
def program() -> bytes:
    """This package as a zip, the same bytes each time."""
    package = Path(modelwright.__file__).resolve().parent
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as opened:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"modelwright/{path.relative_to(package).as_posix()}"
                opened.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), path.read_bytes(), zipfile.ZIP_DEFLATED)
    content = archive.getvalue()
    if len(content) > LARGEST:
        raise UsageError(
            f"cluster.code is configmap, but the program has {len(content):,} bytes and a ConfigMap carries "
            f"{LARGEST:,}; it wants image or git+https://HOST/PATH@REVISION"
        )
    return content
