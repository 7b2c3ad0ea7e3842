"""Asked once, training saves and stops; asked twice, or elsewhere, everything stops at once."""

from __future__ import annotations

import os
import signal
import time

import pytest

from modelwright.errors import Interrupted
from modelwright.stages.signals import Stopper


def ask(number: signal.Signals) -> None:
    """A real signal to this very process, and a moment for Python to hear it."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_training_the_first_signal_waits_for_the_step(number: signal.Signals) -> None:
    stopper = Stopper()
    with stopper.listening(), stopper.waiting():
        assert not stopper.asked()
        ask(number)
        assert stopper.asked()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_stops_at_once(number: signal.Signals) -> None:
    stopper = Stopper()
    with pytest.raises(Interrupted) as caught, stopper.listening(), stopper.waiting():
        ask(number)
        ask(number)
    assert caught.value.exit_code == 75
    assert str(caught.value) == "stopped; the same command continues from the last checkpoint"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_outside_training_one_signal_is_enough(number: signal.Signals) -> None:
    stopper = Stopper()
    with pytest.raises(Interrupted), stopper.listening():
        with stopper.waiting():
            pass
        ask(number)


def test_whoever_listened_before_listens_again_afterwards() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Stopper().listening():
            pass
        ask(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
