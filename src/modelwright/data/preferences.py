"""Turn rows into pairs of answers to one prompt, the better and the worse, and pairs into tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data.chat import Encoded, encode_answer
from modelwright.data.conversations import Message, checked_turns, context_below, split, with_system
from modelwright.data.files import HALF_A_CHARACTER, Row, columns_seen, utf8_size
from modelwright.data.quarantine import Aside
from modelwright.data.sources import training_rows, validation_rows
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import Data
from modelwright.recipe.training import Preference

PARTS = ("prompt", "context", "chosen", "rejected", "system")
GUESSES = {"instruction": "prompt", "question": "prompt", "query": "prompt", "input": "context",
           "preferred": "chosen", "accepted": "chosen", "response_0": "chosen", "response_1": "rejected"}  # fmt: skip
"""What a column of that name most often is: used in letters, never silently."""
SAME = "same"


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    where: str
    """Where the row was found."""
    prompt: tuple[Message, ...]
    """What both answer."""
    chosen: tuple[Message, ...]
    """The better answer."""
    rejected: tuple[Message, ...]
    """The worse answer."""
    group: str
    """Pairs of one group stay on one side of the split."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation with the better answer."""
        return self.prompt + self.chosen

    @property
    def question(self) -> str:
        """The last thing the user said."""
        return next(message["content"] for message in reversed(self.prompt) if message["role"] == "user")


@dataclass(frozen=True)
class Preferences:
    """Pairs to learn from and pairs held out, with the facts that go into the data manifest."""

    train: list[Pair]
    """Pairs that move the weights."""
    held_out: list[Pair]
    """Pairs that only measure."""
    fingerprint: str
    """Hash of every message on both sides, in order."""
    same: int = 0
    """Rows left out because their two answers are the same."""
    aside: Aside = field(default_factory=Aside)
    """Rows that cannot be used."""

    def manifest(self, data: Data) -> dict[str, Any]:
        """What the model sees, in numbers."""
        return {
            "source": data.dataset_name or data.train_file,
            "validation": data.validation_file,
            "train_rows": len(self.train),
            "held_out_rows": len(self.held_out),
            "groups_on_both_sides": len({pair.group for pair in self.train} & {pair.group for pair in self.held_out}),
            "same_answers": self.same,
            "set_aside_rows": len(self.aside.faults),
            "fingerprint": self.fingerprint,
        }


def load(data: Data, seed: int, beside: Path) -> Preferences:
    """Read, check and split the pairs of a recipe; every problem is told at once."""
    sides: list[list[Pair]] = []
    aside, same = Aside(data.max_bad_share), 0
    for items in (training_rows(data, beside), validation_rows(data, beside)):
        rows = list(aside.readable(items))
        before = len(aside.faults)
        sides.append(pair_up(rows, data, aside))
        same += len(rows) - len(sides[-1]) - (len(aside.faults) - before)
    aside.refuse()
    for pairs, source in zip(sides, (data.dataset_name or data.train_file, data.validation_file), strict=True):
        if source and not pairs:
            raise DataError([Problem(source, "there is no pair of different answers in it")])
    train, held_out = sides if data.validation_file else split(sides[0], data, seed)
    digest = xxhash.xxh3_128()
    for side in (train, held_out):
        for pair in side:
            said = [pair.prompt, pair.chosen, pair.rejected]
            digest.update(json.dumps(said, ensure_ascii=False, sort_keys=True).encode())
        digest.update(b"\0")
    return Preferences(train, held_out, digest.hexdigest(), same, aside)


def pair_up(rows: Sequence[Row], data: Data, aside: Aside | None = None) -> list[Pair]:
    """Make each row a pair; rows whose answers are the same are left out, others that make none are set aside."""
    bad = Aside() if aside is None else aside
    if not rows:
        return []
    parts = parts_of(rows[0], data.columns)
    pairs: list[Pair] = []
    for row in rows:
        found = _pair(row, parts, data)
        if isinstance(found, Pair):
            pairs.append(found)
        elif found != SAME:
            bad.put(row, found)
    if aside is None:
        bad.refuse()
    return pairs


def parts_of(row: Row, columns: dict[str, Any]) -> dict[str, str]:
    """Which column plays which part: as the recipe says, and as the names say where they are the parts themselves."""
    named = {part: column for column, part in columns.items() if part in PARTS}
    parts = {**{part: part for part in PARTS if part in row.values}, **named}
    if missing := [column for column in parts.values() if column not in row.values]:
        raise DataError([Problem(row.where, f"there is no column {missing[0]!r}; {columns_seen(row)}")])
    if not {"chosen", "rejected"} <= set(parts):
        guessed = {column: GUESSES[column] for column in row.values if column in GUESSES}
        wish = guessed if {"chosen", "rejected"} <= {*guessed.values(), *parts} else {
            "QUESTION": "prompt", "BETTER": "chosen", "WORSE": "rejected"
        }  # fmt: skip
        line = ", ".join(f"{column}: {part}" for column, part in wish.items())
        letter = f"no chosen and rejected; {columns_seen(row)}; say which is which: columns: {{{line}}}"
        raise DataError([Problem(row.where, letter)])
    return parts


