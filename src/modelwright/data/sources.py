"""Read rows by name from an embedded dataset, a file, a folder or the hub, and add derived columns."""

from __future__ import annotations

import ast
import difflib
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from modelwright.data import download, readers
from modelwright.data.readers import (
    EXAMPLES_SHOWN,
    ROW_FILE_SUFFIXES,
    InvalidRow,
    Row,
    SampleBy,
    describe_columns,
    invalid_row,
    read_file,
    row_suffix,
)
from modelwright.data.songs import generate_song_qa
from modelwright.errors import DataError, Problem, UsageError, first_line
from modelwright.recipe.sections import DataConfig
from modelwright.runs.caches import cache_dir, cache_lock
from modelwright.runs.folder import write_text

PYTHON_DOCS = "python-docs"
EXCLUDED_DIRS = frozenset({"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo", "ensurepip"})
"""Folders with little prose."""
MIN_DOCUMENT_CHARS = 200
"""Modules with fewer characters of docstrings are skipped."""


def python_docs() -> list[tuple[str, str]]:
    """Name and text of each document, in a fixed order; parsed once, then cached."""
    cache_file = cache_dir() / "corpus" / f"{PYTHON_DOCS}-{platform.python_version()}.json"
    if not cache_file.exists():  # parsing the standard library takes 4 CPU-seconds
        with cache_lock(cache_file):
            if not cache_file.exists():
                documents = [*_topics(), *_modules()]
                write_text(cache_file, json.dumps(documents, ensure_ascii=False) + "\n")
    return [(name, text) for name, text in json.loads(cache_file.read_text(encoding="utf-8"))]


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name].strip()


def _modules() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not EXCLUDED_DIRS & set(parts):
            name = ".".join(parts).removesuffix(".__init__")
            text = "\n\n".join(_docstrings(path, name))
            if len(text) >= MIN_DOCUMENT_CHARS:
                yield f"module {name}", text


def _docstrings(path: Path, module: str) -> Iterator[str]:
    """The docstrings of a module and its classes and functions, each under its name, in source order."""
    pending: list[tuple[ast.AST, str]] = [(ast.parse(path.read_bytes()), module)]
    while pending:
        node, name = pending.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and docstring.strip():
                yield f"{name}\n\n{docstring.strip()}"
            parts = [part for part in node.body if isinstance(part, ast.ClassDef | ast.FunctionDef)]
            pending = [(part, f"{name}.{part.name}") for part in parts] + pending


EMBEDDED_DIR = Path(__file__).parent / "embedded"
EMBEDDED_DATASETS = {
    "calendar": EMBEDDED_DIR / "calendar.jsonl",
    "calendar-held-out": EMBEDDED_DIR / "calendar_held_out.jsonl",
    "field-guide": EMBEDDED_DIR / "field_guide.jsonl",
    "field-guide-pairs": EMBEDDED_DIR / "field_guide_pairs.jsonl",
    "field-guide-editions": EMBEDDED_DIR / "field_guide_editions.jsonl",
    "songbook": EMBEDDED_DIR / "songbook.jsonl",
}
"""Datasets shipped with Modelwright."""
GENERATED_DATASETS = {PYTHON_DOCS: python_docs}
"""Datasets generated on this machine when they are read."""
CIFAR10_NAME = "cifar10"
"""Images that are downloaded if they are not local."""
DATASET_INFO = "dataset_info.json"
"""LLaMA-Factory's list of data sets."""
FACTORY_ROLES = {"query": "context", "response": "completion", "kto_tag": "label"}
"""Its names of columns that differ from our roles."""
FACTORY_TAGS = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system",
                "observation_tag": "tool", "function_tag": "function_call"}  # fmt: skip
