"""Questions and answers about a lyric by rules: each statement is about its words and letters, and can be checked."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from modelwright.data.readers import Row, describe_columns
from modelwright.errors import DataError, Problem


def word_set(text: str) -> frozenset[str]:
    """The words of a text separated by spaces."""
    return frozenset(text.split())


Statement = tuple[str, str]
"""What is said of the lines, and the words of the lines that show it."""
EXCERPT_LINES = 12
"""Lines of the lyrics in a question; the answers are about these, so that the model sees what they state."""
THEMES = {
    "love": "love loved loves lover lovers heart hearts kiss kissed darling sweetheart dearest",
    "parting and loss": "gone goodbye farewell weep tears lonely parted grave mourn die died dying",
    "faith": "lord god heaven heavenly pray prayer soul souls grace holy angel angels glory jesus saviour amen",
    "home and the road": "home road highway train travel wander wandered roam journey ride riding",
    "music and dance": "dance dancing sing singing sang song songs fiddle banjo drum tune",
    "work and money": "money work working pay wages dollar miner hammer toil labour",
    "the sea": "sea ship ships sail sails captain sailor sailors ocean shore waves harbour",
    "war and courage": "war battle sword fight fought soldier soldiers trumpet army brave enemy",
    "nature": "river rivers mountain mountains valley meadow flower flowers roses star stars moon sun tree trees",
}  # fmt: skip
"""Words of each theme."""
BRIGHT = word_set("""sweet joy joyful glad happy gladly merry merrily love loved glory smile laugh laughing delight
    delighting hope peace bless blessed""")  # fmt: skip
DARK = word_set("""cry weep weeping tears sad sorrow grief lonely darkness death die died dying grave pain fear fears
    weary wretch mourn alas hate hated hates bitter cruel wrong lost""")  # fmt: skip
NEGATIONS = word_set("""no not never nor neither none nothing nobody without cannot can't cant don't dont won't wont
    ain't aint isn't wasn't didn't doesn't couldn't wouldn't shouldn't haven't hasn't hadn't aren't weren't ne'er
    nought hardly scarcely barely seldom""")  # fmt: skip
"""Words that may turn a word of joy or sorrow in their line into its opposite."""
OLDER_ENGLISH = word_set("thee thou thy thine hath doth tis o'er e'er ne'er whence thither hither unto")
STOP_WORDS = word_set("""
    the and you i to a me it my in of on that for your be is we all but with so this don't just like know got no was
    are when what oh o i'm it's they she he her his him not up can if go get now do have there as at will out one
    from come down let say see make take way been had were would could their them our us than then too am an by or
    who how once shall did
""")  # fmt: skip
"""Words that say little by themselves."""
COMMON_ENGLISH = STOP_WORDS | OLDER_ENGLISH | word_set("where these those more again never over into some why must")
COMMON_ELSEWHERE = word_set("""
    der das und nicht ich ist ein eine mein dich le les et je ne pas que qui en un el los las y una il che di non mi
    het een niet ik det jag jeg att och ja nie te tu si se ke e sy ek moj nas dla
