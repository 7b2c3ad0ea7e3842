"""The board shows runs as they go on, to whoever has its address and to nobody else, and changes nothing in them."""

from __future__ import annotations

import html
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the dashboard needs the extra dashboard")
pytest.importorskip("uvicorn", reason="the dashboard needs the extra dashboard")

from modelwright.errors import UsageError
from modelwright.report.dashboard import JournalTail
from modelwright.runs.folder import RUN_FORMAT, RunFolder
from modelwright.runs.journal import Journal
from tests.faults.hostile import HOSTILE
from tests.faults.http_requests import BAD_DASHBOARD_REQUESTS as BAD
from tests.faults.http_requests import RUN, DashboardServer

STEP = {"event": "step", "stage": "sft", "steps": 9, "loss": 2.0, "health": "ok", "step_seconds": 0.1}


def answers(folder: RunFolder, question: str) -> Iterator[tuple[str, str]]:
    """Stands in for two models: says the question back, in capitals after training."""
    if question == "trouble":
        raise UsageError("no model here")
    for word in question.split():
        yield "before", f"{word} "
        yield "after", f"{word.upper()} "


def begin(folder: Path, name: str = "one", steps: int = 3) -> Journal:
    """A run that goes on."""
    journal = Journal(folder / name / "journal.jsonl")
    journal.add("run", run_format=RUN_FORMAT, recipe=name, folder=str(folder / name), stages=["sft"])
    for number in range(1, steps + 1):
        journal.add(**{**STEP, "step": number})
    (folder / name / "recipe.yaml").write_text("name: x\n", encoding="utf-8")
    return journal


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs."""
    folder = tmp_path_factory.mktemp("runs")
    begin(folder, "one")
    begin(folder, "two", 4)
    return folder


@pytest.fixture(scope="module")
def board(runs: Path) -> Iterator[DashboardServer]:
    showing = DashboardServer(runs, answers)
    yield showing
    showing.close()


def test_the_list_and_a_run_and_two_over_each_other(board: DashboardServer) -> None:
    status, body = board.request("GET", "/TOKEN/")
    assert status == 200 and b'href="run/one/"' in body and b'href="run/two/"' in body
    status, body = board.request("GET", "/TOKEN/run/one/")
    assert status == 200 and b"3 of 9 steps" in body and b'id="ask"' in body
    status, body = board.request("GET", "/TOKEN/overlay?run=one&run=two")
    assert status == 200 and b"Training loss, sft" in body


def events(board: DashboardServer, path: str, count: int, then: Any = None) -> list[dict[str, Any]]:
    """The first events of a stream; `then` is called after the first."""
    received: list[dict[str, Any]] = []
    with socket.create_connection(("127.0.0.1", board.port), timeout=120) as line:
        address = path.replace("TOKEN", board.dashboard.token)
        line.sendall(f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1:{board.port}\r\n\r\n".encode())
        read = b""
        while len(received) < count:
            read += line.recv(65536)
            received = [json.loads(part.split(b"data: ", 1)[1].split(b"\r\n")[0])
                     for part in read.split(b"\n\n")[:-1] if b"data: " in part]  # fmt: skip
            if then and received:
                then()
                then = None
    return received


def test_a_window_hears_all_and_then_what_changes(board: DashboardServer, runs: Path) -> None:
    journal = begin(runs, "live", 2)
    first, second = events(board, "/TOKEN/run/live/events", 2, lambda: journal.add(**{**STEP, "step": 3}))
    assert {"head", "pipeline", "curves", "settings", "provenance"} <= set(first) and "2 of 9" in first["pipeline"]
    assert "3 of 9" in second["pipeline"] and "settings" not in second, "only what changed is sent"
    [reload] = events(board, "/TOKEN/run/live/events", 1)
    assert reload["pipeline"] == second["pipeline"], "a reload sees what a window sees that never closed"


def test_a_question_is_answered_by_both_in_turn(board: DashboardServer) -> None:
    status, body = board.request("POST", "/TOKEN/run/one/ask", {"question": "why not"})
    events_received = [json.loads(line.split(b"data: ")[1]) for line in body.split(b"\n\n") if b"data: " in line]
    assert status == 200
    assert [(each["who"], each["text"]) for each in events_received[:-1]] == [
        ("before", "why "), ("after", "WHY "), ("before", "not "), ("after", "NOT "),
    ]  # fmt: skip
    assert b"no model here" in board.request("POST", "/TOKEN/run/one/ask", {"question": "trouble"})[1]


def test_the_board_changes_nothing_in_a_run(board: DashboardServer, runs: Path) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (runs / "one").rglob("*")}

    before = state()
    for path in ("/TOKEN/", "/TOKEN/run/one/", "/TOKEN/overlay?run=one&run=two"):
        board.request("GET", path)
    board.request("POST", "/TOKEN/run/one/ask", {"question": "why"})
    assert state() == before


@pytest.mark.parametrize(("verb", "path", "more"), BAD, ids=[f"{v} {p[:40]} {str(m)[:40]}" for v, p, m in BAD])
def test_a_bad_request_is_refused(board: DashboardServer, verb: str, path: str, more: dict[str, Any]) -> None:
    status, body = board.request(verb, path, **more)
    assert status in (0, *range(300, 500)), f"{status} for {verb} {path}"
    assert b"<section" not in body and b"root:" not in body and b'"who"' not in body


def test_at_least_forty_bad_requests_were_tried() -> None:
    assert len(BAD) >= 40


def test_a_websocket_is_not_spoken(board: DashboardServer) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Key": "eA==",
        "Sec_WebSocket_Version": "13",
    }
    assert board.request("GET", f"{RUN}events", **upgrade, Origin="http://example.org")[0] in (0, 400, 403, 426)


def test_hostile_names_and_texts_make_no_tags(tmp_path: Path) -> None:
    journal = begin(tmp_path, "hostile")
    pairs = [{"question": text[:5000], "before": text[:5000], "after": text[:5000]} for text in HOSTILE]
    journal.add("answers", stage="sft", answers=pairs, notice=HOSTILE[0])
    journal.add("note", message=HOSTILE[2])
    follower = JournalTail(RunFolder(tmp_path / "hostile"))
    drawn = "".join(follower.sections().values())
    assert not any(tag in drawn for tag in ("<script", "<img", "<iframe", "<svg/", "<base", "<meta", "<link", "<style"))
    assert 'id="bait"' not in drawn


def test_a_run_folder_with_a_hostile_name_is_listed_and_opened(tmp_path: Path) -> None:
    name = '"><img src=x onerror=alert(1)> %2e & é'
    begin(tmp_path, name)
    showing = DashboardServer(tmp_path)
    try:
        listed = showing.request("GET", "/TOKEN/")[1].decode()
        assert "<img" not in listed
        [link] = re.findall(r'href="(run/[^"]+/)"', listed)
        assert b"3 of 9 steps" in showing.request("GET", f"/TOKEN/{html.unescape(link)}")[1]
    finally:
        showing.close()


def test_a_journal_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    begin(tmp_path, "again", 5).close()
    follower = JournalTail(RunFolder(tmp_path / "again"))
    assert follower.view().stages[0].step == 5
    (tmp_path / "again" / "journal.jsonl").unlink()
    begin(tmp_path, "again", 1).close()
    assert follower.view().stages[0].step == 1


def test_memory_stays_flat_however_long_a_run_goes_on(tmp_path: Path) -> None:
    """An hour at 20 steps a second is 72,000 steps."""
    path = tmp_path / "long" / "journal.jsonl"
    path.parent.mkdir()
    follower, held = JournalTail(RunFolder(path.parent)), []
    tail = json.dumps({**STEP, "grad_norm": 1.0, "learning_rate": 1e-4, "tokens_per_second": 1e4})[1:]
    with path.open("a", encoding="utf-8") as file:
        for part in range(4):
            steps = range(part * 18_000 + 1, part * 18_000 + 18_001)
            file.writelines(f'{{"time": {n}, "step": {n}, {tail}\n' for n in steps)
            file.flush()
            follower.poll()
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert follower.history.stages["sft"].step == 72_000
    assert max(held[1:]) - held[0] < 8_000_000, "the journal itself has 15 MB"
