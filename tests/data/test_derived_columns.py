"""Columns made of columns, and songs that become questions and answers by what can be counted in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from modelwright.data.chat import load_conversations, rows_to_conversations
from modelwright.data.readers import Row
from modelwright.data.songs import song_answers
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


def test_a_song_becomes_six_rows_with_evidence_from_its_words() -> None:
    data = DataConfig(dataset_name="x", generate_qa="songs")
    built = [row for row in add_derived_columns([Row("songs:7", SONG)], data) if isinstance(row, Row)]
    assert [row.values["answer"].partition(":")[0] for row in built] == [
        "Style", "Theme", "Sound", "Structure", "Mood", "Context"]  # fmt: skip
    style, theme, sound, structure, *_ = (row.values["answer"] for row in built)
    assert style.startswith("Style: 4 lines of 6 to 7 words; lines 1 and 2 end in the same letters, -ong.")
    assert theme.startswith("Theme: faith, which the lines name with 'lord' and 'heaven' and 'pray'.")
    assert sound.startswith("Sound: 'lord' and 'long' begin with the same letter in one line.")
    assert structure.startswith("Structure: 2 lines open with 'lord i'.")
    assert all(row.where == "songs:7" for row in built)


ANSWERS = Path(__file__).parent / "song_answers.json"
"""60 answers about ten songs in the public domain, each statement of which was checked by a person with the lyric."""


def test_the_sixty_checked_answers_are_what_the_rules_say() -> None:
    songs = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert len(songs) == 10 and all(len(song["answers"]) == 6 for song in songs)
    style = load_recipe("lyrics-pythia", environ={}).recipe.compare.style_patterns
    for song in songs:
        answers = list(song_answers(song["lyrics"], song["artist"]).values())
        assert answers == song["answers"], song["title"]
        for answer in answers:
            evidence = re.search(r'Evidence: "(.*?)"\. Listen', answer)
            assert evidence and all(part in "\n".join(song["lyrics"]) for part in evidence[1].split(" ... ")), answer
            quoted = re.findall(r"'([\w']+?)'", answer.partition(" Evidence: ")[0])
            assert all(word.lower() in " ".join(song["lyrics"]).lower() for word in quoted), answer
            assert all(re.search(pattern, answer, re.DOTALL) for pattern in style), answer


@pytest.mark.parametrize("lyrics", ["La", "?!", "7 7 7", "the the the", "Ça ira\nÇa ira", "x\n" * 40])
def test_odd_lyrics_get_answers_too(lyrics: str) -> None:
    answers = song_answers([line for line in lyrics.splitlines() if line.strip()], "Nobody")
    assert len(answers) == 6 and all("Evidence: " in answer for answer in answers.values())


def test_a_song_without_lyrics_is_one_error_and_a_row_with_an_answer_stays() -> None:
    data = DataConfig(dataset_name="x", generate_qa="songs")
    with pytest.raises(DataError, match="a song wants lyrics and artist"):
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
