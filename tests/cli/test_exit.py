"""The command ends its process itself: after threads, exit functions and output, without tearing Python down."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, threading
from modelwright.__main__ import main

class Torn:
    def __del__(self):
        print("torn down")

torn = Torn()
atexit.register(print, "exit function")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
try:
    main()
finally:
    print("not reached")
"""


@pytest.mark.parametrize(("words", "code"), [(["recipes"], 0), (["no-such-command"], 2)])
def test_the_process_ends_after_threads_exit_functions_and_output(words: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (code, ["thread", "exit function"])
    assert "torn down" not in done.stdout and "not reached" not in done.stdout


def test_a_profiler_gets_its_turn_after_the_command() -> None:
    command = [sys.executable, "-m", "cProfile", "-m", "modelwright", "recipes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "function calls" in done.stdout


def test_output_that_cannot_be_written_is_reported() -> None:
    program = "import sys; from modelwright.__main__ import _end_process; print(1); _end_process(0); sys.exit(0)"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-E", "-c", program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 120
