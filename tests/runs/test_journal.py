"""The journal is append-only; a line torn by a kill is ended, and every line is JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import StorageError
from modelwright.runs.journal import Journal, read

WRITES_UNTIL_KILLED = """
import sys
from pathlib import Path
from modelwright.runs.journal import Journal
journal, number = Journal(Path(sys.argv[1])), 0
while True:
    journal.add("step", step=number, text="x" * 500)
    number += 1
"""


def strict(path: Path) -> list[Any]:
    """Every line is strict JSON, in which there is no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_events_are_added_one_a_line_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    journal.add("run", recipe="tiny")
    journal.add("note", message="Füße\nund\u2028mehr")
    journal.close()
    again = Journal(path)
    again.add("done", seconds=1.5)
    again.close()
    events = list(read(path))
    assert [event["event"] for event in events] == ["run", "note", "done"]
    assert events[1]["message"] == "Füße\nund\u2028mehr"
    assert all(abs(event["time"] - time.time()) < 60 for event in events)


def test_a_number_that_is_no_number_is_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    nan, infinite = float("nan"), float("inf")
    Journal(path).add("step", loss=nan, metrics={"a": infinite, "b": {"c": -infinite}}, values=[1.0, nan, (nan,)], n=2)
    [event] = strict(path)
    assert event["loss"] is None
    assert event["metrics"] == {"a": None, "b": {"c": None}}
    assert event["values"] == [1.0, None, [None]]
    assert event["n"] == 2


def test_a_torn_line_is_repaired_and_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).add("run")
    with path.open("ab") as file:
        file.write(b'{"time": 1, "event": "st')
    journal = Journal(path)
    journal.add("done")
    assert [event["event"] for event in read(path)] == ["run", "done"]
    assert path.read_bytes().count(b"\n") == 3


def test_a_line_torn_inside_a_character_does_not_stop_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "note", "message": "F\xc3\n{"event": "done"}\n[1]\n7\n')
    assert [event["event"] for event in read(path)] == ["done"]


def test_a_journal_that_was_killed_at_any_moment_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITES_UNTIL_KILLED, str(path)])
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 100_000):
        time.sleep(0.01)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    Journal(path).add("done")
    events = list(read(path))
    assert [event["step"] for event in events[:-1]] == list(range(len(events) - 1))
    assert events[-1]["event"] == "done"


def test_whoever_watches_sees_what_is_written(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    Journal(tmp_path / "journal.jsonl", received.append).add("step", loss=float("nan"))
    assert received == list(read(tmp_path / "journal.jsonl"))
    assert received[0]["loss"] is None


def test_other_ranks_have_a_journal_that_goes_nowhere() -> None:
    journal = Journal(None)
    journal.add("step", loss=1.0)
    journal.close()


def test_a_journal_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"the journal cannot be written \(Not a directory\)|File exists"):
        Journal(tmp_path / "file" / "journal.jsonl")


def test_a_full_disk_is_reported_at_the_line_that_did_not_fit() -> None:
    journal = Journal(Path("/dev/full"))
    with pytest.raises(StorageError, match="No space left on device; the checkpoints are unharmed"):
        journal.add("step")
