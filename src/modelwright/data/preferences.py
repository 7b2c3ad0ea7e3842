"""Turn rows into preference pairs, and pairs into token ids with loss masks."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data.chat import (
    Message,
    TokenizedRow,
    add_system_message,
    append_context,
    group_split,
    tokenize_completion,
    validate_messages,
)
from modelwright.data.readers import LONE_SURROGATE, Quarantine, Row, describe_columns, utf8_size
from modelwright.data.sources import iter_train_rows, iter_validation_rows
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import DataConfig, PreferenceConfig

PREFERENCE_ROLES = ("prompt", "context", "chosen", "rejected", "system")
PREFERENCE_COLUMN_HINTS = {"instruction": "prompt", "question": "prompt", "query": "prompt", "input": "context",
           "preferred": "chosen", "accepted": "chosen", "response_0": "chosen", "response_1": "rejected"}  # fmt: skip
"""What a column of that name most often is: used in letters, never silently."""
IDENTICAL = "identical"


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt."""

    where: str
    """Where the row was found."""
    prompt: tuple[Message, ...]
    """What both answer."""
    chosen: tuple[Message, ...]
    """The better answer."""
    rejected: tuple[Message, ...]
    """The worse answer."""
    split_key: str
    """Pairs of one group stay on one side of the split."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation with the better answer."""
        return self.prompt + self.chosen

    @property
    def last_user_message(self) -> str:
        """The last thing the user said."""
        return next(message["content"] for message in reversed(self.prompt) if message["role"] == "user")


@dataclass(frozen=True)
class PreferenceDataset:
    """Pairs to learn from and pairs held out, with the facts that go into the data manifest."""

    train: list[PreferencePair]
    """Pairs that move the weights."""
    held_out: list[PreferencePair]
    """Pairs that only measure."""
    fingerprint: str
    """Hash of every message on both sides, in order."""
    identical_pairs: int = 0
    """Rows left out because their two answers are the same."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Rows that cannot be used."""

    def manifest(self, data: DataConfig) -> dict[str, Any]:
        """What the model sees, in numbers."""
        return {
            "source": data.dataset_name or data.train_file,
            "validation": data.validation_file,
            "train_rows": len(self.train),
            "held_out_rows": len(self.held_out),
            "prompts_in_both_splits": len(
                {pair.split_key for pair in self.train} & {pair.split_key for pair in self.held_out}
            ),
            "identical_pairs": self.identical_pairs,
            "quarantined_rows": len(self.quarantine.invalid_rows),
            "fingerprint": self.fingerprint,
        }


def load_preferences(data: DataConfig, seed: int, recipe_dir: Path) -> PreferenceDataset:
    """Read, check and split the pairs of a recipe; every problem is told at once."""
    splits: list[list[PreferencePair]] = []
    quarantine, identical_pairs = Quarantine(data.max_invalid_fraction), 0
    for items in (iter_train_rows(data, recipe_dir), iter_validation_rows(data, recipe_dir)):
        rows = list(quarantine.iter_valid(items))
        invalid_before = len(quarantine.invalid_rows)
        splits.append(rows_to_pairs(rows, data, quarantine))
        identical_pairs += len(rows) - len(splits[-1]) - (len(quarantine.invalid_rows) - invalid_before)
    quarantine.raise_if_over_limit()
    for pairs, source in zip(splits, (data.dataset_name or data.train_file, data.validation_file), strict=True):
        if source and not pairs:
            raise DataError([Problem(source, "there is no pair of different answers in it")])
    train, held_out = splits if data.validation_file else group_split(splits[0], data, seed)
    digest = xxhash.xxh3_128()
    for split_pairs in (train, held_out):
        for pair in split_pairs:
            messages = [pair.prompt, pair.chosen, pair.rejected]
            digest.update(json.dumps(messages, ensure_ascii=False, sort_keys=True).encode())
        digest.update(b"\0")
    return PreferenceDataset(train, held_out, digest.hexdigest(), identical_pairs, quarantine)


