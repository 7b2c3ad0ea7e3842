"""Normalize documents, remove boilerplate lines, and apply Gopher and C4 style quality filters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Literal

import numpy as np

from modelwright.data.packing import NDArray
from modelwright.data.prepare.dedup import Shingles
from modelwright.recipe.prepare_config import CleaningConfig

Form = Literal["NFC", "NFKC", "none"]
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u200b\u2060\ufffe\uffff]")
_CONTROL_BYTES = bytes([*range(9), 11, 12, *range(14, 32), 127])
_CONTROL_OTHERS = "\ufeff\u200b\u2060\ufffe\uffff"
_TRAILING = (" \n", "\t\n", "\u00a0\n")
_SPACES = bytes(code for code in range(128) if chr(code).isspace())
_OTHER_SPACES = re.compile(r"[^\S\x00-\x7f]")
_AFTER_FIRST = bytes(range(128, 192))
"""UTF-8 continuation bytes."""
_SOLID = bytes(32 if code in _SPACES else 97 for code in range(256))
_DIGITS = b"0123456789"
_NOT_MARKS = bytes(code for code in range(256) if code >= 127 or code <= 32 or chr(code).isalnum())
_NOT_MARKS_NOR_DIGITS = bytes(code for code in _NOT_MARKS if code not in _DIGITS)
_BULLETS = ("-", "*", "•", "‣", "◦", "·", "–")
_ELLIPSES = ("…", "...")


@dataclass(frozen=True)
class FilterResult:
    """Why a document was dropped."""

    filter: str
    """Name of the setting."""
    value: float | str
    """The measured value."""


@dataclass(frozen=True)
class CleanedDocument:
    """A document after cleaning."""

    text: str
    """The cleaned text."""
    lines_dropped: int
    """Boilerplate lines removed."""
    dropped_by: FilterResult | None
    """The filter that drops it, if any."""


def clean_document(text: str, rules: CleaningConfig) -> CleanedDocument:
    """Normalize a document and apply the filters; the first that rejects it is returned."""
    text = normalize_text(text, rules.normalize)
    boilerplate = compile_line_filter(tuple(rules.drop_lines))
    remaining, num_dropped = boilerplate.remove_from(text) if boilerplate else (text, 0)
    return CleanedDocument(remaining, num_dropped, _apply_filters(remaining, rules))


def normalize_text(text: str, form: Form) -> str:
    """Normalize Unicode and line ends, remove control characters and trailing spaces, allow at most one blank line.

    Each rule first checks whether it applies, which takes a tenth of the time.
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
    while "\n\n\n" in text:  # faster than a regex, which looks at every character
        text = text.replace("\n\n\n", "\n\n")
    return text.strip("\n\t ")


def _has_control(text: str) -> bool:
    raw = text.encode("utf-8", "replace")
    if len(raw.translate(None, _CONTROL_BYTES)) < len(raw):
        return True
    return not text.isascii() and any(char in text for char in _CONTROL_OTHERS)


def _apply_filters(text: str, rules: CleaningConfig) -> FilterResult | None:
    """Apply the filters by counting bytes, without objects per word."""
    spaced = text if text.isascii() else _OTHER_SPACES.sub(" ", text)
    raw = spaced.encode("utf-8", "replace")
    solid = np.frombuffer(b" " + raw.translate(_SOLID), dtype=np.uint8)
    word_count = int(np.count_nonzero(solid[1:] > solid[:-1]))
    if word_count < rules.min_words:
        return FilterResult("min_words", word_count)
    if rules.max_words is not None and word_count > rules.max_words:
        return FilterResult("max_words", word_count)
    for name, pattern in rules.drop_documents.items():
        if match := re.search(pattern, text):
            return FilterResult(f"drop_documents.{name}", match[0][:60])
    marks = raw.translate(None, _NOT_MARKS_NOR_DIGITS)
    return _apply_character_filters(raw, marks, word_count, rules) or _apply_line_filters(text, marks, rules)


def _apply_character_filters(raw: bytes, marks: bytes, word_count: int, rules: CleaningConfig) -> FilterResult | None:
    """raw: UTF-8 text with ASCII spaces; marks: its ASCII punctuation and digits."""
    characters = len(raw) if raw.isascii() else len(raw.translate(None, _AFTER_FIRST))
    solid = max(1, len(raw.translate(None, _AFTER_FIRST + _SPACES)))
    mostly_ascii = len(raw) < 1.5 * characters
    symbols = len(marks.translate(None, _DIGITS))
    mean_length = solid / max(1, word_count) if mostly_ascii else 0.0
    measured = (("max_mean_word_length", mean_length), ("max_symbol_ratio", symbols / solid),
                ("max_digit_ratio", (len(marks) - symbols) / solid))  # fmt: skip
    return _first_over_limit(measured, rules)


