"""The run folder: one place that knows every name in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from modelwright.errors import Refused, StorageError, UsageError, is_storage_failure


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
        """Batch, steps, precision and their reasons, for each stage; foreseen beside measured."""
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
    def history(self) -> Path:
        """Loss and learning rate step by step, and every measurement."""
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
        """The newest checkpoints and the best; damaged ones in set-aside."""
        return self.stage(stage) / "checkpoints"

    def model(self, stage: str) -> Path:
        """A folder that from_pretrained reads, or an adapter, with its card."""
        return self.stage(stage) / "model"

    def trunk(self, stage: str) -> Path:
        """What the frozen layers say, where memory is too small for it."""
        return self.stage(stage) / "trunk"

    def reference(self, stage: str) -> Path:
        """How likely the answers of preferences were before training."""
        return self.stage(stage) / "reference"

    def memory(self, stage: str) -> Path:
        """Where the memory of one step went, where the recipe asks for it."""
        return self.stage(stage) / "memory.json"

    def trial(self, stage: str) -> Path:
        """Whether fp8 was worth it, as found before the first step, where the recipe asks for fp8."""
        return self.stage(stage) / "fp8.json"

    def rows_at_once(self, stage: str) -> Path:
        """By rank, how many rows its device takes, where more did not fit the memory of one among several."""
        return self.stage(stage) / "rows_at_once"

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
        """Make the folder, and find out now rather than at the first checkpoint that it cannot be written."""
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

    def refuse_links(self) -> None:
        """Refuse a folder with a link that leads out of it: what is written there would land elsewhere.

        A run folder may come from others, by mail or from a shared volume; best_model is a link of our own, inside.
        """
        inside = self.path.resolve()
        waiting = [self.path] if self.path.is_dir() else []
        while waiting:
            with suppress(PermissionError), os.scandir(waiting.pop()) as entries:  # nor can anything be written there
                for entry in entries:
                    if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(inside):
                        raise Refused(
                            f"{entry.path} is a link that leads out of the run folder, and nothing is written through "
                            "one; take it away, or choose another output_dir"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))


def open_run(path: str | Path) -> RunFolder:
    """Find a run that exists, by its folder or by its name under runs/."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / "journal.jsonl").exists():
            return RunFolder(candidate)
    raise UsageError(f"{path} is no run folder (no journal.jsonl in it); start one with: modelwright run RECIPE")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one movement: a reader sees the old one or the new one, never half."""
    write_text(path, _as_bytes(value).decode())


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file that ends with a hash over itself: a flipped bit anywhere in it shows."""
    write_json(path, {**value, "seal": _seal(value)})


def is_sealed(path: Path) -> bool:
    """Whether a file is, byte for byte, one that `write_sealed` wrote."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
        seal = value.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return bool(seal == _seal(value)) and raw == _as_bytes({**value, "seal": seal})


def is_without_seal(path: Path, *names: str) -> bool:
    """Whether a file is as `write_json` writes an object of these names: an earlier version set no seal on it."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
        return isinstance(value, dict) and value.keys() <= set(names) and raw == _as_bytes(value)
    except (OSError, ValueError):
        return False


def _seal(value: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one movement."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, under a temporary name; when the block ends it lasts, and takes its place in one movement."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        if is_storage_failure(error):
            letter = "nothing that was there is lost, and the same command goes on once there is room"
            raise StorageError(f"{path}: {error.strerror}; {letter}") from None
        raise


def read_json(path: Path) -> Any:
    """Read a JSON file that this program wrote."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise StorageError(
            f"{path}: this file is damaged (it is no JSON any more); delete it, and the same command makes it again"
        ) from None


def _as_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """The xxh3 hash of a file's bytes."""
    digest, piece = xxhash.xxh3_128(), bytearray(1 << 20)
    view = memoryview(piece)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(view[:size])
    return digest.hexdigest()
