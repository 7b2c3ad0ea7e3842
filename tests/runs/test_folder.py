"""The run folder: atomic writes, and a folder that cannot be written is reported at once."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import pytest

from modelwright.errors import NotRegularFile, Refused, StorageError, UsageError
from modelwright.runs import folder as folder_module
from modelwright.runs.folder import (
    RunFolder,
    has_valid_checksum,
    hash_file,
    hash_files,
    hash_weights_ahead,
    open_run,
    read_json,
    run_lock,
    write_json,
    write_json_with_checksum,
    write_text,
)


def test_a_json_file_is_replaced_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "facts.json"
    for value in ({"a": 1}, {"a": "Füße"}):
        write_json(path, value)
        assert read_json(path) == value
    assert [file.name for file in path.parent.iterdir()] == ["facts.json"]


def test_a_bit_flipped_anywhere_in_a_sealed_file_shows(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json_with_checksum(path, {"metrics": {"eval_loss": 1.25}, "files": {"model.safetensors": "Füße"}})
    data = path.read_bytes()
    assert has_valid_checksum(path)
    for offset in range(len(data)):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
        assert not has_valid_checksum(path), data[offset:]
    path.write_bytes(data[: len(data) // 2])
    assert not has_valid_checksum(path)
    with pytest.raises(StorageError, match=r"result\.json: this file is damaged"):
        read_json(path)


def test_a_number_that_is_no_number_is_never_written_as_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "facts.json", {"loss": math.nan})
    assert not (tmp_path / "facts.json").exists()


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json(path, {"a": math.inf})
    assert read_json(path) == {"a": 1}


def test_every_path_is_inside_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    paths = [folder.recipe, folder.plan, folder.journal, folder.best_model, folder.history, folder.summary,
              folder.demo_outputs, folder.data_manifest("sft"), folder.gate("sft"), folder.model("sft"),
              folder.result("sft"), folder.checkpoints("sft")]  # fmt: skip
    assert len(set(paths)) == len(paths)
    assert all(tmp_path / "run" in path.parents for path in paths)


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a" / "b").create()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"the run folder cannot be written \(.*\); choose another output_dir"):
        RunFolder(tmp_path / "file" / "run").create()


@pytest.mark.parametrize("name", [".lock", "gates/sft.json", "stages/sft/.result.json.partial"])
def test_a_fifo_in_a_run_folder_is_refused_before_it_blocks(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(NotRegularFile, match=f"{name}: it is not a regular file") as refused:
        RunFolder(tmp_path).reject_unsafe_files()
    assert refused.value.exit_code == 2
    with pytest.raises(UsageError, match="it is not a regular file"):
        read_json(tmp_path / name)
    with pytest.raises(UsageError, match="it is not a regular file"), run_lock(tmp_path / name):
        pass


def test_a_run_folder_copied_without_its_links_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "last_model").mkdir()
    with pytest.raises(Refused, match="last_model is a folder where a run has a link to its model; delete this copy"):
        RunFolder(tmp_path).create()


def test_a_run_is_opened_by_its_folder_or_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "runs" / "tiny" / "journal.jsonl", "")
    monkeypatch.chdir(tmp_path)
    assert open_run("tiny").path == Path("runs/tiny")
    assert open_run(tmp_path / "runs" / "tiny").journal.exists()


def test_a_folder_that_is_no_run_is_reported_with_the_command_that_starts_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no run folder \(no journal.jsonl in it\); start one with"):
        open_run(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")  # noqa: PTH110
def test_a_failing_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.with_name(".facts.json.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"facts.json: No space left on device; nothing that was there is lost"):
        write_text(path, "text")


def test_a_file_is_hashed_once_unless_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def count(path: Path) -> str:
        read.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(folder_module, "hash_file", count)
    old, new = tmp_path / "old", tmp_path / "new"
    for path in (old, new):
        path.write_bytes(b"weights")
    clock = max(old.stat().st_ctime_ns, new.stat().st_ctime_ns)
    monkeypatch.setattr(time, "time_ns", lambda: clock + 10**9)
    for _ in range(2):
        assert set(hash_files([old, new]).values()) == {hash_file(old)}
    assert sorted(read) == ["new", "old"]
    new.write_bytes(b"WEIGHTS")
    os.utime(new, ns=(clock, clock + 2))
    assert hash_files([old, new])[new] == hash_file(new) != hash_file(old)
    assert sorted(read) == ["new", "new", "old"]


def test_weights_are_hashed_ahead_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def slow(path: Path) -> str:
        read.append(path.name)
        begun.set()
        assert may_end.wait(60)
        return hash_file(path)

    monkeypatch.setattr(folder_module, "hash_file", slow)
    weights = tmp_path / "model/model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    clock = weights.stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock + 10**9)
    folders = [tmp_path / "missing", weights.parent]
    hash_weights_ahead(lambda: folders)  # without config.json it is no model
    (weights.parent / "config.json").write_text("{}")
    hash_weights_ahead(lambda: folders)
    assert begun.wait(60)
    threading.Timer(0.1, may_end.set).start()
    assert hash_files([weights]) == {weights: hash_file(weights)}
    assert read == [weights.name], "whoever asks meanwhile waits for the hash"


def test_a_file_that_has_just_changed_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes within a tick of the kernel's clock leave the same time of change."""
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns)
    before, info = hash_files([path])[path], path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert hash_files([path])[path] != before
