"""Parse multiple-choice questions, their choices and the right answer from the usual columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.data.readers import Row, describe_columns, group_problems
from modelwright.errors import DataError, Problem

QUESTION_COLUMNS = ("question", "query", "prompt", "question_stem", "input", "instruction")
CONTEXT_COLUMNS = ("ctx", "context", "goal", "premise", "sentence", "startphrase", "sent1")
PASSAGE_COLUMNS = ("passage", "article", "support")
CHOICE_LIST_COLUMNS = ("choices", "options", "endings", "answers", "candidates")
CHOICE_COLUMN_PATTERNS = ("choice{}", "option{}", "sol{}", "ending{}", "opt{}", "answer{}", "choice_{}", "option_{}")
ANSWER_COLUMNS = ("answer", "answerKey", "label", "gold", "correct", "target", "answer_idx", "correct_answer", "cop")
CHOICE_LETTERS = "abcdefghijklmnop"
EXPECTED_COLUMNS = "question, choices (a list) and answer (its number, letter or text)"


@dataclass(frozen=True)
class MultipleChoiceQuestion:
    """A question with its choices."""

    prompt: str
    """The text before the answer."""
    choices: tuple[str, ...]
    """The possible continuations."""
    answer_index: int
    """Index of the right choice."""


def parse_questions(rows: Sequence[Row]) -> list[MultipleChoiceQuestion]:
    """Parse every row; invalid rows are raised as one error."""
    questions, problems = [], []
    for row in rows:
        question = parse_question(row.values)
        if isinstance(question, str):
            problems.append(Problem(row.where, question))
        else:
            questions.append(question)
    if problems:
        raise DataError(group_problems(problems))
    return questions


def parse_question(values: Mapping[str, Any]) -> MultipleChoiceQuestion | str:
    """Parse a row, or return the reason why it is invalid."""
    choices, labels = _find_choices(values)
    columns_hint = f"{describe_columns(values)}; it wants {EXPECTED_COLUMNS}"
    if len(choices) < 2:
        return f"there are no options to choose from; {columns_hint}"
    key = next((name for name in ANSWER_COLUMNS if values.get(name) is not None), None)
    if key is None:
        return f"there is no right answer; {columns_hint}"
    first = int("option1" in values and "answer" in values)  # such datasets count answers from 1
    answer_index = _find_answer_index(values[key], choices, labels, first)
    if answer_index is None:
        return f"{key} is {values[key]!r}, which names none of the {len(choices)} options"
    prompt = _build_prompt(values)
    if prompt is None:
        return f"there is no question; {columns_hint}"
    before, blank, after = prompt.partition("_") if "option1" in values else (prompt, "", "")
    if blank:  # fill-in-the-blank: choice and rest of the sentence follow the blank
        return MultipleChoiceQuestion(before.rstrip(), tuple(f"{choice}{after}" for choice in choices), answer_index)
    return MultipleChoiceQuestion(prompt, tuple(choices), answer_index)


def _find_choices(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The choices and their labels, if they have any."""
    for name in CHOICE_LIST_COLUMNS:
        value = values.get(name)
        if isinstance(value, Mapping) and isinstance(value.get("text"), list):
            return [str(each) for each in value["text"]], [str(each) for each in value.get("label") or ()]
        if isinstance(value, Mapping):
            return [str(each) for each in value.values()], [str(each) for each in value]
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            return [str(each.get("text", "")) for each in value], [str(each.get("label", "")) for each in value]
        if isinstance(value, list) and value:
            return [str(each) for each in value], []
    for pattern in CHOICE_COLUMN_PATTERNS:
        for marks in ("0123456789", "123456789", CHOICE_LETTERS, CHOICE_LETTERS.upper()):
            named = _numbered_values(values, [pattern.format(mark) for mark in marks])
            if len(named) > 1:
                return named, list(marks[: len(named)])
    for marks in (CHOICE_LETTERS.upper(), CHOICE_LETTERS):
        named = _numbered_values(values, list(marks))
        if len(named) > 1:
            return named, list(marks[: len(named)])
    return (["no", "yes"], []) if isinstance(values.get("answer"), bool) else ([], [])


def _numbered_values(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The values of the named columns up to the first missing one."""
    numbered: list[str] = []
    for name in names:
        if not isinstance(values.get(name), str | int | float):
            break
        numbered.append(str(values[name]))
    return numbered


def _find_answer_index(value: Any, choices: Sequence[str], labels: Sequence[str], first: int) -> int | None:
    if isinstance(value, bool):
        return int(value) if choices == ["no", "yes"] else None
    text = str(value).strip()
    if text in labels and not (isinstance(value, int) and first == 0):
        return labels.index(text)
    if re.fullmatch(r"\d+", text):
        number = int(text) - first
        return number if 0 <= number < len(choices) else None
    if text in choices:
        return list(choices).index(text)
    number = CHOICE_LETTERS.find(text.lower()) if len(text) == 1 else -1
    return number if 0 <= number < len(choices) else None


def _build_prompt(values: Mapping[str, Any]) -> str | None:
    def first_text(names: Sequence[str]) -> str | None:
        return next((str(values[name]).strip() for name in names if isinstance(values.get(name), str)), None)

    context, question, passage = first_text(CONTEXT_COLUMNS), first_text(QUESTION_COLUMNS), first_text(PASSAGE_COLUMNS)
    if "premise" in values and question in ("cause", "effect"):
        return f"{context} {'because' if question == 'cause' else 'therefore'}"
    if question is None:
        return context
    above = "\n".join(part for part in (passage, context) if part)
    return f"{above}{chr(10) if above else ''}Question: {question}\nAnswer:"
