"""Invalid rows are quarantined with their location, as many as the recipe allows; the rest is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.data import chat, preferences
from modelwright.data.readers import write_quarantine
from modelwright.data.shards import check_raw_text
from modelwright.errors import DataError
from modelwright.recipe.load import load
from modelwright.recipe.prepare_config import PrepareConfig
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import ChatConfig

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


def test_an_empty_lyric_is_quarantined_by_check_audit_and_run_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    songs = [{"lyrics": f"La {n}\nLa", "artist": "Nobody"} for n in range(9)] + [{"lyrics": " ", "artist": "Nobody"}]
    Path("songs.jsonl").write_text("".join(json.dumps(song) + "\n" for song in songs), encoding="utf-8")
    sets = ["data.dataset_name=songs.jsonl", "data.test_size=2", "data.max_invalid_fraction=10 %"]
    loaded = load("lyrics-pythia", sets, {})
    data, problem = loaded.recipe.data_for("sft"), "songs.jsonl:10: a song wants lyrics and artist, both with text"
    result = chat.load_conversations(data, 1, tmp_path)
    assert (len(result.train) + len(result.held_out), result.quarantine.rows_read) == (27, 10)
    assert result.manifest(data)["quarantined_examples"][0].startswith(problem)
    for words in (["check", "lyrics-pythia"], ["data", "audit", "lyrics-pythia"]):
        with pytest.raises(SystemExit) as stop:
            main([*words, *(part for setting in sets for part in ("--set", setting))])
        printed = capsys.readouterr().out
        assert not stop.value.code and problem in printed, printed
        assert "read by data.columns: prompt → prompt, answer → completion" in printed
    with pytest.raises(DataError, match=problem):
        chat.load_conversations(data.model_copy(update={"max_invalid_fraction": 0.05}), 1, tmp_path)


@pytest.mark.parametrize("written", ["5%", "5 %", 0.05, "0.05"])
def test_a_limit_is_a_percentage_or_a_fraction(written: str | float) -> None:
    assert DataConfig(dataset_name="x", max_invalid_fraction=written).max_invalid_fraction == 0.05
    assert ChatConfig(max_truncated_rows=written).max_truncated_rows.resolve(100) == 5
    assert PrepareConfig(max_invalid_fraction=written).max_invalid_fraction == 0.05


def test_empty_documents_and_bad_rows_of_raw_text_are_counted(tmp_path: Path) -> None:
    rows = [{"text": f"Document {n} of some length."} for n in range(8)] + [{"text": " "}, {"body": "x"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(dataset_name="text.jsonl", max_invalid_fraction=0.1)
    lines = check_raw_text(data, 1, tmp_path).quarantine.lines()
    assert lines[1:] == [
        "1 of 10 rows cannot be used: text.jsonl:10: there is no column 'text'; the columns are body; "
        "data.text_column says which holds the text",
        "1 of 10 rows are dropped: text.jsonl:9: 'text' is empty",
    ]
    with pytest.raises(DataError, match="there is no column 'text'"):
        check_raw_text(DataConfig(dataset_name="text.jsonl"), 1, tmp_path)


def test_one_text_file_is_not_one_document_by_surprise(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("One.\n\nTwo.\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"book\.txt: the file is one document.*data\.sample_by: paragraph or line"):
        check_raw_text(DataConfig(dataset_name="book.txt"), 1, tmp_path)
    for settings in ({"sample_by": "paragraph"}, {"test_size": 0}):
        check_raw_text(DataConfig(dataset_name="book.txt", **settings), 1, tmp_path)  # type: ignore[arg-type]
