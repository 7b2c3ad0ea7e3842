"""Turn rows into preference pairs, and pairs into token ids with loss masks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data import chat
from modelwright.data.chat import SplitDataset
from modelwright.data.chat_tokens import (
    PromptCompletion,
    TokenIds,
    TokenizedRow,
    add_example,
    check_tokenized,
    tokenize_completions,
    tokenize_items,
)
from modelwright.data.readers import DroppedRow, InvalidRow, Quarantine, Row
from modelwright.data.recognize import (
    Message,
    Recognized,
    RowError,
    add_system_message,
    check_meaning,
    pair_messages,
    parse_tools,
)
from modelwright.errors import DataError, Problem
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import PairConfig

IDENTICAL = "the two answers are the same; there is nothing to prefer"


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
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that the assistant may call."""
    source: str = ""
    """Its source in a mixture."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation with the chosen answer."""
        return self.prompt + self.chosen

    @property
    def last_user_message(self) -> str:
        return chat.find_prompt(reversed(self.prompt))

    @property
    def content(self) -> Any:
        return [self.prompt, self.chosen, self.rejected, *([self.tools] if self.tools else ())]


PreferenceDataset = SplitDataset[PreferencePair]


def load_preferences(data: DataConfig, seed: int, recipe_dir: Path) -> PreferenceDataset:
    """Read, check and split the pairs of a recipe; all problems are raised as one error."""
    empty_message = "there is no pair of different answers in it"
    train, held_out, quarantine = chat.load_splits(data, seed, recipe_dir, rows_to_pairs, empty_message)
    counts = {"identical_pairs": len(quarantine.dropped_rows)}
    fingerprint, key_order, _ = chat.hash_splits(train, held_out, data)
    return PreferenceDataset(train, held_out, fingerprint, quarantine, counts, data, key_order)


def rows_to_pairs(
    rows: Iterable[Row | InvalidRow], data: DataConfig, quarantine: Quarantine | None = None
) -> list[PreferencePair]:
    """Parse each row; pairs of identical answers are dropped, invalid rows quarantined, or raised if there is none."""
    return chat.parse_rows(rows, data, "pairs", _build_pair, quarantine)


