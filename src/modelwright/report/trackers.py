"""Log metrics to trackers: TensorBoard event files by default; MLflow, W&B and Trackio by name.

A tracker that fails is disabled and never stops a run. Where a tracker logs to, and as whom, is set by its own
variables (`MLFLOW_TRACKING_URI`, `WANDB_MODE`, `TRACKIO_DIR`). Its run id is saved in the run folder, so that a resumed
run is one run there too. TensorBoard's event files are written without a library: a scalar is forty bytes in a
TFRecord frame (length, masked CRC-32C, protobuf Event); TensorBoard's own reader is the test's oracle."""

from __future__ import annotations

import os
import queue
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from modelwright.errors import first_line
from modelwright.recipe.schema import Recipe
from modelwright.report.history import GPU_METRICS
from modelwright.runs.folder import RunFolder, read_json, write_json
from modelwright.runs.journal import Event, EventListener

LOGGED_METRICS = (
    *("loss", "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second", "mfu", "peak_memory_bytes"),
    *("images_per_second", "epoch", *GPU_METRICS),
)
"""Fields of a step that are logged; of an evaluation, everything measured."""
MAX_QUEUED_EVENTS = 10_000
"""Events queued for a slow tracker; more are dropped."""
FLUSH_TIMEOUT_SECONDS = 60.0
"""How long the end of a run waits for a tracker to flush."""


