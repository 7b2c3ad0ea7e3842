"""The verb that trains: run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("run")(run)


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one setting.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--override", metavar="KEY", help="Go on although this setting changed.")
    ] = None,
    first: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Begin here; what comes before must be finished.")
    ] = None,
    last: Annotated[str | None, typer.Option("--until", metavar="STAGE", help="End after this stage.")] = None,
    accept_gate: Annotated[
        list[str] | None, typer.Option("--accept-gate", metavar="STAGE", help="Go on although its gate is closed.")
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for --accept-gate; kept for ever.")] = None,
    fp8: Annotated[
        bool | None, typer.Option("--fp8/--no-fp8", help="Compute in fp8 without trying it first, or in bf16.")
    ] = None,
    log_format: Annotated[
        str, typer.Option("--log-format", help="auto (a live panel on a terminal), plain, or json.")
    ] = "auto",
) -> None:
    """Train by a recipe; a run that was stopped goes on by itself."""
    from modelwright.errors import GateClosed, UsageError
    from modelwright.launch.progress import shown
    from modelwright.recipe.load import load
    from modelwright.report.card import card
    from modelwright.report.terminal import following
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import RunFolder

    if log_format not in ("auto", "plain", "json"):
        raise UsageError(f"--log-format is {log_format!r}; it wants auto, plain or json")
    loaded = load(recipe, sets or ())
    if fp8 is not None:
        wished = [f"{stage}.precision={'fp8' if fp8 else 'bf16'}" for stage in loaded.recipe.stages]
        wished += [f"{stage}.fp8_check=off" for stage in loaded.recipe.stages if fp8]
        loaded = load(recipe, [*(sets or ()), *wished])
    prepare_environment()
    from modelwright.engine.place import wake

    wake()
    from modelwright.stages import pipeline
    from modelwright.stages.context import Orders

    orders = Orders(frozenset(override or ()), first, last, frozenset(accept_gate or ()), reason)
    closed: GateClosed | None = None
    try:
        with following(log_format) as lines, shown(lines) as watch:  # type: ignore[arg-type]
            pipeline.run(loaded, watch, orders)
    except GateClosed as error:
        closed = error
    if log_format != "json" and pipeline.speaks():
        print(card(RunFolder(Path(loaded.recipe.run_dir))))
    if closed:
        raise closed
