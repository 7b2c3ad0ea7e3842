"""The report: one page that holds everything, opens from disk, asks the network for nothing.

Text of models, data and recipes is data: it is escaped, cut where it is too long, and a page's own policy lets no
script run but the one whose hash it names.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from modelwright import __version__
from modelwright.report import charts
from modelwright.report.lines import duration, number, plain
from modelwright.report.pictures import PICTURES
from modelwright.report.story import Story, cut, story_of
from modelwright.report.view import shown, view_of
from modelwright.runs.folder import RunFolder, write_text

HERE = Path(__file__).parent
SECTIONS = ("head", "flow", "curves", "answers", "mistakes", "data", "plan", "time", "settings", "origin")
"""The parts of a page, in its order; each is drawn alone, so that a live page exchanges only what changed."""
JOINERS = "\u200c\u200d"
"""Signs that are not printable and that Persian, Hindi and emoji need."""


def write(folder: RunFolder) -> Path:
    """Write report.html of a run from what lies in its folder."""
    write_text(folder.report, page(folder, story_of(folder)))
    return folder.report


def page(folder: RunFolder, story: Story) -> str:
    """The whole page."""
    return document(view_of(folder, story).name, sections(folder, story), (HERE / "page.js").read_text("utf-8"))


def sections(folder: RunFolder, story: Story) -> dict[str, str]:
    """Every part of a page by name; one without anything to show is empty."""
    view = view_of(folder, story)
    macros = environment().get_template("sections.html").module
    pictures = {name: Markup(draw(view)) for name, draw in PICTURES.items()}
    return {name: str(getattr(macros, name)(view, pictures)).strip() for name in SECTIONS}


def document(title: str, parts: dict[str, str], script: str, policy: str = "") -> str:
    """A whole page around its parts."""
    style = charts.STYLE + (HERE / "page.css").read_text("utf-8")
    return environment().get_template("page.html").render(
        title=title, style=Markup(style), script=Markup(script), version=__version__,
        policy=policy or policy_for(script), parts={name: Markup(part) for name, part in parts.items()},
    )  # fmt: skip


def policy_for(script: str, connect: str = "'none'") -> str:
    """What a browser lets the page do: its own style and script, pictures it carries, nothing from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def environment() -> Environment:
    """Templates that escape everything they are not told to leave alone."""
    made = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    filters: dict[str, Callable[..., Any]] = {
        "number": number, "duration": duration, "line": lambda text: cut(plain(str(text)), 600), "words": words,
        "thousands": charts.thousands, "bytes": charts.gigabytes, "percent": charts.percent, "shown": shown,
        "value": value,
    }  # fmt: skip
    made.filters.update(filters)
    return made


def words(text: Any) -> str:
    """A model's text with its lines kept and without signs that act: controls, and marks that turn the direction."""
    kept = "".join(sign for sign in str(text) if sign.isprintable() or sign in f"\n{JOINERS}")
    return cut(kept.strip())


def value(item: Any) -> str:
    """A metric as people read it: counts whole, measures with four digits, what is no number said so."""
    if isinstance(item, bool) or not isinstance(item, int | float):
        return "not finite" if item is None else cut(plain(str(item)), 200)
    return f"{item:,.0f}" if float(item).is_integer() and abs(item) < 1e15 else number(item)
