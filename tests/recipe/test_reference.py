"""The reference pages are the schema and the code, word for word.

``UPDATE_GOLDEN=1 pytest tests/recipe/test_reference.py`` rewrites them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from docs.metric_descriptions import METRIC_DESCRIPTIONS, metric_names
from docs.reference_pages import PAGES
from modelwright.cli.main import COMMANDS
from modelwright.recipe.fields import all_sections, child_fields

HOME = Path(__file__).parents[2] / "docs" / "reference"


def test_every_setting_has_a_row_with_its_sentence() -> None:
    text = PAGES["recipe.md"]()
    for section in all_sections().values():
        for setting in child_fields(section):
            name = setting.key.rpartition(".")[2]
            row = rf"^- \*\*`{name}`\*\* \(.+\): {re.escape(setting.description)}"
            assert re.search(row, text, re.MULTILINE), setting.key


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_made_from_the_code(name: str) -> None:
    text = PAGES[name]()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        (HOME / name).write_text(text, encoding="utf-8")
    assert (HOME / name).read_text(encoding="utf-8") == text


def test_every_verb_has_a_heading() -> None:
    headings = re.findall(r"^## modelwright (\S+)", PAGES["commands.md"](), re.MULTILINE)
    assert {verb for verbs in COMMANDS.values() for verb in verbs} == set(headings)


def test_every_command_and_option_says_what_it_is() -> None:
    for line in PAGES["commands.md"]().splitlines():
        assert not re.fullmatch(r"- `[^`]*`:\s*", line), line


def test_every_metric_has_a_meaning_and_nothing_else_has() -> None:
    assert set(metric_names()) == set(METRIC_DESCRIPTIONS)
