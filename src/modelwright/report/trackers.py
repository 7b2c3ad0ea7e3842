"""Hand a run's numbers to trackers: TensorBoard files by default, others by name; one that fails stops no run."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from modelwright.errors import first_line
from modelwright.recipe.schema import Recipe
from modelwright.report.tensorboard import EventFile
from modelwright.report.tracker_packages import PACKAGES
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Event, Watcher

MEASURES = (
    *("loss", "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second", "mfu", "memory_bytes"),
    "epoch",
)
"""What is handed on, beside everything that an evaluation measured."""
MOST_WAITING = 10_000
"""Events that wait for a slow tracker; later ones it does not get."""
PATIENCE_SECONDS = 60.0
"""How long the end of a run waits for a tracker to have sent everything."""


class Tracker(Protocol):
    """Takes numbers."""

    def take(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """The values of a stage's step, by name."""

    def begin_again(self, step: int, when: float) -> None:
        """What came after a step is done again."""

    def close(self) -> None:
        """The run ends."""


class Tensorboard:
    """Event files in the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = EventFile(folder.path / "tensorboard")

    def take(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Whole in the file when this returns."""
        self._file.scalars({f"{stage}/{name}": value for name, value in values.items()}, step, when)

    def begin_again(self, step: int, when: float) -> None:
        """TensorBoard forgets what came after."""
        self._file.begin_again(step, when)

    def close(self) -> None:
        """Nothing is left to write."""
        self._file.close()


class Direct:
    """A tracker that is told at once."""

    def __init__(self, name: str, begin: Callable[[], Tracker]) -> None:
        self._name, self._tracker = name, _begun(name, begin)

    def tell(self, event: Event) -> None:
        """Hand on what is in an event; a tracker that fails is told nothing more."""
        if self._tracker is not None and not _told(self._name, self._tracker, event):
            self._tracker = None

    def close(self) -> None:
        """The run ends."""
        if self._tracker is not None:
            with suppress(Exception):
                self._tracker.close()


class Aside:
    """A tracker on a thread of its own: a server that does not answer keeps no step waiting."""

    def __init__(self, name: str, begin: Callable[[], Tracker], patience: float = PATIENCE_SECONDS) -> None:
        self._name, self._begin, self._patience = name, begin, patience
        self._events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker-{name}")
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Leave an event for the thread; one too many is dropped."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._events.put_nowait(event)

    def close(self) -> None:
        """Wait until everything is sent, but not for ever."""
        with suppress(queue.Full):
            self._events.put(None, timeout=self._patience)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            _say(f"{self._name} has not taken everything in {self._patience:g} s; the run ends without it")

    def _work(self) -> None:
        tracker = _begun(self._name, self._begin)
        while tracker is not None and (event := self._events.get()) is not None:
            if not _told(self._name, tracker, event):
                return
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:
                _say(f"{self._name} did not end well ({type(error).__name__}: {first_line(error)[:300]})")


@contextmanager
def tracking(recipe: Recipe, folder: RunFolder, watch: Watcher | None) -> Iterator[Watcher]:
    """A watcher of the journal that tells `watch` first, then every tracker the recipe names."""
    trackers = [found for name in recipe.report_to if (found := _tracker(name, recipe, folder)) is not None]

    def told(event: Event) -> None:
        nonlocal watch
        if watch is not None:
            try:
                watch(event)
            except Exception:  # whoever watched has gone; the trackers have not
                watch = None
        for tracker in trackers:
            tracker.tell(event)

    try:
        yield told
    finally:
        for tracker in trackers:
            tracker.close()


def _tracker(name: str, recipe: Recipe, folder: RunFolder) -> Direct | Aside | None:
    if name == "tensorboard":
        return Direct(name, lambda: Tensorboard(folder))
    try:
        package = PACKAGES[name]()  # imported here: two threads that import at once may each find half a module
    except ImportError:
        _say(f"report_to names {name}, which is not installed: pip install {name}; the run goes on")
    except Exception as error:
        _say(f"{name} could not be loaded ({type(error).__name__}: {first_line(error)[:300]}); the run goes on")
    else:
        return Aside(name, lambda: package(recipe, folder))
    return None


def _begun(name: str, begin: Callable[[], Tracker]) -> Tracker | None:
    try:
        return begin()
    except Exception as error:
        _say(f"{name} could not begin ({type(error).__name__}: {first_line(error)[:300]}); the run goes on")
        return None


def _told(name: str, tracker: Tracker, event: Event) -> bool:
    """Whether a tracker took what is in an event."""
    try:
        kind, stage = event["event"], event.get("stage", "")
        if kind in ("step", "evaluation"):
            measured = {key: value for key, value in event.items() if key in MEASURES or key.startswith("eval_")}
            values = {key: float(value) for key, value in measured.items() if value is not None}
            tracker.take(stage, values, int(event["step"]), float(event["time"]))
        elif kind == "resumed":
            tracker.begin_again(int(event["step"]), float(event["time"]))
    except Exception as error:
        _say(f"{name} takes no more numbers ({type(error).__name__}: {first_line(error)[:300]}); the run goes on")
        return False
    return True


def _say(line: str) -> None:
    with suppress(OSError):
        print(f"note: {line}", file=sys.stderr)
