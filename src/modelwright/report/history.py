"""Replay the journal of a run: bounded metric series, the last event of each kind, seconds by category."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from modelwright.errors import GateClosed
from modelwright.report.formatting import truncate
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Event

TIME_CATEGORIES = {
    "imports": "from the command to the first line of the journal",
    "data": "reading, preparing and tokenizing rows",
    "model": "loading or initializing the model",
    "precompute": "outputs of frozen layers, log-probs of the reference model",
    "startup": "plan, engine, resuming from a checkpoint",
    "compile": "time of the first step after a start beyond that of the next: compilation, warm-up",
    "productive": "steps whose result is kept",
    "evaluation": "held-out loss, and the section evaluate",
    "checkpoint": "training blocked by checkpoints",
    "final_model": "writing the model, comparing it with the trained one, freeing its memory",
    "answers": "sampled answers before and after training",
    "gate": "verdicts, summary, model card",
    "lost_progress": "steps repeated after a stop or a bad step, and skipped steps",
    "downtime": "between a stop and the next start",
}
"""Every category of time, in order; as in Google's ml-goodput-measurement, with more parts of a start and an end."""
SPANS = {
    **dict.fromkeys(("load data", "tokenize", "prepare"), "data"),
    **dict.fromkeys(("load tokenizer", "load model", "init"), "model"),
    **dict.fromkeys(("check", "plan", "engine"), "startup"),
    **dict.fromkeys(("final model", "free memory"), "final_model"),
    **{"compile": "compile", "precompute": "precompute", "answers": "answers", "evaluate": "evaluation"},
}
"""The category of each span in the journal."""
STAGE_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
EVENT_CATEGORIES = {"evaluation": "evaluation", "evaluating": "evaluation", "verdict": "gate", "done": "gate"}
"""The category of the time before an event."""


