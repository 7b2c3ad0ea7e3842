"""Questions and answers about a lyric by rules: each statement is about its words and letters, and can be checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from modelwright.data.readers import Row, describe_columns
from modelwright.errors import DataError, Problem


def word_set(text: str) -> frozenset[str]:
    """The words of a text separated by spaces."""
    return frozenset(text.split())


EXCERPT_LINES = 12
"""Lines of the lyrics in a question; the answers are about these, so that the model sees what they state."""
THEMES = {
    "love": "love loved loves lover lovers heart hearts kiss kissed darling sweetheart dear dearest bonnie",
    "parting and loss": "gone goodbye farewell cry weep tears lonely parted grave mourn die died dying leave",
    "faith": "lord god heaven heavenly pray prayer soul souls grace holy angel angels glory jesus saviour amen",
    "home and the road": "home road highway train travel wander wandered roam bound journey ride riding carry",
    "music and dance": "dance dancing sing singing sang song songs fiddle banjo drum bells tune",
    "work and money": "money work working pay job wages gold rich poor dollar miner hammer toil labour",
    "the sea": "sea ship ships sail sails captain sailor sailors ocean shore wave waves harbour",
    "war and courage": "war battle sword fight fought soldier soldiers trumpet army brave enemy flag",
    "nature": "river rivers mountain mountains valley meadow flower flowers roses star stars moon sun wind tree trees",
}  # fmt: skip
"""Words of each theme."""
BRIGHT = word_set("""sweet joy joyful glad happy gladly merry love loved bright glory smile laugh laughing delight
    delighting hope peace bless blessed saved calm""")  # fmt: skip
DARK = word_set("""lost blind cry weep weeping tears sad sorrow grief lonely dark darkness death die died dying grave
    gone wrong pain fear fears trouble weary wretch mourn""")  # fmt: skip
OLDER_ENGLISH = word_set("thee thou thy thine ye hath doth art tis o'er e'er ne'er whence thither hither unto")
STOP_WORDS = word_set("""
    the and you i to a me it my in of on that for your be is we all but with so this don't just like know got no was
    are when what oh o i'm it's they she he her his him not up can if go get now do have there as at will out one
    from come down let say see make take way been had were would could their them our us than then too am an by or
    who how once shall did
