"""An OpenAI client finds a server it knows; nobody else finds anything."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="serving needs the extra board")
pytest.importorskip("uvicorn", reason="serving needs the extra board")

from modelwright.data.conversations import ask
from modelwright.serve.ask import Answerer
from modelwright.serve.server import Served, application
from served import Running

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4}


class Serving(Running):
    """The tiny model, served."""

    def __init__(self, served: Served) -> None:
        self.served = served
        super().__init__(lambda hosts: application(served, hosts))

    def ask(
        self, body: Any, method: str = "POST", path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, bytes]:
        """A request with the key, unless told otherwise."""
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(method, path, {"Authorization": f"Bearer {self.served.key}", **told}, body)


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[Serving]:
    running = Serving(Served("tiny", Answerer(model_folder, max_new_tokens=8), "Be brief."))
    yield running
    running.close()


def client(server: Serving) -> Any:
    openai = pytest.importorskip("openai", reason="the real client is in the extra dev")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=server.served.key, max_retries=0)


def test_a_real_client_lists_asks_and_streams(server: Serving) -> None:
    found = client(server)
    assert [model.id for model in found.models.list()] == ["tiny"]
    wish: dict[str, Any] = {"model": "tiny", "messages": BODY["messages"], "max_tokens": 6}
    whole = found.chat.completions.create(**wish)
    pieces = list(found.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    expected = server.served.answerer.reply(ask("Why?", "Be brief."))
    assert whole.choices[0].message.content == streamed
    assert whole.usage.prompt_tokens == expected.prompt_tokens, "the prompt it was trained with is put before"
    assert whole.usage.completion_tokens == pieces[-1].usage.completion_tokens == 6
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "length"


def test_a_real_client_is_told_that_the_context_is_too_long(server: Serving) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="has room for 256; shorten it") as told:
        client(server).chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 400}])
    assert told.value.code == "context_length_exceeded"


def test_eight_clients_at_once_lose_no_answer(server: Serving) -> None:
    questions = [f"What is {number}?" for number in range(24)]
    alone = [server.served.answerer.answer([ask(question, "Be brief.")])[0] for question in questions]

    def one(question: str) -> str:
        status, body = server.ask({"messages": [{"role": "user", "content": question}], "max_tokens": 8})
        assert status == 200
        return str(json.loads(body)["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, questions)) == alone


def test_a_client_that_leaves_in_the_middle_frees_the_place(server: Serving) -> None:
    data = json.dumps({**BODY, "stream": True, "max_tokens": 200}).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            f"Authorization: Bearer {server.served.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode()  # fmt: skip
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as line:
        line.sendall(head + data)
        assert b"200 OK" in line.recv(100)
    assert server.ask(BODY)[0] == 200


BAD: list[tuple[str, dict[str, Any]]] = [
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


@pytest.mark.parametrize(("name", "wish"), BAD, ids=[name[:60] for name, _ in BAD])
def test_a_bad_request_is_refused(server: Serving, name: str, wish: dict[str, Any]) -> None:
    status, body = server.ask(**{"body": BODY, **wish})
    assert status in (0, *range(400, 500)), f"{name}: {status}"
    assert b"choices" not in body and b"root:" not in body


def test_a_body_that_grows_beyond_what_it_may_be_is_cut_off(server: Serving) -> None:
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
            f"Authorization: Bearer {server.served.key}\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n").encode()  # fmt: skip
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status, body = server.raw(head + piece * 20 + b"0\r\n\r\n")
    assert status in (0, 413) and b"choices" not in body
    assert server.ask(BODY)[0] == 200, "and the next one is answered"


def test_at_least_forty_bad_requests_were_tried() -> None:
    assert len(BAD) >= 40
