"""One odd run does not harm the others: files that are no files, damaged journals, names that are not UTF-8."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the dashboard needs the extra dashboard")
pytest.importorskip("uvicorn", reason="the dashboard needs the extra dashboard")

from modelwright.errors import StorageError, UsageError
from modelwright.report import html
from modelwright.report.dashboard import Dashboard, JournalTail, RunIndex
from modelwright.report.history import read_history
from modelwright.runs.folder import RUN_FORMAT, RunFolder
from modelwright.runs.journal import Journal, open_regular, parse_line
from tests.faults.http_requests import DashboardServer

RUN = {"event": "run", "time": 1.0, "run_format": RUN_FORMAT, "recipe": "odd", "stages": ["sft"]}
STEP = {"event": "step", "time": 2.0, "stage": "sft", "step": 3, "steps": 9, "loss": 2.0, "grad_norm": 1.0}
ODD_VALUES = (
    None,
    "x",
    [],
    {},
    -1,
    10**400,
    1e999,
    float("nan"),
    True,
    "\ud800",
    "a" * 5000,
    [[1]],
    {"a": {"b": 1}},
    0,
)


def write_run(folder: Path, events: list[Any]) -> RunFolder:
    folder.mkdir(parents=True)
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return RunFolder(folder)


def odd_event(draw: random.Random) -> dict[str, Any] | str:
    """An event with some odd values, or a damaged line."""
    kinds = (
        "run",
        "step",
        "evaluation",
        "plan",
        "verdict",
        "answers",
        "data",
        "model",
        "resumed",
        "done",
        "note",
        "stopped",
    )
    event = {**(RUN if draw.random() < 0.2 else STEP), "event": draw.choice(kinds)}
    names = [*event, "metrics", "eval_loss", "answers", "message", "train", "health", "surest_mistakes", "exit_code"]
    for name in draw.sample(names, 3):
        event[name] = draw.choice(ODD_VALUES)
    text = json.dumps(event)
    return draw.choice([event, event, text[: len(text) // 2], "[" * 5000, "[" * 900 + "]" * 900, '{"event": ' * 800])


@pytest.mark.parametrize("seed", range(int(os.environ.get("ODD_RUNS", "40"))))
def test_a_report_is_written_of_any_journal(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    run = write_run(tmp_path / "odd", [RUN, *(odd_event(draw) for _ in range(30))])
    page = html.write_report(run).read_text(encoding="utf-8")
    assert "</html>" in page
    assert page.count("This part cannot be shown") <= 4
    assert JournalTail(run).sections()


@pytest.fixture
def odd_runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "good", [RUN, STEP])
    write_run(tmp_path / "digits", [RUN, {**STEP, "step": 10**400}, {**STEP, "loss": 1e999}, "[" * 5000])
    verdict = {"event": "verdict", "time": 3, "stage": "sft", "metrics": {"eval_loss": "low"}}
    write_run(tmp_path / "types", [RUN, {**STEP, "step": True, "steps": "many"}, verdict])
    write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xffme")), [RUN, STEP])
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo/journal.jsonl")
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero/journal.jsonl").symlink_to("/dev/zero")
    return tmp_path


def test_the_list_shows_the_good_run_next_to_odd_ones(odd_runs: Path) -> None:
    server = DashboardServer(odd_runs)
    try:
        status, body = server.request("GET", "/TOKEN/")[:2]
        assert status == 200
        assert b"run/good/" in body
        assert b"3 of 9" in body
        assert server.request("GET", "/TOKEN/run/na%3Fme/")[0] == 200
        assert server.request("GET", "/TOKEN/run/fifo/")[0] == 200
    finally:
        server.close()


def test_the_list_reads_no_recipe_and_opens_no_journal_twice(odd_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, opened = RunIndex((), odd_runs, {}), []
    monkeypatch.setattr("modelwright.report.view.load", lambda *_, **__: pytest.fail("600 recipes take 30 s"))
    monkeypatch.setattr(
        "modelwright.report.dashboard.open_regular", lambda path: opened.append(path) or open_regular(path)
    )
    board = Dashboard(index, lambda folder, question: iter(()))
    (odd_runs / "good/recipe.yaml").write_text("name: odd", encoding="utf-8")
    first = board._render_runs()
    assert "3 of 9" in first["runs"]
    assert odd_runs / "good/journal.jsonl" in opened
    opened.clear()
    assert board._render_runs() == first
    assert odd_runs / "good/journal.jsonl" not in opened


@pytest.mark.parametrize("name", ["fifo", "zero"])
def test_what_is_no_file_is_not_read_as_a_journal(odd_runs: Path, name: str) -> None:
    with pytest.raises(UsageError, match="it is not a regular file"):
        read_history(RunFolder(odd_runs / name))
    with pytest.raises(OSError, match="it is not a regular file"):
        open_regular(odd_runs / name / "journal.jsonl")


def test_a_fifo_is_not_written_as_a_journal(odd_runs: Path) -> None:
    with pytest.raises(StorageError, match="the journal cannot be written"):
        Journal(odd_runs / "fifo/journal.jsonl")


@pytest.mark.parametrize(
    "line", [b'{"step": 1' + b"0" * 400 + b"}", b'{"loss": 1e999}', b'{"a": NaN}', b"[1]", b"\xff{"]
)
def test_a_line_that_no_journal_holds_is_skipped(line: bytes) -> None:
    assert parse_line(line) is None


def test_a_long_journal_is_shown_before_it_is_read_to_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", [RUN])
    line = json.dumps({**STEP, "message": "x" * 1000}) + "\n"
    with run.journal.open("a", encoding="utf-8") as file:
        file.writelines([line] * 40_000)
    tail = JournalTail(run)
    offsets = [tail.poll() for _ in range(4)]
    assert offsets[0] == 1 << 24
    assert offsets[-1] == run.journal.stat().st_size
    assert tail.history.stages["sft"].step == 3


def test_many_runs_cost_little_once_they_are_read(tmp_path: Path) -> None:
    for number in range(300):
        write_run(tmp_path / f"run-{number}", [RUN, STEP])
    index = RunIndex((), tmp_path, {})
    for tail in index.runs().values():
        tail.view()
    started = time.process_time()
    for tail in index.runs().values():
        tail.view()
    assert time.process_time() - started < 0.25
