"""torchrun, ending with the exit code of the rank that failed first: ``python -m modelwright.launch.torchrun SCRIPT``.

torchrun itself ends with 1 whatever happened, so that a cluster could not tell a closed gate from a lost node. And a
lost pod that is back before the first pod has ended would join the meeting that is over: all would wait in vain.
"""

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

LOOK_SECONDS = 0.2
JOIN_SECONDS = 900
"""How long the first pod may take to be there; torchrun itself waits as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments, and return what the pod should end with."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        wait_for_a_new_meeting(os.environ)
        run.main(list(sys.argv[1:] if arguments is None else arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return code_of(failure.exitcode)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}; the run goes on from its last checkpoint", file=sys.stderr)
        return Interrupted.exit_code
    return 0


def wait_for_a_new_meeting(environ: Mapping[str, str]) -> None:
    """Where this pod was at the meeting already, in an earlier life, wait until the first pod calls a new one."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    node, nodes = environ.get("PET_NODE_RANK", "0"), environ.get("PET_NNODES", "1")
    address, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", "")
    if node == "0" or nodes == "1" or not address or not port.isdigit():
        return
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(Interrupted.exit_code)
    )  # a pod's first process has none
    key = f"modelwright/node/{node}"
    with suppress(RuntimeError):  # nobody is there: torchrun tells that itself
        while _was_there(TCPStore(address, int(port), None, False, timedelta(seconds=JOIN_SECONDS), False), key):
            time.sleep(LOOK_SECONDS)


def _was_there(store: TCPStore, key: str) -> bool:
    """Whether this pod was at this meeting before; told once that meeting is over, which is an error of its store."""
    try:
        if store.add(key, 1) == 1:
            return False
        while True:
            time.sleep(LOOK_SECONDS)
            store.add(key, 0)
    except RuntimeError:
        return True


def code_of(status: int) -> int:
    """An exit code as a shell tells it: a signal is 128 and its number."""
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
