"""A launch of two ranks of which one delays its exit: `python -m delayed_exit RECIPE RANK`.

It has the error message, its own or the other rank's, and exits only when the agent, after the other rank's exit, sends
it a signal.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from types import FrameType

TIMEOUT_SECONDS = 100.0


def main() -> None:
    """Launch, and leave with its exit code."""
    from modelwright.launch.config import NodeOptions, build_launch_config
    from modelwright.launch.supervisor import supervise
    from modelwright.recipe.load import load

    recipe, os.environ["DELAYED_RANK"] = sys.argv[1:]
    config = build_launch_config(
        load(recipe), ("run", recipe, "--log-format", "plain"), NodeOptions(nproc_per_node="2"), 3
    )
    code, message = supervise(replace(config, forkserver_preload=("modelwright.stages.pipeline", "delayed_exit")))
    print(message, file=sys.stderr)
    sys.exit(code)


def delay_exit() -> None:
    """In a rank: delay the exit of one of them until it gets a signal."""
    from modelwright.runs.journal import Journal
    from modelwright.stages import pipeline
    from modelwright.stages.context import GracefulShutdown

    stop_requested, on_signal, log_stopped = threading.Event(), GracefulShutdown._on_signal, pipeline._log_stopped

    def forward_signal(self: GracefulShutdown, number: int, frame: FrameType | None) -> None:
        stop_requested.set()
        on_signal(self, number, frame)

    def delayed_log(journal: Journal, error: Exception) -> None:
        if os.environ["RANK"] == os.environ["DELAYED_RANK"]:
            assert stop_requested.wait(TIMEOUT_SECONDS), "this rank got no signal"
        log_stopped(journal, error)  # type: ignore[arg-type]

    GracefulShutdown._on_signal, pipeline._log_stopped = forward_signal, delayed_log  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
else:
    delay_exit()
