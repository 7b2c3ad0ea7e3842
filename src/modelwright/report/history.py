"""Replay the journal of a run: bounded metric series, the last event of each kind, seconds by category."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from modelwright.report.formatting import truncate
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Event

TIME_CATEGORIES = {
    "productive": "steps whose result is kept",
    "compile": "what the first step after a start takes beyond the next one: compiling, warming up",
    "checkpoint": "standing still for checkpoints",
    "evaluation": "held-out loss, answers, verdicts",
    "startup": "finding model and data, loading, going on from a checkpoint",
    "lost_progress": "steps done again after a stop or a bad step, and steps that were not trusted",
    "downtime": "between a stop and the next start",
}
"""What each kind of time is."""
EVALUATION_EVENTS = frozenset({"evaluation", "sampling", "answers", "misclassified", "verdict", "done"})
GATE_CLOSED_EXIT_CODE = 3
"""Exit code of a closed gate: what follows is a person thinking, which is no downtime."""


class TimeBreakdown:
    """Books every second between two events under one kind; the kinds sum up to the whole."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)
        self._productive: dict[str, float] = {}
        self._productive_at_checkpoint: dict[tuple[str, int], float] = {}
        self._last_time: float | None = None
        self._ended = False
        self._training = False
        self._first_step: tuple[str, float] | None = None
        self._steps: dict[str, int] = {}

    def add(self, event: Event) -> None:
        """Book the time since the event before."""
        now = float(event["time"])
        elapsed = max(0.0, now - self._last_time) if self._last_time is not None else 0.0
        self._last_time = now
        kind, stage = event["event"], str(event.get("stage", ""))
        if kind == "run":
            self._split_first_step(0.0)
            self._seconds["downtime"] += 0.0 if self._ended else elapsed
            self._ended = self._training = False
        elif kind == "step":
            self._step(event, stage, elapsed)
        elif kind in ("checkpoint_started", "checkpoint_saved"):
            saving = min(elapsed, float(event.get("blocked_seconds", event.get("seconds")) or 0.0))
            self._seconds["checkpoint"] += saving
            self._add_productive(stage, elapsed - saving)
            if event.get("async_save"):
                return  # what is kept was copied when it was begun
            self._productive_at_checkpoint[stage, int(event["step"])] = self._productive.get(stage, 0.0)
            self._productive_at_checkpoint = dict(list(self._productive_at_checkpoint.items())[-1000:])
        elif kind == "resumed":
            self._seconds["startup"] += elapsed
            self._rewind(stage, int(event["step"]))
        else:
            self._training = self._training and kind not in ("stage_started", "loading")
            self._seconds["evaluation" if kind in EVALUATION_EVENTS or self._training else "startup"] += elapsed
        if kind in ("done", "stopped"):
            self._ended = kind == "done" or event.get("exit_code") == GATE_CLOSED_EXIT_CODE
            self._split_first_step(0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by kind."""
        pending = self._first_step[1] if self._first_step else 0.0
        return {**self._seconds, "productive": sum(self._productive.values()) + pending}

    @property
    def total_seconds(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The share of the time that was useful."""
        return self.seconds["productive"] / self.total_seconds if self.total_seconds else None

    def as_json(self) -> dict[str, Any]:
        """The goodput, and the seconds by kind."""
        goodput = self.goodput
        return {
            "goodput": round(goodput, 4) if goodput is not None else None,
            "seconds_by_category": {category: round(seconds, 2) for category, seconds in self.seconds.items()},
        }

    def _step(self, event: Event, stage: str, elapsed: float) -> None:
        if int(event["step"]) <= self._steps.get(stage, 0):  # begun anew without a checkpoint
            self._rewind(stage, 0)
        self._steps[stage] = int(event["step"])
        if event.get("health", "ok") not in ("ok", "overflow"):
            self._seconds["lost_progress"] += elapsed
        elif not self._training:
            self._first_step = (stage, elapsed)  # how much of it was compiling is known when the next step is
        else:
            self._split_first_step(float(event.get("step_seconds") or elapsed))
            self._add_productive(stage, elapsed)
        self._training = True

    def _split_first_step(self, step_seconds: float) -> None:
        """Split the first step into what a step takes and what came on top; without a second one all of it is use."""
        if self._first_step is not None:
            stage, elapsed = self._first_step
            productive = min(elapsed, step_seconds) if step_seconds else elapsed
            self._add_productive(stage, productive)
            self._seconds["compile"] += elapsed - productive
            self._first_step = None

    def _add_productive(self, stage: str, elapsed: float) -> None:
        self._productive[stage] = self._productive.get(stage, 0.0) + elapsed

    def _rewind(self, stage: str, step: int) -> None:
        self._steps[stage] = step
        at_checkpoint = self._productive_at_checkpoint.get((stage, step), 0.0)
        self._seconds["lost_progress"] += max(0.0, self._productive.get(stage, 0.0) - at_checkpoint)
        self._productive[stage] = min(at_checkpoint, self._productive.get(stage, 0.0))


def read_time_breakdown(folder: RunFolder) -> TimeBreakdown:
    """The ledger of a run as its journal stands."""
    breakdown = TimeBreakdown()
    for event in journal.read(folder.journal):
        breakdown.add(event)
    return breakdown


MAX_POINTS = 400
"""Points of a curve; about as many as a screen has places for."""
MAX_LIST_ITEMS = 100
PLOTTED_METRICS = (
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "peak_memory_bytes",
    "eval_loss",
    "eval_accuracy",
)
"""What a step or an evaluation tells that is drawn over steps."""


class BucketedSeries:
    """Values over steps in a bounded number of buckets, which double in width when there are too many."""

    def __init__(self) -> None:
        self._width = 1
        self._buckets: dict[int, list[float]] = {}

    def add(self, step: int, value: float) -> None:
        """Put a value where its step belongs."""
        index = step // self._width
        bucket = self._buckets.get(index)
        if bucket is None:
            self._buckets[index] = [step, 1, value, value, value]
            while len(self._buckets) > MAX_POINTS:
                self._double_width()
            return
        bucket[0] = step
        bucket[1] += 1
        bucket[2] += value
        if value < bucket[3]:
            bucket[3] = value
        elif value > bucket[4]:
            bucket[4] = value

    def truncate_after(self, step: int) -> None:
        """Forget what came after a step: it is done again."""
        self._buckets = {index: bucket for index, bucket in self._buckets.items() if bucket[0] <= step}

    @property
    def points(self) -> list[tuple[float, float]]:
        """The mean of each bucket, at its last step."""
        return [(bucket[0], bucket[2] / bucket[1]) for _, bucket in sorted(self._buckets.items())]

    @property
    def min_max(self) -> list[tuple[float, float, float]]:
        """The lowest and highest of each bucket; nothing where each holds one value."""
        buckets = [bucket for _, bucket in sorted(self._buckets.items())]
        return [(b[0], b[3], b[4]) for b in buckets] if any(bucket[1] > 1 for bucket in buckets) else []

    @property
    def latest(self) -> float | None:
        """The newest value, or the mean of the newest bucket."""
        return self.points[-1][1] if self._buckets else None

    def _double_width(self) -> None:
        self._width *= 2
        merged: dict[int, list[float]] = {}
        for index, bucket in sorted(self._buckets.items()):
            other = merged.get(index // 2)
            if other is None:
                merged[index // 2] = bucket
                continue
            low, high = min(other[3], bucket[3]), max(other[4], bucket[4])
            merged[index // 2] = [bucket[0], other[1] + bucket[1], other[2] + bucket[2], low, high]
        self._buckets = merged


@dataclass
class StageHistory:
    """What happened in one stage."""

    name: str
    """Which one."""
    curves: dict[str, BucketedSeries] = field(
        default_factory=lambda: {name: BucketedSeries() for name in PLOTTED_METRICS}
    )
    """By what they show."""
    last_events: dict[str, Event] = field(default_factory=dict)
    """The last event of each other kind: model, data, plan, verdict, answers, mistakes."""
    step: int = 0
    """The last step told."""
    steps: int = 0
    """Steps in all."""
    eta_seconds: float | None = None
    """Time left, by the last step."""
    num_checkpoints: int = 0
    """Checkpoints written."""
    num_resumes: int = 0
    """Times it went on from a checkpoint."""
    skipped_steps: int = 0
    """Steps the guard did not trust."""

    def add(self, event: Event) -> None:
        """Take in one event of this stage."""
        kind = event["event"]
        if kind == "resumed" or (kind == "step" and event["step"] <= self.step):  # the second begun anew, from nothing
            self._rewind_to(event["step"] - (kind == "step"))
        if kind in ("step", "evaluation"):
            for name, curve in self.curves.items():
                value = event.get(name)
                if value is not None:
                    curve.add(event["step"], float(value))
        if kind == "step":
            self.step, self.steps, self.eta_seconds = event["step"], event["steps"], event.get("eta_seconds")
            self.skipped_steps += event.get("health", "ok") != "ok"
        elif kind == "resumed":
            self.num_resumes += 1
        elif kind == "checkpoint_saved":
            self.num_checkpoints += 1
        elif kind not in ("evaluation", "note", "step_skipped", "checkpoint_started"):
            self.last_events[kind] = _truncate_values(event)

    def _rewind_to(self, step: int) -> None:
        self.step = step
        for curve in self.curves.values():
            curve.truncate_after(step)


@dataclass
class RunHistory:
    """A run as its journal tells it."""

    stages: dict[str, StageHistory] = field(default_factory=dict)
    """By name, in the order they happened."""
    last_events: dict[str, Event] = field(default_factory=dict)
    """The last event of each kind that belongs to no stage: run, gathering, done, stopped."""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    """The last notes."""
    time_breakdown: TimeBreakdown = field(default_factory=TimeBreakdown)
    """Time breakdown."""
    last_event: str = ""
    """The kind of the newest event."""

    def add(self, event: Event) -> None:
        """Take in the next event; one of a later release, or a damaged one, changes nothing."""
        try:
            self.time_breakdown.add(event)
            kind = event["event"]
            if kind == "note":
                self.notes.append(truncate(str(event["message"]), 500))
                return
            if isinstance(event.get("stage"), str):
                stage = self.stages.get(event["stage"]) or StageHistory(event["stage"])
                stage.add(event)
                self.stages[stage.name] = stage
            else:
                self.last_events[kind] = _truncate_values(event)
            self.last_event = kind
        except (KeyError, TypeError, ValueError):
            return

    @property
    def state(self) -> str:
        """Finished, stopped, or (as far as the journal knows) going on."""
        return {"done": "finished", "stopped": "stopped"}.get(
            self.last_event, "running" if self.last_event else "not started"
        )

    @property
    def answers(self) -> Event | None:
        """The newest before and after."""
        return next(
            (s.last_events["answers"] for s in reversed(self.stages.values()) if "answers" in s.last_events), None
        )


def read_history(folder: RunFolder) -> RunHistory:
    """The whole journal of a run."""
    return replay_events(journal.read(folder.journal))


def replay_events(events: Iterable[Event]) -> RunHistory:
    """Take in many events."""
    history = RunHistory()
    for event in events:
        history.add(event)
    return history


def _truncate_values(value: Any) -> Any:
    """The same value with its long texts and lists cut."""
    if isinstance(value, str):
        return truncate(value)
    if isinstance(value, dict):
        return {key: _truncate_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_truncate_values(item) for item in value[:MAX_LIST_ITEMS]]
    return value
