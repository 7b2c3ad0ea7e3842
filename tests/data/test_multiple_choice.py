"""Questions with options are read out of the columns that people use for them."""

from __future__ import annotations

from typing import Any

import pytest

from modelwright.data.multiple_choice import MultipleChoiceQuestion, parse_questions
from modelwright.data.readers import Row
from modelwright.errors import DataError
from modelwright.recipe.sections import EvaluateConfig

QUESTION = "Question: What burns?\nAnswer:"
WOOD = ("stone", "wood")
FRAME = EvaluateConfig().question_template


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
        ({"prompt": "He lit the", "endings": ["stone", "wood"], "label": 1}, "He lit the", WOOD, 1),
        ({"goal": "Make a fire", "sol1": "stone", "sol2": "wood", "label": 0}, "Make a fire", WOOD, 0),
        (
            {"premise": "It burnt.", "question": "cause", "choice1": "stone", "choice2": "wood", "label": 1},
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
    assert parse_questions([Row("q.jsonl:1", row)], FRAME) == [MultipleChoiceQuestion(prompt, options, answer)]


def test_what_is_no_question_is_reported_with_its_location_and_columns() -> None:
    rows = [
        Row("q.jsonl:1", {"question": "What burns?", "answer": 1}),
        Row("q.jsonl:2", {"question": "What burns?", "choices": ["a", "b"]}),
        Row("q.jsonl:3", {"question": "What burns?", "choices": ["a", "b"], "answer": 7}),
        Row("q.jsonl:4", {"choices": ["a", "b"], "answer": 0}),
    ]
    with pytest.raises(DataError) as caught:
        parse_questions(rows, FRAME)
    output = str(caught.value).splitlines()
    assert "q.jsonl:1: there are no options to choose from; the columns are question, answer" in output[0]
    assert "q.jsonl:2: there is no right answer" in output[1]
    assert output[2] == "q.jsonl:3: answer is 7, which names none of the 2 options"
    assert "q.jsonl:4: there is no question" in output[3]


def answers(*rows: dict[str, Any]) -> list[int]:
    filled = [Row(f"q.jsonl:{number}", {"question": "How many?", **row}) for number, row in enumerate(rows, 1)]
    return [question.answer_index for question in parse_questions(filled, FRAME)]


def test_a_number_that_is_the_text_of_an_option_is_what_the_other_rows_say() -> None:
    unclear = {"choices": ["1", "2", "3"], "answer": 2}
    assert answers({"choices": ["1", "2", "3"], "answer": "3"}, unclear) == [2, 1]  # only a text: 3 is no index
    assert answers({"choices": ["few", "many"], "answer": 1}, unclear) == [1, 2]  # only an index
    assert answers({"choices": ["0", "1", "2"], "answer": 2}) == [2]  # both are the same option
    with pytest.raises(DataError) as caught:
        answers(unclear)
    problem = "q.jsonl:1: the answer can mean '3' by its number or '2' by its text; it wants a letter (A, B, …)"
    assert str(caught.value) == problem


def test_an_a_that_is_the_text_of_option_b_is_what_the_other_rows_say() -> None:
    unclear = {"choices": ["B", "A"], "answer": "A"}
    assert answers({"choices": ["few", "many"], "answer": "B"}, unclear) == [1, 0]
    assert answers({"choices": ["few", "many"], "answer": "many"}, unclear) == [1, 1]
    with pytest.raises(DataError, match="'A' by its text or 'B' by its letter"):
        answers(unclear)


def test_numbered_options_are_counted_from_where_the_file_counts() -> None:
    columns = {"choice1": "stone", "choice2": "wood"}
    assert answers({**columns, "answer": "0"}, {**columns, "answer": "1"}) == [0, 1]
    assert answers({**columns, "answer": 2}, {**columns, "answer": 1}) == [1, 0]
    assert answers({**columns, "label": "1"}) == [1]  # COPA, also read from CSV
    assert answers({"option1": "stone", "option2": "wood", "answer": 1}) == [0]  # WinoGrande
    assert answers({"choices": {"text": ["5", "6"], "label": [1, 2]}, "answerKey": 1}) == [0]
    with pytest.raises(DataError, match="'stone' by its label or 'wood' by its number"):
        answers({**columns, "answer": 1})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"choices": ["stone", None], "answer": 0}, "an option or its label is empty; the options are ['stone', '']"),
        ({"choices": [{"key": "A", "value": "stone"}] * 2, "answer": 0}, "an option or its label is empty"),
        ({"A": "stone", "B": "wood", "C": None, "D": "ice", "answer": "A"}, "['stone', 'wood', '', 'ice']"),
        (
            {"choices": {"text": ["stone", "wood"], "label": ["A", "B", "C"]}, "answerKey": "C"},
            "an option or its label",
        ),
        (
            {"choices": ["stone", "wood"], "answer": "wood", "label": 0},
            "answer is 'wood' and label is 0, which name two",
        ),
    ],
)
def test_options_that_are_missing_and_answers_that_differ_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError) as caught:
        answers(row)
    assert problem in str(caught.value)


def test_nulls_of_parquet_are_no_options_and_two_columns_may_agree() -> None:
    row = {"options": {"A": "stone", "B": "wood", "C": None}, "answer": "wood", "answer_idx": "B"}
    [question] = parse_questions([Row("q.parquet row 1", {"question": "What burns?", **row})], FRAME)
    assert question == MultipleChoiceQuestion(QUESTION, WOOD, 1)


def test_the_text_around_a_question_is_a_setting() -> None:
    row = Row("q.jsonl:1", {"passage": "Fire.", "question": "What burns?", "choices": ["stone", "wood"], "answer": 1})
    assert parse_questions([row], "{question}")[0].prompt == "Fire.\nWhat burns?"
    assert parse_questions([row], "Q: {question} A:")[0].prompt == "Fire.\nQ: What burns? A:"
