"""Take out lines that match a pattern, looking only at those that hold a word without which none can match."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any


@dataclass(frozen=True)
class Lines:
    """Patterns for whole lines, as one."""

    pattern: re.Pattern[str]
    """Matches a line that goes."""
    words: tuple[str, ...]
    """Every ASCII line that goes holds one of these, in lower case; none where that cannot be said."""

    def without(self, text: str) -> tuple[str, int]:
        """The text without the lines that match, and how many they were."""
        doomed = {line for line in self._suspects(text) if self.pattern.fullmatch(line)}
        if not doomed:
            return text, 0
        lines = text.split("\n")
        kept = [line for line in lines if line not in doomed]
        return "\n".join(kept).strip("\n"), len(lines) - len(kept)

    def _suspects(self, text: str) -> set[str]:
        """Lines that are worth a look: those that hold a word, and those with other letters than ASCII.

        Without its case, such a letter may be the same as one of ASCII: the long s is.
        """
        low = text.lower()
        if not self.words or len(low) != len(text):
            return set(text.split("\n"))
        found = set() if text.isascii() else {line for line in text.split("\n") if not line.isascii()}
        for word in self.words:
            place = low.find(word)
            while place >= 0:
                end = text.find("\n", place)
                end = len(text) if end < 0 else end
                found.add(text[text.rfind("\n", 0, place) + 1 : end])
                place = low.find(word, end)
        return found


@lru_cache(maxsize=8)
def lines_of(patterns: tuple[str, ...]) -> Lines | None:
    """The patterns as one, each for a whole line; None where there are none."""
    if not patterns:
        return None
    inline = [re.match(r"\(\?([a-z]+)\)", pattern) for pattern in patterns]
    scoped = [f"(?{flags[1]}:{pattern[flags.end() :]})" if flags else f"(?:{pattern})"
              for flags, pattern in zip(inline, patterns, strict=True)]  # fmt: skip
    whole = "|".join(scoped)
    words = _needed(_parser.parse(whole)) or set()
    fewest = [word for word in words if not any(other in word for other in words - {word})]
    return Lines(re.compile(whole), tuple(sorted(fewest)))


def _needed(parsed: Any) -> set[str] | None:
    """Words of which every match holds one: the choice whose shortest word is longest; None where there is none."""
    choices: list[set[str]] = []
    run = ""
    for kind, value in [*parsed, (None, None)]:
        if kind is _parser.LITERAL and value < 128:
            run += chr(value).lower()
            continue
        if run:
            choices.append({run})
            run = ""
        found = _inside(kind, value)
        if found:
            choices.append(found)
    return max(choices, key=lambda words: min(map(len, words)), default=None)


def _inside(kind: Any, value: Any) -> set[str] | None:
    """The same for a part that holds others: a group, a choice, a repetition that happens at least once."""
    if kind is _parser.SUBPATTERN:
        return _needed(value[-1])
    if kind is _parser.BRANCH:
        found = [_needed(part) for part in value[1]]
        return set().union(*(each for each in found if each)) if all(found) else None
    if kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT) and value[0] > 0:
        return _needed(value[2])
    return None
