"""The command `modelwright`: builds the typer app and turns errors into a message and an exit code."""

from __future__ import annotations

import atexit
import errno
import gc
import resource
import sys
import traceback
from types import ModuleType
from typing import NoReturn, TypeGuard

import typer

from modelwright import __version__
from modelwright.cli import data, launch, model, recipe, run
from modelwright.errors import (
    Interrupted,
    ModelwrightError,
    StorageError,
    UsageError,
    is_storage_failure,
    redact_secrets,
)
from modelwright.report.formatting import strip_control_chars

SIGINT_EXIT_CODE = 130
"""Typer's exit code for Ctrl-C; ours is the one of every run that stopped early and can resume."""
GC_THRESHOLD = (10_000, 20, 50)
"""Thresholds of the garbage collector: Python's 700 takes a fifth of the time to import torch and transformers."""
HELP_OPTIONS = ["-h", "--help"]
COMMANDS: dict[ModuleType, tuple[str, ...]] = {
    recipe: ("recipes", "check", "explain", "schema", "convert"),
    data: ("data",),
    run: ("run", "plan"),
    launch: ("launch", "doctor", "job"),
    model: ("ask", "compare", "gate", "eval", "chat", "serve", "report", "dashboard", "export"),
}
"""The module of each command."""
HIDDEN_COMMANDS = {"train": run, "board": model}  # other names of run and dashboard
OTHER_VERBS = {
    **dict.fromkeys(
        ("finetune", "fine-tune", "sft", "dpo", "tune", "fit", "pretrain", "resume", "start"), "run RECIPE"
    ),
    **dict.fromkeys(("generate", "inference", "infer", "predict", "prompt"), "ask RUN QUESTION"),
    **dict.fromkeys(("validate", "lint", "verify"), "check RECIPE"),
    **dict.fromkeys(("evaluate", "test", "benchmark"), "eval RUN"),
    **dict.fromkeys(("merge", "merge-lora", "merge_lora"), "export RUN --format merged"),
    **dict.fromkeys(("quantize", "gguf"), "export RUN --format gguf"),
    **dict.fromkeys(("preprocess", "tokenize", "prepare"), "data prepare RECIPE"),
    **dict.fromkeys(("estimate", "estimate-memory", "memory"), "plan RECIPE"),
    **dict.fromkeys(("webui", "ui", "tensorboard", "web"), "dashboard"),
    **dict.fromkeys(("init", "new", "create", "list", "ls"), "recipes"),
}
"""Commands of other tools, and ours."""
NEEDS_TORCH = ("run", "train", "ask", "compare", "gate", "eval", "chat", "serve", "export")
MIN_ADDRESS_SPACE = 1 << 30  # with less torch cannot be imported, and aborts the process at 700 MB

PATH_ERRNOS = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
MIN_THREADS = 64  # of a user; a run starts 7


def _root() -> None:
    """One file, a recipe, becomes a trained model."""


def build_app(command_name: str | None = None) -> typer.Typer:
    """The application; with a command name only that command's module: all 40 commands take 0.1 CPU-seconds."""
    app = typer.Typer(
        name="modelwright",
        help="One file, a recipe, becomes a trained model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog="Also: --version, and with any command --debug, which shows the traceback of an error.",
        context_settings={"help_option_names": HELP_OPTIONS},
    )
    app.callback()(_root)  # without options: typer takes 0.1 CPU-seconds to read even one
    modules = [module for module in COMMANDS if command_name in COMMANDS[module]] or list(COMMANDS)
    modules = [HIDDEN_COMMANDS[command_name]] if command_name in HIDDEN_COMMANDS else modules
    for module in modules:
        module.register(app)
    return app


def _check_verb(verb: str) -> None:
    """Refuse an unknown command with the one that was probably meant."""
    known = [name for names in COMMANDS.values() for name in names]
    if verb.startswith("-") or verb in known or verb in HIDDEN_COMMANDS:
        return
    from modelwright.recipe.diagnostics import closest_match

    close = OTHER_VERBS.get(verb.lower()) or closest_match(verb, [*known, *HIDDEN_COMMANDS], cutoff=0.6)
    hint = f"did you mean: modelwright {close}" if close else "modelwright --help lists the commands"
    raise UsageError(f"there is no command {verb[:60]!r}; {hint}")


def _check_subcommand(group: str, verb: str, known: list[str]) -> None:
    if verb in known:
        return
    from modelwright.recipe.diagnostics import closest_match

    close = closest_match(verb, known, cutoff=0.6)
    hint = f"did you mean: modelwright {group} {close}" if close else f"it has {', '.join(known)}"
    raise UsageError(f"{group} has no command {verb[:60]!r}; {hint}")


