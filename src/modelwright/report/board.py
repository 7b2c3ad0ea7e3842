"""The board: the same pages, live, on this machine alone. A pure reader: it opens no file of a run for writing.

Every window hears the same stream: the page's parts as the journal has them now, then each part that changes. So a
reload, a second window and a run that ended a week ago are one way through the code.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelwright.errors import ModelwrightError
from modelwright.report.beside import beside, overlay, said
from modelwright.report.follow import Follower, Shelf
from modelwright.report.guard import Application, Guard, Rules, new_token, same
from modelwright.report.page import document, environment, policy_for
from modelwright.runs.folder import RunFolder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Asking = Callable[[RunFolder, str], Iterator[tuple[str, str]]]
"""Puts a question to the models of a run: pieces of text, each with who says it."""

LOOK_SECONDS = 0.5
QUIET_SECONDS = 15
LONGEST_QUESTION = 4000
SCRIPT = "".join((Path(__file__).parent / name).read_text("utf-8") for name in ("page.js", "board.js"))
POLICY = policy_for(SCRIPT, connect="'self'").replace("form-action 'none'", "form-action 'self'")
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Board:
    """What the addresses below the token lead to."""

    def __init__(self, shelf: Shelf, ask: Asking) -> None:
        self.shelf, self.ask, self.token = shelf, ask, new_token()
        self._asking = asyncio.Lock()

    def application(self, hosts: frozenset[str]) -> Application:
        """The server; needs starlette."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        start = "/{token}"
        routes = [
            Route(f"{start}/", self.list),
            Route(f"{start}/events", self.list_events),
            Route(f"{start}/overlay", self.overlay),
            Route(f"{start}/run/{{name}}/", self.run),
            Route(f"{start}/run/{{name}}/events", self.run_events),
            Route(f"{start}/run/{{name}}/ask", self.question, methods=["POST"]),
        ]
        rules = Rules(
            hosts=hosts,
            allowed=lambda method, path: method == ("POST" if path.endswith("/ask") else "GET"),
            admitted=lambda scope, headers: same(scope["path"].split("/")[1], self.token),
            headers=HEADERS,
        )
        return Guard(Starlette(routes=routes), rules)

    async def list(self, request: Request) -> Response:
        """The runs there are."""
        return _page("Runs", await asyncio.to_thread(self._list))

    async def list_events(self, request: Request) -> Response:
        """The list as it changes."""
        return _stream(self._changes(self._list))

    async def run(self, request: Request) -> Response:
        """One run, with the question box."""
        follower = self._follower(request)
        if follower is None:
            return _missing()
        parts = await asyncio.to_thread(follower.sections)
        macros = _macros()
        asks = "classify" not in follower.story.stages and follower.folder.recipe.exists()
        around = {"nav": str(macros.nav("../../")), **parts}
        names = list(around)
        if asks:
            names.insert(names.index("answers") + 1, "box")
            around["box"] = str(macros.box())
        return _page(follower.folder.path.name, {name: around[name] for name in names})

    async def run_events(self, request: Request) -> Response:
        """One run as it goes on."""
        follower = self._follower(request)
        return _missing() if follower is None else _stream(self._changes(follower.sections))

    async def overlay(self, request: Request) -> Response:
        """Two runs in one picture, and the settings in which they differ."""
        runs = self.shelf.runs()
        first, second = (runs.get(request.query_params.get(which, "")) for which in ("a", "b"))
        if first is None or second is None:
            return _missing()
        return _page("Two runs", await asyncio.to_thread(_overlay, first, second))

    async def question(self, request: Request) -> Response:
        """Both models' answers as they are made; one question at a time."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse

        follower = self._follower(request)
        try:
            asked = json.loads(await request.body())
            question = asked["question"].strip()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ClientDisconnect):
            return JSONResponse({"error": 'it wants {"question": "…"}'}, 400)
        if follower is None or not 0 < len(question) <= LONGEST_QUESTION:
            return JSONResponse({"error": f"a question has 1 to {LONGEST_QUESTION} characters"}, 400)
        return _stream(self._answer(follower.folder, question))

    def _follower(self, request: Request) -> Follower | None:
        return self.shelf.runs().get(request.path_params["name"])

    def _list(self) -> dict[str, str]:
        views = {name: follower.view() for name, follower in self.shelf.runs().items()}
        return {"runs": str(_macros().runs(views)).strip()}

    async def _changes(self, draw: Callable[[], dict[str, str]]) -> AsyncIterator[str]:
        """All parts, then those that change, for as long as somebody listens."""
        sent: dict[str, str] = {}
        quiet = 0.0
        while True:
            parts = await asyncio.to_thread(draw)
            changed = {name: part for name, part in parts.items() if sent.get(name) != part}
            sent, quiet = parts, 0.0 if changed else quiet + LOOK_SECONDS
            if changed:
                yield _event(changed)
            elif quiet >= QUIET_SECONDS:
                quiet = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(LOOK_SECONDS)

    async def _answer(self, folder: RunFolder, question: str) -> AsyncIterator[str]:
        async with self._asking:
            try:
                pieces = await asyncio.to_thread(self.ask, folder, question)
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    yield _event({"who": piece[0], "text": piece[1]})
            except ModelwrightError as error:
                yield _event({"error": str(error)})
        yield _event({"done": True})


def _overlay(first: Follower, second: Follower) -> dict[str, str]:
    from markupsafe import Markup

    views = first.view(), second.view()
    picture = Markup(overlay(*views))
    macros = _macros()
    return {"nav": str(macros.nav("./")), "beside": str(macros.beside(beside(*views), picture, said)).strip()}


def _macros() -> Any:
    return environment().get_template("board.html").module


def _page(title: str, parts: dict[str, str]) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(document(title, parts, SCRIPT, POLICY))


def _missing() -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("there is no such run here", 404)


def _stream(events: AsyncIterator[str]) -> Response:
    from starlette.responses import StreamingResponse

    return StreamingResponse(events, media_type="text/event-stream")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
