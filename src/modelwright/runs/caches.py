"""Find writable cache folders and set the environment before any library is loaded; remove truncated cache files."""

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

PINNED_ALLOC_CONF = "pinned_use_cuda_host_register:True"
"""How torch's allocator is told to map memory before the device's driver pins it. Not by several threads: torch would
start 128 in every process.
"""
BYTECODE_DIR = "bytecode"
_TRUNCATED_AT_START: list[int] = []
TRITON_KEY = re.compile("[A-Z2-7]{52}")
"""What Triton calls the folder of a kernel."""
FINGERPRINT_PACKAGES = ("torch", "transformers", "modelwright")
"""Packages whose files tell one image from another."""


def cache_dir() -> Path:
    """The folder for models we convert: MODELWRIGHT_CACHE, the user's cache, or a temporary one."""
    candidates = [os.environ.get("MODELWRIGHT_CACHE"), _under(os.environ.get("XDG_CACHE_HOME")), _under(_home_cache())]
    for candidate in candidates:
        if candidate and _is_writable(Path(candidate)):
            return Path(candidate)
    fallback = Path(tempfile.gettempdir()) / f"modelwright-{os.getuid()}"
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback


def hf_hub_cache() -> Path:
    """Where the hub's client keeps the models it has fetched."""
    return Path(os.environ.get("HF_HOME") or Path(_home_cache()) / "huggingface") / "hub"


def prepare_environment() -> None:
    """Point the libraries' caches at a folder that can be written, where their own cannot, and spare a start delays."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"uid{os.getuid()}")
    cache, home_works = cache_dir(), _is_writable(Path(_home_cache()))
    for name, folder in (("HF_HOME", "huggingface"), ("XDG_CACHE_HOME", "."), ("TRITON_CACHE_DIR", "triton"),
                         ("TORCHINDUCTOR_CACHE_DIR", "inductor")):  # fmt: skip
        value = os.environ.get(name)
        if not (_is_writable(Path(value)) if value else home_works):
            os.environ[name] = str(cache / folder)
    torch = find_spec("torch")
    if torch is not None and torch.origin and torch.cached:
        _set_pycache_prefix(Path(torch.cached), cache.absolute() / BYTECODE_DIR)
        _set_pinned_alloc_conf(Path(torch.origin).parent / "lib" / "libtorch_cuda.so")
        # some are loaded as soon as a library asks what Triton can do
        _TRUNCATED_AT_START.append(remove_truncated_libraries(triton_cache()))


def _set_pinned_alloc_conf(library: Path) -> None:
    """Have memory got ready before it is pinned for a GPU: 6 GB for copies of a checkpoint held the device up for 4.7 s
    as a whole, and got ready by eight threads for 0.6 s in pieces of 30 ms at most.
    """
    name = "PYTORCH_CUDA_ALLOC_CONF" if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else "PYTORCH_ALLOC_CONF"
    current = os.environ.get(name, "")
    if library.exists() and PINNED_ALLOC_CONF.partition(":")[0] not in current:
        os.environ[name] = ",".join(part for part in (current, PINNED_ALLOC_CONF) if part)


def _set_pycache_prefix(torch_bytecode: Path, folder: Path) -> None:
    """Let Python keep what it compiles here where it keeps nothing beside the sources, as in many images: without it
    all of torch and transformers is compiled at each start, 17 s to the first step of a run instead of 9.
    """
    if sys.pycache_prefix or torch_bytecode.exists():
        return
    if not sys.dont_write_bytecode and _is_writable(torch_bytecode.parent):
        return  # the first start leaves it there
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_private = _is_private_dir(folder)
    except OSError:  # no place for it: as slow as before, and no worse
        return
    if not is_private:
        return  # what lies there is run
    prefix = str(folder / _install_fingerprint())
    sys.pycache_prefix, sys.dont_write_bytecode = prefix, False
    os.environ["PYTHONPYCACHEPREFIX"] = prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _install_fingerprint() -> str:
    """A name for what is installed here: bytecode goes by a source's size and time, and many images have one time."""
    from importlib.metadata import PackageNotFoundError, distribution

    digest = hashlib.blake2b(digest_size=8)
    for name in FINGERPRINT_PACKAGES:
        with suppress(PackageNotFoundError):
            digest.update((distribution(name).read_text("RECORD") or "").encode())
    return digest.hexdigest()


