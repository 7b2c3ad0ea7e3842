"""Describe a prepare job: its config hash per step, its input slices and the store of finished tasks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xxhash

from modelwright.data import sources
from modelwright.data.packing import NDArray
from modelwright.data.readers import FileSlice, InvalidRow, Row, read_file
from modelwright.data.shards import MANIFEST, SPLITS, PackedDataset
from modelwright.errors import DataError, StorageError, UsageError, is_storage_failure
from modelwright.recipe.prepare_config import CleaningConfig, DedupConfig, PrepareConfig
from modelwright.recipe.sections import DataConfig
from modelwright.runs.folder import fsync_path, hash_file, read_json, write_json

PIPELINE_VERSION = 3
"""Raise it when the same settings would give other bytes."""
JOB_FILE = "job.json"
Assignment = Literal["split", "held_out"]


@dataclass(frozen=True)
class InputSlice:
    """A part of a source that one worker reads."""

    source: str
    """Name of the source in the recipe."""
    assignment: Assignment
    """Whether its documents are split, or all held out."""
    path: str | None
    """The file; None for a dataset that is opened by its name."""
    start: int = 0
    """First byte, row group or row."""
    stop: int | None = None
    """End (exclusive)."""
    row_offset: int = 0
    """Rows before it, for line numbers in messages."""
    max_rows: int | None = None
    """Limit on the rows read."""

    def rows(self, data: DataConfig, recipe_dir: Path) -> Iterator[Row | InvalidRow]:
        """Its rows, and the invalid ones."""
        if self.path is not None:
            rows = read_file(Path(self.path), FileSlice(self.start, self.stop, self.row_offset), data.sample_by)
        else:
            rows = sources.iter_rows(self.source, data, recipe_dir, self.start, self.stop)
        return sources.add_derived_columns(itertools.islice(rows, self.max_rows), data)


@dataclass(frozen=True)
class PrepareJob:
    """Inputs, settings, and a hashed key for each step."""

    folder: Path
    """Output folder; it contains the work folder."""
    data: DataConfig
    """The data sources."""
    settings: PrepareConfig
    """The prepare section of the recipe."""
    seed: int
    """Seed of the held-out split."""
    recipe_dir: Path
    """Base of relative paths."""
    slices: list[InputSlice]
    """Slices of the sources."""
    fingerprint: str
    """Hash of the contents of the sources."""
    tokenizer: str | None
    """Folder of the tokenizer; None to train one."""

    @classmethod
    def make(
        cls,
        folder: Path,
        data: DataConfig,
        settings: PrepareConfig,
        seed: int,
        recipe_dir: Path,
        tokenizer: Path | None,
    ) -> Self:
        """Read the sources once to slice and hash them."""
        slices, fingerprint = slice_inputs(data, recipe_dir)
        tokenizer_dir = str(tokenizer.resolve()) if tokenizer else None
        return cls(folder, data, settings, seed, recipe_dir, slices, fingerprint, tokenizer_dir)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the job that another process wrote."""
        stored = read_json(folder / "work" / JOB_FILE)
        return cls(
            folder=folder,
            data=DataConfig.model_validate(stored["data"]),
            settings=PrepareConfig.model_validate(stored["settings"]),
            seed=stored["seed"],
            recipe_dir=Path(stored["recipe_dir"]),
            slices=[InputSlice(**entry) for entry in stored["slices"]],
            fingerprint=stored["fingerprint"],
            tokenizer=stored["tokenizer"],
        )

    def write(self) -> None:
        """Write the job for the workers."""
        content = {"data": self.data.model_dump(mode="json"), "settings": self.settings.model_dump(mode="json"),
                "seed": self.seed, "recipe_dir": str(self.recipe_dir.resolve()),
                "slices": [asdict(input_slice) for input_slice in self.slices],
                "fingerprint": self.fingerprint, "tokenizer": self.tokenizer}  # fmt: skip
        write_json(self.store.folder / JOB_FILE, content)

    @property
    def store(self) -> TaskStore:
        """Finished tasks."""
        return TaskStore(self.folder / "work")

    def cleaned_arrays(self, name: str) -> list[NDArray]:
        """An array of the cleaned documents, by slice."""
        return [self.store.load_array(self.clean_key, index, name) for index in range(len(self.slices))]

    def cleaning_stats(self) -> list[dict[str, Any]]:
        """The stats of cleaning, by slice."""
        return [self.store.read_stats(self.clean_key, index) for index in range(len(self.slices))]

    @property
    def clean_key(self) -> str:
        """Key of the step that cleans slices and computes signatures."""
        rules = {name: getattr(self.settings, name) for name in CleaningConfig.model_fields}
        decontamination = (self.settings.decontaminate_against, self.settings.decontaminate_ngram)
        data = self.data
        reading = (data.text_column, data.split_by, data.max_rows, self.seed, data.sample_by, data.derived_columns)
        settings = (rules, decontamination, reading, self.settings.minhash_dedup)
        return f"clean-{hash_config(PIPELINE_VERSION, self.fingerprint, *settings)}"

    @property
    def dedup_key(self) -> str:
        """Key of the step that finds near-duplicates, one task per band."""
        dedup_settings = {name: getattr(self.settings, name) for name in DedupConfig.model_fields}
        return f"near_dedup-{hash_config(self.clean_key, dedup_settings)}"

    @property
    def assign_splits_key(self) -> str:
        """Key of the step that decides on each document."""
        settings = (self.seed, self.data.test_size.raw, self.data.validation_file)
        return f"assign_splits-{hash_config(self.dedup_key, *settings)}"

    @property
    def tokenizer_key(self) -> str:
        """Key of the step that trains a tokenizer."""
        return f"train_tokenizer-{hash_config(self.assign_splits_key, self._tokenizer_config)}"

    @property
    def tokenize_key(self) -> str:
        """Key of the step that tokenizes slices."""
        return f"tokenize-{hash_config(self.assign_splits_key, self._tokenizer_config)}"

    @property
    def _tokenizer_config(self) -> Any:
        if self.tokenizer is None:
            return {"train": self.settings.vocab_size, "megabytes": self.settings.tokenizer_sample_mb}
        return hash_file(Path(self.tokenizer) / "tokenizer.json")

    @property
    def source_weights(self) -> dict[str, float]:
        """The weight of each source of a mixture."""
        return {self.data.parts[name].source: weight for name, weight in self.data.weights.items()}

    @property
    def config_hash(self) -> str:
        """Hash of everything the shards depend on."""
        layout = (self.settings.sequence_length, self.settings.rows_per_shard, self.source_weights)
        return hash_config(self.tokenize_key, *layout)


