"""Imported before a rank starts, this gives every step the length of a real one, so that faults can meet it."""

from __future__ import annotations

import time

from modelwright.engine.task import StepReport
from modelwright.engine.trainer import Engine

STEP_SECONDS = 0.25

_quick = Engine._step


def _paced(self: Engine, stop_requested: bool) -> StepReport:
    time.sleep(STEP_SECONDS)
    return _quick(self, stop_requested)


Engine._step = _paced  # type: ignore[method-assign]
