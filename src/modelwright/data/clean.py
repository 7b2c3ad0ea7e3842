"""Clean documents: bring text to one form, take out boilerplate lines, and leave out what is hardly language.

Rules are in the manner of the Gopher and C4 filters, without word lists of one language. Each names what it measured,
so that the report can show why a document went.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from modelwright.data.boilerplate import lines_of
from modelwright.data.shingles import Array, Shingles
from modelwright.recipe.preparing import Cleaning

Form = Literal["NFC", "NFKC", "none"]

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u200b\u2060\ufffe\uffff]")
_CONTROL_BYTES = bytes([*range(9), 11, 12, *range(14, 32), 127])
_CONTROL_OTHERS = "\ufeff\u200b\u2060\ufffe\uffff"
_TRAILING = (" \n", "\t\n", "\u00a0\n")
_SPACES = bytes(code for code in range(128) if chr(code).isspace())
_OTHER_SPACES = re.compile(r"[^\S\x00-\x7f]")
_AFTER_FIRST = bytes(range(128, 192))
"""Bytes of a character after its first."""
_SOLID = bytes(32 if code in _SPACES else 97 for code in range(256))
_DIGITS = b"0123456789"
_NOT_MARKS = bytes(code for code in range(256) if code >= 127 or code <= 32 or chr(code).isalnum())
_NOT_MARKS_NOR_DIGITS = bytes(code for code in _NOT_MARKS if code not in _DIGITS)
_BULLETS = ("-", "*", "•", "‣", "◦", "·", "–")
_ELLIPSES = ("…", "...")


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
    boilerplate = lines_of(tuple(rules.drop_lines))
    kept, dropped = boilerplate.without(text) if boilerplate else (text, 0)
    return Cleaned(kept, dropped, _judge(kept, rules))


def normalise(text: str, form: Form) -> str:
    """One form of Unicode, one kind of line end, no control characters, no trailing spaces, at most one empty line.

    Each rule first asks whether there is anything to do, which takes a tenth of doing it.
    """
    if not text.isascii():
        if form != "none" and not unicodedata.is_normalized(form, text):
            text = unicodedata.normalize(form, text)
        text = text.replace("\u2028", "\n").replace("\u2029", "\n\n")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _has_control(text):
        text = _CONTROL.sub("", text)
    if any(end in text for end in _TRAILING):
        *lines, last = text.split("\n")
        text = "\n".join([*(line.rstrip(" \t\u00a0") for line in lines), last])
    while "\n\n\n" in text:  # a third of each gap goes at once; a pattern would look at every letter
        text = text.replace("\n\n\n", "\n\n")
    return text.strip("\n\t ")


def _has_control(text: str) -> bool:
    raw = text.encode("utf-8", "replace")
    if len(raw.translate(None, _CONTROL_BYTES)) < len(raw):
        return True
    return not text.isascii() and any(letter in text for letter in _CONTROL_OTHERS)


def _judge(text: str, rules: Cleaning) -> Drop | None:
    """Hold a text against the rules, by counting bytes: nothing is made for each word."""
    spaced = text if text.isascii() else _OTHER_SPACES.sub(" ", text)
    raw = spaced.encode("utf-8", "replace")
    solid = np.frombuffer(b" " + raw.translate(_SOLID), dtype=np.uint8)
    words = int(np.count_nonzero(solid[1:] > solid[:-1]))
    if words < rules.min_words:
        return Drop("min_words", words)
    if rules.max_words is not None and words > rules.max_words:
        return Drop("max_words", words)
    for name, pattern in rules.drop_documents.items():
        if match := re.search(pattern, text):
            return Drop(f"drop_documents.{name}", match[0][:60])
    marks = raw.translate(None, _NOT_MARKS_NOR_DIGITS)
    return _judge_characters(raw, marks, words, rules) or _judge_lines(text, marks, rules)


def _judge_characters(raw: bytes, marks: bytes, words: int, rules: Cleaning) -> Drop | None:
    """raw: the text in UTF-8, its spaces in ASCII; marks: the ASCII marks and digits of it."""
    characters = len(raw) if raw.isascii() else len(raw.translate(None, _AFTER_FIRST))
    solid = max(1, len(raw.translate(None, _AFTER_FIRST + _SPACES)))
    mostly_ascii = len(raw) < 1.5 * characters
    symbols = len(marks.translate(None, _DIGITS))
    mean_length = solid / max(1, words) if mostly_ascii else 0.0
    measured = (("max_mean_word_length", mean_length), ("max_symbol_share", symbols / solid),
                ("max_digit_share", (len(marks) - symbols) / solid))  # fmt: skip
    return _first_above(measured, rules)


def _judge_lines(text: str, marks: bytes, rules: Cleaning) -> Drop | None:
    """marks: the ASCII marks of the text, in their order."""
    lines = list(filter(None, map(str.strip, text.split("\n"))))
    count = max(1, len(lines))
    bullets = ellipses = repeated = 0.0
    # there are no more bullets than such marks in all: mostly that says enough
    if _at_most(text, marks, _BULLETS) / count > rules.max_bullet_lines:
        bullets = sum(line.startswith(_BULLETS) for line in lines) / count
    if _at_most(text, marks, _ELLIPSES) / count > rules.max_ellipsis_lines:
        ellipses = sum(line.endswith(_ELLIPSES) for line in lines) / count
    distinct = set(lines)
    if len(distinct) < len(lines):
        whole = sum(map(len, lines))
        repeated = (whole - sum(map(len, distinct))) / max(1, whole)
    measured = (("max_bullet_lines", bullets), ("max_ellipsis_lines", ellipses), ("max_repeated_lines", repeated))
    return _first_above(measured, rules)


def _at_most(text: str, marks: bytes, signs: Sequence[str]) -> int:
    """How often signs stand in a text, or more."""
    return sum(marks.count(sign.encode()) if sign.isascii() else text.count(sign) for sign in signs)


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
