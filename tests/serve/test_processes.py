"""`dashboard` and `serve` as processes: they print a URL, answer, end on a signal and leave nothing behind."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="serving needs the extra dashboard")
pytest.importorskip("uvicorn", reason="serving needs the extra dashboard")

from modelwright.cli.model import serve
from modelwright.recipe.load import load
from modelwright.report.http_guard import Listener
from modelwright.runs.folder import RUN_FORMAT, RunFolder
from modelwright.runs.journal import Journal
from modelwright.serve.decoder import Decoder
from modelwright.stages import pipeline
from tests.faults.fork_server import ForkedProcess, ForkServer
from tiny import tiny_recipe

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def tuned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run."""
    return pipeline.run(load(tiny_recipe(tmp_path_factory.mktemp("tuned"), model_folder, max_steps=1), (), {}))


@pytest.fixture
def used_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def until(condition: Callable[[], Any], what: str) -> Any:
    """What is found once it is there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} never came")


def nobody_is_left(group: int) -> bool:
    """Whether a process group is empty."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_the_board_answers_at_the_address_it_prints_until_it_is_ended(tmp_path: Path, ending: signal.Signals) -> None:
    Journal(tmp_path / "runs" / "one" / "journal.jsonl").add(
        "run", run_format=RUN_FORMAT, recipe="one", folder="runs/one", stages=["sft"]
    )
    board = subprocess.Popen(
        [sys.executable, "-m", "modelwright", "dashboard"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert board.stdout is not None
        address = board.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        with urllib.request.urlopen(address, timeout=60) as page:
            assert page.status == 200 and b'href="run/one/"' in page.read()
        with urllib.request.urlopen(f"{address}events", timeout=60) as stream:  # a window is open when it is ended
            assert stream.readline().startswith(b"data: ")
            board.send_signal(ending)
            stdout, complaints = board.communicate(timeout=120)
        assert (board.returncode, stdout, complaints) == (0, "", "")
        assert nobody_is_left(board.pid)
    finally:
        board.kill()
        board.wait()


def test_1100_half_sent_requests_leave_the_server_reachable_and_its_log_empty(tmp_path: Path) -> None:
    """More connections than files that the server may open; on 692a1a9 it was shut out and wrote 40,000 tracebacks."""
    Journal(tmp_path / "runs" / "one" / "journal.jsonl").add("run", run_format=RUN_FORMAT, recipe="one", stages=["sft"])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[1] < 2048:
        pytest.skip(f"this test opens 1,100 connections; ulimit -n allows {limit[1]}")
    board = subprocess.Popen(
        ["bash", "-c", f"ulimit -n 1024; exec {sys.executable} -m modelwright dashboard"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE}, stdout=subprocess.PIPE, stderr=(tmp_path / "log").open("wb"),
    )  # fmt: skip
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limit[1]))
    sockets = []
    try:
        assert board.stdout
        url = board.stdout.readline().decode().strip()
        address = url.removeprefix("http://").partition("/")[0]
        host, port = address.split(":")
        for _ in range(1100):
            sockets.append(socket.create_connection((host, int(port)), timeout=120))
            with suppress(ConnectionError):
                sockets[-1].sendall(f"GET / HTTP/1.1\r\nHost: {address}\r\n".encode())
        with urllib.request.urlopen(url, timeout=120) as answer:
            assert answer.status == 200
        assert (tmp_path / "log").read_text(encoding="utf-8") == ""
    finally:
        for connection in sockets:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        board.kill()
        board.wait()


@contextmanager
def serving(fork_server: ForkServer, tuned: RunFolder, folder: Path) -> Iterator[tuple[ForkedProcess, dict[str, str]]]:
    """`modelwright serve` and what it printed; whatever happens to the test, it ends."""
    trial = fork_server.start(["serve", str(tuned.path), "--port", "0"], folder)
    try:
        until(lambda: trial.log.exists() and "\nmodel" in trial.output, "the address")
        yield trial, dict(line.split(maxsplit=1) for line in trial.output.splitlines())
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(trial.pid, signal.SIGKILL)
        raise


def request(endpoint: dict[str, str], **body: Any) -> urllib.request.Request:
    headers = {"Authorization": f"Bearer {endpoint['api_key']}", "Content-Type": "application/json"}
    payload = {"model": endpoint["model"], "messages": [{"role": "user", "content": "Why?"}], **body}
    return urllib.request.Request(f"{endpoint['base_url']}/chat/completions", json.dumps(payload).encode(), headers)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_server_answers_at_the_address_it_prints_until_it_is_ended(
    fork_server: ForkServer, tuned: RunFolder, tmp_path: Path, ending: signal.Signals
) -> None:
    with serving(fork_server, tuned, tmp_path) as (trial, endpoint):
        with urllib.request.urlopen(request(endpoint, max_tokens=3), timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        with urllib.request.urlopen(request(endpoint, max_tokens=200, stream=True), timeout=120) as stream:
            assert stream.readline().startswith(b"data: ")
            os.kill(trial.pid, ending)  # in the middle of an answer
            assert trial.wait() == 0
        assert len(trial.output.splitlines()) == 3, trial.output
        assert nobody_is_left(trial.pid)


@pytest.mark.parametrize("verb", ["dashboard", "serve"])
def test_a_port_in_use_is_reported_before_anything_is_loaded(
    fork_server: ForkServer, tuned: RunFolder, tmp_path: Path, used_port: int, verb: str
) -> None:
    code, output = fork_server.run([verb, str(tuned.path), "--port", str(used_port)], tmp_path)
    message = f"127.0.0.1:{used_port} cannot be listened on (Address already in use); choose another --port\n"
    assert (code, output) == (2, message)


def test_an_invalid_port_is_reported(fork_server: ForkServer, tmp_path: Path) -> None:
    code, output = fork_server.run(["dashboard", "--port", "70000"], tmp_path)
    assert (code, output) == (2, "--port 70000 is not a port; it wants a number from 0 to 65535\n")


@pytest.mark.parametrize("option", [True, False], ids=["compile", "no-compile"])
def test_layers_that_can_be_compiled_are_before_the_server_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tuned: RunFolder, option: bool
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(Decoder, "can_compile", True)  # on a GPU
    monkeypatch.setattr(Decoder, "compile_for", lambda self, steps: events.append(steps))
    monkeypatch.setattr(Listener, "serve", lambda self, application, banner: events.append("ready"))
    serve(str(tuned.path), port=0, compiles=option)
    assert events == ([math.inf, "ready"] if option else ["ready"])
    notice = "compiling the model's layers, about 20 s; --no-compile leaves it out\n"
    assert capsys.readouterr().err == (notice if option else "")
