"""torchrun that exits with the code of the rank that failed first: ``python -m modelwright.launch.torchrun SCRIPT``.

torchrun itself always exits with 1, so a cluster could not tell a closed gate from a lost node. And a restarted pod
that is back before the first pod has exited would join the old rendezvous, and all pods would wait forever."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from modelwright.errors import Interrupted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


POLL_INTERVAL = 0.2
JOIN_TIMEOUT = 900
"""How long the first pod may take to be there; torchrun itself waits as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments, and return what the pod should end with."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        wait_for_new_rendezvous(os.environ)
        run.main(list(sys.argv[1:] if arguments is None else arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return shell_exit_code(failure.exitcode)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}; the run resumes from its last checkpoint", file=sys.stderr)
        return Interrupted.exit_code
    return 0


def wait_for_new_rendezvous(environ: Mapping[str, str]) -> None:
    """If this pod had joined this rendezvous before a restart, wait until the first pod opens a new one."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    node_rank, nnodes = environ.get("PET_NODE_RANK", "0"), environ.get("PET_NNODES", "1")
    master_addr, master_port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", "")
    if node_rank == "0" or nnodes == "1" or not master_addr or not master_port.isdigit():
        return
    signal.signal(
        signal.SIGTERM, lambda signum, frame: sys.exit(Interrupted.exit_code)
    )  # a pod's first process has none
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