class TimeBreakdown:
    """Seconds of a run by category; they sum up to its duration."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)
        self._productive: dict[str, float] = {}
        self._productive_at_checkpoint: dict[tuple[str, int], float] = {}
        self._last_time: float | None = None
        self._ended = self._was_ended = False
        self._training = False
        self._seconds_at_end: dict[str, float] | None = None
        self._first_step: tuple[str, float] | None = None
        self._steps: dict[str, int] = {}
        self._recent: deque[tuple[str, float]] = deque(maxlen=1000)

    def add(self, event: Event) -> None:
        """Add the time since the previous event."""
        now = float(event["time"])
        elapsed = max(0.0, now - self._last_time) if self._last_time is not None else 0.0
        self._last_time = now
        kind, stage = event["event"], str(event.get("stage", ""))
        if kind in ("step", "evaluation", "evaluate_result") or (kind == "answers" and not event.get("cached")):
            self._seconds_at_end = None
        if kind == "run":
            self._split_first_step(0.0)
            imports = float(event.get("import_seconds") or 0.0)
            self._seconds_at_end = dict(self._seconds) if self._ended else None
            self._seconds["imports"] += imports
            self._seconds["downtime"] += 0.0 if self._ended else max(0.0, elapsed - imports)
            self._was_ended, self._ended, self._training = self._ended, False, False
        elif kind == "span":
            self._end_span(event, elapsed)
        elif kind == "step":
            self._step(event, stage, elapsed)
        elif kind in ("checkpoint_started", "checkpoint_saved"):
            saving = min(elapsed, float(event.get("blocked_seconds", event.get("seconds")) or 0.0))
            self._seconds["checkpoint"] += saving
            self._add_productive(stage, elapsed - saving)
            if event.get("async_save"):
                return  # its state was copied at checkpoint_started
            self._productive_at_checkpoint[stage, int(event["step"])] = self._productive.get(stage, 0.0)
            self._productive_at_checkpoint = dict(list(self._productive_at_checkpoint.items())[-1000:])
        elif kind == "resumed":
            self._seconds["startup"] += elapsed
            self._rewind(stage, int(event["step"]))
        else:
            self._training = self._training and kind not in ("stage_started", "loading")
            category = EVENT_CATEGORIES.get(kind, "gate" if self._training else "startup")
            self._seconds[category] += elapsed
            self._recent.append((category, elapsed))
        if kind in ("done", "stopped"):
            # after a closed gate a person decides, which is no downtime
            untouched = self._was_ended and not self._training
            if self._seconds_at_end is not None:  # nothing was trained or measured: not the time of the run
                self._seconds = self._seconds_at_end
            self._ended = kind == "done" or untouched or event.get("exit_code") == GateClosed.exit_code
            self._split_first_step(0.0)

    def _end_span(self, event: Event, elapsed: float) -> None:
        """Book a span: the time since the last event, and that of events inside it; what is longer was before it."""
        category, seconds = SPANS.get(str(event["name"]), "startup"), float(event["seconds"])
        self._seconds[category] += min(elapsed, seconds)
        self._seconds["gate" if self._training else "startup"] += max(0.0, elapsed - seconds)
        left = seconds - elapsed
        while self._recent and left > 0:
            previous, recent = self._recent.pop()
            part = min(left, recent)
            self._seconds[previous] -= part
            self._seconds[category] += part
            left -= part
        self._recent.clear()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by category."""
        pending = self._first_step[1] if self._first_step else 0.0
        return {**self._seconds, "productive": sum(self._productive.values()) + pending}

    @property
    def total_seconds(self) -> float:
        """Duration of the run."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Fraction of the time spent in productive steps."""
        return self.seconds["productive"] / self.total_seconds if self.total_seconds else None

    def as_json(self) -> dict[str, Any]:
        """Goodput and seconds by category."""
        goodput = self.goodput
        return {
            "goodput": round(goodput, 4) if goodput is not None else None,
            "seconds_by_category": {category: round(seconds, 2) for category, seconds in self.seconds.items()},
        }

    def _step(self, event: Event, stage: str, elapsed: float) -> None:
        self._recent.clear()
        if int(event["step"]) <= self._steps.get(stage, 0):  # restarted without a checkpoint
            self._rewind(stage, 0)
        self._steps[stage] = int(event["step"])
        if event.get("health", "ok") not in ("ok", "overflow"):
            self._seconds["lost_progress"] += elapsed
        elif not self._training:
            self._first_step = (stage, elapsed)  # its compile time is known after the next step
        else:
            self._split_first_step(float(event.get("step_seconds") or elapsed))
            self._add_productive(stage, elapsed)
        self._training = True

    def _split_first_step(self, step_seconds: float) -> None:
        """Split the first step into step time and compile time; without a second step all of it is productive."""
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


MAX_POINTS = 400
"""Points of a curve."""
MAX_LIST_ITEMS = 100
GPU_METRICS = ("gpu_utilization", "gpu_power_watts", "gpu_temperature")
"""Fields of a step event where the GPUs could be read."""
PLOTTED_METRICS = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "images_per_second", "peak_memory_bytes",
                   "eval_loss", "eval_accuracy", *GPU_METRICS)  # fmt: skip
"""Fields of step and evaluation events that are plotted over steps."""


