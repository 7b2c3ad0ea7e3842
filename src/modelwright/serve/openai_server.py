"""Serve one model to OpenAI-compatible clients: chat completions, completions and models, decoded in one batch."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from modelwright.errors import UsageError
from modelwright.report.http_guard import (
    Application,
    RequestGuard,
    RequestPolicy,
    Scope,
    constant_time_equal,
    new_token,
)
from modelwright.serve.generate import CompletionStream, ContextLengthExceeded, Message, TextGenerator
from modelwright.serve.sampling import SamplingParams

MAX_BODY_BYTES = 1_000_000
MAX_MESSAGES = 500
MAX_COMPLETION_TOKENS = 8192
MIN_TEMPERATURE = 1e-3
"""Below it logits overflow when they are divided by it; the answer is the greedy one."""
SERVED = frozenset({"model", "messages", "prompt", "n", "stream", "stream_options", "stop", "max_tokens", "temperature",
                    "max_completion_tokens", "top_p", "seed", "logprobs", "response_format"})  # fmt: skip
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                            "parallel_tool_calls"})  # fmt: skip
"""What a client may send and what would change no answer here; anything else is refused by name."""
ROLES = ("system", "user", "assistant")
CHAT, TEXT, MODELS, HEALTH = "/v1/chat/completions", "/v1/completions", "/v1/models", "/health"
METHODS = {CHAT: "POST", TEXT: "POST", MODELS: "GET", HEALTH: "GET"}
"""The paths that are served, and their methods."""


class ServedModel:
    """The served model and its API key."""

    def __init__(
        self, name: str, generator: TextGenerator, system_prompt: str | None, api_key: str | None = None
    ) -> None:
        self.name, self.generator, self.system_prompt = name, generator, system_prompt
        self.api_key = api_key or new_token()

    def is_authorized(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether a request has the API key, or needs none: a health check, or a path where there is nothing."""
        if scope["path"] not in METHODS or scope["path"] == HEALTH:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent_key = token.strip().encode("latin-1", "replace").decode("utf-8", "replace")  # clients send UTF-8
        return scheme.lower() == "bearer" and constant_time_equal(sent_key, self.api_key)


@dataclass(frozen=True)
class ChatCompletionRequest:
    """A validated request."""

    messages: list[Message] | str
    """The conversation, or the text to continue."""
    sampling_params: SamplingParams
    """How to sample the answer."""
    stream: bool
    """Whether the answer is streamed."""
    include_usage: bool = False
    """Whether a streamed answer ends with its token counts."""
    logprobs: bool = False
    """Whether the log-prob of each token is part of the answer."""
    hex_id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])
    """Random part of the id."""

    @property
    def id(self) -> str:
        """The id of the completion, with OpenAI's prefix."""
        return f"{'cmpl' if isinstance(self.messages, str) else 'chatcmpl'}-{self.hex_id}"


