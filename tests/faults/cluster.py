"""Two nodes on one machine: network namespaces joined by a cable that can be pulled. Needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import children_of, environment
from modelwright.runs.heartbeat import process_state

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def missing() -> str | None:
    """What this machine lacks for it, or None."""
    if os.geteuid() != 0:
        return "needs root: network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip"
    name = f"mw-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


@dataclass
class Process:
    """One node's launcher, and everything below it."""

    popen: subprocess.Popen[bytes]
    """The launcher."""
    log: Path
    """What it printed."""
    ended_at: float | None = None
    """When it was first seen gone."""

    @property
    def output(self) -> str:
        """Everything it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def below(self) -> list[int]:
        """Every process that it started, and they did."""
        return children_of(self.popen.pid)

    def kill(self) -> list[int]:
        """End the launcher alone, at once; returns what was below it."""
        below = self.below()
        self.popen.kill()
        self.popen.wait()
        return below


@dataclass
class Cluster:
    """The namespaces while they last."""

    names: tuple[str, str]
    """The two nodes."""
    processes: list[Process] = field(default_factory=list)
    """What was started in them."""

    def start(self, node: int, words: list[str], folder: Path, prefix: tuple[str, ...] = ()) -> Process:
        """Start a Python module on a node."""
        place = folder / f"node-{node}"
        place.mkdir(exist_ok=True)
        log = folder / f"node-{node}-{len(self.processes)}.log"
        command = ["ip", "netns", "exec", self.names[node], *prefix, sys.executable, "-m", *words]
        popen = subprocess.Popen(
            command,
            cwd=folder,
            env=environment({"TMPDIR": str(place)}),
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.processes.append(Process(popen, log))
        return self.processes[-1]

    def link(self, state: str) -> None:
        """Pull the cable (`down`) or put it back (`up`)."""
        subprocess.run(["ip", "-n", self.names[0], "link", "set", "mw0", state], check=True)


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, at);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += SECONDS;
    return code;
}
"""
"""A clock that is wrong for whoever is started with it, and for nothing else that tells time."""


def wrong_clock(folder: Path, seconds: int) -> tuple[str, ...] | None:
    """Words to put before a command, so that its wall clock is ahead; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK.replace("SECONDS", str(seconds)), encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return ("env", f"LD_PRELOAD={library}")


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Two nodes for the length of the block; whatever was started in them ends with it."""
    names = (f"mw-a-{os.getpid()}", f"mw-b-{os.getpid()}")
    made = Cluster(names)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "mw0", "netns", names[0], "type", "veth", "peer", "name", "mw0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "mw0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "mw0", "up")
        yield made
    finally:
        for process in made.processes:
            if process.popen.poll() is None:
                process.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def left_of(pids: list[int], seconds: float) -> list[int]:
    """Which of these processes are still there after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process_state(pid) not in (None, "Z", "X") for pid in pids):
        time.sleep(0.1)
    return [pid for pid in pids if process_state(pid) not in (None, "Z", "X")]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
