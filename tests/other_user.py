"""Run commands as another user of this machine, although this interpreter lies in a home closed to others."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.faults.environment import bind_mount_script

ROOT = Path(__file__).parents[1]


def as_user(user: int, group: int) -> list[str]:
    """Words before a command that run it as this user, in a mount namespace where the interpreter is readable."""
    command = f"setpriv --reuid={user} --regid={group} --clear-groups"
    return ["unshare", "--mount", "bash", "-c", f'{bind_mount_script(ROOT)}exec {command} "$@"', "-"]


@cache
def unavailable() -> str | None:
    """Why another user cannot run this interpreter here, or None."""
    if sys.platform != "linux":
        return "needs Linux's mount namespaces"
    try:
        command = [*as_user(1234, 1234), sys.executable, "-c", "import os; print(os.getuid())"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd="/")
    except FileNotFoundError as error:
        return f"needs {error.filename}"
    return None if done.stdout.strip() == "1234" else f"no other user can run Python here: {done.stderr.strip()[:200]}"