def application(served: ServedModel, hosts: frozenset[str]) -> Application:
    """The ASGI application; needs starlette."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def models(request: Request) -> Response:
        entry = {"id": served.name, "object": "model", "created": 0, "owned_by": "modelwright"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def nothing_here(request: Request, error: Exception) -> Response:
        return JSONResponse(_error(f"there is nothing at {request.url.path}; it wants {', '.join(METHODS)}"), 404)

    async def completions(request: Request) -> Response:
        try:
            completion_request = parse_request(await request.body(), served, is_chat=request.url.path == CHAT)
            # counts the prompt's tokens; the model runs when the stream is read
            request_args = completion_request.messages, completion_request.sampling_params
            stream = await asyncio.to_thread(served.generator.stream, *request_args)
        except UsageError as error:
            code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else None
            return JSONResponse(_error(str(error), code), 400)
        except ClientDisconnect:
            return JSONResponse(_error("the body is too large"), 413)
        if completion_request.stream:
            return StreamingResponse(_sse_stream(served, completion_request, stream), media_type="text/event-stream")
        text = ""
        async for piece in _stream_pieces(stream):
            text += piece
            if await request.is_disconnected():  # the client is gone
                return Response(status_code=499)
        return JSONResponse(_completion(served, completion_request, stream, text))

    handlers = {CHAT: completions, TEXT: completions, MODELS: models, HEALTH: health}
    routes = [Route(path, handlers[path], methods=[method]) for path, method in METHODS.items()]
    rules = RequestPolicy(
        allowed_hosts=hosts,
        method_allowed=lambda method, path: method == METHODS.get(path, method),  # an unknown path is 404
        is_authenticated=served.is_authorized,
        max_body_bytes=MAX_BODY_BYTES,
    )
    return RequestGuard(Starlette(routes=routes, exception_handlers={404: nothing_here}), rules)


def parse_request(body: bytes, served: ServedModel, is_chat: bool = True) -> ChatCompletionRequest:
    """Validate a request; raises the first problem."""
    try:
        payload = json.loads(body)
        json.dumps(payload, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError("a text holds half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError):
        raise UsageError("the body is no JSON") from None
    if not isinstance(payload, dict):
        raise UsageError("the body must be an object with model and messages")
    if payload.get("model") not in (served.name, None):
        raise UsageError(f"model: {str(payload['model'])[:80]!r} is not served here; it wants {served.name!r}")
    if payload.get("n") not in (1, None):
        raise UsageError("n must be 1")
    choice = {"tool_choice"} if payload.get("tool_choice") in ("none", "auto") else set()
    _refuse_others(payload, SERVED | WITHOUT_EFFECT | choice)
    if payload.get("response_format") not in (None, {"type": "text"}):
        raise UsageError("response_format: it wants the type text")
    messages: list[Message] | str
    if not is_chat:
        messages = _parse_prompt(payload)
    else:
        messages = _parse_messages(payload.get("messages"))
        if served.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": served.system_prompt}, *messages]
    default = served.generator.sampling_params
    stop = payload.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if len(stops) > 4 or not all(isinstance(text, str) and 0 < len(text) <= 200 for text in stops):
        raise UsageError("stop: it wants at most four texts")
    max_tokens = payload.get("max_completion_tokens") or payload.get("max_tokens")
    temperature = _parse_number(payload.get("temperature"), "temperature", 0, 2, default.temperature)
    sampling_params = SamplingParams(
        max_new_tokens=_parse_integer(max_tokens, "max_tokens", 1, MAX_COMPLETION_TOKENS, default.max_new_tokens),
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=_parse_number(payload.get("top_p"), "top_p", 1e-6, 1, 1.0),
        seed=_parse_integer(payload.get("seed"), "seed", -(2**63), 2**63 - 1, default.seed),
        stop=stops,
    )
    for name in ("stream", "logprobs"):
        if payload.get(name) not in (None, True, False):
            raise UsageError(f"{name}: it wants true or false, not {str(payload[name])[:80]!r}")
    options = payload.get("stream_options")
    include_usage = isinstance(options, dict) and options.get("include_usage") is True
    streams, logprobs = payload.get("stream") is True, payload.get("logprobs") is True
    return ChatCompletionRequest(messages, sampling_params, streams, include_usage, logprobs)


def _refuse_others(payload: dict[str, Any], known: Set[str], where: str = "") -> None:
    """Refuse by name what is set and would be ignored."""
    if name := next((name for name, value in payload.items() if value and name not in known), None):
        raise UsageError(f"{where}{name[:80]}: not supported here; it wants a request without it")


def _parse_prompt(payload: dict[str, Any]) -> str:
    """The text that /v1/completions continues."""
    if payload.get("logprobs"):
        raise UsageError("logprobs: not supported here; it wants a request without it")
    prompt = payload.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str) or not prompt:
        raise UsageError("prompt: it wants one text")
    return prompt


def _parse_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise UsageError(f"messages: it wants a list of 1 to {MAX_MESSAGES}")
    messages = []
    for index, message in enumerate(value):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        _refuse_others(message if isinstance(message, dict) else {}, {"role", "content", "name"}, f"messages[{index}].")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            all_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
            content = "".join(map(str, texts)) if all_text else None
        if role == "developer":
            role = "system"
        if role not in ROLES or not isinstance(content, str):
            raise UsageError(f"messages[{index}]: it wants a role of {', '.join(ROLES)} and content as text")
        messages.append({"role": role, "content": content})
    return messages


def _parse_number(value: Any, name: str, minimum: float, maximum: float, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise UsageError(f"{name}: it wants a number from {minimum:g} to {maximum:g}")
    return value


def _parse_integer(value: Any, name: str, minimum: int, maximum: int, default: int) -> int:
    number = _parse_number(value, name, minimum, maximum, default)
    if number != int(number):
        raise UsageError(f"{name}: it wants a whole number, not {number:g}")
    return int(number)


async def _stream_pieces(stream: CompletionStream) -> AsyncIterator[str]:
    """The pieces of an answer as the decoder's thread delivers them; its row is freed when nobody reads on."""
    loop, progress = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(progress.set)

    stream.start(notify)
    try:
        finished = False
        while not finished:
            await progress.wait()
            progress.clear()
            finished = stream.request.finished  # before reading: what comes later notifies again
            if piece := stream.read():
                yield piece
    finally:
        stream.request.cancelled = True


