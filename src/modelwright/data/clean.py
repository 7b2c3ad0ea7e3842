"""Clean documents: bring text to one form, take out boilerplate lines, and leave out what is hardly language.

Rules are in the manner of the Gopher and C4 filters, without word lists of one language. Each names what it measured,
so that the report can show why a document went.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from modelwright.data.shingles import Array, Shingles
from modelwright.recipe.preparing import Cleaning

Form = Literal["NFC", "NFKC", "none"]

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u200b\u2060\ufffe\uffff]")
_TRAILING = re.compile(r"[ \t\u00a0]+\n")
_GAPS = re.compile(r"\n{3,}")
_NOT_MARKS = bytes(code for code in range(256) if code >= 127 or code <= 32 or chr(code).isalnum())
_DIGITS = bytes(code for code in range(256) if not 48 <= code <= 57)
_BULLETS = ("-", "*", "•", "‣", "◦", "·", "–")


@dataclass(frozen=True)
class Drop:
    """Why a document was left out."""

    rule: str
    """The setting that decided."""
    found: float | str
    """What was measured."""


@dataclass(frozen=True)
class Cleaned:
    """A document after cleaning."""

    text: str
    """What is left of it."""
    lines_dropped: int
    """Boilerplate lines that were taken out."""
    drop: Drop | None
    """Why it goes, if it does."""


def clean(text: str, rules: Cleaning) -> Cleaned:
    """Normalise a document and hold it against the rules; the first that it breaks is told."""
    text = normalise(text, rules.normalize)
    kept, dropped = _without_boilerplate(text, tuple(rules.drop_lines))
    return Cleaned(kept, dropped, _judge(kept, rules))


def normalise(text: str, form: Form) -> str:
    """One form of Unicode, one kind of line end, no control characters, no trailing spaces, at most one empty line."""
    if not text.isascii():
        if form != "none" and not unicodedata.is_normalized(form, text):
            text = unicodedata.normalize(form, text)
        text = text.replace("\u2028", "\n").replace("\u2029", "\n\n")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", text)
    text = _TRAILING.sub("\n", text)
    return _GAPS.sub("\n\n", text).strip("\n\t ")


def _without_boilerplate(text: str, patterns: tuple[str, ...]) -> tuple[str, int]:
    found = _any_of(patterns)
    if found is None or not found.search(text):
        return text, 0
    lines = text.split("\n")
    kept = [line for line in lines if not found.fullmatch(line)]
    return "\n".join(kept).strip("\n"), len(lines) - len(kept)


@lru_cache(maxsize=8)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    """The patterns as one, each a whole line."""
    if not patterns:
        return None
    inline = [re.match(r"\(\?([a-z]+)\)", pattern) for pattern in patterns]
    scoped = [f"(?{flags[1]}:{pattern[flags.end() :]})" if flags else f"(?:{pattern})"
              for flags, pattern in zip(inline, patterns, strict=True)]  # fmt: skip
    # tried at the beginning of a line only: anywhere else, a `.*` would cost the square of the line's length
    return re.compile(f"^(?:{'|'.join(scoped)})$", re.MULTILINE)


def _judge(text: str, rules: Cleaning) -> Drop | None:
    words = text.split()
    if len(words) < rules.min_words:
        return Drop("min_words", len(words))
    if rules.max_words is not None and len(words) > rules.max_words:
        return Drop("max_words", len(words))
    for name, pattern in rules.drop_documents.items():
        if match := re.search(pattern, text):
            return Drop(f"drop_documents.{name}", match[0][:60])
    return _judge_characters(text, words, rules) or _judge_lines(text, rules)


def _judge_characters(text: str, words: Sequence[str], rules: Cleaning) -> Drop | None:
    raw = text.encode("utf-8", "replace")
    solid = max(1, sum(map(len, words)))
    mostly_ascii = len(raw) < 1.5 * len(text)
    marks = len(raw.translate(None, _NOT_MARKS)) / solid
    digits = len(raw.translate(None, _DIGITS)) / solid
    mean_length = solid / max(1, len(words)) if mostly_ascii else 0.0
    measured = (("max_mean_word_length", mean_length), ("max_symbol_share", marks), ("max_digit_share", digits))
    return _first_above(measured, rules)


def _judge_lines(text: str, rules: Cleaning) -> Drop | None:
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line]
    count = max(1, len(lines))
    bullets = sum(line.startswith(_BULLETS) for line in lines) / count
    ellipses = sum(line.endswith(("…", "...")) for line in lines) / count
    whole = sum(map(len, lines))
    repeated = (whole - sum(map(len, set(lines)))) / max(1, whole)
    measured = (("max_bullet_lines", bullets), ("max_ellipsis_lines", ellipses), ("max_repeated_lines", repeated))
    return _first_above(measured, rules)


def _first_above(measured: Sequence[tuple[str, float]], rules: Cleaning) -> Drop | None:
    for rule, found in measured:
        if found > getattr(rules, rule):
            return Drop(rule, round(found, 3))
    return None


def repeated_share(shingles: Shingles) -> Array:
    """For each document, the share of its shingles that stood before in it: [documents] float64."""
    counts = shingles.counts
    owner = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)
    ordered = np.sort((owner << np.uint64(32)) | shingles.hashes)
    again = np.zeros(len(ordered), dtype=np.bool_)
    again[1:] = ordered[1:] == ordered[:-1]
    repeats = np.bincount((ordered >> np.uint64(32)).astype(np.int64), weights=again, minlength=len(counts))
    return np.asarray(repeats / np.maximum(counts, 1))
