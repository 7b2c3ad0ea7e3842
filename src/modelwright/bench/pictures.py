"""Make the pictures of the documentation: a run's report and the terminal, photographed by this machine's browser."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from modelwright.bench.results import checkout
from modelwright.errors import UsageError
from modelwright.report import page
from modelwright.report.lines import line_of
from modelwright.report.story import story_of
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder, read_json, write_json

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOTS = (
    ("report.png", 1100, 1500, "light"),
    ("report-dark.png", 1100, 1500, "dark"),
    ("phone.png", 390, 1100, "light"),
)
"""Name, width, height and colours of each picture."""
SOURCES = ("page.css", "charts.css", "charts.py", "pictures.py", "templates/page.html", "templates/sections.html")
"""What decides how a report looks."""


def take(run: RunFolder) -> dict[str, Any]:
    """Photograph a run into docs/pictures, and write down what the pages looked like by hash."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.html"
        report.write_text(page.page(run, story_of(run)), encoding="utf-8")
        _photograph(report, folder)
    (folder / "terminal.svg").write_text(_terminal(run), encoding="utf-8")
    told = {
        "look": look(),
        "run": run.path.name,
        "bytes": {path.name: path.stat().st_size for path in _pictures(folder)},
    }
    write_json(folder / "pictures.json", told)
    return told


def look() -> str:
    """A hash over everything that decides how a report looks."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((page.HERE / name).read_bytes())
    return digest.hexdigest()


def stale() -> bool:
    """Whether the pages have changed since the pictures were made."""
    path = _folder() / "pictures.json"
    return not path.exists() or read_json(path)["look"] != look()


def _photograph(report: Path, folder: Path) -> None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise UsageError("pictures are made with a package that is not installed: pip install playwright") from None
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise UsageError("no browser was found; pictures are made with: apt-get install chromium fonts-inter")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for name, width, height, scheme in SHOTS:
            shown = opened.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            shown.goto(report.as_uri())
            shown.screenshot(path=folder / name)
            _shrink(folder / name)
        opened.close()


def _shrink(path: Path) -> None:
    """Fewer colours: a page has few, and the repository keeps every version."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128)
    small.save(path, optimize=True)


def _terminal(run: RunFolder) -> str:
    """The run's lines as a terminal shows them."""
    from rich.console import Console
    from rich.text import Text

    from modelwright.report.card import card

    console = Console(record=True, width=110, file=io.StringIO())
    name = f"runs/{run.path.name}"
    events = ({**event, "folder": name} for event in journal.read(run.journal))
    lines = [line for event in events if (line := line_of(event))]
    for line in [*lines[:16], "…", *card(run).replace(str(run.path), name).splitlines()]:
        console.print(Text(line[:108]))
    drawn = console.export_svg(title=f"modelwright run {run.path.name}", clear=False)
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # they would be fetched from elsewhere


def _pictures(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.png"), *folder.glob("*.svg")])


def _folder() -> Path:
    return (checkout() or Path()) / "docs" / "pictures"
