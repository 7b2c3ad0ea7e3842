"""The verb that makes a recipe of another tool's configuration: convert."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from modelwright.cli.recipes import JsonOption
from modelwright.errors import UsageError, hide


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("convert")(convert)


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file of TRL or axolotl.")],
    tool: Annotated[str | None, typer.Option("--from", help="trl or axolotl; else told by the names in it.")] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="sft, dpo or pretrain; else told likewise.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the recipe goes, and its name; else stdout.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a recipe of a configuration of TRL or axolotl. All that could not be carried over is named."""
    from modelwright.recipe.moving import as_json as told
    from modelwright.recipe.moving import move

    if not file.is_file():
        raise UsageError(f"{file}: there is no such file")
    if output is not None and output.exists():
        kind = "folder" if output.is_dir() else "file"
        raise UsageError(f"{output}: there is such a {kind} already; name another file with -o")
    name = re.sub(r"\.ya?ml$", "", output.name) if output is not None else None
    moved = move(file, tool, stage, name)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(hide(moved.text), encoding="utf-8")
    if as_json:
        typer.echo(hide(json.dumps(told(moved), indent=2, ensure_ascii=False)))
        return
    if output is None:
        typer.echo(hide(moved.text), nl=False)
    titles = {"lost": "is not carried over", "nearest": "is carried over as the nearest there is"}
    for each in moved.left:
        if each.kind in titles:
            place = f"{file}:{each.line}" if each.line else str(file)
            what = f"{each.key}: {each.shown}" if each.shown else each.key
            print(hide(f"{place}: {what} {titles[each.kind]}; {each.advice}"), file=sys.stderr)
    where = f"{output}: " if output is not None else ""
    print(
        f"{where}{moved.stage} of {moved.recipe.model.name}; {len(moved.carried)} settings came along", file=sys.stderr
    )
    if output is not None:
        print(f"next:\n  modelwright check {output}\n  modelwright plan {output} --on 1xH100", file=sys.stderr)
