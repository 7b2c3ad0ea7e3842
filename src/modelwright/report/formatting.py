"""Format numbers, durations, bytes and untrusted text for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

MAX_TEXT_CHARS = 4000
"""Characters kept of a model's text."""
ZERO_WIDTH_JOINERS = "\u200c\u200d"
"""Not printable, but needed by Persian, Hindi and emoji."""


def format_float(value: float | None) -> str:
    """A metric with four significant digits; None is a value that was not finite."""
    return "not finite" if value is None else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Seconds as 45 s, 3 min 20 s or 2 h 05 min."""
    rounded = round(seconds)
    if 0 < seconds < 1:
        return f"{seconds:.1f} s"
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def pluralize(count: float, noun: str) -> str:
    """A number with its noun: 1 step, 2 steps."""
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def single_line(text: str) -> str:
    """Untrusted text on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def strip_control_chars(text: str) -> str:
    """Untrusted text with its line breaks, without other control characters."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def format_si(value: float) -> str:
    """A number in few characters: 1.2k, 3.4M, 0.25, 3e-4."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    if size >= 1e-3:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_count(value: float) -> str:
    """A count with thousands separators."""
    return f"{value:,.0f}"


def format_bytes(value: float) -> str:
    """Bytes in MB or GB."""
    return f"{value / 1e9:.3g} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"


def format_percent(value: float) -> str:
    """A fraction in percent."""
    return f"{value:.1%}"


def sanitize_multiline(text: Any) -> str:
    """Untrusted text for a page: line breaks kept, no control or bidirectional characters, truncated."""
    printable = "".join(char for char in str(text) if char.isprintable() or char in f"\n{ZERO_WIDTH_JOINERS}")
    return truncate(printable.strip())


def format_number(item: Any) -> str:
    """A metric or a text of a journal: whole numbers with separators, others with four significant digits."""
    if isinstance(item, bool) or not isinstance(item, int | float):
        return "not finite" if item is None else truncate(single_line(str(item)), 200)
    return f"{item:,.0f}" if float(item).is_integer() and abs(item) < 1e15 else format_float(item)


def format_metric(metric: str, value: Any) -> str:
    """A metric in the unit that its name implies."""
    if value is None:
        return "–"
    metric = metric.removeprefix("parent_")
    if metric in ("time", "seconds"):
        return format_duration(value)
    if metric in ("steps", "tokens", "trained_tokens", "images"):
        return f"{value:,.0f}"
    return f"{value:.1%}" if metric == "goodput" else format_float(value)


def truncate(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """A text of bounded length, with the number of characters cut."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text) - max_chars:,} more characters)"


def format_setting(value: Any) -> str:
    """A setting's value, truncated."""
    return truncate(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 400)


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of untrusted cells as lines with aligned columns."""
    cells = [[single_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
