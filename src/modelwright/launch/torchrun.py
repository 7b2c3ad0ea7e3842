"""torchrun that exits with the code of the rank that failed first: ``python -m modelwright.launch.torchrun SCRIPT``.

torchrun itself always exits with 1, so a cluster could not tell a closed gate from a lost node. And a restarted pod
that is back before the first pod has exited would join the old rendezvous, and all pods would wait forever."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from modelwright.errors import Interrupted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


POLL_INTERVAL = 0.2
WAIT_LOG_INTERVAL = 30.0
JOIN_TIMEOUT = 900
"""How long the first pod may take to be there; torchrun itself waits as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments, and return what the pod should end with."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        handle_signals_while_waiting(os.environ)
        wait_for_new_rendezvous(os.environ)
        run.main(list(sys.argv[1:] if arguments is None else arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return shell_exit_code(failure.exitcode)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}; the run resumes from its last checkpoint", file=sys.stderr)
        return Interrupted.exit_code
    return 0


def handle_signals_while_waiting(environ: Mapping[str, str]) -> None:
    """Until ranks run, exit on SIGTERM at once, and print now and then which pods are awaited.

    A pod's first process has no default handler, and torch waits for the other pods in C++, where Python's handlers do
    not run; so threads do both. They stop when torch has set its own handler, which it does as it starts the ranks.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, _exit_while_waiting)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch_signals() -> None:
        while signum := os.read(reader, 1)[0]:
            if signum == signal.SIGTERM and _is_waiting():
                print("stopped by SIGTERM while waiting for other pods", file=sys.stderr, flush=True)
                os._exit(Interrupted.exit_code)

    def print_awaited() -> None:
        while _is_waiting():
            time.sleep(WAIT_LOG_INTERVAL)
            if _is_waiting() and (awaited := awaited_nodes(environ)):
                print(f"node {environ.get('PET_NODE_RANK', '0')} is waiting for {awaited}", file=sys.stderr, flush=True)

    for action in (watch_signals, print_awaited):
        threading.Thread(target=action, daemon=True).start()


def _exit_while_waiting(signum: int, frame: object) -> None:
    sys.exit(Interrupted.exit_code)


def _is_waiting() -> bool:
    return signal.getsignal(signal.SIGTERM) is _exit_while_waiting


def awaited_nodes(environ: Mapping[str, str]) -> str:
    """The nodes that have not reached node 0's store, or node 0 itself; empty if all are there."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    nnodes, address = environ.get("PET_NNODES", "1").rpartition(":")[2], environ.get("PET_MASTER_ADDR")
    port = environ.get("PET_MASTER_PORT", "")
    if nnodes == "1" or not nnodes.isdigit() or not address or not port.isdigit():
        return ""
    try:
        socket.create_connection((address, int(port)), timeout=2.0).close()
        store = TCPStore(address, int(port), None, False, timedelta(seconds=5), False)
        missing = [str(node) for node in range(1, int(nnodes)) if not store.check([f"modelwright/node/{node}"])]
    except (OSError, RuntimeError):
        return f"node 0 at {address}:{port}"
    return f"node {', '.join(missing)}" if missing else ""


def wait_for_new_rendezvous(environ: Mapping[str, str]) -> None:
    """If this pod had joined this rendezvous before a restart, wait until the first pod opens a new one."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    node_rank, nnodes = environ.get("PET_NODE_RANK", "0"), environ.get("PET_NNODES", "1")
    master_addr, master_port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", "")
    if node_rank == "0" or nnodes == "1" or not master_addr or not master_port.isdigit():
        return
    key = f"modelwright/node/{node_rank}"
    with suppress(RuntimeError):  # nobody is there: torchrun reports that itself
        while _joined_before(
            TCPStore(master_addr, int(master_port), None, False, timedelta(seconds=JOIN_TIMEOUT), False), key
        ):
            time.sleep(POLL_INTERVAL)


def _joined_before(store: TCPStore, key: str) -> bool:
    """Whether this pod joined this rendezvous before; returns when its store has closed."""
    try:
        if store.add(key, 1) == 1:
            return False
        while True:
            time.sleep(POLL_INTERVAL)
            store.add(key, 0)
    except RuntimeError:
        return True


def shell_exit_code(exit_code: int) -> int:
    """An exit code as a shell reports it: 128 + signal number."""
    return 128 - exit_code if exit_code < 0 else exit_code


if __name__ == "__main__":
    sys.exit(main())
