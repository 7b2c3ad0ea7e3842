"""docs/reference/verdicts.md is what the planner computes today."""

from __future__ import annotations

import os
from pathlib import Path

from docs.plan_verdicts import page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verdicts.md"


def test_the_page_is_what_the_planner_says() -> None:
    now = page()
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(now, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == now, "run it with UPDATE_GOLDEN=1 and read the difference"
