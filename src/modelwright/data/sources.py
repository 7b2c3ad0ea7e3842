"""Read rows from wherever they are: an embedded set, a file, a folder or the hub, through one door."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from modelwright.data import corpus, hub
from modelwright.data.files import SUFFIXES, Fault, Row, read_file, strictly
from modelwright.errors import DataError, Problem, UsageError, first_line
from modelwright.recipe.schema import Data

HOME = Path(__file__).parent / "embedded"
EMBEDDED = {
    "field-guide": HOME / "field_guide.jsonl",
    "field-guide-pairs": HOME / "field_guide_pairs.jsonl",
    "field-guide-editions": HOME / "field_guide_editions.jsonl",
    "songbook": HOME / "songbook.jsonl",
}
"""Sets that come with Modelwright, with their file."""
GATHERED = {corpus.NAME: corpus.python_docs}
"""Sets that are gathered from this machine when they are read."""


HELD_OUT_SPLITS = ("held_out", "validation", "test")
"""What the held-out side of a stored set may be called."""


def training_rows(data: Data, beside: Path) -> Iterator[Row | Fault]:
    """The rows to train on, before anything is held out, and what could not be read."""
    return islice(read(data.dataset_name or data.train_file or "", data, beside), data.max_rows)  # without it, all


def validation_rows(data: Data, beside: Path) -> Iterator[Row | Fault]:
    """The rows of validation_file, where there is one, and what could not be read."""
    return read(data.validation_file, None, beside) if data.validation_file else iter(())


def read_training(data: Data, beside: Path) -> list[Row]:
    """All rows to train on; one that cannot be read is an error."""
    return list(strictly(training_rows(data, beside)))


def local_path(name: str, beside: Path) -> Path | None:
    """The file or folder that a name means, from where we stand or beside the recipe."""
    for candidate in (Path(name), beside / name):
        if candidate.exists():
            return candidate
    return None


def is_embedded(name: str) -> bool:
    """Whether a set comes with Modelwright."""
    return name in EMBEDDED or name in GATHERED


def is_hub_name(name: str, beside: Path) -> bool:
    """Whether a name can only mean a data set on the hub: owner/name, and nothing of that name here."""
    if is_embedded(name) or local_path(name, beside) is not None:
        return False
    return name.count("/") == 1 and Path(name).suffix not in SUFFIXES and not name.startswith((".", "/", "~"))


def read(name: str, data: Data | None, beside: Path, start: int = 0, stop: int | None = None) -> Iterator[Row | Fault]:
    """The rows of a source by its name, or some of them; `data` says which configuration and split of a hub set."""
    if name in GATHERED:
        return islice((Row(place, {"text": text}) for place, text in GATHERED[name]()), start, stop)
    path = EMBEDDED.get(name) or local_path(name, beside)
    if path is None:
        if not is_hub_name(name, beside):
            raise UsageError(_no_such_source(name, beside))
        config, split = (data.dataset_config_name, data.dataset_split) if data else (None, "train")
        return _rows_of(hub.load(name, config, split), name, start, stop)
    if path.is_dir() and is_stored_set(path):
        return _rows_of(_stored_set(path, data), path.name, start, stop)
    files = files_in(path) if path.is_dir() else [path]
    return islice(chain.from_iterable(map(read_file, files)), start, stop)


def _no_such_source(name: str, beside: Path) -> str:
    folder = (beside / name).parent
    around = [str(p.name) for p in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(Path(name).name, [*around, *EMBEDDED, *GATHERED], n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"data: there is no file, folder or embedded set {name!r}{hint}"


def files_in(path: Path) -> list[Path]:
    """The files of a folder that are read, in the order of their names: those called train where there are some."""
    found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    files = [p for p in found if p.suffix != ".txt"] or found  # a text file beside rows tells about them
    if not files:
        raise UsageError(f"data: the folder {path} holds no {', '.join(SUFFIXES)} file")
    return [p for p in files if p.stem.startswith("train")] or files


def is_stored_set(path: Path) -> bool:
    """Whether a folder is a data set that `save_to_disk` wrote."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _stored_set(path: Path, data: Data | None) -> Any:
    """A set that `save_to_disk` wrote, or the split of it that is wanted."""
    from datasets import DatasetDict, load_from_disk

    try:
        stored = load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds; each becomes one letter
        letter = f"this is no whole data set of save_to_disk ({first_line(error)[:200]})"
        raise DataError([Problem(path.name, letter)]) from None
    if not isinstance(stored, DatasetDict):
        return stored
    wanted = (data.dataset_split,) if data else HELD_OUT_SPLITS
    split = next((name for name in wanted if name in stored), None)
    if split is None:
        wish = " or ".join(map(repr, wanted))
        raise UsageError(f"data: {path} has no split {wish}; its splits are {', '.join(stored)}")
    return stored[split]


def _rows_of(stored: Any, name: str, start: int, stop: int | None) -> Iterator[Row | Fault]:
    """Rows of a stored set, from one number to another, without reading those before."""
    stop = len(stored) if stop is None else min(stop, len(stored))
    number = start
    try:
        for number, values in enumerate(stored.select(range(start, stop)) if start < stop else (), start + 1):
            yield Row(f"{name} row {number}", dict(values))
    except Exception as error:  # the library raises many kinds; each becomes one letter
        yield Fault(f"{name} row {number + 1}", f"this row cannot be read ({first_line(error)[:200]})", "", True)
