"""Errors that no command foresees: one sentence for the storage and for memory, the same exit code with --debug."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time

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


def test_ctrl_c_in_the_first_second_is_one_line() -> None:
    command = [
        sys.executable,
        "-c",
        "import time; print('up', flush=True); from modelwright.__main__ import main; main()",
    ]
    for delay in (0.02, 0.1, 0.3):
        with subprocess.Popen(
            [*command, "plan", "quickstart"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors.decode()) in [(75, "stopped\n"), (0, "")], delay
