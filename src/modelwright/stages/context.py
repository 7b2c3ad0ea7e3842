"""What every stage receives: the run's context and options, its inputs and parts, the settings compared on resume, graceful shutdown and stage status."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from modelwright.engine.distributed import World
from modelwright.engine.task import Task
from modelwright.engine.trainer import Engine
from modelwright.errors import Interrupted, Refused, UsageError
from modelwright.models.trainable import ParameterCount
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import StagePlan
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.schema import Recipe
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Journal


@dataclass(frozen=True)
class ParentModel:
    """The finished stage that another one starts from."""

    stage: str
    """Its name."""
    path: Path
    """The folder of its model."""
    fingerprint: str
    """Hash over the hashes of its files: changes when the model does."""


@dataclass(frozen=True)
class RunOptions:
    """What one start of a run is asked, beside its recipe."""

    overrides: frozenset[str] = frozenset()
    """Settings that may differ from those the run was started with."""
    from_stage: str | None = None
    """The stage to begin with; those before it must be finished, and are only verified."""
    until_stage: str | None = None
    """The stage to end with."""
    accepted_gates: frozenset[str] = frozenset()
    """Stages whose closed gate a person accepts."""
    accept_reason: str | None = None
    """Why it is accepted, in that person's words."""


DEFAULT_OPTIONS = RunOptions()
"""Just the recipe."""


@dataclass(frozen=True)
class RunContext:
    """One run, as its stages see it."""

    loaded: LoadedRecipe
    """The recipe, and where each setting came from."""
    folder: RunFolder
    """Where everything is kept."""
    journal: Journal
    """Where everything is told."""
    world: World
    """Who is computing."""
    hardware: DeviceInfo
    """What this machine can do."""
    options: RunOptions
    """What this start was asked beside the recipe."""

    @property
    def recipe(self) -> Recipe:
        """The recipe itself."""
        return self.loaded.recipe

    @property
    def recipe_dir(self) -> Path:
        """The folder of the recipe file, where its relative paths may point."""
        return self.loaded.path.parent


Metrics = dict[str, float | None]


@dataclass(frozen=True)
class StageInputs:
    """What a stage works with."""

    model: Any
    """Where the model comes from that the stage starts from."""
    model_name: str
    """What it is called."""
    revision: str | None
    """The hub commit it is pinned to, where it has one."""
    data: Any
    """What it learns from and is measured by."""
    model_fingerprint: str
    """Changes when the model does."""
    data_fingerprint: str
    """Changes when the data does."""
    load_model: Callable[..., Any] | None = None
    """Makes a language model in place of `text.load_model`: with random weights, where steps are only measured."""


@dataclass(frozen=True)
class StageParts:
    """A stage ready to be trained."""

    task: Task
    """What the engine is given."""
    model: nn.Module
    """What is saved in the end."""
    parameter_counts: ParameterCount
    """How much of it moves."""
    flops_per_token: float
    """Operations for one token (or image), forward and backward."""
    data_manifest: dict[str, Any]
    """What the model sees, for the data manifest."""
    save: Callable[[dict[str, Tensor], Path], None]
    """Writes whole weights into a model folder."""
    set_total_steps: Callable[[int], None] = lambda steps: None
    """Told how many steps there will be, before the first one."""
    optimization_notes: Callable[[StagePlan], tuple[str, ...]] = lambda plan: ()
    """What need not be computed twice under a plan, a line each."""
    precompute: Callable[[Engine, Path], str | None] = lambda engine, folder: None
    """Computes, before the first step, what no step changes; it may use a folder, and tells in a line what it did."""


class StageBuilder(Protocol):
    """Text or images."""

    comparison_metrics: frozenset[str]
    """Metrics that only `show` measures."""

    def load_inputs(self, context: RunContext, stage: str, parent: ParentModel | None) -> StageInputs:
        """Find the model, which is the parent's where there is one, and read the data."""

    def build(self, context: RunContext, inputs: StageInputs, stage: str) -> StageParts:
        """Make the task of a stage."""

    def compare(self, context: RunContext, inputs: StageInputs, stage: str) -> Metrics:
        """Write what a person looks at into demo_outputs, and return its metrics."""


CHANGEABLE_ON_RESUME = frozenset({
    "logging_steps", "save_steps", "eval_steps", "save_total_limit", "per_device_eval_batch_size", "distributed_strategy",
    "gradient_checkpointing", "profile_memory", "cache_frozen_layers", "share_prefix", "resume_from_checkpoint",
    "ddp_bucket_cap_mb", "async_save",
})  # fmt: skip
"""Settings that may change between two starts of one run: they do not decide what is learnt."""
CONTENT_KEYS = ("data.fingerprint", "model.fingerprint", "tokenizer.fingerprint")
"""What the files themselves hold, by fingerprint."""


