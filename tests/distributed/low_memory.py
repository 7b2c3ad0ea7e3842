"""A launch of two ranks whose devices take one row at once: `python -m low_memory RECIPE`."""

from __future__ import annotations

import sys
from dataclasses import replace


def main() -> None:
    """Launch, and leave with its exit code."""
    from modelwright.launch.config import NodeOptions, build_launch_config
    from modelwright.launch.supervisor import supervise
    from modelwright.recipe.load import load

    config = build_launch_config(
        load(sys.argv[1]), ("run", sys.argv[1], "--log-format", "plain"), NodeOptions(nproc_per_node="2"), 3
    )
    code, message = supervise(replace(config, forkserver_preload=(*config.forkserver_preload, "low_memory")))
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
else:  # in a rank
    from tests.faults.injections import memory_for

    memory_for(rows=1)
