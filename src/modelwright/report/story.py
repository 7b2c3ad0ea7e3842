"""What a journal says so far, fed event by event: as much as a page shows, and no more however long the run is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from modelwright.report.ledger import Ledger
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Event

MOST_BUCKETS = 400
"""Points of a curve; about as many as a screen has places for."""
LONGEST_TEXT = 4000
"""Characters of a model's text that are kept; what was cut is counted."""
MOST_ANSWERS = 100
CURVES = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "eval_loss", "eval_accuracy")
"""What a step or an evaluation tells that is drawn over steps."""


class Curve:
    """Values over steps in a bounded number of buckets, which double in width when there are too many."""

    def __init__(self) -> None:
        self._width = 1
        self._buckets: dict[int, list[float]] = {}

    def add(self, step: int, value: float) -> None:
        """Put a value where its step belongs."""
        place = step // self._width
        bucket = self._buckets.get(place)
        if bucket is None:
            self._buckets[place] = [step, 1, value, value, value]
            while len(self._buckets) > MOST_BUCKETS:
                self._widen()
            return
        bucket[0] = step
        bucket[1] += 1
        bucket[2] += value
        if value < bucket[3]:
            bucket[3] = value
        elif value > bucket[4]:
            bucket[4] = value

    def back_to(self, step: int) -> None:
        """Forget what came after a step: it is done again."""
        self._buckets = {place: bucket for place, bucket in self._buckets.items() if bucket[0] <= step}

    @property
    def points(self) -> list[tuple[float, float]]:
        """The mean of each bucket, at its last step."""
        return [(bucket[0], bucket[2] / bucket[1]) for _, bucket in sorted(self._buckets.items())]

    @property
    def band(self) -> list[tuple[float, float, float]]:
        """The lowest and highest of each bucket; nothing where each holds one value."""
        buckets = [bucket for _, bucket in sorted(self._buckets.items())]
        return [(b[0], b[3], b[4]) for b in buckets] if any(bucket[1] > 1 for bucket in buckets) else []

    @property
    def last(self) -> float | None:
        """The newest value, or the mean of the newest bucket."""
        return self.points[-1][1] if self._buckets else None

    def _widen(self) -> None:
        self._width *= 2
        merged: dict[int, list[float]] = {}
        for place, bucket in sorted(self._buckets.items()):
            other = merged.get(place // 2)
            if other is None:
                merged[place // 2] = bucket
                continue
            low, high = min(other[3], bucket[3]), max(other[4], bucket[4])
            merged[place // 2] = [bucket[0], other[1] + bucket[1], other[2] + bucket[2], low, high]
        self._buckets = merged


@dataclass
class StageStory:
    """What happened in one stage."""

    name: str
    """Which one."""
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in CURVES})
    """By what they show."""
    facts: dict[str, Event] = field(default_factory=dict)
    """The last event of each other kind: model, data, plan, verdict, answers, mistakes."""
    step: int = 0
    """The last step told."""
    steps: int = 0
    """Steps in all."""
    eta_seconds: float | None = None
    """Time left, by the last step."""
    saved: int = 0
    """Checkpoints written."""
    resumed: int = 0
    """Times it went on from a checkpoint."""
    skipped: int = 0
    """Steps the guard did not trust."""

    def add(self, event: Event) -> None:
        """Take in one event of this stage."""
        kind = event["event"]
        if kind == "resumed" or (kind == "step" and event["step"] <= self.step):  # the second begun anew, from nothing
            self._go_back_to(event["step"] - (kind == "step"))
        if kind in ("step", "evaluation"):
            for name, curve in self.curves.items():
                value = event.get(name)
                if value is not None:
                    curve.add(event["step"], float(value))
        if kind == "step":
            self.step, self.steps, self.eta_seconds = event["step"], event["steps"], event.get("eta_seconds")
            self.skipped += event.get("health", "ok") != "ok"
        elif kind == "resumed":
            self.resumed += 1
        elif kind == "saved":
            self.saved += 1
        elif kind not in ("evaluation", "note", "skipped", "saving"):
            self.facts[kind] = _short(event)

    def _go_back_to(self, step: int) -> None:
        self.step = step
        for curve in self.curves.values():
            curve.back_to(step)


@dataclass
class Story:
    """A run as its journal tells it."""

    stages: dict[str, StageStory] = field(default_factory=dict)
    """By name, in the order they happened."""
    facts: dict[str, Event] = field(default_factory=dict)
    """The last event of each kind that belongs to no stage: run, gathering, done, stopped."""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    """The last notes."""
    ledger: Ledger = field(default_factory=Ledger)
    """Where the time went."""
    last: str = ""
    """The kind of the newest event."""

    def add(self, event: Event) -> None:
        """Take in the next event; one of a later release, or a damaged one, changes nothing."""
        try:
            self.ledger.add(event)
            kind = event["event"]
            if kind == "note":
                self.notes.append(cut(str(event["message"]), 500))
                return
            if isinstance(event.get("stage"), str):
                stage = self.stages.get(event["stage"]) or StageStory(event["stage"])
                stage.add(event)
                self.stages[stage.name] = stage
            else:
                self.facts[kind] = _short(event)
            self.last = kind
        except (KeyError, TypeError, ValueError):
            return

    @property
    def state(self) -> str:
        """Finished, stopped, or (as far as the journal knows) going on."""
        return {"done": "finished", "stopped": "stopped"}.get(self.last, "going on" if self.last else "not begun")

    @property
    def answers(self) -> Event | None:
        """The newest before and after."""
        return next((s.facts["answers"] for s in reversed(self.stages.values()) if "answers" in s.facts), None)


def story_of(folder: RunFolder) -> Story:
    """The whole journal of a run."""
    return tell(journal.read(folder.journal))


def tell(events: Iterable[Event]) -> Story:
    """Take in many events."""
    story = Story()
    for event in events:
        story.add(event)
    return story


def cut(text: str, most: int = LONGEST_TEXT) -> str:
    """A text no longer than a page bears, with the number of characters that are missing."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def _short(value: Any) -> Any:
    """The same value with its long texts and lists cut."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value[:MOST_ANSWERS]]
    return value
