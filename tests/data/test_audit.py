"""An audit reports every invalid row and the statistics of the rest; rendered samples show what is trained."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from datasets import load_from_disk

from modelwright.cli.main import main
from modelwright.data.audit import AuditConfig, audit, convert_to_parquet, save_dataset
from modelwright.data.chat import load_conversations
from modelwright.data.readers import InvalidRow, read_file
from modelwright.data.sources import iter_validation_rows, read_train_rows
from modelwright.errors import DataError, UsageError
from modelwright.recipe.sections import DataConfig
from tiny import tiny_pairs, tiny_recipe

GOOD = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}, as anyone can count."} for n in range(40)]
SOURCE = Path(__file__).parents[2] / "src"
FRAME = AuditConfig("conversations", max_length=64, batch_size=4, seed=1)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["data", *arguments])
    return int(stop.value.code or 0)


def test_every_unusable_row_is_named_with_its_location_and_value(tmp_path: Path) -> None:
    bad = [{"prompt": "Why?", "completion": " "}, {"prompt": 3, "completion": "x"}, {"prompt": "Why?"}]
    path = write(tmp_path / "rows.jsonl", [*GOOD, *bad])
    with path.open("ab") as file:
        file.write(b'{"prompt": "caf\xe9"}\n{"prompt": "Why?", "completion": "Bec\n')
    result = audit(DataConfig(dataset_name=str(path)), FRAME, tmp_path)
    assert (result.rows, len(result.invalid_rows)) == (45, 5)
    assert [fault.where for fault in result.invalid_rows] == [f"rows.jsonl:{line}" for line in range(41, 46)]
    assert [fault.reason.partition(";")[0] for fault in result.invalid_rows] == [
        "'completion' is empty", "'prompt' is 3",
        "no messages, nor prompt and completion", "these bytes are not UTF-8",
        "this is no JSON (Unterminated string starting at at column 34)",
    ]  # fmt: skip
    assert '"completion": " "' in result.invalid_rows[0].excerpt


def test_the_numbers_foretell_cuts_copies_leaks_and_padding(tmp_path: Path) -> None:
    long = {"prompt": "Tell me all.", "completion": "word " * 300}
    again = [{**row, "completion": f"{row['completion']} Truly."} for row in GOOD[:20]]
    path = write(tmp_path / "rows.jsonl", [*GOOD, *again, GOOD[0], long])
    facts = audit(DataConfig(dataset_name=str(path)), FRAME, tmp_path).stats
    assert facts["truncated"]["rows"] == 1 and facts["truncated"]["truncated_tokens"] > 300
    assert facts["duplicates"]["exact"] == 1 and facts["duplicates"]["max_copies"] == 2
    assert facts["split"]["groups_in_both_splits"] == 0
    assert facts["split"]["random_split_leakage"] > 0.2
    assert 0 < facts["padding"]["padded"] < 0.5 and 0 < facts["padding"]["packed"] < 0.5
    assert sum(facts["lengths"]["counts"]) == 62


def test_a_split_by_rows_does_not_hide_its_leak_from_the_audit(tmp_path: Path) -> None:
    parts = {"question": "prompt", "answer": "completion"}
    data = DataConfig(dataset_name="field-guide-editions", columns=parts, split_by="row", test_size=16)
    split = audit(data, FRAME, tmp_path).stats["split"]
    assert split["prompts_in_both_splits"] > 4
    assert split["random_split_leakage"] > 0.4


def test_a_long_system_prompt_makes_no_rows_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD)
    result = [
        audit(DataConfig(dataset_name=str(path), system_prompt=system_prompt), FRAME, tmp_path).stats["duplicates"][
            "near"
        ]
        for system_prompt in (None, "You are an expert who answers at length and with care. " * 20)
    ]
    assert result[0] == result[1]


def test_the_practical_skills_leak_in_a_random_split_and_not_in_ours(shared: Path) -> None:
    path = shared / "data" / "practical-skills-qa" / "final_qa_data_unique.jsonl"
    data = DataConfig(dataset_name=str(path), columns={"question": "prompt", "answer": "completion"})
    facts = audit(data, FRAME, shared).stats["split"]
    assert facts["groups"] == 1727
    assert facts["random_split_leakage"] > 0.45
    assert facts["groups_in_both_splits"] == facts["rows_in_both_splits"] == 0


def test_the_verb_needs_no_torch_and_writes_the_quarantine(tmp_path: Path, model_folder: Path) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"question": "Why?", "answer": ""}\n')
    code = (
        "import sys; from modelwright.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as stop: code = stop.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "data", "audit", str(recipe), "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout, done.stderr
    output = json.loads(done.stdout)
    (facts,) = output["data"].values()
    assert not output["ok"] and facts["invalid"] == 1
    assert facts["tokens_counted_by"] == "the model's tokenizer"
    (row,) = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert row["where"] == "rows.jsonl:41" and "'answer' is empty" in row["reason"]


def test_a_wrong_column_is_reported_with_the_line_of_the_recipe(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    recipe.write_text(recipe.read_text().replace('"question"', '"questoin"'))
    monkeypatch.chdir(tmp_path)
    line = next(n for n, text in enumerate(recipe.read_text().splitlines(), 1) if "questoin" in text)
    with pytest.raises(SystemExit):
        main(["check", "recipe.yaml"])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "rows.jsonl:1: there is no column 'questoin'; the columns are question, answer "
        "(40 rows like it, such as rows.jsonl:2 and rows.jsonl:3) "
        f"(data.columns.questoin is asked for in recipe.yaml:{line})"
    )


def test_a_sample_shows_what_is_trained(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    assert run("show", str(recipe), "--num-samples", "2") == 0
    output = capsys.readouterr().out
    assert output.count("⟦") == 2
    assert "<|im_start|>assistant\n⟦Sum: 4. Count again. Count again.<|im_end|>\n⟧" in output
    assert run("show", str(recipe), "--num-samples", "1", "--json") == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]["sft"]
    assert sample["trained_tokens"] < sample["tokens"]
    assert [piece["trained"] for piece in sample["spans"]] == [False, True]


def test_data_by_its_own_name_can_replace_a_recipe(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.jsonl", GOOD)
    for name, rows in (("rows", 40), ("rows/a.jsonl", 40), ("songbook", 72), ("field-guide-pairs", 180)):
        columns = ["--set", "data.columns={question: prompt, answer: completion}"] if name == "songbook" else []
        assert run("audit", name, "--json", *columns) == 0
        assert json.loads(capsys.readouterr().out)["data"][name]["rows"] == rows
    model = f"model.model_name_or_path={model_folder}"
    assert run("show", "rows", "--num-samples", "1", "--set", model) == 0
    assert "⟦It is 0, as anyone can count.<|im_end|>\n⟧" in capsys.readouterr().out
    quick = "prepare={min_words: 1, minhash_dedup: false, sequence_length: 16, vocab_size: 300}"
    column = "data.text_column=completion"
    assert run("prepare", "rows", "--output", "packed", "--set", column, "--set", quick) == 0
    assert run("show", "packed", "--num-samples", "1") == 0
    assert "pretrain: packed row 0" in capsys.readouterr().out
    assert run("audit", "none.jsonl") == 2
    assert capsys.readouterr().err == "none.jsonl: there is no such file\n"


def test_conversations_become_a_folder_that_load_from_disk_and_we_read(tmp_path: Path) -> None:
    data = DataConfig(dataset_name=str(write(tmp_path / "rows.jsonl", GOOD)), system_prompt="Count.")
    built = load_conversations(data, 1, tmp_path)
    assert save_dataset(built, tmp_path / "set", ("messages",)) == {"train": 36, "held_out": 4}
    stored = DataConfig(dataset_name="set", validation_file="set")
    again = load_conversations(stored, 1, tmp_path)
    assert [item.messages for item in again.train] == [item.messages for item in built.train]
    assert [item.messages for item in again.held_out] == [item.messages for item in built.held_out]
    assert len(read_train_rows(stored, tmp_path)) == 36 and len(list(iter_validation_rows(stored, tmp_path))) == 4


def test_each_stage_of_a_recipe_becomes_a_folder_in_its_own_form(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = tiny_recipe(tmp_path, model_folder), tmp_path / "set"
    assert run("convert", str(recipe), "-o", str(folder)) == 0
    assert capsys.readouterr().err == ""
    write(tmp_path / "pairs.jsonl", tiny_pairs(24))
    with recipe.open("a", encoding="utf-8") as file:
        file.write("lora: {}\ndpo:\n  data: {train_file: pairs.jsonl, test_size: 4}\n")
    assert run("convert", str(recipe), "-o", str(folder)) == 0
    assert capsys.readouterr().err == "rows of other stages are not written; --stage writes them: dpo\n"
    assert load_from_disk(folder)["train"].column_names == ["messages"]
    assert run("convert", str(recipe), "--stage", "dpo", "-o", str(folder), "--json") == 0
    output = capsys.readouterr()
    assert (json.loads(output.out)["rows"], output.err) == ({"train": 20, "held_out": 4}, "")
    pair = load_from_disk(folder)["train"][0]
    assert [[turn["role"] for turn in pair[name]] for name in ("prompt", "chosen", "rejected")] == [
        ["user"], ["assistant"], ["assistant"],
    ]  # fmt: skip
    assert run("convert", str(recipe), "--stage", "pretrain", "-o", str(folder)) == 2
    assert "'pretrain'; of " in (error := capsys.readouterr().err) and "it wants sft, dpo or lora" in error, error
    rows = str(tmp_path / "pairs.jsonl")
    assert run("convert", rows, "--stage", "dpo", "-o", str(tmp_path / "pairs.parquet")) == 2
    assert "it wants a recipe" in capsys.readouterr().err


def test_jsonl_becomes_parquet_with_the_full_question(tmp_path: Path) -> None:
    rows = [{"topic": "Knots", "question": "How is a bowline tied?", "answer": "Up, around, down."}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert convert_to_parquet(path, tmp_path / "rows.parquet", "For {topic}, {question}") == 1
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == [
        {"full-question": "For Knots, How is a bowline tied?", "answer": "Up, around, down."}
    ]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: there is no column 'subject'"):
        convert_to_parquet(path, tmp_path / "rows.parquet", "For {subject}, {question}")
    with pytest.raises(UsageError, match=r"it wants \.parquet"):
        convert_to_parquet(path, tmp_path / "rows.arrow")


def test_the_full_questions_are_those_of_the_published_parquet(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "practical-skills-qa"
    convert_to_parquet(folder / "final_qa_data_unique.jsonl", tmp_path / "made.parquet", "For {topic}, {question}")
    ours = pyarrow.parquet.read_table(tmp_path / "made.parquet").to_pylist()
    theirs = pyarrow.parquet.read_table(folder / "qa_dataset.parquet").to_pylist()
    assert set(ours[0]) == set(theirs[0]) and len(ours) == len(theirs) == 2845
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    assert same == 2845


def test_bad_rows_next_to_identical_rows_are_reported(tmp_path: Path) -> None:
    rows = ['{"prompt": "Why?", "completion": "So."}'] * 40 + ['{"prompt": 7']
    (tmp_path / "same.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data = DataConfig(train_file=str(tmp_path / "same.jsonl"), max_invalid_fraction=0.5)
    reasons = [row.reason for row in audit(data, FRAME, tmp_path).invalid_rows]
    assert len(reasons) == 2 and "no JSON" in reasons[0] and "test_size holds out 1 of 1" in reasons[1]


def test_a_long_audit_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.data.audit.PROGRESS_ROWS", 10)
    rows = [json.dumps({"prompt": f"What is {n}?", "completion": "It."}) for n in range(25)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    lines: list[str] = []
    audit(DataConfig(train_file="rows.jsonl"), FRAME, tmp_path, lines.append)
    assert lines == ["10 rows read", "20 rows read"]


def test_half_a_character_in_a_name_is_reported_and_can_be_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    half, good = "\ud800", {"prompt": "Why?", "completion": "So."}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {half: 1}}}]}
    rows = {
        "column": {**good, half: 1},
        "turn": {"messages": [{"role": "user", "content": "Why?"}, {**call, f"x{half}": 5}]},
        "call": {"messages": [{"role": "user", "content": "Why?"}, call]},
        "pair": {"prompt": "Why?", "chosen": "So.", "rejected": "No.", half: 1},
    }
    for name, row in rows.items():
        path = write(tmp_path / f"{name}.jsonl", [row, good])
        monkeypatch.chdir(tmp_path)
        assert run("audit", str(path)) == run("audit", str(path), "--json") == 2
        output = capfd.readouterr()
        assert "half a character" in output.out or "x? 5" in output.out, name
        assert "Unexpected" not in output.err
        with pytest.raises(DataError):
            load_conversations(DataConfig(dataset_name=str(path)), 1, tmp_path)


def test_a_parquet_file_that_exhausts_memory_is_not_called_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)

    def exhaust(*_: Any, **__: Any) -> None:
        raise pyarrow.ArrowMemoryError("malloc of size 314572800 failed")

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", exhaust)
    [row] = read_file(path)
    assert isinstance(row, InvalidRow) and row.reason.startswith("memory ran out while this Parquet file was read")


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_invalid_rows_are_listed_with_identical_rows(tmp_path: Path, limit: float) -> None:
    path = write(tmp_path / "rows.jsonl", [GOOD[0], GOOD[0], {"prompt": "Why?", "completion": ""}])
    data = DataConfig(dataset_name=str(path), max_invalid_fraction=limit)
    with pytest.raises(DataError) as caught:
        load_conversations(data, 1, tmp_path)
    message = str(caught.value)
    assert "rows.jsonl:3: 'completion' is empty" in message and "of 1 distinct groups" in message


def test_a_parquet_file_that_inflates_beyond_memory_says_so(tmp_path: Path) -> None:
    """20 GB in 2 kB: one value of 20 MB, which a thousand rows name."""
    path = tmp_path / "bomb.parquet"
    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), ["x" * 20_000_000])
    with pyarrow.parquet.ParquetWriter(
        path, pyarrow.schema([("text", values.type)]), compression="zstd", store_schema=False
    ) as writer:
        writer.write_table(pyarrow.table({"text": values}), row_group_size=1000)
    assert path.stat().st_size < 10_000

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 29, resource.RLIM_INFINITY))

    command = [sys.executable, "-m", "modelwright", "data", "audit", str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "memory ran out while this Parquet file was read" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