def _run_app(args: list[str]) -> None:
    if args:
        _check_verb(args[0])
    app = build_app(args[0] if args else None)
    if args[0:1] in (["data"], ["job"]) and len(args) > 1 and not args[1].startswith("-"):
        _check_subcommand(args[0], args[1], [*typer.main.get_command(app).commands[args[0]].commands])  # type: ignore[attr-defined]
    if len(args) == 2 and args[1] in HELP_OPTIONS:
        # without the group, whose options make typer import pydantic: 0.11 instead of 0.26 CPU-seconds
        commands = getattr(typer.main.get_command(app), "commands", {})
        if args[0] in commands:
            commands[args[0]](args=args[1:], prog_name=f"modelwright {args[0]}", help_option_names=HELP_OPTIONS)
    app(args=args, prog_name="modelwright")


def main(arguments: list[str] | None = None) -> None:
    """Run a command; errors are printed on stderr without a traceback."""
    gc.set_threshold(*GC_THRESHOLD)
    atexit.register(gc.freeze)  # the interpreter collects garbage as it ends: 1.1 of 10 CPU-seconds of a tiny run
    argv = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in argv  # allowed before and after the command
    try:
        args = [argument for argument in argv if argument != "--debug"]
        if args[:1] == ["--version"]:
            print(f"modelwright {__version__}")
            return
        if args and args[0] in NEEDS_TORCH and _address_space_is_small():
            raise UsageError(f"out of memory: {args[0]} wants 1 GB of address space, more than ulimit -v allows")
        _run_app(args)
    except ModelwrightError as error:
        if debug:
            _redact_error(error)
            traceback.print_exception(error)
        elif not error.already_printed:
            print(strip_control_chars(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _exit_stopped()
    except SystemExit as stop:
        if stop.code == SIGINT_EXIT_CODE:
            _exit_stopped()
        sys.exit(stop.code)
    except Exception as error:
        from modelwright.runs.caches import remove_truncated_bytecode

        if message := remove_truncated_bytecode(error):
            print(message, file=sys.stderr)
            sys.exit(Interrupted.exit_code)
        if debug:
            _redact_error(error)
            traceback.print_exception(error)
        else:
            print(strip_control_chars(redact_secrets(_describe(error))), file=sys.stderr)
        expected = _has_few_threads(error) or _is_unreadable_path(error)
        sys.exit(StorageError.exit_code if is_storage_failure(error) else 2 if expected else 1)


def _describe(error: Exception) -> str:
    """An error of a library in words: of the storage, of memory, or one that nobody expected."""
    if is_storage_failure(error):
        reason, path = (getattr(error, name, None) for name in ("strerror", "filename"))
        return f"{path or 'the disk'}: {reason or error}; what was saved is not lost, and the same command resumes"
    if _has_few_threads(error):
        return (
            f"no thread can be started: ulimit -u allows {resource.getrlimit(resource.RLIMIT_NPROC)[0]}; a run wants 8"
        )
    if _is_unreadable_path(error):
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _address_space_is_small():
        return "out of memory: the machine, or a limit set for this process (ulimit -v), has too little"
    return f"{type(error).__name__}: {error}\nUnexpected error; rerun with --debug for the traceback"


def _address_space_is_small() -> bool:
    """Whether ulimit -v leaves too little for torch; libraries then fail with SystemError, ImportError or an abort."""
    return 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < MIN_ADDRESS_SPACE


def _has_few_threads(error: Exception) -> bool:
    """Whether ulimit -u allows too few threads and processes for this command."""
    few = 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[0] < MIN_THREADS
    return few and ("start new thread" in str(error) or getattr(error, "errno", None) == errno.EAGAIN)


def _is_unreadable_path(error: Exception) -> TypeGuard[OSError]:
    """Whether a path of the user's cannot be opened: no permission, a folder for a file, links that go in circles."""
    return isinstance(error, OSError) and error.filename is not None and error.errno in PATH_ERRNOS


def _exit_stopped() -> NoReturn:
    print("stopped", file=sys.stderr)
    sys.exit(Interrupted.exit_code)


def _redact_error(error: BaseException | None) -> None:
    """Redact secrets in an error of a library and in its causes, since a traceback prints all of them."""
    while error is not None:
        error.args = tuple(redact_secrets(part) if isinstance(part, str) else part for part in error.args)
        error = error.__cause__ or error.__context__
