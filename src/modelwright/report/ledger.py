"""Where the time of a run went: useful steps beside everything else, from the times in its journal alone."""

from __future__ import annotations

from typing import Any

from modelwright.runs import journal
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Event

KINDS = {
    "useful": "steps whose result is kept",
    "compile": "what the first step after a start takes beyond the next one: compiling, warming up",
    "save": "standing still for checkpoints",
    "measure": "held-out loss, answers, verdicts",
    "start": "finding model and data, loading, going on from a checkpoint",
    "redo": "steps done again after a stop or a bad step, and steps that were not trusted",
    "down": "between a stop and the next start",
}
"""What each kind of time is."""
MEASURING = frozenset({"evaluation", "answering", "answers", "mistakes", "verdict", "done"})
WAITED_FOR = 3
"""Exit code of a closed gate: what follows is a person thinking, which is no downtime."""


class Ledger:
    """Books every second between two events under one kind; the kinds sum up to the whole."""

    def __init__(self) -> None:
        self._booked = dict.fromkeys(KINDS, 0.0)
        self._useful: dict[str, float] = {}
        self._kept_at: dict[tuple[str, int], float] = {}
        self._last: float | None = None
        self._ended = False
        self._training = False
        self._first: tuple[str, float] | None = None
        self._steps: dict[str, int] = {}

    def add(self, event: Event) -> None:
        """Book the time since the event before."""
        now = float(event["time"])
        passed = max(0.0, now - self._last) if self._last is not None else 0.0
        self._last = now
        kind, stage = event["event"], str(event.get("stage", ""))
        if kind == "run":
            self._settle(0.0)
            self._booked["down"] += 0.0 if self._ended else passed
            self._ended = self._training = False
        elif kind == "step":
            self._step(event, stage, passed)
        elif kind in ("saving", "saved"):
            saving = min(passed, float(event.get("waited", event.get("seconds")) or 0.0))
            self._booked["save"] += saving
            self._add_useful(stage, passed - saving)
            if event.get("background"):
                return  # what is kept was copied when it was begun
            self._kept_at[stage, int(event["step"])] = self._useful.get(stage, 0.0)
            self._kept_at = dict(list(self._kept_at.items())[-1000:])
        elif kind == "resumed":
            self._booked["start"] += passed
            self._go_back(stage, int(event["step"]))
        else:
            self._training = self._training and kind not in ("stage", "gathering")
            self._booked["measure" if kind in MEASURING or self._training else "start"] += passed
        if kind in ("done", "stopped"):
            self._ended = kind == "done" or event.get("exit_code") == WAITED_FOR
            self._settle(0.0)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by kind."""
        waiting = self._first[1] if self._first else 0.0
        return {**self._booked, "useful": sum(self._useful.values()) + waiting}

    @property
    def whole(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """The share of the time that was useful."""
        return self.parts["useful"] / self.whole if self.whole else None

    def as_json(self) -> dict[str, Any]:
        """The goodput, and the seconds by kind."""
        goodput = self.goodput
        return {
            "goodput": round(goodput, 4) if goodput is not None else None,
            "seconds_by_kind": {kind: round(seconds, 2) for kind, seconds in self.parts.items()},
        }

    def _step(self, event: Event, stage: str, passed: float) -> None:
        if int(event["step"]) <= self._steps.get(stage, 0):  # begun anew without a checkpoint
            self._go_back(stage, 0)
        self._steps[stage] = int(event["step"])
        if event.get("health", "ok") not in ("ok", "overflow"):
            self._booked["redo"] += passed
        elif not self._training:
            self._first = (stage, passed)  # how much of it was compiling is known when the next step is
        else:
            self._settle(float(event.get("seconds") or passed))
            self._add_useful(stage, passed)
        self._training = True

    def _settle(self, usual: float) -> None:
        """Split the first step into what a step takes and what came on top; without a second one all of it is use."""
        if self._first is not None:
            stage, passed = self._first
            useful = min(passed, usual) if usual else passed
            self._add_useful(stage, useful)
            self._booked["compile"] += passed - useful
            self._first = None

    def _add_useful(self, stage: str, passed: float) -> None:
        self._useful[stage] = self._useful.get(stage, 0.0) + passed

    def _go_back(self, stage: str, step: int) -> None:
        self._steps[stage] = step
        kept = self._kept_at.get((stage, step), 0.0)
        self._booked["redo"] += max(0.0, self._useful.get(stage, 0.0) - kept)
        self._useful[stage] = min(kept, self._useful.get(stage, 0.0))


def ledger_of(folder: RunFolder) -> Ledger:
    """The ledger of a run as its journal stands."""
    ledger = Ledger()
    for event in journal.read(folder.journal):
        ledger.add(event)
    return ledger
