"""Rows become conversations by the roles of their columns, and no prompt is in both splits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from modelwright.data.chat import (
    Conversation,
    build_prompt_messages,
    group_split,
    load_conversations,
    rows_to_conversations,
)
from modelwright.data.readers import Row
from modelwright.data.sources import read_train_rows
from modelwright.errors import DataError
from modelwright.recipe.sections import CountOrFraction, DataConfig

PARTS = {"question": "prompt", "answer": "completion"}


def rows_of(*values: dict[str, Any]) -> list[Row]:
    return [Row(f"rows.jsonl:{number}", value) for number, value in enumerate(values, 1)]


def data_of(**settings: Any) -> DataConfig:
    return DataConfig(train_file="rows.jsonl", **settings)


def problems_of(rows: list[Row], **settings: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        rows_to_conversations(rows, data_of(**settings))
    return str(caught.value).splitlines()


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def questions(count: int, repeats: int = 1) -> list[Row]:
    return rows_of(*({"question": f"Q{n}", "answer": f"A{n}-{k}"} for n in range(count) for k in range(repeats)))


def test_a_question_and_an_answer_become_two_turns() -> None:
    [result] = rows_to_conversations(rows_of({"question": "Why?", "answer": "So."}), data_of(columns=PARTS))
    assert result.messages == (turn("user", "Why?"), turn("assistant", "So."))
    assert (result.where, result.last_user_message) == ("rows.jsonl:1", "Why?")


def test_a_folder_that_holds_one_set_in_two_forms_is_read_once(tmp_path: Path) -> None:
    rows = [{"question": f"Q{n}", "answer": f"A{n}"} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "rows.csv").write_text(
        "question,answer\n" + "".join(f"Q{n},A{n}\n" for n in range(6)), encoding="utf-8"
    )
    for source, notes in ((tmp_path / "rows.jsonl", 0), (tmp_path, 1)):
        config = DataConfig(dataset_name=str(source), columns=PARTS, test_size=CountOrFraction(1))
        result = load_conversations(config, 1, tmp_path)
        assert (result.manifest(config)["duplicate_rows"], len(result.quarantine.notes)) == (0, notes)


def test_columns_that_are_called_what_they_are_need_no_mapping() -> None:
    turns = [turn("user", "Why?"), turn("assistant", "So.")]
    for row in (
        {"prompt": "Why?", "completion": "So."},
        {"messages": turns},
        {"prompt": turns[:1], "completion": turns[1:]},
    ):
        [result] = rows_to_conversations(rows_of(row), data_of())
        assert result.messages == tuple(turns)


def test_a_system_message_comes_from_the_recipe_or_from_a_column() -> None:
    row = {"question": "Why?", "answer": "So.", "voice": "Be brief."}
    [ours] = rows_to_conversations(rows_of(row), data_of(columns=PARTS, system_prompt="You are a ranger."))
    [theirs] = rows_to_conversations(rows_of(row), data_of(columns={**PARTS, "voice": "system"}))
    assert ours.messages[0] == turn("system", "You are a ranger.")
    assert theirs.messages[0] == turn("system", "Be brief.")
    assert list(ours.messages[:2]) == build_prompt_messages("Why?", "You are a ranger.")


def test_a_conversation_that_has_a_system_message_keeps_its_own() -> None:
    turns = [turn("system", "Mine."), turn("user", "Why?"), turn("assistant", "So.")]
    [result] = rows_to_conversations(rows_of({"messages": turns}), data_of(system_prompt="Yours."))
    assert result.messages[0] == turn("system", "Mine.")


def test_columns_that_nobody_can_guess_are_answered_with_an_example() -> None:
    [message] = problems_of(rows_of({"left": "Why?", "right": "So."}))
    assert message.endswith("say which is which: data.columns: {QUESTION: prompt, ANSWER: completion}")


def test_a_column_that_is_not_there_is_reported_with_those_that_are() -> None:
    [message] = problems_of(rows_of({"query": "Why?", "answer": "So."}), columns=PARTS)
    assert message == "rows.jsonl:1: there is no column 'question'; the columns are query, answer"


def test_a_column_that_only_a_later_row_lacks_is_reported_with_its_line() -> None:
    rows = rows_of({"question": "Why?", "answer": "So."}, {"question": "Why not?"})
    assert problems_of(rows, columns=PARTS) == ["rows.jsonl:2: 'answer' is empty; it wants text"]


def test_every_row_that_is_invalid_is_reported_at_once() -> None:
    rows = rows_of(
        {"question": "Why?", "answer": "  "},
        {"question": "Why?", "answer": "So."},
        {"question": None, "answer": "So."},
        {"question": 7, "answer": "So."},
    )
    assert problems_of(rows, columns=PARTS) == [
        "rows.jsonl:1: 'answer' is empty; it wants text",
        "rows.jsonl:3: 'question' is empty; it wants text",
        "rows.jsonl:4: 'question' is 7; it wants text",
    ]


def test_problems_of_one_kind_are_one_line_and_of_many_kinds_the_rest_are_counted() -> None:
    output = problems_of(rows_of(*({"question": "", "answer": "So."} for _ in range(25))), columns=PARTS)
    message = "'question' is empty; it wants text (25 rows like it, such as rows.jsonl:2 and rows.jsonl:3)"
    assert output == [f"rows.jsonl:1: {message}"]
    names = [f"column-{chr(97 + n)}" for n in range(22)]
    output = problems_of(rows_of(*({name: "x", "messages": 1} for name in names), *({name: 1} for name in names)))
    assert len(output) == 2, "the names of columns are no other kind"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "messages is empty or no list; it wants a list of {role, content}"),
        ("Why?", "messages is empty or no list; it wants a list of {role, content}"),
        (None, "messages is empty or no list; it wants a list of {role, content}"),
        ([turn("user", "Why?")], "the last turn is not an answer of the assistant; no assistant message to train on"),
        ([turn("assistant", "So.")], "no turn is the user's; it wants a question before the answer"),
        (
            [{"from": "narrator", "value": "Why?"}],
            "a turn is \"{'from': 'narrator', 'value': 'Why?'}\"; it wants a role of system, user, assistant, tool "
            "and a text content",
        ),
    ],
)
def test_turns_that_are_no_conversation_are_reported(turns: Any, message: str) -> None:
    assert problems_of(rows_of({"messages": turns})) == [f"rows.jsonl:1: {message}"]


def test_half_a_character_is_reported_and_reaches_no_tokenizer() -> None:
    [message] = problems_of(rows_of({"question": json.loads('"cut \\ud83d"'), "answer": "So."}), columns=PARTS)
    assert message == "rows.jsonl:1: the text holds half a character (a lone surrogate), which no tokenizer takes"


def test_the_column_to_split_by_must_be_there() -> None:
    [message] = problems_of(questions(1), columns=PARTS, split_by="topic")
    assert message == "rows.jsonl:1: there is no column 'topic' to split by; the columns are question, answer"


def test_no_question_is_in_both_splits() -> None:
    items = rows_to_conversations(questions(50, repeats=4), data_of(columns=PARTS))
    train, held_out = group_split(items, data_of(test_size="20%"), seed=1)
    assert len(train) == 160
    assert len(held_out) == 40
    assert not {item.split_key for item in train} & {item.split_key for item in held_out}


def test_questions_that_differ_in_case_and_spaces_are_one_question() -> None:
    rows = rows_of({"question": "Why  NOT?", "answer": "a"}, {"question": " why not? ", "answer": "b"})
    assert len({item.split_key for item in rows_to_conversations(rows, data_of(columns=PARTS))}) == 1


def test_whole_topics_can_be_held_out() -> None:
    rows = rows_of(*({"topic": f"t{n % 5}", "question": f"Q{n}", "answer": "A"} for n in range(25)))
    data = data_of(columns=PARTS, split_by="topic", test_size=2)
    train, held_out = group_split(rows_to_conversations(rows, data), data, seed=0)
    assert (len(train), len(held_out)) == (15, 10)


def test_the_split_is_the_same_whatever_the_order_of_rows() -> None:
    items = rows_to_conversations(questions(60, repeats=2), data_of(columns=PARTS))
    mixed = random.Random(3).sample(items, len(items))
    sides = [group_split(order, data_of(test_size=10), seed=5) for order in (items, mixed)]
    for ours, theirs in zip(*sides, strict=True):
        assert {item.where for item in ours} == {item.where for item in theirs}


def test_another_seed_holds_out_other_questions() -> None:
    items = rows_to_conversations(questions(60), data_of(columns=PARTS))
    held_out = [{item.split_key for item in group_split(items, data_of(test_size=10), seed=seed)[1]} for seed in (1, 2)]
    assert held_out[0] != held_out[1]


def test_one_more_question_moves_few_others_across_the_split() -> None:
    fewer, more = (rows_to_conversations(questions(count), data_of(columns=PARTS)) for count in (100, 101))
    held_out = [
        {item.split_key for item in group_split(items, data_of(test_size=10), seed=1)[1]} for items in (fewer, more)
    ]
    assert len(held_out[0] & held_out[1]) >= 9


def test_holding_everything_out_is_an_error() -> None:
    items = rows_to_conversations(questions(3, repeats=2), data_of(columns=PARTS))
    output = "rows.jsonl: test_size holds out 3 of 3 distinct groups, which leaves none to train on"
    with pytest.raises(DataError, match=output):
        group_split(items, data_of(test_size=3), seed=0)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.jsonl: there is no row in it"):
        load_conversations(data_of(columns=PARTS), 0, tmp_path)


def test_the_fingerprint_shows_one_changed_character_and_the_manifest_counts(tmp_path: Path) -> None:
    lines = [json.dumps(row.values) for row in questions(20)]
    result = []
    for text in ("\n".join(lines), "\n".join(lines).replace("A7-0", "A7-1")):
        (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
        result.append(load_conversations(data_of(columns=PARTS, test_size=5), 0, tmp_path))
    assert result[0].fingerprint != result[1].fingerprint
    facts = result[0].manifest(data_of())
    assert (facts["train_rows"], facts["held_out_rows"], facts["prompts_in_both_splits"]) == (15, 5, 0)


def test_a_validation_file_is_held_out_whole_and_shared_questions_are_counted(tmp_path: Path) -> None:
    for name, rows in (("rows.jsonl", questions(6)), ("held.jsonl", questions(2))):
        (tmp_path / name).write_text("\n".join(json.dumps(row.values) for row in rows), encoding="utf-8")
    data = data_of(columns=PARTS, validation_file="held.jsonl")
    facts = load_conversations(data, 0, tmp_path).manifest(data)
    assert (facts["train_rows"], facts["held_out_rows"], facts["prompts_in_both_splits"]) == (6, 2, 2)


def test_questions_in_both_splits_are_counted_whatever_the_split_goes_by(tmp_path: Path) -> None:
    data = DataConfig(dataset_name="field-guide-editions", columns=PARTS, split_by="row", test_size=16)
    assert load_conversations(data, 42, tmp_path).manifest(data)["prompts_in_both_splits"] > 4, (
        "though every row is a group of its own"
    )
    honest = data.model_copy(update={"split_by": "question"})
    assert load_conversations(honest, 42, tmp_path).manifest(honest)["prompts_in_both_splits"] == 0


def test_a_random_split_of_the_practical_skills_would_leak_and_ours_does_not(shared: Path) -> None:
    folder = shared / "data" / "practical-skills-qa"
    data = DataConfig(train_file="qa_dataset.parquet", columns={"full-question": "prompt", "answer": "completion"})
    items = rows_to_conversations(read_train_rows(data, folder), data)
    mixed = random.Random(0).sample(items, len(items))
    held = len(items) // 10
    assert on_both_sides(mixed[held:], mixed[:held]) > 100
    assert on_both_sides(*group_split(items, data, seed=42)) == 0


def on_both_sides(train: list[Conversation], held_out: list[Conversation]) -> int:
    return len({item.split_key for item in train} & {item.split_key for item in held_out})
