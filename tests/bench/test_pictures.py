"""The pictures of the documentation show the pages as they are."""

from __future__ import annotations

from pathlib import Path

from modelwright.bench import pictures

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_pictures_are_as_new_as_the_pages() -> None:
    assert not pictures.stale(), "the report looks different now: modelwright bench pictures runs/quickstart"


def test_the_pictures_are_small_and_ask_for_nothing() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000
    assert "http" not in (FOLDER / "terminal.svg").read_text(encoding="utf-8").replace("http://www.w3.org", "").replace(
        "https://www.textualize.io", ""
    )
