"""The installation that is locked by hashes: what the lock holds, and whether pip refuses what is not in it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LOCK = "requirements.lock"
HUGE = ("torch", "triton", "cuda-", "nvidia-")
"""Gigabytes that the check of hashes does not bring here."""
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? ?\\?$")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Locked:
    """One package of the lock."""

    name: str
    """As the index calls it, in lower case with dashes."""
    version: str
    """Exactly this one."""
    lines: str
    """Its lines in the lock."""

    @property
    def hashes(self) -> int:
        """Files of it that may be installed."""
        return len(HASH.findall(self.lines))


def plain(name: str) -> str:
    """A package's name as all tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path) -> list[Locked]:
    """The packages of a lock."""
    found: list[Locked] = []
    for block in re.split(r"\n(?=\S)", path.read_text(encoding="utf-8")):
        if match := PIN.match(block.splitlines()[0] if block else ""):
            found.append(Locked(plain(match["name"]), match["version"], block.rstrip() + "\n"))
    return found


def pinned(path: Path) -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "==" in line and line[0] != "#")
    return {plain(name): version for name, _, version in (line.partition("==") for line in lines)}


def fetch(lock: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Let pip bring what a lock names, each file held against its hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    path.write_text(lock, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary=:all:",
               "--quiet", "--disable-pip-version-check", "--dest", str(folder / "files"), "-r", str(path)]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)