FACTORY_KEYS = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
HUB_IDS = {
    "wikitext": "Salesforce/wikitext", "c4": "allenai/c4", "openwebtext": "Skylion007/openwebtext",
    "imdb": "stanfordnlp/imdb", "squad": "rajpurkar/squad", "ag_news": "fancyzhx/ag_news", "gsm8k": "openai/gsm8k",
    "wikipedia": "wikimedia/wikipedia", "samsum": "Samsung/samsum", "xsum": "EdinburghNLP/xsum",
}  # fmt: skip
"""Data sets that had no owner in their name when most scripts were written."""
FSCK_DIR = "lost+found"
"""Folder for what fsck recovers, on every new ext4 volume; only root can read it."""
GLOB_RE = re.compile(r"[*?\[]")
HELD_OUT_SPLITS = ("held_out", "validation", "test")
"""Names of the held-out split of a saved dataset."""
TRAIN_RE = re.compile(r"train(ing|set)?([^a-z]|$)", re.IGNORECASE)
"""Names of files that are trained on alone; trainer_state.json is none."""
HELD_OUT_RE = re.compile(r"(held[_-]?out|holdout|valid|validation|val|test|dev|eval)([^a-z]|$)", re.IGNORECASE)
"""Names of files that are not trained on where a folder has others."""


