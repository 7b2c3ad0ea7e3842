"""The trackers that are packages of their own: mlflow, wandb and trackio, each in its own words.

Where to, online or not, and as whom is theirs to know: `MLFLOW_TRACKING_URI`, `WANDB_MODE`, `TRACKIO_DIR` and so on.
What a run is called there is kept beside it, so that one that goes on is one run there too.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelwright.recipe.schema import Recipe
from modelwright.runs.folder import RunFolder, read_json, write_json

PROJECT = "modelwright"
MOST_PARAMETERS = 100
"""As many as mlflow takes at once."""


class Mlflow:
    """One mlflow run."""

    def __init__(self, mlflow: Any, recipe: Recipe, folder: RunFolder) -> None:
        self._mlflow = mlflow
        kept = _kept(folder, "mlflow")
        if kept is not None:
            with suppress(Exception):  # this may be another store than the one it is in
                mlflow.start_run(run_id=kept)
                return
        begun = mlflow.start_run(run_name=recipe.name)
        settings = list(_flat(recipe.model_dump(mode="json")))
        for first in range(0, len(settings), MOST_PARAMETERS):
            mlflow.log_params(dict(settings[first : first + MOST_PARAMETERS]))
        _keep(folder, "mlflow", begun.info.run_id)

    def take(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Each metric has steps of its own."""
        self._mlflow.log_metrics({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def begin_again(self, step: int, when: float) -> None:
        """It knows no going back: the newest value of a step counts."""

    def close(self) -> None:
        """The run ends."""
        self._mlflow.end_run()


class Wandb:
    """One wandb run."""

    def __init__(self, wandb: Any, recipe: Recipe, folder: RunFolder) -> None:
        name = _name(folder, "wandb")
        self._stages: set[str] = set()
        self._run = wandb.init(
            project=PROJECT,
            name=recipe.name,
            id=name,
            resume="allow",
            dir=str(folder.path),
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # the terminal is ours, and the journal has it all
        )

    def take(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Its own step may never go back, which stages and resumed runs do; so each stage has a step of its own."""
        if stage not in self._stages:
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._stages.add(stage)
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def begin_again(self, step: int, when: float) -> None:
        """It knows no going back: the newest value of a step counts."""

    def close(self) -> None:
        """The run ends."""
        self._run.finish()


class Trackio:
    """One trackio run."""

    def __init__(self, trackio: Any, recipe: Recipe, folder: RunFolder) -> None:
        name = f"{recipe.name}-{_name(folder, 'trackio')}"  # it knows runs by their names alone
        self._run = trackio.init(project=PROJECT, name=name, resume="allow", config=dict(_flat(recipe.model_dump())))

    def take(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Steps may go back."""
        self._run.log({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def begin_again(self, step: int, when: float) -> None:
        """It knows no going back: the newest value of a step counts."""

    def close(self) -> None:
        """The run ends."""
        self._run.finish()


Begin = Callable[[Recipe, RunFolder], Any]


def _mlflow() -> Begin:
    import mlflow

    return lambda recipe, folder: Mlflow(mlflow, recipe, folder)


def _wandb() -> Begin:
    import wandb

    return lambda recipe, folder: Wandb(wandb, recipe, folder)


def _trackio() -> Begin:
    import trackio

    return lambda recipe, folder: Trackio(trackio, recipe, folder)


PACKAGES: dict[str, Callable[[], Begin]] = {"mlflow": _mlflow, "wandb": _wandb, "trackio": _trackio}
"""Each imports its package and returns what begins a run with it."""


def _kept(folder: RunFolder, tracker: str) -> str | None:
    """What this run was called in a tracker, where it was there before."""
    path = _file(folder, tracker)
    return str(read_json(path)["run"]) if path.exists() else None


def _keep(folder: RunFolder, tracker: str, name: str) -> str:
    _file(folder, tracker).parent.mkdir(exist_ok=True)
    write_json(_file(folder, tracker), {"run": name})
    return name


def _file(folder: RunFolder, tracker: str) -> Path:
    return folder.path / "trackers" / f"{tracker}.json"  # one each: every tracker has a thread of its own


def _name(folder: RunFolder, tracker: str) -> str:
    """What a run is called in a tracker that lets us choose; the same when it goes on."""
    return _kept(folder, tracker) or _keep(folder, tracker, secrets.token_hex(4))


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their whole names, as ``sft.learning_rate``; what is not set is left out."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", value
