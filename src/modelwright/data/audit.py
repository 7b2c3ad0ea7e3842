"""Audit, render and convert data before training on it; needs no torch."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np

from modelwright.data import readers, sources
from modelwright.data.chat import ConversationDataset, group_split, read_splits
from modelwright.data.packing import NDArray, pack_bfd
from modelwright.data.preferences import PreferenceDataset
from modelwright.data.prepare import dedup
from modelwright.data.readers import InvalidRow, Quarantine, Row, describe_columns
from modelwright.data.row_formats import ROW_FORMATS, TEMPLATE_TOKENS, AuditedRow, infer_row_format, length_histogram
from modelwright.data.sampler import GlobalBatchSampler
from modelwright.data.shards import MANIFEST
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.errors import DataError, ModelError, Problem, UsageError
from modelwright.recipe.load import LoadedRecipe, add_recipe_location, builtin_recipes, load, load_dict
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import STAGES, RowFormatName, first_stage
from modelwright.runs.folder import atomic_write, fsync_path

PROGRESS_ROWS = 100_000  # about 5 s
Progress = Callable[[str], object]
TemplateCheck = Callable[[LoadedRecipe, str, Sequence[Any]], list[Problem]]
AUDIT_CHARS_PER_TOKEN = 4.0
"""Estimate without a tokenizer."""


@dataclass(frozen=True)
class AuditConfig:
    """How the data will be used."""

    row_format: RowFormatName
    """Conversations, preference pairs or raw text."""
    max_length: int
    """Longest row, in tokens."""
    batch_size: int
    """Micro-batch size per device."""
    seed: int
    """Seed of the split and of the sampler."""
    tokenizer: DocumentTokenizer | None = None
    """The tokenizer, if its folder is local."""


@dataclass
class AuditReport:
    """Result of an audit."""

    rows: int = 0
    """Rows read."""
    invalid_rows: list[InvalidRow] = field(default_factory=list)
    """Rows that cannot be used."""
    stats: dict[str, Any] = field(default_factory=dict)
    """Statistics of the valid rows."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """How rows were read, and those that were left out."""
    rows_to_render: list[Any] = field(default_factory=list)
    """Rows that a chat template may not render."""
    is_refused: bool = False
    """Whether a run refuses the data, however few rows are invalid."""

    @property
    def invalid_fraction(self) -> float:
        """Fraction of invalid rows."""
        return len(self.invalid_rows) / max(1, self.rows)

    def as_json(self, max_problems: int = 50) -> dict[str, Any]:
        """For --json: the first problems and all statistics."""
        reasons = Counter(readers.reason_category(invalid_row.reason) for invalid_row in self.invalid_rows)
        problems = [json.loads(readers.to_jsonl(row)) for row in self.invalid_rows[:max_problems]]
        counts = {"rows": self.rows, "invalid": len(self.invalid_rows), **self.quarantine.summary()}
        grouped = readers.group_problems([Problem(row.where, row.reason) for row in self.invalid_rows])
        return {**counts, "invalid_fraction": round(self.invalid_fraction, 4), "reasons": dict(reasons.most_common()),
                "problems": problems, "grouped": list(map(str, grouped)), **self.stats}  # fmt: skip

    def lines(self) -> list[str]:
        """How rows were read, and which were dropped; the invalid ones are listed already."""
        return replace(self.quarantine, invalid_rows=[]).lines()


def audit(data: DataConfig, config: AuditConfig, recipe_dir: Path, progress: Progress = str) -> AuditReport:
    """Read all rows once, collect the invalid ones, and measure the rest; a million rows take a minute."""
    row_format = ROW_FORMATS[config.row_format]
    parse, audit_item = row_format.parse, row_format.audit_item
    assert parse is not None and audit_item is not None
    try:
        train, held_out, quarantine = read_splits(
            data, recipe_dir, lambda rows, *rest: parse(_count(rows, progress), *rest)
        )
    except DataError as error:  # the rest of a file cannot be read
        return AuditReport(1, [InvalidRow(each.where, each.message) for each in error.problems])
    report = AuditReport(quarantine.rows_read, quarantine.invalid_rows, {}, quarantine)
    report.rows_to_render = row_format.rows_to_render([*train, *held_out])
    items, held_out_items = ([audit_item(item) for item in split] for split in (train, held_out))
    if not items:
        return report
    lengths = _token_lengths(items, config)
    try:
        validation = held_out_items if sources.has_validation_rows(data, recipe_dir) else None
        overlap = _split_overlap(items, validation, data, config.seed)
    except DataError as error:  # too few distinct rows to hold one out: one more problem
        report.invalid_rows += [InvalidRow(each.where, each.message) for each in error.problems]
        return report
    report.stats = {
        "kind": config.row_format,
        "tokens_counted_by": "the model's tokenizer" if config.tokenizer else "4 characters a token",
        "tokens": int(lengths.sum()),
        "lengths": length_histogram(lengths),
        "max_length": config.max_length,
        "truncated": _truncation_stats(lengths, config),
        "duplicates": _duplicate_stats(items, data.system_prompt or ""),
        "split": overlap,
        "padding": _padding_fraction(lengths, config),
    }
    return report


def _count(rows: Iterable[Any], progress: Progress) -> Iterator[Any]:
    """The same rows, with a line of progress now and then."""
    for number, row in enumerate(rows, 1):
        if number % PROGRESS_ROWS == 0:
            progress(f"{number:,} rows read")
        yield row


def _token_lengths(items: Sequence[AuditedRow], config: AuditConfig) -> NDArray:
    """Tokens of each row: its text, and an estimate of what the chat template adds."""
    texts = [item.text for item in items]
    if config.tokenizer:
        text_tokens = config.tokenizer.encode_batch(texts).lengths
    else:
        text_tokens = np.array([max(1, round(len(text) / AUDIT_CHARS_PER_TOKEN)) for text in texts])
    return np.asarray(text_tokens + TEMPLATE_TOKENS * np.array([item.num_messages for item in items]))


def _truncation_stats(lengths: NDArray, config: AuditConfig) -> dict[str, Any]:
    if ROW_FORMATS[config.row_format].is_packed:
        return {"rows": 0, "fraction": 0.0, "truncated_tokens": 0}
    over = np.maximum(lengths - config.max_length, 0)
    fraction = float((over > 0).mean())
    return {"rows": int((over > 0).sum()), "fraction": round(fraction, 4), "truncated_tokens": int(over.sum())}


def _duplicate_stats(items: Sequence[AuditedRow], system_prompt: str) -> dict[str, Any]:
    """Exact and near duplicates, without the system prompt, which would make all rows similar."""
    texts = [item.text.removeprefix(f"{system_prompt}\n") for item in items]
    copies = Counter(texts)
    signatures = dedup.minhash_signatures(dedup.shingle(texts, dedup.NGRAM_SIZE))
    eligible, load = np.ones(len(texts), dtype=np.bool_), signatures.__getitem__
    pairs = [dedup.verified_band_pairs(keys, eligible, load, 0.7) for keys in dedup.band_keys(signatures)]
    components = dedup.connected_components(len(texts), np.concatenate(pairs))
    lowest = dedup.split_unverified(components, load, 0.7)
    near = int((lowest != np.arange(len(texts))).sum())
    exact = len(texts) - len(copies)
    most_common = copies.most_common(1)[0]
    return {"exact": exact, "near": max(0, near - exact), "max_copies": most_common[1],
            "example": " ".join(most_common[0].split())[:100] if most_common[1] > 1 else None}  # fmt: skip


def _split_overlap(
    items: Sequence[AuditedRow], held_out_items: Sequence[AuditedRow] | None, data: DataConfig, seed: int
) -> dict[str, Any]:
    """What is in both splits, and what a random split by rows would leak."""
    train, held_out = group_split(items, data, seed) if held_out_items is None else (items, held_out_items)
    groups = {item.split_key for item in train}
    train_texts = {item.text for item in train}
    permutation = np.random.Generator(np.random.Philox(key=[seed, len(items)])).permutation(len(items))
    count = max(1, len(held_out))
    random_train = {items[index].prompt_key for index in permutation[count:]}
    leaked = sum(items[index].prompt_key in random_train for index in permutation[:count])
    return {
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "groups": len({item.split_key for item in items}),
        "groups_in_both_splits": len(groups & {item.split_key for item in held_out}),
        "prompts_in_both_splits": len({item.prompt_key for item in train} & {item.prompt_key for item in held_out}),
        "rows_in_both_splits": sum(item.text in train_texts for item in held_out),
        "random_split_leakage": round(leaked / count, 4),
    }


def _padding_fraction(lengths: NDArray, config: AuditConfig) -> dict[str, Any]:
    """Fraction of padding tokens: batches in sampler order, and packed."""
    truncated_lengths = np.minimum(lengths, config.max_length)
    if ROW_FORMATS[config.row_format].is_packed:
        return {"padded": 0.0, "packed": 0.0}
    sampler = GlobalBatchSampler(len(truncated_lengths), config.batch_size, len(truncated_lengths), config.seed)
    rows = [truncated_lengths[sampler.batch_indices(step)] for step in range(sampler.steps)]
    padded = 1 - truncated_lengths.sum() / sum(int(batch.max()) * len(batch) for batch in rows)
    packed_rows = len(pack_bfd(truncated_lengths.tolist(), config.max_length))
    packed = 1 - truncated_lengths.sum() / (packed_rows * config.max_length)
    return {"padded": round(float(padded), 4), "packed": round(float(packed), 4)}


def audit_recipe(
    name: str, overrides: Sequence[str], progress: Progress = str, find_template_problems: TemplateCheck | None = None
) -> Iterator[tuple[str, AuditReport]]:
    """Audit the data of each stage of a recipe, or a data source by its name."""
    loaded = load_recipe_or_data(name, overrides)
    if is_data_source(name):  # without a recipe there is no model whose template could refuse rows
        find_template_problems = None
    for stage, data, config in audit_inputs(loaded):
        report = audit(data, config, loaded.path.parent, progress)
        if find_template_problems and (problems := find_template_problems(loaded, stage, report.rows_to_render)):
            report.invalid_rows += [InvalidRow(each.where, each.message) for each in problems]
            report.is_refused = True
        problems = [Problem(row.where, row.reason) for row in report.invalid_rows]
        located = add_recipe_location(problems, loaded, stage)
        report.invalid_rows = [replace(row, reason=problem.message)
                               for row, problem in zip(report.invalid_rows, located, strict=True)]  # fmt: skip
        yield (name if data.source == name else f"{stage}: {data.source}"), report


def audit_inputs(loaded: LoadedRecipe) -> Iterator[tuple[str, DataConfig, AuditConfig]]:
    """Data and use of each stage; the same data for the same use is audited once."""
    recipe, tokenizer = loaded.recipe, _load_tokenizer(loaded)
    wanted: list[tuple[str, DataConfig, RowFormatName, Any]]
    wanted = [(stage, recipe.data_for(stage), section.spec.row_format, section)
              for stage, section in recipe.stages.items()]  # fmt: skip
    if recipe.prepare and recipe.text_stage is None:
        wanted.append(("prepare", recipe.prepare_data, "text", None))
    audited: list[tuple[DataConfig, RowFormatName]] = []
    for stage, data, row_format, section in wanted:
        if (data, row_format) in audited or ROW_FORMATS[row_format].parse is None:
            continue
        audited.append((data, row_format))
        length, batch = getattr(section, "max_length", 2048), getattr(section, "per_device_train_batch_size", 8)
        for source_data in data.parts.values() if row_format == "text" else [data]:
            yield stage, source_data, AuditConfig(row_format, length, batch, recipe.seed, tokenizer)


def _load_tokenizer(loaded: LoadedRecipe) -> DocumentTokenizer | None:
    """The tokenizer of the model, if its folder is local."""
    model = loaded.recipe.model
    folder = sources.local_path(model.tokenizer_name_or_path or model.model_name_or_path or "", loaded.path.parent)
    try:
        return DocumentTokenizer.open(folder) if folder and (folder / "tokenizer.json").exists() else None
    except ModelError:
        return None


def export_datasets(name: str, folder: Path, stage: str | None = None) -> tuple[dict[str, int], list[str]]:
    """Save the conversations or pairs of a stage, by default the first, as a folder that load_from_disk reads.

    Returns the row counts and, if no stage was named, the other stages with rows of their own.
    """
    loaded = load(name)
    recipe, sections = loaded.recipe, loaded.recipe.stages.items()
    row_formats = {each: ROW_FORMATS[section.spec.row_format] for each, section in sections}
    exported = [each for each, row_format in row_formats.items() if row_format.columns]
    *names, last = exported or (each for each, spec in STAGES.items() if ROW_FORMATS[spec.row_format].columns)
    wanted = f"{', '.join(names)} or {last}" if names else last
    if not exported:
        raise UsageError(f"{name} has no {wanted}; modelwright data prepare makes shards of raw text")
    if stage and stage not in exported:
        raise UsageError(f"--stage is {stage!r}; of {name} it wants {wanted}, which have rows with messages")
    chosen = stage or exported[0]
    row_format, data = row_formats[chosen], recipe.data_for(chosen)
    others = [each for each in exported if (row_formats[each], recipe.data_for(each)) != (row_format, data)]
    dataset = row_format.load(data, recipe.seed, loaded.path.parent)
    return save_dataset(dataset, folder, row_format.columns), [] if stage else others


FULL_QUESTION_COLUMN = "full-question"


def save_dataset(data: ConversationDataset | PreferenceDataset, folder: Path, columns: Sequence[str]) -> dict[str, int]:
    """Write the messages of train and held_out as a folder that `load_from_disk` reads; returns the row counts."""
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    splits = {"train": data.train, "held_out": data.held_out}
    rows = {
        name: [{column: [dict(message) for message in getattr(item, column)] for column in columns} for item in items]
        for name, items in splits.items()
        if items
    }
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    DatasetDict({name: Dataset.from_list(items) for name, items in rows.items()}).save_to_disk(str(partial))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    fsync_path(folder.parent)
    return {name: len(items) for name, items in rows.items()}


def convert_to_parquet(source: Path, target: Path, full_question: str | None = None) -> int:
    """Write the rows of a file as Parquet, and return their number.

    A template such as "For {topic}, {question}" adds the column full-question and removes the columns it uses.
    """
    import pyarrow
    import pyarrow.parquet

    if target.suffix != ".parquet":
        raise UsageError(f"{target} ends in {target.suffix or 'nothing'}; it wants .parquet")
    rows = list(readers.raise_on_invalid_rows(readers.read_file(source)))
    values = [_with_full_question(row, full_question) if full_question else row.values for row in rows]
    with atomic_write(target) as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), file, compression="zstd")
    return len(values)


def _with_full_question(row: Row, template: str) -> dict[str, Any]:
    try:
        used = [name for _, name, _, _ in Formatter().parse(template) if name]
    except ValueError as error:
        raise UsageError(f"--prompt-template is {template!r}; it wants columns in braces ({error})") from None
    missing = [name for name in used if name not in row.values]
    if missing:
        raise DataError([Problem(row.where, f"there is no column {missing[0]!r}; {describe_columns(row.values)}")])
    rest = {name: value for name, value in row.values.items() if name not in used}
    return {FULL_QUESTION_COLUMN: sources.render_template(template, row.values, row.where), **rest}


DEFAULT_MODEL = {"model_name_or_path": "smollm2-135m-instruct"}
"""Tokenizer for samples of data without a recipe."""
PLACEHOLDER_MODEL = {"architecture": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1}}
"""Never built: data prepare trains a tokenizer."""


def load_recipe_or_data(name: str, overrides: Sequence[str], for_prepare: bool = False) -> LoadedRecipe:
    """Load a recipe, or make one that reads the data source of that name."""
    if not is_data_source(name):
        return load(name, overrides)
    recipe_dict: dict[str, Any] = {
        "name": re.sub(r"[^a-z0-9._-]+", "-", Path(name).stem.lower()).strip("-._") or "data",
        "model": PLACEHOLDER_MODEL if for_prepare else DEFAULT_MODEL,
        "data": {"dataset_name": name},
    }
    if for_prepare:
        return load_dict({**recipe_dict, "prepare": {}}, Path(name), overrides)
    stage = first_stage("conversations")
    other_stages = tuple(f"{other}." for other in STAGES if other != stage)
    data_overrides = [override for override in overrides if not override.startswith(other_stages)]
    stage = infer_stage(load_dict({**recipe_dict, stage: {}}, Path(name), data_overrides).recipe.data_for(stage))
    return load_dict({**recipe_dict, stage: {}}, Path(name), overrides)


def is_data_source(name: str) -> bool:
    """Whether a name is a data source: a row file, a folder of them, an embedded or a hub dataset."""
    path = Path(name)
    if readers.row_suffix(path):
        if not sources.source_files(name, Path()):
            raise UsageError(f"{name}: there is no such file")
        return True
    if path.is_dir():
        return not (path / "recipe.yaml").exists() and (sources.is_saved_dataset(path) or bool(sources.files_in(path)))
    if path.exists() or name in builtin_recipes():
        return False
    return sources.is_embedded(name) or (sources.is_hub_name(name, Path()) and not path.parent.is_dir())


def infer_stage(data: DataConfig) -> str:
    """The stage for data without a recipe, by its columns."""
    if (Path(data.source) / MANIFEST).exists():
        return first_stage("text")
    first = next(iter(sources.iter_rows(data.source, data, Path())), None)
    return first_stage(infer_row_format(tuple(first.values) if isinstance(first, Row) else (), data))