def is_complete(job: PrepareJob) -> bool:
    """Whether the shards of this job exist, complete by their sizes."""
    path = job.folder / MANIFEST
    if not path.exists() or read_json(path).get("config") != job.config_hash:
        return False
    try:
        for split in SPLITS:
            PackedDataset.open(job.folder, split)
    except DataError:
        return False
    return True


SLICE_BYTES = 32 << 20
"""Bytes of a file per slice."""
SLICE_ROWS = 8192
"""Rows per slice of a dataset without files."""


def slice_inputs(data: DataConfig, recipe_dir: Path) -> tuple[list[InputSlice], str]:
    """All slices, and a hash of the contents; held-out files first, so that of duplicates the held-out one stays."""
    digest = xxhash.xxh3_128()
    if unused := [key for key in ("sample_evenly", "validation_split") if getattr(data, key)]:
        raise UsageError(f"data.{unused[0]}: prepare takes the first max_rows and test_size of them; leave it out")
    slices: list[InputSlice] = []
    names: list[tuple[str, Assignment]] = [(data.validation_file, "held_out")] if data.validation_file else []
    names += [(part.source, "split") for part in data.parts.values()]
    for name, assignment in names:
        digest.update(f"\0{name}\0{assignment}".encode())
        source_slices = _slice_source(InputSlice(name, assignment, None), data, recipe_dir, digest)
        if data.max_rows and assignment == "split":
            source_slices = [replace(source_slices[0], stop=None, max_rows=data.max_rows)]
        slices += source_slices
    return slices, digest.hexdigest()


