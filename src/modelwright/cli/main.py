"""The command ``modelwright``: its verbs, and how a problem leaves it, as a letter and an exit code."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import typer

from modelwright import __version__
from modelwright.cli import convert, data, doctor, export, launch, plan, recipes, report, run, talk, use
from modelwright.errors import Interrupted, ModelwrightError, StorageError, hide, is_storage_failure

CONTROL_C = 130
"""What typer makes of Ctrl-C; ours is the code of everything that stops early and can go on."""

SELDOM = (10_000, 20, 50)
"""How often Python looks for what refers to itself: its usual 700 takes a fifth of the time to import torch and
transformers, which leave next to nothing of the kind."""

ROOMS: dict[ModuleType, tuple[str, ...]] = {
    recipes: ("recipes", "check", "explain", "schema"),
    convert: ("convert",),
    data: ("data",),
    run: ("run",),
    launch: ("launch", "job"),
    use: ("ask", "compare", "gate", "eval"),
    talk: ("chat", "serve"),
    report: ("report", "board"),
    export: ("export",),
    plan: ("plan",),
    doctor: ("doctor",),
}
"""Where each verb stands."""


def _no_verb() -> None:
    """One file, a recipe, becomes a trained model."""


def command(word: str | None = None) -> typer.Typer:
    """The whole command; where the first word is a verb, only the verbs beside it: 40 verbs take 0.1 CPU-seconds."""
    app = typer.Typer(
        name="modelwright",
        help="One file, a recipe, becomes a trained model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog="Also: --version, and with any verb --debug, which shows the traceback of an error.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_no_verb)  # no options of its own: typer takes 0.1 CPU-seconds to read even one
    rooms = [room for room in ROOMS if word in ROOMS[room]] or list(ROOMS)
    for room in rooms:
        room.register(app)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run a command; problems are told on stderr without a traceback."""
    gc.set_threshold(*SELDOM)
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given  # taken out here, so that it may stand before or after the verb
    try:
        words = [argument for argument in given if argument != "--debug"]
        if words[:1] == ["--version"]:
            print(f"modelwright {__version__}")
            return
        command(words[0] if words else None)(args=words, prog_name="modelwright")
    except ModelwrightError as error:
        if debug:
            raise
        if not error.told_elsewhere:
            print(_quiet(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    except SystemExit as stop:
        sys.exit(Interrupted.exit_code if stop.code == CONTROL_C else stop.code)
    except Exception as error:
        if told := _mended(error):
            print(told, file=sys.stderr)
            sys.exit(Interrupted.exit_code)
        if debug:
            _hide_secrets(error)
            raise
        found = _quiet(hide(f"{type(error).__name__}: {error}"))
        print(f"{found}\nThis was not foreseen; --debug shows where it happened", file=sys.stderr)
        sys.exit(StorageError.exit_code if isinstance(error, OSError) and is_storage_failure(error) else 1)


def _mended(error: Exception) -> str | None:
    from modelwright.runs.caches import drop_cut_bytecode

    return drop_cut_bytecode(error)


def _quiet(text: str) -> str:
    """A letter may quote data, and data may hold what a terminal acts upon."""
    from modelwright.report.lines import quiet

    return quiet(text)


def _hide_secrets(error: BaseException | None) -> None:
    """Take what looks like a secret out of an error of others, and of those before it, since all are printed."""
    while error is not None:
        error.args = tuple(hide(part) if isinstance(part, str) else part for part in error.args)
        error = error.__cause__ or error.__context__
