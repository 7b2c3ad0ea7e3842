"""The verbs that show runs: report, board."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from modelwright.report.board import Asking
    from modelwright.runs.folder import RunFolder
    from modelwright.stages.answer import Asker

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command("report")(report)
    app.command("board")(board)


def report(run: Run, as_json: Json = False) -> None:
    """Write a run's report.html anew. It is one page with everything, which opens from disk."""
    import json

    from modelwright.report import page
    from modelwright.runs.folder import open_run

    folder = open_run(run)
    folder.refuse_links()
    path = page.write(folder)
    print(json.dumps({"report": str(path), "bytes": path.stat().st_size}) if as_json else path)


def board(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; without any, all in runs/.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Show runs live in a browser on this machine. Curves as they grow, two runs over each other, a question box."""
    from pathlib import Path

    from modelwright.report.board import Board
    from modelwright.report.follow import Shelf
    from modelwright.report.guard import listen
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import open_run

    asked = tuple(open_run(run) for run in runs or ())
    with listen("127.0.0.1", port) as place:
        prepare_environment()
        shown = Board(Shelf(asked, Path("runs"), {}), asking())
        place.serve(shown.application(place.hosts), f"{place.url}/{shown.token}/")


def asking() -> Asking:
    """Answers with the models of the run that was asked last; they are loaded at the first question."""
    loaded: dict[str, Asker] = {}

    def ask(folder: RunFolder, question: str) -> Iterator[tuple[str, str]]:
        from modelwright.stages.answer import Asker

        name = str(folder.path)
        if name not in loaded:
            fresh = Asker(folder)
            loaded.clear()
            loaded[name] = fresh
        return loaded[name].both(question)

    return ask
