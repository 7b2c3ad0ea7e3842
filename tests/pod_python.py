"""A `python` for simulated pods that costs next to nothing: a shim asks a preloaded interpreter to fork instead.

The fork enters the namespaces, the root, the folder and the user of the shim's process, with its files and variables.
It is killed with it, receives its signals, and its exit code is passed on. So a pod behaves as with an interpreter of
its own, except that the libraries are imported already.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelwright.cluster.sandbox import process_tree
from modelwright.runs.heartbeat import set_pdeathsig
from tests.faults.fork_server import exit_after

SHIM = """#!{python} -ISB
import json, os, signal, socket, sys
folder, name = os.path.split(os.environ["POD_PYTHON_SOCKET"])
here = os.getcwd()
os.chdir(folder)  # a socket address has a limited length
connection = socket.socket(socket.AF_UNIX)
connection.connect(name)
os.chdir(here)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: connection.send(bytes([number])))
request = {{"arguments": sys.argv[1:], "environ": dict(os.environ), "folder": here}}
socket.send_fds(connection, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
answer = b""
while part := connection.recv(64):
    answer += part
code = int(answer or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code if code >= 0 else 128 - code)
"""
NAMESPACES = ("net", "uts", "pid", "mnt")
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, CAPABILITIES = 24, 38, 41


def write_shim(folder: Path) -> None:
    """Write the `python` shim into a folder that the pods mount."""
    shim = folder / "python"
    shim.write_text(SHIM.format(python=sys.executable), encoding="utf-8")
    shim.chmod(0o755)


def serve(folder: Path, first: str) -> None:
    """Serve fork requests until the parent ends; `first` is Python that each fork runs before."""
    import torch.distributed.run  # noqa: F401

    set_pdeathsig()
    write_shim(folder)
    os.chdir(folder)
    Path("python.sock").unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind("python.sock")
    Path("python.sock").chmod(0o777)
    server.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are not waited for
    print("open", flush=True)
    while True:
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            _handle(client, first)
            os._exit(0)
        client.close()


def _handle(client: socket.socket, first: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not message.endswith(b"\n"):
        message += client.recv(1 << 20)
    pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    own_pids = not _same(pid, "pid")  # in a pid namespace of its own, its descendants end with it
    if not _same(pid, "mnt"):
        _enter(pid)
    child = os.fork()
    if child == 0:
        client.close()
        _run_child(json.loads(message), files, status, first)
    for file in files:
        os.close(file)
    watch = os.pidfd_open(child)
    while watch not in (ready := select.select([client, watch], [], [])[0]):
        assert ready
        number = client.recv(1)
        if not number:  # the shim has ended: kill its fork and descendants
            for each in [child] if own_pids else process_tree(child):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            break
        with suppress(ProcessLookupError):
            os.kill(child, number[0])
    _, ended = os.waitpid(child, 0)
    with suppress(OSError):
        client.send(str(os.waitstatus_to_exitcode(ended)).encode())


def _same(pid: int, space: str) -> bool:
    return Path(f"/proc/{pid}/ns/{space}").readlink() == Path(f"/proc/self/ns/{space}").readlink()


def _enter(pid: int) -> None:
    """Enter the namespaces and root of a process; a fork from there is in its pid namespace, too."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY)
    for space in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]:
        if setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    os.fchdir(root)
    os.chroot(".")
    os.close(root)


def _run_child(request: dict[str, Any], files: list[int], status: dict[str, str], first: str) -> None:
    """In the fork: be `python ARGUMENTS` of the shim's process, then exit."""
    with exit_after():
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.umask(int(status["Umask"], 8))
        user, group = int(status["Uid"].split()[0]), int(status["Gid"].split()[0])
        if os.geteuid() == 0:
            prctl = ctypes.CDLL(None).prctl
            for number in range(CAPABILITIES):
                prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.environ.clear()
        os.environ.update(request["environ"])
        os.chdir(request["folder"])
        exec(first, {"__name__": "first"})
        _run([argument for argument in request["arguments"] if argument != "-u"])


def _run(arguments: list[str]) -> None:
    import runpy

    kind, what, *rest = arguments
    sys.argv = [what, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert kind == "-c"
        exec(what, {"__name__": "__main__"})
