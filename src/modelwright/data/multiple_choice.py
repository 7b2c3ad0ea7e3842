"""Parse multiple-choice questions, their choices and the right answer from the usual columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelwright.data.readers import Row, describe_columns, group_problems
from modelwright.data.recognize import is_empty
from modelwright.errors import DataError, Problem

QUESTION_COLUMNS = ("question", "query", "prompt", "question_stem", "input", "instruction")
CONTEXT_COLUMNS = ("ctx", "context", "goal", "premise", "sentence", "startphrase", "sent1")
PASSAGE_COLUMNS = ("passage", "article", "support")
CHOICE_LIST_COLUMNS = ("choices", "options", "endings", "answers", "candidates")
CONTINUATION_COLUMNS = ("endings", "ending0", "sol1", "premise", "startphrase")
"""Columns of datasets whose options continue the text: PIQA, HellaSwag, SWAG, COPA."""
CHOICE_PATTERNS = ("choice{}", "option{}", "sol{}", "ending{}", "opt{}", "answer{}", "choice_{}", "option_{}", "{}")
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


def parse_questions(rows: Sequence[Row], template: str) -> list[MultipleChoiceQuestion]:
    """Parse every row; invalid rows are raised as one error."""
    parsed = [_parse_row(row.values, template) for row in rows]
    # the answers of a file are of one kind, which decides where the number of one option is the text of another
    kinds = set.intersection(*([set(each[1]) for each in parsed if not isinstance(each, str)] or [set()]))
    questions, problems = [], []
    for row, each in zip(rows, parsed, strict=True):
        if isinstance(each, str):
            problems.append(Problem(row.where, each))
            continue
        question, readings = each
        candidates = set(readings.values())
        if len(candidates) > 1:
            candidates = {index for kind, index in readings.items() if kind in kinds} or candidates
        if len(candidates) == 1 or question.answer_index >= 0:
            answer_index = candidates.pop() if len(candidates) == 1 else question.answer_index
            questions.append(replace(question, answer_index=answer_index))
        else:
            meanings = " or ".join(f"{question.choices[index]!r} by its {kind}" for kind, index in readings.items())
            problems.append(Problem(row.where, f"the answer can mean {meanings}; it wants a letter (A, B, …)"))
    if problems:
        raise DataError(group_problems(problems))
    return questions


def _parse_row(values: Mapping[str, Any], template: str) -> tuple[MultipleChoiceQuestion, dict[str, int]] | str:
    """The question with its answer by convention (-1: none), and the answer by each kind; or why it is invalid."""
    choices, labels = _find_choices(values)
    columns_hint = f"{describe_columns(values)}; it wants {EXPECTED_COLUMNS}"
    if len(choices) < 2:
        return f"there are no options to choose from; {columns_hint}"
    if not all(choices) or len(labels) not in (0, len(choices)):
        return f"an option or its label is empty; the options are {choices}"
    keys = [name for name in ANSWER_COLUMNS if not is_empty(values.get(name))]
    if not keys:
        return f"there is no right answer; {columns_hint}"
    key, readings = keys[0], _answer_readings(values[keys[0]], choices, labels)
    if not readings:
        return f"{key} is {values[key]!r}, which names none of the {len(choices)} options"
    for other in keys[1:]:
        other_readings = _answer_readings(values[other], choices, labels)
        if other_readings and not {*other_readings.values()} & {*readings.values()}:
            return f"{key} is {values[key]!r} and {other} is {values[other]!r}, which name two options; leave one out"
    if "label" in readings and any(name in values for name in CHOICE_LIST_COLUMNS):
        readings = {"label": readings["label"]}  # the row itself names its options
    # COPA and PIQA count their column label from 0, WinoGrande its column answer from 1
    convention = "number" if key == "label" else "label" if "option1" in values and key == "answer" else ""
    prompt = _build_prompt(values, template)
    if prompt is None:
        return f"there is no question; {columns_hint}"
    before, blank, after = prompt.partition("_") if "option1" in values else (prompt, "", "")
    if blank:  # fill-in-the-blank: choice and rest of the sentence follow the blank
        prompt, choices = before.rstrip(), [f"{choice}{after}" for choice in choices]
    return MultipleChoiceQuestion(prompt, tuple(choices), readings.get(convention, -1)), readings


def _find_choices(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The choices and their labels, if they have any; an empty text for a choice that is missing."""
    for name in CHOICE_LIST_COLUMNS:
        value = values.get(name)
        if isinstance(value, Mapping) and isinstance(value.get("text"), list):
            return _texts(value["text"]), _texts(value.get("label") or ())
        if isinstance(value, Mapping):  # Parquet adds the keys of other rows with null
            present = {label: each for label, each in value.items() if each is not None}
            return _texts(present.values()), _texts(present)
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            labels = _texts(each.get("label") for each in value)
            return _texts(each.get("text") for each in value), labels if any(labels) else []
        if isinstance(value, list) and value:
            return _texts(value), []
    for pattern in CHOICE_PATTERNS:
        for marks in ("0123456789", "123456789", CHOICE_LETTERS, CHOICE_LETTERS.upper()):
            named = _texts(values.get(pattern.format(mark)) for mark in marks)
            count = 1 + max((number for number, text in enumerate(named) if text), default=-1)
            if count > 1 and all(named[:2]):
                return named[:count], list(marks[:count])
    return (["no", "yes"], []) if isinstance(values.get("answer"), bool) else ([], [])


def _texts(values: Iterable[Any]) -> list[str]:
    """The values as texts, empty for what is none."""
    return [str(value) if isinstance(value, str | int | float) and not is_empty(value) else "" for value in values]


def _answer_readings(value: Any, choices: Sequence[str], labels: Sequence[str]) -> dict[str, int]:
    """The index of the right choice by each kind of answer that the value can be."""
    if isinstance(value, bool):
        return {"value": int(value)} if choices == ["no", "yes"] else {}
    text, count = str(value).strip(), len(choices)
    kinds = {
        "label": (text, labels),
        "number": (text, [str(number) for number in range(count)]),
        "text": (text, [choice.strip() for choice in choices]),
        "letter": (text.lower(), [*CHOICE_LETTERS[:count]]),
    }
    return {kind: list(names).index(name) for kind, (name, names) in kinds.items() if name in names}


def _build_prompt(values: Mapping[str, Any], template: str) -> str | None:
    def first_text(names: Sequence[str]) -> str | None:
        return next((str(values[name]).strip() for name in names if isinstance(values.get(name), str)), None)

    context, question, passage = first_text(CONTEXT_COLUMNS), first_text(QUESTION_COLUMNS), first_text(PASSAGE_COLUMNS)
    if context and "premise" in values and question in ("cause", "effect"):
        return f"{context.rstrip('.')} {'because' if question == 'cause' else 'therefore'}"
    if question is None or any(name in values for name in CONTINUATION_COLUMNS):
        return question if context is None else context
    above = "\n".join(part for part in (passage, context) if part)
    return f"{above}{chr(10) if above else ''}{template.replace('{question}', question)}"