""")  # fmt: skip
"""Words that say little by themselves."""
FIRST_PERSON, SECOND_PERSON = ("i", "me", "my", "we", "us", "our"), ("you", "your", "thee", "thou", "thy", "ye")
WORD_RE = re.compile(r"[a-z]+(?:'[a-z]+)*", re.IGNORECASE)


def generate_song_qa(row: Row) -> Iterator[Row]:
    """Keep a row with question and answer; make six rows of lyrics and artist alone."""
    if "question" in row.values and "answer" in row.values:
        yield row
        return
    lyrics, artist = str(row.values.get("lyrics") or ""), str(row.values.get("artist") or "").strip()
    lines = [" ".join(line.split()) for line in lyrics.splitlines() if line.strip()][:EXCERPT_LINES]
    if not lines or not artist:
        message = "a song wants lyrics and artist, both with text"
        raise DataError([Problem(row.where, f"{message}; {describe_columns(row.values)}")])
    excerpt = "\n".join(lines)
    for question, answer in song_answers(lines, artist).items():
        yield Row(row.where, {**row.values, "lyrics": excerpt, "question": question, "answer": answer})


def song_answers(lines: Sequence[str], artist: str) -> dict[str, str]:
    """Questions about a lyric, with answers that are true of its lines."""
    song = f"this song by {artist}"
    return {
        f"What is the style of {song}?": describe_rhyme(lines),
        f"What is {song} about?": describe_theme(lines),
        f"How does {song} sound?": describe_sound(lines),
        f"How is {song} built?": describe_structure(lines),
        f"What is the mood of {song}?": describe_mood(lines),
        f"Who speaks in {song}, and from where?": describe_speaker(lines),
    }


def describe_rhyme(lines: Sequence[str]) -> str:
    """Number and length of the lines, and which of them end in the same letters."""
    counts = sorted(len(words(line)) for line in lines)
    length = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    form = f"{_count(len(lines), 'line')} of {length} {'word' if length == '1' else 'words'}"
    for first, second in combinations(range(len(lines)), 2):
        ending = common_ending(lines[first], lines[second])
        if ending and second - first <= 3:
            evidence = f"{_last_word(lines[first])} ... {_last_word(lines[second])}"
            statement = f"{form}; lines {first + 1} and {second + 1} end in the same letters, -{ending}"
            return _answer("Style", statement, evidence, "the shape before the story")
    return _answer("Style", f"{form}, without a rhyme that the spelling shows", lines[0], "the shape before the story")


def common_ending(line: str, other: str) -> str:
    """The letters from the last vowel that two different last words share; empty if fewer than two."""
    one, two = _last_word(line).lower(), _last_word(other).lower()
    ending = next((one[n:] for n in range(len(one)) if two.endswith(one[n:])), "")
    return ending if one != two and len(ending) >= 2 and re.match(r"[aeiouy]|.[aeiouy]", ending) else ""


def describe_theme(lines: Sequence[str]) -> str:
    """The theme most of whose words are in the lines; without one, the word that comes most often."""
    present = Counter(word for line in lines for word in words(line.lower()))
    matches = {theme: [word for word in marks.split() if present[word]] for theme, marks in THEMES.items()}
    theme, marks = max(matches.items(), key=lambda item: (len(item[1]), sum(present[word] for word in item[1])))
    listen = "what the words leave unsaid"
    if marks:
        named = " and ".join(f"'{word}'" for word in marks[:3])
        return _answer("Theme", f"{theme}, which the lines name with {named}", _line_with(lines, marks[0]), listen)
    content = Counter(word for word in present.elements() if word not in STOP_WORDS) or present or Counter([lines[0]])
    word, times = content.most_common(1)[0]
    return _answer("Theme", f"it turns on '{word}', said {_times(times)}", _line_with(lines, word), listen)


def describe_sound(lines: Sequence[str]) -> str:
    """Words of one line that begin with the same letter; else the word that comes most often."""
    listen = "the letters that return"
    for line in lines:
        content = [word for word in dict.fromkeys(words(line.lower())) if word not in STOP_WORDS]
        for one, two in combinations(content, 2):
            if one[0] == two[0] and one[0] not in "aeiou" and not two.startswith(one):
                return _answer("Sound", f"'{one}' and '{two}' begin with the same letter in one line", line, listen)
    spoken = Counter(word for line in lines for word in words(line.lower())) or Counter(lines)
    repeated = Counter({word: times for word, times in spoken.items() if times > 1 and word not in STOP_WORDS})
    word, times = (repeated or spoken).most_common(1)[0]
    return _answer("Sound", f"'{word}' is heard {_times(times)}", _line_with(lines, word), listen)


def describe_structure(lines: Sequence[str]) -> str:
    """A line that returns, or an opening that several lines share."""
    listen = "what comes back"
    plain = {line: " ".join(words(line.lower())) for line in lines}
    line, times = Counter(plain[line] for line in lines).most_common(1)[0]
    if times > 1:
        shown = next(each for each in lines if plain[each] == line)
        return _answer("Structure", f"a line comes {_times(times)}", shown, listen)
    openings = Counter(" ".join(words(line.lower())[:2]) for line in lines if len(words(line)) > 1)
    opening, times = openings.most_common(1)[0] if openings else ("", 1)
    if times > 1:
        shown = next(each for each in lines if plain[each].startswith(opening))
        return _answer("Structure", f"{times} lines open with '{opening}'", shown, listen)
    return _answer("Structure", f"{_count(len(lines), 'line')}, and none of them returns", lines[-1], listen)


def describe_mood(lines: Sequence[str]) -> str:
    """Words of joy and of sorrow; without them, whether the lines ask or exclaim."""
    present = list(dict.fromkeys(word for line in lines for word in words(line.lower())))
    bright, dark = ([word for word in present if word in marks][:3] for marks in (BRIGHT, DARK))
    listen = "the turn from one to the other" if bright and dark else "the colour of the words"
    names = [
        f"{kind} in {' and '.join(map(repr, marks))}" for kind, marks in (("light", bright), ("shade", dark)) if marks
    ]
    if names:
        return _answer("Mood", ", ".join(names), _line_with(lines, (bright or dark)[0]), listen)
    for mark, what in (("!", "it calls out"), ("?", "it asks")):
        if shown := next((line for line in lines if mark in line), None):
            return _answer("Mood", f"{what}, with '{mark}'", shown, listen)
    return _answer("Mood", "level, without a question mark or an exclamation mark", lines[0], listen)


def describe_speaker(lines: Sequence[str]) -> str:
    """Who says the lines to whom, words of older English, and names within the lines."""
    present = {word for line in lines for word in words(line.lower())}
    speaker, hearer = (
        next((word for word in marks if word in present), None) for marks in (FIRST_PERSON, SECOND_PERSON)
    )
    parts = [
        f"a voice that says '{'I' if speaker == 'i' else speaker}'" if speaker else "a voice that does not name itself"
    ]
    parts += [f"speaks to '{hearer}'"] if hearer else []
    older = next((word for line in lines for word in words(line.lower()) if word in OLDER_ENGLISH), None)
    parts += [f"in older English ('{older}')"] if older else []
    names = re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{2,}(?: [A-Z][a-z]+)*", "\n".join(lines))
    parts += [f"and names {names[0]}"] if names else []
    shown = names[0] if names else speaker or hearer or older or lines[0]
    return _answer("Context", " ".join(parts), _line_with(lines, shown), "who is listening")


def _answer(kind: str, statement: str, evidence: str, listen: str) -> str:
    return f'{kind}: {statement}. Evidence: "{evidence.rstrip(",;:.")}". Listen for {listen}.'


def words(text: str) -> list[str]:
    """The words of a text, with their apostrophes."""
    return WORD_RE.findall(text)


def _last_word(line: str) -> str:
    return (words(line) or [line])[-1]


def _line_with(lines: Sequence[str], text: str) -> str:
    pattern = re.compile(rf"(?<![\w']){re.escape(text)}(?![\w'])", re.IGNORECASE)
    return next((line for line in lines if pattern.search(line)), lines[0])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
