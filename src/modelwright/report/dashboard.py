"""Serve live run pages over HTTP on this machine. Read-only: no file of a run is opened for writing.

Every browser window gets an event stream: all sections of the page, then each section that changes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelwright.errors import ModelwrightError
from modelwright.recipe.stage_specs import throughput_unit
from modelwright.report.charts import NUM_COLORS
from modelwright.report.formatting import format_metric
from modelwright.report.history import RunHistory
from modelwright.report.html import (
    content_security_policy,
    jinja_environment,
    overlay_charts,
    render_or_explain,
    render_page,
    render_sections,
)
from modelwright.report.http_guard import Application, RequestGuard, RequestPolicy, constant_time_equal, new_token
from modelwright.report.view import RunView, compare_runs, load_run_view
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import MAX_LINE_BYTES, open_regular, parse_line

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


AskFn = Callable[[RunFolder, str], Iterator[tuple[str, str]]]
"""Asks the models of a run; yields which model (before, after) and a piece of its answer."""
POLL_SECONDS = 0.5
KEEPALIVE_SECONDS = 15
MAX_QUESTION_CHARS = 4000
SCRIPT = "".join((Path(__file__).parent / name).read_text("utf-8") for name in ("page.js", "dashboard.js"))
POLICY = content_security_policy(SCRIPT, connect="'self'").replace("form-action 'none'", "form-action 'self'")
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Dashboard:
    """The routes below the token."""

    def __init__(self, index: RunIndex, ask: AskFn) -> None:
        self.index, self.ask, self.token = index, ask, new_token()
        self._ask_lock = asyncio.Lock()

    def application(self, hosts: frozenset[str]) -> Application:
        """The ASGI application; needs starlette."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        prefix = "/{token}"
        routes = [
            Route(f"{prefix}/", self.runs_page),
            Route(f"{prefix}/events", self.runs_events),
            Route(f"{prefix}/overlay", self.comparison_page),
            Route(f"{prefix}/run/{{name}}/", self.run_page),
            Route(f"{prefix}/run/{{name}}/events", self.run_events),
            Route(f"{prefix}/run/{{name}}/ask", self.ask_run, methods=["POST"]),
        ]
        policy = RequestPolicy(
            allowed_hosts=hosts,
            method_allowed=lambda method, path: method == ("POST" if path.endswith("/ask") else "GET"),
            is_authenticated=lambda scope, headers: constant_time_equal(f"{scope['path']}/".split("/")[1], self.token),
            headers=HEADERS,
        )
        return RequestGuard(Starlette(routes=routes), policy)

    async def runs_page(self, request: Request) -> Response:
        """The list of runs."""
        parts = await asyncio.to_thread(self._render_runs)
        return _html_response("Runs", {"top": str(_template_macros().top()).strip(), **parts})

    async def runs_events(self, request: Request) -> Response:
        """Event stream of the list."""
        return _event_stream(self._section_updates(self._render_runs))

    async def run_page(self, request: Request) -> Response:
        """One run, with the question box."""
        tail = self._tail(request)
        if tail is None:
            return _no_such_run()
        parts = await asyncio.to_thread(tail.sections)
        macros = _template_macros()
        is_text = all(throughput_unit(stage) == "tokens" for stage in tail.history.stages)
        can_ask = is_text and tail.folder.recipe.exists()
        page_parts = {"nav": str(macros.nav("../../")), **parts}
        names = list(page_parts)
        if can_ask:
            names.insert(names.index("answers") + 1, "box")
            page_parts["box"] = str(macros.box())
        return _html_response(tail.folder.path.name, {name: page_parts[name] for name in names})

    async def run_events(self, request: Request) -> Response:
        """Event stream of one run."""
        tail = self._tail(request)
        return _no_such_run() if tail is None else _event_stream(self._section_updates(tail.sections))

    async def comparison_page(self, request: Request) -> Response:
        """Chosen runs: overlaid curves, metrics, settings that differ."""
        runs, names = self.index.runs(), dict.fromkeys(request.query_params.getlist("run"))
        if not names.keys() <= runs.keys():
            return _no_such_run()
        if not 2 <= len(names) <= NUM_COLORS:
            return _text_response(f"choose 2 to {NUM_COLORS} runs; {len(names)} were chosen", 400)
        chosen = {name: runs[name] for name in names}
        return _html_response(f"{len(names)} runs", await asyncio.to_thread(_render_comparison, chosen))

    async def ask_run(self, request: Request) -> Response:
        """Stream both models' answers; one question at a time."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse

        tail = self._tail(request)
        try:
            payload = json.loads(await request.body())
            question = payload["question"].strip()
            question.encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ClientDisconnect):
            return JSONResponse({"error": 'it wants {"question": "…"}'}, 400)
        if tail is None or not 0 < len(question) <= MAX_QUESTION_CHARS:
            return JSONResponse({"error": f"a question has 1 to {MAX_QUESTION_CHARS} characters"}, 400)
        return _event_stream(self._stream_answers(tail.folder, question))

    def _tail(self, request: Request) -> JournalTail | None:
        return self.index.runs().get(request.path_params["name"])

    def _render_runs(self) -> dict[str, str]:
        macros = _template_macros()

        def render_row(name: str, tail: JournalTail, number: int) -> str:
            return str(macros.run_row(name, tail.overview(), number))

        runs = enumerate(self.index.runs().items())
        rows = [render_or_explain(render_row, name, tail, number) for number, (name, tail) in runs]
        rows = [row if row.startswith("<tr") else f'<tr><td colspan="6">{row}</td></tr>' for row in rows]
        return {"runs": str(macros.runs(rows)).strip()}

    async def _section_updates(self, draw: Callable[[], dict[str, str]]) -> AsyncIterator[str]:
        """All sections, then those that change, until the client disconnects."""
        sent: dict[str, str] = {}
        idle_seconds = 0.0
        while True:
            parts = await asyncio.to_thread(draw)
            changed = {name: part for name, part in parts.items() if sent.get(name) != part}
            sent, idle_seconds = parts, 0.0 if changed else idle_seconds + POLL_SECONDS
            if changed:
                yield _sse_event(changed)
            elif idle_seconds >= KEEPALIVE_SECONDS:
                idle_seconds = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(POLL_SECONDS)

    async def _stream_answers(self, folder: RunFolder, question: str) -> AsyncIterator[str]:
        async with self._ask_lock:
            try:
                pieces = await asyncio.to_thread(self.ask, folder, question)
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    yield _sse_event({"who": piece[0], "text": piece[1]})
            except ModelwrightError as error:
                yield _sse_event({"error": str(error)})
        yield _sse_event({"done": True})


def _render_comparison(chosen: dict[str, JournalTail]) -> dict[str, str]:
    from markupsafe import Markup

    views = {name: tail.view() for name, tail in chosen.items()}
    figures = Markup(overlay_charts(views))
    macros = _template_macros()
    return {
        "nav": str(macros.nav("./")),
        "comparison": str(
            macros.comparison(list(views), compare_runs(*views.values()), figures, format_metric)
        ).strip(),
    }


def _template_macros() -> Any:
    return jinja_environment().get_template("dashboard.html").module


def _html_response(title: str, parts: dict[str, str]) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(render_page(title, parts, SCRIPT, POLICY))


def _no_such_run() -> Response:
    return _text_response("no such run", 404)


def _text_response(text: str, status: int) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text, status)


def _event_stream(events: AsyncIterator[str]) -> Response:
    from starlette.responses import StreamingResponse

    return StreamingResponse(events, media_type="text/event-stream")


def _sse_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"  # in ASCII, since a file name may hold bytes that are not UTF-8


CHUNK_BYTES = 1 << 20
"""Bytes read at once."""
MAX_POLL_BYTES = 1 << 24
"""Bytes of a journal read per poll, 1.5 s: a page is shown before a long journal is read to its end."""


class JournalTail:
    """The history of a run, read incrementally and shared by all windows."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._reset()
        self._rendered: tuple[int, dict[str, str]] = (-1, {})
        self._viewed: tuple[int, RunView | None] = (-1, None)

    def poll(self) -> int:
        """Read new events; returns the offset in the journal."""
        with self._lock:
            try:
                size = self.folder.journal.stat().st_size
                if size < self._offset:  # a new run was started in this folder
                    self._reset()
                end = min(size, self._offset + MAX_POLL_BYTES)
                if end == self._offset:  # nothing new
                    return end
                with open_regular(self.folder.journal) as file:
                    file.seek(self._offset)
                    while self._offset < end and (chunk := file.read(min(CHUNK_BYTES, end - self._offset))):
                        self._offset += len(chunk)
                        self._parse_chunk(chunk)
            except OSError:
                pass
            return self._offset

    def sections(self) -> dict[str, str]:
        """The sections of its page, rendered once for all windows."""
        offset = self.poll()
        with self._lock:
            if self._rendered[0] != offset:
                self._rendered = (offset, render_sections(self.folder, self.history))
            return self._rendered[1]

    def overview(self) -> RunView:
        """The run as the list shows it, by its journal alone: reading 600 recipes takes 30 s."""
        self.poll()
        return RunView(self.folder, self.history, None)

    def view(self) -> RunView:
        """The run at this moment."""
        offset = self.poll()
        with self._lock:
            if self._viewed[1] is None or self._viewed[0] != offset:
                self._viewed = offset, load_run_view(self.folder, self.history)
            return self._viewed[1]  # type: ignore[return-value]

    def _reset(self) -> None:
        self.history, self._offset, self._partial_line = RunHistory(), 0, b""

    def _parse_chunk(self, chunk: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        if len(self._partial_line) > MAX_LINE_BYTES:
            self._partial_line = b""
        for line in lines:
            if (event := parse_line(line)) is not None:
                self.history.add(event)


@dataclass(frozen=True)
class RunIndex:
    """Runs by a name that is safe in a URL; no part of a URL becomes a path."""

    selected: tuple[RunFolder, ...]
    """Runs named on the command line; without any, all in `root`."""
    root: Path
    """Folder of runs."""
    tails: dict[str, JournalTail]
    """Opened runs by name."""

    def runs(self) -> dict[str, JournalTail]:
        """Every run, newest first."""
        opened = {tail.folder for tail in self.tails.values()}
        folders = self.selected or [RunFolder(path.parent) for path in self.root.glob("*/journal.jsonl")]
        for folder in sorted(set(folders) - opened, key=_newest_first):
            if not self.selected and _is_foreign(folder):
                continue
            # a name that is not UTF-8 cannot stand in a page or a URL
            base = name = folder.path.resolve().name.encode("utf-8", "replace").decode()
            suffix = 1
            while name in self.tails:
                suffix += 1
                name = f"{base}-{suffix}"
            self.tails[name] = JournalTail(folder)
        existing = {name: tail for name, tail in self.tails.items() if tail.folder.journal.exists()}
        return dict(sorted(existing.items(), key=lambda item: _newest_first(item[1].folder)))


def _is_foreign(folder: RunFolder) -> bool:
    """Whether another version wrote the folder; one whose journal cannot be read is listed."""
    try:
        return folder.format_problem() is not None
    except OSError:
        return False


def _newest_first(folder: RunFolder) -> float:
    try:
        return -folder.journal.stat().st_mtime
    except OSError:
        return 0.0