async def _sse_stream(
    served: ServedModel, request: ChatCompletionRequest, stream: CompletionStream
) -> AsyncIterator[str]:
    """Pieces as server-sent events; a client that reads slowly waits here, and the decoder does not wait for it."""
    if not isinstance(request.messages, str):
        yield _sse_event(_chunk(served, request, {"role": "assistant", "content": ""}))
    tokens = 0
    async for piece in _stream_pieces(stream):
        first, tokens = tokens, stream.completion_tokens
        logprobs = _logprobs(stream, first, tokens) if request.logprobs else None
        yield _sse_event(_chunk(served, request, {"content": piece}, logprobs=logprobs))
    logprobs = _logprobs(stream, tokens, stream.completion_tokens) if request.logprobs else None
    yield _sse_event(_chunk(served, request, {}, stream.finish_reason, logprobs))
    if request.include_usage:
        yield _sse_event({**_chunk(served, request, {}), "choices": [], "usage": _usage(stream)})
    yield "data: [DONE]\n\n"


def _logprobs(stream: CompletionStream, first: int, end: int) -> dict[str, Any]:
    """Tokens of an answer with their log-probs, as OpenAI writes them."""
    texts, logprobs = stream.token_texts(first, end), stream.request.logprobs[first:end]
    tokens = [{"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
              for text, logprob in zip(texts, logprobs, strict=True)]  # fmt: skip
    return {"content": tokens, "refusal": None}


def _sse_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _chunk(
    served: ServedModel, request: ChatCompletionRequest, delta: dict[str, str], finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    is_text = isinstance(request.messages, str)
    content = {"text": delta.get("content", "")} if is_text else {"delta": delta}
    choice = {"index": 0, **content, "finish_reason": finish_reason, "logprobs": logprobs}
    kind = "text_completion" if is_text else "chat.completion.chunk"
    return {"id": request.id, "object": kind, "created": int(time.time()), "model": served.name,
            "choices": [choice]}  # fmt: skip


def _completion(
    served: ServedModel, request: ChatCompletionRequest, stream: CompletionStream, text: str
) -> dict[str, Any]:
    is_text = isinstance(request.messages, str)
    content = {"text": text} if is_text else {"message": {"role": "assistant", "content": text, "refusal": None}}
    logprobs = _logprobs(stream, 0, stream.completion_tokens) if request.logprobs else None
    choice = {"index": 0, **content, "finish_reason": stream.finish_reason, "logprobs": logprobs}
    kind = "text_completion" if is_text else "chat.completion"
    return {"id": request.id, "object": kind, "created": int(time.time()), "model": served.name,
            "choices": [choice], "usage": _usage(stream)}  # fmt: skip


def _usage(stream: CompletionStream) -> dict[str, int]:
    total = stream.prompt_tokens + stream.completion_tokens
    return {"prompt_tokens": stream.prompt_tokens, "completion_tokens": stream.completion_tokens, "total_tokens": total}


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
