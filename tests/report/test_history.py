"""A journal of any length becomes a page's worth of values, and every second of it is booked once."""

from __future__ import annotations

from typing import Any

import pytest

from modelwright.report.formatting import MAX_TEXT_CHARS
from modelwright.report.history import MAX_POINTS, TIME_CATEGORIES, BucketedSeries, TimeBreakdown, replay_events

START: list[dict[str, Any]] = [
    {"time": 0.0, "event": "run", "recipe": "x", "stages": ["sft"]},
    {"time": 3.0, "event": "stage_started", "stage": "sft"},
    {"time": 4.0, "event": "evaluation", "stage": "sft", "step": 0, "eval_loss": 5.0},
]


def step(time: float, number: int, seconds: float = 1.0, **facts: Any) -> dict[str, Any]:
    return {"time": time, "event": "step", "stage": "sft", "step": number, "steps": 9, "step_seconds": seconds,
            "loss": 1.0, **facts}  # fmt: skip


def saved(time: float, number: int) -> dict[str, Any]:
    return {"time": time, "event": "checkpoint_saved", "stage": "sft", "step": number, "seconds": 0.5}


def booked(events: list[dict[str, Any]]) -> dict[str, float]:
    ledger = TimeBreakdown()
    for event in events:
        ledger.add(event)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total_seconds)
    return {kind: round(seconds, 3) for kind, seconds in ledger.seconds.items() if seconds}


def test_time_is_booked_by_what_it_ended_with() -> None:
    events = [*START, step(14, 1), step(15, 2), saved(15.5, 2), {"time": 20.0, "event": "done"}]
    assert booked(events) == {"startup": 3.0, "evaluation": 1.0, "compile": 9.0, "productive": 2.0, "checkpoint": 0.5,
                              "gate": 4.5}  # fmt: skip


def span(time: float, name: str, seconds: float) -> dict[str, Any]:
    return {"time": time, "event": "span", "stage": "sft", "name": name, "seconds": seconds}


def test_a_span_has_the_time_of_the_events_inside_it_and_not_of_those_before_it() -> None:
    events = [
        {"time": 10.0, "event": "run", "recipe": "x", "import_seconds": 6.0},
        {"time": 11.0, "event": "loading", "stage": "sft"},
        {"time": 13.0, "event": "note", "stage": "sft", "message": "of the data"},
        span(14.0, "load data", 3.0),
        span(19.0, "load model", 4.0),
        step(20, 1),
        step(21, 2),
        span(25.0, "final model", 4.0),
        {"time": 27.0, "event": "sampling", "stage": "sft"},
        {"time": 28.0, "event": "answers", "stage": "sft"},
        span(28.0, "answers", 3.0),
        {"time": 28.5, "event": "verdict", "stage": "sft"},
        span(29.0, "of a later release", 0.5),
    ]
    assert booked(events) == {"imports": 6.0, "startup": 2.5, "data": 3.0, "model": 4.0, "productive": 2.0,
                              "final_model": 4.0, "answers": 3.0, "gate": 0.5}  # fmt: skip


def test_the_imports_of_the_next_start_are_no_downtime() -> None:
    again = {"time": 12.0, "event": "run", "recipe": "x", "import_seconds": 5.0}
    counts = booked([*START, step(5, 1), again])
    assert counts["downtime"] == 2.0
    assert counts["imports"] == 5.0


def test_what_was_done_after_the_last_checkpoint_was_for_nothing_when_the_run_is_killed() -> None:
    killed = [*START, step(5, 1), step(6, 2), saved(6.5, 2), step(7.5, 3), step(8.5, 4)]
    again = [
        {"time": 20.0, "event": "run", "recipe": "x"},
        {"time": 22.0, "event": "resumed", "stage": "sft", "step": 2, "steps": 9},
        step(23, 3),
        step(24, 4),
        {"time": 24.0, "event": "done"},
    ]
    counts = booked([*killed, *again])
    assert counts == {
        "productive": 4.0,
        "checkpoint": 0.5,
        "evaluation": 1.0,
        "startup": 5.0,
        "lost_progress": 2.0,
        "downtime": 11.5,
    }


def test_a_run_killed_before_its_first_checkpoint_starts_over() -> None:
    counts = booked(
        [*START, step(5, 1), step(6, 2), {"time": 10.0, "event": "run"}, step(12, 1, 2.0), step(14, 2, 2.0)]
    )
    assert counts["lost_progress"] == 2.0
    assert counts["productive"] == 4.0


def test_steps_that_were_not_trusted_are_no_use() -> None:
    assert booked([*START, step(5, 1), step(6, 2), step(7, 3, health="spike")])["lost_progress"] == 1.0


@pytest.mark.parametrize("end", [{"event": "done"}, {"event": "stopped", "exit_code": 77}])
def test_a_finished_run_that_is_started_again_keeps_its_goodput(end: dict[str, Any]) -> None:
    finished = [*START, step(5, 1), {"time": 6.0, "event": "done"}]
    again = {"time": 90.0, "event": "run", "recipe": "x", "import_seconds": 20.0}
    cached = {"time": 95.0, "event": "answers", "stage": "sft", "cached": True}
    assert booked([*finished, again, cached, {"time": 99.0, **end}]) == booked(finished)
    trained = booked([*finished, again, step(98.0, 2), {"time": 99.0, **end}])
    assert trained["imports"] == 20.0 and trained["productive"] > booked(finished)["productive"]


