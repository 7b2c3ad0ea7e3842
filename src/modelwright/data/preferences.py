"""Turn rows into preference pairs, and pairs into token ids with loss masks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data import chat
from modelwright.data.chat import Message, SplitDataset, TokenIds, TokenizedRow, to_messages, validate_messages
from modelwright.data.readers import Quarantine, Row, describe_columns
from modelwright.errors import DataError, Problem
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import PairConfig

PREFERENCE_ROLES = ("prompt", "context", "chosen", "rejected", "system")
PREFERENCE_COLUMN_HINTS = {"instruction": "prompt", "question": "prompt", "query": "prompt", "input": "context",
           "preferred": "chosen", "accepted": "chosen", "response_0": "chosen", "response_1": "rejected"}  # fmt: skip
"""The usual role of a column of that name; only used for suggestions in error messages."""
IDENTICAL = "identical"


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt."""

    where: str
    """File and line of the row."""
    prompt: tuple[Message, ...]
    """The messages that both answer."""
    chosen: tuple[Message, ...]
    """The preferred answer."""
    rejected: tuple[Message, ...]
    """The other answer."""
    split_key: str
    """Pairs with equal keys stay in one split."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation with the chosen answer."""
        return self.prompt + self.chosen

    @property
    def last_user_message(self) -> str:
        return next(message["content"] for message in reversed(self.prompt) if message["role"] == "user")

    @property
    def content(self) -> Any:
        return [self.prompt, self.chosen, self.rejected]


PreferenceDataset = SplitDataset[PreferencePair]


def load_preferences(data: DataConfig, seed: int, recipe_dir: Path) -> PreferenceDataset:
    """Read, check and split the pairs of a recipe; all problems are raised as one error."""
    empty_message = "there is no pair of different answers in it"
    train, held_out, quarantine = chat.load_splits(data, seed, recipe_dir, rows_to_pairs, empty_message)
    identical_pairs = quarantine.rows_read - len(quarantine.invalid_rows) - len(train) - len(held_out)
    counts = {"identical_pairs": identical_pairs}
    return PreferenceDataset(train, held_out, chat.hash_splits(train, held_out)[0], quarantine, counts)


def rows_to_pairs(rows: Sequence[Row], data: DataConfig, quarantine: Quarantine | None = None) -> list[PreferencePair]:
    """Parse each row; pairs of identical answers are left out, invalid rows quarantined, or raised if there is none."""
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
    """Which column has which role: by data.columns, and by column names that are roles."""
    configured = {role: column for column, role in columns.items() if role in PREFERENCE_ROLES}
    role_columns = {**{role: role for role in PREFERENCE_ROLES if role in row.values}, **configured}
    if missing := [column for column in role_columns.values() if column not in row.values]:
        raise DataError([Problem(row.where, f"there is no column {missing[0]!r}; {describe_columns(row.values)}")])
    if not {"chosen", "rejected"} <= set(role_columns):
        hints = PREFERENCE_COLUMN_HINTS
        guessed = {column: hints[column] for column in row.values if column in hints}
        suggestion = guessed if {"chosen", "rejected"} <= {*guessed.values(), *role_columns} else {
            "QUESTION": "prompt", "BETTER": "chosen", "WORSE": "rejected"
        }  # fmt: skip
        line = ", ".join(f"{column}: {role}" for column, role in suggestion.items())
        message = f"no chosen and rejected; {describe_columns(row.values)}; say which is which: columns: {{{line}}}"
        raise DataError([Problem(row.where, message)])
    return role_columns


def _parse_pair(row: Row, role_columns: dict[str, str], data: DataConfig) -> PreferencePair | str:
    """The pair of a row, IDENTICAL, or the reason why it is invalid."""
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
    prompt = chat.add_system_message(chosen[:prefix_length], system)
    if isinstance(prompt, str):
        return prompt
    if data.split_by and data.split_by not in row.values:
        return f"there is no column {data.split_by!r} to split by; {describe_columns(row.values)}"
    answers = tuple(chosen[prefix_length:]), tuple(rejected[prefix_length:])
    return PreferencePair(row.where, tuple(prompt), *answers, chat.get_split_key(row, prompt, data))


