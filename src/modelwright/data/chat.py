"""Turn rows into conversations, and split them into training and held-out rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import xxhash

from modelwright.data.readers import DroppedRow, InvalidRow, Quarantine, Row, describe_columns
from modelwright.data.recognize import (
    Message,
    Recognized,
    RowError,
    add_system_message,
    check_meaning,
    conversation_messages,
    parse_tools,
    recognize,
)
from modelwright.data.sources import (
    add_derived_columns,
    has_validation_rows,
    iter_train_rows,
    iter_validation_rows,
    notes_on_files,
)
from modelwright.errors import DataError, Problem
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import RowFormatName


class HasSplitKey(Protocol):
    """Anything that group_split can split."""

    @property
    def split_key(self) -> str:
        """Items with equal keys stay in one split."""


Item = TypeVar("Item", bound=HasSplitKey)
RowParser = Callable[[Iterable[Row | InvalidRow], DataConfig, Quarantine], list[Item]]
RowBuilder = Callable[[Row, Recognized, DataConfig], Item]


@dataclass(frozen=True)
class Conversation:
    """Messages to train on or to evaluate with."""

    where: str
    """File and line of the row."""
    messages: tuple[Message, ...]
    """Role and content of each message; the last is the assistant's."""
    split_key: str
    """Conversations with equal keys stay in one split."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that the assistant may call."""
    source: str = ""
    """Its source in a mixture."""

    @property
    def last_user_message(self) -> str:
        return find_prompt(reversed(self.messages))

    @property
    def content(self) -> Any:
        return [self.messages, self.tools] if self.tools else self.messages


@dataclass(frozen=True)
class SplitDataset(Generic[Item]):
    """Train and held-out rows, with the statistics of the data manifest."""

    train: list[Item]
    """Rows to train on."""
    held_out: list[Item]
    """Rows for evaluation only."""
    fingerprint: str
    """Hash of every message of both splits, in order."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Rows that cannot be used."""
    counts: dict[str, int] = field(default_factory=dict)
    """Further counts of the manifest."""
    config: DataConfig | None = None
    """Where the rows come from; None in tests."""
    key_order: str = ""
    """Hash of the keys of tools and their calls, in order."""

    def cache_key(self, split: str) -> str:
        """A key of the rows of a split; empty without a fingerprint."""
        return self.fingerprint and f"{self.fingerprint}:{self.key_order}:{split}"

    def manifest(self, data: DataConfig) -> dict[str, Any]:
        """Source, row counts and fingerprint."""
        # by prompt, not by split key: a split by row must not hide that a prompt is in both splits
        splits: tuple[Sequence[Any], Sequence[Any]] = (self.train, self.held_out)
        train, held_out = ({normalize_key(item.last_user_message) for item in items} for items in splits)
        return {
            "source": data.source,
            "validation": data.validation_file or data.validation_split,
            "train_rows": len(self.train),
            "held_out_rows": len(self.held_out),
            "prompts_in_both_splits": len(train & held_out),
            **self.quarantine.summary(),
            "fingerprint": self.fingerprint,
            **self.counts,
            **({"sources": count_sources(self.train, self.held_out, data)} if data.mix else {}),
        }


ConversationDataset = SplitDataset[Conversation]


def normalize_key(text: Any) -> str:
    """A text for comparison: lower case, single spaces."""
    return " ".join(str(text).lower().split())


def load_conversations(data: DataConfig, seed: int, recipe_dir: Path) -> ConversationDataset:
    """Read, check and split the conversations of a recipe; all problems are raised as one error."""
    train, held_out, quarantine = load_splits(data, seed, recipe_dir, rows_to_conversations)
    fingerprint, key_order, distinct_rows = hash_splits(train, held_out, data)
    counts = {"duplicate_rows": len(train) - distinct_rows}  # many, if a folder holds one dataset in two formats
    return ConversationDataset(train, held_out, fingerprint, quarantine, counts, data, key_order)


def load_splits(
    data: DataConfig, seed: int, recipe_dir: Path, parse: RowParser[Item], empty_message: str = "there is no row in it"
) -> tuple[list[Item], list[Item], Quarantine]:
    """Read and parse the training and validation rows; without a validation file, hold out part of the former."""
    train, held_out, quarantine = read_splits(data, recipe_dir, parse)
    with quarantine.raising():
        for items, source in ((train, data.source), (held_out, data.validation_file)):
            if source and not items:
                raise DataError([Problem(source, empty_message)])
        if not has_validation_rows(data, recipe_dir):
            train, held_out = group_split(train, data, seed)
        if lost := [name for name, count in count_sources(train, held_out, data).items() if not count["train_rows"]]:
            raise DataError([Problem(lost[0], f"{empty_message}, or test_size holds out all of them")])
    return train, held_out, quarantine


def read_splits(
    data: DataConfig, recipe_dir: Path, parse: RowParser[Item]
) -> tuple[list[Item], list[Item], Quarantine]:
    """The parsed training and validation rows, and those that cannot be used, for check, audit, show and run."""
    quarantine = Quarantine(data.max_invalid_fraction)
    quarantine.notes += [note for part in data.parts.values() for note in notes_on_files(part, recipe_dir)]
    train: list[Any] = []
    for name, part in data.parts.items():
        items: list[Any] = parse(quarantine.count(iter_train_rows(part, recipe_dir)), part, quarantine)
        if data.mix and (max_rows := data.mix[name].max_rows):
            items = items[: max_rows.resolve(len(items))]
        train += [replace(item, source=name) for item in items] if data.mix else items
        weight, total = data.weights.get(name, 0), sum(data.weights.values())
        share = f", {weight / total:.1%} of the rows of a step" if total else ""
        quarantine.sources += [f"source {name}: {len(items):,} rows{share}"] if data.mix else []
    held_out = parse(quarantine.count(iter_validation_rows(data, recipe_dir)), data, quarantine)
    return train, held_out, quarantine


