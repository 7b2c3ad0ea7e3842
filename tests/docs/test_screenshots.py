"""The pictures of the documentation show the pages as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from docs import screenshots as pictures
from modelwright.report import charts, html

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_pictures_are_as_new_as_the_pages() -> None:
    assert not pictures.is_stale(), "the report looks different now: python -m docs.screenshots runs/quickstart"


def test_a_page_that_is_drawn_otherwise_looks_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = pictures.render_hash()
    assert pictures.render_hash() == before
    style = shutil.copytree(html.ASSETS_DIR, tmp_path / "report")
    (style / "page.css").write_text((style / "page.css").read_text("utf-8") + "h1{color:red}", "utf-8")
    monkeypatch.setattr(html, "ASSETS_DIR", style)
    assert pictures.render_hash() != before, "the style has changed"
    monkeypatch.undo()
    drawn = charts.line_chart
    monkeypatch.setattr(charts, "line_chart", lambda *args, **kwargs: drawn(*args, **kwargs).replace("Loss", "Cost"))
    assert pictures.render_hash() != before, "the code that draws has changed"


def test_the_pictures_are_small_and_ask_for_nothing() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000
    assert "http" not in (FOLDER / "terminal.svg").read_text(encoding="utf-8").replace("http://www.w3.org", "").replace(
        "https://www.textualize.io", ""
    )
