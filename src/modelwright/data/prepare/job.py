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
from modelwright.data.prepare.dedup import NDArray
from modelwright.data.readers import FileSlice, InvalidRow, Row, read_file
from modelwright.data.shards import MANIFEST, SPLITS, PackedDataset
from modelwright.errors import DataError, StorageError, is_storage_failure
from modelwright.recipe.schema import DataConfig
from modelwright.recipe.sections import CleaningConfig, DedupConfig, PrepareConfig
from modelwright.runs.folder import fsync_path, hash_file, read_json, write_json

PIPELINE_VERSION = 2
"""Raised when the same wish would give other bytes."""
JOB_FILE = "job.json"


@dataclass(frozen=True)
class PrepareRequest:
    """What is asked of a preparation."""

    data: DataConfig
    """What is read."""
    settings: PrepareConfig
    """How it is prepared."""
    seed: int
    """Decides what is held out."""
    recipe_dir: Path
    """Where relative paths may point."""
    tokenizer: Path | None
    """Folder of the tokenizer; without one, it is trained."""


@dataclass(frozen=True)
class InputSlice:
    """A part of a source that one worker reads."""

    source: str
    """The source as the recipe names it."""
    assignment: Assignment
    """Whether its documents are split, or all held out."""
    path: str | None
    """The file, where it is one; else the whole set is opened by its name."""
    start: int = 0
    """First byte, row group or row."""
    stop: int | None = None
    """Where it ends."""
    row_offset: int = 0
    """Rows before it, for naming places."""
    max_rows: int | None = None
    """Read no more rows than this."""

    def rows(self, data: DataConfig, recipe_dir: Path) -> Iterator[Row | InvalidRow]:
        """Its rows, and what cannot be read."""
        if self.path is not None:
            rows = read_file(Path(self.path), FileSlice(self.start, self.stop, self.row_offset))
        else:
            rows = sources.iter_rows(self.source, data, recipe_dir, self.start, self.stop)
        return itertools.islice(rows, self.max_rows)

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        return asdict(self)


@dataclass(frozen=True)
class PrepareJob:
    """Sources, settings and the names of the steps."""

    folder: Path
    """Where the shards go; the work folder lies in it."""
    data: DataConfig
    """What is read."""
    settings: PrepareConfig
    """How it is prepared."""
    seed: int
    """Decides what is held out."""
    recipe_dir: Path
    """Where relative paths may point."""
    slices: list[InputSlice]
    """The pieces of the sources."""
    fingerprint: str
    """Hash of what stands in the sources."""
    tokenizer: str | None
    """Folder of the tokenizer; without one, it is trained."""

    @classmethod
    def make(cls, request: PrepareRequest, folder: Path) -> Self:
        """Look at the sources and divide them."""
        inputs = slice_inputs(request.data, request.recipe_dir)
        tokenizer = str(request.tokenizer.resolve()) if request.tokenizer else None
        common = (folder, request.data, request.settings, request.seed, request.recipe_dir)
        return cls(*common, inputs.slices, inputs.fingerprint, tokenizer)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The plan that another process wrote."""
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
        """Write it down for the workers."""
        content = {"data": self.data.model_dump(mode="json"), "settings": self.settings.model_dump(mode="json"),
                "seed": self.seed, "recipe_dir": str(self.recipe_dir.resolve()),
                "slices": [input_slice.as_json() for input_slice in self.slices],
                "fingerprint": self.fingerprint, "tokenizer": self.tokenizer}  # fmt: skip
        write_json(self.store.folder / JOB_FILE, content)

    @property
    def store(self) -> TaskStore:
        """Where pieces lie until all is done."""
        return TaskStore(self.folder / "work")

    @property
    def clean_key(self) -> str:
        """The step that cleans and signs the documents of a unit."""
        rules = {name: getattr(self.settings, name) for name in CleaningConfig.model_fields}
        decontamination = (self.settings.decontaminate_against, self.settings.decontaminate_ngram)
        reading = (self.data.text_column, self.data.split_by, self.data.max_rows, self.seed)
        return f"clean-{hash_config(PIPELINE_VERSION, self.fingerprint, rules, decontamination, reading, self.settings.minhash_dedup)}"

    @property
    def dedup_key(self) -> str:
        """The step that finds the near-duplicates of a band."""
        dedup_settings = {name: getattr(self.settings, name) for name in DedupConfig.model_fields}
        return f"near_dedup-{hash_config(self.clean_key, dedup_settings)}"

    @property
    def assign_splits_key(self) -> str:
        """The step that says what becomes of each document."""
        return f"assign_splits-{hash_config(self.dedup_key, self.seed, self.data.test_size.raw, self.data.validation_file)}"

    @property
    def tokenizer_key(self) -> str:
        """The step that trains a tokenizer."""
        return f"train_tokenizer-{hash_config(self.assign_splits_key, self._tokenizer_config)}"

    @property
    def tokenize_key(self) -> str:
        """The step that tokenizes the documents of a unit."""
        return f"tokenize-{hash_config(self.assign_splits_key, self._tokenizer_config)}"

    @property
    def _tokenizer_config(self) -> Any:
        if self.tokenizer is None:
            return {"train": self.settings.vocab_size, "megabytes": self.settings.tokenizer_sample_mb}
        return hash_file(Path(self.tokenizer) / "tokenizer.json")

    @property
    def config_hash(self) -> str:
        """Hash of everything that decides the shards."""
        return hash_config(
            self.tokenize_key, self.settings.sequence_length, self.settings.rows_per_shard, self.data.mix
        )


def is_complete(job: PrepareJob) -> bool:
    """Whether the very shards of a plan are there, whole as far as their sizes tell."""
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
"""Bytes of a file in one unit."""
SLICE_ROWS = 8192
"""Rows in one unit of a set that has no files of its own."""
Assignment = Literal["split", "held_out"]


@dataclass(frozen=True)
class InputSlices:
    """Units of all sources, and a hash of what stands in them."""

    slices: list[InputSlice]
    """In the order of their documents."""
    fingerprint: str
    """Changes when any byte of any source does."""


def slice_inputs(data: DataConfig, recipe_dir: Path) -> InputSlices:
    """Every unit of a recipe's data; held-out files first, so that of two alike the held-out one is kept."""
    digest = xxhash.xxh3_128()
    slices: list[InputSlice] = []
    names: list[tuple[str, Assignment]] = [(data.validation_file, "held_out")] if data.validation_file else []
    names += [(name, "split") for name in ([*data.mix] or [data.source])]
    for name, assignment in names:
        digest.update(f"\0{name}\0{assignment}".encode())
        source_slices = _slice_source(InputSlice(name, assignment, None), data, recipe_dir, digest)
        slices += (
            [replace(source_slices[0], stop=None, max_rows=data.max_rows)]
            if data.max_rows and assignment == "split"
            else source_slices
        )
    return InputSlices(slices, digest.hexdigest())


