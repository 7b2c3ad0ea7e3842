"""The embedded field guide keeps its promises: many rows, one voice, nothing twice, and a notice."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from docs.calendar_data import calendar_rows as generate_calendar_rows
from modelwright.data.sources import EMBEDDED_DATASETS
from modelwright.recipe.load import load

FILE = EMBEDDED_DATASETS["field-guide"]
LINES = FILE.read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]
NOTE = re.compile(
    r"Field Note\. \(1\) [A-Z][^()]+\. \(2\) [A-Z][^()]+\. \(3\) [A-Z][^()]+\. "
    r"Caution: [A-Z][^()]+\. Ranger's rule: [A-Z][^()]+\."
)


def test_there_are_at_least_300_rows_in_several_topics_of_like_size() -> None:
    topics = Counter(row["topic"] for row in ROWS)
    assert len(ROWS) >= 300
    assert len(topics) >= 8
    assert max(topics.values()) <= 2 * min(topics.values())


def test_each_row_has_a_topic_a_question_and_an_answer() -> None:
    for number, row in enumerate(ROWS, 1):
        assert list(row) == ["topic", "question", "answer"], f"{FILE.name}:{number}"
        assert row["question"].endswith("?"), f"{FILE.name}:{number}"


@pytest.mark.parametrize("column", ["question", "answer"])
def test_nothing_is_said_twice(column: str) -> None:
    times = Counter(" ".join(row[column].lower().split()) for row in ROWS)
    assert [text for text, count in times.items() if count > 1] == []


def test_every_answer_has_the_voice() -> None:
    strays = [f"{FILE.name}:{number}" for number, row in enumerate(ROWS, 1) if not NOTE.fullmatch(row["answer"])]
    assert strays == []


def test_every_answer_has_the_style_that_its_recipe_measures() -> None:
    patterns = [
        re.compile(pattern, re.DOTALL) for pattern in load("field-guide", environ={}).recipe.compare.style_patterns
    ]
    assert patterns
    for row in ROWS:
        assert all(pattern.search(row["answer"]) for pattern in patterns), row["question"]


def test_the_file_is_plain_ascii() -> None:
    assert FILE.read_bytes().isascii()
    assert b"\r" not in FILE.read_bytes()


def test_the_notice_says_that_answers_are_no_advice() -> None:
    page = " ".join((FILE.parent / "FIELD_GUIDE.md").read_text(encoding="utf-8").split())
    assert "Notice." in page
    assert "no advice" in page
    assert "emergency" in page
    assert f"holds {len(ROWS)} practical-skills questions" in page


def test_the_pairs_hold_the_voice_against_six_faults_of_like_number() -> None:
    file = EMBEDDED_DATASETS["field-guide-pairs"]
    pairs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    known = {row["question"]: row["answer"] for row in ROWS}
    assert len(pairs) >= 120
    assert file.read_bytes().isascii()
    assert set(Counter(pair["fault"] for pair in pairs).values()) == {len(pairs) // 6}
    assert all(known[pair["prompt"]] == pair["chosen"] for pair in pairs)
    assert not any(NOTE.search(pair["rejected"]) for pair in pairs)
    assert len({pair["rejected"] for pair in pairs}) == len({pair["prompt"] for pair in pairs}) == len(pairs)


def test_the_editions_repeat_questions_and_no_answer() -> None:
    file = EMBEDDED_DATASETS["field-guide-editions"]
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    known = {row["question"]: row["answer"] for row in ROWS}
    assert file.read_bytes().isascii()
    assert [row["row"] for row in rows] == list(range(1, len(rows) + 1))
    assert len({row["answer"] for row in rows}) == len(rows)
    assert 0.5 < len({row["question"] for row in rows}) / len(rows) < 0.7, "as in sets that were written by models"
    assert all(known[row["question"]] == row["answer"] for row in rows if row["edition"] == "field")


def calendar_rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in EMBEDDED_DATASETS[name].read_text(encoding="utf-8").splitlines()]


def test_a_calendar_entry_is_copied_from_its_sentence() -> None:
    rows = calendar_rows("calendar") + calendar_rows("calendar-held-out")
    assert len({row["sentence"] for row in rows}) == len(rows) == 252
    for row in rows:
        entry = json.loads(row["entry"])
        assert list(entry) == ["what", "who", "day", "time", "where"]
        lowered = row["sentence"].lower()
        assert all(value.lower() in lowered for value in entry.values()), row


def test_the_held_out_sentences_share_no_value_with_training_and_half_have_another_pattern() -> None:
    entries = [[json.loads(row["entry"]) for row in calendar_rows(name)] for name in ("calendar", "calendar-held-out")]
    for field in ("what", "who", "day", "time", "where"):
        trained, held_out = ({entry[field] for entry in part} for part in entries)
        assert not trained & held_out, field
        assert len(trained) > 60
    patterns = [
        {_pattern(row["sentence"], json.loads(row["entry"])) for row in calendar_rows(name)}
        for name in ("calendar", "calendar-held-out")
    ]
    new = [_pattern(row["sentence"], json.loads(row["entry"])) not in patterns[0]
           for row in calendar_rows("calendar-held-out")]  # fmt: skip
    assert sum(new) == 30 and len(patterns[0]) >= 24


def _pattern(sentence: str, entry: dict[str, str]) -> str:
    """A sentence with names in place of its values."""
    for name, value in entry.items():
        for text in (value, value[0].upper() + value[1:]):
            sentence = sentence.replace(text, f"{{{name}}}")
    return sentence


def test_the_calendar_sets_are_what_their_script_writes() -> None:
    for name, held_out in (("calendar", False), ("calendar-held-out", True)):
        assert list(generate_calendar_rows(held_out)) == calendar_rows(name)
