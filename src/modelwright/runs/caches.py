"""Find a place for caches that can really be written, before any library looks for its own.

In a container with a random user id and an unwritable home every library fails in its own way
(``/.cache``, ``/.triton``, ``getpass``); one look here mends them all. What else a library must be told before it is
imported stands here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

REGISTERED = "pinned_use_cuda_host_register:True"
"""How torch's allocator is told to map memory before the device's driver pins it. Not by several threads: torch would
start 128 in every process.
"""
BYTECODE = "bytecode"
_CUT_AT_START: list[int] = []
KEY = re.compile("[A-Z2-7]{52}")
"""What Triton calls the folder of a kernel."""
DECIDING = ("torch", "transformers", "modelwright")
"""Packages whose files tell one image from another."""


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
    """Point the libraries' caches at a folder that can be written, where their own cannot, and spare a start delays."""
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
    torch = find_spec("torch")
    if torch is not None and torch.origin and torch.cached:
        _keep_bytecode(Path(torch.cached), place.absolute() / BYTECODE)
        _pin_beside_training(Path(torch.origin).parent / "lib" / "libtorch_cuda.so")
        # some are loaded as soon as a library asks what Triton can do
        _CUT_AT_START.append(drop_cut_libraries(triton_cache()))


def _pin_beside_training(library: Path) -> None:
    """Have memory got ready before it is pinned for a GPU: 6 GB for copies of a checkpoint held the device up for 4.7 s
    as a whole, and got ready by eight threads for 0.6 s in pieces of 30 ms at most.
    """
    name = "PYTORCH_CUDA_ALLOC_CONF" if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else "PYTORCH_ALLOC_CONF"
    given = os.environ.get(name, "")
    if library.exists() and REGISTERED.partition(":")[0] not in given:
        os.environ[name] = ",".join(part for part in (given, REGISTERED) if part)


def _keep_bytecode(torch: Path, folder: Path) -> None:
    """Let Python keep what it compiles here where it keeps nothing beside the sources, as in many images: without it
    all of torch and transformers is compiled at each start, 17 s to the first step of a run instead of 9.
    """
    if sys.pycache_prefix or torch.exists():
        return
    if not sys.dont_write_bytecode and _writable(torch.parent):
        return  # the first start leaves it there
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = _only_ours(folder)
    except OSError:  # no place for it: as slow as before, and no worse
        return
    if not ours:
        return  # what lies there is run
    here = str(folder / _image())
    sys.pycache_prefix, sys.dont_write_bytecode = here, False
    os.environ["PYTHONPYCACHEPREFIX"] = here
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _image() -> str:
    """A name for what is installed here: bytecode goes by a source's size and time, and many images have one time."""
    from importlib.metadata import PackageNotFoundError, distribution

    digest = hashlib.blake2b(digest_size=8)
    for name in DECIDING:
        with suppress(PackageNotFoundError):
            digest.update((distribution(name).read_text("RECORD") or "").encode())
    return digest.hexdigest()


def drop_cut_bytecode(error: Exception) -> str | None:
    """Remove the bytecode that we keep, where this error comes from a file of it that was cut; tells what was done."""
    folder = Path(sys.pycache_prefix) if sys.pycache_prefix else None
    if folder is None or folder.parent != cache_dir().absolute() / BYTECODE or "marshal data" not in str(error):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return f"Python's bytecode in {folder} was cut short, by a full disk or a kill, and is removed; start it again"


def _only_ours(folder: Path) -> bool:
    """Whether nobody else may put anything into a folder, or another in its place."""
    found, above = folder.lstat(), folder.parent.stat()
    safe_above = above.st_uid in (0, os.getuid()) and not above.st_mode & 0o002
    return safe_above and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _home_cache() -> str:
    return str(Path(os.environ.get("HOME") or "/") / ".cache")


def _under(cache: str | None) -> str | None:
    return str(Path(cache) / "modelwright") if cache else None


def _writable(path: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, takes new files."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def triton_cache() -> Path:
    """Where Triton keeps the kernels that it compiles, and the libraries that start them."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111  # pathlib's refuses to be homeless
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def cut_at_start() -> int:
    """How many libraries had been cut when this process began; who asks tells it, and is the last to hear of it."""
    count = sum(_CUT_AT_START)
    _CUT_AT_START.clear()
    return count


def drop_cut_libraries(folder: Path) -> int:
    """Take libraries that end too early out of a compile cache, and count them: loading one would end the process."""
    count = 0
    for path in _cut(folder, {".so"}):
        with suppress(OSError):  # not ours to mend
            path.unlink()
            count += 1
    return count


def drop_cut_kernels(folder: Path) -> int:
    """Take kernels out of Triton's cache where a file of theirs ends too early, and count them; Triton would fail."""
    kernels = {path.parent for path in _cut(folder, {".cubin", ".json"}) if KEY.fullmatch(path.parent.name)}
    for kernel in kernels:
        shutil.rmtree(kernel, ignore_errors=True)
    return sum(not kernel.exists() for kernel in kernels)


def _cut(folder: Path, kinds: set[str]) -> list[Path]:
    """Files of these kinds that are not whole, where a compiler has put them; nothing else that lies there is touched.

    Triton has a folder for each key, torch one for two letters of it; what is still being written has another place.
    """
    found = [Path(here) / name for here, _, names in os.walk(folder) for name in names if Path(name).suffix in kinds]
    kept = (path for path in found if KEY.fullmatch(path.parent.name) or path.name[1:3] == path.parent.name)
    return [path for path in kept if not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict) if path.suffix == ".json" else _is_whole_library(path)
    except ValueError:
        return False
    except OSError:  # another process took it away
        return True


def _is_whole_library(path: Path) -> bool:
    """Whether a file reaches as far as its own head says: its two tables stand at the end of a library or a kernel."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":  # of 64 bits; nothing else is compiled here
        return False
    places = ((40, 48), (58, 60), (60, 62)), ((32, 40), (54, 56), (56, 58))
    tables = [[int.from_bytes(head[at:end], "little") for at, end in table] for table in places]
    return all(start + size * count <= path.stat().st_size for start, size, count in tables)


def fresh_compile_cache() -> None:
    """Let torch and Triton compile into an empty folder from now on: the old one may hold what cannot be used."""
    folder = tempfile.mkdtemp(prefix="modelwright-compile-")
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