class BucketedSeries:
    """A metric over steps in at most MAX_POINTS buckets; their width doubles when there are more."""

    def __init__(self) -> None:
        self._width = 1
        self._buckets: dict[int, list[float]] = {}

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
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
        """Drop the values after a step, which is repeated."""
        self._buckets = {index: bucket for index, bucket in self._buckets.items() if bucket[0] <= step}

    @property
    def points(self) -> list[tuple[float, float]]:
        """The mean of each bucket, at its last step."""
        return [(bucket[0], bucket[2] / bucket[1]) for _, bucket in sorted(self._buckets.items())]

    @property
    def min_max(self) -> list[tuple[float, float, float]]:
        """Minimum and maximum of each bucket; empty where each holds one value."""
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
    """The events of one stage."""

    name: str
    """Name of the stage."""
    curves: dict[str, BucketedSeries] = field(
        default_factory=lambda: {name: BucketedSeries() for name in PLOTTED_METRICS}
    )
    """By metric."""
    last_events: dict[str, Event] = field(default_factory=dict)
    """The last event of each other kind: model, data, plan, verdict, answers, misclassified."""
    step: int = 0
    """The last step."""
    steps: int = 0
    """Total number of steps."""
    eta_seconds: float | None = None
    """Remaining time at the last step."""
    num_checkpoints: int = 0
    """Checkpoints written."""
    num_resumes: int = 0
    """Resumes from a checkpoint."""
    skipped_steps: int = 0
    """Steps without an update: spikes, overflows."""

    def add(self, event: Event) -> None:
        """Add one event of this stage."""
        kind = event["event"]
        if kind == "resumed" or (kind == "step" and event["step"] <= self.step):  # a step again: restarted
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
        elif kind not in ("evaluation", "evaluating", "note", "step_skipped", "checkpoint_started"):
            self.last_events["plan" if kind == "plan_revised" else kind] = _truncate_values(event)

    def _rewind_to(self, step: int) -> None:
        self.step = step
        for curve in self.curves.values():
            curve.truncate_after(step)


@dataclass
class RunHistory:
    """A run, replayed from its journal."""

    stages: dict[str, StageHistory] = field(default_factory=dict)
    """By name, in order."""
    last_events: dict[str, Event] = field(default_factory=dict)
    """The last event of each kind without a stage (run, loading, done, stopped), and the last verdict and answers."""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    """The last notes."""
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=40))
    """The last events."""
    time_breakdown: TimeBreakdown = field(default_factory=TimeBreakdown)
    """Seconds by category."""
    last_event: str = ""
    """Kind of the last event."""
    ended: tuple[str, Event] | None = None
    """How the run ended before its last start, where this start has changed nothing yet."""

    def add(self, event: Event) -> None:
        """Add the next event; a damaged one, or one of a later release, is ignored."""
        try:
            self.time_breakdown.add(event)
            kind = event["event"]
            self.recent.append(event)
            if kind == "note":
                self.notes.append(truncate(str(event["message"]), 500))
            if kind in ("note", "span"):
                return
            if isinstance(event.get("stage"), str):
                if not STAGE_NAME.fullmatch(event["stage"]):  # it becomes part of a path
                    return
                stage = self.stages.get(event["stage"]) or StageHistory(event["stage"])
                stage.add(event)
                self.stages[stage.name] = stage
            if kind == "run":
                last = self.last_events.get(self.last_event, {})
                closed = self.last_event == "stopped" and last.get("exit_code") == GateClosed.exit_code
                self.ended = (self.last_event, last) if self.last_event == "done" or closed else None
            elif kind == "stopped" and self.ended:  # this start was refused: the run is as it was
                kind, event = self.ended
            elif kind in ("stage_started", "step", "verdict"):
                self.ended = None
            if not isinstance(event.get("stage"), str) or kind in ("verdict", "answers"):
                self.last_events[kind] = _truncate_values(event)
            self.last_event = kind
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return

    @property
    def state(self) -> str:
        """finished, stopped, not started, or running as far as the journal shows."""
        return {"done": "finished", "stopped": "stopped"}.get(
            self.last_event, "running" if self.last_event else "not started"
        )

    @property
    def answers(self) -> Event | None:
        """The last answers before and after training."""
        return self.last_events.get("answers")


def read_history(folder: RunFolder) -> RunHistory:
    """Replay the journal of a run."""
    return replay_events(journal.read(folder.journal))


def replay_events(events: Iterable[Event]) -> RunHistory:
    """Replay events."""
    history = RunHistory()
    for event in events:
        history.add(event)
    return history


def _truncate_values(value: Any) -> Any:
    """The value with long texts and lists truncated."""
    if isinstance(value, str):
        return truncate(value)
    if isinstance(value, dict):
        return {key: _truncate_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_truncate_values(item) for item in value[:MAX_LIST_ITEMS]]
    return value