def build_resume_config(recipe: Recipe, stage: str, data_fingerprint: str, model_fingerprint: str) -> dict[str, Any]:
    """Every setting that decides the weights, by its dotted name."""
    return {**stage_settings(recipe, stage), CONTENT_KEYS[0]: data_fingerprint, CONTENT_KEYS[1]: model_fingerprint}


def stage_settings(recipe: Recipe, stage: str) -> dict[str, Any]:
    """Those of the wishes that stand in the recipe itself; what data holds is known by its fingerprint alone."""
    settings = recipe.stages[stage].model_dump(mode="json", exclude={"data"})
    relevant = {f"{stage}.{key}": value for key, value in settings.items() if key not in CHANGEABLE_ON_RESUME}
    return {**flatten_settings(relevant), "seed": recipe.seed}


def validate_overrides(recipe: Recipe, allowed: Collection[str]) -> None:
    """An override must name something that decides the weights of some stage."""
    architecture = recipe.model.architecture
    architecture_settings = flatten_settings({"model.architecture": architecture.model_dump()}) if architecture else {}
    known = [
        *CONTENT_KEYS,
        *architecture_settings,
        *(key for stage in recipe.stages for key in stage_settings(recipe, stage)),
    ]
    mappings = [f"{stage}.{name}" for stage, section in recipe.stages.items() for name in type(section).model_fields]
    for key in allowed:
        if key not in known and key.rpartition(".")[0] not in mappings:  # an entry that is there no more has no name
            close_matches = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close_matches[0]}?" if close_matches else ""
            raise UsageError(f"--override {key} names nothing that decides the weights{hint}")


def check_resume_config(saved: Mapping[str, Any], current: Mapping[str, Any], allowed: Collection[str]) -> list[str]:
    """Refuse to go on with other wishes; returns the changes that were allowed, to be recorded."""
    changed = [
        key for key in [*saved, *(key for key in current if key not in saved)] if saved.get(key) != current.get(key)
    ]
    refused = [key for key in changed if key not in allowed]
    if refused:
        change_list = "; ".join(_format_change(key, saved.get(key), current.get(key)) for key in refused)
        options = " ".join(f"--override {key}" for key in refused)
        one_sided = any(key.count(".") == 1 and (key in saved) != (key in current) for key in refused)
        older_version_hint = "continue with the earlier modelwright that started it, " if one_sided else ""
        raise Refused(
            f"settings changed since this run started: {change_list}. Choose another output_dir, put it back, {older_version_hint}or add {options}"
        )
    return [_format_change(key, saved.get(key), current.get(key)) for key in changed]


def _format_change(key: str, saved: Any, current: Any) -> str:
    return f"{key} changed" if key in CONTENT_KEYS else f"{key} was {saved}, now {current}"


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flattened |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


STOPPED_MESSAGE = "stopped; rerun the same command to resume from the last checkpoint"


class ImmediateStop(BaseException):
    """Unwinds everything at once; no `except Exception` on the way takes it for a problem of its own."""

    exit_code = Interrupted.exit_code


class GracefulShutdown:
    """Hears SIGTERM and Ctrl-C: while training it waits for the step to end, elsewhere it stops at once."""

    def __init__(self) -> None:
        self._requested = False
        self._deferred = False

    def requested(self) -> bool:
        """Whether somebody asked to stop."""
        return self._requested

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Hear the signals inside the block; being stopped at once leaves it as an Interrupted."""
        previous_handlers = {
            signum: signal.signal(signum, self._on_signal) for signum in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        except ImmediateStop:
            raise Interrupted(STOPPED_MESSAGE) from None
        finally:
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)

    @contextmanager
    def defer_to_step_end(self) -> Iterator[None]:
        """Inside the block, stop only between two steps, after a checkpoint."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def finish_error(self) -> None:
        """An error is on its way out: who asks to stop now must not take its place, unless asked twice."""
        self._deferred, self._requested = True, False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._deferred or self._requested:
            self._requested = True
            raise ImmediateStop(STOPPED_MESSAGE)
        self._requested = True


StageStatus = Literal["pending", "running", "done", "accepted", "closed"]


class StageStatuses:
    """Knows how each stage stands, and tells the whole line whenever one changes."""

    def __init__(self, stages: Iterable[str], journal: Journal) -> None:
        self._statuses: dict[str, StageStatus] = dict.fromkeys(stages, "pending")
        self._journal = journal

    def set_status(self, stage: str, status: StageStatus) -> None:
        """Say how a stage stands now."""
        self._statuses[stage] = status
        stages = [{"stage": name, "state": stage_status} for name, stage_status in self._statuses.items()]
        self._journal.add("stage_status", stage=stage, state=status, stages=stages)