class Tracker:
    """Interface of experiment trackers."""

    def log(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Log the metrics of a stage's step."""
        raise NotImplementedError

    def on_resume(self, step: int, when: float) -> None:
        """Steps after this one are repeated; by default the last value of a step counts."""

    def close(self) -> None:
        """End the run."""


class SyncTracker:
    """A tracker that logs at once."""

    def __init__(self, name: str, factory: Callable[[], Tracker]) -> None:
        self._name, self._tracker = name, _start_tracker(name, factory)

    def submit(self, event: Event) -> None:
        """Log an event; a tracker that fails is disabled."""
        if self._tracker is not None and not _log_event(self._name, self._tracker, event):
            self._tracker = None

    def close(self) -> None:
        """End the run."""
        if self._tracker is not None:
            with suppress(Exception):
                self._tracker.close()


class BackgroundTracker:
    """A tracker on its own thread, so that a slow server delays no step."""

    def __init__(self, name: str, factory: Callable[[], Tracker], flush_timeout: float = FLUSH_TIMEOUT_SECONDS) -> None:
        self._name, self._factory, self._flush_timeout = name, factory, flush_timeout
        self._events: queue.Queue[Event | None] = queue.Queue(MAX_QUEUED_EVENTS)
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"tracker-{name}")
        self._thread.start()

    def submit(self, event: Event) -> None:
        """Queue an event; dropped when the queue is full."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._events.put_nowait(event)

    def close(self) -> None:
        """Flush, for at most the timeout."""
        with suppress(queue.Full):
            self._events.put(None, timeout=self._flush_timeout)
        self._thread.join(self._flush_timeout)
        if self._thread.is_alive():
            _print_note(f"{self._name} did not flush within {self._flush_timeout:g} s; continuing without it")

    def _run(self) -> None:
        tracker = _start_tracker(self._name, self._factory)
        while tracker is not None and (event := self._events.get()) is not None:
            if not _log_event(self._name, tracker, event):
                return
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:
                _print_note(f"{self._name} did not close cleanly ({_describe(error)})")


@contextmanager
def start_trackers(recipe: Recipe, folder: RunFolder, watch: EventListener | None) -> Iterator[EventListener]:
    """A listener of the journal that calls `watch`, then every tracker of the recipe."""
    trackers = [started for name in recipe.report_to if (started := _make_tracker(name, recipe, folder)) is not None]

    def dispatch(event: Event) -> None:
        nonlocal watch
        if watch is not None:
            try:
                watch(event)
            except Exception:  # closed terminal: the trackers continue
                watch = None
        for tracker in trackers:
            tracker.submit(event)

    try:
        yield dispatch
    finally:
        for tracker in trackers:
            tracker.close()


def _make_tracker(name: str, recipe: Recipe, folder: RunFolder) -> SyncTracker | BackgroundTracker | None:
    if name == "tensorboard":
        return SyncTracker(name, lambda: TensorBoardTracker(folder))
    try:
        package = import_module(name)  # not on the tracker's thread: concurrent imports may see half a module
    except ImportError:
        _print_note(f"report_to names {name}, which is not installed: pip install {name}; training continues")
    except Exception as error:
        _print_note(f"{name} could not be loaded ({_describe(error)}); training continues")
    else:
        return BackgroundTracker(name, lambda: TRACKERS[name](package, recipe, folder))
    return None


def _start_tracker(name: str, factory: Callable[[], Tracker]) -> Tracker | None:
    try:
        return factory()
    except Exception as error:
        _print_note(f"{name} could not start ({_describe(error)}); training continues")
        return None


def _log_event(name: str, tracker: Tracker, event: Event) -> bool:
    """Log an event; False where the tracker failed."""
    try:
        kind, stage = event["event"], event.get("stage", "")
        if kind in ("step", "evaluation"):
            measured = {key: value for key, value in event.items() if key in LOGGED_METRICS or key.startswith("eval_")}
            values = {key: float(value) for key, value in measured.items() if value is not None}
            tracker.log(stage, values, int(event["step"]), float(event["time"]))
        elif kind == "resumed":
            tracker.on_resume(int(event["step"]), float(event["time"]))
    except Exception as error:
        _print_note(f"{name} logging failed, tracker disabled ({_describe(error)}); training continues")
        return False
    return True


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:300]}"


def _print_note(line: str) -> None:
    with suppress(OSError):
        print(f"note: {line}", file=sys.stderr)


PROJECT = "modelwright"
MAX_PARAMS_PER_CALL = 100
"""Limit of mlflow."""


class MlflowTracker(Tracker):
    """One MLflow run."""

    def __init__(self, mlflow: Any, recipe: Recipe, folder: RunFolder) -> None:
        self._mlflow = mlflow
        run_id = _load_run_id(folder, "mlflow")
        if run_id is not None:
            with suppress(Exception):  # the run may be in another store
                mlflow.start_run(run_id=run_id)
                return
        run = mlflow.start_run(run_name=recipe.name)
        settings = list(flatten(recipe.model_dump(mode="json")))
        for start in range(0, len(settings), MAX_PARAMS_PER_CALL):
            mlflow.log_params(dict(settings[start : start + MAX_PARAMS_PER_CALL]))
        _save_run_id(folder, "mlflow", run.info.run_id)

    def log(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Log; each metric has its own steps."""
        self._mlflow.log_metrics({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class WandbTracker(Tracker):
    """One W&B run."""

    def __init__(self, wandb: Any, recipe: Recipe, folder: RunFolder) -> None:
        run_id = _run_id(folder, "wandb")
        self._stages: set[str] = set()
        self._run = wandb.init(
            project=PROJECT,
            name=recipe.name,
            id=run_id,
            resume="allow",
            dir=str(folder.path),
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # the journal has the output
        )

    def log(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Log with a step metric per stage: W&B's own step must not decrease, as it does with stages and resumes."""
        if stage not in self._stages:
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._stages.add(stage)
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class TrackioTracker(Tracker):
    """One trackio run."""

    def __init__(self, trackio: Any, recipe: Recipe, folder: RunFolder) -> None:
        name = f"{recipe.name}-{_run_id(folder, 'trackio')}"  # trackio identifies runs by name
        self._run = trackio.init(project=PROJECT, name=name, resume="allow", config=dict(flatten(recipe.model_dump())))

    def log(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Log; steps may decrease."""
        self._run.log({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Any, Recipe, RunFolder], Tracker]] = {
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
"""Trackers that need a package of their own, by its name."""


def _load_run_id(folder: RunFolder, tracker: str) -> str | None:
    """The run's id in a tracker, if it was logged there before."""
    path = _run_id_path(folder, tracker)
    return str(read_json(path)["run"]) if path.exists() else None


def _save_run_id(folder: RunFolder, tracker: str, run_id: str) -> str:
    _run_id_path(folder, tracker).parent.mkdir(exist_ok=True)
    write_json(_run_id_path(folder, tracker), {"run": run_id})
    return run_id


def _run_id_path(folder: RunFolder, tracker: str) -> Path:
    return folder.path / "trackers" / f"{tracker}.json"  # one file each: trackers run on their own threads


def _run_id(folder: RunFolder, tracker: str) -> str:
    """The run's id in a tracker that lets us choose; kept for resumes."""
    return _load_run_id(folder, tracker) or _save_run_id(folder, tracker, secrets.token_hex(4))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted key, such as sft.learning_rate; None is left out."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


CRC32C_POLYNOMIAL = 0x82F63B78
CRC32C_MASK = 0xA282EAD8
SESSION_START = 1
"""SessionLog.START: TensorBoard drops what was logged from this step on."""


class TensorBoardTracker(Tracker):
    """Appends to a TensorBoard event file in the run folder; it is complete after every call."""

    def __init__(self, folder: RunFolder) -> None:
        (folder.path / "tensorboard").mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.modelwright.{os.getpid()}"
        self._file = (folder.path / "tensorboard" / name).open("ab")
        self._write(_string_field(3, "brain.Event:2"), 0, time.time())

    def log(self, stage: str, values: Mapping[str, float], step: int, when: float) -> None:
        """Add the scalars of a step."""
        summaries = b"".join(
            _message_field(1, _string_field(1, f"{stage}/{name}") + b"\x15" + struct.pack("<f", value))
            for name, value in values.items()
        )
        self._write(_message_field(5, summaries), step, when)

    def on_resume(self, step: int, when: float) -> None:
        """Let TensorBoard drop the later steps."""
        self._write(_message_field(7, b"\x08" + _varint(SESSION_START)), step + 1, when)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, body: bytes, step: int, when: float) -> None:
        record = b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(step) + body
        length = struct.pack("<Q", len(record))
        self._file.write(length + _masked_crc32c(length) + record + _masked_crc32c(record))
        self._file.flush()


def _crc32c_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ CRC32C_POLYNOMIAL if crc & 1 else crc >> 1
        table.append(crc)
    return table


CRC32C_TABLE = _crc32c_table()


def _masked_crc32c(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + CRC32C_MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _message_field(field: int, body: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(body)) + body


def _string_field(field: int, text: str) -> bytes:
    return _message_field(field, text.encode())
