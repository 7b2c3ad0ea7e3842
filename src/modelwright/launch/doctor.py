"""Say what this machine can do and how to mend what it cannot: each check one line, with its remedy."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from modelwright.errors import first_line
from modelwright.launch import clock
from modelwright.runs.caches import cache_dir, hub_cache

State = Literal["ok", "warn", "fail", "skip"]
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 9)
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "peft", "numpy", "pydantic")
EXTRAS = {"torchao": "fp8", "bitsandbytes": "quantization", "tensorboard": "track"}
PORTS = (29500, 23456)
"""Where torchrun and the documents' jobs meet."""
HUB = ("huggingface.co", 443)
SMALLEST_SHM = 1 << 30
SMALLEST_DISK = 5 << 30
PATIENCE = 3.0


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    """What."""
    state: State
    """ok; warn: works, with a loss; fail: the recipe cannot run; skip: was not looked at."""
    found: str
    """What was found."""
    fix: str = ""
    """What would mend it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers, for machines."""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def examine(wanted: Sequence[Callable[[], Check | list[Check]]]) -> list[Check]:
    """Run checks in order; one that breaks is itself a finding, and the others go on."""
    found: list[Check] = []
    for check in wanted:
        try:
            told = check()
        except Exception as error:  # whatever a broken installation raises is what the doctor is there to tell
            name = check.__name__.replace("_", " ")
            fix = "mend the installation: pip install --force-reinstall modelwright"
            told = Check(name, "fail", f"{type(error).__name__}: {first_line(error)}"[:300], fix)
        found += told if isinstance(told, list) else [told]
    return found


def python() -> Check:
    """The interpreter."""
    here = f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Check("python", "fail", here, "modelwright wants Python 3.11 or newer")
    return Check("python", "ok", here, facts={"version": platform.python_version()})


def libraries() -> list[Check]:
    """What must be installed, and what may be."""
    found = {name: _version(name) for name in LIBRARIES}
    missing = [name for name, number in found.items() if number is None]
    told = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    checks = [Check("libraries", "fail" if missing else "ok", f"missing: {', '.join(missing)}" if missing else told,
                    f"pip install {' '.join(missing)}" if missing else "", found)]  # fmt: skip
    extras = {name: _version(name) for name in EXTRAS}
    lacking = [f"modelwright[{EXTRAS[name]}]" for name, number in extras.items() if number is None]
    told = ", ".join(f"{name} {number or 'absent'}" for name, number in extras.items())
    fix = f"only if wanted: pip install {' '.join(f'{each!r}' for each in lacking)}" if lacking else ""
    return [*checks, Check("extras", "ok", told, fix, extras)]


def disk(folder: Path, needed: float = 0.0) -> Check:
    """Room for checkpoints where the run will lie."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    told = f"{free / 2**30:.1f} GiB free at {place}" + (
        f", this recipe may take {needed / 2**30:.1f}" if needed else ""
    )
    facts = {"free_bytes": free, "needed_bytes": round(needed)}
    if needed > free:
        return Check("disk", "fail", told, "another output_dir with more room, or a smaller save_total_limit", facts)
    if not os.access(place, os.W_OK):
        return Check("disk", "fail", f"{place} cannot be written", "another output_dir", facts)
    return Check("disk", "warn" if free < SMALLEST_DISK else "ok", told,
                 "free some space: a full disk ends a run" if free < SMALLEST_DISK else "", facts)  # fmt: skip


def shared_memory() -> Check:
    """Ranks of one machine exchange through it."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Check("shared memory", "warn", "there is no /dev/shm", "mount one: emptyDir with medium Memory in a pod")
    total = shutil.disk_usage(place).total
    told = f"{total / 2**30:.2f} GiB at /dev/shm"
    if total < SMALLEST_SHM:
        fix = (
            "several GPUs of one machine want 1 GiB and more: mount an emptyDir with medium Memory at /dev/shm, "
            "or docker run --shm-size 8g"
        )
        return Check("shared memory", "warn", told, fix, {"bytes": total})
    return Check("shared memory", "ok", told, facts={"bytes": total})


def caches() -> Check:
    """Where converted models and the hub's files go."""
    places = {"modelwright": cache_dir(), "hub": hub_cache()}
    told = ", ".join(f"{name} {path}" for name, path in places.items())
    for path in places.values():
        near = path
        while not near.exists() and near != near.parent:
            near = near.parent
        if not os.access(near, os.W_OK | os.X_OK):
            fix = "export MODELWRIGHT_CACHE and HF_HOME to folders that can be written"
            return Check("caches", "warn", f"{path} cannot be written", fix)
    return Check("caches", "ok", told)


def hub(needed: str | None = None) -> list[Check]:
    """The token, and whether the hub can be reached; `needed` names what is only there."""
    token = bool(os.environ.get("HF_TOKEN")) or (hub_cache().parent / "token").is_file()
    told = "a token is set" if token else "no token: gated models, such as Gemma, are refused"
    fix = "" if token else "export HF_TOKEN, or: hf auth login"
    checks = [Check("hub token", "ok" if token or not needed else "warn", told, fix)]
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "ON"):
        bad = f"; {needed} is not on this machine" if needed else ""
        mend = "unset HF_HUB_OFFLINE, or put the files into a folder and name that" if needed else ""
        return [*checks, Check("hub", "fail" if needed else "skip", f"HF_HUB_OFFLINE is set{bad}", mend)]
    try:
        with socket.create_connection(HUB, timeout=PATIENCE):
            return [*checks, Check("hub", "ok", f"{HUB[0]} answers")]
    except OSError as error:
        reason = f"{HUB[0]} cannot be reached ({error.strerror or error})"
        if needed:
            mend = f"{needed} is only there: open the network or a proxy, or put it into a folder and name that"
            return [*checks, Check("hub", "fail", reason, mend)]
        return [*checks, Check("hub", "ok", f"{reason}; nothing here needs it")]


def ports(needed: bool = False) -> Check:
    """Whether the usual meeting points are free."""
    taken = [port for port in PORTS if not _free(port)]
    told = f"{', '.join(map(str, taken))} taken" if taken else f"{', '.join(map(str, PORTS))} free"
    fix = "choose another: --master-port, or MASTER_PORT" if taken else ""
    return Check("ports", "warn" if taken and needed else "ok", told, fix, {"taken": taken})


def clocks() -> Check:
    """Nodes whose clocks differ by more than a minute do not find each other."""
    synchronised = clock.synchronised()
    if synchronised is None:
        return Check("clock", "skip", "this system does not say whether its clock is set by the network")
    if synchronised:
        return Check("clock", "ok", "set by the network")
    fix = "for several nodes start chrony or ntp: with 90 s between two clocks each node trains alone"
    return Check("clock", "warn", "not known to be set by the network", fix)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
