"""Another user of this machine, who may run this interpreter although the home that it lies in is closed to others."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def as_user(user: int, group: int) -> list[str]:
    """Words before a command that is to run as this user, in a mount namespace where it can be run."""
    who = f"setpriv --reuid={user} --regid={group} --clear-groups"
    return ["unshare", "--mount", "bash", "-c", f'{reachable()}exec {who} "$@"', "-"]


@cache
def impossible() -> str | None:
    """Why another user cannot run this interpreter here, where it is so."""
    if sys.platform != "linux":
        return "needs Linux's mount namespaces"
    try:
        command = [*as_user(1234, 1234), sys.executable, "-c", "import os; print(os.getuid())"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd="/")
    except FileNotFoundError as error:
        return f"needs {error.filename}"
    return None if done.stdout.strip() == "1234" else f"no other user can run Python here: {done.stderr.strip()[:200]}"


def reachable() -> str:
    """Shell that hides each closed folder on the way to Python and to us behind one that holds just these."""
    wanted = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    places = sorted(place for place in wanted if not wanted & set(place.parents))
    closed = {top: place for place in places for top in reversed(place.parents) if not top.stat().st_mode & 0o001}
    tops = [top for top in closed if not closed.keys() & set(top.parents)]
    lines = []
    for number, top in enumerate(tops):
        inside = [place for place in places if top in place.parents]
        held = [f"$held/{number}-{each}" for each in range(len(inside))]
        lines += [f"mkdir -p {keep} && mount --bind {place} {keep}" for place, keep in zip(inside, held, strict=True)]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {top}")
        lines += [f"mkdir -p {place} && mount --bind {keep} {place}" for place, keep in zip(inside, held, strict=True)]
    made = "held=$(mktemp -d) && mount -t tmpfs tmpfs $held"
    return "".join(f"{line} && " for line in [made, *lines]) if lines else ""