@pytest.mark.parametrize("end", [{"event": "done"}, {"event": "stopped", "exit_code": 3}])
def test_a_run_that_waits_for_a_person_is_not_down(end: dict[str, Any]) -> None:
    events = [*START, step(5, 1), {"time": 6.0, **end}, {"time": 1e6, "event": "run"}, {"time": 1e6, "event": "done"}]
    assert "downtime" not in booked(events)


def test_every_kind_of_time_is_explained() -> None:
    assert set(TimeBreakdown().seconds) == set(TIME_CATEGORIES)


def test_a_curve_of_any_length_keeps_its_shape_in_few_points() -> None:
    curve = BucketedSeries()
    for number in range(1, 100_001):
        curve.add(number, 100_000 / number + (5000 if number == 70_001 else 0))
    assert MAX_POINTS / 2 <= len(curve.points) <= MAX_POINTS
    assert curve.points[-1][0] == 100_000
    assert max(high for _, _, high in curve.min_max) == 100_000
    assert any(high > 5000 and x > 70_000 for x, _, high in curve.min_max), "one spike in 100,000 steps is still seen"


def test_a_short_curve_is_exact_and_has_no_band() -> None:
    curve = BucketedSeries()
    for number, value in enumerate((3.0, 2.0, 1.0), 1):
        curve.add(number, value)
    assert curve.points == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert curve.min_max == []
    curve.truncate_after(1)
    assert curve.points == [(1, 3.0)]


def test_steps_that_are_done_again_count_in_their_last_form() -> None:
    resumed = {"time": 9.0, "event": "resumed", "stage": "sft", "step": 1, "steps": 9}
    story = replay_events([*START, step(5, 1, loss=3.0), step(6, 2, loss=9.0), resumed, step(10, 2, loss=2.0)])
    assert story.stages["sft"].curves["loss"].points == [(1, 3.0), (2, 2.0)]
    assert story.stages["sft"].num_resumes == 1


def test_a_revised_plan_takes_the_place_of_the_first() -> None:
    plan = {"event": "plan", "stage": "sft", "time": 1.0, "precision": "fp8", "reasons": []}
    revised = {**plan, "event": "plan_revised", "precision": "bf16", "reasons": ["slower"], "reason": "slower"}
    assert replay_events([plan, revised]).stages["sft"].last_events["plan"]["precision"] == "bf16"


def test_a_long_text_is_cut_and_what_is_missing_is_counted() -> None:
    pair = {"question": "?", "before": "x" * 1_000_000, "after": "y"}
    story = replay_events([{"time": 1.0, "event": "answers", "stage": "sft", "answers": [pair]}])
    assert story.answers is not None
    shortened = story.answers["answers"][0]["before"]
    assert shortened.endswith("(996,000 more characters)") and len(shortened) < MAX_TEXT_CHARS + 60


@pytest.mark.parametrize(
    "event",
    [{}, {"event": "step"}, {"time": "x", "event": "run"}, {"time": 1, "event": "step", "stage": "sft", "step": "many"},
     {"time": 1, "event": "of a later release", "stage": "sft", "more": [1]}],
)  # fmt: skip
def test_a_damaged_or_unknown_event_changes_nothing(event: dict[str, Any]) -> None:
    assert replay_events([*START, event]).state == "running"


def test_the_state_is_that_of_the_last_event() -> None:
    assert replay_events([]).state == "not started"
    assert replay_events(START).state == "running"
    assert (
        replay_events([*START, {"time": 5.0, "event": "done"}, {"time": 6.0, "event": "note", "message": "x"}]).state
        == "finished"
    )
    assert replay_events([*START, {"time": 5.0, "event": "stopped", "exit_code": 75}]).state == "stopped"


REFUSED = [
    {"time": 500.0, "event": "run", "recipe": "x", "stages": ["sft"]},
    {"time": 501.0, "event": "stopped", "exit_code": 77, "message": "sft.learning_rate has changed"},
]


@pytest.mark.parametrize(("end", "state"), [({"event": "done"}, "finished"), ({"event": "stopped"}, "stopped")])
def test_a_refused_second_start_leaves_the_run_as_it_was(end: dict[str, Any], state: str) -> None:
    end = {"time": 20.0, "exit_code": 3, "message": "gate sft is closed", **end}
    history = replay_events([*START, step(5, 1), end, *REFUSED])
    assert history.state == state
    assert history.last_events.get("stopped", end)["message"] == "gate sft is closed"
    again = replay_events([*START, step(5, 1), end, *REFUSED, {"time": 9000.0, "event": "run", "recipe": "x"}])
    assert "downtime" not in {kind for kind, seconds in again.time_breakdown.seconds.items() if seconds}


def test_a_second_start_that_trains_and_stops_is_stopped() -> None:
    events = [
        *START,
        step(5, 1),
        {"time": 20.0, "event": "done"},
        REFUSED[0],
        step(501, 2),
        {**REFUSED[1], "time": 502},
    ]
    assert replay_events(events).state == "stopped"
