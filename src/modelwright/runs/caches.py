"""Find a place for caches that can really be written, before any library looks for its own.

In a container with a random user id and an unwritable home every library fails in its own way
(``/.cache``, ``/.triton``, ``getpass``); one look here mends them all.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The folder for models we convert: MODELWRIGHT_CACHE, the user's cache, or a temporary one."""
    wishes = [os.environ.get("MODELWRIGHT_CACHE"), _under(os.environ.get("XDG_CACHE_HOME")), _under(_home_cache())]
    for wish in wishes:
        if wish and _writable(Path(wish)):
            return Path(wish)
    fallback = Path(tempfile.gettempdir()) / f"modelwright-{os.getuid()}"
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback


def hub_cache() -> Path:
    """Where the hub's client keeps the models it has fetched."""
    return Path(os.environ.get("HF_HOME") or Path(_home_cache()) / "huggingface") / "hub"


def prepare_environment() -> None:
    """Point the libraries' caches at a folder that can be written, where their own cannot."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"uid{os.getuid()}")
    place, home_works = cache_dir(), _writable(Path(_home_cache()))
    for name, folder in (("HF_HOME", "huggingface"), ("XDG_CACHE_HOME", "."), ("TRITON_CACHE_DIR", "triton"),
                         ("TORCHINDUCTOR_CACHE_DIR", "inductor")):  # fmt: skip
        wish = os.environ.get(name)
        if not (_writable(Path(wish)) if wish else home_works):
            os.environ[name] = str(place / folder)


def _home_cache() -> str:
    return str(Path(os.environ.get("HOME") or "/") / ".cache")


def _under(cache: str | None) -> str | None:
    return str(Path(cache) / "modelwright") if cache else None


def _writable(path: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, takes new files."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def drop_cut_libraries(folder: Path) -> int:
    """Take libraries that end too early out of a compile cache, and count them: loading one would end the process."""
    cut = [path for path in folder.rglob("*.so") if path.is_file() and not _is_whole_library(path)]
    for path in cut:
        path.unlink(missing_ok=True)
    return len(cut)


def _is_whole_library(path: Path) -> bool:
    """Whether a file reaches as far as its own head says: the table of sections stands at the end of a library."""
    with path.open("rb") as file:
        head = file.read(64)
    if head[:5] != b"\x7fELF\x02":  # of 64 bits; nothing else is compiled here
        return False
    start, size, count = (int.from_bytes(head[at:end], "little") for at, end in ((40, 48), (58, 60), (60, 62)))
    return start + size * count <= path.stat().st_size


def fresh_compile_cache() -> None:
    """Let torch compile into an empty folder from now on: the old one may hold what cannot be used."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="modelwright-compile-")
