"""Find writable cache folders and set the environment before any library is loaded; remove truncated cache files."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

PINNED_ALLOC_CONF = "pinned_use_cuda_host_register:True"
"""Lets torch's allocator map memory before the driver pins it; not with several threads: torch would start 128 in
every process.
"""
BYTECODE_DIR = "bytecode"
_TRUNCATED_AT_START: list[int] = []
TRITON_KEY = re.compile("[A-Z2-7]{52}")
"""The folder name of a kernel in Triton's cache."""
FINGERPRINT_PACKAGES = ("torch", "transformers", "modelwright")
"""Packages whose files distinguish one container image from another."""


def cache_dir() -> Path:
    """The folder for models we convert: MODELWRIGHT_CACHE, the user's cache, or a temporary one."""
    candidates = [os.environ.get("MODELWRIGHT_CACHE"), _under(os.environ.get("XDG_CACHE_HOME")), _under(_home_cache())]
    for candidate in candidates:
        if candidate and _is_writable(Path(candidate)):
            return Path(candidate)
    fallback = Path(tempfile.gettempdir()) / f"modelwright-{os.getuid()}"
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback


@contextmanager
def cache_lock(path: Path) -> Iterator[bool]:
    """Let one process after the other make a file or folder of the cache; where locks do not work, all at once.

    Yields whether it waited for another process. Inside, each looks again for what it would make.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    has_waited = False
    with path.with_name(f".{path.name}.lock").open("w") as file:
        with suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                has_waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
        yield has_waited


def hf_hub_cache() -> Path:
    """Where huggingface_hub keeps downloaded models."""
    return Path(os.environ.get("HF_HOME") or Path(_home_cache()) / "huggingface") / "hub"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids downloads."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def prepare_environment() -> None:
    """Point library caches that cannot be written at a writable folder, and set what shortens the start."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"uid{os.getuid()}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank that waits would print a stack at each retry
    cache, home_works = cache_dir(), _is_writable(Path(_home_cache()))
    for name, folder in (("HF_HOME", "huggingface"), ("XDG_CACHE_HOME", "."), ("TRITON_CACHE_DIR", "triton"),
                         ("TORCHINDUCTOR_CACHE_DIR", "inductor")):  # fmt: skip
        value = os.environ.get(name)
        # torch's own default for compiled kernels is the temporary folder, which a restart or a new pod empties
        default_works = home_works and name != "TORCHINDUCTOR_CACHE_DIR"
        if not (_is_writable(Path(value)) if value else default_works):
            os.environ[name] = str(cache / folder)
    torch = find_spec("torch")
    if torch is not None and torch.origin and torch.cached:
        _set_pycache_prefix(Path(torch.cached), cache.absolute() / BYTECODE_DIR)
        _set_pinned_alloc_conf(Path(torch.origin).parent / "lib" / "libtorch_cuda.so")
        # deterministic kernels need it before the first matmul; on Hopper this size is torch's default
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # some are loaded as soon as a library queries Triton's features
        _TRUNCATED_AT_START.append(remove_truncated_libraries(triton_cache()))


def _set_pinned_alloc_conf(library: Path) -> None:
    """Map memory before it is pinned: pinning 6 GB for checkpoint copies blocked the GPU for 4.7 s at once, and
    after mapping it with eight threads for 0.6 s in pieces of at most 30 ms.
    """
    name = "PYTORCH_CUDA_ALLOC_CONF" if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else "PYTORCH_ALLOC_CONF"
    current = os.environ.get(name, "")
    if library.exists() and PINNED_ALLOC_CONF.partition(":")[0] not in current:
        os.environ[name] = ",".join(part for part in (current, PINNED_ALLOC_CONF) if part)


