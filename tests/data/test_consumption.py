"""Every field of a row is used, is known to change nothing, is listed as not used, or is an error."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest

from modelwright.data.chat import rows_to_conversations
from modelwright.data.readers import Quarantine, Row
from modelwright.data.recognize import MEANINGS, MESSAGE_KEYS, ROLE_OF, TRAIN_KEYS, RowError, normalize_message
from modelwright.recipe.sections import DataConfig

DRAWS = 20_000 if os.environ.get("NIGHTLY") == "1" else 400
DATA = DataConfig(dataset_name="rows.jsonl", max_invalid_fraction=1.0)
CALL = {"function": {"name": "look_up", "arguments": {"word": "tent"}}}
USED = {"content": "Dry.", "tool_calls": [CALL], "name": "Ada", "tool_call_id": "a", "reasoning_content": "Because."}
"""A value of each key of a message that must change what is trained."""


def draw_word(rng: np.random.Generator) -> str:
    """A name that somebody may have given to a column or to a key."""
    known = [*ROLE_OF, *MEANINGS, *MESSAGE_KEYS, "thinking", "reasoning", "loss_mask", "is_correct", "audio", "refusal"]
    return str(rng.choice(known)) if rng.random() < 0.8 else "".join(rng.choice(list("abcdef"), 4))


def draw_row(rng: np.random.Generator) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": "Why?", "completion": "So."}
    if rng.random() < 0.5:
        row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
    return {**row, **{draw_word(rng): f"value {n}" for n in range(int(rng.integers(1, 4)))}}


def test_every_column_is_used_or_listed_or_an_error() -> None:
    listed = 0
    for seed in range(DRAWS):
        row = draw_row(np.random.default_rng(seed))
        quarantine = Quarantine()
        conversations = rows_to_conversations([Row("rows.jsonl:1", row)], DATA, quarantine)
        [*lines] = quarantine.lines()
        if not conversations:
            assert quarantine.invalid_rows, row
            continue
        rendered = json.dumps([[*each.messages] for each in conversations])
        for column, value in row.items():
            if isinstance(value, str) and value not in rendered:
                assert any(column in line.partition("not used: ")[2] for line in lines), (row, lines)
                listed += 1
    assert listed > DRAWS // 10, "the draws have columns that are not used"


def test_every_key_of_a_message_is_used_or_harmless_or_an_error() -> None:
    plain = normalize_message({"role": "assistant", "content": "So."})
    for key, value in USED.items():
        assert normalize_message({"role": "assistant", "content": "So.", key: value}) != plain, key
    refused = 0
    for seed in range(DRAWS):
        rng = np.random.default_rng([seed, 1])
        key = draw_word(rng)
        value = [0, False, 0.5, "text", ["text"], {"a": 1}][int(rng.integers(6))]
        if key not in MESSAGE_KEYS and not (key in TRAIN_KEYS and value in (0, False)):
            with pytest.raises(RowError, match=f"a turn has {key} .*, which is not used"):
                normalize_message({"role": "assistant", "content": "So.", key: value})
            refused += 1
        for neutral in (None, 1, True, "", [], {}):
            if key not in {*USED, "role", "from", "value", "text", "function_call"}:
                assert normalize_message({"role": "assistant", "content": "So.", key: neutral}) == plain
    assert refused > DRAWS // 5


def test_two_keys_for_one_thing_must_agree() -> None:
    assert normalize_message({"role": "assistant", "from": "gpt", "content": "So.", "value": "So."})["content"] == "So."
    assert normalize_message({"role": None, "from": "GPT", "content": None, "value": "So."})["role"] == "assistant"
    for turn, problem in (
        ({"role": "user", "content": "Why?", "value": "How?"}, "a turn has content and value, which differ"),
        ({"role": "user", "content": "Why?", "text": "How?"}, "a turn has content and text, which differ"),
        ({"role": "user", "from": "gpt", "content": "Why?"}, "a turn has role 'user' and from 'gpt', which differ"),
        ({"role": "user", "text": "Why?"}, "it wants a role of"),
        ({"role": "user", "content": "Why?", "name": float("nan")}, "name is 'nan'; it wants text"),
    ):
        with pytest.raises(RowError, match=problem):
            normalize_message(turn)


def test_every_key_of_a_tool_call_is_used_or_harmless_or_an_error() -> None:
    def turn(**keys: Any) -> dict[str, Any]:
        return normalize_message({"role": "assistant", "content": "", "tool_calls": [{**CALL, **keys}]})

    assert turn(id="a") != turn() and turn(type="function", index=0, custom=None) == turn()
    function = {**CALL["function"], "strict": {"a": 1}}
    for keys in ({"type": "custom"}, {"output": "wet"}, {"weight": 0}, {"function": function}):
        with pytest.raises(RowError, match=r"a tool call has .*, which is not used"):
            turn(**keys)
    with pytest.raises(RowError, match="a tool call has output"):
        normalize_message({"role": "assistant", "content": "", "function_call": {"name": "f", "output": "wet"}})
