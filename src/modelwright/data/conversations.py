"""Turn rows into conversations by the parts their columns play, and hold some out by question."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import xxhash

from modelwright.data.derive import derive
from modelwright.data.files import HALF_A_CHARACTER, Row, columns_seen, utf8_size
from modelwright.data.quarantine import Aside
from modelwright.data.sources import training_rows, validation_rows
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import Data

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""What ShareGPT calls the roles, in turns of from and value."""
GUESSES = {
    "question": "prompt", "instruction": "prompt", "input": "prompt", "query": "prompt", "full-question": "prompt",
    "answer": "completion", "output": "completion", "response": "completion", "conversations": "messages",
}  # fmt: skip
"""What a column of that name most often is: used in letters, never silently."""

Message = dict[str, str]


class Grouped(Protocol):
    """Anything that may not be torn apart by the split."""

    @property
    def group(self) -> str:
        """Items of one group stay on one side."""


Item = TypeVar("Item", bound=Grouped)


@dataclass(frozen=True)
class Conversation:
    """Messages to learn from, or to measure by."""

    where: str
    """Where the row was found."""
    messages: tuple[Message, ...]
    """Role and content of each turn; the last is the assistant's."""
    group: str
    """Conversations of one group stay on one side of the split."""

    @property
    def question(self) -> str:
        """The last thing the user said."""
        return next(message["content"] for message in reversed(self.messages) if message["role"] == "user")


@dataclass(frozen=True)
class Conversations:
    """What the model learns from and what is held out, with the facts that go into the data manifest."""

    train: list[Conversation]
    """Rows that move the weights."""
    held_out: list[Conversation]
    """Rows that only measure."""
    fingerprint: str
    """Hash of every message on both sides, in order."""
    aside: Aside = field(default_factory=Aside)
    """Rows that cannot be used."""
    repeats: int = 0
    """Rows to train on that say what an earlier one says: many, where a folder holds one set in two forms."""

    def manifest(self, data: Data) -> dict[str, Any]:
        """What the model sees, in numbers."""
        return {
            "source": data.dataset_name or data.train_file,
            "validation": data.validation_file,
            "train_rows": len(self.train),
            "held_out_rows": len(self.held_out),
            "groups_on_both_sides": len(_questions(self.train) & _questions(self.held_out)),
            "set_aside_rows": len(self.aside.faults),
            "repeated_rows": self.repeats,
            "fingerprint": self.fingerprint,
        }


def _questions(items: Iterable[Conversation]) -> set[str]:
    """What is asked: a split by anything else, such as the row, must not hide that a question stands on both sides."""
    return {" ".join(item.question.lower().split()) for item in items}


def load(data: Data, seed: int, beside: Path) -> Conversations:
    """Read, check and split the data of a recipe; every problem is told at once."""
    aside = Aside(data.max_bad_share)
    train = converse(list(aside.readable(training_rows(data, beside))), data, aside)
    held_out = converse(list(aside.readable(validation_rows(data, beside))), data, aside)
    aside.refuse()
    for items, source in ((train, data.dataset_name or data.train_file), (held_out, data.validation_file)):
        if source and not items:
            raise DataError([Problem(source, "there is no row in it")])
    if not data.validation_file:
        train, held_out = split(train, data, seed)
    digest = xxhash.xxh3_128()
    distinct: list[set[int]] = [set(), set()]
    for side, seen in zip((train, held_out), distinct, strict=True):
        for item in side:
            said = json.dumps(item.messages, ensure_ascii=False, sort_keys=True).encode()
            digest.update(said)
            seen.add(xxhash.xxh3_64_intdigest(said))
        digest.update(b"\0")
    return Conversations(train, held_out, digest.hexdigest(), aside, len(train) - len(distinct[0]))


def converse(rows: Sequence[Row], data: Data, aside: Aside | None = None) -> list[Conversation]:
    """Make each row a conversation; a row that cannot be one is set aside with its reason, or else an error."""
    bad = Aside() if aside is None else aside
    rows = list(derive(rows, data))
    if not rows:
        return []
    parts = columns_by_part(rows[0], data.columns)
    conversations: list[Conversation] = []
    for row in rows:
        found = _messages(row, parts, data.system_prompt)
        if not isinstance(found, str) and data.split_by and data.split_by not in row.values:
            found = f"there is no column {data.split_by!r} to split by; {columns_seen(row)}"
        if isinstance(found, str):
            bad.put(row, found)
            continue
        group = row.values[data.split_by] if data.split_by else _question(found)
        conversations.append(Conversation(row.where, tuple(found), " ".join(str(group).lower().split())))
    if aside is None:
        bad.refuse()
    return conversations