def _slice_source(input_slice: InputSlice, data: DataConfig, recipe_dir: Path, digest: Any) -> list[InputSlice]:
    path = sources.EMBEDDED_DATASETS.get(input_slice.source) or sources.local_path(input_slice.source, recipe_dir)
    if (
        path is None
        or input_slice.source in sources.GENERATED_DATASETS
        or (path.is_dir() and sources.is_saved_dataset(path))
    ):
        return _slice_rows(input_slice, data, recipe_dir, digest)
    files = sources.files_in(path) if path.is_dir() else [path]
    return [
        file_slice
        for file in files
        for file_slice in _slice_file(replace(input_slice, path=str(file.resolve())), file, digest)
    ]


def _slice_rows(input_slice: InputSlice, data: DataConfig, recipe_dir: Path, digest: Any) -> list[InputSlice]:
    """Sets without files of their own are counted by reading them once."""
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
            # the line that holds the last byte of this piece belongs to the unit before the next piece
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
        return [input_slice]  # reading it will tell what is wrong
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
    """A hash of plain values."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    return xxhash.xxh3_64_hexdigest(text.encode())


@dataclass(frozen=True)
class TaskStore:
    """Where pieces lie."""

    folder: Path
    """The work folder."""

    def task_dir(self, step: str, number: int = 0) -> Path:
        """The folder of one piece."""
        return self.folder / step / f"{number:05d}"

    def is_done(self, step: str, number: int = 0) -> bool:
        """Whether a piece is finished."""
        return self.task_dir(step, number).is_dir()

    def read_stats(self, step: str, number: int = 0) -> dict[str, Any]:
        """What a piece says about itself."""
        stats: dict[str, Any] = read_json(self.task_dir(step, number) / STATS_FILE)
        return stats

    def load_array(self, step: str, number: int, name: str) -> NDArray:
        """An array of a piece, mapped, not read."""
        return np.lib.format.open_memmap(self.task_dir(step, number) / f"{name}.npy", mode="r")

    @contextmanager
    def write_task(self, step: str, number: int = 0) -> Iterator[Path]:
        """A folder to write a piece into; it gets its name, and lasts, when the block ends without an error."""
        final = self.task_dir(step, number)
        partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            for path in partial.iterdir():
                fsync_path(path)
            fsync_path(partial)
            if final.exists():  # another worker was faster; its bytes are the same
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
    """Write an array into a piece that is being made."""
    with (folder / f"{name}.npy").open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def save_stats(folder: Path, stats: dict[str, Any]) -> None:
    """Write what a piece says about itself."""
    (folder / STATS_FILE).write_text(json.dumps(stats, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
