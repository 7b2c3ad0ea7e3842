"""A preparation gives the same bytes whoever does the work and whenever it was killed, and says what it dropped."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from modelwright.cli.main import main
from modelwright.data.prepare import dedup, job, steps
from modelwright.data.prepare.clean import clean_document
from modelwright.data.prepare.executors import (
    Executor,
    ProcessExecutor,
    RankExecutor,
    RayExecutor,
    SerialExecutor,
    band_key_table,
    verify_partition,
)
from modelwright.data.prepare.job import PrepareJob
from modelwright.data.prepare.pipeline import run_pipeline
from modelwright.data.shards import PackedDataset
from modelwright.data.sources import python_docs
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.errors import DataError
from modelwright.recipe.prepare_config import PrepareConfig
from modelwright.recipe.sections import DataConfig
from modelwright.runs.folder import hash_file
from tests.faults.fork_server import events_of

SETTINGS = {"sequence_length": 64, "vocab_size": 600, "rows_per_shard": 64, "tokenizer_sample_mb": 1}
SOURCE = Path(__file__).parents[2] / "src"


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents, ten of them again, five of them nearly again, and one that says nothing."""
    texts = [
        text[:2000]
        for _, text in python_docs()[100:]
        if clean_document(text[:2000], PrepareConfig()).dropped_by is None
    ][:60]
    near = [f"{text} And something more is said." for text in texts[20:25]]
    rows = [{"text": text, "kind": number % 7} for number, text in enumerate([*texts, *texts[:10], *near, "too short"])]
    return write_rows(tmp_path_factory.mktemp("raw") / "raw.jsonl", rows)


def plan(folder: Path, data: dict[str, Any], tokenizer: Path | None = None, **settings: Any) -> PrepareJob:
    config = PrepareConfig(**{**SETTINGS, **settings})
    return PrepareJob.make(folder, DataConfig(**data), config, 42, folder, tokenizer)


def done(folder: Path, data: dict[str, Any], executor: Executor | None = None, **settings: Any) -> dict[str, Any]:
    """Prepare, and return the report."""
    for _ in run_pipeline(plan(folder, data, **settings), executor or SerialExecutor()):
        pass
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def checksums(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hash_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, raw: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    done(folder, {"train_file": str(raw)})
    return folder


def test_the_report_says_what_became_of_every_document(prepared: Path) -> None:
    report = json.loads((prepared / "report.json").read_text())
    assert report["documents"] == {
        "read": 76, "cleaned": 75, "train": 54, "held_out": 6, "exact_duplicates": 10, "near_duplicates": 5,
    }  # fmt: skip
    assert report["filters"]["min_words"]["documents"] == 1
    assert report["filters"]["min_words"]["examples"][0] == {"where": "raw.jsonl:76", "value": 2, "text": "too short"}
    assert report["clusters"] == {"2": 5}
    assert sum(report["lengths"]["counts"]) == 60


def test_the_shards_hold_the_kept_documents_in_their_order(prepared: Path, raw: Path) -> None:
    encoder, train, held_out = (
        DocumentTokenizer.open(prepared / "tokenizer"),
        PackedDataset.open(prepared),
        PackedDataset.open(prepared, "held_out"),
    )
    texts = encoder.tokenizer.decode(train.get_rows(range(train.rows()))[0].ravel().tolist(), skip_special_tokens=False)
    result = texts.split("<|im_end|>")[:-1]
    inputs = [clean_document(json.loads(line)["text"], PrepareConfig()).text for line in raw.read_text().splitlines()]
    indices = [inputs.index(each) for each in result]
    assert indices == sorted(indices) and len(set(indices)) == len(indices) >= 52
    assert train.vocab_size == 640 and train.tokenizer_fingerprint == encoder.fingerprint
    assert held_out.rows() > 0
    train.verify()


def test_several_workers_leave_the_same_bytes(
    prepared: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SLICE_BYTES", 20_000)
    done(tmp_path / "one", {"train_file": str(raw)})
    assert len(plan(tmp_path / "many", {"train_file": str(raw)}).slices) > 4
    for count in (2, 3):
        executor = ProcessExecutor(count)
        done(tmp_path / f"many-{count}", {"train_file": str(raw)}, executor)
        executor.close()
        assert checksums(tmp_path / f"many-{count}") == checksums(tmp_path / "one")
    texts = [PackedDataset.open(folder).get_rows([0, 5])[0].tolist() for folder in (tmp_path / "one", prepared)]
    assert texts[0] == texts[1]  # units are only pieces of work: the rows are the same


def test_ranks_of_any_launcher_leave_the_same_bytes(prepared: Path, raw: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[4]); from pathlib import Path; import test_prepare as t\n"
        "from modelwright.data.prepare.executors import RankExecutor\n"
        "t.done(Path(sys.argv[1]), {'train_file': sys.argv[2]}, RankExecutor(int(sys.argv[3]), 2))"
    )
    here = str(Path(__file__).parent)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(raw), str(rank), here],
            env={**os.environ, "PYTHONPATH": f"{SOURCE}:{Path(__file__).parents[1]}"},
        )
        for rank in range(2)
    ]
    assert [process.wait() for process in started] == [0, 0]
    assert checksums(tmp_path) == checksums(prepared)
    assert RankExecutor(1, 2).size == 2


