"""The embedded field guide keeps its promises: many rows, one voice, nothing twice, and a notice."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

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


def test_every_answer_has_the_style_that_quickstart_measures() -> None:
    patterns = [
        re.compile(pattern, re.DOTALL) for pattern in load("quickstart", environ={}).recipe.compare.style_patterns
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
