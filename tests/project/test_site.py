"""The site has every page and no link that leads nowhere; where MkDocs is installed it is built and followed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def build() -> ModuleType:
    """The program that builds the site."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """What a link may name within a page: its headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower() for heading in headings)
    words = (re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", heading)).strip() for heading in plain)
    return {re.sub(r" ", "-", heading) for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_to_an_anchor_leads_to_a_heading(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text):
        target = page.parent / path if path else page
        assert anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_every_page_is_listed_in_the_index() -> None:
    listed = "\n".join(build().navigation())
    for page in PAGES:
        assert str(page.relative_to(ROOT)) in listed, f"docs/README.md does not list {page.relative_to(ROOT)}"


def test_the_site_is_built_without_a_warning_and_every_link_leads_somewhere() -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed; make docs installs it and does the same")
    done = subprocess.run([sys.executable, "docs/build.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "build" / "site" / "search" / "search_index.json").stat().st_size > 50_000


def test_a_link_that_leads_nowhere_and_a_script_from_elsewhere_are_found(tmp_path: Path) -> None:
    pages = {
        "a.html": '<h1 id="top">A</h1><a href="b.html#low">b</a><a href="c.html">c</a><a href="b.html#high">b</a>',
        "b.html": '<p id="low"></p><script src="https://elsewhere.example/x.js"></script>',
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    site = build()
    assert sorted(site.broken(tmp_path)) == [
        "a.html: b.html#high leads to no place in that page",
        "a.html: c.html leads to no page",
    ]
    assert list(site.fetched(tmp_path)) == ["b.html: fetches https://elsewhere.example/x.js"]
