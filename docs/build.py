"""Build the site: lay out the pages, let MkDocs render them in strict mode, and follow every link of what came out.

make docs          # or: python docs/build.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
ALSO = ("*.md", "LICENSE", "Containerfile")
FOLDERS = ("docs", "recipes", "deploy", "benchmarks/results")
"""What pages link to; laid out as in the repository, so that every relative link means the same."""
LINK = re.compile(r"^\| \[([^\]]+)\]\(([^)]+\.md)\)|^- \[([^\]]+)\]\(([^)]+\.md)\)", re.MULTILINE)


class Page(HTMLParser):
    """What a built page links to, and what in it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what has an address."""
        told = {key: value or "" for key, value in attrs}
        self.names |= {told[key] for key in ("id", "name") if key in told}
        self.links += [told[key] for key in ("href", "src") if told.get(key)]


def lay_out() -> None:
    """Copy what belongs to the site beside each other, as it lies in the repository."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("*.py", "__pycache__", "*.local.*")
        shutil.copytree(ROOT / folder, PAGES / folder, ignore=ignored)
    for file in (file for pattern in ALSO for file in ROOT.glob(pattern)):
        shutil.copy(file, PAGES / file.name)


def navigation() -> list[str]:
    """The pages in the order of docs/README.md, section by section, as lines for the configuration."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    lines = ["nav:", "  - Home: README.md", "  - All pages: docs/README.md"]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0].partition(":")[0]
        found = [(a or c, b or d) for a, b, c, d in LINK.findall(section)]
        lines += [f"  - {title}:"] if found else []
        for name, target in found:
            path = (ROOT / "docs" / target).resolve().relative_to(ROOT)
            lines.append(f'    - "{name}": {path}')
    return lines


def broken(site: Path) -> Iterator[str]:
    """Every link of the site that leads nowhere, places within pages counted."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        for link in dict.fromkeys(page.links):
            told = urlsplit(link)
            if told.scheme or told.netloc:
                continue  # the world outside is not ours to check, and may be down
            if path.name == "404.html":
                continue  # it may be shown at any address, and has absolute ones
            target = (path.parent / unquote(told.path)).resolve() if told.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{here}: {link} leads to no page"
            elif told.fragment and target in pages and unquote(told.fragment) not in pages[target].names:
                yield f"{here}: {link} leads to no place in that page"


def fetched(site: Path) -> Iterator[str]:
    """Scripts, styles, fonts and pictures that a page would fetch from elsewhere."""
    for path in site.rglob("*.html"):
        for found in re.findall(r'<(?:script|img|link rel="stylesheet"|source)[^>]*(?:src|href)="(https?://[^"]+)"',
                                path.read_text(encoding="utf-8")):  # fmt: skip
            yield f"{path.relative_to(site)}: fetches {found}"


def main() -> int:
    """Build and check; everything wrong is told at once."""
    lay_out()
    config = ROOT / "build" / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace(": build/", ": ")
    config.write_text("\n".join([text, *navigation(), ""]), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--config-file", str(config)]
    calm = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=calm, capture_output=True, text=True, check=False)
    if done.returncode:
        print(*(line for line in done.stderr.splitlines() if not line.startswith("INFO")), sep="\n", file=sys.stderr)
        return 1
    wrong = [*broken(SITE), *fetched(SITE)]
    pages = len(list(SITE.rglob("*.html")))
    print("\n".join(wrong) or f"{SITE.relative_to(ROOT)}: {pages} pages, every link leads somewhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
