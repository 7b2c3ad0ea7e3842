"""Judge answers by code: exact match, numbers, JSON, tool calls and others. What a model writes is never executed."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import string
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import regex

from modelwright.data.sources import local_path
from modelwright.errors import DataError, ModelError, Problem, Refused, UsageError
from modelwright.recipe.sections import AnswersConfig, VerifierConfig

REGEX_SECONDS = 2.0
"""Time limit of a recipe's regular expression on one answer, which catastrophic backtracking exceeds."""
MAX_PROBLEMS = 5
NUMBER = re.compile(r"(?:(?<!\w)[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<!\d)\.\d+")
CHOICES = (
    re.compile(r"(?i:\b(?:answer|option|choice)\b)[\s:*_(\[]*(?i:is\b)?[\s:*_(\[]*([A-Z])\b"),
    re.compile(r"\A[\s*_(\[]*([A-Z])(?:[*_)\].:,\n]|\Z)"),
    re.compile(r"[(\[]([A-Z])[)\]]"),
)
"""The letter of an answer: `the answer is B`, then `B) Paris`, then `(B)`; the last match of the first that matches."""
FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class AnswerPrompt:
    """A prompt with the answer that is right."""

    where: str
    """File and line of the row."""
    messages: tuple[Mapping[str, Any], ...]
    """The messages before the answer."""
    reference: str
    """The reference answer; tool calls are JSON."""

    @property
    def question(self) -> str:
        """The last message."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True)
class JudgedAnswers:
    """Every answer with its scores, and their means."""

    rows: list[dict[str, Any]]
    """Prompt, reference, answer and the score of each verifier."""
    metrics: dict[str, float]
    """`answers.NAME` of each verifier, and `answers.score`."""

    def as_json(self) -> dict[str, Any]:
        """For the file of an evaluation: the answers, and the 95 % interval of each mean."""
        count = len(self.rows)
        intervals = {name: wilson_interval(value, count) for name, value in self.metrics.items()}
        return {"answers": self.rows, "judged": count, "intervals": intervals}


Verifier = Callable[[str, str], float]
"""The score of an answer, by the reference."""


def judge_answers(
    config: AnswersConfig, prompts: Sequence[AnswerPrompt], answers: Sequence[str], recipe_dir: Path
) -> JudgedAnswers:
    """Judge every answer by every verifier."""
    scores: dict[str, list[float]] = {}
    for name, settings in config.verifiers.items():
        kind = settings.type or name
        if kind == "python":
            scores[name] = run_python_verifier(settings, prompts, answers, recipe_dir)
        else:
            verify = _verifier(kind, settings)
            scores[name] = [float(verify(answer, row.reference)) for row, answer in zip(prompts, answers, strict=True)]
    weights = {name: settings.weight for name, settings in config.verifiers.items()}
    total = sum(weights.values()) or 1.0
    scores["score"] = [
        sum(weights[name] * scores[name][index] for name in weights) / total for index in range(len(prompts))
    ]
    rows = [
        {"prompt": row.question, "reference": row.reference, "answer": answer,
         "scores": {name: round(values[index], 6) for name, values in scores.items()}}
        for index, (row, answer) in enumerate(zip(prompts, answers, strict=True))
    ]  # fmt: skip
    return JudgedAnswers(rows, {f"answers.{name}": mean(values) for name, values in scores.items()})


def wilson_interval(fraction: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a fraction of `count` answers (Wilson score interval)."""
    center = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count))
    return max(0.0, center - half), min(1.0, center + half)


def check_references(config: AnswersConfig, prompts: Sequence[AnswerPrompt]) -> None:
    """Refuse references that a verifier cannot read: no answer could be right."""
    problems = []
    for name, settings in config.verifiers.items():
        kind = settings.type or name
        if kind == "json_schema":
            _schema_validator(settings.json_schema)
        if kind in PARSERS:
            parse, wanted = PARSERS[kind]
            unreadable = (row for row in prompts if parse(row.reference) is None)
            problems += [Problem(row.where, f"the answer has no {wanted}, which {name} compares") for row in unreadable]
    if problems:
        raise DataError(problems[:MAX_PROBLEMS])


