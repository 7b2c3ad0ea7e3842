"""Arrays that take long to make are kept: computed by one process, verified when read, removed when unused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from modelwright.data.array_cache import KEEP_SECONDS, ArrayEntry, load_or_compute

COMPUTE_SLOWLY = """
import os, sys, time
import numpy as np
from modelwright.data.array_cache import load_or_compute

def compute():
    os.write(log, b"computed\\n")
    time.sleep(1)
    return {"numbers": np.arange(1000)}, {}

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print(load_or_compute("test", "key", compute)[0]["numbers"].sum())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def three() -> ArrayEntry:
    return {"numbers": np.arange(3)}, {"source": "here"}


def test_processes_that_start_together_compute_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", COMPUTE_SLOWLY, str(log)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["499500\n"] * 3
    assert log.read_text() == "computed\n"
    assert [path.name for path in cache.iterdir()] == ["test-key"], "no lock and no partial entry is left"


def test_an_entry_is_only_for_its_owner(cache: Path) -> None:
    load_or_compute("test", "key", three)
    assert (cache / "test-key").stat().st_mode & 0o777 == 0o700


def test_an_error_is_raised_once_and_leaves_nothing(cache: Path) -> None:
    calls = []

    def fail() -> ArrayEntry:
        calls.append(1)
        raise FileNotFoundError("rows.jsonl")

    with pytest.raises(FileNotFoundError):
        load_or_compute("test", "key", fail)
    assert len(calls) == 1
    assert list(cache.iterdir()) == []


def test_a_full_disk_only_makes_the_next_start_slower(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    arrays, facts = load_or_compute("test", "key", three)
    assert (arrays["numbers"].tolist(), facts["source"]) == ([0, 1, 2], "here")
    assert list(cache.iterdir()) == []


def test_what_was_not_used_for_a_month_is_removed(cache: Path) -> None:
    load_or_compute("test", "old", three)
    load_or_compute("test", "used", three)
    load_or_compute("other", "old", three)
    (cache / ".test-killed.123.partial").mkdir()
    for name in ("test-old", "test-used", "other-old", ".test-killed.123.partial"):
        os.utime(cache / name, (0, time.time() - KEEP_SECONDS - 60))
    load_or_compute("test", "used", three)
    load_or_compute("test", "new", three)
    assert sorted(path.name for path in cache.iterdir()) == ["other-old", "test-new", "test-used"]