def _apply_line_filters(text: str, marks: bytes, rules: CleaningConfig) -> FilterResult | None:
    """marks: the ASCII punctuation of the text, in order."""
    lines = list(filter(None, map(str.strip, text.split("\n"))))
    count = max(1, len(lines))
    bullets = ellipses = repeated = 0.0
    # the count of such marks is an upper bound, which is mostly enough
    if _count_upper_bound(text, marks, _BULLETS) / count > rules.max_bullet_lines:
        bullets = sum(line.startswith(_BULLETS) for line in lines) / count
    if _count_upper_bound(text, marks, _ELLIPSES) / count > rules.max_ellipsis_lines:
        ellipses = sum(line.endswith(_ELLIPSES) for line in lines) / count
    distinct = set(lines)
    if len(distinct) < len(lines):
        total_chars = sum(map(len, lines))
        repeated = (total_chars - sum(map(len, distinct))) / max(1, total_chars)
    measured = (("max_bullet_lines", bullets), ("max_ellipsis_lines", ellipses), ("max_repeated_lines", repeated))
    return _first_over_limit(measured, rules)


def _count_upper_bound(text: str, marks: bytes, signs: Sequence[str]) -> int:
    """Upper bound of the occurrences of the signs."""
    return sum(marks.count(sign.encode()) if sign.isascii() else text.count(sign) for sign in signs)


def _first_over_limit(measured: Sequence[tuple[str, float]], rules: CleaningConfig) -> FilterResult | None:
    for filter_name, value in measured:
        if value > getattr(rules, filter_name):
            return FilterResult(filter_name, round(value, 3))
    return None


def duplicate_ngram_fraction(shingles: Shingles) -> NDArray:
    """Fraction of each document's n-grams that occurred before in it: [documents] float64."""
    counts = shingles.counts
    owner = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)
    ordered = np.sort((owner << np.uint64(32)) | shingles.hashes)
    again = np.zeros(len(ordered), dtype=np.bool_)
    again[1:] = ordered[1:] == ordered[:-1]
    repeats = np.bincount((ordered >> np.uint64(32)).astype(np.int64), weights=again, minlength=len(counts))
    return np.asarray(repeats / np.maximum(counts, 1))


@dataclass(frozen=True)
class LineFilter:
    """Regular expressions for whole lines, combined."""

    pattern: re.Pattern[str]
    """Matches a line to remove."""
    required_literals: tuple[str, ...]
    """Every ASCII line that matches contains one of these, in lower case; empty if unknown."""

    def remove_from(self, text: str) -> tuple[str, int]:
        """The text without matching lines, and their number."""
        matching = {line for line in self._candidate_lines(text) if self.pattern.fullmatch(line)}
        if not matching:
            return text, 0
        lines = text.split("\n")
        remaining = [line for line in lines if line not in matching]
        return "\n".join(remaining).strip("\n"), len(lines) - len(remaining)

    def _candidate_lines(self, text: str) -> set[str]:
        """Lines to match: those with a required literal, and those with non-ASCII characters.

        Ignoring case, a non-ASCII character can equal an ASCII one, such as the long s.
        """
        lowered = text.lower()
        if not self.required_literals or len(lowered) != len(text):
            return set(text.split("\n"))
        candidates = set() if text.isascii() else {line for line in text.split("\n") if not line.isascii()}
        for literal in self.required_literals:
            index = lowered.find(literal)
            while index >= 0:
                end = text.find("\n", index)
                end = len(text) if end < 0 else end
                candidates.add(text[text.rfind("\n", 0, index) + 1 : end])
                index = lowered.find(literal, end)
        return candidates


@lru_cache(maxsize=8)
def compile_line_filter(patterns: tuple[str, ...]) -> LineFilter | None:
    """Combine the patterns; None if there are none."""
    if not patterns:
        return None
    inline = [re.match(r"\(\?([a-z]+)\)", pattern) for pattern in patterns]
    scoped = [f"(?{flags[1]}:{pattern[flags.end() :]})" if flags else f"(?:{pattern})"
              for flags, pattern in zip(inline, patterns, strict=True)]  # fmt: skip
    combined = "|".join(scoped)
    literals = _required_literals(_parser.parse(combined)) or set()
    minimal = [literal for literal in literals if not any(other in literal for other in literals - {literal})]
    return LineFilter(re.compile(combined), tuple(sorted(minimal)))


def _required_literals(parsed: Any) -> set[str] | None:
    """Literals of which every match contains one: the alternative with the longest shortest literal, or None."""
    choices: list[set[str]] = []
    run = ""
    for kind, value in [*parsed, (None, None)]:
        if kind is _parser.LITERAL and value < 128:
            run += chr(value).lower()
            continue
        if run:
            choices.append({run})
            run = ""
        nested = _nested_literals(kind, value)
        if nested:
            choices.append(nested)
    return max(choices, key=lambda literals: min(map(len, literals)), default=None)


def _nested_literals(kind: Any, value: Any) -> set[str] | None:
    """The same for a group, an alternation, or a repetition of at least one."""
    if kind is _parser.SUBPATTERN:
        return _required_literals(value[-1])
    if kind is _parser.BRANCH:
        branches = [_required_literals(part) for part in value[1]]
        return set().union(*(each for each in branches if each)) if all(branches) else None
    if kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT) and value[0] > 0:
        return _required_literals(value[2])
    return None
