"""The git clone of an init container: rehearsed from a repository of this machine, or told as not shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError
from modelwright.launch.host import USER_ID, Mount

GIT = re.compile(r"\bgit\b.*\b(clone|fetch|pull)\b", re.DOTALL)
REMOTE = re.compile(r"(?:https?|ssh|git)://[^\s\"';&]+|\b[\w.-]+@[\w.-]+:[^\s\"';&]+")
LOCAL = re.compile(r"(?:file://|(?<![\w./:-]))(/[^\s\"';&]+)")
TARGET = "/rehearsal/repository.git"
"""Where the init container sees the repository."""


@dataclass(frozen=True)
class Clone:
    """What an init container clones."""

    address: str
    """The repository, as its command names it."""
    source: Path | None
    """The repository of this machine that is cloned; None where the address leads out."""

    @property
    def shown(self) -> str:
        """The address without a name or a password in it."""
        return re.sub(r"(?<=//)[^/@]*@", "", self.address) or "a repository"

    def words(self, words: list[str]) -> list[str]:
        """The command with the repository of this machine in place of the address."""
        return [word.replace(self.address, TARGET) for word in words]

    def mount(self, place: Path, isolated: bool) -> Mount:
        """A bare copy of the repository, which the pod's user may read whoever owns the original."""
        assert self.source is not None
        copy = place / "repository.git"
        shutil.rmtree(copy, ignore_errors=True)
        command = ["git", "-c", "safe.directory=*", "clone", "--quiet", "--bare", "--no-hardlinks"]
        try:
            done = subprocess.run([*command, str(self.source), str(copy)], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UsageError("git is not on the PATH; the rehearsal clones with it") from None
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["git failed"]
            raise UsageError(f"{self.source} cannot be cloned ({last[0]}); --clone-from wants a git repository")
        if isolated:  # git refuses a repository of another user
            for path in (copy, *copy.rglob("*")):
                os.chown(path, USER_ID, 0)
        return Mount(copy, TARGET)


def clone_of(container: dict[str, Any], clone_from: str | None) -> Clone | None:
    """What a container clones, where it clones."""
    line = " ".join(str(word) for key in ("command", "args") for word in container.get(key) or [])
    if not GIT.search(line):
        return None
    stand_in = Path(clone_from.removeprefix("file://")) if clone_from else None
    if found := REMOTE.search(line):
        return Clone(found[0], stand_in)
    for found in LOCAL.finditer(line):
        if any((Path(found[1]) / name).exists() for name in ("HEAD", ".git")):
            return Clone(found[0], stand_in or Path(found[1]))
    return Clone("", None)
