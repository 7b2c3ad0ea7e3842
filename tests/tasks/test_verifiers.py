"""Every verifier judges what it should, and hostile answers neither run nor stall it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import DataError, Refused, UsageError
from modelwright.recipe.sections import VERIFIER_SETTINGS, AnswersConfig
from modelwright.tasks.verifiers import (
    AnswerPrompt,
    check_references,
    chosen_option,
    judge_answers,
    last_number,
    require_trusted,
    wilson_interval,
)

ENTRY = '{"what": "lunch", "who": "Ann", "day": "Monday"}'
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}'


def prompt(reference: str, question: str = "Why?") -> AnswerPrompt:
    return AnswerPrompt("rows.jsonl:1", ({"role": "user", "content": question},), reference)


def score(kind: str, answer: str, reference: str = "", **settings: Any) -> float:
    config = AnswersConfig.model_validate({"verifiers": {"it": {"type": kind, **settings}}})
    judged = judge_answers(config, [prompt(reference)], [answer], Path())
    return float(judged.rows[0]["scores"]["it"])


@pytest.mark.parametrize(
    ("kind", "settings", "reference", "right", "wrong"),
    [
        ("exact_match", {}, "Paris", [" Paris\n"], ["paris", "Paris.", "", "In Paris"]),
        ("exact_match", {"ignore_case": True, "ignore_punctuation": True}, "Paris", ["paris.", "PARIS"], ["Rome"]),
        ("number", {}, "#### 1,234.50", ["It is 1234.5.", "3 and 4 make $1,234.50"], ["1234", "1234.5 of 2", "none"]),
        ("number", {}, "-3", ["5 - 8 = -3", "minus: −3"], ["5-3", "3"]),
        ("number", {"abs_tol": 0.1}, "2.0", ["about 2.09", "1.91"], ["2.2"]),
        ("number", {"rel_tol": 0.01}, "1e3", ["1009"], ["1100"]),
        ("multiple_choice", {}, "B", ["B", "(B)", "B) Rome", "The answer is B.", "**Answer:** B"], ["A", "Rome"]),
        ("multiple_choice", {}, "(C) a rope", ["Option C", "I think (A)… no, (C)"], ["I think so", "c"]),
        ("regex", {"pattern": "^Dear [A-Z]"}, "", ["Dear Ann,"], ["dear Ann", "Oh Dear A"]),
        ("regex", {"pattern": "^dear", "ignore_case": True}, "", ["DEAR Ann"], ["Ann"]),
        ("json_schema", {"json_schema": SCHEMA}, "", ['{"age": 3}', '```json\n{"age": 0}\n```'],
         ['{"age": -1}', '{"age": "3"}', "{}", "age: 3", '{"age": NaN}', "[" * 100_000]),
        ("json_fields", {}, ENTRY, ['{"day": "Monday", "what": "lunch", "who": "Ann"}'], ["Monday", "[]", "{}"]),
        ("tool_call", {}, CALL,
         [f"<tool_call>\n{CALL}\n</tool_call>",
          '[{"function": {"name": "add", "arguments": "{\\"a\\": 1.0, \\"b\\": [2, 3]}"}}]',
          '{"name": "add", "parameters": {"b": [2, 3], "a": 1}}'],
         ["add(1, [2, 3])", '{"name": "sub", "arguments": {"a": 1, "b": [2, 3]}}', f"[{CALL}, {CALL}]",
          '{"name": "add", "arguments": {"a": true, "b": [2, 3]}}', '{"name": "add"}', '"add"', '[["add"]]']),
        ("length", {"min_words": 2, "max_words": 3}, "", ["one two", "a b c"], ["one", "a b c d", ""]),
        ("tags", {"tags": ["think", "answer"]}, "", ["<think>a</think><answer>b</answer>."],
         ["<answer>b</answer><think>a</think>", "<think>a<answer>b</answer>", "<think>a</think>",
          "<think></think><think></think><answer></answer>"]),
    ],
)  # fmt: skip
def test_a_verifier_knows_right_from_wrong(
    kind: str, settings: dict[str, Any], reference: str, right: list[str], wrong: list[str]
) -> None:
    assert {answer: score(kind, answer, reference, **settings) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: score(kind, answer, reference, **settings) for answer in wrong} == dict.fromkeys(wrong, 0.0)


def test_every_verifier_but_the_users_own_is_tested_above() -> None:
    [table] = [mark.args[1] for mark in test_a_verifier_knows_right_from_wrong.pytestmark]  # type: ignore[attr-defined]
    assert {row[0] for row in table} == set(VERIFIER_SETTINGS) - {"python"}


def test_the_share_of_right_fields_counts_missing_and_further_ones_as_wrong() -> None:
    assert score("json_fields", '{"what": "lunch", "who": "Bob", "day": "Monday"}', ENTRY) == pytest.approx(2 / 3)
    assert score("json_fields", '{"what": "lunch", "who": "Ann", "day": "Monday", "x": 1}', ENTRY) == 0.75
    assert score("json_fields", '{"what": "lunch", "x": 1}', ENTRY, fields=["what", "who"]) == 0.5


def test_the_score_is_the_weighted_mean_of_the_verifiers() -> None:
    verifiers = {"number": {"weight": 3}, "short": {"type": "length", "max_words": 2}}
    config = AnswersConfig.model_validate({"verifiers": verifiers})
    judged = judge_answers(config, [prompt("7"), prompt("8")], ["it is 7", "8"], Path())
    assert judged.metrics == {"answers.number": 1.0, "answers.short": 0.5, "answers.score": 0.875}
    assert config.metric_names == ("answers.number", "answers.short", "answers.score")
    assert [row["scores"]["score"] for row in judged.rows] == [0.75, 1.0]


def test_the_interval_is_wilsons() -> None:
    assert wilson_interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(1.0, 60) == pytest.approx((0.9398, 1.0), abs=1e-4)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_a_pattern_that_backtracks_for_ages_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.tasks.verifiers.REGEX_SECONDS", 0.2)
    began = time.process_time()
    assert score("regex", "a" * 60 + "!", pattern=r"^(a|aa|a?)+(a|aa)*$|^(\w+\s?)*$|(x+x+)+y") == 0.0
    assert score("regex", "a " * 4000 + "!", pattern=r"^(?:(?:\w+ ?)+)+$") == 0.0
    assert time.process_time() - began < 30


def test_a_remote_reference_of_a_schema_is_not_downloaded() -> None:
    with pytest.raises(UsageError, match=r"a \$ref that is not in it"):
        score("json_schema", "{}", json_schema={"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(UsageError, match="is no JSON schema"):
        check_references(AnswersConfig.model_validate({"verifiers": {"json_schema": {"json_schema": {"type": 3}}}}), [])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("number", "number"), ("multiple_choice", "letter"), ("json_fields", "JSON object"), ("tool_call", "tool call")],
)
def test_references_that_no_answer_could_match_are_refused(kind: str, wanted: str) -> None:
    config = AnswersConfig.model_validate({"verifiers": {kind: {}}})
    with pytest.raises(DataError, match=rf"rows.jsonl:1: the answer has no {wanted}.*, which {kind} compares"):
        check_references(config, [prompt("a boat")])


def own_verifier(folder: Path, body: str, **settings: Any) -> AnswersConfig:
    (folder / "mine.py").write_text(body, encoding="utf-8")
    return AnswersConfig.model_validate({"verifiers": {"python": {"file": "mine.py", **settings}}})


def test_a_users_own_verifier_runs_in_another_process_and_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    body = "import os\nprint('hello')\ndef verify(prompt, answer, reference):\n"
    body += "    assert 'HF_TOKEN' not in os.environ\n    return answer[::-1] == reference and prompt == 'Why?'\n"
    config = own_verifier(tmp_path, body)
    with pytest.raises(Refused, match=r"runs the Python file mine.py.*--trust-file mine.py"):
        require_trusted(config, tmp_path, ["other.py"])
    require_trusted(config, tmp_path, [str(tmp_path / "mine.py")])
    judged = judge_answers(config, [prompt("abc"), prompt("abc")], ["cba", "abc"], tmp_path)
    assert judged.metrics["answers.python"] == 0.5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def verify(prompt, answer, reference):\n    raise KeyError('day')", "mine.py: KeyError: 'day'"),
        ("def verify(prompt, answer, reference):\n    return 7", "verify returned 7; it wants a score from 0 to 1"),
        ("def verify(prompt, answer, reference):\n    while True: pass", r"it took over 1 s \(timeout\)"),
        ("import os\nos._exit(0)", "mine.py: it returned no scores"),
    ],
)
def test_a_users_verifier_that_fails_is_one_short_message(tmp_path: Path, body: str, message: str) -> None:
    config = own_verifier(tmp_path, body, **({"timeout": 1} if "while" in body else {}))
    with pytest.raises(UsageError, match=message):
        judge_answers(config, [prompt("abc")], ["abc"], tmp_path)


def test_numbers_and_options_are_read_as_people_write_them() -> None:
    texts = ("1,000,000", "1,2", "0.5%", ".25", "2e-3", "v2", "x", "12,3456")
    assert [last_number(text) for text in texts] == [1e6, 2.0, 0.5, 0.25, 0.002, 2.0, None, 3456.0]
    texts = ("D", "answer: (A)", "Answer is\nE", "no", "A dog")
    assert [chosen_option(text) for text in texts] == ["D", "A", "E", None, None]


def test_numbers_of_hostile_length_are_read_quickly() -> None:
    began = time.process_time()
    assert last_number("1," * 200_000 + "5") == 5.0
    assert json.dumps(score("number", "9" * 100_000, "9")) == "0.0"
    assert time.process_time() - began < 5
