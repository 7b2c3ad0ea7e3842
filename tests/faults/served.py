"""A server in a thread of the test's own process, and raw requests to it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from modelwright.report.http_guard import Application, listen


class Running:
    """An application on a free port of this machine."""

    def __init__(self, make: Callable[[frozenset[str]], Application]) -> None:
        import uvicorn

        self._listening = listen("127.0.0.1", 0)
        place = self._listening.__enter__()
        self.url = place.url
        self.port = int(place.url.rsplit(":", 1)[1])
        self._server = uvicorn.Server(uvicorn.Config(make(place.hosts), log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [place.sock]}, daemon=True)
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
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as line:
            answer = b""
            with contextlib.suppress(ConnectionError):  # a server that has heard enough hangs up
                line.sendall(text)
                while piece := line.recv(65536):
                    answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body

    def send(self, method: str, path: str, headers: dict[str, str], body: Any = b"") -> tuple[int, bytes]:
        """A whole request; a header with an empty value is left out."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        known = {"Host": f"127.0.0.1:{self.port}", "Connection": "close", "Content-Type": "application/json",
                 "Content-Length": str(len(data)), **headers}  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in known.items() if value)
        return self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
