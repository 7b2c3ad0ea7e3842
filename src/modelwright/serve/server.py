"""Serve one model to OpenAI-style clients: chat completions and the list of models, one answer at a time."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from modelwright.errors import UsageError
from modelwright.report.guard import Application, Guard, Rules, Scope, new_token, same
from modelwright.serve.ask import Answerer, Decoding, Message, Reply

MOST_BYTES = 1_000_000
MOST_MESSAGES = 500
MOST_TOKENS = 8192
ROLES = ("system", "user", "assistant")


class Served:
    """The model that is served, and whom to."""

    def __init__(self, name: str, answerer: Answerer, system_prompt: str | None, key: str | None = None) -> None:
        self.name, self.answerer, self.system_prompt = name, answerer, system_prompt
        self.key = key or new_token()
        self.turn = asyncio.Lock()  # requests queue here in the order they came

    def admits(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether a request carries the key."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and same(given.strip(), self.key)


@dataclass(frozen=True)
class Wish:
    """A checked request."""

    messages: list[Message]
    """The conversation."""
    decoding: Decoding
    """How to answer."""
    stream: bool
    """Whether pieces are sent as they come."""
    usage: bool = False
    """Whether a streamed answer ends with what it took."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex[:24]}")
    """What the answer is called."""


def application(served: Served, hosts: frozenset[str]) -> Application:
    """The server; needs starlette."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def models(request: Request) -> Response:
        entry = {"id": served.name, "object": "model", "created": 0, "owned_by": "modelwright"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def completions(request: Request) -> Response:
        try:
            wish = read_wish(await request.body(), served)
            reply = served.answerer.reply(wish.messages, wish.decoding)  # counts tokens; nothing is computed yet
        except UsageError as error:
            return JSONResponse(_problem(str(error)), 400)
        except ClientDisconnect:
            return JSONResponse(_problem("the body is too large"), 413)
        if wish.stream:
            return StreamingResponse(_streamed(served, wish, reply), media_type="text/event-stream")
        text = ""
        async with served.turn:
            async for piece in _pieces(reply):
                text += piece
                if await request.is_disconnected():  # nobody waits for the rest
                    return Response(status_code=499)
        return JSONResponse(_whole(served, wish, reply, text))

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", completions, methods=["POST"])]
    posts = {"/v1/chat/completions"}
    rules = Rules(
        hosts=hosts,
        allowed=lambda method, path: method == ("POST" if path in posts else "GET"),
        admitted=served.admits,
        most_bytes=MOST_BYTES,
    )
    return Guard(Starlette(routes=routes), rules)


def read_wish(body: bytes, served: Served) -> Wish:
    """Check a request; what is wrong with it is one letter."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise UsageError("the body is no JSON") from None
    if not isinstance(asked, dict):
        raise UsageError("the body must be an object with model and messages")
    if asked.get("model") not in (served.name, None):
        raise UsageError(f"model: {str(asked['model'])[:80]!r} is not served here; it wants {served.name!r}")
    if asked.get("n", 1) != 1:
        raise UsageError("n: one answer is given at a time")
    messages = _messages(asked.get("messages"))
    if served.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": served.system_prompt}, *messages]
    default = served.answerer.decoding
    stop = asked.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if len(stops) > 4 or not all(isinstance(each, str) and 0 < len(each) <= 200 for each in stops):
        raise UsageError("stop: it wants at most four texts")
    most = asked.get("max_completion_tokens") or asked.get("max_tokens")
    decoding = Decoding(
        max_new_tokens=int(_number(most, "max_tokens", 1, MOST_TOKENS, default.max_new_tokens)),
        temperature=_number(asked.get("temperature"), "temperature", 0, 2, default.temperature),
        top_p=_number(asked.get("top_p"), "top_p", 1e-6, 1, 1.0),
        seed=int(_number(asked.get("seed"), "seed", -(2**63), 2**63 - 1, default.seed)),
        stop=stops,
    )
    options = asked.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    return Wish(messages, decoding, asked.get("stream") is True, usage)


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise UsageError(f"messages: it wants a list of 1 to {MOST_MESSAGES}")
    found = []
    for number, message in enumerate(given):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
            content = "".join(map(str, texts)) if whole else None
        if role == "developer":
            role = "system"
        if role not in ROLES or not isinstance(content, str):
            raise UsageError(f"messages[{number}]: it wants a role of {', '.join(ROLES)} and content as text")
        found.append({"role": role, "content": content})
    return found


def _number(given: Any, name: str, least: float, most: float, default: float) -> float:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given <= most:
        raise UsageError(f"{name}: it wants a number from {least:g} to {most:g}")
    return given


async def _pieces(reply: Reply) -> AsyncIterator[str]:
    """A reply, each piece computed beside the loop: between two of them a request can be given up, also at the end."""
    pieces: Iterator[str] = iter(reply)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


async def _streamed(served: Served, wish: Wish, reply: Reply) -> AsyncIterator[str]:
    """Pieces as server-sent events; whoever leaves early frees the place for the next."""
    async with served.turn:
        yield _event(_chunk(served, wish, {"role": "assistant", "content": ""}))
        async for piece in _pieces(reply):
            yield _event(_chunk(served, wish, {"content": piece}))
    yield _event(_chunk(served, wish, {}, reply.finish))
    if wish.usage:
        yield _event({**_chunk(served, wish, {}), "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _chunk(served: Served, wish: Wish, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return {"id": wish.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": served.name,
            "choices": [choice]}  # fmt: skip


def _whole(served: Served, wish: Wish, reply: Reply, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
    return {"id": wish.id, "object": "chat.completion", "created": int(time.time()), "model": served.name,
            "choices": [choice], "usage": _usage(reply)}  # fmt: skip


def _usage(reply: Reply) -> dict[str, int]:
    whole = reply.prompt_tokens + reply.tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens, "total_tokens": whole}


def _problem(message: str) -> dict[str, Any]:
    code = "context_length_exceeded" if "has room for" in message else None
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
