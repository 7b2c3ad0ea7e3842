"""Arrays that take long to make are kept: computed by one process, verified when read, removed when unused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from modelwright.data import array_cache
from modelwright.data.array_cache import KEEP_SECONDS, ArrayEntry, load_or_compute

COMPUTE_SLOWLY = """
import os, shutil, sys, time
import numpy as np
from modelwright.data import array_cache

def compute():
    os.write(log, b"begun ")
    time.sleep(2)
    os.write(log, b"ended ")
    return {"numbers": np.arange(1000)}, {}

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
if sys.argv[2] == "full disk":
    array_cache.MIN_FREE = 1 << 60
print(array_cache.load_or_compute("test-v1", "key", compute)[0]["numbers"].sum())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def three() -> ArrayEntry:
    return {"numbers": np.arange(3)}, {"source": "here"}


@pytest.mark.parametrize(("disk", "log"), [
    ("large disk", "begun ended"),
    ("full disk", "begun ended begun begun ended ended"),  # those that waited do not wait for one another
])  # fmt: skip
def test_processes_that_start_together_compute_once(disk: str, log: str, cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPUTE_SLOWLY, str(tmp_path / "log"), disk]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["499500\n"] * 3
    assert (tmp_path / "log").read_text().strip() == log
    left = {path.name for path in cache.iterdir()}
    assert left == {".test-v1-key.lock"} | ({"test-v1-key"} if disk == "large disk" else set())


@pytest.mark.parametrize(("file", "content"), [
    ("numbers.npy", b""), ("numbers.npy", bytes(200)),
    ("metadata.json", b"null"), ("metadata.json", b'{"hashes": null}'),
])  # fmt: skip
def test_a_damaged_entry_is_replaced(file: str, content: bytes, cache: Path) -> None:
    load_or_compute("test-v1", "key", three)
    (cache / "test-v1-key" / file).write_bytes(content)
    for compute in (three, None):
        arrays, _ = load_or_compute("test-v1", "key", compute)  # type: ignore[arg-type]
        assert arrays["numbers"].tolist() == [0, 1, 2]


def test_an_entry_that_is_in_use_is_not_replaced(cache: Path) -> None:
    load_or_compute("test-v1", "key", three)
    file = cache / "test-v1-key" / "numbers.npy"
    inode = file.stat().st_ino
    array_cache._write(cache / "test-v1-key", *three())  # of a process that did not wait
    assert file.stat().st_ino == inode
    assert not [path for path in cache.iterdir() if path.name.endswith(".partial")]


def test_an_entry_is_only_for_its_owner(cache: Path) -> None:
    load_or_compute("test-v1", "key", three)
    assert (cache / "test-v1-key").stat().st_mode & 0o777 == 0o700


def test_an_error_is_raised_once_and_leaves_nothing(cache: Path) -> None:
    calls = []

    def fail() -> ArrayEntry:
        calls.append(1)
        raise FileNotFoundError("rows.jsonl")

    with pytest.raises(FileNotFoundError):
        load_or_compute("test-v1", "key", fail)
    assert len(calls) == 1
    assert [path.name for path in cache.iterdir()] == [".test-v1-key.lock"]


def test_a_full_disk_only_makes_the_next_start_slower(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    arrays, facts = load_or_compute("test-v1", "key", three)
    assert (arrays["numbers"].tolist(), facts["source"]) == ([0, 1, 2], "here")
    assert [path.name for path in cache.iterdir()] == [".test-v1-key.lock"]


def test_what_was_not_used_for_a_month_is_removed(cache: Path) -> None:
    load_or_compute("test-v1", "old", three)
    load_or_compute("test-v1", "used", three)
    load_or_compute("other-v1", "old", three)
    (cache / ".test-v1-killed.123.partial").mkdir()
    for path in cache.iterdir():
        os.utime(path, (0, time.time() - KEEP_SECONDS - 60))
    load_or_compute("test-v1", "used", three)
    load_or_compute("test-v2", "new", three)
    left = {".other-v1-old.lock", "other-v1-old", "test-v1-used", "test-v2-new", ".test-v2-new.lock"}
    assert {path.name for path in cache.iterdir()} == left


def test_an_old_entry_that_cannot_be_removed_keeps_no_new_one_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_compute("test-v1", "old", three)
    os.utime(cache / "test-v1-old", (0, 0))
    remove = array_cache.shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).name == "test-v1-old":
            raise PermissionError(path)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(array_cache.shutil, "rmtree", refuse)
    load_or_compute("test-v1", "new", three)
    assert (cache / "test-v1-new").is_dir()
