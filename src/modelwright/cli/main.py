"""The command ``modelwright``: its verbs, and how a problem leaves it, as a letter and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from modelwright import __version__
from modelwright.cli import bench, data, doctor, export, launch, plan, recipes, report, run, talk, use
from modelwright.errors import Interrupted, ModelwrightError, StorageError, is_storage_failure

CONTROL_C = 130
"""What typer makes of Ctrl-C; ours is the code of everything that stops early and can go on."""

app = typer.Typer(
    name="modelwright",
    help="One file, a recipe, becomes a trained model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"modelwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """One file, a recipe, becomes a trained model."""


for verbs in (recipes, data, run, launch, use, talk, report, export, bench, plan, doctor):
    verbs.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; problems are told on stderr without a traceback."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given  # taken out here, so that it may stand before or after the verb
    try:
        app(args=[argument for argument in given if argument != "--debug"], prog_name="modelwright")
    except ModelwrightError as error:
        if debug:
            raise
        if not error.told_elsewhere:
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    except SystemExit as stop:
        sys.exit(Interrupted.exit_code if stop.code == CONTROL_C else stop.code)
    except Exception as error:
        if debug:
            raise
        print(
            f"{type(error).__name__}: {error}\nThis was not foreseen; --debug shows where it happened", file=sys.stderr
        )
        sys.exit(StorageError.exit_code if isinstance(error, OSError) and is_storage_failure(error) else 1)
