"""The first signal saves and stops after the step; a second one, or one outside training, stops at once."""

from __future__ import annotations

import os
import signal
import time

import pytest

from modelwright.errors import Interrupted
from modelwright.stages.context import GracefulShutdown


def ask(number: signal.Signals) -> None:
    """A real signal to this very process, and a moment for Python to hear it."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_training_the_first_signal_waits_for_the_step(number: signal.Signals) -> None:
    stopper = GracefulShutdown()
    with stopper.handle_signals(), stopper.defer_to_step_end():
        assert not stopper.requested()
        ask(number)
        assert stopper.requested()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_stops_at_once(number: signal.Signals) -> None:
    stopper = GracefulShutdown()
    with pytest.raises(Interrupted) as caught, stopper.handle_signals(), stopper.defer_to_step_end():
        ask(number)
        ask(number)
    assert caught.value.exit_code == 75
    assert str(caught.value) == "stopped; rerun the same command to resume from the last checkpoint"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_outside_training_one_signal_is_enough(number: signal.Signals) -> None:
    stopper = GracefulShutdown()
    with pytest.raises(Interrupted), stopper.handle_signals():
        with stopper.defer_to_step_end():
            pass
        ask(number)


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
