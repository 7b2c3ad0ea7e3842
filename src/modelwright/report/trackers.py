"""Hand a run's numbers to trackers: TensorBoard files by default, others by name; one that fails stops no run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from modelwright.recipe.schema import Recipe
from modelwright.report.tensorboard import EventFile
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Event, Watcher

MEASURES = ("loss", "eval_loss", "eval_accuracy", "learning_rate", "grad_norm", "tokens_per_second", "mfu",
            "memory_bytes", "epoch")  # fmt: skip
PACKAGES = {"mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """Takes numbers."""

    def take(self, values: Mapping[str, float], step: int, when: float) -> None:
        """The values of a step, by name."""

    def begin_again(self, step: int, when: float) -> None:
        """What came after a step is done again."""

    def close(self) -> None:
        """The run ends."""


class Tensorboard:
    """Event files in the run folder."""

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        self._file = EventFile(folder.path / "tensorboard")

    def take(self, values: Mapping[str, float], step: int, when: float) -> None:
        self._file.scalars(values, step, when)

    def begin_again(self, step: int, when: float) -> None:
        self._file.begin_again(step, when)

    def close(self) -> None:
        self._file.close()


class Module:
    """A tracker that is a module with functions to begin, log and end; its own settings say where to."""

    def __init__(
        self, begin: Callable[[], Any], log: Callable[[dict[str, float], int], Any], end: Callable[[], Any]
    ) -> None:
        begin()
        self._log, self._end = log, end

    def take(self, values: Mapping[str, float], step: int, when: float) -> None:
        self._log(dict(values), step)

    def begin_again(self, step: int, when: float) -> None:
        """These know no going back: the newest value of a step counts."""

    def close(self) -> None:
        self._end()


def _wandb(recipe: Recipe, folder: RunFolder) -> Tracker:
    import wandb

    settings = recipe.model_dump(mode="json")
    begin = lambda: wandb.init(project="modelwright", name=recipe.name, dir=str(folder.path), config=settings)  # noqa: E731
    return Module(begin, lambda values, step: wandb.log(values, step=step), wandb.finish)


def _mlflow(recipe: Recipe, folder: RunFolder) -> Tracker:
    import mlflow

    begin = lambda: mlflow.start_run(run_name=recipe.name)  # noqa: E731
    return Module(begin, lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run)


def _trackio(recipe: Recipe, folder: RunFolder) -> Tracker:
    import trackio

    begin = lambda: trackio.init(project="modelwright", name=recipe.name)  # noqa: E731
    return Module(begin, lambda values, step: trackio.log(values, step=step), trackio.finish)


KINDS: dict[str, Callable[[Recipe, RunFolder], Tracker]] = {
    "tensorboard": Tensorboard, "mlflow": _mlflow, "wandb": _wandb, "trackio": _trackio,
}  # fmt: skip


@contextmanager
def tracking(recipe: Recipe, folder: RunFolder, watch: Watcher | None) -> Iterator[Watcher]:
    """A watcher of the journal that tells `watch` first, then every tracker the recipe names."""
    trackers = {name: found for name in recipe.report_to if (found := _begin(name, recipe, folder)) is not None}

    def told(event: Event) -> None:
        nonlocal watch
        if watch is not None:
            try:
                watch(event)
            except Exception:  # whoever watched has gone; the trackers have not
                watch = None
        for name, tracker in list(trackers.items()):
            try:
                _tell(tracker, event)
            except Exception as error:
                del trackers[name]
                _say(f"{name} takes no more numbers ({type(error).__name__}: {error}); the run goes on")

    try:
        yield told
    finally:
        for tracker in trackers.values():
            with suppress(Exception):
                tracker.close()


def _begin(name: str, recipe: Recipe, folder: RunFolder) -> Tracker | None:
    try:
        return KINDS[name](recipe, folder)
    except ImportError:
        _say(f"report_to names {name}, which is not installed: pip install {PACKAGES[name]}; the run goes on")
    except Exception as error:
        _say(f"{name} could not begin ({type(error).__name__}: {error}); the run goes on")
    return None


def _tell(tracker: Tracker, event: Event) -> None:
    kind, stage = event["event"], event.get("stage", "")
    if kind in ("step", "evaluation"):
        values = {f"{stage}/{name}": float(event[name]) for name in MEASURES if event.get(name) is not None}
        tracker.take(values, int(event["step"]), float(event["time"]))
    elif kind == "resumed":
        tracker.begin_again(int(event["step"]), float(event["time"]))


def _say(line: str) -> None:
    with suppress(OSError):
        print(f"note: {line}", file=sys.stderr)
