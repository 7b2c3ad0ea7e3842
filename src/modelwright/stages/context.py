"""What every stage receives: run context and options, inputs and parts, the resume check, graceful shutdown, status."""

from __future__ import annotations

import difflib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from modelwright.errors import Interrupted, ModelwrightError, Refused, UsageError
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.schema import Recipe
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Journal

if TYPE_CHECKING:  # `modelwright gate` and `data prepare` import this module without torch
    from torch import Tensor, nn

    from modelwright.engine.distributed import World
    from modelwright.engine.task import MicroBatch, Task
    from modelwright.engine.trainer import Engine
    from modelwright.plan.hardware import DeviceInfo
    from modelwright.plan.stage import StagePlan
    from modelwright.recipe.sections import ParameterCount


@dataclass(frozen=True)
class ParentModel:
    """The finished stage that another one starts from."""

    stage: str
    """Its name."""
    path: Path
    """The folder of its model."""
    fingerprint: str
    """Hash over the hashes of its files."""


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks of one start of a run."""

    overrides: frozenset[str] = frozenset()
    """Settings that may differ from those the run was started with (--allow-changed)."""
    from_stage: str | None = None
    """First stage to run; those before it must be finished and are only verified."""
    until_stage: str | None = None
    """Last stage to run."""
    accepted_gates: frozenset[str] = frozenset()
    """Stages whose closed gate is accepted by the user."""
    accept_reason: str | None = None
    """The user's reason."""
    trusted_files: frozenset[str] = frozenset()
    """Python files of verifiers that the user allows to run (--trust-file)."""
    is_command: bool = False
    """Whether the process is of this run alone, so that its imports are part of the run's time."""


DEFAULT_OPTIONS = RunOptions()