def columns_by_part(row: Row, columns: dict[str, Any]) -> dict[str, str]:
    """Which column plays which part: as the recipe says, or as the names say when they are the parts themselves."""
    named = {part: column for column, part in columns.items()}
    parts = named or {part: part for part in ("messages", "prompt", "completion", "system") if part in row.values}
    missing = [column for column in parts.values() if column not in row.values]
    if missing:
        raise DataError([Problem(row.where, f"there is no column {missing[0]!r}; {columns_seen(row)}")])
    if "messages" not in parts and not {"prompt", "completion"} <= set(parts):
        guessed = {column: GUESSES[column] for column in row.values if column in GUESSES}
        wish = (
            guessed
            if {"prompt", "completion"} <= set(guessed.values())
            else {"QUESTION": "prompt", "ANSWER": "completion"}
        )
        line = ", ".join(f"{column}: {part}" for column, part in wish.items())
        found = f"no messages, nor prompt and completion; {columns_seen(row)}"
        letter = f"{found}; say which is which: data.columns: {{{line}}}"
        raise DataError([Problem(row.where, letter)])
    return parts


def split(items: Sequence[Item], data: Data, seed: int) -> tuple[list[Item], list[Item]]:
    """Hold out whole groups, chosen by a hash of the seed and the group, so that nothing stands on both sides."""
    groups = sorted(
        {item.group for item in items},
        key=lambda group: (xxhash.xxh3_64_intdigest(f"{seed}:{group}".encode("utf-8", "surrogatepass")), group),
    )
    count = data.test_size.of(len(groups))
    if count >= len(groups):
        letter = f"test_size holds out {count} of {len(groups)} distinct groups, which leaves none to train on"
        raise DataError([Problem(str(data.dataset_name or data.train_file), letter)])
    chosen = set(groups[:count])
    return [i for i in items if i.group not in chosen], [i for i in items if i.group in chosen]


def ask(question: str, system_prompt: str | None) -> list[Message]:
    """The messages that put a question, the same in training and in asking."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def _messages(row: Row, parts: dict[str, str], system_prompt: str | None) -> list[Message] | str:
    """The row's messages, or what is wrong with it."""
    if "messages" in parts:
        messages = checked_turns(row.values.get(parts["messages"]))
    else:
        context = row.values.get(parts["context"]) if "context" in parts else None
        prompt = context_below(row.values.get(parts["prompt"]), context)
        completion = row.values.get(parts["completion"])
        for name, value in (("prompt", prompt), ("completion", completion)):
            if value is None or value == [] or (isinstance(value, str) and not value.strip()):
                return f"{parts[name]!r} is empty; it wants text"
            if not isinstance(value, str | list):
                return f"{parts[name]!r} is {value!r}; it wants text"
        turns: list[Any] = [
            [{"role": role, "content": value}] if isinstance(value, str) else value
            for role, value in (("user", prompt), ("assistant", completion))
        ]
        messages = checked_turns([*turns[0], *turns[1]])
    if isinstance(messages, str):
        return messages
    system = row.values.get(parts["system"]) if "system" in parts else system_prompt
    if system and utf8_size(str(system)) is None:
        return HALF_A_CHARACTER
    return with_system(messages, str(system) if system else None)


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """The messages with a system message first, where one is wished and none is there."""
    wanted = system and messages[0]["role"] != "system"
    return [{"role": "system", "content": str(system)}, *messages] if wanted else messages


def context_below(prompt: Any, context: Any) -> Any:
    """A prompt with the text it speaks of below it, as instruction sets keep it in a column of its own."""
    return f"{prompt}\n\n{context}" if isinstance(prompt, str) and isinstance(context, str) and context else prompt


def checked_turns(value: Any) -> list[Message] | str:
    """A list of turns that ends with an answer, or what is wrong with it."""
    if not isinstance(value, list) or not value:
        return "messages is empty or no list; it wants a list of {role, content}"
    turns: list[Message] = []
    for turn in map(_in_our_words, value):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str) or turn.get("role") not in ROLES:
            return f"a turn is {str(turn)[:60]!r}; it wants a role of {', '.join(ROLES)} and a text content"
        if utf8_size(turn["content"]) is None:
            return HALF_A_CHARACTER
        turns.append({"role": turn["role"], "content": turn["content"]})
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"].strip():
        return "the last turn is not an answer of the assistant; there is nothing to learn"
    if not any(turn["role"] == "user" for turn in turns):
        return "no turn is the user's; it wants a question before the answer"
    return turns


def _in_our_words(turn: Any) -> Any:
    """A turn of ShareGPT as role and content; any other as it is."""
    if not isinstance(turn, dict) or set(turn) < {"from", "value"} or "role" in turn:
        return turn
    role = SHAREGPT.get(str(turn.get("from")), turn.get("from"))
    return {"role": role, "content": turn.get("value")} if role in ROLES else turn


def _question(messages: Iterable[Message]) -> str:
    return next(message["content"] for message in messages if message["role"] == "user")