def _build_pair(row: Row, recognized: Recognized, data: DataConfig) -> PreferencePair:
    names = recognized.columns
    values = {role: row.values.get(column) for role, column in names.items()}
    chosen, rejected = (pair_messages(values, names, role) for role in ("chosen", "rejected"))
    check_meaning(recognized, row.values, [*chosen, *rejected])
    if chosen == rejected:
        raise DroppedRow(IDENTICAL)
    scores = [_score(values.get(role)) for role in ("score_chosen", "score_rejected")]
    if scores[0] < scores[1]:
        raise RowError(f"{names['score_chosen']!r} is {scores[0]:g}, below the {scores[1]:g} of the rejected answer")
    length = next((index for index, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
    if not any(turn["role"] == "user" for turn in chosen[:length]):
        raise RowError("chosen and rejected answer no common question; it wants a prompt")
    prompt = add_system_message(chosen[:length], values, names, data.system_prompt)
    answers = tuple(chosen[length:]), tuple(rejected[length:])
    split_key, tools = chat.get_split_key(row, prompt, data), parse_tools(values.get("tools"))
    return PreferencePair(row.where, tuple(prompt), *answers, split_key, tools)


def _score(value: Any) -> float:
    """A score as a number, also from CSV; NaN for anything else, which is below nothing."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return nan


@dataclass(frozen=True)
class TokenizedPair:
    """A tokenized pair; the prompt is the common prefix of both renderings."""

    prompt: TokenIds
    """Token ids: [length] int32, at least one."""
    chosen: TokenizedRow
    """The chosen answer."""
    rejected: TokenizedRow
    """The rejected answer."""
    source: str = ""
    """Its source in a mixture."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass
class TokenizedPairs:
    """All pairs of one split, with truncation counts."""

    rows: list[TokenizedPair] = field(default_factory=list)
    truncated_rows: int = 0
    truncated_tokens: int = 0
    longest_row: int = 0
    truncated_examples: list[str] = field(default_factory=list)

    def stats(self) -> dict[str, Any]:
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
    pairs: Sequence[PreferencePair],
    tokenizer: Any,
    config: PairConfig,
    stop_tokens: Collection[int] = (),
    cache_key: str = "",
) -> TokenizedPairs:
    """Tokenize all pairs; long ones are truncated; more than max_truncated_rows is an error."""
    stop_ids = {*stop_tokens, tokenizer.eos_token_id} - {None}
    dataset = TokenizedPairs()
    has_stop = False
    tokenized = tokenize_items(pairs, tokenizer, partial(_tokenize_answers, tokenizer=tokenizer), cache_key)
    for pair, answers in zip(pairs, tokenized, strict=True):
        full_pair = _split_prompt(pair, answers)
        trained_ids = full_pair.chosen.input_ids[full_pair.chosen.loss_mask]
        has_stop = has_stop or bool(np.isin(trained_ids, list(stop_ids)).any())
        longest_answer = max(len(full_pair.chosen), len(full_pair.rejected))
        dataset.longest_row = max(dataset.longest_row, len(full_pair.prompt) + longest_answer)
        truncated_pair = truncate_pair(full_pair, config.max_length)
        dataset.rows.append(truncated_pair)
        if truncated_pair is not full_pair:
            dataset.truncated_rows += 1
            add_example(dataset.truncated_examples, f"{pair.where} ({len(full_pair):,} tokens)")
        dataset.truncated_tokens += len(full_pair) - len(truncated_pair)
    check_tokenized(dataset, len(pairs), "pairs", has_stop, config)
    return dataset


def tokenize_pair(pair: PreferencePair, tokenizer: Any) -> TokenizedPair:
    """Tokenize one pair."""
    return _split_prompt(pair, _tokenize_answers([pair], tokenizer)[0])


def _tokenize_answers(pairs: Sequence[PreferencePair], tokenizer: Any) -> list[list[TokenizedRow]]:
    """The prompt with the chosen, and with the rejected answer of each pair."""
    completions = [PromptCompletion(pair.prompt, answer, pair.tools, pair.where)
                   for pair in pairs for answer in (pair.chosen, pair.rejected)]  # fmt: skip
    rows = [row for [row] in tokenize_completions(completions, tokenizer)]
    return [rows[index : index + 2] for index in range(0, len(rows), 2)]


def _split_prompt(pair: PreferencePair, rows: Sequence[TokenizedRow]) -> TokenizedPair:
    """The prompt ends where the two rows differ or the first answer begins."""
    first = min(int(row.loss_mask.argmax()) for row in rows)
    differing = np.flatnonzero(rows[0].input_ids[:first] != rows[1].input_ids[:first])
    prompt_length = int(differing[0]) if len(differing) else first
    if prompt_length < 1:
        raise DataError([Problem(pair.where, "the prompt has no token")])
    chosen, rejected = (row[prompt_length:] for row in rows)
    return TokenizedPair(rows[0].input_ids[:prompt_length], chosen, rejected, pair.source)


def truncate_pair(pair: TokenizedPair, max_length: int) -> TokenizedPair:
    """Truncate answers at the end, to at least half of max_length, then the prompt at its start."""
    longest_answer = max(len(pair.chosen), len(pair.rejected))
    if len(pair.prompt) + longest_answer <= max_length:
        return pair
    answer_limit = max(max_length - len(pair.prompt), max_length // 2)
    prompt = pair.prompt[-(max_length - min(longest_answer, answer_limit)) :]
    return TokenizedPair(prompt, pair.chosen[:answer_limit], pair.rejected[:answer_limit], pair.source)
