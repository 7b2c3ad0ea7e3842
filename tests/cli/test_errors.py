"""Errors that no command foresees: one sentence for the storage and for memory, the same exit code with --debug."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from modelwright.cli import main as cli


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            OSError(errno.EIO, "Input/output error", "runs/a/x"),
            78,
            "runs/a/x: Input/output error; what was saved is not",
        ),
        (OSError(errno.ESTALE, "Stale file handle"), 78, "the disk: Stale file handle; what was saved is not lost"),
        (PermissionError(errno.EACCES, "Permission denied", "a.yaml"), 2, "a.yaml: Permission denied"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "runs/a"), 2, "runs/a: Too many levels of"),
        (MemoryError(), 1, "out of memory: the machine, or a limit set for this process"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "out of memory: the machine, or a limit"),
        (KeyError("secret"), 1, "Unexpected error; rerun with --debug"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_nobody_foresaw_is_one_sentence(
    error: Exception, code: int, message: str, debug: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(args: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "_run_app", fail)
    with pytest.raises(SystemExit) as exit_error:
        cli.main(["recipes", *["--debug"] * debug])
    assert exit_error.value.code == code
    printed = capsys.readouterr().err
    assert ("Traceback" if debug else message) in printed
    assert debug or printed.count("\n") <= 2


INTERRUPTED = """
import os, signal, sys, threading, time
from modelwright.__main__ import main
entered = []

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores

def interrupt_at(name):
    while not entered or name not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(lambda frame, event, value: frame.f_code is main.__code__ and entered.append(frame))
threading.Thread(target=interrupt_at, args=[sys.argv.pop(1)], daemon=True).start()
main()
"""
"""Sends itself Ctrl-C once the command is entered and a module is imported or being imported."""


@pytest.mark.parametrize("module", ["typer", "modelwright.cli.run", "pydantic", "modelwright.plan.hardware"])
def test_ctrl_c_in_the_first_second_is_one_line(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module, "plan", "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (75, "stopped\n")
