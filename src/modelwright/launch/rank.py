"""What a rank does first: die with its launcher, write its errors to its own file, then be `modelwright run`."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from modelwright.runs.beat import die_with_parent

START = "--- start of rank"
"""The line that opens each start in a rank's log."""


def be_rank(command: tuple[str, ...], logs: str, environ: dict[str, str]) -> None:
    """Run the command as the rank that the standard variables describe; leaves with its exit code."""
    die_with_parent()
    os.environ.update(environ)
    rank = os.environ["RANK"]
    _write_errors_to(log_of(Path(logs), int(rank)), rank)
    if rank != "0":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["modelwright", *command]
    try:
        runpy.run_module("modelwright", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        sys.stdout.flush()
        if stop.code not in (0, None):
            sys.stderr.flush()
            os._exit(stop.code if isinstance(stop.code, int) else 1)  # the code is ours, not the fork server's


def log_of(logs: Path, rank: int) -> Path:
    """Where a rank's errors are kept."""
    return logs / f"rank-{rank}.log"


def last_words(logs: Path, rank: int) -> str:
    """What a rank wrote since it was last started."""
    try:
        text = log_of(logs, rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(START)[2].partition("\n")[2].strip()


def _write_errors_to(path: Path, rank: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(log, f"{START} {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
    os.dup2(log, 2)