def test_ray_leaves_the_same_bytes(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is an extra")
    monkeypatch.setattr(job, "SLICE_BYTES", 20_000)
    done(tmp_path / "one", {"train_file": str(raw)})
    done(tmp_path / "ray", {"train_file": str(raw)}, RayExecutor(2))
    ray.shutdown()
    assert checksums(tmp_path / "ray") == checksums(tmp_path / "one")


def test_a_shuffle_of_the_band_keys_finds_the_pairs_that_one_process_finds(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ray Data does between its map and its groups, in plain words: rows of one part come together."""
    monkeypatch.setattr(job, "SLICE_BYTES", 20_000)
    data_config = plan(tmp_path, {"train_file": str(raw)}, keep_intermediate_files=True, use_gigatoken=False)
    for _ in run_pipeline(data_config, SerialExecutor()):
        pass
    bands = range(dedup.NUM_BANDS)
    rows = [band_key_table(data_config, [unit], bands, 3) for unit in reversed(range(len(data_config.slices)))]
    table = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
    groups = [{name: values[table["part"] == part] for name, values in table.items()} for part in range(3)]
    assert all(len(group["part"]) for group in groups)
    pairs = [verify_partition(data_config, group) for group in groups]
    for band in bands:
        result = [(int(a), int(b)) for each in pairs for at, a, b in zip(*each.values(), strict=True) if at == band]
        known = [tuple(pair) for pair in data_config.store.load_array(data_config.dedup_key, band, "pairs").tolist()]
        assert sorted(result) == known and known


def test_killed_at_random_moments_it_goes_on_and_leaves_the_same_bytes(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process forks for every trial, so that each dies in the middle of its work and not of its imports."""
    monkeypatch.setattr(job, "SLICE_BYTES", 20_000)
    begun = time.monotonic()
    done(tmp_path / "whole", {"train_file": str(raw)}, use_gigatoken=False)
    took, rng, kills, trial = time.monotonic() - begun, random.Random(5), 0, 0
    while kills < 5 or trial < 3:
        folder, before, trial = tmp_path / f"killed-{trial}", kills, trial + 1
        while (code := _fork_and_kill(folder, raw, rng.uniform(0, took * 0.6))) != 0:
            kills += code == -signal.SIGKILL
            took *= 1.1
        assert checksums(folder) == checksums(tmp_path / "whole")
        took *= 1 if kills > before else 0.7  # it came through: the machine is less busy than it was
        assert trial < 40, kills


def test_memory_does_not_grow_with_the_text(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial is a fork, so that its peak is that of the work alone; what comes again is read, but not tokenized."""
    monkeypatch.setattr(job, "SLICE_BYTES", 1 << 19)
    monkeypatch.setattr(steps, "BATCH_BYTES", 1 << 17)
    rows = [json.dumps({"text": text[:4000]}) + "\n" for _, text in python_docs()[100:250]]
    peaks = {2: math.inf, 14: math.inf}
    for trial in range(3):  # what the process before has freed is used again or not, as it comes: the least counts
        for megabytes in peaks:
            source = tmp_path / f"{megabytes}.jsonl"
            source.write_text("".join(rows) * (megabytes * 1_000_000 // sum(map(len, rows))))
            folder = tmp_path / f"{megabytes}-{trial}"
            data_config = plan(folder, {"train_file": str(source)}, prepared / "tokenizer", use_gigatoken=False)
            peaks[megabytes] = min(peaks[megabytes], _grown_megabytes(data_config))
        if peaks[14] - peaks[2] < 10:  # of 12 more that were read
            return
    pytest.fail(f"megabytes more, by megabytes of text: {peaks}")


def _grown_megabytes(data_config: PrepareJob) -> float:
    """How far a fork's memory rises above where it began."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of the process before does not count
            began = _kilobytes("VmRSS")
            for _ in run_pipeline(data_config, SerialExecutor()):
                pass
            os.write(writing, str(_kilobytes("VmHWM") - began).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as output:
        grown = output.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return int(grown) / 1024


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _fork_and_kill(folder: Path, raw: Path, after: float) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            done(folder, {"train_file": str(raw)}, use_gigatoken=False)
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_second_start_does_nothing_and_a_changed_config_starts_again(raw: Path, tmp_path: Path) -> None:
    done(tmp_path, {"train_file": str(raw)})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    done(tmp_path, {"train_file": str(raw)})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == before
    fewer = done(tmp_path, {"train_file": str(raw)}, exact_dedup=False, minhash_dedup=False)
    assert fewer["documents"]["near_duplicates"] == fewer["documents"]["exact_duplicates"] == 0


def test_bad_rows_are_quarantined_with_their_location_and_too_many_end_it(tmp_path: Path, raw: Path) -> None:
    lines = raw.read_text().splitlines()
    bad = ['{"text": 3}', "not\u2028json", '{"other": "column"}', '{"text": "\\ud800 half a character is in here"}']
    path = tmp_path / "bad.jsonl"
    path.write_bytes("\n".join([*lines, *bad]).encode() + b'\n{"text": "caf\xe9 au lait"}\n')
    with pytest.raises(
        DataError, match=r"5 of 81 rows cannot be used, more than prepare.max_invalid_fraction 0.01 allows"
    ):
        done(tmp_path / "strict", {"train_file": str(path)})
    assert (tmp_path / "strict" / "quarantine.jsonl").read_text().count("\n") == 5
    report = done(tmp_path / "lenient", {"train_file": str(path)}, max_invalid_fraction=0.1)
    assert report["invalid_rows"] == 5
    lines = (tmp_path / "lenient" / "quarantine.jsonl").read_text().removesuffix("\n").split("\n")
    output = [json.loads(line) for line in lines]
    assert [each["where"] for each in output] == [f"bad.jsonl:{line}" for line in range(77, 82)]
    assert output[0]["reason"] == "'text' is '3'; it wants text"
    assert output[2]["reason"].startswith("there is no column 'text'; the columns are other; data.text_column says")
    assert output[4]["reason"].startswith("these bytes are not UTF-8")


def test_a_truncated_parquet_file_ends_it(tmp_path: Path, raw: Path) -> None:
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=10)
    report = done(tmp_path / "good", {"train_file": str(path)})
    assert report["documents"]["read"] == 76
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"rows\.parquet: this is no whole Parquet file"):
        done(tmp_path / "cut", {"train_file": str(path)})


def test_what_an_examination_asks_is_kept_out(tmp_path: Path, raw: Path) -> None:
    texts = [json.loads(line)["text"] for line in raw.read_text().splitlines()]
    requests = " ".join(texts[3].split()[10:30])
    write_rows(tmp_path / "exam.jsonl", [{"question": requests, "answer": "yes"}, {"question": "What is it?"}])
    report = done(tmp_path / "out", {"train_file": str(raw)}, decontaminate_against=[str(tmp_path / "exam.jsonl")])
    assert report["filters"]["decontaminate"]["documents"] == 2  # the document and its copy
    assert report["decontamination"] == {"sizes": [13], "texts": 3, "too_short": 2}


def test_documents_of_one_group_stay_in_one_split(tmp_path: Path, raw: Path) -> None:
    data = {"train_file": str(raw), "split_by": "kind", "test_size": 2}
    data_config = plan(tmp_path, data, keep_intermediate_files=True)
    for _ in run_pipeline(data_config, SerialExecutor()):
        pass
    decisions = np.asarray(data_config.store.load_array(data_config.assign_splits_key, 0, "decisions"))
    groups = np.asarray(data_config.store.load_array(data_config.clean_key, 0, "groups"))
    assert set(groups[decisions == 1]) & set(groups[decisions == 0]) == set()
    assert len(set(groups[decisions == 1])) == 2


def test_a_held_out_file_wins_over_its_copies_in_the_training_file(tmp_path: Path, raw: Path) -> None:
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    held_out = write_rows(tmp_path / "held.jsonl", rows[30:40])
    report = done(tmp_path / "out", {"train_file": str(raw), "validation_file": str(held_out)})
    assert report["documents"]["held_out"] == 10
    assert report["documents"]["train"] == 50


def test_sources_are_kept_apart_for_mixing(tmp_path: Path, raw: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", [{"text": text[:3000]} for _, text in python_docs()[200:220]])
    done(tmp_path / "out", {"mix": {str(raw): 3.0, str(other): 1.0}})
    shards = PackedDataset.open(tmp_path / "out")
    assert [source.name for source in shards.sources()] == [str(raw), str(other)]
    assert all(source.rows > 10 for source in shards.sources())
    assert shards.manifest["weights"] == {str(raw): 3.0, str(other): 1.0}


def test_a_text_next_to_rows_is_said_not_to_be_prepared(
    tmp_path: Path, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "b.jsonl").write_bytes(raw.read_bytes())
    (tmp_path / "raw" / "a.txt").write_text("A text that is not read.\n", encoding="utf-8")
    model = {"architecture": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1}}
    sections = {"name": "texts", "output_dir": str(tmp_path / "run"), "model": model,
                "data": {"dataset_name": "raw"}, "prepare": SETTINGS}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(sections), encoding="utf-8")
    recipe, note = str(tmp_path / "recipe.yaml"), "not read in raw: a.txt"
    run = ["run", recipe, "--until-stage", "prepare"]
    for words in (run, run, ["data", "prepare", recipe, "-o", str(tmp_path / "packed")]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        output = capsys.readouterr()
        assert not stop.value.code and note in output.out + output.err, output
    notes = [event["message"] for event in events_of(tmp_path / "run", "note")]
    assert notes.count(note) == 2, "also where the shards are complete"


def test_too_little_text_for_a_row_is_reported(tmp_path: Path) -> None:
    rows = [{"text": f"These are just a few words, number {number}."} for number in range(12)]
    path = write_rows(tmp_path / "few.jsonl", rows)
    with pytest.raises(DataError, match=r"too few for one row of 4096; lower prepare\.sequence_length"):
        done(tmp_path / "out", {"train_file": str(path)}, sequence_length=4096, minhash_dedup=False, max_digit_ratio=1)


def test_held_out_documents_too_short_for_a_row_are_refused(tmp_path: Path) -> None:
    rows = [{"text": f"These are just a few words about the number {number}."} for number in range(400)]
    data = {"train_file": str(write_rows(tmp_path / "few.jsonl", rows)), "test_size": "0.1%"}
    with pytest.raises(DataError, match=r"the held-out documents have \d+ tokens, too few for one row of 64"):
        done(tmp_path / "out", data, minhash_dedup=False, max_digit_ratio=1)
    assert done(tmp_path / "none", data | {"test_size": 0}, minhash_dedup=False, max_digit_ratio=1)