def iter_train_rows(data: DataConfig, recipe_dir: Path) -> Iterator[Row | InvalidRow]:
    """The training rows before the held-out split, and the invalid ones."""
    rows = iter_rows(data.source, data, recipe_dir)
    if data.max_rows and data.sample_evenly:
        all_rows = list(rows)
        count = min(data.max_rows, len(all_rows))
        return (all_rows[index * len(all_rows) // count] for index in range(count))
    return islice(rows, data.max_rows)


def iter_validation_rows(data: DataConfig, recipe_dir: Path) -> Iterator[Row | InvalidRow]:
    """The rows of validation_file or validation_split, if any, and the invalid ones."""
    if data.validation_file is not None:
        return iter_rows(data.validation_file, None, recipe_dir, sample_by=data.sample_by)
    if has_validation_rows(data, recipe_dir):
        return iter_rows(data.source, data.model_copy(update={"dataset_split": data.validation_split}), recipe_dir)
    return iter(())


def has_validation_rows(data: DataConfig, recipe_dir: Path) -> bool:
    """Whether held-out rows come from a file or a split of their own; local files have no splits."""
    if data.validation_file is not None or data.validation_split is None or data.train_file:
        return data.validation_file is not None
    path = local_path(data.source, recipe_dir)
    if path is not None and (path / "dataset_dict.json").is_file():
        return data.validation_split in json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    if not is_hub_name(data.source, recipe_dir):
        return False
    return data.validation_split in download.split_names(hub_id(data.source), data.dataset_config_name)


def read_train_rows(data: DataConfig, recipe_dir: Path) -> list[Row]:
    """All training rows; an unreadable row is an error."""
    return list(readers.raise_on_invalid_rows(iter_train_rows(data, recipe_dir)))


def local_path(name: str, recipe_dir: Path) -> Path | None:
    """The file or folder of that name, relative to the working directory or to the recipe."""
    for candidate in (Path(name), recipe_dir / name):
        if candidate.exists():
            return candidate
    return None


def is_embedded(name: str) -> bool:
    """Whether a dataset comes with Modelwright."""
    return name in EMBEDDED_DATASETS or name in GENERATED_DATASETS


def is_hub_name(name: str, recipe_dir: Path) -> bool:
    """Whether a name can only be a hub dataset: owner/name, and no local file of that name."""
    if is_embedded(name) or local_path(name, recipe_dir) is not None:
        return False
    has_form = re.fullmatch(r"[^./~][^/]*/[^/]+", name) is not None and not GLOB_RE.search(name)
    return name in HUB_IDS or (has_form and not row_suffix(Path(name)))


def hub_id(name: str) -> str:
    """The id of a hub dataset, with its owner."""
    return HUB_IDS.get(name, name)


def iter_rows(
    name: str,
    data: DataConfig | None,
    recipe_dir: Path,
    start: int = 0,
    stop: int | None = None,
    sample_by: SampleBy | None = None,
) -> Iterator[Row | InvalidRow]:
    """The rows of a source, or rows [start, stop) of it; `data` gives the configuration and split of a hub dataset."""
    if name in GENERATED_DATASETS:
        return islice((Row(where, {"text": text}) for where, text in GENERATED_DATASETS[name]()), start, stop)
    path = EMBEDDED_DATASETS.get(name) or local_path(name, recipe_dir)
    files = source_files(name, recipe_dir, held_out=data is None)
    if path is None and not files:
        if not is_hub_name(name, recipe_dir):
            hint = did_you_mean(name, recipe_dir, [*EMBEDDED_DATASETS, *GENERATED_DATASETS])
            raise UsageError(f"data: there is no file, folder or embedded set {name!r}{hint}")
        config, split = (data.dataset_config_name, data.dataset_split) if data else (None, "train")
        return _iter_dataset(download.load_hub_dataset(hub_id(name), config, split), name, start, stop)
    if path is not None and path.is_dir() and is_saved_dataset(path):
        return _iter_dataset(_load_saved_dataset(path, data), path.name, start, stop)
    if is_factory_source(files):
        return islice(_iter_dataset_info(files[0], data), start, stop)
    sample_by = sample_by or (data.sample_by if data else "document")
    return islice(chain.from_iterable(read_file(file, sample_by=sample_by) for file in files), start, stop)


def source_files(name: str, recipe_dir: Path, held_out: bool = False) -> list[Path]:
    """The files of an embedded set, a file, a folder or a pattern such as data/*.jsonl; none for other names."""
    path = EMBEDDED_DATASETS.get(name) or local_path(name, recipe_dir)
    if path is not None:
        return files_in(path, held_out) if path.is_dir() and not is_saved_dataset(path) else [path]
    for folder in (Path(), recipe_dir) if GLOB_RE.search(name) else ():
        start = Path(Path(name).anchor) if Path(name).is_absolute() else folder
        if files := sorted(file for file in start.glob(name.removeprefix(str(start))) if row_suffix(file)):
            return files
    return []


def is_factory_source(files: Sequence[Path]) -> bool:
    """Whether the files of a source are those that LLaMA-Factory's dataset_info.json lists."""
    return len(files) == 1 and files[0].name == DATASET_INFO and bool(factory_entries(files[0]))


def factory_entries(info: Path) -> dict[str, Any]:
    """The data sets of LLaMA-Factory's dataset_info.json; empty for other files of that name, such as of `datasets`."""
    try:
        entries = json.loads(info.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    entries = entries if isinstance(entries, dict) else {}
    is_entry = [isinstance(entry, dict) and bool(FACTORY_KEYS & set(entry)) for entry in entries.values()]
    return entries if is_entry and all(is_entry) else {}


def _iter_dataset_info(info: Path, data: DataConfig | None) -> Iterator[Row | InvalidRow]:
    """The rows of an entry of LLaMA-Factory's dataset_info.json, with its columns renamed to our roles."""
    entries = factory_entries(info)
    names = list(entries)
    name = data.dataset_config_name if data and data.dataset_config_name else names[0] if len(names) == 1 else None
    if name not in names:
        problem = f"it has no {name!r}" if name else "it names several data sets"
        raise UsageError(f"data: {info}: {problem}; data.dataset_config_name wants one of {', '.join(names)}")
    entry = entries[name]
    file = info.parent / str(entry.get("file_name"))
    if not file.exists():
        hub = next((entry[key] for key in ("hf_hub_url", "ms_hub_url") if entry.get(key)), None)
        hint = f"it is on the hub: data.dataset_name: {hub}" if hub else f"there is no file {file.name!r} beside it"
        raise UsageError(f"data: {info}: {name}: {hint}")
    columns = {str(column): FACTORY_ROLES.get(role, role) for role, column in (entry.get("columns") or {}).items()}
    tags = entry.get("tags") or {}
    for item in chain.from_iterable(map(read_file, files_in(file) if file.is_dir() else [file])):
        if isinstance(item, Row):
            others = {column: value for column, value in item.values.items() if column not in columns}
            renamed = {role: item.values.get(column) for column, role in columns.items()}
            item = Row(item.where, {**others, **{role: _retag(value, tags) for role, value in renamed.items()}})
        yield item


def _retag(value: Any, tags: Mapping[str, str]) -> Any:
    """Messages with the keys and role words that dataset_info.json declares, in ours; other values unchanged."""
    if isinstance(value, list):
        return [_retag(turn, tags) for turn in value]
    if not isinstance(value, dict) or not tags:
        return value
    words = {tags[tag]: role for tag, role in FACTORY_TAGS.items() if tag in tags}
    role_key, content_key = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    rest = {key: item for key, item in value.items() if key not in (role_key, content_key)}
    role = value.get(role_key)
    return {**rest, "role": words.get(str(role), role), "content": value.get(content_key)}


def did_you_mean(name: str, recipe_dir: Path, known: Iterable[str]) -> str:
    """A suggestion of similar names among the known ones and the files next to it; empty if there are none."""
    siblings = [path.name for path in (recipe_dir / name).parent.glob("*")]
    close = difflib.get_close_matches(Path(name).name, [*siblings, *known], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def files_in(path: Path, held_out: bool = False) -> list[Path]:
    """The files of a folder that are read, sorted by name: only train*, else all but test* and the like, if any are."""
    candidates = sorted(p for p in path.iterdir() if row_suffix(p))
    info = path / DATASET_INFO
    if info in candidates and factory_entries(info):
        return [info]
    candidates = [p for p in candidates if p != info]
    files = [p for p in candidates if row_suffix(p) != ".txt"] or candidates  # a text file next to rows is a readme
    if not files:
        wrote = "; .npy arrays of tokens are read only from a folder that modelwright data prepare TEXT -o FOLDER wrote"
        hint = wrote if any(path.glob("*.npy")) else ""
        raise UsageError(f"data: the folder {path} holds no {', '.join(ROW_FILE_SUFFIXES)} file{hint}")
    held_out_files = [p for p in files if HELD_OUT_RE.match(p.name)]
    files = [p for p in files if TRAIN_RE.match(p.name)] or [p for p in files if p not in held_out_files] or files
    files = held_out_files if held_out and held_out_files else files
    duplicates = same_rows_in_another_format(files)
    return [p for p in files if p not in duplicates]


PREFERRED_SUFFIXES = (".parquet", ".arrow")
"""Formats that are read rather than others with the same rows."""
MAX_COMPARED_FILES = 16
"""Folders of more files are not searched for the same rows in two formats."""


def same_rows_in_another_format(files: Sequence[Path]) -> dict[Path, Path]:
    """Files to leave out, since another one has the same rows in another format: a JSONL and the Parquet made of it."""
    if len({row_suffix(file) for file in files}) == 1 or len(files) > MAX_COMPARED_FILES:
        return {}
    stats = [(file, *((stat := file.stat()).st_size, stat.st_mtime_ns)) for file in files]
    return dict(_same_rows(tuple(sorted(stats, key=lambda item: row_suffix(item[0]) not in PREFERRED_SUFFIXES))))


@lru_cache(maxsize=64)
def _same_rows(stats: tuple[tuple[Path, int, int], ...]) -> list[tuple[Path, Path]]:
    """Pairs of a file and the earlier one with its rows; sizes and times only tell whether to compare again."""
    pairs: list[tuple[Path, Path]] = []
    for index, (file, *_) in enumerate(stats):
        earlier = (other for other, *_ in stats[:index] if row_suffix(other) != row_suffix(file))
        if same := next((other for other in earlier if _have_equal_rows(file, other)), None):
            pairs.append((file, same))
    return pairs


def _have_equal_rows(file: Path, other: Path) -> bool:
    """Whether two files have as many rows, with the same text in the columns that both have."""
    has_text = False
    for row, other_row in zip_longest(read_file(file), read_file(other)):
        if not isinstance(row, Row) or not isinstance(other_row, Row):
            return False
        common = [str(row.values[name]) for name in row.values if name in other_row.values]
        if not common or common != [str(other_row.values[name]) for name in row.values if name in other_row.values]:
            return False
        has_text = has_text or any(not text.isdigit() for text in common)  # equal numbers alone prove nothing
    return has_text


def notes_on_files(data: DataConfig, recipe_dir: Path) -> list[str]:
    """What a user should know of the files of a source: those that are not read."""
    path = local_path(data.source, recipe_dir)
    if path is None or not path.is_dir():
        return []
    if is_saved_dataset(path):
        splits = {file.parent.name for file in path.glob("*/state.json")} - {data.dataset_split, data.validation_split}
        how = "data.validation_split holds one of them out"
        return [f"not read in {path.name}: {', '.join(sorted(splits))} ({how})"] if splits else []
    same = same_rows_in_another_format(sorted(p for p in path.iterdir() if row_suffix(p) not in ("", ".txt")))
    notes = [f"{file.name} has the same rows as {other.name} and is not read" for file, other in same.items()]
    read = {*(files := files_in(path)), *same, path / DATASET_INFO}
    others = [] if is_factory_source(files) else [p for p in sorted(path.iterdir()) if p not in read and _has_rows(p)]
    unread = [f"{p.name}/" if p.is_dir() else p.name for p in others]
    more = f" and {len(unread) - EXAMPLES_SHOWN} more" if len(unread) > EXAMPLES_SHOWN else ""
    return [*notes, f"not read in {path.name}: {', '.join(unread[:EXAMPLES_SHOWN])}{more}"] if unread else notes


def _has_rows(path: Path) -> bool:
    """Whether a file or folder looks like one of rows, be it one that cannot be read."""
    if path.is_dir():
        is_data = not path.name.startswith(".") and path.name != FSCK_DIR
        return is_data and any(row_suffix(file) for file in path.iterdir() if file.is_file())
    return bool(row_suffix(path) or row_suffix(path.with_suffix("")))


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `datasets.save_to_disk`."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _load_saved_dataset(path: Path, data: DataConfig | None) -> Any:
    """A dataset written by `save_to_disk`, or the requested split of it."""
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # the library raises many types; each becomes one message
        message = f"this is no whole data set of save_to_disk ({first_line(error)[:200]})"
        raise DataError([Problem(path.name, message)]) from None
    if not isinstance(saved, DatasetDict):
        return saved
    split_names = (data.dataset_split,) if data else HELD_OUT_SPLITS
    split = next((name for name in split_names if name in saved), None)
    if split is None:
        wanted_splits = " or ".join(map(repr, split_names))
        raise UsageError(f"data: {path} has no split {wanted_splits}; its splits are {', '.join(saved)}")
    return saved[split]


def _iter_dataset(dataset: Any, name: str, start: int, stop: int | None) -> Iterator[Row | InvalidRow]:
    """Rows [start, stop) of a dataset, without reading those before."""
    stop = len(dataset) if stop is None else min(stop, len(dataset))
    number = start
    try:
        for number, values in enumerate(dataset.select(range(start, stop)) if start < stop else (), start + 1):
            yield Row(f"{name} row {number}", dict(values))
    except Exception as error:  # the library raises many types; each becomes one message
        yield InvalidRow(f"{name} row {number + 1}", f"this row cannot be read ({first_line(error)[:200]})", "", True)


PLACEHOLDER_RE = re.compile(r"\{([^{}]+)\}")


def add_derived_columns(rows: Iterable[Row | InvalidRow], data: DataConfig) -> Iterator[Row | InvalidRow]:
    """Add the columns of data.derived_columns; an existing column is kept. A row that lacks a column is invalid."""
    for row in rows:
        if isinstance(row, InvalidRow):
            yield row
            continue
        try:
            for source_row in generate_song_qa(row) if data.generate_qa == "songs" else (row,):
                values = dict(source_row.values)
                for name, template in data.derived_columns.items():
                    if name not in values:
                        values[name] = render_template(template, values, source_row.where)
                yield Row(source_row.where, values)
        except DataError as error:
            yield invalid_row(row, error.problems[0].message)


def render_template(template: str, values: Mapping[str, Any], where: str) -> str:
    """A template with each {column} replaced by the row's value."""
    if missing := [name for name in PLACEHOLDER_RE.findall(template) if values.get(name) is None]:
        state = "is empty" if missing[0] in values else "is not there"
        message = f"data.derived_columns asks for the column {missing[0]!r}, which {state}"
        raise DataError([Problem(where, f"{message}; {describe_columns(values)}")])
    return PLACEHOLDER_RE.sub(lambda match: str(values[match[1]]), template)