def _slice_source(input_slice: InputSlice, data: DataConfig, recipe_dir: Path, digest: Any) -> list[InputSlice]:
    files = sources.source_files(input_slice.source, recipe_dir)
    has_no_files = input_slice.source in sources.GENERATED_DATASETS or not files or files[0].is_dir()
    if has_no_files or sources.is_factory_source(files):
        return _slice_rows(input_slice, data, recipe_dir, digest)
    file_slices = [_slice_file(replace(input_slice, path=str(file.resolve())), file, digest)
                   for file in files]  # fmt: skip
    return list(itertools.chain.from_iterable(file_slices))


def _slice_rows(input_slice: InputSlice, data: DataConfig, recipe_dir: Path, digest: Any) -> list[InputSlice]:
    """Slice a dataset without files; it is read once to count its rows."""
    count = 0
    for item in sources.iter_rows(input_slice.source, data, recipe_dir):
        count += 1
        digest.update(repr(item).encode("utf-8", "replace"))
    starts = range(0, max(1, count), SLICE_ROWS)
    return [replace(input_slice, start=start, stop=start + SLICE_ROWS, row_offset=start) for start in starts]


def _slice_file(input_slice: InputSlice, path: Path, digest: Any) -> list[InputSlice]:
    digest.update(f"\0{path.name}\0".encode())
    boundaries, lines, position = [(0, 0)], 0, 0
    with path.open("rb") as file:
        while chunk := file.read(SLICE_BYTES):
            digest.update(chunk)
            position += len(chunk)
            # the line with the last byte of this chunk belongs to this slice
            boundaries.append((position, lines + chunk[:-1].count(b"\n") + 1))
            lines += chunk.count(b"\n")
    if path.suffix == ".parquet":
        return _slice_parquet(input_slice, path)
    if path.suffix != ".jsonl" or len(boundaries) < 3:
        return [input_slice]
    return [replace(input_slice, start=start, stop=stop, row_offset=row_offset)
            for (start, row_offset), (stop, _) in itertools.pairwise(boundaries)]  # fmt: skip


def _slice_parquet(input_slice: InputSlice, path: Path) -> list[InputSlice]:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        return [input_slice]  # reading it will report the error
    slices, start, size, row_offset, rows = [], 0, 0, 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size, rows = size + group.total_byte_size, rows + group.num_rows
        if size >= SLICE_BYTES or number == metadata.num_row_groups - 1:
            slices.append(replace(input_slice, start=start, stop=number + 1, row_offset=row_offset))
            start, size, row_offset = number + 1, 0, rows
    return slices or [input_slice]


STATS_FILE = "stats.json"


def hash_config(*values: Any) -> str:
    """Hash of JSON-like values."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    return xxhash.xxh3_64_hexdigest(text.encode())


@dataclass(frozen=True)
class TaskStore:
    """Finished tasks on disk; each is complete or absent."""

    folder: Path
    """The work folder."""

    def task_dir(self, step: str, number: int = 0) -> Path:
        """Folder of one task."""
        return self.folder / step / f"{number:05d}"

    def is_done(self, step: str, number: int = 0) -> bool:
        """Whether a task is finished."""
        return self.task_dir(step, number).is_dir()

    def read_stats(self, step: str, number: int = 0) -> dict[str, Any]:
        """Stats of a task."""
        stats: dict[str, Any] = read_json(self.task_dir(step, number) / STATS_FILE)
        return stats

    def load_array(self, step: str, number: int, name: str) -> NDArray:
        """A memory-mapped array of a task."""
        return np.lib.format.open_memmap(self.task_dir(step, number) / f"{name}.npy", mode="r")

    @contextmanager
    def write_task(self, step: str, number: int = 0) -> Iterator[Path]:
        """A folder to write a task into; it is renamed and synced when the block ends without an error."""
        final = self.task_dir(step, number)
        partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            for path in partial.iterdir():
                fsync_path(path)
            fsync_path(partial)
            if final.exists():  # another worker was faster, with the same bytes
                shutil.rmtree(partial)
                return
            partial.rename(final)
            fsync_path(final.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_storage_failure(error):
                raise StorageError(f"{final}: {error.strerror}; the same command resumes once there is space") from None
            raise


def save_array(folder: Path, name: str, array: NDArray) -> None:
    """Write an array of a task."""
    with (folder / f"{name}.npy").open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def save_stats(folder: Path, stats: dict[str, Any]) -> None:
    """Write the stats of a task."""
    (folder / STATS_FILE).write_text(json.dumps(stats, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