def _pair(row: Row, parts: dict[str, str], data: Data) -> Pair | str:
    """The row as a pair, or what is wrong with it."""
    said = {part: row.values.get(column) for part, column in parts.items()}
    turns: dict[str, list[Message]] = {}
    for name in ("chosen", "rejected"):
        if _is_empty(said[name]):
            return f"{parts[name]!r} is empty; it wants text"
        found = _conversation(said, name)
        if isinstance(found, str):
            return f"{parts[name]!r}: {found}"
        turns[name] = found
    chosen, rejected = turns["chosen"], turns["rejected"]
    if chosen == rejected:
        return SAME
    shared = next(place for place, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    if not any(turn["role"] == "user" for turn in chosen[:shared]):
        return "chosen and rejected answer no common question; it wants a prompt"
    system = said.get("system") or (None if "system" in parts else data.system_prompt)
    if system and utf8_size(str(system)) is None:
        return HALF_A_CHARACTER
    prompt = with_system(chosen[:shared], str(system) if system else None)
    if data.split_by and data.split_by not in row.values:
        return f"there is no column {data.split_by!r} to split by; {columns_seen(row)}"
    # the first question, as conversations are split: what one stage holds out, a later one mostly does too
    first = next(turn["content"] for turn in prompt if turn["role"] == "user")
    group = row.values[data.split_by] if data.split_by else first
    group = " ".join(str(group).lower().split())
    return Pair(row.where, tuple(prompt), tuple(chosen[shared:]), tuple(rejected[shared:]), group)


def _conversation(said: dict[str, Any], name: str) -> list[Message] | str:
    """The prompt and one answer as checked turns; an answer that opens with the question needs no prompt."""
    answer = said[name]
    if isinstance(answer, list) and answer and isinstance(answer[0], dict) and answer[0].get("role") != "assistant":
        return checked_turns(answer)
    prompt = said.get("prompt")
    if _is_empty(prompt):
        return "there is no prompt before it; it wants a prompt, or messages that begin with the question"
    before = context_below(prompt, said.get("context"))
    before = [{"role": "user", "content": before}] if isinstance(before, str) else before
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not isinstance(before, list) or not isinstance(after, list):
        return "prompt and answer want text or messages"
    return checked_turns([*before, *after])


def _is_empty(value: Any) -> bool:
    return not value or (isinstance(value, str) and not value.strip())


@dataclass(frozen=True)
class EncodedPair:
    """A pair as tokens; the prompt is what both answers share."""

    prompt: np.ndarray[Any, np.dtype[np.int32]]
    """Token ids: [length] int32, at least one."""
    chosen: Encoded
    """What follows in the better answer."""
    rejected: Encoded
    """What follows in the worse answer."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass
class EncodedPairs:
    """All pairs of one side, with what was cut."""

    rows: list[EncodedPair] = field(default_factory=list)
    truncated_rows: int = 0
    lost_tokens: int = 0

    def facts(self) -> dict[str, int]:
        """The numbers of the data manifest; no pair is ever dropped."""
        answers = [answer for row in self.rows for answer in (row.chosen, row.rejected)]
        return {
            "rows": len(self.rows),
            "tokens": sum(len(row) for row in self.rows),
            "prompt_tokens": sum(len(row.prompt) for row in self.rows),
            "trained_tokens": int(sum(answer.trained.sum() for answer in answers)),
            "truncated_rows": self.truncated_rows,
            "lost_tokens": self.lost_tokens,
            "dropped_rows": 0,
        }


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: Any, wish: Preference, stop_tokens: Collection[int] = ()
) -> EncodedPairs:
    """Encode every pair; what does not fit is cut and counted, and too many cut pairs are an error."""
    stops = {*stop_tokens, tokenizer.eos_token_id} - {None}
    encoded = EncodedPairs()
    stopping = False
    for pair in pairs:
        whole = encode_pair(pair, tokenizer)
        stopping = stopping or any(int(token) in stops for token in whole.chosen.tokens[whole.chosen.trained])
        fitted = fit(whole, wish.max_length)
        encoded.rows.append(fitted)
        encoded.truncated_rows += fitted is not whole
        encoded.lost_tokens += len(whole) - len(fitted)
    if pairs and not stopping:
        letter = "the chat template ends no answer with an end-of-text token, so the model would never learn to stop"
        raise DataError([Problem("data", letter)])
    if encoded.truncated_rows > (limit := wish.max_truncated.of(len(pairs))):
        letter = (
            f"{encoded.truncated_rows} of {len(pairs)} pairs are longer than max_length {wish.max_length} and would "
            f"be cut, more than max_truncated allows ({limit}); raise one of them"
        )
        raise DataError([Problem("data", letter)])
    return encoded


def encode_pair(pair: Pair, tokenizer: Any) -> EncodedPair:
    """The tokens of a pair, divided where its two renderings part or the first answer begins."""
    sides = [encode_answer(pair.prompt, answer, tokenizer, pair.where) for answer in (pair.chosen, pair.rejected)]
    first = min(int(side.trained.argmax()) for side in sides)
    apart = np.flatnonzero(sides[0].tokens[:first] != sides[1].tokens[:first])
    shared = int(apart[0]) if len(apart) else first
    if shared < 1:
        raise DataError([Problem(pair.where, "the prompt gives no token, so that nothing foretells the answers")])
    tails = [Encoded(side.tokens[shared:], side.trained[shared:]) for side in sides]
    return EncodedPair(sides[0].tokens[:shared], *tails)


def fit(pair: EncodedPair, max_length: int) -> EncodedPair:
    """Cut answers at the end, to no less than half of the room, and then the prompt at its start; never to nothing."""
    longest = max(len(pair.chosen), len(pair.rejected))
    if len(pair.prompt) + longest <= max_length:
        return pair
    room = max(max_length - len(pair.prompt), max_length // 2)
    kept = [Encoded(answer.tokens[:room], answer.trained[:room]) for answer in (pair.chosen, pair.rejected)]
    prompt = pair.prompt[-(max_length - min(longest, room)) :]
    return EncodedPair(prompt, *kept)