def require_trusted(config: AnswersConfig, recipe_dir: Path, trusted: Collection[str]) -> None:
    """Refuse a Python file that the command line does not name."""
    paths = {Path(name).resolve() for name in trusted}
    for name, settings in config.verifiers.items():
        if settings.file and _verifier_file(settings, recipe_dir) not in paths:
            message = f"evaluate.answers.verifiers.{name} runs the Python file {settings.file}"
            raise Refused(f"{message}; read it, and if you trust it: --trust-file {settings.file}")


def _verifier_file(settings: VerifierConfig, recipe_dir: Path) -> Path:
    assert settings.file is not None
    path = local_path(settings.file, recipe_dir)
    if path is None or not path.is_file():
        raise UsageError(f"evaluate.answers.verifiers: there is no file {settings.file!r}")
    return path.resolve()


def verifier_sources(config: AnswersConfig, recipe_dir: Path) -> dict[str, str]:
    """The text of every Python file of the verifiers, by name: what a cached result depends on."""
    files = {name: _verifier_file(settings, recipe_dir) for name, settings in config.verifiers.items() if settings.file}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _verifier(kind: str, settings: VerifierConfig) -> Verifier:
    if kind == "regex":
        flags = regex.IGNORECASE if settings.ignore_case else 0
        return partial(_matches, regex.compile(settings.pattern or "", flags))
    if kind == "json_schema":
        validator = _schema_validator(settings.json_schema)
        return lambda answer, reference: (value := parse_json(answer)) is not None and _is_valid(validator, value[0])
    if kind == "length":
        longest = settings.max_words or math.inf
        return lambda answer, reference: settings.min_words <= len(answer.split()) <= longest
    verifiers: dict[str, Verifier] = {
        "exact_match": lambda answer, reference: _normalize(answer, settings) == _normalize(reference, settings),
        "number": lambda answer, reference: _numbers_close(last_number(answer), last_number(reference), settings),
        "multiple_choice": lambda answer, reference: (
            (choice := chosen_option(answer)) is not None and choice == chosen_option(reference)
        ),
        "json_fields": lambda answer, reference: _fields_right(answer, reference, settings.fields),
        "tool_call": lambda answer, reference: (
            (calls := parse_tool_calls(answer)) is not None and _json_equal(calls, parse_tool_calls(reference))
        ),
        "tags": lambda answer, reference: _has_tags(answer, settings.tags),
    }
    return verifiers[kind]


def _normalize(text: str, settings: VerifierConfig) -> str:
    text = text.strip().lower() if settings.ignore_case else text.strip()
    return text.translate(str.maketrans("", "", string.punctuation)).strip() if settings.ignore_punctuation else text


def last_number(text: str) -> float | None:
    """The last number of a text: -1,234.5 and 1e-3 count, the minus of 5-3 does not."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def _numbers_close(number: float | None, expected: float | None, settings: VerifierConfig) -> bool:
    if number is None or expected is None:
        return False
    return math.isclose(number, expected, rel_tol=settings.rel_tol, abs_tol=settings.abs_tol)


def chosen_option(text: str) -> str | None:
    """The letter of the chosen option."""
    return next((labels[-1] for pattern in CHOICES if (labels := pattern.findall(text))), None)


def _matches(pattern: Any, answer: str, reference: str) -> bool:
    try:
        return pattern.search(answer, timeout=REGEX_SECONDS) is not None
    except TimeoutError:
        return False


def parse_json(text: str) -> tuple[Any] | None:
    """The JSON value of a text, which may be in a code block, in a tuple of its own; None where it is none."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    text = text.strip()
    fenced = FENCE.match(text)
    try:
        return (json.loads(fenced[1] if fenced else text, parse_constant=refuse),)
    except (ValueError, RecursionError):
        return None


def _parse_object(text: str) -> dict[str, Any] | None:
    value = parse_json(text)
    return value[0] if value and isinstance(value[0], dict) else None


