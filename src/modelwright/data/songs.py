"""Questions and answers about songs, out of their lyrics and artist alone: only what can be counted in the words.

Sets of lyrics have no answers to learn from. What a song's form, its recurring words and its lines show is said here
in the voice of the embedded songbook, each claim with its evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from modelwright.data.files import Row
from modelwright.errors import DataError, Problem

LONGEST_EXCERPT = 8
"""Lines of a song that a question shows."""
THEMES = {
    "love": "love heart kiss darling baby sweetheart lover hold arms",
    "loss": "gone goodbye cry tears lonely left miss grave alone lost",
    "faith": "lord god heaven pray soul grace holy angel glory jesus",
    "the road": "road home highway train travel away miles river wander bound",
    "the night out": "dance night party tonight drink music floor light shake",
    "defiance": "fight stand never free war power strong break rise",
    "money and work": "money work pay job wages gold rich poor hustle dollar",
    "the sea": "sea ship sail captain sailor ocean shore wave harbor",
}
"""Words that point at a theme; a song is said to have one where it uses at least two of them."""
WORD = re.compile(r"[a-z']+")
COMMON = (
    "the and you i to a me it my in of on that for your be is we all but with so this don't just like know got no was "
    "are when what oh i'm it's they she he her his him not up can if go get now do have there as at will out one from "
    "come down let say see make take way been had were would could their them our us than then too am an by or"
)
"""Words that say nothing about a song."""


def pairs_of(row: Row) -> Iterator[Row]:
    """A row with question and answer stays as it is; lyrics and artist alone become one row for style, theme, sound."""
    if "question" in row.values and "answer" in row.values:
        yield row
        return
    lyrics, artist = str(row.values.get("lyrics") or ""), str(row.values.get("artist") or "").strip()
    lines = [" ".join(line.split()) for line in lyrics.splitlines() if line.strip()]
    if not lines or not artist:
        seen = ", ".join(map(str, row.values))
        raise DataError([Problem(row.where, f"a song wants lyrics and artist, both with text; the columns are {seen}")])
    shown = "\n".join(lines[:LONGEST_EXCERPT])
    asked = {
        f"What is the style of this song by {artist}?": style_of(lines),
        f"What is this song by {artist} about?": theme_of(lines),
        f"How does this song by {artist} sound?": sound_of(lines),
    }
    for question, answer in asked.items():
        yield Row(row.where, {**row.values, "lyrics": shown, "question": question, "answer": answer})


def style_of(lines: list[str]) -> str:
    """How the song is built: its length, its refrain, how its lines end."""
    words = sum(len(line.split()) for line in lines) / len(lines)
    refrain, times = Counter(lines).most_common(1)[0]
    pairs = [(_sound(one), _sound(two)) for one, two in zip(lines[::2], lines[1::2], strict=False)]
    rhymed = sum(one == two for one, two in pairs)
    form = f"{len(lines)} lines of about {words:.0f} words"
    turns = f"with a line that comes {times} times" if times > 1 else "without a repeated line"
    ends = "mostly in rhymed couplets" if pairs and rhymed * 2 > len(pairs) else "with few rhymed couplets"
    return f'Style: {form}, {turns}, {ends}. Evidence: "{refrain}". Listen for the shape before the story.'


def theme_of(lines: list[str]) -> str:
    """What the words point at, where at least two of them do."""
    words = Counter(_words(lines))
    found = {theme: [word for word in marks.split() if words[word]] for theme, marks in THEMES.items()}
    theme, marks = max(found.items(), key=lambda item: (len(item[1]), sum(words[word] for word in item[1])))
    if len(marks) < 2:
        return (
            f'Theme: no one theme by its words alone. Evidence: "{lines[0]}". Listen for what the words leave unsaid.'
        )
    return (
        f'Theme: {theme}, by its words. Evidence: "{" ... ".join(marks[:4])}". Listen for what the words leave unsaid.'
    )


def sound_of(lines: list[str]) -> str:
    """The word that comes most often, and how many different ones there are."""
    common = COMMON.split()
    words = [word for word in _words(lines) if word not in common]
    if not words:
        return f'Sound: small words only. Evidence: "{lines[0]}". Listen for the word that returns.'
    word, times = Counter(words).most_common(1)[0]
    share = len(set(words)) / len(words)
    range_of_words = "a wide choice of words" if share > 0.7 else "few words, often repeated"
    return f'Sound: {range_of_words}. Evidence: "{word}", {times} times. Listen for the word that returns.'


def _words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in WORD.findall(line.lower())]


def _sound(line: str) -> str:
    """The end of a line as it is heard, roughly: its last vowel and what follows."""
    words = WORD.findall(line.lower())
    ending = re.search(r"[aeiouy]+[^aeiouy]*$", words[-1].removesuffix("e")) if words else None
    return ending[0] if ending else line
