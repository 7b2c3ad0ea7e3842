"""Questions with options are read out of the columns that people use for them."""

from __future__ import annotations

from typing import Any

import pytest

from modelwright.data.multiple_choice import MultipleChoiceQuestion, parse_question, parse_questions
from modelwright.data.readers import Row
from modelwright.errors import DataError

QUESTION = "Question: What burns?\nAnswer:"
WOOD = ("stone", "wood")


@pytest.mark.parametrize(
    ("row", "prompt", "options", "answer"),
    [
        ({"question": "What burns?", "choices": ["stone", "wood"], "answer": 1}, QUESTION, WOOD, 1),
        ({"question": "What burns?", "choices": ["stone", "wood"], "answer": "B"}, QUESTION, WOOD, 1),
        ({"question": "What burns?", "options": ["stone", "wood"], "answer": "wood"}, QUESTION, WOOD, 1),
        (
            {"question": "What burns?", "choices": {"text": ["stone", "wood"], "label": ["A", "B"]}, "answerKey": "B"},
            QUESTION,
            WOOD,
            1,
        ),
        (
            {"question": "What burns?", "choices": {"text": ["stone", "wood"], "label": ["1", "2"]}, "answerKey": "2"},
            QUESTION,
            WOOD,
            1,
        ),
        (
            {
                "question": "What burns?",
                "choices": [{"label": "A", "text": "stone"}, {"label": "B", "text": "wood"}],
                "answerKey": "A",
            },
            QUESTION,
            WOOD,
            0,
        ),
        ({"question": "What burns?", "A": "stone", "B": "wood", "answer": "B"}, QUESTION, WOOD, 1),
        ({"question": "What burns?", "option_a": "stone", "option_b": "wood", "answer": "b"}, QUESTION, WOOD, 1),
        ({"ctx": "He lit the", "endings": ["stone", "wood"], "label": "1"}, "He lit the", WOOD, 1),
        ({"goal": "Make a fire", "sol1": "stone", "sol2": "wood", "label": 0}, "Make a fire", WOOD, 0),
        (
            {"premise": "It burnt", "question": "cause", "choice1": "stone", "choice2": "wood", "label": 1},
            "It burnt because",
            WOOD,
            1,
        ),
        (
            {"sentence": "He lit the _ with care.", "option1": "stone", "option2": "wood", "answer": "2"},
            "He lit the",
            ("stone with care.", "wood with care."),
            1,
        ),
        (
            {"passage": "Fire.", "question": "Does wood burn?", "answer": True},
            "Fire.\nQuestion: Does wood burn?\nAnswer:",
            ("no", "yes"),
            1,
        ),
    ],
)
def test_the_usual_shapes(row: dict[str, Any], prompt: str, options: tuple[str, ...], answer: int) -> None:
    assert parse_question(row) == MultipleChoiceQuestion(prompt, options, answer)


def test_what_is_no_question_is_reported_with_its_location_and_columns() -> None:
    rows = [
        Row("q.jsonl:1", {"question": "What burns?", "answer": 1}),
        Row("q.jsonl:2", {"question": "What burns?", "choices": ["a", "b"]}),
        Row("q.jsonl:3", {"question": "What burns?", "choices": ["a", "b"], "answer": 7}),
        Row("q.jsonl:4", {"choices": ["a", "b"], "answer": 0}),
    ]
    with pytest.raises(DataError) as caught:
        parse_questions(rows)
    output = str(caught.value).splitlines()
    assert "q.jsonl:1: there are no options to choose from; the columns are question, answer" in output[0]
    assert "q.jsonl:2: there is no right answer" in output[1]
    assert output[2] == "q.jsonl:3: answer is 7, which names none of the 2 options"
    assert "q.jsonl:4: there is no question" in output[3]
