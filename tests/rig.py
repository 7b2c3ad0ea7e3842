"""The rig of the benchmark; tests may inject any Python as a fault: `rig.run(["run", recipe], folder, first=CODE)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.bench import rig as bench
from modelwright.bench.rig import Call, Trial, free_port, steps_of, told, trace, wait_for_step

__all__ = ["SLOW", "Rig", "Trial", "free_port", "steps_of", "told", "trace", "wait_for_step"]

SLOW = "from modelwright.bench.injections import slow_steps\nslow_steps(0.08)"
"""Put first in a trial, this makes steps slow enough to be met on the way."""


class Rig(bench.Rig):
    """The preloaded interpreter."""

    def start(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, first: Any = ""
    ) -> Trial:
        """Start `modelwright ARGUMENTS`; `first` is Python that the process runs before."""
        if isinstance(first, str) and first:
            code = folder / f"first-{self._trials + 1}.py"
            code.write_text(first, encoding="utf-8")
            first = [Call("runpy", "run_path", (str(code),))]
        return super().start(arguments, folder, environ, first)