""")  # fmt: skip
"""Words of other languages that are no English words."""
FIRST_PERSON, SECOND_PERSON = word_set("I me Me my My we We our Our"), word_set("you your thee thou thy ye")
MAYBE_FIRST_PERSON = word_set("i me my we our us mine myself ours ourselves im ive id ill lets gimme lemme methinks")
"""Words that may be of the first person, so that it cannot be said that there is none; 'mine' is also a pit."""
WORD_RE = re.compile(r"[^\W_](?:[^\W_]|[*\u0300-\u036f]|['-](?=[^\W_])|(?<=\d)[.,:](?=\d))*")
OTHER_SCRIPT_RE = re.compile(r"[^\W\u0000-\u052f]")
"""A letter outside of Latin, Greek and Cyrillic: spaces may not separate the words."""
PLAIN_SIGNS = str.maketrans("’‘ʼ´`！？", "'''''!?", "\u200b\ufeff\u00ad")
PUNCTUATION = ".,;:!?…\"'“”„«»()¡¿-–—"
MARK = r"(?:(?:pre[- ]?)?chorus|verse|refrain|bridge|hook|intro|outro|interlude|instrumental|repeat|x ?\d+|\d+ ?x)\b"
MARKS = rf"{MARK}(?:[ :,.&-]+(?:{MARK}|\d+\b|[ivx]+\b|and\b|to\b|fade\b))*"
SECTION_MARK_RE = re.compile(
    rf"^[ \t]*\[[^\]\n]*\][ \t]*$|\[[\d:. ]+\]|\[[^\[\]\n]*\b{MARK}[^\[\]\n]*\]|\(\s*{MARKS}[^\w\n)]*\)"
    rf"|^[^\w\n]*{MARKS}[^\w\n]*(?:$|:)|^[ \t]*\d+[.)](?=\s)",
    re.IGNORECASE | re.MULTILINE,
)
"""[Verse 1], (x2), Chorus: and 1. are about the song; they are not sung."""


def generate_song_qa(row: Row) -> Iterator[Row]:
    """Keep a row with question and answer; make up to six rows of lyrics and artist, whose names may have capitals."""
    names = {name: str(name).strip().lower() for name in row.values}
    wanted = {"lyrics", "artist", "question", "answer"}.difference(row.values)
    values = {names[name] if names[name] in wanted else name: value for name, value in row.values.items()}
    if "question" in values and "answer" in values:
        yield Row(row.where, values)
        return
    lyrics, artist = values.get("lyrics"), " ".join(str(values.get("artist") or "").split())
    lines = song_lines(lyrics)[:EXCERPT_LINES] if isinstance(lyrics, str) else []
    if not lines or not artist:
        message = "a song wants lyrics and artist, both with text"
        allowed = "data.max_invalid_fraction says how many such rows are set aside"
        raise DataError([Problem(row.where, f"{message}; {describe_columns(row.values)}; {allowed}")])
    excerpt = "\n".join(lines)
    for question, answer in song_answers(lines, artist).items():
        yield Row(row.where, {**values, "lyrics": excerpt, "artist": artist, "question": question, "answer": answer})


def song_lines(lyrics: str) -> list[str]:
    """The lines that are sung: without section marks and lines without a letter or digit, with plain apostrophes."""
    sung = SECTION_MARK_RE.sub("\n", unicodedata.normalize("NFC", lyrics).translate(PLAIN_SIGNS))
    return [" ".join(line.split()) for line in sung.splitlines() if any(map(str.isalnum, line))]


def song_answers(lines: Sequence[str], artist: str) -> dict[str, str]:
    """Questions about a lyric, with answers that are true of its first lines; none where nothing is sure."""
    song, lines = f"this song by {artist}", lines[:EXCERPT_LINES]
    english, answers = is_english(lines), {}
    scope = f"in the first {EXCERPT_LINES} lines, " if len(lines) == EXCERPT_LINES else ""
    for question, kind, describe, listen in (
        (f"What is the style of {song}?", "Style", describe_rhyme, "the shape before the story"),
        (f"What is {song} about?", "Theme", describe_theme, "what the words leave unsaid"),
        (f"How does {song} sound?", "Sound", describe_sound, "the letters that return"),
        (f"How is {song} built?", "Structure", describe_structure, "where each line stands"),
        (f"What is the mood of {song}?", "Mood", describe_mood, "the colour of the words"),
        (f"Who speaks in {song}, and from where?", "Context", describe_speaker, "who is listening"),
    ):
        statement, shown = describe(lines, english) or ("", "")
        where, evidence = "" if kind == "Style" else scope, shown.rstrip(",;:.") or shown
        if statement:
            answers[question] = f'{kind}: {where}{statement}. Evidence: "{evidence}". Listen for {listen}.'
    return answers


def is_english(lines: Sequence[str]) -> bool:
    """Whether a quarter of the words are common in English, and at most a tenth as many are foreign.

    Of 49 English songs 47 have 30% or more; of 33 in other languages, those without foreign ones have at most 11%.
    """
    spoken = [word for line in lines for word in words(line.lower())]
    common = sum(not COMMON_ENGLISH.isdisjoint((word, word.split("'")[0])) for word in spoken)
    foreign = sum(word in COMMON_ELSEWHERE or not word.isascii() for word in spoken)
    return 4 * common >= len(spoken) > 0 and 10 * foreign <= common


def describe_rhyme(lines: Sequence[str], english: bool) -> Statement:
    """Number and length of the lines, and which of them end in the same letters."""
    opening = "opening " if len(lines) == EXCERPT_LINES else ""
    form = _count(len(lines), f"{opening}line")
    counts = [len(words(line)) for line in lines]
    clear = english or not re.search(rf"'|{OTHER_SCRIPT_RE.pattern}", "".join(lines))
    if clear and counts == [sum(bool(part.strip(PUNCTUATION)) for part in line.split()) for line in lines]:
        length = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        form += f" of {length} {'word' if length == '1' else 'words'}"
    for first, second in combinations(range(len(lines)), 2):
        ending = common_ending(lines[first], lines[second])
        if english and ending and second - first <= 3:
            evidence = f"{_last_word(lines[first])} ... {_last_word(lines[second])}"
            return f"{form}; lines {first + 1} and {second + 1} end in the same letters, -{ending}", evidence
    return form, lines[0]


def common_ending(line: str, other: str) -> str:
    """The last letters that two different last words share, with a vowel; empty if fewer than two."""
    one, two = _last_word(line).lower(), _last_word(other).lower()
    ending = next((one[n:] for n in range(len(one)) if two.endswith(one[n:])), "")
    return ending if one != two and len(ending) >= 2 and re.match(r"[aeiouy]|.[aeiouy]", ending) else ""


def describe_theme(lines: Sequence[str], english: bool) -> Statement | None:
    """The theme most of whose words are in the lines; without one, a word that returns."""
    present = Counter(word for line in lines for word in words(line.lower()))
    matches = {theme: [word for word in marks.split() if present[word]] for theme, marks in THEMES.items()}
    theme, marks = max(matches.items(), key=lambda item: (len(item[1]), sum(present[word] for word in item[1])))
    if english and marks:
        kind = "words" if len(marks) > 1 else "a word"
        return f"{kind} of {theme}: {_quoted(marks[:3])}", _line_with(lines, marks[0])
    return _returning_word(lines, "it returns to '{}', which comes {}") if english else None


def describe_sound(lines: Sequence[str], english: bool) -> Statement | None:
    """Words of one line that begin with the same letter; else a word that returns."""
    for line in lines if english else ():
        content = [word for word in dict.fromkeys(words(line.lower())) if _says_much(word)]
        for one, two in combinations(content, 2):
            if one[0] == two[0] and one[0] not in "aeiou" and not two.startswith(one):
                return f"'{one}' and '{two}' begin with the same letter in one line", line
    return _returning_word(lines, "'{}' comes {}")


def describe_structure(lines: Sequence[str], english: bool) -> Statement:
    """A line that returns, or an opening that several lines share."""
    plain = ["".join(sign for sign in line.lower() if unicodedata.category(sign)[0] in "LMN") for line in lines]
    line, times = Counter(plain).most_common(1)[0]
    if times > 1:
        return f"a line comes {_times(times)}", lines[plain.index(line)]
    openings = [" ".join(words(line.lower())[:2]) for line in lines]
    (opening, times), *_ = Counter(each for each in openings if " " in each).most_common(1) or [("", 0)]
    if times > 1 and not OTHER_SCRIPT_RE.search("".join(lines)):
        return f"{times} lines open with '{opening}'", lines[openings.index(opening)]
    return "no two lines are the same" if len(lines) > 1 else "it is one line", lines[-1]


def describe_mood(lines: Sequence[str], english: bool) -> Statement | None:
    """Words of joy and of sorrow in lines without a negation; without them, whether a line asks or exclaims."""
    positive = [line for line in lines if english and NEGATIONS.isdisjoint(words(line.lower()))]
    present = dict.fromkeys(word for line in positive for word in words(line.lower()))
    bright, dark = ([word for word in present if word in marks][:3] for marks in (BRIGHT, DARK))
    if kinds := [("bright", bright)] * bool(bright) + [("dark", dark)] * bool(dark):
        named = ", ".join(f"the {kind} word{'s' * (len(each) > 1)} {_quoted(each)}" for kind, each in kinds)
        return named, _line_with(positive, (bright or dark)[0])
    for mark, what in (("!", "it calls out"), ("?", "it asks")):
        if shown := next((line for line in lines if re.search(rf"(?<![\[(]){re.escape(mark)}", line)), None):
            return f"{what}, with '{mark}'", shown
    return None


def describe_speaker(lines: Sequence[str], english: bool) -> Statement | None:
    """Which words for itself and for a hearer a voice says, and words of older English."""
    spoken = [word for line in lines for word in words(line)] if english else []
    speaker = next((word for word in spoken if word.split("'")[0] in FIRST_PERSON), "")
    hearer = next((word.lower() for word in spoken if word.lower().split("'")[0] in SECOND_PERSON), "")
    older = next((word.lower() for word in spoken if word.lower() in OLDER_ENGLISH), "")
    pronouns = [word for word in (speaker if speaker.startswith("I") else speaker.lower(), hearer) if word]
    parts = [f"says {_quoted(pronouns)}"] if pronouns else []
    if spoken and MAYBE_FIRST_PERSON.isdisjoint(part for word in spoken for part in re.split("['-]", word.lower())):
        parts.append("does not say 'I', 'my' or 'we'")
    parts += [f"uses the older English word '{older}'"] if older else []
    shown = _line_with(lines, (*pronouns, older, "")[0])
    return (f"a voice that {' and '.join(parts)}", shown) if parts else None


def words(text: str) -> list[str]:
    """The words of a text, with their apostrophes and hyphens."""
    return WORD_RE.findall(text)


def _says_much(word: str) -> bool:
    return len(word) > 1 and STOP_WORDS.isdisjoint((word, word.split("'")[0]))


def _returning_word(lines: Sequence[str], statement: str) -> Statement | None:
    spoken = Counter(word for line in lines for word in words(line.lower()) if _says_much(word))
    (word, times), *_ = spoken.most_common(1) or [("", 0)]
    if times < 2 or OTHER_SCRIPT_RE.search("".join(lines)):
        return None
    return statement.format(word, _times(times)), _line_with(lines, word)


def _last_word(line: str) -> str:
    return (words(line) or [line])[-1]


def _line_with(lines: Sequence[str], word: str) -> str:
    return next((line for line in lines if word.lower() in words(line.lower())), lines[0])


def _quoted(marks: Sequence[str]) -> str:
    return " and ".join(f"'{word}'" for word in marks)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _times(number: int) -> str:
    return {2: "twice"}.get(number, f"{number} times")
