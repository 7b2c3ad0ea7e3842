"""Every technique that the 7B pipeline's document claims a speed-up for can be measured alone."""

from __future__ import annotations

import pytest

from benchmarks import techniques
from benchmarks.tables import techniques_table
from modelwright.errors import UsageError


def test_each_technique_has_a_row_with_the_claim_and_the_measurement() -> None:
    figures = techniques.measure(["attention", "fused-adamw"], tiny=True)
    attention, adamw = figures["techniques"]["attention"], figures["techniques"]["fused-adamw"]
    assert attention["ratio"] > 0 and attention["alone"]["fused_ms"] > 0 and adamw["ratio"] > 0
    table = techniques_table(figures)
    assert "| attention | 2–4 × of attention | " in table and "| fused-adamw | 5–10 % | " in table


def test_a_run_that_fails_is_a_row_that_says_why() -> None:
    row = {"claim": "5 %", "work": "w", "unit": "rows", "without": {"failed": "OutOfMemoryError: no"}, "with": {}}
    assert "| compile | 5 % | failed | OutOfMemoryError: no | w |" in techniques_table({"techniques": {"compile": row}})


def test_an_unknown_technique_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="--only is 'flash'; it wants one of fp8, compile, "):
        techniques.measure(["flash"])
