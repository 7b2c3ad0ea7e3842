"""Invalid rows are quarantined with their location, as many as the recipe allows; the rest is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelwright.data import chat, preferences
from modelwright.data.readers import write_quarantine
from modelwright.errors import DataError
from modelwright.recipe.sections import DataConfig

ROWS = [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(18)]


def bad_file(path: Path) -> Path:
    lines = [*map(json.dumps, ROWS), '{"prompt": "Why?", "completion": " "}', "not json"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_bad_conversations_are_quarantined_where_the_recipe_allows_it(tmp_path: Path) -> None:
    path = bad_file(tmp_path / "rows.jsonl")
    result = chat.load_conversations(DataConfig(dataset_name=str(path), max_invalid_fraction=0.1), 1, tmp_path)
    assert len(result.train) + len(result.held_out) == 18
    assert result.manifest(DataConfig(dataset_name=str(path)))["quarantined_rows"] == 2
    write_quarantine(tmp_path / "quarantine.jsonl", result.quarantine.invalid_rows)
    output = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert sorted((each["where"], each["reason"].partition(";")[0].partition(" (")[0]) for each in output) == [
        ("rows.jsonl:19", "'completion' is empty"), ("rows.jsonl:20", "this is no JSON"),
    ]  # fmt: skip


def test_more_bad_rows_than_the_share_end_it_with_all_of_them_reported(tmp_path: Path) -> None:
    path = bad_file(tmp_path / "rows.jsonl")
    with pytest.raises(
        DataError, match=r"2 of 20 rows cannot be used, more than data\.max_invalid_fraction 0\.05 allows"
    ) as output:
        chat.load_conversations(DataConfig(dataset_name=str(path), max_invalid_fraction=0.05), 1, tmp_path)
    assert {problem.where for problem in output.value.problems} == {"rows.jsonl:19", "rows.jsonl:20", "data"}
    with pytest.raises(DataError, match=r"rows\.jsonl:19: 'completion' is empty"):
        chat.load_conversations(DataConfig(dataset_name=str(path)), 1, tmp_path)


def test_bad_pairs_are_quarantined_and_the_same_answers_are_counted_apart(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n}?", "chosen": "Good.", "rejected": "Bad."} for n in range(10)]
    rows += [
        {"prompt": "Same?", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "No?", "chosen": "", "rejected": "x"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = preferences.load_preferences(DataConfig(dataset_name=str(path), max_invalid_fraction=0.1), 1, tmp_path)
    assert (len(result.train) + len(result.held_out), result.counts["identical_pairs"]) == (10, 1)
    assert [fault.where for fault in result.quarantine.invalid_rows] == ["pairs.jsonl:12"]
