"""What stands before the pages and models we serve: who may ask, from where, how, and how much.

A page in a browser may reach servers on its own machine: a foreign page is told apart by its Origin, a renamed address
(DNS rebinding) by its Host, and anybody else on the machine by a token that only the person who started us has.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from modelwright.errors import ModelError, UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

LONGEST_ADDRESS = 2000
OWN = ("127.0.0.1", "localhost", "[::1]")


def new_token() -> str:
    """A word that nobody guesses."""
    return secrets.token_urlsafe(24)


def same(given: str, wanted: str) -> bool:
    """Whether two words are equal, in a time that tells nothing."""
    return hmac.compare_digest(given.encode(), wanted.encode())


@dataclass(frozen=True)
class Rules:
    """What a server answers."""

    hosts: frozenset[str]
    """The Host headers that mean us; nothing where any does."""
    allowed: Callable[[str, str], bool]
    """Whether a method may be used on a path."""
    admitted: Callable[[Scope, dict[str, str]], bool]
    """Whether whoever asks has the token, by scope and headers."""
    most_bytes: int = 64_000
    """Longest body."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every answer."""


class Guard:
    """Lets a request through to an application only if every rule holds; refuses before reading its body."""

    def __init__(self, application: Application, rules: Rules) -> None:
        self._application, self._rules = application, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket is not spoken here: it is closed unanswered
        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(send, *refusal)
            return
        await self._application(scope, self._limited(receive), self._with_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        rules, found = self._rules, _headers(scope)
        if found is None:
            return 400, "a header comes twice"
        if rules.hosts and found.get("host", "").lower() not in rules.hosts:
            return 421, "this Host is not served here"
        origin = found.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in rules.hosts}:
            return 403, "requests from other pages are refused"
        if found.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "requests from other pages are refused"
        if len(scope["path"]) + len(scope.get("query_string", b"")) > LONGEST_ADDRESS:
            return 414, "the address is too long"
        if not rules.admitted(scope, found):
            return 401, "the token is missing or wrong"
        if not rules.allowed(scope["method"], scope["path"]):
            return 405, "this method is not allowed here"
        length = found.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > rules.most_bytes:
            return 413, "the body is too large"
        if scope["method"] == "POST" and found.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, "the body must be application/json"
        return None

    def _limited(self, receive: Receive) -> Receive:
        """The body, cut off where it grows beyond what it may be, whatever it said of itself."""
        read = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            return {"type": "http.disconnect"} if read > self._rules.most_bytes else message

        return limited

    def _with_headers(self, send: Send) -> Send:
        extra = [(name.lower().encode(), value.encode()) for name, value in self._rules.headers.items()]

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        return sending

    async def _refuse(self, send: Send, status: int, reason: str) -> None:
        body = json.dumps({"error": {"message": reason, "type": "refused", "code": status}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
                   (b"connection", b"close")]  # fmt: skip
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class Place:
    """Where we listen."""

    held: socket.socket
    """The port, ours already."""
    name: str
    """The address as a person types it."""

    @property
    def url(self) -> str:
        """What to put before a path."""
        return f"http://{self.name}:{self.held.getsockname()[1]}"

    @property
    def hosts(self) -> frozenset[str]:
        """The Host headers that mean this place; nothing where it listens to the whole network."""
        port = self.held.getsockname()[1]
        return frozenset(f"{name}:{port}" for name in {*OWN, self.name}) if self.name != "0.0.0.0" else frozenset()

    def serve(self, application: Application, hello: str) -> None:
        """Say hello, then answer until Ctrl-C or SIGTERM: either way its work is done, and it exits with 0."""
        import uvicorn

        config = uvicorn.Config(application, log_level="warning", access_log=False, server_header=False,
                                timeout_graceful_shutdown=1, h11_max_incomplete_event_size=64_000)  # fmt: skip
        server = uvicorn.Server(config)
        heard = server.handle_exit

        def end(sign: int, frame: FrameType | None) -> None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # a window that is open is cut off: no error
            heard(sign, frame)

        server.handle_exit = end  # type: ignore[assignment,method-assign]
        with suppress(KeyboardInterrupt):
            for each in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises again, at its end, the one it was ended with
                signal.signal(each, signal.default_int_handler)
            print(hello, flush=True)
            server.run(sockets=[self.held])


@contextmanager
def listen(host: str, port: int) -> Iterator[Place]:
    """Take a port; the packages that serving needs are looked for first."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ModelError("serving needs two packages that are not installed: pip install starlette uvicorn") from None
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
            held.listen(128)
        except OverflowError:
            raise UsageError(f"--port {port} is no port; it wants a number from 0 to 65535") from None
        except OSError as error:
            raise UsageError(f"{host}:{port} cannot be listened on ({error.strerror}); choose another --port") from None
        yield Place(held, host)


def _headers(scope: Scope) -> dict[str, str] | None:
    """The headers by name; None where one that decides comes twice."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in found and key in ("host", "origin", "authorization", "content-length", "content-type"):
            return None
        found[key] = value.decode("latin-1")
    return found