def rows_to_pairs(rows: Sequence[Row], data: DataConfig, quarantine: Quarantine | None = None) -> list[PreferencePair]:
    """Make each row a pair; rows whose answers are the same are left out, others that make none are set aside."""
    invalid = Quarantine() if quarantine is None else quarantine
    if not rows:
        return []
    role_columns = map_preference_columns(rows[0], data.columns)
    pairs: list[PreferencePair] = []
    for row in rows:
        pair = _parse_pair(row, role_columns, data)
        if isinstance(pair, PreferencePair):
            pairs.append(pair)
        elif pair != IDENTICAL:
            invalid.add(row, pair)
    if quarantine is None:
        invalid.raise_if_over_limit()
    return pairs


def map_preference_columns(row: Row, columns: dict[str, Any]) -> dict[str, str]:
    """Which column plays which part: as the recipe says, and as the names say where they are the parts themselves."""
    configured = {role: column for column, role in columns.items() if role in PREFERENCE_ROLES}
    role_columns = {**{role: role for role in PREFERENCE_ROLES if role in row.values}, **configured}
    if missing := [column for column in role_columns.values() if column not in row.values]:
        raise DataError([Problem(row.where, f"there is no column {missing[0]!r}; {describe_columns(row)}")])
    if not {"chosen", "rejected"} <= set(role_columns):
        guessed = {
            column: PREFERENCE_COLUMN_HINTS[column] for column in row.values if column in PREFERENCE_COLUMN_HINTS
        }
        suggestion = guessed if {"chosen", "rejected"} <= {*guessed.values(), *role_columns} else {
            "QUESTION": "prompt", "BETTER": "chosen", "WORSE": "rejected"
        }  # fmt: skip
        line = ", ".join(f"{column}: {role}" for column, role in suggestion.items())
        message = f"no chosen and rejected; {describe_columns(row)}; say which is which: columns: {{{line}}}"
        raise DataError([Problem(row.where, message)])
    return role_columns