def count_sources(train: Iterable[Any], held_out: Iterable[Any], data: DataConfig) -> dict[str, dict[str, Any]]:
    """The rows of each source of a mixture, and its weight."""
    rows, held = (Counter(item.source for item in items) if data.mix else {} for items in (train, held_out))
    return {name: {"train_rows": rows[name], "held_out_rows": held[name], "weight": source.weight}
            for name, source in data.mix.items()}  # fmt: skip


CONTENT_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True)
"""Made once: json.dumps makes one for every row."""


def hash_splits(train: Sequence[Any], held_out: Sequence[Any], data: DataConfig) -> tuple[str, str, int]:
    """Fingerprint of all rows in order and of their weights, hash of keys in order, number of distinct training rows.

    The fingerprint sorts the keys of tools and of their calls, whose order templates render."""
    digest, key_order = xxhash.xxh3_128(), xxhash.xxh3_128()
    if data.mix:
        digest.update(json.dumps([data.stopping_strategy, count_sources(train, held_out, data)]).encode())
    distinct: list[set[int]] = [set(), set()]
    for items, hashes in zip((train, held_out), distinct, strict=True):
        for item in items:
            serialized = CONTENT_ENCODER.encode(item.content).encode()
            digest.update(serialized)
            if item.tools or b'"tool_calls"' in serialized:
                key_order.update(json.dumps(item.content).encode())
            hashes.add(xxhash.xxh3_64_intdigest(serialized))
        digest.update(b"\0")
    return digest.hexdigest(), key_order.hexdigest(), len(distinct[0])


def rows_to_conversations(
    rows: Iterable[Row | InvalidRow], data: DataConfig, quarantine: Quarantine | None = None
) -> list[Conversation]:
    """Parse each row; invalid ones go to the quarantine, or are raised if there is none."""
    return parse_rows(rows, data, "conversations", _build_conversation, quarantine)


def parse_rows(
    rows: Iterable[Row | InvalidRow],
    data: DataConfig,
    row_format: RowFormatName,
    build: RowBuilder[Item],
    quarantine: Quarantine | None,
) -> list[Item]:
    """Add derived columns, recognize the format of each row and build an item of it; the quarantine takes the rest."""
    outcome = Quarantine() if quarantine is None else quarantine
    rows = list(add_derived_columns(rows, data))
    known: set[str] = set().union(*(row.values for row in rows if isinstance(row, Row)))
    recognized: dict[tuple[str, ...], Recognized] = {}
    items: list[Item] = []
    for row in outcome.iter_valid(rows):
        try:
            names = tuple(row.values)
            if names not in recognized:
                recognized[names] = recognize(names, row_format, data.columns, known)
            if data.split_by and data.split_by not in row.values:
                raise RowError(f"there is no column {data.split_by!r} to split by; {describe_columns(row.values)}")
            items.append(build(row, recognized[names], data))
            outcome.count_format(recognized[names].describe(row.values))
        except DroppedRow as reason:
            outcome.drop(row, str(reason))
        except RowError as error:
            outcome.add(row, str(error))
    if quarantine is None:
        outcome.raise_if_over_limit()
    return items


def _build_conversation(row: Row, recognized: Recognized, data: DataConfig) -> Conversation:
    values = {role: row.values.get(column) for role, column in recognized.columns.items()}
    messages = conversation_messages(values, recognized.columns)
    check_meaning(recognized, row.values, messages)
    if "text" not in recognized.columns:
        messages = add_system_message(messages, values, recognized.columns, data.system_prompt)
    return Conversation(
        row.where, tuple(messages), get_split_key(row, messages, data), parse_tools(values.get("tools"))
    )


def group_split(items: Sequence[Item], data: DataConfig, seed: int) -> tuple[list[Item], list[Item]]:
    """Hold out whole groups, chosen by a hash of seed and split key, so that no group is in both splits."""

    def group_hash(group: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{seed}:{group}".encode("utf-8", "surrogatepass"))

    groups = sorted({item.split_key for item in items}, key=lambda group: (group_hash(group), group))
    count, chosen = held_out_count(data, len(groups)), set()
    for name in data.mix or ("",):  # the same share of each source; a group is held out of all of them or of none
        own = {item.split_key for item in items if not name or getattr(item, "source", "") == name}
        own_count = round(count * len(own) / len(groups)) if not name else max(1, round(count * len(own) / len(groups)))
        chosen.update([group for group in groups if group in own][: own_count if count else 0])
    return [i for i in items if i.split_key not in chosen], [i for i in items if i.split_key in chosen]


def held_out_count(data: DataConfig, num_groups: int) -> int:
    """Number of groups to hold out by test_size."""
    count = data.test_size.resolve(num_groups)
    if count >= num_groups:
        message = f"test_size holds out {count} of {num_groups} distinct groups, which leaves none to train on"
        raise DataError([Problem(data.source, message)])
    return count


def build_prompt_messages(question: str, system_prompt: str | None) -> list[Message]:
    """The messages of a prompt, the same in training and in generation."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def find_prompt(messages: Iterable[Message]) -> str:
    """The first message of the user; a text without messages is its own prompt."""
    return next(str(message["content"]) for message in messages if message["role"] in ("user", "text"))


def get_split_key(row: Row, messages: Iterable[Message], data: DataConfig) -> str:
    """The value of data.split_by, else the first user message: equal in SFT and DPO, so they hold out the same."""
    return normalize_key(row.values[data.split_by] if data.split_by else find_prompt(messages))
