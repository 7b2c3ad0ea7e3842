"""The verb that hands a model on: export."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("export")(export)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")],
    form: Annotated[str, typer.Option("--format", help="hf, merged (an adapter), gguf, or pth (images).")] = "hf",
    kind: Annotated[str, typer.Option("--kind", help="For gguf: f16 or q8_0.")] = "f16",
    to: Annotated[str | None, typer.Option("--to", help="The folder; without it, RUN/exports/FORMAT.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Write a run's model for others. With it come its card and the sha256 of every file."""
    import json

    from modelwright.runs.caches import prepare_environment
    from modelwright.stages import export as stage

    asked = stage.order(run, form, kind, to)
    prepare_environment()
    done = stage.export(asked)
    if as_json:
        print(json.dumps(stage.as_json(done)))
        return
    for name, digest in done.files.items():
        print(f"{digest[:16]}  {name}")
    if done.held:
        print(stage.said_of(done.held, kind))
    print(done.path)