def _parse_pair(row: Row, role_columns: dict[str, str], data: DataConfig) -> PreferencePair | str:
    """The row as a pair, or what is wrong with it."""
    values = {role: row.values.get(column) for role, column in role_columns.items()}
    turns: dict[str, list[Message]] = {}
    for name in ("chosen", "rejected"):
        if _is_empty(values[name]):
            return f"{role_columns[name]!r} is empty; it wants text"
        messages = _parse_answer(values, name)
        if isinstance(messages, str):
            return f"{role_columns[name]!r}: {messages}"
        turns[name] = messages
    chosen, rejected = turns["chosen"], turns["rejected"]
    if chosen == rejected:
        return IDENTICAL
    prefix_length = next(index for index, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    if not any(turn["role"] == "user" for turn in chosen[:prefix_length]):
        return "chosen and rejected answer no common question; it wants a prompt"
    system = values.get("system") or (None if "system" in role_columns else data.system_prompt)
    if system and utf8_size(str(system)) is None:
        return LONE_SURROGATE
    prompt = add_system_message(chosen[:prefix_length], str(system) if system else None)
    if data.split_by and data.split_by not in row.values:
        return f"there is no column {data.split_by!r} to split by; {describe_columns(row)}"
    # the first question, as conversations are split: what one stage holds out, a later one mostly does too
    first_question = next(turn["content"] for turn in prompt if turn["role"] == "user")
    split_key = row.values[data.split_by] if data.split_by else first_question
    split_key = " ".join(str(split_key).lower().split())
    return PreferencePair(
        row.where, tuple(prompt), tuple(chosen[prefix_length:]), tuple(rejected[prefix_length:]), split_key
    )


def _parse_answer(values: dict[str, Any], name: str) -> list[Message] | str:
    """The prompt and one answer as checked turns; an answer that opens with the question needs no prompt."""
    answer = values[name]
    if isinstance(answer, list) and answer and isinstance(answer[0], dict) and answer[0].get("role") != "assistant":
        return validate_messages(answer)
    prompt = values.get("prompt")
    if _is_empty(prompt):
        return "there is no prompt before it; it wants a prompt, or messages that begin with the question"
    prompt_messages = append_context(prompt, values.get("context"))
    prompt_messages = (
        [{"role": "user", "content": prompt_messages}] if isinstance(prompt_messages, str) else prompt_messages
    )
    answer_messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not isinstance(prompt_messages, list) or not isinstance(answer_messages, list):
        return "prompt and answer want text or messages"
    return validate_messages([*prompt_messages, *answer_messages])


def _is_empty(value: Any) -> bool:
    return not value or (isinstance(value, str) and not value.strip())


@dataclass(frozen=True)
class TokenizedPair:
    """A pair as tokens; the prompt is what both answers share."""

    prompt: np.ndarray[Any, np.dtype[np.int32]]
    """Token ids: [length] int32, at least one."""
    chosen: TokenizedRow
    """What follows in the better answer."""
    rejected: TokenizedRow
    """What follows in the worse answer."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass
class TokenizedPairs:
    """All pairs of one side, with what was cut."""

    rows: list[TokenizedPair] = field(default_factory=list)
    truncated_rows: int = 0
    truncated_tokens: int = 0

    def stats(self) -> dict[str, int]:
        """The numbers of the data manifest; no pair is ever dropped."""
        answers = [answer for row in self.rows for answer in (row.chosen, row.rejected)]
        return {
            "rows": len(self.rows),
            "tokens": sum(len(row) for row in self.rows),
            "prompt_tokens": sum(len(row.prompt) for row in self.rows),
            "trained_tokens": int(sum(answer.loss_mask.sum() for answer in answers)),
            "truncated_rows": self.truncated_rows,
            "truncated_tokens": self.truncated_tokens,
            "dropped_rows": 0,
        }


def tokenize_pairs(
    pairs: Sequence[PreferencePair], tokenizer: Any, config: PreferenceConfig, stop_tokens: Collection[int] = ()
) -> TokenizedPairs:
    """Encode every pair; what does not fit is cut and counted, and too many cut pairs are an error."""
    stop_ids = {*stop_tokens, tokenizer.eos_token_id} - {None}
    dataset = TokenizedPairs()
    has_stop = False
    for pair in pairs:
        full_pair = tokenize_pair(pair, tokenizer)
        has_stop = has_stop or any(
            int(token) in stop_ids for token in full_pair.chosen.input_ids[full_pair.chosen.loss_mask]
        )
        truncated_pair = truncate_pair(full_pair, config.max_length)
        dataset.rows.append(truncated_pair)
        dataset.truncated_rows += truncated_pair is not full_pair
        dataset.truncated_tokens += len(full_pair) - len(truncated_pair)
    if pairs and not has_stop:
        message = "the chat template ends no answer with an end-of-text token, so the model would never learn to stop"
        raise DataError([Problem("data", message)])
    if dataset.truncated_rows > (limit := config.max_truncated_rows.resolve(len(pairs))):
        message = (
            f"{dataset.truncated_rows} of {len(pairs)} pairs are longer than max_length {config.max_length} and would "
            f"be cut, more than max_truncated_rows allows ({limit}); raise one of them"
        )
        raise DataError([Problem("data", message)])
    return dataset


def tokenize_pair(pair: PreferencePair, tokenizer: Any) -> TokenizedPair:
    """The tokens of a pair, divided where its two renderings part or the first answer begins."""
    rows = [tokenize_completion(pair.prompt, answer, tokenizer, pair.where) for answer in (pair.chosen, pair.rejected)]
    first = min(int(row.loss_mask.argmax()) for row in rows)
    differing = np.flatnonzero(rows[0].input_ids[:first] != rows[1].input_ids[:first])
    prompt_length = int(differing[0]) if len(differing) else first
    if prompt_length < 1:
        raise DataError([Problem(pair.where, "the prompt has no token")])
    tails = [TokenizedRow(row.input_ids[prompt_length:], row.loss_mask[prompt_length:]) for row in rows]
    return TokenizedPair(rows[0].input_ids[:prompt_length], *tails)


def truncate_pair(pair: TokenizedPair, max_length: int) -> TokenizedPair:
    """Cut answers at the end, to no less than half of the room, and then the prompt at its start; never to nothing."""
    longest_answer = max(len(pair.chosen), len(pair.rejected))
    if len(pair.prompt) + longest_answer <= max_length:
        return pair
    answer_limit = max(max_length - len(pair.prompt), max_length // 2)
    answers = [
        TokenizedRow(answer.input_ids[:answer_limit], answer.loss_mask[:answer_limit])
        for answer in (pair.chosen, pair.rejected)
    ]
    prompt = pair.prompt[-(max_length - min(longest_answer, answer_limit)) :]
    return TokenizedPair(prompt, *answers)
