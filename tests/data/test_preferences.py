"""Preference pairs of many formats are parsed; rows that are no pair are reported with their location."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.data import chat_tokens, preferences
from modelwright.data.audit import AuditConfig, audit
from modelwright.data.preferences import (
    PreferencePair,
    load_preferences,
    tokenize_pair,
    tokenize_pairs,
    truncate_pair,
)
from modelwright.errors import DataError
from modelwright.recipe.sections import CountOrFraction, DataConfig
from modelwright.recipe.stage_specs import DpoConfig

QUESTION, GOOD, BAD = "Which way is north?", "Follow the moss.", "Who cares."


def user(text: str = QUESTION) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(folder: Path, *rows: dict[str, Any], **config: Any) -> list[PreferencePair]:
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return load_preferences(DataConfig(**{"train_file": "pairs.jsonl", "test_size": 0, **config}), 1, folder).train


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD},
        {"prompt": [user()], "chosen": [says(GOOD)], "rejected": [says(BAD)]},
        {"chosen": [user(), says(GOOD)], "rejected": [user(), says(BAD)]},
        {"prompt": QUESTION, "chosen": [user(), says(GOOD)], "rejected": [user(), says(BAD)]},
        {"prompt": QUESTION, "chosen": GOOD, "rejected": [says(BAD)]},
    ],
    ids=["texts", "messages", "whole conversations", "both", "mixed"],
)
def test_every_usual_shape_gives_the_same_pair(row: dict[str, Any], tmp_path: Path) -> None:
    [pair] = read(tmp_path, row)
    assert (pair.prompt, pair.chosen, pair.rejected) == ((user(),), (says(GOOD),), (says(BAD),))
    [pair] = read(tmp_path, row, system_prompt="You are a ranger.")
    assert pair.prompt == ({"role": "system", "content": "You are a ranger."}, user())


def test_an_instruction_with_its_input_is_one_prompt(tmp_path: Path) -> None:
    row = {"instruction": "Correct it.", "input": "freind", "output": "x", "chosen": "friend", "rejected": "frend"}
    columns = {"instruction": "prompt", "input": "context"}
    [pair, bare] = read(tmp_path, row, {**row, "input": ""}, columns=columns)
    assert (pair.last_user_message, bare.last_user_message) == ("Correct it.\n\nfreind", "Correct it.")


def test_a_long_conversation_shares_all_that_comes_before_the_answers_part(tmp_path: Path) -> None:
    before = [user("Hello"), says("Hello."), user()]
    [pair] = read(tmp_path, {"chosen": [*before, says(GOOD)], "rejected": [*before, says(BAD)]})
    assert pair.prompt == tuple(before)
    assert pair.last_user_message == QUESTION


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": GOOD, "rejected": BAD}, "there is no prompt before it"),
        ({"prompt": QUESTION, "chosen": " ", "rejected": BAD}, "'chosen' is empty"),
        ({"prompt": QUESTION, "chosen": GOOD, "rejected": None}, "'rejected' is empty"),
        ({"prompt": QUESTION, "chosen": [user()], "rejected": BAD}, "the last turn is not an answer"),
        ({"chosen": [user(), says(GOOD)], "rejected": [user("Else?"), says(BAD)]}, "answer no common question"),
        ({"prompt": QUESTION, "chosen": 3, "rejected": BAD}, "want text or messages"),
        ({"prompt": QUESTION, "chosen": "\ud83d", "rejected": BAD}, "half a character"),
    ],
)
def test_a_row_that_makes_no_pair_is_reported_with_its_location(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as output:
        read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    assert "pairs.jsonl:2" in str(output.value)


def test_unknown_columns_are_answered_with_a_guess(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"columns: {question: prompt, preferred: chosen, WORSE: rejected}"):
        read(tmp_path, {"question": QUESTION, "preferred": GOOD, "response_1": BAD})


def test_pairs_whose_answers_are_the_same_are_left_out_and_counted(tmp_path: Path) -> None:
    same = {"prompt": QUESTION, "chosen": GOOD, "rejected": GOOD}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(same) + "\n" + json.dumps({**same, "rejected": BAD}))
    data = DataConfig(train_file="pairs.jsonl", test_size=0)
    result = load_preferences(data, 1, tmp_path)
    assert (len(result.train), result.manifest(data)["identical_pairs"]) == (1, 1)


def test_pairs_of_one_prompt_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n % 10}?", "chosen": f"Good {n}.", "rejected": "Bad."} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = DataConfig(train_file="pairs.jsonl", test_size=3)
    result = load_preferences(data, 1, tmp_path)
    assert (len(result.train), len(result.held_out)) == (28, 12)
    assert result.manifest(data)["prompts_in_both_splits"] == 0
    assert load_preferences(data, 1, tmp_path).fingerprint == result.fingerprint
    assert load_preferences(data, 2, tmp_path).fingerprint != result.fingerprint


def test_a_published_set_of_instructions_with_preferences_is_read_whole(shared: Path) -> None:
    file = shared / "data/rasbt-instruct/instruction-data-with-preference.json"
    data = DataConfig(train_file=str(file), columns={"instruction": "prompt", "input": "context"})
    result = load_preferences(data, 1, Path())
    assert len(result.train) + len(result.held_out) == 1100 - 6
    assert result.counts["identical_pairs"] == 6


def test_a_stored_data_set_folder_is_read(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"chosen": [user(), says(GOOD)], "rejected": [user(), says(BAD)]}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "stored")
    [pair] = load_preferences(DataConfig(dataset_name="stored", test_size=0), 1, tmp_path).train
    assert pair.chosen == (says(GOOD),)


def test_the_prompt_ends_where_the_answers_begin(tokenizer: Any) -> None:
    pair = PreferencePair("here", (user("Hello"), says("Hello."), user()), (says(GOOD),), (says(BAD),), "")
    tokens = tokenize_pair(pair, tokenizer)
    assert tokenizer.decode(tokens.prompt).endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokens.chosen.input_ids) == f"{GOOD}<|im_end|>\n"
    assert tokenizer.decode(tokens.rejected.input_ids) == f"{BAD}<|im_end|>\n"
    assert tokens.chosen.loss_mask.all() and tokens.rejected.loss_mask.all(), "earlier answers are read, not trained on"


def test_a_long_pair_is_cut_at_both_ends_and_never_to_nothing(tokenizer: Any) -> None:
    pair = PreferencePair("here", (user(QUESTION * 5),), (says(GOOD * 9),), (says(BAD),), "")
    full = tokenize_pair(pair, tokenizer)
    assert truncate_pair(full, 1000) is full
    cut = truncate_pair(full, 40)
    assert (len(cut.prompt), len(cut.chosen)) == (20, 20)
    assert cut.rejected.input_ids.tolist() == full.rejected.input_ids.tolist()
    assert cut.prompt.tolist() == full.prompt[-20:].tolist()


def test_answers_give_way_before_a_prompt_that_takes_less_than_half(tokenizer: Any) -> None:
    full = tokenize_pair(PreferencePair("here", (user(),), (says(GOOD * 9),), (says(BAD),), ""), tokenizer)
    cut = truncate_pair(full, 2 * len(full.prompt) + 3)
    assert cut.prompt.tolist() == full.prompt.tolist()
    assert cut.chosen.input_ids.tolist() == full.chosen.input_ids[: len(full.prompt) + 3].tolist()


def test_pairs_are_tokenized_together_as_if_alone_and_kept(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(chat_tokens, "MIN_CACHED_ITEMS", 4)
    pairs = [PreferencePair("here", (user(QUESTION * n),), (says(GOOD * n),), (says(BAD),), "") for n in range(1, 6)]
    alone = [tokenize_pair(pair, tokenizer) for pair in pairs]
    for _ in range(2):
        together = tokenize_pairs(pairs, tokenizer, DpoConfig(max_length=4096), [], "rows:train").rows
        for pair, other in zip(together, alone, strict=True):
            assert pair.prompt.tolist() == other.prompt.tolist()
            assert pair.chosen.input_ids.tolist() == other.chosen.input_ids.tolist()
            assert pair.rejected.loss_mask.tolist() == other.rejected.loss_mask.tolist()
        monkeypatch.setattr(preferences, "tokenize_completions", None)


def test_audit_and_run_count_prompts_in_both_splits_alike(tmp_path: Path) -> None:
    rows = [{"prompt": f"Where is well {n % 6}?", "chosen": f"There {n}.", "rejected": "No.", "topic": str(n)}
            for n in range(24)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(train_file="rows.jsonl", split_by="topic", test_size=CountOrFraction(6))
    counted = load_preferences(data, 42, tmp_path).manifest(data)["prompts_in_both_splits"]
    split = audit(data, AuditConfig("pairs", 64, 4, 42), tmp_path).stats["split"]
    assert split["prompts_in_both_splits"] == counted > 0 == split["groups_in_both_splits"]
