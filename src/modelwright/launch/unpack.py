"""Unpack an archive that a pod sent: files and folders below one place, and links that stay below it."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from modelwright.errors import Refused
from modelwright.runs.folder import RunFolder


def unpack(archive: IO[bytes], into: Path) -> None:
    """Write every member below the folder; one that would land elsewhere, or is no file, folder or link, is refused.

    Links are made last, when nothing is left that could be written through one: the library's own filter follows them
    as it goes, and was led out of the folder that way (CVE-2025-4517).
    """
    RunFolder(into).refuse_links()
    into.mkdir(parents=True, exist_ok=True)
    links: dict[Path, str] = {}
    try:
        with tarfile.open(fileobj=archive, mode="r|") as opened:
            for member in opened:
                path = _inside(member.name, into)
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif member.isreg():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write(opened, member, path)
                elif member.issym():
                    links[path] = member.linkname
                else:
                    raise Refused(f"the archive holds {member.name[:80]!r}, which is no file, folder or link")
    except tarfile.ReadError:
        return  # an empty stream: what sent it says why
    except (OSError, tarfile.TarError) as error:
        raise Refused(f"{into}: the archive could not be unpacked ({str(error)[:200]})") from None
    for path, target in links.items():
        _link(path, target, into)


def _inside(name: str, into: Path) -> Path:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Refused(f"the archive holds {name[:80]!r}, which leads out of the folder; nothing more is unpacked")
    return into.joinpath(*parts)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    with path.open("wb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    os.utime(path, (member.mtime, member.mtime))


def _link(path: Path, target: str, into: Path) -> None:
    aims = os.path.normpath(path.parent / target)
    if target.startswith("/") or not Path(aims).is_relative_to(os.path.normpath(into)):
        raise Refused(f"the archive holds a link to {target[:80]!r}, which leads out of the folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.symlink_to(target)
