"""The first signal saves and stops after the step; a second one, or one outside training, stops at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, field_serializer

from modelwright.errors import Interrupted
from modelwright.stages import context
from modelwright.stages.context import STOP_SIGNALS, GracefulShutdown


@pytest.fixture(autouse=True)
def default_hangup() -> Iterator[None]:
    """SIGHUP as a terminal leaves it, though the tests may run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def ask(number: signal.Signals) -> None:
    """A real signal to this very thread, whose handler has run when this returns."""
    signal.raise_signal(number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_while_training_the_first_signal_waits_for_the_step(number: signal.Signals) -> None:
    stopper = GracefulShutdown()
    with stopper.handle_signals(), stopper.defer_to_step_end():
        assert not stopper.requested()
        ask(number)
        assert stopper.requested()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_second_signal_stops_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "REPEAT_SECONDS", 0.0)
    stopper = GracefulShutdown()
    with pytest.raises(Interrupted) as caught, stopper.handle_signals(), stopper.defer_to_step_end():
        ask(number)
        ask(number)
    assert caught.value.exit_code == 75
    assert str(caught.value) == "stopped; rerun the same command to resume from the last checkpoint"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_outside_training_one_signal_is_enough(number: signal.Signals) -> None:
    stopper = GracefulShutdown()
    with pytest.raises(Interrupted), stopper.handle_signals():
        with stopper.defer_to_step_end():
            pass
        ask(number)


def test_a_stop_that_a_library_makes_an_error_of_is_still_a_stop() -> None:
    """pydantic makes a PydanticSerializationError of anything that is raised while it serializes."""

    class Settings(BaseModel):
        @field_serializer("name", check_fields=False)
        def stop(self, value: str) -> str:
            ask(signal.SIGINT)
            return value

        name: str = "x"

    with pytest.raises(Interrupted), GracefulShutdown().handle_signals():
        Settings().model_dump()


def test_whoever_listened_before_listens_again_afterwards() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with GracefulShutdown().handle_signals():
            pass
        ask(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_close_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "REPEAT_SECONDS", 3600.0)
    stopper = GracefulShutdown()
    with stopper.handle_signals(), stopper.defer_to_step_end():
        ask(signal.SIGHUP)
        ask(signal.SIGHUP)
        ask(signal.SIGTERM)
        assert stopper.requested()


def test_under_nohup_a_closed_terminal_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulShutdown().handle_signals():
            ask(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# "ready" is printed by a second thread once the main thread has burned time in C: a signal before that is an
# ordinary one, which Python's handler answers.
STUCK = """
import hashlib, threading, time
from modelwright.stages.context import GracefulShutdown

def say_when_busy(start=time.process_time()):
    while time.process_time() - start < 0.3:
        time.sleep(0.02)
    print("ready", flush=True)

GracefulShutdown.unresponsive_seconds = 0.5
with GracefulShutdown().handle_signals():
    threading.Thread(target=say_when_busy, daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_a_process_that_waits_in_c_obeys_too() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 75
    assert errors.decode() == "stopped; rerun the same command to resume from the last checkpoint\n"
