"""The OpenAI client works with the server; requests without the key or with bad input are refused."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="serving needs the extra dashboard")
pytest.importorskip("uvicorn", reason="serving needs the extra dashboard")

from modelwright.data.chat import build_prompt_messages
from modelwright.report import http_guard
from modelwright.serve.generate import TextGenerator
from modelwright.serve.openai_server import ServedModel
from tests.faults.http_requests import BAD_SERVER_REQUESTS as BAD
from tests.faults.http_requests import BODY, ModelServer


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ModelServer]:
    running = ModelServer(ServedModel("tiny", TextGenerator(model_folder, max_new_tokens=8), "Be brief."))
    yield running
    running.close()


def until(condition: Callable[[], Any]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def client(server: ModelServer) -> Any:
    openai = pytest.importorskip("openai", reason="the real client is in the extra dev")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=server.served.api_key, max_retries=0)


def test_a_real_client_lists_asks_and_streams(server: ModelServer) -> None:
    openai_client = client(server)
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    request: dict[str, Any] = {"model": "tiny", "messages": BODY["messages"], "max_tokens": 6}
    completion = openai_client.chat.completions.create(**request)
    pieces = list(openai_client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    expected = server.served.generator.stream(build_prompt_messages("Why?", "Be brief."))
    assert completion.choices[0].message.content == streamed
    assert completion.usage.prompt_tokens == expected.prompt_tokens, "the prompt it was trained with is put before"
    assert completion.usage.completion_tokens == pieces[-1].usage.completion_tokens == 6
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "length"


def test_a_real_client_gets_an_error_when_the_context_is_too_long(server: ModelServer) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="context length is 256; shorten it") as caught:
        client(server).chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 400}])
    assert caught.value.code == "context_length_exceeded"


def test_eight_clients_at_once_lose_no_answer(server: ModelServer) -> None:
    questions = [f"What is {number}?" for number in range(24)]
    alone = [
        server.served.generator.generate([build_prompt_messages(question, "Be brief.")])[0] for question in questions
    ]

    def one(question: str) -> str:
        status, body = server.request({"messages": [{"role": "user", "content": question}], "max_tokens": 8})
        assert status == 200
        return str(json.loads(body)["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, questions)) == alone


def test_32_requests_at_once_share_their_batches(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = server.served.generator
    decoder, batch_sizes = generator.decoder, []
    questions = [f"What is {'very ' * (number % 7)}{number}?" for number in range(32)]
    alone = [generator.generate([build_prompt_messages(question, "Be brief.")])[0] for question in questions]
    forward = decoder.cache.forward
    monkeypatch.setattr(decoder.cache, "forward", lambda tokens: batch_sizes.append(len(tokens)) or forward(tokens))

    def one(question: str) -> str:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
        return str(json.loads(server.request(body)[1])["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(32) as pool:
        with decoder._step_lock:  # nothing is decoded before all have arrived
            answers = [pool.submit(one, question) for question in questions]
            until(lambda: len(decoder._waiting) == 32)
        assert [answer.result() for answer in answers] == alone
    assert max(batch_sizes) > 16 and len(batch_sizes) < 32


@pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="compares times, which a busy machine may change")
def test_32_requests_at_once_get_eight_times_the_tokens_per_second_of_one(server: ModelServer) -> None:
    def seconds(requests: int) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(requests) as pool:
            assert [status for status, _ in pool.map(server.request, [{**BODY, "max_tokens": 200}] * requests)] == [
                200
            ] * requests
        return time.perf_counter() - started

    seconds(1)
    speedups = [32 * seconds(1) / seconds(32) for _ in range(3)]
    assert max(speedups) >= 8, speedups


def stream_request(server: ModelServer, max_tokens: int, receive_buffer: int = 0, **fields: Any) -> socket.socket:
    """A connection that has asked for a streamed answer."""
    data = json.dumps({**BODY, "stream": True, "max_tokens": max_tokens, **fields}).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
            f"Authorization: Bearer {server.served.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode()  # fmt: skip
    line = socket.socket()
    if receive_buffer:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    line.settimeout(100)
    line.connect(("127.0.0.1", server.port))
    line.sendall(head + data)
    return line


def test_a_client_that_disconnects_frees_its_row(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = server.served.generator.decoder
    forward = decoder.cache.forward

    def wait_for_the_end(tokens: Any) -> Any:
        [request] = decoder._rows
        until(lambda: len(request.token_ids) < 5 or request.cancelled)
        return forward(tokens)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.cache, "forward", wait_for_the_end)
        with stream_request(server, 200) as line:
            assert b"200 OK" in line.recv(100)
        until(lambda: not decoder._rows and not decoder._waiting and not decoder._thread_runs)
    assert server.request(BODY)[0] == 200


def test_a_client_that_does_not_read_blocks_nobody(server: ModelServer) -> None:
    with stream_request(server, 200) as line:
        received = line.recv(1)
        for _ in range(3):
            assert server.request(BODY)[0] == 200
        while piece := line.recv(1000):
            received += piece
    assert received.startswith(b"HTTP/1.1 200 OK") and b"data: [DONE]" in received


def test_a_text_is_continued_without_the_chat_template(server: ModelServer) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "Once upon", "max_tokens": 6}
    completion = client(server).completions.create(**request)
    pieces = list(client(server).completions.create(**request, stream=True))
    assert completion.id.startswith("cmpl-") and {piece.id[:5] for piece in pieces} == {"cmpl-"}
    assert completion.object == "text_completion" and completion.choices[0].finish_reason == "length"
    assert completion.choices[0].text == "".join(piece.choices[0].text for piece in pieces)
    assert completion.usage.prompt_tokens == len(server.served.generator._tokenizer("Once upon")["input_ids"])
    for bad in ({"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}, {"messages": BODY["messages"]}):
        assert server.request(bad, path="/v1/completions")[0] == 400


def test_health_needs_no_key_and_an_unknown_path_is_not_found(server: ModelServer) -> None:
    def get(path: str) -> tuple[int, bytes]:
        return server.raw(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode())

    status, body = get("/health")
    assert status == 200 and json.loads(body.rpartition(b"\r\n\r\n")[2] or body) == {"status": "ok"}
    status, body = get("/v1/embeddings")
    assert status == 404 and b"there is nothing at /v1/embeddings; it wants /v1/chat/completions" in body
    assert get("/v1/models")[0] == 401


def test_a_client_that_reads_byte_by_byte_slows_nobody(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn.protocols.http.flow_control import FlowControl

    create, drain, paused = FlowControl.__init__, FlowControl.drain, []

    def with_small_buffers(self: FlowControl, transport: Any) -> None:
        create(self, transport)
        transport.set_write_buffer_limits(high=256)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    async def wait_for_client(self: FlowControl) -> None:
        paused.append(self)
        await drain(self)

    monkeypatch.setattr(FlowControl, "__init__", with_small_buffers)
    monkeypatch.setattr(FlowControl, "drain", wait_for_client)
    decoder = server.served.generator.decoder
    with stream_request(server, 200, receive_buffer=1, logprobs=True) as line:
        received = line.recv(1)
        until(lambda: paused)  # the server waits for this client
        until(lambda: not decoder._rows and not decoder._waiting)  # and its answer is complete: the decoder does not
        for _ in range(8):
            assert server.request(BODY)[0] == 200
            received += line.recv(1)
        assert len({*paused}) == 1 and len(received) == 9
        while piece := line.recv(100_000):
            received += piece
    assert received.startswith(b"HTTP/1.1 200 OK") and b"data: [DONE]" in received


def test_log_probs_are_served(server: ModelServer) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": BODY["messages"], "max_tokens": 6, "logprobs": True}
    completion = client(server).chat.completions.create(**request)
    logprobs = completion.choices[0].logprobs.content
    assert len(logprobs) == 6 and all(token.logprob <= 0 for token in logprobs)
    assert "".join(token.token for token in logprobs).strip() == completion.choices[0].message.content
    pieces = client(server).chat.completions.create(**request, stream=True)
    chunks = [piece.choices[0].logprobs for piece in pieces]
    assert [token.logprob for chunk in chunks if chunk for token in chunk.content] == [
        each.logprob for each in logprobs
    ]


@pytest.mark.parametrize(("name", "fields"), BAD, ids=[name[:60] for name, _ in BAD])
def test_a_bad_request_is_refused(server: ModelServer, name: str, fields: dict[str, Any]) -> None:
    status, body = server.request(**{"body": BODY, **fields})
    assert status in (0, *range(400, 500)), f"{name}: {status}"
    assert b"choices" not in body and b"root:" not in body


def test_a_body_that_grows_beyond_what_it_may_be_is_cut_off(server: ModelServer) -> None:
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
            f"Authorization: Bearer {server.served.api_key}\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n").encode()  # fmt: skip
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status, body = server.raw(head + piece * 20 + b"0\r\n\r\n")
    assert status in (0, 413) and b"choices" not in body
    assert server.request(BODY)[0] == 200, "and the next one is answered"


def test_at_least_forty_bad_requests_were_tried() -> None:
    assert len(BAD) >= 40


@pytest.mark.parametrize(
    ("changes", "headers"),
    [
        ({"temperature": 1e-300}, {}),
        ({"n": None, "tools": None, "response_format": {"type": "text"}}, {}),
        ({"user": "me", "tool_choice": "none", "logit_bias": {}, "max_tokens": 2.0}, {}),
        ({}, {"Content_Type": "Application/JSON; charset=utf-8"}),
    ],
)
def test_an_odd_but_sound_request_is_answered(
    server: ModelServer, changes: dict[str, Any], headers: dict[str, str]
) -> None:
    status, body = server.request({**BODY, "max_tokens": 2, **changes}, **headers)
    assert status == 200, body


def test_a_path_that_is_not_there_is_404(server: ModelServer) -> None:
    assert server.request(BODY, path="/v1/embeddings")[0] == 404


def test_a_key_with_an_umlaut_is_a_key(model_folder: Path) -> None:
    running = ModelServer(ServedModel("tiny", TextGenerator(model_folder, max_new_tokens=2), None, "schlüssel"))
    try:
        assert running.request(BODY, Authorization="Bearer schlüssel")[0] == 200
        assert running.request(BODY, Authorization="Bearer schlussel")[0] == 401
    finally:
        running.close()


def test_half_sent_requests_do_not_shut_others_out(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 20)
    running = ModelServer(ServedModel("tiny", TextGenerator(model_folder, max_new_tokens=2), None))
    sockets = [socket.create_connection(("127.0.0.1", running.port), timeout=120) for _ in range(60)]
    try:
        for line in sockets:
            with suppress(ConnectionError):
                line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        for line in sockets:  # each is closed by the server
            with suppress(ConnectionError):
                assert line.recv(100) == b""
        monkeypatch.setattr(http_guard, "REQUEST_SECONDS", 60.0)  # a busy machine may take longer to send a good one
        assert running.request(BODY)[0] == 200
    finally:
        for line in sockets:
            line.close()
        running.close()


def test_the_oldest_half_sent_request_makes_room_for_the_next(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "REQUEST_SECONDS", 600.0)  # none of them ends by time
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 20)
    running = ModelServer(ServedModel("tiny", TextGenerator(model_folder, max_new_tokens=2), None))
    sockets = []
    try:
        for _ in range(60):
            sockets.append(socket.create_connection(("127.0.0.1", running.port), timeout=120))
            with suppress(ConnectionError):
                sockets[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        assert running.request(BODY)[0] == 200
        for line in sockets[:40]:
            with suppress(ConnectionError):
                assert line.recv(100) == b""
    finally:
        for line in sockets:
            line.close()
        running.close()
