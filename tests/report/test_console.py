"""Every event of a journal reads as one plain line, and no model's text can act on a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from modelwright.report.console import EVENT_FORMATTERS, format_event
from modelwright.report.formatting import format_duration, format_float, pluralize, single_line

STEP = {
    "event": "step", "stage": "sft", "step": 3, "steps": 12, "epoch": 0.5, "loss": 2.41234, "grad_norm": 1.5,
    "learning_rate": 2e-4, "health": "ok", "tokens_per_second": 1234.5, "mfu": 0.431, "eta_seconds": 83.0,
    "peak_memory_bytes": 5_000_000_000,
}  # fmt: skip
DATA = {
    "event": "data", "source": "rows.jsonl", "prompts_in_both_splits": 0, "packed_rows": None,
    "train": {"rows": 36, "tokens": 1856, "trained_tokens": 679, "truncated_rows": 0, "truncated_tokens": 0},
    "held_out": {"rows": 4},
}  # fmt: skip
PLAN = {"event": "plan", "steps": 9, "batch_arithmetic": "batch 4 = 2 per device × 1 device × 2 accumulation",
        "precision": "fp32", "device": "2 CPU threads", "reasons": ["fp32: because"]}  # fmt: skip
EVALUATION = {"event": "evaluation", "stage": "sft"}
PAIR = {"question": "Why?\n", "before": "\x1b[31mred\x1b[0m\rhidden", "after": "So."}

CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"event": "evaluating", "stage": "sft", "fraction": 0.5}, "sft evaluating: 50% of the held-out rows"),
    ({"event": "run", "folder": "runs/tiny", "recipe": "tiny", "stages": ["sft"]}, "run runs/tiny: tiny, sft"),
    ({"event": "loading", "model": "owner/name"}, "model: owner/name"),
    ({"event": "model", "trainable_summary": "1 M of 2 M parameters trainable (50%)"},
     "model: 1 M of 2 M parameters trainable (50%)"),
    (
        DATA,
        "data: rows.jsonl: 36 training rows (679 of 1,856 tokens trained), 4 held out, 0 prompts in both splits",
    ),
    (
        {**DATA, "duplicate_rows": 18},
        "data: rows.jsonl: 36 training rows (679 of 1,856 tokens trained), 4 held out, 0 prompts in both splits; "
        "18 duplicate training rows",
    ),
    (PLAN, f"plan: 9 steps, {PLAN['batch_arithmetic']}, fp32, on 2 CPU threads\nplan: fp32: because"),
    ({**PLAN, "event": "plan_revised", "reason": "bf16: faster", "changes": {}},
     f"plan: 9 steps, {PLAN['batch_arithmetic']}, fp32, on 2 CPU threads\nplan: bf16: faster"),
    ({"event": "stage_started", "stage": "sft"}, "stage sft"),
    ({"event": "resumed", "stage": "sft", "step": 3, "steps": 12}, "sft resumed from step 3 of 12"),
    (STEP, "sft step 3/12  loss 2.412  grad_norm 1.5  lr 2.00e-04  1,234 tok/s  mfu 43.1%  mem 5.0 GB  eta 1 min 23 s"),
    ({**EVALUATION, "step": 0, "eval_loss": 5.5}, "sft held-out loss 5.5 before the first step"),
    ({**EVALUATION, "step": 6, "eval_loss": None}, "sft held-out loss not finite after step 6"),
    (
        {"event": "checkpoint_saved", "stage": "sft", "step": 6, "seconds": 0.24},
        "sft checkpoint of step 6 saved and verified in 0.2 s",
    ),
    ({"event": "step_skipped", "message": "step 4 is skipped: spike"}, "step 4 is skipped: spike"),
    ({"event": "note", "message": "a word"}, "note: a word"),
    ({"event": "sampling", "questions": 8}, "sampling before/after answers to 8 prompts"),
    (
        {"event": "answers", "answers": [PAIR], "notice": "No advice."},
        "\nquestion: Why?\n  before: [31mred [0m hidden\n  after:  So.\n\nNo advice.",
    ),
    ({"event": "model_initialized", "parameters": 950_000, "layers": 4, "hidden_size": 128, "bytes": 3_800_000,
      "plan": ["sft: 9 steps"]},
     "model: 0.95 M parameters from scratch, 4 layers of width 128, 3.8 MB in fp32\npredicted: sft: 9 steps"),
    ({"event": "evaluate_started", "model": "sft"}, None),
    ({"event": "evaluate_result", "model": "sft", "metrics": {"text_loss": 2.5},
      "samples": [{"prompt": "A", "text": "B\n"}]},
     "evaluated sft: text_loss 2.5\n  A … B"),
    ({"event": "evaluate_table", "models": {"base": {"text_loss": 3.25}, "sft": {"text_loss": 2.5}}},
     "model  text_loss\nbase   3.25\nsft    2.5"),
    ({"event": "verdict", "open": True, "message": "gate sft is open"}, "gate sft is open"),
    ({"event": "verdict", "open": False, "message": "printed by the command itself"}, None),
    ({"event": "verdict", "open": False, "message": "gate sft is closed", "accepted": "a trial"},
     "gate sft is closed; accepted: a trial"),
    ({"event": "stage_status", "stages": [{"stage": "sft", "state": "done"}]}, None),
    ({"event": "stage_status", "stages": [{"stage": "pretrain", "state": "done"}, {"stage": "sft", "state": "running"},
                                  {"stage": "dpo", "state": "pending"}]},
     "pipeline: pretrain ✔ → sft ▶ → dpo ·"),
    (
        {"event": "misclassified", "accuracy": 0.9031, "source": "CIFAR-10, lossy JPEG npz"},
        "misclassified images of CIFAR-10, lossy JPEG npz: demo_outputs/mistakes.json",
    ),
    ({"event": "stopped", "message": "printed by the command itself"}, None),
    ({"event": "done", "seconds": 3.0}, None),
    ({"event": "something of a later release"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("event", "line"), CASES, ids=lambda value: value["event"] if isinstance(value, dict) else "")
def test_an_event_reads_as_a_line(event: dict[str, Any], line: str | None) -> None:
    assert format_event(event) == line


def test_every_event_that_has_a_line_is_read_here() -> None:
    assert set(EVENT_FORMATTERS) <= {event["event"] for event, _ in CASES}


def test_what_was_cut_and_packed_is_said() -> None:
    train = {**DATA["train"], "truncated_rows": 2, "truncated_tokens": 31}  # type: ignore[dict-item]
    line = format_event({**DATA, "train": train, "packed_rows": 12})
    assert line is not None
    assert "36 training rows packed into 12" in line
    assert "31 tokens cut from 2 rows" in line


def test_a_bad_step_says_so_and_what_is_not_known_is_left_out() -> None:
    unknown = {"tokens_per_second": None, "mfu": None, "eta_seconds": None, "peak_memory_bytes": None}
    line = format_event({**STEP, **unknown, "loss": None, "health": "non_finite"})
    assert line == "sft step 3/12  loss not finite  grad_norm 1.5  lr 2.00e-04  [non_finite]"


def test_the_embedded_model_s_conversion_is_announced_when_it_happens() -> None:
    event = {"event": "loading", "model": "smollm2-135m-instruct"}
    assert "about 40 s" in str(format_event({**event, "converting": True}))
    assert format_event({**event, "converting": False}) == "model: smollm2-135m-instruct"


def test_answers_that_stand_already_are_not_said_again() -> None:
    line = format_event({"event": "answers", "answers": [PAIR], "notice": "No advice.", "cached": True})
    assert line == "before/after samples unchanged (1 prompt); see modelwright compare"


def test_one_is_not_said_as_many() -> None:
    assert str(format_event({**PLAN, "steps": 1})).startswith("plan: 1 step, batch")
    assert [pluralize(count, "step") for count in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[2J\x1b[H",  # clears a screen
        "\x1b]0;title\x07",  # renames a window
        "\x9b31m",  # the same introducer in one character
        "a\rb",  # writes over itself
        "a\u202eb",  # reads backwards
        "a\u2028b\x0bc",  # breaks the line
        "\x00\x08\x7f",
    ],
)
def test_no_text_of_a_model_acts_on_the_terminal(text: str) -> None:
    assert single_line(text).isprintable()


def test_characters_of_all_scripts_pass() -> None:
    assert single_line("Füße, 森の火 🔥") == "Füße, 森の火 🔥"


def test_durations_are_said_as_people_say_them() -> None:
    texts = [format_duration(seconds) for seconds in (0, 0.31, 45.4, 59.6, 200, 3599.9, 7500)]
    assert texts == ["0 s", "0.3 s", "45 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min"]


def test_numbers_have_four_digits() -> None:
    assert [format_float(value) for value in (2.41234, 12345.6, 0.00012345, None)] == [
        "2.412",
        "1.235e+04",
        "0.0001234",
        "not finite",
    ]
