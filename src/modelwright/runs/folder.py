"""The run folder: every path in it, atomic and checksummed writes, and the lock that admits one writer."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from modelwright import __version__
from modelwright.errors import NotRegularFile, Refused, StorageError, UsageError, is_storage_failure
from modelwright.runs.journal import open_regular, read

RUN_FORMAT = 2
"""Version of the files in a run folder, written in the journal's "run" events; other versions are refused."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its recipe, plan, journal, checkpoints, verdicts and comparison."""

    path: Path
    """The folder itself."""

    @property
    def recipe(self) -> Path:
        """The recipe as it was run, everything resolved; itself a recipe that runs."""
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """Batch, steps, precision and their reasons, for each stage; predicted and measured."""
        return self.path / "plan.json"

    @property
    def journal(self) -> Path:
        """Everything that happened, one JSON object a line; never rewritten."""
        return self.path / "journal.jsonl"

    @property
    def report(self) -> Path:
        """One page with all of it, which opens from disk."""
        return self.path / "report.html"

    @property
    def lock(self) -> Path:
        """Who works in this folder now."""
        return self.path / ".lock"

    @property
    def best_model(self) -> Path:
        """The model whose gate is open: a link to a stage's model."""
        return self.path / "best_model"

    @property
    def last_model(self) -> Path:
        """The model of the stage that was judged last, also where its gate is closed: a link."""
        return self.path / "last_model"

    @property
    def history(self) -> Path:
        """By epoch and by step: loss, learning rate, accuracy of images, and every measurement (of an epoch the last,
        at `eval_step`)."""
        return self.path / "training_history.json"

    @property
    def summary(self) -> Path:
        """Settings and results, with the seconds by cause."""
        return self.path / "training_summary.json"

    @property
    def demo_outputs(self) -> Path:
        """The same questions answered before and after, as JSON and Markdown."""
        return self.path / "demo_outputs"

    @property
    def lineage(self) -> Path:
        """Which model came from which, and which closed gates a person accepted."""
        return self.path / "lineage.json"

    @property
    def packed(self) -> Path:
        """Shards that the stage prepare leaves."""
        return self.data("packed")

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that the stage prepare trains or takes from the model."""
        return self.packed / "tokenizer"

    def data(self, name: str) -> Path:
        """What a stage, or prepare, made of the data."""
        return self.path / "data" / name

    def data_manifest(self, stage: str) -> Path:
        """What the model saw: rows, tokens, what was cut or dropped, the fingerprint."""
        return self.data(stage) / "manifest.json"

    def stage(self, name: str) -> Path:
        """Everything of one stage."""
        return self.path / "stages" / name

    def checkpoints(self, stage: str) -> Path:
        """The newest checkpoints and the best; damaged ones in corrupt."""
        return self.stage(stage) / "checkpoints"

    def model(self, stage: str) -> Path:
        """A folder that from_pretrained reads, or an adapter, with its card."""
        return self.stage(stage) / "model"

    def lora_base(self, stage: str) -> Path:
        """The full model that a LoRA adapter was trained on, where no other folder holds it: merged or resized."""
        return self.stage(stage) / "base"

    def frozen_cache(self, stage: str) -> Path:
        """Cached outputs of the frozen layers, where memory is too small for them."""
        return self.stage(stage) / "frozen_cache"

    def judged_model(self, stage: str) -> Path:
        """The weights whose answers are judged during training."""
        return self.stage(stage) / "judged_model"

    def ref_log_probs(self, stage: str) -> Path:
        """Log-probabilities of the preference answers under the reference model."""
        return self.stage(stage) / "ref_log_probs"

    def memory_profile(self, stage: str) -> Path:
        """Memory of one step by component, where profile_memory is set."""
        return self.stage(stage) / "memory_profile.json"

    def fp8_trial(self, stage: str) -> Path:
        """Result of the fp8 trial before the first step, where the recipe asks for fp8."""
        return self.stage(stage) / "fp8_trial.json"

    def micro_batch(self, stage: str) -> Path:
        """By rank, the micro-batch that fits, where a larger one ran out of memory."""
        return self.stage(stage) / "micro_batch"

    def result(self, stage: str) -> Path:
        """Written last: a stage with a result is finished."""
        return self.stage(stage) / "result.json"

    def gate(self, stage: str) -> Path:
        """Every metric, its limit and the verdict."""
        return self.path / "gates" / f"{stage}.json"

    def evaluation(self, name: str) -> Path:
        """What evaluate measured of one model."""
        return self.path / "evaluations" / f"{name}.json"

    def create(self) -> None:
        """Create the folder and check that it can be written, before the first checkpoint needs it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"ok")
            probe.unlink()
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(
                f"{self.path}: the run folder cannot be written ({reason}); choose another output_dir"
            ) from None
        for link in (self.best_model, self.last_model):
            if link.is_dir() and not link.is_symlink():
                raise Refused(f"{link} is a folder where a run has a link to its model; delete this copy of the model")

    def format_problem(self) -> str | None:
        """Why this version cannot use the folder: its first start was by a version with another RUN_FORMAT."""
        events = read(self.journal) if self.journal.is_file() else iter(())
        start = next((event for event in events if event.get("event") == "run"), {"run_format": RUN_FORMAT})
        if start.get("run_format") == RUN_FORMAT:
            return None
        version = str(start.get("modelwright", "0.1"))[:20]
        return (
            f"{self.path} was written by modelwright {version}; modelwright {__version__} cannot continue or read it: "
            f"choose another output_dir, or use modelwright {version}"
        )

    def check_format(self) -> None:
        """Refuse a folder that another version wrote."""
        if problem := self.format_problem():
            raise Refused(problem)

    def reject_unsafe_files(self) -> None:
        """Refuse a folder with a symlink that leads out of it, where what is written would land elsewhere, or with a
        FIFO or device, which would block.

        A run folder may come from others, by mail or from a shared volume; best_model is our own symlink, inside.
        """
        root = self.path.resolve()
        pending = [self.path] if self.path.is_dir() else []
        while pending:
            with suppress(PermissionError), os.scandir(pending.pop()) as entries:  # not writable either
                for entry in entries:
                    if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(root):
                        raise Refused(
                            f"{entry.path} is a link that leads out of the run folder, and nothing is written through "
                            "one; delete it, or choose another output_dir"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                    elif not (entry.is_symlink() or entry.is_file() or Path(entry.path).is_socket()):
                        raise NotRegularFile(entry.path)


def open_run(path: str | Path) -> RunFolder:
    """A run that exists, by its folder or by its name under runs/."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / "journal.jsonl").exists():
            folder = RunFolder(candidate)
            folder.check_format()
            return folder
    raise UsageError(f"{path} is no run folder (no journal.jsonl in it); start one with: modelwright run RECIPE")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically: a reader sees the old one or the new one."""
    write_text(path, _as_bytes(value).decode())


def write_json_with_checksum(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file that ends with a checksum over itself, so that any flipped bit is detected."""
    write_json(path, {**value, "checksum": _checksum(value)})


def has_valid_checksum(path: Path) -> bool:
    """Whether a file is, byte for byte, one that `write_json_with_checksum` wrote."""
    try:
        raw = read_regular(path)
        value = json.loads(raw)
        checksum = value.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return bool(checksum == _checksum(value)) and raw == _as_bytes({**value, "checksum": checksum})


def _checksum(value: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write under a temporary name; after the block it is synced to disk and renamed to its own name."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        if is_storage_failure(error):
            advice = "nothing that was there is lost, and rerunning the same command resumes once there is space"
            raise StorageError(f"{path}: {error.strerror}; {advice}") from None
        raise


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file; OSError for anything else."""
    with open_regular(path) as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Read a JSON file that modelwright wrote."""
    try:
        return json.loads(read_regular(path))
    except (ValueError, RecursionError):
        raise StorageError(
            f"{path}: this file is damaged (not valid JSON); delete it, and the same command makes it again"
        ) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or holds anything else."""
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _as_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


def fsync_path(path: Path) -> None:
    """Sync a file's bytes, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


HASH_THREADS = 4
"""Files hashed at once."""
CLOCK_NANOSECONDS = 50_000_000
"""A file changed so shortly ago may change again without another time of change: kernels count in steps of 10 ms."""


def hash_file(path: Path) -> str:
    """The xxh3 hash of a file's bytes."""
    digest, piece = xxhash.xxh3_128(), bytearray(1 << 20)
    view = memoryview(piece)
    with open_regular(path) as file:
        while size := file.readinto(piece):
            digest.update(view[:size])
    return digest.hexdigest()


_HASHES: dict[tuple[Path, int, int, int, int], str] = {}
_HASH_LOCKS: dict[Path, threading.Lock] = {}


def hash_files(paths: Sequence[Path]) -> dict[Path, str]:
    """The hashes of several files, read in threads; a file that this process has hashed and nobody changed since is not
    read again: the next stage, its gate and the answers all ask for the hash of the same model."""

    def hash_once(path: Path) -> str:
        with _HASH_LOCKS.setdefault(path.absolute(), threading.Lock()):
            info, now = path.stat(), time.time_ns()
            key = path.absolute(), info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
            digest = _HASHES.get(key) or hash_file(path)
            if max(info.st_mtime_ns, info.st_ctime_ns) < now - CLOCK_NANOSECONDS:
                _HASHES[key] = digest
            return digest

    with ThreadPoolExecutor(HASH_THREADS) as executor:
        return dict(zip(paths, executor.map(hash_once, paths), strict=True))


def hash_weights_ahead(find_folders: Callable[[], Iterable[Path]]) -> None:
    """Hash the weights of a model in a thread while libraries are imported, so that `hash_files` has the hashes and the
    page cache the files; only if one of the folders is a model, since the files of another would be read for nothing.
    """

    def hash_weights() -> None:
        with suppress(Exception):  # errors are reported where the model is loaded
            models = {folder.resolve() for folder in find_folders() if (folder / "config.json").is_file()}
            hash_files([path for path in next(iter(models)).glob("*.safetensors") if len(models) == 1])

    with suppress(RuntimeError):  # no thread can be started, which the run reports
        threading.Thread(target=hash_weights, name="hash-weights", daemon=True).start()


LOCK_HEARTBEAT_INTERVAL = 0.5
STALE_LOCK_SECONDS = 3.0


@contextmanager
def run_lock(path: Path) -> Iterator[str | None]:
    """Hold the lock of a run during the block; yields a line about a dead holder whose lock was taken over, if any."""
    if path.exists() and not path.is_file():
        raise NotRegularFile(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"{path}: the lock cannot be written ({error.strerror})") from None
    try:
        previous = _acquire(descriptor, path)
        stop = threading.Event()
        heartbeat = threading.Thread(target=_heartbeat_loop, args=(descriptor, stop), daemon=True, name="run-lock")
        _write_holder(descriptor, 0)
        heartbeat.start()
        try:
            yield previous
        finally:
            stop.set()
            heartbeat.join()
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path) -> str | None:
    locked = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _read_holder(path)) from None
    except OSError:
        locked = False  # no locks on this file system: the heartbeat alone decides
    holder = _read_holder(path)
    if not holder:
        return None
    if not locked or holder.get("host") != socket.gethostname():
        deadline = time.monotonic() + STALE_LOCK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LOCK_HEARTBEAT_INTERVAL / 2)
            if _read_holder(path).get("beats") != holder.get("beats"):
                raise _in_use(path, holder)
    return f"process {holder.get('pid')} on {holder.get('host')} died without finishing; taking over its lock"


def _in_use(path: Path, holder: dict[str, object]) -> Refused:
    who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another process"
    return Refused(f"{path.parent} is in use by {who}; wait for it, stop it, or choose another output_dir")


def _read_holder(path: Path) -> dict[str, object]:
    try:
        value = json.loads(read_regular(path) or b"{}")  # opened again: a network file system then asks the server
    except (ValueError, OSError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_holder(descriptor: int, beats: int) -> None:
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "beats": beats})
    os.pwrite(descriptor, text.ljust(256).encode(), 0)


def _heartbeat_loop(descriptor: int, stop: threading.Event) -> None:
    beats = 0
    while not stop.wait(LOCK_HEARTBEAT_INTERVAL):
        beats += 1
        try:
            _write_holder(descriptor, beats)
        except OSError:
            return  # a full disk is reported by the checkpoint, not by the lock