@dataclass(frozen=True)
class RunContext:
    """What all stages of a run share."""

    loaded: LoadedRecipe
    """The recipe and where each setting came from."""
    folder: RunFolder
    """The run folder."""
    journal: Journal
    """The run's event log."""
    world: World
    """The ranks of this run."""
    hardware: DeviceInfo
    """The device of every rank."""
    options: RunOptions
    """What the command line asks of this start."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.loaded.recipe

    @property
    def recipe_dir(self) -> Path:
        """The folder of the recipe file, which relative paths in it may refer to."""
        return self.loaded.path.parent

    def note(self, stage: str, message: str) -> None:
        """Log a line for the user."""
        self.journal.add("note", stage=stage, message=message)

    @contextmanager
    def span(self, name: str, stage: str) -> Iterator[None]:
        """Log how long a part of a stage takes; report.history.SPANS has the names. Spans do not overlap."""
        started = time.monotonic()
        yield
        self.journal.add("span", stage=stage, name=name, seconds=round(time.monotonic() - started, 3))


Metrics = dict[str, float | None]


@dataclass(frozen=True)
class StageInputs:
    """Model and data of a stage, before the model is loaded."""

    model: Any
    """The resolved model that the stage starts from; None for a classifier from scratch."""
    model_name: str
    """Its display name."""
    revision: str | None
    """The hub commit it is pinned to, if any."""
    data: Any
    """Training and held-out rows."""
    model_fingerprint: str
    """Hash of the model."""
    data_fingerprint: str
    """Hash of the data."""
    load_model: Callable[..., Any] | None = None
    """Replaces `pretrained.load_model`: random weights where steps are only measured."""


@dataclass(frozen=True)
class StageParts:
    """A stage that is ready to be trained."""

    task: Task
    """The task for the engine."""
    model: nn.Module
    """The model that is saved at the end."""
    parameter_counts: ParameterCount
    """Total and trainable parameters."""
    flops_per_token: Callable[[StagePlan], float]
    """FLOPs of one token (or image), forward and backward."""
    data_manifest: dict[str, Any]
    """Contents of the data manifest."""
    save: Callable[[dict[str, Tensor], Path], None]
    """Writes unsharded weights into a model folder."""
    optimization_notes: Callable[[StagePlan], tuple[str, ...]] = lambda plan: ()
    """A line for each optimization that applies under a plan (shared prefix, cached frozen layers)."""
    check_batch: MicroBatch | None = None
    """Rows whose losses the saved model must give when it is loaded; None where comparing its files is enough."""
    precompute: Callable[[Engine, Path], str | None] = lambda engine, folder: None
    """Computes before the first step what no step changes, with a cache folder; returns a note."""


@dataclass(frozen=True)
class StageBuilder:
    """How a training stage is built."""

    load_inputs: Callable[[RunContext, str, ParentModel | None], StageInputs]
    """Resolve the model (the parent's, if there is one) and read the data."""
    build: Callable[[RunContext, StageInputs, str], StageParts]
    """Load the model and build the task."""
    compare: Callable[[RunContext, StageInputs, str, Any], Metrics] = lambda context, inputs, stage, before: {}
    """Write samples into demo_outputs and return their metrics; raw text has none."""
    sample_before: Callable[[RunContext, StageInputs, str], Any] = lambda context, inputs, stage: None
    """Sample the start model, while the trained one is written; `compare` receives it, or None where it was not."""


CHANGEABLE_ON_RESUME = frozenset({
    "logging_steps", "save_steps", "eval_steps", "save_total_limit", "per_device_eval_batch_size", "async_save",
    "max_eval_samples",
    "distributed_strategy", "gradient_checkpointing", "profile_memory", "cache_frozen_layers", "share_prefix",
    "padding_free", "resume_from_checkpoint", "ddp_bucket_cap_mb",
})  # fmt: skip
"""Settings that may change between two starts of a run: they do not change the trained weights."""
CONTENT_KEYS = ("data.fingerprint", "model.fingerprint", "tokenizer.fingerprint")
"""Keys of the resume config that hold a fingerprint of files."""


def build_resume_config(recipe: Recipe, stage: str, data_fingerprint: str, model_fingerprint: str) -> dict[str, Any]:
    """Every setting that affects the weights, by its dotted name, with the fingerprints of data and model."""
    return {**stage_settings(recipe, stage), CONTENT_KEYS[0]: data_fingerprint, CONTENT_KEYS[1]: model_fingerprint}


def stage_settings(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The part of the resume config that comes from the recipe; data counts by its fingerprint only."""
    settings = recipe.stages[stage].model_dump(mode="json", exclude={"data"})
    relevant = {f"{stage}.{key}": value for key, value in settings.items() if key not in CHANGEABLE_ON_RESUME}
    return {**flatten_settings(relevant), "seed": recipe.seed}


def validate_overrides(recipe: Recipe, allowed: Collection[str]) -> None:
    """Reject an --allow-changed key that is no setting of the resume config of any stage."""
    architecture = recipe.model.architecture
    architecture_settings = flatten_settings({"model.architecture": architecture.model_dump()}) if architecture else {}
    stage_keys = (key for stage in recipe.stages for key in stage_settings(recipe, stage))
    known = [*CONTENT_KEYS, *architecture_settings, *stage_keys]
    mappings = [f"{stage}.{name}" for stage, section in recipe.stages.items() for name in type(section).model_fields]
    for key in allowed:
        if key not in known and key.rpartition(".")[0] not in mappings:  # an entry of a mapping may be gone
            close_matches = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close_matches[0]}?" if close_matches else ""
            raise UsageError(f"--allow-changed {key} names nothing that decides the weights{hint}")


def check_resume_config(saved: Mapping[str, Any], current: Mapping[str, Any], allowed: Collection[str]) -> list[str]:
    """Refuse to resume with a changed config; returns a line for each allowed change."""
    changed = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    refused = [key for key in changed if key not in allowed]
    if refused:
        change_list = "; ".join(_format_change(key, saved.get(key), current.get(key)) for key in refused)
        options = " ".join(f"--allow-changed {key}" for key in refused)
        one_sided = any(key.count(".") == 1 and (key in saved) != (key in current) for key in refused)
        older_version_hint = "continue with the earlier modelwright that started it, " if one_sided else ""
        raise Refused(
            f"settings changed since this run started: {change_list}. Choose another output_dir, put it back, "
            f"{older_version_hint}or add {options}"
        )
    return [_format_change(key, saved.get(key), current.get(key)) for key in changed]


def _format_change(key: str, saved: Any, current: Any) -> str:
    return f"{key} changed" if key in CONTENT_KEYS else f"{key} was {saved}, now {current}"


def environment_of(context: RunContext) -> dict[str, Any]:
    """What bit-identical results depend on besides the recipe."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"device": context.hardware.name, "number of ranks": context.world.size, **versions}


def environment_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """A line about what differs from the start that wrote a checkpoint; None if nothing does."""
    changed = [name for name in current if name in saved and saved[name] != current[name]]
    differences = ", ".join(f"another {name} ({current[name]}, before {saved[name]})" for name in changed)
    return f"resumed with {differences}: results will not be bit-identical" if changed else None


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as a flat dict with dotted names."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flattened |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


STOPPED_MESSAGE = "stopped; rerun the same command to resume from the last checkpoint"


class ImmediateStop(BaseException):
    """Unwinds the stack at once; as a BaseException it passes every `except Exception`."""

    exit_code = Interrupted.exit_code


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal was closed; SIGUSR1: Slurm's warning before the time limit."""
REPEAT_SECONDS = 1.0
"""A signal so soon after the first is not a second one: a terminal that is closed sends SIGHUP twice."""
UNWIND_SECONDS = 20.0
"""Seconds that a stop may take once Python's handler has run: the journal and the report are written meanwhile."""


class GracefulShutdown:
    """Handles signals that ask to stop: during training the step is finished first, elsewhere the run stops at once."""

    unresponsive_seconds = 3.0
    """Seconds until a process is ended whose main thread waits in C++, where Python's handlers do not run."""

    def __init__(self) -> None:
        self._requested_at = math.inf
        self._deferred = False
        self._unwinding = False
        self._ended = threading.Event()

    def requested(self) -> bool:
        """Whether a signal asked to stop."""
        return self._requested_at < math.inf

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the signals inside the block; an immediate stop leaves it as Interrupted."""
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        signums = [signum for signum in STOP_SIGNALS if not (ignored and signum == signal.SIGHUP)]
        handlers = {signum: signal.signal(signum, self._on_signal) for signum in signums}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True, name="signals")
        watcher.start()
        try:
            yield
        except ImmediateStop:
            raise Interrupted(STOPPED_MESSAGE) from None
        except Exception as error:
            if self._unwinding and not isinstance(error, ModelwrightError):  # pydantic makes an error of its own of it
                raise Interrupted(STOPPED_MESSAGE) from error
            raise
        finally:
            self._ended.set()
            signal.set_wakeup_fd(previous)
            os.close(writer)
            watcher.join()
            os.close(reader)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _watch(self, reader: int) -> None:
        """End a process whose main thread does not obey a signal; what is on disk survives it, as it does a kill."""
        while data := os.read(reader, 1):
            deadline = time.monotonic() + self.unresponsive_seconds
            while data[0] in STOP_SIGNALS and not self._deferred and not self._ended.wait(0.05):
                if time.monotonic() > deadline + UNWIND_SECONDS * self._unwinding:
                    print(STOPPED_MESSAGE, file=sys.stderr, flush=True)
                    os._exit(Interrupted.exit_code)

    @contextmanager
    def defer_to_step_end(self) -> Iterator[None]:
        """Inside the block a signal only sets `requested`, so that the run stops after the step and a checkpoint."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def finish_error(self) -> None:
        """While an error propagates, ignore the first signal, so that it does not replace the error."""
        self._deferred, self._requested_at = True, math.inf

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._deferred or now > self._requested_at + REPEAT_SECONDS:
            self._requested_at, self._unwinding = now, True
            raise ImmediateStop(STOPPED_MESSAGE)
        self._requested_at = min(self._requested_at, now)


StageStatus = Literal["pending", "running", "done", "accepted", "closed"]


class StageStatuses:
    """The status of each stage; every change writes all of them to the journal."""

    def __init__(self, stages: Iterable[str], journal: Journal) -> None:
        self._statuses: dict[str, StageStatus] = dict.fromkeys(stages, "pending")
        self._journal = journal

    def set_status(self, stage: str, status: StageStatus) -> None:
        """Set the status of one stage."""
        self._statuses[stage] = status
        stages = [{"stage": name, "state": stage_status} for name, stage_status in self._statuses.items()]
        self._journal.add("stage_status", stage=stage, state=status, stages=stages)