def _json_equal(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_json_equal(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_json_equal, first, second))
    return bool(first == second) and isinstance(first, bool) == isinstance(second, bool)


def _fields_right(answer: str, reference: str, fields: Sequence[str]) -> float:
    """The share of fields that are equal; without `fields`, of those that either of the two has."""
    value, expected = _parse_object(answer), _parse_object(reference)
    if value is None or expected is None:
        return 0.0
    names = fields or list({**expected, **value})
    right = [name in value and name in expected and _json_equal(value[name], expected[name]) for name in names]
    return mean(right) if right else 1.0


def parse_tool_calls(text: str) -> list[Any] | None:
    """Name and arguments of each call: JSON, or JSON between <tool_call> tags; None where there is none."""
    texts = TOOL_CALL.findall(text) or [text]
    values = [parse_json(each) for each in texts]
    calls = [call for value in values if value for call in (value[0] if isinstance(value[0], list) else value)]
    if not calls or None in values:
        return None
    parsed = []
    for call in calls:
        call = call.get("function", call) if isinstance(call, dict) else {}
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # as OpenAI writes them
            arguments = _parse_object(arguments)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            return None
        parsed.append({"name": call["name"], "arguments": arguments})
    return parsed


def _has_tags(answer: str, tags: Sequence[str]) -> bool:
    position = 0
    for tag in tags:
        opened, closed = answer.find(f"<{tag}>", position), answer.find(f"</{tag}>", position)
        if not position <= opened < closed or answer.count(f"<{tag}>") != 1 or answer.count(f"</{tag}>") != 1:
            return False
        position = closed
    return True


def _schema_validator(schema: dict[str, Any]) -> Any:
    if find_spec("jsonschema") is None:
        raise ModelError("the verifier json_schema needs jsonschema: pip install 'modelwright[verify]'")
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise UsageError(f"evaluate.answers: json_schema is no JSON schema ({error.message[:200]})") from None
    return kind(schema, registry=Registry())  # the default registry would download what a $ref names


def _is_valid(validator: Any, value: Any) -> bool:
    from jsonschema.exceptions import _WrappedReferencingError

    try:
        return bool(validator.is_valid(value))
    except RecursionError:
        return False
    except _WrappedReferencingError as error:
        raise UsageError(f"evaluate.answers: json_schema has a $ref that is not in it ({error})") from None


PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "number": (last_number, "number"),
    "multiple_choice": (chosen_option, "letter of an option"),
    "json_fields": (_parse_object, "JSON object"),
    "tool_call": (parse_tool_calls, "tool call"),
}
"""What a verifier reads of answers and references, and its name."""
PYTHON_RUNNER = """
import json, runpy, sys
rows, output = json.load(sys.stdin), sys.stdout
sys.stdout = sys.stderr
verify = runpy.run_path(sys.argv[1])["verify"]
json.dump([float(verify(*row)) for row in rows], output)
"""


def run_python_verifier(
    settings: VerifierConfig, prompts: Sequence[AnswerPrompt], answers: Sequence[str], recipe_dir: Path
) -> list[float]:
    """The scores of a user's own verify(prompt, answer, reference), in its own process, without our environment."""
    path = _verifier_file(settings, recipe_dir)
    rows = [[row.question, answer, row.reference] for row, answer in zip(prompts, answers, strict=True)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", PYTHON_RUNNER, str(path)], cwd=path.parent, env={},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(json.dumps(rows), timeout=settings.timeout)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{path.name}: it took over {settings.timeout:g} s (timeout)") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise UsageError(f"{path.name}: {(errors.strip().splitlines() or ['it ended'])[-1][:300]}")
    if not output:
        raise UsageError(f"{path.name}: it returned no scores")
    scores: list[float] = json.loads(output)
    if outside := [score for score in scores if not 0 <= score <= 1]:
        raise UsageError(f"{path.name}: verify returned {outside[0]:g}; it wants a score from 0 to 1")
    return scores
