"""Requests that the dashboard and the model server must refuse: other hosts and origins, missing keys, bad bodies."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from modelwright.report.dashboard import AskFn, Dashboard, RunIndex
from modelwright.report.http_guard import Application, connection_protocol, listen
from modelwright.runs.folder import RUN_FORMAT, RunFolder
from modelwright.runs.journal import Journal


class LiveServer:
    """An application on a free port of this machine."""

    def __init__(self, make: Callable[[frozenset[str]], Application]) -> None:
        import uvicorn

        self._listening = listen("127.0.0.1", 0)
        listener = self._listening.__enter__()
        self.url = listener.url
        self.port = int(listener.url.rsplit(":", 1)[1])
        self._server = uvicorn.Server(
            uvicorn.Config(
                make(listener.hosts), log_level="error", timeout_graceful_shutdown=1, http=connection_protocol()
            )
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener.sock]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop it."""
        self._server.should_exit = True
        self._thread.join()
        self._listening.__exit__(None, None, None)

    def raw(self, text: bytes) -> tuple[int, bytes]:
        """Send bytes as they are; the status and the body that come back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as line:
            answer = b""
            with contextlib.suppress(ConnectionError):  # a server that has heard enough hangs up
                line.sendall(text)
                while piece := line.recv(65536):
                    answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body

    def send(self, method: str, path: str, headers: dict[str, str], body: Any = b"") -> tuple[int, bytes]:
        """A complete request; a header with an empty value is omitted."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Host": f"127.0.0.1:{self.port}", "Connection": "close", "Content-Type": "application/json",
                 "Content-Length": str(len(data)), **headers}  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        return self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)


