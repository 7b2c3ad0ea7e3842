"""The verbs that show a run: report."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command("report")(report)


def report(run: Run, as_json: Json = False) -> None:
    """Write a run's report.html anew: one page with everything, which opens from disk."""
    import json

    from modelwright.report import page
    from modelwright.runs.folder import open_run

    path = page.write(open_run(run))
    print(json.dumps({"report": str(path), "bytes": path.stat().st_size}) if as_json else path)
