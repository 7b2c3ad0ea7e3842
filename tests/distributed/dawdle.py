"""A launch of two ranks of which one dawdles on its way out: `python -m dawdle RECIPE RANK`.

It has read or heard the message, and goes on only when the agent, whom the other rank has left, asks it to go.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from types import FrameType

PATIENCE_SECONDS = 100.0


def main() -> None:
    """Launch, and leave with its exit code."""
    from modelwright.launch.config import NodeOptions, build_launch_config
    from modelwright.launch.supervisor import supervise
    from modelwright.recipe.load import load

    recipe, os.environ["DAWDLER"] = sys.argv[1:]
    config = build_launch_config(
        load(recipe), ("run", recipe, "--log-format", "plain"), NodeOptions(nproc_per_node="2"), 3
    )
    code, message = supervise(replace(config, forkserver_preload=("modelwright.stages.pipeline", "dawdle")))
    print(message, file=sys.stderr)
    sys.exit(code)


def dawdle() -> None:
    """In a rank: hold the way out of one of them until it is asked to go."""
    from modelwright.runs.journal import Journal
    from modelwright.stages import pipeline
    from modelwright.stages.context import GracefulShutdown

    stop_requested, on_signal, log_stopped = threading.Event(), GracefulShutdown._on_signal, pipeline._log_stopped

    def set_and_stop(self: GracefulShutdown, number: int, frame: FrameType | None) -> None:
        stop_requested.set()
        on_signal(self, number, frame)

    def wait_and_log(journal: Journal, error: Exception) -> None:
        if os.environ["RANK"] == os.environ["DAWDLER"]:
            assert stop_requested.wait(PATIENCE_SECONDS), "nobody asked this rank to go"
        log_stopped(journal, error)  # type: ignore[arg-type]

    GracefulShutdown._on_signal, pipeline._log_stopped = set_and_stop, wait_and_log  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
else:
    dawdle()
