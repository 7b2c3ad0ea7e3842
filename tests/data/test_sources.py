"""Rows are read from every kind of source; every error names file, line and remedy."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from modelwright.data.chat import load_conversations
from modelwright.data.readers import InvalidRow, Row, raise_on_invalid_rows, read_file
from modelwright.data.shards import check_raw_text
from modelwright.data.sources import (
    hub_id,
    is_hub_name,
    iter_rows,
    iter_validation_rows,
    notes_on_files,
    read_train_rows,
)
from modelwright.errors import DataError, UsageError
from modelwright.recipe.sections import CountOrFraction, DataConfig

ROWS = [{"question": f"What is {n}?", "answer": f"It is {n}, naïvely."} for n in range(5)]


def read(path: Path, **settings: Any) -> list[Row]:
    return read_train_rows(DataConfig(dataset_name=path.name, **settings), path.parent)


def values(rows: list[Row]) -> list[dict[str, Any]]:
    return [row.values for row in rows]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_jsonl_file_gives_its_rows_with_their_lines(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    path = write_lines(tmp_path / "rows.jsonl", [lines[0], "", *lines[1:]])
    rows = read(path)
    assert values(rows) == ROWS
    assert [row.where for row in rows] == ["rows.jsonl:1", *(f"rows.jsonl:{n}" for n in range(3, 7))]


def test_a_line_separator_inside_a_text_does_not_break_a_jsonl_line(tmp_path: Path) -> None:
    row = {"question": "one\u2028two", "answer": "three\x85four"}
    path = write_lines(tmp_path / "rows.jsonl", [json.dumps(row, ensure_ascii=False)])
    assert values(read(path)) == [row]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode())
    assert values(read(tmp_path / "rows.jsonl")) == ROWS[:1]


def test_a_json_file_is_a_list_of_rows_or_an_object_that_holds_one(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "held.json").write_text(json.dumps({"version": "1", "data": ROWS}), encoding="utf-8")
    assert values(read(tmp_path / "list.json")) == ROWS == values(read(tmp_path / "held.json"))
    assert read(tmp_path / "list.json")[2].where == "list.json row 3"


def test_a_long_json_list_is_read_piece_by_piece(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": "é\\]},{[" * (n % 7) * 900} for n in range(1500)]
    path = tmp_path / "long.json"
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    tracemalloc.start()
    assert all(row.values == rows[number] for number, row in enumerate(read_file(path)) if isinstance(row, Row))
    peak, size = tracemalloc.get_traced_memory()[1], path.stat().st_size
    tracemalloc.stop()
    assert size > 20_000_000 and peak < size / 2
    path.write_text(path.read_text(encoding="utf-8")[:-3] + ",\n}", encoding="utf-8")
    *_, last = read_file(path)
    line = path.read_text(encoding="utf-8").count("\n") + 1
    assert isinstance(last, InvalidRow) and last.file_unreadable and last.where == f"long.json:{line}"


def test_a_csv_file_keeps_commas_quotes_and_lines_inside_its_fields(tmp_path: Path) -> None:
    odd = [{"question": 'He said "go", then?', "answer": "one\ntwo"}, {"question": "a\u2028b", "answer": "c\x0bd"}]
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(odd)
    assert values(read(tmp_path / "rows.csv")) == odd


def test_a_parquet_file_gives_its_rows(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet")
    assert values(rows) == ROWS
    assert rows[0].where == "rows.parquet row 1"


def test_a_folder_gives_its_files_in_order_of_name(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_lines(folder / "b.jsonl", [json.dumps(ROWS[1])])
    write_lines(folder / "a.jsonl", [json.dumps(ROWS[0])])
    write_lines(folder / "notes.txt", ["not data"])
    assert values(read(folder)) == ROWS[:2]


def test_a_folder_with_a_train_file_leaves_its_test_file_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [json.dumps(ROWS[0])])
    write_lines(folder / "test.jsonl", [json.dumps(ROWS[1])])
    assert values(read(folder)) == ROWS[:1]


def test_a_folder_trains_on_no_test_file_and_says_what_it_does_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("data.jsonl", "test-00000-of-00001.jsonl", "Valid.jsonl", "more/x.jsonl")):
        write_lines(folder / name, [json.dumps(ROWS[number % 4])])
    write_lines(folder / "old.jsonl.bz2", ["packed"])
    write_lines(folder / "trainer.jsonl", [])
    assert values(read(folder)) == ROWS[:1]
    [note] = notes_on_files(DataConfig(dataset_name=str(folder)), tmp_path)
    assert note == "not read in rows: Valid.jsonl, more/, old.jsonl.bz2 and 1 more"
    held_out = iter_rows(str(folder), None, tmp_path)
    assert [row.values for row in held_out if isinstance(row, Row)] == [ROWS[2], ROWS[1]]
    for name in ("data.jsonl", "trainer.jsonl"):
        (folder / name).unlink()
    assert len(read(folder)) == 2, "there is no other file"


def test_a_lost_and_found_that_only_root_can_read_is_no_folder_of_rows(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    (folder / "lost+found").mkdir(parents=True)
    write_lines(folder / "rows.jsonl", [json.dumps({"text": ROWS[0]["answer"]})])
    (folder / "lost+found").chmod(0)
    code = (
        "import os, pathlib; from modelwright.data.sources import notes_on_files, source_files;"
        "from modelwright.recipe.sections import DataConfig;"
        "os.geteuid() or (os.setegid(1234), os.seteuid(1234)); here = pathlib.Path();"
        "print(notes_on_files(DataConfig(dataset_name='volume'), here), *source_files('volume', here))"
    )
    tmp_path.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] volume/rows.jsonl\n", done.stderr


def test_arrays_of_tokens_are_answered_with_the_command_that_writes_those_we_read(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    np.save(tmp_path / "shards" / "train_000.npy", np.zeros((40, 256), np.uint16))
    with pytest.raises(UsageError, match=r"shards holds no .*\.npy arrays .* modelwright data prepare TEXT -o FOLDER"):
        check_raw_text(DataConfig(dataset_name="shards"), 0, tmp_path)


def test_a_folder_that_datasets_saved_gives_its_train_split(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(ROWS[:3]), "test": Dataset.from_list(ROWS[3:])}).save_to_disk(
        tmp_path / "split"
    )
    assert values(read(tmp_path / "one")) == ROWS
    assert values(read(tmp_path / "split")) == ROWS[:3]
    [note] = load_conversations(DataConfig(dataset_name="split"), 0, tmp_path).quarantine.lines()[1:]
    assert note == "not read in split: test (data.validation_split holds one of them out)"
    assert notes_on_files(DataConfig(dataset_name="one"), tmp_path) == []
    both = DataConfig(dataset_name="split", dataset_split="test", validation_split="train")
    assert notes_on_files(both, tmp_path) == []


def test_a_split_of_a_saved_data_set_is_held_out_where_it_has_one(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = {"train": Dataset.from_list(ROWS[:3]), "validation": Dataset.from_list(ROWS[3:])}
    DatasetDict(splits).save_to_disk(tmp_path / "split")
    DatasetDict({"train": splits["train"]}).save_to_disk(tmp_path / "alone")
    data = DataConfig(dataset_name="split", validation_split="validation")
    dataset = load_conversations(data, 0, tmp_path)
    assert (len(dataset.train), len(dataset.held_out)) == (3, 2)
    for name in ("alone", "field-guide"):  # no such split: test_size is held out
        data = DataConfig(dataset_name=name, validation_split="validation", test_size=CountOrFraction(1),
                          columns={"question": "prompt", "answer": "completion"})  # fmt: skip
        assert list(iter_validation_rows(data, tmp_path)) == []
        assert len(load_conversations(data, 0, tmp_path).held_out) == 1


def test_a_data_set_that_once_had_no_owner_is_a_name_of_the_hub(tmp_path: Path) -> None:
    assert is_hub_name("wikitext", tmp_path) and hub_id("wikitext") == "Salesforce/wikitext"
    assert hub_id("owner/wikitext") == "owner/wikitext"
    (tmp_path / "wikitext").mkdir()
    assert not is_hub_name("wikitext", tmp_path)


def test_a_dataset_without_a_train_split_is_answered_with_the_splits_it_has(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict({"test": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "odd")
    with pytest.raises(UsageError, match=r"odd has no split 'train'; its splits are test"):
        read(tmp_path / "odd")


def test_the_embedded_field_guide_is_found_by_name(tmp_path: Path) -> None:
    rows = read_train_rows(DataConfig(dataset_name="field-guide"), tmp_path)
    assert len(rows) >= 300
    assert {"topic", "question", "answer"} <= set(rows[0].values)


def test_only_the_first_rows_are_taken_when_max_rows_says_so(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [json.dumps(row) for row in ROWS])
    assert values(read(path, max_rows=2)) == ROWS[:2]


def test_rows_sorted_by_topic_are_sampled_over_all_topics(tmp_path: Path) -> None:
    rows = [{"question": f"{topic} {n}?", "answer": "Yes."} for topic in ("Knots", "Cars", "Food") for n in range(10)]
    path = write_lines(tmp_path / "rows.jsonl", [json.dumps(row) for row in rows])
    chosen = [row["question"].split()[0] for row in values(read(path, max_rows=6, sample_evenly=True))]
    assert chosen == ["Knots", "Knots", "Cars", "Cars", "Food", "Food"]
    assert values(read(path, max_rows=99, sample_evenly=True)) == rows


def write_two_formats(folder: Path) -> Path:
    """The set of the survival document after its own steps: JSONL with topic and question, and Parquet of it."""
    folder.mkdir()
    rows = [{"topic": "Knots", **row, "answer": "144" if n == 2 else row["answer"]} for n, row in enumerate(ROWS)]
    write_lines(folder / "final_qa_data_unique.jsonl", [json.dumps(row) for row in rows])
    joined = [{"full-question": f"For Knots, {row['question']}", "answer": row["answer"]} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(joined), folder / "qa_dataset.parquet")
    return folder


def test_a_set_in_two_formats_is_read_once_and_reported(tmp_path: Path) -> None:
    folder = write_two_formats(tmp_path / "skills")
    rows = read(folder)
    assert len(rows) == len(ROWS) and all("full-question" in row.values for row in rows)
    line = "final_qa_data_unique.jsonl has the same rows as qa_dataset.parquet and is not read"
    assert notes_on_files(DataConfig(dataset_name="skills"), tmp_path) == [line]
    data = DataConfig(dataset_name="skills", columns={"full-question": "prompt"}, test_size=CountOrFraction(1))
    assert line in load_conversations(data, 0, tmp_path).quarantine.lines()


@pytest.mark.parametrize("change", ["another answer", "one row more", "numbers only"])
def test_files_with_different_rows_are_all_read(tmp_path: Path, change: str) -> None:
    folder = write_two_formats(tmp_path / "skills")
    rows = [{"question": row["question"], "answer": f"{row['answer']}!"} for row in ROWS]
    if change == "one row more":
        rows = [{"answer": row["answer"]} for row in values(read(folder))] + [{"answer": "More."}]
    if change == "numbers only":
        (folder / "qa_dataset.parquet").unlink()
        write_lines(folder / "final_qa_data_unique.jsonl", [json.dumps({"id": n, "answer": "a"}) for n in range(5)])
        rows = [{"id": n, "question": "q"} for n in range(5)]
    others = len(read(folder))
    with (folder / "more.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert len(read(folder)) == others + len(rows)


def test_a_validation_file_is_read_next_to_the_recipe(tmp_path: Path) -> None:
    write_lines(tmp_path / "held.jsonl", [json.dumps(ROWS[0])])
    data = DataConfig(dataset_name="field-guide", validation_file="held.jsonl")
    assert values(list(raise_on_invalid_rows(iter_validation_rows(data, tmp_path)))) == ROWS[:1]
    assert list(iter_validation_rows(DataConfig(dataset_name="field-guide"), tmp_path)) == []


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "answers.jsonl", [json.dumps(ROWS[0])])
    with pytest.raises(UsageError) as caught:
        read(tmp_path / "anwsers.jsonl")
    output = "data: there is no file, folder or embedded set 'anwsers.jsonl'; did you mean answers.jsonl?"
    assert str(caught.value) == output


def test_a_misspelt_embedded_set_is_answered_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean field-guide"):
        read(tmp_path / "fieldguide")


def test_owner_and_name_mean_the_hub_unless_something_of_that_name_is_here(tmp_path: Path) -> None:
    assert is_hub_name("owner/name", tmp_path)
    assert not is_hub_name("owner/rows.jsonl", tmp_path)
    assert not is_hub_name("./owner", tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_name("owner/name", tmp_path)


def test_a_set_that_the_hub_does_not_give_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_train_rows(DataConfig(dataset_name="nobody/nothing-of-that-name"), tmp_path)
    output = str(caught.value)
    assert output.startswith(
        "data: 'nobody/nothing-of-that-name' is no local file or folder, and the hub gave no data set"
    )
    assert output.endswith("the network, and HF_TOKEN for a gated set")
    assert "\n" not in output


def test_a_file_of_an_unknown_kind_is_answered_with_the_kinds_we_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.xlsx", ["?"])
    with pytest.raises(
        UsageError, match=r"rows.xlsx ends in .xlsx; it wants one of .jsonl, .json, .csv, .tsv, .parquet"
    ):
        read(path)


def test_a_folder_without_data_says_what_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty holds no .jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt file"):
        read(tmp_path / "empty")


def test_every_broken_json_line_is_reported_at_once(tmp_path: Path) -> None:
    good = json.dumps(ROWS[0])
    path = write_lines(tmp_path / "rows.jsonl", [good, '{"question": ', good, "[1, 2]"])
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).splitlines() == [
        "rows.jsonl:2: this is no JSON (Expecting value at column 14)",
        "rows.jsonl:4: this is a JSON list; it wants an object with columns",
    ]


def test_a_broken_json_file_is_reported_with_its_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.json", ["[", '{"question": "a"},', "oops", "]"])
    with pytest.raises(DataError, match=r"^rows.json:3: this is no JSON"):
        read(path)


def test_a_json_file_of_something_else_says_what_it_wants(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.json", ['{"question": "a", "answer": "b"}'])
    with pytest.raises(DataError, match=r"^rows.json: it wants a JSON list of objects, each a row, or"):
        read(path)


def test_bytes_that_are_no_utf8_are_reported_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "a"}\n{"question": "caf\xe9"}\n')
    with pytest.raises(DataError) as caught:
        read(tmp_path / "rows.jsonl")
    assert str(caught.value) == "rows.jsonl:2: these bytes are not UTF-8; save the file as UTF-8"


def test_a_csv_line_with_a_column_too_many_is_reported(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.csv", ["question,answer", "a,b", "c,d,e"])
    with pytest.raises(DataError, match=r"^rows.csv:3: this line has not the 2 columns of the header$"):
        read(path)


def test_a_csv_field_may_be_a_whole_document(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.csv", ["question,answer", f"a,{'x' * 200_000}"])
    assert values(read(path)) == [{"question": "a", "answer": "x" * 200_000}]


def test_a_truncated_parquet_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"^rows.parquet: this is no whole Parquet file \("):
        read(path)


def test_a_text_file_is_one_document_and_a_long_one_is_divided_between_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("One.\n\nTwo, naïvely.\n", encoding="utf-8")
    assert values(read(tmp_path / "short.txt")) == [{"text": "One.\n\nTwo, naïvely.\n"}]
    text = "".join(f"{'word ' * 100}{number}\n\n" for number in range(5000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    rows = read(tmp_path / "long.txt")
    assert len(rows) == 3 and "".join(row.values["text"] for row in rows) == text
    assert all(row.values["text"].endswith("\n\n") for row in rows)
    assert [row.where for row in rows][1:] == ["long.txt:4151", "long.txt:8297"]


def test_the_embedded_corpus_comes_through_the_same_door() -> None:
    rows = read_train_rows(DataConfig(dataset_name="python-docs", max_rows=3), Path())
    assert [list(row.values) for row in rows] == [["text"]] * 3
    assert rows[0].where.startswith("topic ")


def test_a_csv_separated_by_semicolons_is_reported(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.csv", ["question;answer", "What?;That"])
    with pytest.raises(
        DataError, match=r"rows.csv:1: the header is one column, 'question;answer', that looks separated by"
    ):
        read(path)


def test_a_csv_that_is_called_jsonl_is_reported_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ["question,answer", "What?,That", "Who?,She"])
    with pytest.raises(DataError) as output:
        read(path)
    assert [str(problem) for problem in output.value.problems] == [
        "rows.jsonl:1: this is no JSON; it looks like CSV: name the file .csv"
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".txt"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"rows{suffix}"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=f"data: .*rows{suffix} is not a regular file"):
        next(iter(read_file(path)))