def _set_pycache_prefix(torch_bytecode: Path, folder: Path) -> None:
    """Keep bytecode in our cache where it cannot be kept next to the sources, as in many container images: otherwise
    torch and transformers are compiled at each start, 17 s to the first step of a run instead of 9.
    """
    if sys.pycache_prefix or torch_bytecode.exists():
        return
    if not sys.dont_write_bytecode and _is_writable(torch_bytecode.parent):
        return  # the first start writes it there
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_private = _is_private_dir(folder)
    except OSError:  # as slow as without it
        return
    if not is_private:
        return  # what is in the folder is executed
    prefix = str(folder / _install_fingerprint())
    sys.pycache_prefix, sys.dont_write_bytecode = prefix, False
    os.environ["PYTHONPYCACHEPREFIX"] = prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _install_fingerprint() -> str:
    """A hash of the installed packages: bytecode is checked by size and time, and many images have equal times."""
    from importlib.metadata import PackageNotFoundError, distribution

    digest = hashlib.blake2b(digest_size=8)
    for name in FINGERPRINT_PACKAGES:
        with suppress(PackageNotFoundError):
            digest.update((distribution(name).read_text("RECORD") or "").encode())
    return digest.hexdigest()


def remove_truncated_bytecode(error: Exception) -> str | None:
    """Remove our bytecode cache where a truncated file in it caused this error; returns the message for the user."""
    folder = Path(sys.pycache_prefix) if sys.pycache_prefix else None
    if folder is None or folder.parent != cache_dir().absolute() / BYTECODE_DIR or "marshal data" not in str(error):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return (
        f"Python's bytecode in {folder} was cut short, by a full disk or a kill, and is removed; run the command again"
    )


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries inside without looking for garbage, and never look at what they made again: 0.5 of 6
    CPU-seconds of imports, and 0.3 s when the memory of a trained model is freed."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _is_private_dir(folder: Path) -> bool:
    """Whether no other user can write into a folder or replace it."""
    info, parent = folder.lstat(), folder.parent.stat()
    parent_is_safe = parent.st_uid in (0, os.getuid()) and not parent.st_mode & 0o002
    return parent_is_safe and stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def _home_cache() -> str:
    return str(Path(os.environ.get("HOME") or "/") / ".cache")


def _under(cache: str | None) -> str | None:
    return str(Path(cache) / "modelwright") if cache else None


def _is_writable(path: Path) -> bool:
    """Whether the folder, or its nearest existing parent, is writable."""
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110  # Path.exists() fails in a closed folder
        path = path.parent
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)  # noqa: PTH112  # likewise


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels and their launcher libraries."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111  # Path.home() fails without a home
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def truncated_at_start() -> int:
    """How many truncated libraries were removed when this process started; reported once, then 0."""
    count = sum(_TRUNCATED_AT_START)
    _TRUNCATED_AT_START.clear()
    return count


def remove_truncated_libraries(folder: Path) -> int:
    """Delete truncated libraries from a compile cache, and count them: loading one would crash the process."""
    count = 0
    for path in _truncated_files(folder, {".so"}):
        with suppress(OSError):  # not ours to delete
            path.unlink()
            count += 1
    return count


def remove_truncated_kernels(folder: Path) -> int:
    """Delete kernels with a truncated file from Triton's cache, and count them: Triton would fail on them."""
    kernels = {
        path.parent for path in _truncated_files(folder, {".cubin", ".json"}) if TRITON_KEY.fullmatch(path.parent.name)
    }
    for kernel in kernels:
        shutil.rmtree(kernel, ignore_errors=True)
    return sum(not kernel.exists() for kernel in kernels)


def _truncated_files(folder: Path, suffixes: set[str]) -> list[Path]:
    """Truncated files with these suffixes at paths where a compiler writes them; no other file is touched.

    Triton has a folder for each key, torch one for two characters of it; unfinished files are elsewhere.
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
    except OSError:  # another process removed it
        return True


def _is_complete_elf(path: Path) -> bool:
    """Whether a file is as long as its ELF header says: its two tables are at the end of a library or a kernel."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":  # 64 bit; nothing else is compiled here
        return False
    fields = ((40, 48), (58, 60), (60, 62)), ((32, 40), (54, 56), (56, 58))
    tables = [[int.from_bytes(head[begin:end], "little") for begin, end in table] for table in fields]
    return all(start + size * count <= path.stat().st_size for start, size, count in tables)


def use_empty_compile_cache() -> None:
    """Let torch and Triton compile into a new empty folder: the old cache may hold unusable files."""
    folder = tempfile.mkdtemp(prefix="modelwright-compile-")
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
