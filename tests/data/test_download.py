"""A download resumes where it broke off, is checked before use, and fails with one error message."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from modelwright.data.download import RemoteFile, download
from modelwright.errors import DataError

DATA = bytes(range(256)) * 4000
HALF = len(DATA) // 2
PIECE = 3_000_000


class Server(ThreadingHTTPServer):
    """Answers each request as the next word of its script says; the last word holds for ever."""

    def __init__(self, *script: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.script, self.ranges, self.tokens = list(script), list[str | None](), list[str | None]()
        self.data = DATA

    def published(self, token: str | None = None) -> RemoteFile:
        address = f"http://127.0.0.1:{self.server_address[1]}/files/set.tar.gz"
        return RemoteFile(address, len(self.data), hashlib.sha256(self.data).hexdigest(), token=token)


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        word = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        requests = self.headers.get("Range")
        self.server.ranges.append(requests)
        self.server.tokens.append(self.headers.get("Authorization"))
        if word.isdigit():
            self.send_error(int(word))
            return
        if word == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "/elsewhere/set.tar.gz")
            self.end_headers()
            return
        data = self.server.data
        start = int(requests.removeprefix("bytes=").removesuffix("-")) if requests and "no ranges" not in word else 0
        body = {"lie": data[::-1], "too much": data * 2}.get(word, data)[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(data) // 2] if "cut" in word else body[:PIECE] if "piece" in word else body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(*script: str) -> Server:
        server = Server(*script)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def bring(server: Server, folder: Path, tries: int = 4) -> Path:
    return download(server.published(), folder, retry_delays=(0.0,) * (tries - 1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_brought_once(serve: Any, tmp_path: Path) -> None:
    server = serve("whole")
    assert bring(server, tmp_path / "new").read_bytes() == DATA
    assert bring(server, tmp_path / "new") == tmp_path / "new" / "set.tar.gz"
    assert server.ranges == [None]
    assert names(tmp_path / "new") == ["set.tar.gz"]


def test_a_cut_connection_is_resumed_where_it_ended(serve: Any, tmp_path: Path) -> None:
    server = serve("cut", "whole")
    assert bring(server, tmp_path).read_bytes() == DATA
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_a_later_command_goes_on_with_what_an_earlier_one_left(serve: Any, tmp_path: Path) -> None:
    server = serve("cut", "500", "whole")
    with pytest.raises(DataError, match=r"did not arrive in 2 tries \(last: .* 500 .*\); the same command resumes"):
        bring(server, tmp_path, tries=1)
    assert names(tmp_path) == [".set.tar.gz.partial"], "half a file never bears the file's name"
    assert bring(server, tmp_path, tries=1).read_bytes() == DATA
    assert server.ranges == [None, *[f"bytes={HALF}-"] * 2]
    assert names(tmp_path) == ["set.tar.gz"]


def test_a_server_without_ranges_sends_all_again(serve: Any, tmp_path: Path) -> None:
    assert bring(serve("cut", "no ranges"), tmp_path).read_bytes() == DATA


def test_tens_of_megabytes_that_come_in_pieces_are_worth_as_many_tries_as_there_are_pieces(
    serve: Any, tmp_path: Path
) -> None:
    server = serve(*["piece"] * 7, "whole")
    server.data = DATA * 24
    assert bring(server, tmp_path, tries=1).read_bytes() == server.data
    assert server.ranges == [None, *(f"bytes={PIECE * piece}-" for piece in range(1, 8))]


def test_a_server_without_ranges_that_keeps_cutting_is_given_up(serve: Any, tmp_path: Path) -> None:
    server = serve("piece", "cut, no ranges", "piece, no ranges", "cut, no ranges")
    server.data = DATA * 24
    with pytest.raises(DataError, match=r"did not arrive in 5 tries \(last: the connection ended after 12,288,000 of"):
        bring(server, tmp_path, tries=3)
    assert names(tmp_path) == [".set.tar.gz.partial"]
    server.script = ["no ranges"]
    assert bring(server, tmp_path, tries=1).read_bytes() == server.data


def test_the_token_is_shown_to_the_publisher_alone(serve: Any, tmp_path: Path) -> None:
    server = serve("elsewhere", "whole")
    assert download(server.published("hf_of_nobody"), tmp_path, ()).read_bytes() == DATA
    assert server.tokens == ["Bearer hf_of_nobody", None]
    assert "hf_of_nobody" not in repr(server.published("hf_of_nobody"))


def test_a_failing_server_is_asked_again(serve: Any, tmp_path: Path) -> None:
    server = serve("500", "503", "whole")
    assert bring(server, tmp_path).read_bytes() == DATA
    assert len(server.ranges) == 3


def test_a_server_that_keeps_failing_is_reported(serve: Any, tmp_path: Path) -> None:
    server = serve("500")
    with pytest.raises(
        DataError, match=r"set\.tar\.gz: set\.tar\.gz did not arrive in 4 tries \(last: the server answers 500"
    ):
        bring(server, tmp_path)


def test_a_file_that_is_not_there_is_reported_at_once(serve: Any, tmp_path: Path) -> None:
    server = serve("404")
    with pytest.raises(DataError, match=r"the server answers 404 Not Found; put set\.tar\.gz next to the recipe"):
        bring(server, tmp_path)
    assert len(server.ranges) == 1


@pytest.mark.parametrize(
    ("word", "message"), [("lie", "its checksum is .*, not "), ("too much", "more than its 1,024,000")]
)
def test_a_server_that_lies_is_not_believed(word: str, message: str, serve: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        bring(serve(word), tmp_path)
    assert not (tmp_path / "set.tar.gz").exists()
    assert bring(serve(word, "whole"), tmp_path).read_bytes() == DATA


def test_what_an_earlier_lie_left_is_thrown_away(serve: Any, tmp_path: Path) -> None:
    (tmp_path / ".set.tar.gz.partial").write_bytes(b"x" * HALF)
    assert bring(serve("whole"), tmp_path).read_bytes() == DATA
    (tmp_path / "set.tar.gz").unlink()
    (tmp_path / ".set.tar.gz.partial").write_bytes(b"x" * len(DATA) * 2)
    assert bring(serve("416", "whole"), tmp_path).read_bytes() == DATA


def test_no_server_at_all_is_reported(serve: Any, tmp_path: Path) -> None:
    server = serve("whole")
    published = RemoteFile("http://127.0.0.1:9/set.tar.gz", 5, "0" * 64)
    with pytest.raises(DataError, match=r"did not arrive in 2 tries \(last: .*refused"):
        download(published, tmp_path, retry_delays=(0.0,))
    assert server.ranges == []


def test_two_at_once_bring_it_once(serve: Any, tmp_path: Path) -> None:
    server = serve("whole")
    result: list[bytes] = []
    threads = [threading.Thread(target=lambda: result.append(bring(server, tmp_path).read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [DATA] * 4
    assert len(server.ranges) == 1
    assert names(tmp_path) == ["set.tar.gz"]
