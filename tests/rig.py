"""The rig of the benchmark; tests may inject any Python as a fault: `rig.run(["run", recipe], folder, first=CODE)`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults import rig as bench
from tests.faults.rig import Call, Trial, free_port, steps_of, told, trace, wait_for_step

__all__ = ["HELD", "SLOW", "Rig", "Trial", "free_port", "slow_after", "steps_of", "told", "trace", "wait_for_step"]

SLOW = """
import time
from modelwright.engine.trainer import Engine
quick = Engine._step
def slow(self, stop_asked):
    time.sleep(0.08)
    return quick(self, stop_asked)
Engine._step = slow
"""
"""Put first in a trial, this makes steps slow enough to be met on the way."""
HELD = """
import time
from pathlib import Path
from modelwright.engine.trainer import Engine
quick = Engine._step
def held(self, stop_asked):
    deadline = time.monotonic() + 120
    while self.cursor.step >= 2 and not Path("go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return quick(self, stop_asked)
Engine._step = held
"""
"""Put first in a trial, this holds it after its second step until there is a file `go` in its folder."""
DOOR = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import door
door.serve(Path({folder!r}), {first!r})
"""


def slow_after(step: int, before: float = 0.02, after: float = 3.0) -> str:
    """Put first in a trial, this makes it dawdle once a step is done, so that even a busy machine meets it there."""
    return f"""
import time
from modelwright.engine.trainer import Engine
quick = Engine._step
def slow(self, stop_asked):
    time.sleep({after} if self.cursor.step >= {step} else {before})
    return quick(self, stop_asked)
Engine._step = slow
"""


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

    def door(self, folder: Path, first: str = "") -> None:
        """Have the `python` of the pods that see this folder fork from here, as long as the rig lives; see door.py."""
        code = folder / "door.py"
        tests = str(Path(__file__).parent)
        code.write_text(DOOR.format(tests=tests, folder=str(folder), first=first), encoding="utf-8")
        trial = self.fork(Call("runpy", "run_path", (str(code),)), folder)
        deadline = time.monotonic() + 120
        while not trial.log.exists() or "open" not in trial.output:
            assert time.monotonic() < deadline, trial.output
            time.sleep(0.05)
