"""The README's figures are those of bench/results.

``UPDATE_GOLDEN=1 pytest tests/bench/test_tables.py`` writes the tables anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from modelwright.bench.tables import MARK, TABLES, fill, scorecard

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"


def test_the_tables_of_the_readme_are_made_from_the_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert all(MARK.format(name=name) in text for name in TABLES)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        README.write_text(fill(text, RESULTS), encoding="utf-8")
    assert fill(text, RESULTS) == README.read_text(encoding="utf-8")


def test_a_figure_that_was_typed_by_hand_is_found() -> None:
    text = README.read_text(encoding="utf-8")
    start = text.index(MARK.format(name="gpu"))
    changed = text[:start] + text[start:].replace("tokens/s", "tokens/h", 1)
    assert changed != text
    assert fill(changed, RESULTS) == fill(text, RESULTS)


def test_the_scorecard_appears_once_it_is_measured(tmp_path: Path) -> None:
    assert "has not been measured yet" in scorecard(tmp_path)
    rows = {
        "R1": {
            "name": "kill",
            "figure": "14 of 14 resume",
            "verdict": "met",
            "baseline": "HF Trainer 10 | 14",
            "baseline_measured_here": True,
        },
        "R2": {"name": "flip", "figure": "found", "verdict": "gap", "baseline": "–"},
        "R3": {"name": "cold", "figure": "survived", "verdict": "met", "baseline": "–"},
    }  # fmt: skip
    machine = {"cores": 2, "cpu": "Neoverse-N1"}
    kept = {"date": "2026-11-15T09:00:00+00:00", "machine": machine, "figures": {"rows": rows}}
    (tmp_path / "reliability.json").write_text(json.dumps(kept), encoding="utf-8")
    told = scorecard(tmp_path)
    assert told.startswith("3 faults, 2 met, 1 gap (2026-11-15, 2 × Neoverse-N1); shown are")
    assert "| cold |" not in told
    assert "| kill | 14 of 14 resume | met | HF Trainer 10 \\| 14 |" in told