def _parse_answer(values: dict[str, Any], name: str) -> list[Message] | str:
    """Prompt and answer as validated messages; an answer that includes the prompt needs none."""
    answer = values[name]
    if isinstance(answer, list) and answer and isinstance(answer[0], dict) and answer[0].get("role") != "assistant":
        return validate_messages(answer)
    prompt = values.get("prompt")
    if _is_empty(prompt):
        return "there is no prompt before it; it wants a prompt, or messages that begin with the question"
    prompt_messages = to_messages("user", chat.append_context(prompt, values.get("context")))
    answer_messages = to_messages("assistant", answer)
    if not isinstance(prompt_messages, list) or not isinstance(answer_messages, list):
        return "prompt and answer want text or messages"
    return validate_messages([*prompt_messages, *answer_messages])


def _is_empty(value: Any) -> bool:
    return not value or (isinstance(value, str) and not value.strip())


@dataclass(frozen=True)
class TokenizedPair:
    """A tokenized pair; the prompt is the common prefix of both renderings."""

    prompt: TokenIds
    """Token ids: [length] int32, at least one."""
    chosen: TokenizedRow
    """The chosen answer."""
    rejected: TokenizedRow
    """The rejected answer."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass
class TokenizedPairs:
    """All pairs of one split, with truncation counts."""

    rows: list[TokenizedPair] = field(default_factory=list)
    truncated_rows: int = 0
    truncated_tokens: int = 0

    def stats(self) -> dict[str, int]:
        """The numbers of the data manifest; no pair is ever dropped."""
        answers = [answer for row in self.rows for answer in (row.chosen, row.rejected)]
        return {
            **vars(self),
            "rows": len(self.rows),
            "tokens": sum(len(row) for row in self.rows),
            "prompt_tokens": sum(len(row.prompt) for row in self.rows),
            "trained_tokens": int(sum(answer.loss_mask.sum() for answer in answers)),
            "dropped_rows": 0,
        }


def tokenize_pairs(
    pairs: Sequence[PreferencePair], tokenizer: Any, config: PairConfig, stop_tokens: Collection[int] = ()
) -> TokenizedPairs:
    """Tokenize all pairs; long ones are truncated; more than max_truncated_rows is an error."""
    stop_ids = {*stop_tokens, tokenizer.eos_token_id} - {None}
    dataset = TokenizedPairs()
    has_stop = False
    for pair in pairs:
        full_pair = tokenize_pair(pair, tokenizer)
        trained_ids = full_pair.chosen.input_ids[full_pair.chosen.loss_mask]
        has_stop = has_stop or bool(np.isin(trained_ids, list(stop_ids)).any())
        truncated_pair = truncate_pair(full_pair, config.max_length)
        dataset.rows.append(truncated_pair)
        dataset.truncated_rows += truncated_pair is not full_pair
        dataset.truncated_tokens += len(full_pair) - len(truncated_pair)
    chat.check_tokenized(dataset, len(pairs), "pairs", has_stop, config)
    return dataset


def tokenize_pair(pair: PreferencePair, tokenizer: Any) -> TokenizedPair:
    """Tokenize a pair; the prompt ends where the two renderings differ or the first answer begins."""
    rows = [
        chat.tokenize_completion(pair.prompt, answer, tokenizer, pair.where) for answer in (pair.chosen, pair.rejected)
    ]
    first = min(int(row.loss_mask.argmax()) for row in rows)
    differing = np.flatnonzero(rows[0].input_ids[:first] != rows[1].input_ids[:first])
    prompt_length = int(differing[0]) if len(differing) else first
    if prompt_length < 1:
        raise DataError([Problem(pair.where, "the prompt has no token")])
    tails = [TokenizedRow(row.input_ids[prompt_length:], row.loss_mask[prompt_length:]) for row in rows]
    return TokenizedPair(rows[0].input_ids[:prompt_length], *tails)


def truncate_pair(pair: TokenizedPair, max_length: int) -> TokenizedPair:
    """Truncate answers at the end, to at least half of max_length, then the prompt at its start."""
    longest_answer = max(len(pair.chosen), len(pair.rejected))
    if len(pair.prompt) + longest_answer <= max_length:
        return pair
    answer_limit = max(max_length - len(pair.prompt), max_length // 2)
    answers = [TokenizedRow(answer.input_ids[:answer_limit], answer.loss_mask[:answer_limit])
               for answer in (pair.chosen, pair.rejected)]  # fmt: skip
    prompt = pair.prompt[-(max_length - min(longest_answer, answer_limit)) :]
    return TokenizedPair(prompt, *answers)
