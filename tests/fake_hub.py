"""A fake Hugging Face hub on this machine: datasets and models of a few files, aliases, gates, a script of failures."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 10_000_000
"""Bytes from which a file is known by the sha256 of its contents, as on the hub itself."""
COMMIT = hashlib.sha1(b"the only commit").hexdigest()

Files = dict[str, bytes]


class FakeHub(ThreadingHTTPServer):
    """Serves datasets and models by name; `script` says how the next request for a file is answered."""

    def __init__(self, sets: dict[str, Files], models: dict[str, Files], tokens: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.sets, self.models, self.tokens = sets, models, tokens
        self.script: dict[str, list[str]] = {}
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond(body=True)

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def do_POST(self) -> None:
        wanted = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._respond(body=True, wanted=wanted)

    def _respond(self, body: bool, wanted: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        self.server.requests.append(f"{self.command} {'/'.join(path)} {self.headers.get('Range') or ''}".strip())
        kind, path = ("api", path[1:]) if path[0] == "api" else ("file", path)
        repos, path = (self.server.sets, path[1:]) if path[0] == "datasets" else (self.server.models, path)
        path = path[1:] if path[0] == "models" else path
        name, rest = "/".join(path[:2]), path[2:]
        token = self.server.tokens.get(name)
        if name not in repos:
            self._send(404, b"{}", "RepoNotFound" if kind == "api" else "")
        elif token and self.headers.get("Authorization") != f"Bearer {token}":
            self._send(401, b"{}", "GatedRepo")
        elif rest == ["auth-check"]:
            self._send(200, b"{}")
        elif kind == "api":
            self._send_metadata(name, repos[name], rest, wanted)
        elif rest[:1] == ["resolve"]:
            self._send_file(name, repos[name], "/".join(rest[2:]), body)
        else:
            self._send(404, b"{}")

    def _send_metadata(self, name: str, files: Files, rest: list[str], wanted: bytes) -> None:
        entries = [_entry(path, data) for path, data in files.items()]
        if rest[:1] == ["tree"]:
            body: Any = [entry for entry in entries if entry["path"].startswith("/".join(rest[2:]))]
        elif rest[:1] == ["paths-info"]:
            body = [entry for entry in entries if entry["path"].encode() in unquote(wanted.decode()).encode()]
        elif rest[:1] in ([], ["revision"]):
            body = {"id": name, "sha": COMMIT, "private": False, "gated": False, "tags": [], "downloads": 0, "likes": 0,
                    "siblings": [{"rfilename": path} for path in files]}  # fmt: skip
        else:
            self._send(404, b"{}")
            return
        self._send(200, json.dumps(body).encode())

    def _send_file(self, name: str, files: Files, path: str, body: bool) -> None:
        data = files.get(path)
        if data is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        script = self.server.script.get(f"{name}/{path}", []) if body else []
        action = script.pop(0) if script else "whole"
        if action.isdigit():
            self._send(int(action), b"")
            return
        action, _, size = action.partition(":")
        byte_range = self.headers.get("Range")
        start = int(byte_range.removeprefix("bytes=").split("-")[0]) if byte_range else 0
        sent = data[start:] if action != "lie" else data[start:-100]
        self.send_response(206 if byte_range else 200)
        if byte_range:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body:
            self.wfile.write(sent[: int(size or len(sent) // 2)] if action in ("cut", "stall") else sent)
        if action == "stall":
            self.rfile.read(1)  # until who asked is gone
        if action in ("cut", "stall"):
            self.close_connection = True

    def _send(self, status: int, body: bytes, error: str = "") -> None:
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """No log."""


def _entry(path: str, data: bytes) -> dict[str, Any]:
    large = {"lfs": {"oid": _etag(data), "size": len(data), "pointerSize": 134}} if len(data) >= LARGE else {}
    return {"type": "file", "path": path, "size": len(data), "oid": _etag(data), **large}


def _etag(data: bytes) -> str:
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub(
    sets: dict[str, Files], models: dict[str, Files] | None = None, tokens: dict[str, str] | None = None
) -> Iterator[FakeHub]:
    """A hub for the length of the block; `tokens` are those of gated models, by name."""
    server = FakeHub(sets, models or {}, tokens or {})
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
