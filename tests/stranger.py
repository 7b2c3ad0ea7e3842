"""Another user of this machine, who may run this interpreter although the home that it lies in is closed to others."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.faults.places import reachable

ROOT = Path(__file__).parents[1]


def as_user(user: int, group: int) -> list[str]:
    """Words before a command that is to run as this user, in a mount namespace where it can be run."""
    who = f"setpriv --reuid={user} --regid={group} --clear-groups"
    return ["unshare", "--mount", "bash", "-c", f'{reachable(ROOT)}exec {who} "$@"', "-"]


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
