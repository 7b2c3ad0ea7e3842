"""A job's storage on this machine: its claims, its ConfigMaps and what goes with a pod, as folders of one place."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError
from modelwright.launch.host import Mount
from modelwright.launch.operators import PodPlan
from modelwright.launch.stream import Manifest
from modelwright.launch.views import entries, get


@dataclass(frozen=True)
class Storage:
    """Where a rehearsal keeps things."""

    place: Path
    """Its folder; volumes that are there are used as they are."""

    def prepare(self, manifests: Sequence[Manifest]) -> None:
        """Make the folders, and the files of every ConfigMap in the stream."""
        try:
            for folder in ("roots", "logs", "volumes", "maps"):
                (self.place / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self.place} cannot be written ({error.strerror}); --place names another folder"
            ) from None
        for each in manifests:
            if each.kind == "ConfigMap":
                _write_map(each, self.place / "maps" / each.name)

    def scratch(self, pod: PodPlan) -> Path:
        """What goes with the pod."""
        return self.place.resolve() / "pods" / pod.name

    def renew(self, pod: PodPlan) -> None:
        """A new pod in place of the old one: nothing of its scratch is left."""
        shutil.rmtree(self.scratch(pod), ignore_errors=True)

    def mounts(self, pod: PodPlan, container: dict[str, Any]) -> list[Mount]:
        """The folders that a container of the pod sees."""
        place, volumes = self.place.resolve(), pod.view.volumes
        found = []
        for mount in entries(container, "volumeMounts"):
            volume = volumes.get(str(mount.get("name")), {})
            claim = get(volume, "persistentVolumeClaim", "claimName")
            config = get(volume, "configMap", "name")
            if config:
                source = place / "maps" / str(config)
                if not source.is_dir():
                    raise UsageError(f"{pod.name} waits for the ConfigMap {config}, which is not in this stream")
            else:
                source = place / "volumes" / str(claim) if claim else self.scratch(pod) / str(mount.get("name"))
                _open_folder(source)
            found.append(Mount(source, str(mount.get("mountPath")), bool(config)))
        return found


def _open_folder(path: Path) -> None:
    """A folder as a volume is: group 0 may write, and what is made in it stays with the group."""
    path.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(path, -1, 0)
    elif path.stat().st_uid != os.geteuid():  # somebody else's volume is used as it is, where it can be
        if not os.access(path, os.W_OK | os.X_OK):
            raise UsageError(f"{path} belongs to another user and cannot be written; --place names another folder")
        return
    path.chmod(0o2775)


def _write_map(manifest: Manifest, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in (get(manifest.body, "data") or {}).items():
        (folder / str(name)).write_text(str(text), encoding="utf-8")
    for name, text in (get(manifest.body, "binaryData") or {}).items():
        (folder / str(name)).write_bytes(base64.b64decode(str(text)))
