"""Columns made of columns, and songs that become questions and answers by what can be counted in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from modelwright.data.chat import load_conversations, rows_to_conversations
from modelwright.data.readers import Row
from modelwright.data.songs import is_english, song_answers, song_lines
from modelwright.data.sources import EMBEDDED_DATASETS, add_derived_columns, read_train_rows
from modelwright.errors import DataError
from modelwright.recipe.load import load as load_recipe
from modelwright.recipe.sections import DataConfig

SONG = {
    "lyrics": "Lord, I pray the road is long\nLord, I sing the same old song\n\n"
    "Heaven holds the light of day\nDown the road and far away",
    "artist": "Nobody",
}  # fmt: skip
FULL = {"full-question": "For {topic}, {question}"}


def test_topic_and_question_become_the_full_question_of_the_parquet_file() -> None:
    data = DataConfig(
        dataset_name="x", columns={"full-question": "prompt", "answer": "completion"}, derived_columns=FULL
    )
    rows = [Row("a:1", {"topic": "Knots", "question": "What holds?", "answer": "A bowline."}),
            Row("b:1", {"full-question": "For Fire, What burns?", "answer": "Birch bark."})]  # fmt: skip
    assert [item.last_user_message for item in rows_to_conversations(rows, data)] == [
        "For Knots, What holds?",
        "For Fire, What burns?",
    ]


def test_a_template_that_asks_for_a_column_that_is_not_there_is_one_error() -> None:
    data = DataConfig(dataset_name="x", derived_columns=FULL)
    with pytest.raises(DataError, match=r"a:1.*'topic', which is not there; the columns are question"):
        rows_to_conversations([Row("a:1", {"question": "What holds?"})], data)


def test_a_song_becomes_rows_with_evidence_from_its_words() -> None:
    data = DataConfig(dataset_name="x", generate_qa="songs")
    built = [row for row in add_derived_columns([Row("songs:7", SONG)], data) if isinstance(row, Row)]
    assert [row.values["answer"].partition(":")[0] for row in built] == [
        "Style", "Theme", "Sound", "Structure", "Context"], "nothing of its mood is sure"  # fmt: skip
    style, theme, sound, structure, *_ = (row.values["answer"] for row in built)
    assert style.startswith("Style: 4 lines of 6 to 7 words; lines 1 and 2 end in the same letters, -ong.")
    assert theme.startswith("Theme: words of faith: 'lord' and 'heaven' and 'pray'.")
    assert sound.startswith("Sound: 'lord' and 'long' begin with the same letter in one line.")
    assert structure.startswith("Structure: 2 lines open with 'lord i'.")
    assert all(row.where == "songs:7" for row in built)


ANSWERS = Path(__file__).parent / "song_answers.json"
"""110 answers about twenty songs in the public domain, each statement of which was checked with the lyric."""


def test_the_checked_answers_are_what_the_rules_say() -> None:
    songs = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert len(songs) == 20 and sum(len(song["answers"]) for song in songs) == 110
    style = load_recipe("lyrics-pythia", environ={}).recipe.compare.style_patterns
    for song in songs:
        lines = song_lines("\n".join(song["lyrics"]))
        answers = list(song_answers(lines, song["artist"]).values())
        assert answers == song["answers"], song["title"]
        for answer in answers:
            evidence = re.search(r'Evidence: "(.*?)"\. Listen', answer)
            assert evidence and all(part in "\n".join(lines) for part in evidence[1].split(" ... ")), answer
            statement = answer.partition(" Evidence: ")[0].replace("does not say 'I', 'my' or 'we'", "")
            quoted = re.findall(r"'([\w']+?)'", statement)
            assert all(word.lower() in " ".join(lines).lower() for word in quoted), answer
            assert all(re.search(pattern, answer, re.DOTALL) for pattern in style), answer


def answers_about(lyrics: str) -> dict[str, str]:
    """The statement of each answer, by its kind."""
    answers = song_answers(song_lines(lyrics), "Nobody").values()
    return {kind: rest.partition(". Evidence")[0] for kind, _, rest in (answer.partition(": ") for answer in answers)}


NOTHING = None
"""The question is not asked."""
ENGLISH = "and so it is\nthat all of you may see what it is to be\n"
STATEMENTS = [
    # contractions and 'mine' are of the first person, and a lower-case i' is not
    ("We're marching to the hill and on", "Context", "a voice that says 'we're'"),
    ("I'm a-going down the road", "Context", "a voice that says 'I'm'"),
    ("Mine eyes have seen the glory of the coming of the Lord", "Context", NOTHING),
    ("Blow, ye winds, i' the morning,\nto the sea", "Context", "a voice that says 'ye'"),
    ("Come, Thou Fount of every blessing, to my heart", "Context",
     "a voice that says 'my' and 'thou' and uses the older English word 'thou'"),
    # words of any alphabet, with their digits and apostrophes
    ("Широка страна моя родная\nМного в ней лесов, полей и рек", "Style", "2 lines of 4 to 7 words"),
    ("Широка страна моя родная\nМного в ней лесов, полей и рек", "Structure", "no two lines are the same"),
    ("さくら さくら\nやよいの空は", "Style", "2 lines"),
    ("हिन्दी कि\nहिन्दी की", "Structure", "no two lines are the same"),
    ("Étoile du soir\nÉtoile du matin", "Sound", "'étoile' comes twice"),
    ("E\u0301toile du soir\nÉtoile du soir!", "Structure", "a line comes twice"),
    ("Don’t go to the river\nCan’t you see it", "Style", "2 lines of 4 to 5 words"),
    ("Don’t go to the river\nCan’t you see it", "Sound", NOTHING),
    ("99 bottles of beer on the wall\n98 bottles of beer on the wall", "Structure", "no two lines are the same"),
    ("It is for you & me\nand rock-'n'-roll", "Style", "2 lines"),
    ("sky and so it is\nfly and so it was", "Style", "2 lines of 5 words"),
    # what is said of English words is said of English lyrics
    ("Die Luft ist kühl und es dunkelt,\nUnd ruhig fließt der Rhein", "Theme", NOTHING),
    ("War so jung und morgenschön,\nLief er schnell, es nah zu sehn", "Theme", NOTHING),
    ("Row, row, row your boat,\nGently down the stream", "Theme", "it returns to 'row', which comes 3 times"),
    # a negation in the line
    (ENGLISH + "No hope, no peace\nNot happy", "Mood", NOTHING),
    (ENGLISH + "No joy\nand joy", "Mood", "the bright word 'joy'"),
    # marks of sections, and lines without a word
    ("[Verse 1]\nRow, row your boat (x2)\n[Chorus]\n(Oh yeah)\nChorus x2:\n…\n...\ndown the stream", "Style",
     "3 lines of 2 to 4 words"),
    ("Chorus: Bridge over the water\nHook, line and sinker", "Style",
     "2 lines of 4 words; lines 1 and 2 end in the same letters, -er"),
    (ENGLISH + "[?] of it", "Mood", NOTHING),
    # the first twelve lines
    ("\n".join(f"It is {n} and so" for n in range(40)), "Style", "12 opening lines of 5 words"),
    ("\n".join(f"{n} is and so" for n in range(40)), "Structure", "in the first 12 lines, no two lines are the same"),
]  # fmt: skip
"""Statements that were false once, with what is said now."""


@pytest.mark.parametrize(("lyrics", "kind", "statement"), STATEMENTS)
def test_a_statement_is_true_or_left_out(lyrics: str, kind: str, statement: str) -> None:
    assert answers_about(lyrics).get(kind) == statement


OTHER_LANGUAGES = {
    "German": "So hat er die Hand am Arm\nWar all das Gold am Ende warm",
    "German and English": "Ich liebe dich, my baby, du bist mein\nI love you, I love you, und ich bin allein",
    "French": "Au clair de la lune,\nMon ami Pierrot,\nMa chandelle est morte",
    "Spanish": "La cucaracha, la cucaracha\nya no puede caminar\nporque no tiene, porque le falta",
    "Italian": "Venite all'agile barchetta mia,\nSanta Lucia! Santa Lucia!",
    "Dutch": "ben ik van Duitsen bloed,\nblijf ik tot in den dood.\nme vader was er of we dan",
    "Afrikaans": "My Sarie Marais is so ver van my hart,\nSy het in die wyk van die Mooirivier gewoon",
    "Swedish": "Du gamla, du fria, du fjällhöga Nord,\nJag hälsar dig, vänaste land",
    "Polish": "Jeszcze Polska nie zginęła,\nKiedy my żyjemy.",
    "Portuguese": "Se essa rua fosse minha\nEu mandava ladrilhar",
    "Latin": "Adeste fideles, laeti triumphantes,\nvenite in Bethlehem",
    "Indonesian": "Indonesia tanah airku\nTanah tumpah darahku",
    "Swahili": "Mungu ibariki Afrika\nWabariki viongozi wake",
}


def test_only_english_lyrics_look_english() -> None:
    assert [name for name, text in OTHER_LANGUAGES.items() if is_english(song_lines(text))] == []
    rows = [json.loads(line) for line in EMBEDDED_DATASETS["songbook"].read_text(encoding="utf-8").splitlines()]
    short = ["Row, row, row your boat,\nGently down the stream", "Three blind mice. See how they run.",
             "Jingle bells, jingle bells,\nJingle all the way", "London Bridge is falling down"]  # fmt: skip
    assert [text for text in [*short, *{row["lyrics"] for row in rows}] if not is_english(song_lines(text))] == []


def test_columns_may_have_capitals() -> None:
    data = DataConfig(dataset_name="x", generate_qa="songs")
    (row, *_), (other, *_) = (
        list(add_derived_columns([Row("songs:1", values)], data))
        for values in ({"Lyrics": SONG["lyrics"], "ARTIST ": "Nobody", "Year": 1900}, {**SONG, "Year": 1900})
    )
    assert row == other


def test_the_prompts_of_the_lyrics_recipes_have_the_form_that_is_trained() -> None:
    for prompt in load_recipe("lyrics-pythia", environ={}).recipe.compare.prompts:
        question, lyrics, artist = re.fullmatch(r"(.*?)\n\n(.*)\n\((.*)\)", prompt, re.DOTALL).groups()  # type: ignore[union-attr]
        assert question in song_answers(song_lines(lyrics), artist)
    rows = [json.loads(line) for line in EMBEDDED_DATASETS["songbook"].read_text(encoding="utf-8").splitlines()]
    prompts = load_recipe("lyrics-pythia-tiny", environ={}).recipe.compare.prompts
    assert {prompt.partition("\n")[0] for prompt in prompts} <= {row["question"] for row in rows}


@pytest.mark.parametrize("lyrics", ["La", "?!", "7 7 7", "the the the", "Ça ira\nÇa ira", "x\n" * 40])
def test_odd_lyrics_get_answers_too(lyrics: str) -> None:
    answers = song_answers([line for line in lyrics.splitlines() if line.strip()], "Nobody")
    assert len(answers) >= 2 and all("Evidence: " in answer for answer in answers.values())


def test_a_song_without_lyrics_is_one_error_and_a_row_with_an_answer_stays() -> None:
    data = DataConfig(dataset_name="x", generate_qa="songs")
    with pytest.raises(DataError, match=r"a song wants lyrics and artist.*data\.max_invalid_fraction"):
        rows_to_conversations([Row("songs:1", {"lyrics": " ", "artist": "Nobody"})], data)
    answered = Row("songs:2", {"lyrics": "La", "artist": "Nobody", "question": "Why?", "answer": "Because."})
    assert list(add_derived_columns([answered], data)) == [answered]


def test_every_row_of_the_songbook_quotes_its_song_and_has_the_voice_that_the_recipe_measures() -> None:
    rows = [json.loads(line) for line in EMBEDDED_DATASETS["songbook"].read_text(encoding="utf-8").splitlines()]
    style = load_recipe("lyrics-pythia-tiny", environ={}).recipe.compare.style_patterns
    assert len(rows) == 72
    assert len({row["lyrics"] for row in rows}) == 24
    assert len({row["answer"] for row in rows}) == 72
    for row in rows:
        evidence = re.search(r'Evidence: "(.*?)"\. Listen', row["answer"])
        assert evidence, row["question"]
        flat = " ".join(row["lyrics"].split())
        assert all(part in flat for part in evidence[1].split(" ... ")), row["question"]
        assert all(re.search(pattern, row["answer"], re.DOTALL) for pattern in style), row["question"]


def test_a_song_of_the_songbook_is_in_one_split() -> None:
    recipe = load_recipe("lyrics-pythia-tiny", environ={}).recipe
    assert recipe.data is not None
    result = load_conversations(recipe.data, recipe.seed, Path())
    assert (len(result.train), len(result.held_out)) == (60, 12)
    assert not {item.split_key for item in result.train} & {item.split_key for item in result.held_out}
    assert "(" in result.train[0].last_user_message.splitlines()[-1], "the artist stands below the lyrics"


def test_only_the_first_rows_are_read_where_max_rows_says_so() -> None:
    assert len(read_train_rows(DataConfig(dataset_name="songbook", max_rows=5), Path())) == 5


@pytest.mark.parametrize("file", ["qa_dataset.parquet", "final_qa_data_unique.jsonl"])
def test_the_practical_skills_set_is_split_by_question_in_either_form(shared: Path, file: str) -> None:
    source = shared / "data" / "practical-skills-qa" / file
    recipe = load_recipe("survival-smollm3", environ={"DATA_DIR": str(source)}).recipe
    assert recipe.data is not None
    result = load_conversations(recipe.data, recipe.seed, Path())
    assert len(result.train) + len(result.held_out) == 2845
    assert result.manifest(recipe.data)["prompts_in_both_splits"] == 0
    assert result.train[0].last_user_message.startswith("For ")