def remove_truncated_bytecode(error: Exception) -> str | None:
    """Remove the bytecode that we keep, where this error comes from a file of it that was cut; tells what was done."""
    folder = Path(sys.pycache_prefix) if sys.pycache_prefix else None
    if folder is None or folder.parent != cache_dir().absolute() / BYTECODE_DIR or "marshal data" not in str(error):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return (
        f"Python's bytecode in {folder} was cut short, by a full disk or a kill, and is removed; run the command again"
    )


def _is_private_dir(folder: Path) -> bool:
    """Whether nobody else may put anything into a folder, or another in its place."""
    info, parent = folder.lstat(), folder.parent.stat()
    parent_is_safe = parent.st_uid in (0, os.getuid()) and not parent.st_mode & 0o002
    return parent_is_safe and stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def _home_cache() -> str:
    return str(Path(os.environ.get("HOME") or "/") / ".cache")


def _under(cache: str | None) -> str | None:
    return str(Path(cache) / "modelwright") if cache else None


def _is_writable(path: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, takes new files."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def triton_cache() -> Path:
    """Where Triton keeps the kernels that it compiles, and the libraries that start them."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111  # pathlib's refuses to be homeless
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def truncated_at_start() -> int:
    """How many libraries had been cut when this process began; who asks tells it, and is the last to hear of it."""
    count = sum(_TRUNCATED_AT_START)
    _TRUNCATED_AT_START.clear()
    return count


def remove_truncated_libraries(folder: Path) -> int:
    """Take libraries that end too early out of a compile cache, and count them: loading one would end the process."""
    count = 0
    for path in _truncated_files(folder, {".so"}):
        with suppress(OSError):  # not ours to mend
            path.unlink()
            count += 1
    return count


def remove_truncated_kernels(folder: Path) -> int:
    """Take kernels out of Triton's cache where a file of theirs ends too early, and count them; Triton would fail."""
    kernels = {
        path.parent for path in _truncated_files(folder, {".cubin", ".json"}) if TRITON_KEY.fullmatch(path.parent.name)
    }
    for kernel in kernels:
        shutil.rmtree(kernel, ignore_errors=True)
    return sum(not kernel.exists() for kernel in kernels)


def _truncated_files(folder: Path, suffixes: set[str]) -> list[Path]:
    """Files of these kinds that are not whole, where a compiler has put them; nothing else that lies there is touched.

    Triton has a folder for each key, torch one for two letters of it; what is still being written has another place.
    """
    candidates = [
        Path(directory) / name
        for directory, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix in suffixes
    ]
    compiled = (
        path for path in candidates if TRITON_KEY.fullmatch(path.parent.name) or path.name[1:3] == path.parent.name
    )
    return [path for path in compiled if not _is_complete(path)]


def _is_complete(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict) if path.suffix == ".json" else _is_complete_elf(path)
    except ValueError:
        return False
    except OSError:  # another process took it away
        return True


def _is_complete_elf(path: Path) -> bool:
    """Whether a file reaches as far as its own head says: its two tables stand at the end of a library or a kernel."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":  # of 64 bits; nothing else is compiled here
        return False
    fields = ((40, 48), (58, 60), (60, 62)), ((32, 40), (54, 56), (56, 58))
    tables = [[int.from_bytes(head[begin:end], "little") for begin, end in table] for table in fields]
    return all(start + size * count <= path.stat().st_size for start, size, count in tables)


def use_empty_compile_cache() -> None:
    """Let torch and Triton compile into an empty folder from now on: the old one may hold what cannot be used."""
    folder = tempfile.mkdtemp(prefix="modelwright-compile-")
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
