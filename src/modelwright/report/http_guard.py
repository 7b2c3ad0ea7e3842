"""ASGI middleware of the servers (checks of Host, Origin, token, method and body size), and the listening socket.

Origin tells a foreign web page, Host tells DNS rebinding; other users of the machine do not have the token."""

from __future__ import annotations

import asyncio
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
MAX_URL_CHARS = 2000
REQUEST_SECONDS = 10.0
"""Within this time a client must have sent its headers, and each piece of its body."""
MAX_CONNECTIONS = 250
"""A further connection closes the oldest one without a request: a process may open 1,024 files."""
ACCEPTED_AT_ONCE = 64
"""Connections that asyncio accepts before any is handled; uvicorn's 2,048 open more files than a process may."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(24)


def constant_time_equal(actual: str, expected: str) -> bool:
    """Whether two strings are equal, in constant time."""
    return hmac.compare_digest(actual.encode(), expected.encode())


@dataclass(frozen=True)
class RequestPolicy:
    """Which requests a server accepts."""

    allowed_hosts: frozenset[str]
    """Accepted Host headers; empty: any."""
    method_allowed: Callable[[str, str], bool]
    """Whether a method may be used on a path."""
    is_authenticated: Callable[[Scope, dict[str, str]], bool]
    """Whether a request has the token, by scope and headers."""
    max_body_bytes: int = 64_000
    """Largest request body."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every response."""


class RequestGuard:
    """Passes a request to the application only if the policy allows it; refuses before reading the body."""

    def __init__(self, application: Application, policy: RequestPolicy) -> None:
        self._application, self._policy = application, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # websockets are closed
        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(send, *refusal)
            return
        await self._application(scope, self._limit_body(receive), self._with_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        policy, headers = self._policy, _parse_headers(scope)
        if headers is None:
            return 400, "duplicate header"
        if policy.allowed_hosts and headers.get("host", "").lower() not in policy.allowed_hosts:
            return 421, "Host not allowed"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in policy.allowed_hosts}:
            return 403, "cross-origin request refused"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "cross-origin request refused"
        if len(scope["path"]) + len(scope.get("query_string", b"")) > MAX_URL_CHARS:
            return 414, "URL too long"
        if not policy.is_authenticated(scope, headers):
            return 401, "the token is missing or wrong"
        if not policy.method_allowed(scope["method"], scope["path"]):
            return 405, "this method is not allowed here"
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > policy.max_body_bytes:
            return 413, "the body is too large"
        if "content-length" in headers and "transfer-encoding" in headers:
            return 400, "Content-Length together with Transfer-Encoding"
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and media_type != "application/json":
            return 415, "the body must be application/json"
        return None

    def _limit_body(self, receive: Receive) -> Receive:
        """Disconnect when the body exceeds the limit, whatever its Content-Length says, or comes too slowly."""
        read, complete = 0, False

        async def limited() -> MutableMapping[str, Any]:
            nonlocal read, complete
            try:
                message = await asyncio.wait_for(receive(), None if complete else REQUEST_SECONDS)
            except TimeoutError:
                return {"type": "http.disconnect"}
            read += len(message.get("body", b""))
            complete = complete or not message.get("more_body", False)
            return {"type": "http.disconnect"} if read > self._policy.max_body_bytes else message

        return limited

    def _with_headers(self, send: Send) -> Send:
        extra = [(name.lower().encode(), value.encode()) for name, value in self._policy.headers.items()]

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
class Listener:
    """A bound socket and its address."""

    sock: socket.socket
    """The listening socket."""
    host: str
    """Address as given on the command line."""

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.sock.getsockname()[1]}"

    @property
    def hosts(self) -> frozenset[str]:
        """Accepted Host headers; empty (any) when it listens on all interfaces."""
        port = self.sock.getsockname()[1]
        hosts = {*LOOPBACK_HOSTS, self.host} if self.host != "0.0.0.0" else ()
        return frozenset(f"{host}:{port}" for host in hosts)

    def serve(self, application: Application, banner: str) -> None:
        """Print the banner, then serve until Ctrl-C or SIGTERM; both exit with 0."""
        import uvicorn

        config = uvicorn.Config(application, log_level="warning", access_log=False, server_header=False,
                                http=connection_protocol(), backlog=ACCEPTED_AT_ONCE,
                                timeout_graceful_shutdown=1, h11_max_incomplete_event_size=64_000)  # fmt: skip
        server = uvicorn.Server(config)
        handle_exit = server.handle_exit

        def exit_quietly(signum: int, frame: FrameType | None) -> None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # an open event stream is cut off: no error
            handle_exit(signum, frame)

        server.handle_exit = exit_quietly  # type: ignore[assignment,method-assign]
        with suppress(KeyboardInterrupt):
            for stop_signal in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again when it has ended
                signal.signal(stop_signal, signal.default_int_handler)
            print(banner, flush=True)
            server.run(sockets=[self.sock])


def connection_protocol() -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol with a limit of connections and of the time that a request may take to arrive."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    open_connections: dict[LimitedProtocol, None] = {}  # in order of arrival

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            open_connections[self] = None
            if len(self.connections) > MAX_CONNECTIONS:
                oldest = next((connection for connection in open_connections if connection._is_idle()), self)
                del open_connections[oldest]
                oldest.transport.abort()
            self.loop.call_later(REQUEST_SECONDS, self._close_if_idle)

        def connection_lost(self, exc: Exception | None) -> None:
            open_connections.pop(self, None)
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.loop.call_later(REQUEST_SECONDS, self._close_if_idle)

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _close_if_idle(self) -> None:
            if self._is_idle():
                self.transport.abort()

    return LimitedProtocol


@contextmanager
def listen(host: str, port: int) -> Iterator[Listener]:
    """Bind a port, after checking that the packages for serving are installed."""
    if not host.strip():
        raise UsageError("--host is empty; it wants an address, such as 127.0.0.1, or 0.0.0.0 for all interfaces")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ModelError("serving needs two packages that are not installed: pip install starlette uvicorn") from None
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(128)
        except OverflowError:
            raise UsageError(f"--port {port} is not a port; it wants a number from 0 to 65535") from None
        except socket.gaierror as error:
            raise UsageError(f"--host {host}: {error.strerror}; it wants an IPv4 address of this machine") from None
        except OSError as error:
            raise UsageError(f"{host}:{port} cannot be listened on ({error.strerror}); choose another --port") from None
        yield Listener(sock, host)


def _parse_headers(scope: Scope) -> dict[str, str] | None:
    """Headers by name; None where a security-relevant one is duplicated."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in headers and key in ("host", "origin", "authorization", "content-length", "content-type"):
            return None
        headers[key] = value.decode("latin-1")
    return headers