RUN = "/TOKEN/run/one/"
BAD_DASHBOARD_REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    *((verb, path, {}) for verb in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD") for path in ("/TOKEN/", RUN)),
    *(("GET", path, {}) for path in (
        "/", "/run/one/", "/wrong/", "/wrong/run/one/", "/TOKEN", "/TOKENx/", "/%00/", "/favicon.ico", "//TOKEN/",
        "/TOKEN/run/three/", "/TOKEN/run/../../etc/passwd", "/TOKEN/run/%2e%2e/", "/TOKEN/run/..%2f..%2fetc%2fpasswd/",
        "/TOKEN/run/%2fetc/", "/TOKEN/run/one/journal.jsonl", "/TOKEN/run/one/recipe.yaml", "/TOKEN/run/one/ask",
        "/TOKEN/overlay", "/TOKEN/overlay?run=one&run=../two", "/TOKEN/overlay?run=/etc",
        "/TOKEN/overlay?run=one&run=one", "/TOKEN/" + "a" * 3000, "/TOKEN/run/one/report.html",
        "/TOKEN/run/one\\..\\two/",
    )),
    ("GET", "foo", {}), ("OPTIONS", "*", {}), ("CONNECT", "127.0.0.1:1", {}),
    ("POST", f"{RUN}ask", {"body": b'{"question": "\\ud800"}'}),
    *(("GET", RUN, {"Host": host}) for host in (
        "example.org", "127.0.0.1", "localhost:1", "127.0.0.1.example.org:80", "evil.localhost:80", "[::]:80",
    )),
    *((verb, path, {"Origin": origin}) for verb, path in (("GET", RUN), ("POST", f"{RUN}ask"))
      for origin in ("http://example.org", "null", "https://localhost", "http://127.0.0.1.example.org")),
    ("GET", RUN, {"Sec_Fetch_Site": "cross-site"}),
    *(("POST", f"{RUN}ask", {"body": body}) for body in (
        b"", b"{", b"[]", b"7", b"\xff", b"[" * 5000, {}, {"question": ""}, {"question": "  "}, {"question": 7},
        {"question": ["x"]}, {"question": "x" * 5000},
    )),
    *(("POST", f"{RUN}ask", {"body": {"question": "x"}, "Content_Type": kind}) for kind in ("text/plain", "image/png")),
    ("POST", f"{RUN}ask", {"body": b" " * 70_000}),
    ("POST", f"{RUN}ask", {"body": {"question": "x"}, "Content_Length": "99999999"}),
    ("POST", "/TOKEN/run/three/ask", {"body": {"question": "x"}}),
    ("POST", "/wrong/run/one/ask", {"body": {"question": "x"}}),
]  # fmt: skip
"""Method, path and what else of a request."""
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4}
BAD_SERVER_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *((f"method {verb}", {"method": verb}) for verb in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD")),
    *((f"post to {path}", {"path": path}) for path in ("/v1/models", "/", "/v1/chat", "/v1/../v1/models")),
    *((f"path {path}", {"method": "GET", "path": path}) for path in (
        "/", "/docs", "/v1", "/../../etc/passwd", "/v1/models/../../etc/passwd", "/%2e%2e/etc/passwd", "//v1/models//",
        "/v1/models/tiny%00", "/" + "a" * 3000,
    )),
    *((f"host {host}", {"Host": host}) for host in ("example.org", "127.0.0.1", "127.0.0.1.example.org:80")),
    *((f"origin {origin}", {"Origin": origin}) for origin in (
        "http://example.org", "null", "https://127.0.0.1", "http://127.0.0.1.example.org",
    )),
    ("two lengths", {"Transfer_Encoding": "chunked"}),
    ("cross-site", {"Sec_Fetch_Site": "cross-site"}),
    *((f"key {key}", {"Authorization": key}) for key in ("", "Bearer", "Bearer wrong", "Basic Ym9iOmJvYg==")),
    ("form", {"Content_Type": "application/x-www-form-urlencoded"}),
    ("text", {"Content_Type": "text/plain"}),
    *((f"length {length}", {"Content_Length": length}) for length in ("999999999", "-1", "1e3", "0x10")),
    *((f"body {str(body)[:40]}", {"body": body}) for body in (
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 20000, {}, {**BODY, "model": "other"}, {**BODY, "messages": []},
        {**BODY, "messages": "Why?"}, {**BODY, "messages": [{"role": "tool", "content": "x"}]},
        {**BODY, "messages": [{"role": "user", "content": 7}]}, {**BODY, "messages": [{"role": "user"}] * 501},
        {**BODY, "max_tokens": -1}, {**BODY, "max_tokens": 10**9}, {**BODY, "max_tokens": "many"},
        {**BODY, "temperature": -1}, {**BODY, "temperature": True}, {**BODY, "top_p": 0}, {**BODY, "n": 100},
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {**BODY, "tools": [{"type": "function"}]},
        {**BODY, "logprobs": True, "top_logprobs": 3}, {**BODY, "response_format": {"type": "json_object"}},
        {**BODY, "logit_bias": {"1": 2}},
        {**BODY, "messages": [{"role": "user", "content": "a" * 900_000}]},
        {**BODY, "stop": ["a"] * 9}, {**BODY, "stop": [""]}, {**BODY, "stop": 7}, {**BODY, "seed": 2**70},
        {**BODY, "seed": 1.5}, {**BODY, "max_tokens": 1.5}, {**BODY, "stream": "yes"},
        {**BODY, "repetition_penalty": 1.3}, {**BODY, "tool_choice": "required"},
        {**BODY, "messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
    )),
]  # fmt: skip
"""What it is, and what of a sound request is changed."""


class DashboardServer(LiveServer):
    """A dashboard of a folder of runs."""

    def __init__(self, folder: Path, answers: AskFn | None = None) -> None:
        self.dashboard = Dashboard(RunIndex((), folder, {}), answers or _echo)
        super().__init__(self.dashboard.application)

    def request(self, method: str, path: str, body: Any = b"", **headers: str) -> tuple[int, bytes]:
        """A request below the token, unless the path says otherwise."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(method, path.replace("TOKEN", self.dashboard.token), fields, body)


class ModelServer(LiveServer):
    """A model, served."""

    def __init__(self, served: Any) -> None:
        from modelwright.serve.openai_server import application

        self.served = served
        super().__init__(lambda hosts: application(served, hosts))

    def request(
        self, body: Any, method: str = "POST", path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, bytes]:
        """A request with the key, unless the headers say otherwise."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(method, path, {"Authorization": f"Bearer {self.served.api_key}", **fields}, body)


def _echo(folder: RunFolder, question: str) -> Iterator[tuple[str, str]]:
    yield "after", question


def measure(folder: str, model: str) -> None:
    """Send all of them to a dashboard and to a server with a tiny model; results go to requests.json."""
    from modelwright.serve.generate import TextGenerator
    from modelwright.serve.openai_server import ServedModel

    journal = Journal(Path(folder) / "runs" / "one" / "journal.jsonl")
    journal.add("run", run_format=RUN_FORMAT, recipe="one", folder="one", stages=["sft"])
    (Path(folder) / "runs" / "one" / "recipe.yaml").write_text("name: x\n", encoding="utf-8")
    dashboard, accepted, good = DashboardServer(Path(folder) / "runs"), [], 0
    for verb, path, options in BAD_DASHBOARD_REQUESTS:
        status, body = dashboard.request(verb, path, **options)
        if status in range(200, 300) or status >= 500 or b"root:" in body:
            accepted.append(f"board: {status} for {verb} {path[:60]} {str(options)[:60]}")
    good += dashboard.request("GET", RUN)[0] == 200
    dashboard.close()
    server = ModelServer(ServedModel("tiny", TextGenerator(Path(model), max_new_tokens=4), None))
    for name, change in BAD_SERVER_REQUESTS:
        status, body = server.request(**{"body": BODY, **change})
        if status in range(200, 300) or status >= 500 or b"choices" in body:
            accepted.append(f"server: {status} for {name[:80]}")
    good += server.request(BODY)[0] == 200
    server.close()
    result = {"requests": len(BAD_DASHBOARD_REQUESTS) + len(BAD_SERVER_REQUESTS), "accepted": accepted, "sound": good}
    (Path(folder) / "requests.json").write_text(json.dumps(result), encoding="utf-8")
