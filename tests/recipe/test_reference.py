"""The reference page is the schema, word for word.

``UPDATE_GOLDEN=1 pytest tests/recipe/test_reference.py`` writes it anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from modelwright.recipe.explain import reference_markdown
from modelwright.recipe.settings import children, sections

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipe.md"


def test_the_reference_page_is_made_from_the_schema() -> None:
    text = reference_markdown()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def test_every_setting_has_a_row_with_its_sentence() -> None:
    text = reference_markdown()
    for section in sections().values():
        for setting in children(section):
            assert f"| `{setting.key.rpartition('.')[2]}` |" in text, setting.key
            assert f"| {setting.sentence} |" in text, setting.key
