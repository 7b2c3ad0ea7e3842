"""Requests that the board and the model server must refuse: foreign pages, renamed hosts, missing keys, odd bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelwright.report.dashboard import AskFn, Dashboard, RunIndex
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Journal
from tests.faults.served import Running

RUN = "/TOKEN/run/one/"
TO_THE_BOARD: list[tuple[str, str, dict[str, Any]]] = [
    *((verb, path, {}) for verb in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD") for path in ("/TOKEN/", RUN)),
    *(("GET", path, {}) for path in (
        "/", "/run/one/", "/wrong/", "/wrong/run/one/", "/TOKEN", "/TOKENx/", "/%00/", "/favicon.ico", "//TOKEN/",
        "/TOKEN/run/three/", "/TOKEN/run/../../etc/passwd", "/TOKEN/run/%2e%2e/", "/TOKEN/run/..%2f..%2fetc%2fpasswd/",
        "/TOKEN/run/%2fetc/", "/TOKEN/run/one/journal.jsonl", "/TOKEN/run/one/recipe.yaml", "/TOKEN/run/one/ask",
        "/TOKEN/overlay", "/TOKEN/overlay?a=one&b=../two", "/TOKEN/overlay?a=/etc&b=/etc", "/TOKEN/" + "a" * 3000,
        "/TOKEN/run/one/report.html", "/TOKEN/run/one\\..\\two/",
    )),
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
TO_THE_SERVER: list[tuple[str, dict[str, Any]]] = [
    *((f"method {word}", {"method": word}) for word in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD")),
    *((f"post to {path}", {"path": path}) for path in ("/v1/models", "/", "/v1/chat", "/v1/../v1/models")),
    *((f"path {path}", {"method": "GET", "path": path}) for path in (
        "/", "/docs", "/v1", "/../../etc/passwd", "/v1/models/../../etc/passwd", "/%2e%2e/etc/passwd", "//v1/models//",
        "/v1/models/tiny%00", "/" + "a" * 3000,
    )),
    *((f"host {host}", {"Host": host}) for host in ("example.org", "127.0.0.1", "127.0.0.1.example.org:80")),
    *((f"origin {origin}", {"Origin": origin}) for origin in (
        "http://example.org", "null", "https://127.0.0.1", "http://127.0.0.1.example.org",
    )),
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
        {**BODY, "stop": ["a"] * 9}, {**BODY, "stop": [""]}, {**BODY, "stop": 7}, {**BODY, "seed": 2**70},
    )),
]  # fmt: skip
"""What it is, and what of a sound request is changed."""


class Showing(Running):
    """A board over a folder of runs."""

    def __init__(self, folder: Path, answers: AskFn | None = None) -> None:
        self.board = Dashboard(RunIndex((), folder, {}), answers or _echo)
        super().__init__(self.board.application)

    def ask(self, method: str, path: str, body: Any = b"", **headers: str) -> tuple[int, bytes]:
        """A request below the token, unless the path says otherwise."""
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(method, path.replace("TOKEN", self.board.token), told, body)


class Serving(Running):
    """A model, served."""

    def __init__(self, served: Any) -> None:
        from modelwright.serve.openai_server import application

        self.served = served
        super().__init__(lambda hosts: application(served, hosts))

    def ask(
        self, body: Any, method: str = "POST", path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, bytes]:
        """A request with the key, unless told otherwise."""
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(method, path, {"Authorization": f"Bearer {self.served.key}", **told}, body)


def _echo(folder: RunFolder, question: str) -> Iterator[tuple[str, str]]:
    yield "after", question


def measure(folder: str, model: str) -> None:
    """Send all of them to a board and to a server with a tiny model; requests.json tells which were answered."""
    from modelwright.serve.generate import TextGenerator
    from modelwright.serve.openai_server import ServedModel

    journal = Journal(Path(folder) / "runs" / "one" / "journal.jsonl")
    journal.add("run", recipe="one", folder="one", stages=["sft"])
    (Path(folder) / "runs" / "one" / "recipe.yaml").write_text("name: x\n", encoding="utf-8")
    showing, accepted, sound = Showing(Path(folder) / "runs"), [], 0
    for verb, path, more in TO_THE_BOARD:
        status, body = showing.ask(verb, path, **more)
        if status in range(200, 300) or status >= 500 or b"root:" in body:
            accepted.append(f"board: {status} for {verb} {path[:60]} {str(more)[:60]}")
    sound += showing.ask("GET", RUN)[0] == 200
    showing.close()
    serving = Serving(ServedModel("tiny", TextGenerator(Path(model), max_new_tokens=4), None))
    for name, wish in TO_THE_SERVER:
        status, body = serving.ask(**{"body": BODY, **wish})
        if status in range(200, 300) or status >= 500 or b"choices" in body:
            accepted.append(f"server: {status} for {name[:80]}")
    sound += serving.ask(BODY)[0] == 200
    serving.close()
    found = {"requests": len(TO_THE_BOARD) + len(TO_THE_SERVER), "accepted": accepted, "sound": sound}
    (Path(folder) / "requests.json").write_text(json.dumps(found), encoding="utf-8")
