"""Multiple choice: read a question, its options and the right one out of the columns that people use for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.data.files import Row
from modelwright.errors import DataError, Problem

QUESTIONS = ("question", "query", "prompt", "question_stem", "input", "instruction")
CONTEXTS = ("ctx", "context", "goal", "premise", "sentence", "startphrase", "sent1")
PASSAGES = ("passage", "article", "support")
LISTS = ("choices", "options", "endings", "answers", "candidates")
NUMBERED = ("choice{}", "option{}", "sol{}", "ending{}", "opt{}", "answer{}", "choice_{}", "option_{}")
ANSWERS = ("answer", "answerKey", "label", "gold", "correct", "target", "answer_idx", "correct_answer", "cop")
LETTERS = "abcdefghijklmnop"
COLUMNS = "question, choices (a list) and answer (its number, letter or text)"


@dataclass(frozen=True)
class Choice:
    """One question."""

    prompt: str
    """What stands before the answer."""
    options: tuple[str, ...]
    """What may follow it."""
    answer: int
    """Which of them is right, counted from 0."""


def choices(rows: Sequence[Row]) -> list[Choice]:
    """Every row as a question; rows that are none are told with their place."""
    found, problems = [], []
    for row in rows:
        made = choice(row.values)
        if isinstance(made, str):
            problems.append(Problem(row.where, made))
        else:
            found.append(made)
    if problems:
        more = len(problems) - 20
        rest = [Problem(f"{more} more rows", "have problems like these")] if more > 0 else []
        raise DataError([*problems[:20], *rest])
    return found


def choice(values: Mapping[str, Any]) -> Choice | str:
    """A row as a question, or what is wrong with it."""
    options, labels = _options(values)
    seen = f"the columns are {', '.join(map(str, values))}; it wants {COLUMNS}"
    if len(options) < 2:
        return f"there are no options to choose from; {seen}"
    key = next((name for name in ANSWERS if values.get(name) is not None), None)
    if key is None:
        return f"there is no right answer; {seen}"
    answer = _answer(values[key], options, labels, first=1 if _counts_from_one(values) else 0)
    if answer is None:
        return f"{key} is {values[key]!r}, which names none of the {len(options)} options"
    prompt = _prompt(values)
    if prompt is None:
        return f"there is no question; {seen}"
    before, blank, after = prompt.partition("_") if "option1" in values else (prompt, "", "")
    if blank:  # a gap to be filled: the option and what follows it stand after the gap
        return Choice(before.rstrip(), tuple(f"{option}{after}" for option in options), answer)
    return Choice(prompt, tuple(options), answer)


def _options(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The options and, where they have names, those."""
    for name in LISTS:
        value = values.get(name)
        if isinstance(value, Mapping) and isinstance(value.get("text"), list):
            return [str(each) for each in value["text"]], [str(each) for each in value.get("label") or ()]
        if isinstance(value, Mapping):
            return [str(each) for each in value.values()], [str(each) for each in value]
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            return [str(each.get("text", "")) for each in value], [str(each.get("label", "")) for each in value]
        if isinstance(value, list) and value:
            return [str(each) for each in value], []
    for pattern in NUMBERED:
        for marks in ("0123456789", "123456789", LETTERS, LETTERS.upper()):
            named = _run_of(values, [pattern.format(mark) for mark in marks])
            if len(named) > 1:
                return named, list(marks[: len(named)])
    for marks in (LETTERS.upper(), LETTERS):
        named = _run_of(values, list(marks))
        if len(named) > 1:
            return named, list(marks[: len(named)])
    return (["no", "yes"], []) if isinstance(values.get("answer"), bool) else ([], [])


def _run_of(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The values of columns from the first on, as far as there are any."""
    found: list[str] = []
    for name in names:
        if not isinstance(values.get(name), str | int | float):
            break
        found.append(str(values[name]))
    return found


def _counts_from_one(values: Mapping[str, Any]) -> bool:
    """Whether a bare number as answer counts from 1: so where the first option is called 1 and none is called 0."""
    return "option1" in values and "answer" in values


def _answer(value: Any, options: Sequence[str], labels: Sequence[str], first: int) -> int | None:
    if isinstance(value, bool):
        return int(value) if options == ["no", "yes"] else None
    text = str(value).strip()
    if text in labels and not (isinstance(value, int) and first == 0):
        return labels.index(text)
    if re.fullmatch(r"\d+", text):
        number = int(text) - first
        return number if 0 <= number < len(options) else None
    if text in options:
        return list(options).index(text)
    number = LETTERS.find(text.lower()) if len(text) == 1 else -1
    return number if 0 <= number < len(options) else None


def _prompt(values: Mapping[str, Any]) -> str | None:
    def text_of(names: Sequence[str]) -> str | None:
        return next((str(values[name]).strip() for name in names if isinstance(values.get(name), str)), None)

    context, question, passage = text_of(CONTEXTS), text_of(QUESTIONS), text_of(PASSAGES)
    if "premise" in values and question in ("cause", "effect"):
        return f"{context} {'because' if question == 'cause' else 'therefore'}"
    if question is None:
        return context
    above = "\n".join(part for part in (passage, context) if part)
    return f"{above}{chr(10) if above else ''}Question: {question}\nAnswer:"
