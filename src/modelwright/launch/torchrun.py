"""torchrun, ending with the exit code of the rank that failed first: ``python -m modelwright.launch.torchrun SCRIPT``.

torchrun itself ends with 1 whatever happened, so that a cluster could not tell a closed gate from a lost node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from modelwright.errors import Interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments, and return what the pod should end with."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(list(sys.argv[1:] if arguments is None else arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return code_of(failure.exitcode)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}; the run goes on from its last checkpoint", file=sys.stderr)
        return Interrupted.exit_code
    return 0


def code_of(status: int) -> int:
    """An exit code as a shell tells it: a signal is 128 and its number."""
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
