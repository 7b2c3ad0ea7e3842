"""Every format that people keep rows in is read as what it means, or refused with the column and what would work."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from modelwright.data.chat import Conversation, load_conversations, rows_to_conversations
from modelwright.data.preferences import load_preferences, rows_to_pairs
from modelwright.data.readers import Quarantine, Row
from modelwright.data.row_formats import infer_row_format
from modelwright.data.shards import rows_to_documents
from modelwright.data.sources import iter_train_rows
from modelwright.errors import DataError, ModelwrightError
from modelwright.recipe.sections import DataConfig

Q, A, BAD = "Where is the well?", "Behind the barn.", "No idea."


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def post(word: str, value: str) -> dict[str, str]:
    return {"from": word, "value": value}


QA = [turn("user", Q), turn("assistant", A)]
SYSTEM = turn("system", "Be brief.")
CALL = {"name": "find", "arguments": {"what": "well"}}
CALLED = {"type": "function", "function": CALL}
TOOL = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": {"type": "object"}}}
TOOL_TURNS = [
    turn("user", Q), turn("assistant", "", tool_calls=[CALLED]), turn("tool", '{"at": "barn"}'), turn("assistant", A)
]  # fmt: skip
PAIR = ([turn("user", Q)], [turn("assistant", A)], [turn("assistant", BAD)])


class Case(NamedTuple):
    """A file, and what it is read as: messages, a pair, documents, or a part of the error message."""

    name: str
    content: Any
    expected: Any
    line: str = ""
    config: dict[str, Any] | None = None


def rows(*values: dict[str, Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def table(*values: dict[str, Any]) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(list(values))


def compress(data: bytes, codec: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def ipc(stream: bool) -> bytes:
    sink, data = pyarrow.BufferOutputStream(), table({"question": Q, "answer": A})
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(sink, data.schema) as writer:
        writer.write_table(data)
    return bytes(sink.getvalue())


def parquet(*values: dict[str, Any]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table(*values), sink)
    return bytes(sink.getvalue())


HUMAN = f"\n\nHuman: {Q}\n\nAssistant:"
ONE = {"question": Q, "answer": A}
SHAREGPT = {"conversations": [post("human", Q), post("gpt", A)]}
SFT = [
    # messages
    Case("openai.jsonl", rows({"messages": QA}), QA, "read as messages: messages → messages"),
    Case("parts.jsonl", rows({"messages": [{"role": "user", "content": [{"type": "text", "text": "Where is "},
         {"type": "text", "text": "the well?"}]}, QA[1]]}), QA),
    Case("developer.jsonl", rows({"messages": [turn("developer", "Be brief."), *QA]}), [SYSTEM, *QA]),
    Case("null_content.jsonl", rows({"messages": [QA[0], {"role": "assistant", "content": None, "tool_calls": [
         {"id": "1", "type": "function", "function": {"name": "find", "arguments": json.dumps(CALL["arguments"])}}]},
         turn("tool", "barn", tool_call_id="1"), QA[1]]}),
         [QA[0], turn("assistant", "", tool_calls=[{"id": "1", **CALLED}]), turn("tool", "barn", tool_call_id="1"),
          QA[1]]),
    Case("reasoning.jsonl", rows({"messages": [QA[0], {**QA[1], "reasoning_content": "Barns have wells."}]}),
         [QA[0], {**QA[1], "reasoning_content": "Barns have wells."}]),
    Case("legacy_call.jsonl", rows({"messages": [QA[0], {"role": "assistant", "content": None, "function_call": CALL},
         {"role": "function", "name": "find", "content": "barn"}, QA[1]]}),
         [QA[0], turn("assistant", "", tool_calls=[CALLED]), turn("tool", "barn", name="find"), QA[1]]),
    Case("capital_messages.jsonl", rows({"Messages": QA}), QA, "read as messages: Messages → messages"),
    Case("repeated_prompt.jsonl", rows({"prompt": Q, "prompt_id": "7", "messages": QA}), QA, "not used: prompt, "),
    Case("messages_as_text.csv", 'messages\n"' + json.dumps(QA).replace('"', '""') + '"\n', QA),
    Case("trained_turns.jsonl", rows({"messages": [QA[0], {**QA[1], "weight": 1, "train": True}]}), QA),
    Case("tools_as_text.jsonl", rows({"messages": QA, "tools": json.dumps([TOOL])}), QA, "tools → tools"),
    Case("system_column.jsonl", rows({"system": "Be brief.", "messages": QA}), [SYSTEM, *QA], "system → system"),
    Case("messages.parquet", parquet({"messages": QA}, {"messages": TOOL_TURNS}), QA),
    # ShareGPT
    Case("sharegpt.json", json.dumps([SHAREGPT]), QA, "read as ShareGPT: conversations → messages"),
    Case("sharegpt_tools.jsonl", rows({"conversations": [post("human", Q), post("function_call", json.dumps(CALL)),
         post("observation", '{"at": "barn"}'), post("gpt", A)], "tools": json.dumps([TOOL])}), TOOL_TURNS),
    Case("sharegpt_response.jsonl", rows({"conversations": [post("human", Q), post("function_call", json.dumps([CALL])),
         post("tool_response", '{"at": "barn"}'), post("gpt", A)]}), TOOL_TURNS),
    Case("conversation.jsonl", rows({"conversation": [post("system", "Be brief."), post("human", Q), post("gpt", A)]}),
         [SYSTEM, *QA]),
    # Alpaca
    Case("alpaca.json", json.dumps([{"instruction": Q, "input": "", "output": A}]), QA,
         "read as Alpaca: instruction → prompt, input → context, output → completion"),
    Case("alpaca_input.json", json.dumps({"data": [{"instruction": "Correct it.", "input": "freind",
         "output": "friend"}]}), [turn("user", "Correct it.\n\nfreind"), turn("assistant", "friend")]),
    Case("alpaca_history.jsonl", rows({"instruction": Q, "input": "", "output": A, "system": "Be brief.",
         "history": [["Hello", "Hi."]]}), [SYSTEM, turn("user", "Hello"), turn("assistant", "Hi."), *QA]),
    Case("alpaca_no_input.jsonl", rows({"instruction": Q, "output": A}), QA, "read as Alpaca"),
    Case("dolly.jsonl", rows({"instruction": Q, "context": "A farm.", "response": A, "category": "open_qa"}),
         [turn("user", f"{Q}\n\nA farm."), QA[1]], "context → context; not used: category"),
    # prompts and completions
    Case("prompt_completion.jsonl", rows({"prompt": Q, "completion": A}), QA, "read as prompt and completion"),
    Case("prompt_messages.jsonl", rows({"prompt": QA[:1], "completion": QA[1:]}), QA),
    Case("question_answer.jsonl", rows({"topic": "wells", **ONE}), QA, "answer → completion; not used: topic"),
    Case("query_response.jsonl", rows({"query": Q, "response": A}), QA),
    Case("input_output.jsonl", rows({"input": Q, "output": A}), QA),
    Case("instruction_response.jsonl", rows({"instruction": Q, "response": A}), QA),
    Case("shouted.csv", f"QUESTION,Answer\n{Q},{A}\n", QA, "QUESTION → prompt, Answer → completion"),
    Case("spaced.tsv", f"Full Question\tResponse\n{Q}\t{A}\n", QA),
    Case("transcript_prompt.jsonl", rows({"prompt": HUMAN, "completion": A}), QA),
    Case("optional_columns.jsonl", rows({"prompt": Q, "completion": A}, {"prompt": Q, "completion": A,
         "system": "S"}), QA),
    Case("by_hand.jsonl", rows({"ask": Q, "say": A, "label": "wells"}), QA, "",
         {"columns": {"ask": "prompt", "say": "completion", "label": "ignore"}}),
    Case("chosen_answers.jsonl", rows({"prompt": Q, "chosen": A, "rejected": BAD}), QA, "",
         {"columns": {"prompt": "prompt", "chosen": "completion"}}),
    Case("chosen_transcripts.jsonl", rows({"chosen": f"{HUMAN} {A}", "rejected": f"{HUMAN} {BAD}"}), QA, "",
         {"columns": {"chosen": "messages"}}),
    Case("two_by_hand.jsonl", rows({"a": Q, "b": Q, "c": A}), "'a' and 'b' are 2 columns for one role, prompt", "",
         {"columns": {"a": "prompt", "b": "prompt", "c": "completion"}}),
    Case("asked_text.jsonl", rows({"text": A}), [turn("text", A)], "", {"columns": {"text": "text"}}),
    Case("ignored_images.jsonl", rows({"messages": QA, "images": []}), QA),
    Case("derived.jsonl", rows({"place": "the barn", "ask": "Where?", "answer": A}),
         [turn("user", "At the barn: Where?"), QA[1]], "", {"derived_columns": {"prompt": "At {place}: {ask}"}}),
    # files
    Case("rows.jsonl.gz", gzip.compress(rows(ONE)), QA), Case("rows.jsonl.zst", compress(rows(ONE), "zstd"), QA),
    Case("rows.json.gz", gzip.compress(json.dumps({"version": 1, "data": [ONE]}).encode()), QA),
    Case("rows.csv.zst", compress(f"question,answer\n{Q},{A}\n".encode(), "zstd"), QA),
    Case("rows.tsv.gz", gzip.compress(f"question\tanswer\n{Q}\t{A}\n".encode()), QA),
    Case("rows.parquet", parquet(ONE), QA), Case("rows.parquet.gz", gzip.compress(parquet(ONE)), QA),
    Case("file.arrow", ipc(stream=False), QA), Case("stream.arrow", ipc(stream=True), QA),
    Case("stream.arrow.zst", compress(ipc(stream=True), "zstd"), QA), Case("ROWS.JSONL", rows(ONE), QA),
    # refused
    Case("kto.jsonl", rows({"prompt": Q, "completion": A, "label": False}),
         "unpaired feedback .prompt, completion, label"),
    Case("kto_tag.jsonl", rows({"instruction": Q, "output": A, "kto_tag": True}), "unpaired feedback .* kto_tag"),
    Case("text_only.jsonl", rows({"text": A}), r"'text' has no prompt .* data.columns: {text: text}"),
    Case("pairs_for_sft.jsonl", rows({"prompt": Q, "chosen": A, "rejected": BAD}),
         r"preference pairs \('chosen' and 'rejected'\), which dpo .* {prompt: prompt, chosen: completion}"),
    Case("two_prompts.jsonl", rows({"prompt": Q, "query": "Why?", "response": A}),
         "'prompt' and 'query' are 2 columns for one role, prompt"),
    Case("two_cases.jsonl", rows({"Answer": A, "answer": A, "question": Q}), "'Answer' and 'answer' are 2 columns"),
    Case("two_messages.jsonl", rows({"messages": QA, "conversations": [post("human", "Else?"), post("gpt", "Yes.")]}),
         "the column 'conversations' is not used: 'messages' is.* {conversations: ignore}"),
    Case("other_instruction.jsonl", rows({"instruction": "Speak as a farmer.", "messages": QA}),
         "'instruction' is not used"),
    Case("images.jsonl", rows({"messages": QA, "images": ["well.png"]}), "'images' is not used .* reads text only"),
    Case("image_part.jsonl", rows({"messages": [turn("user", [{"type": "image_url", "image_url": "x"}]), QA[1]]}),  # type: ignore[arg-type]
         "a part of type 'image_url'"),
    Case("weight.jsonl", rows({**ONE, "weight": 0.3}), "'weight' is not used .* {weight: ignore}"),
    Case("turn_weight.jsonl", rows({"messages": [QA[0], {**QA[1], "weight": 0}]}), "every answer has weight 0"),
    Case("turn_train.jsonl", rows({"messages": [QA[0], {**QA[1], "train": False}]}), "every answer has .* train"),
    Case("trained_user.jsonl", rows({"messages": [{**QA[0], "train": True}, QA[1]]}), "only answers of the assistant"),
    Case("half_weight.jsonl", rows({"messages": [QA[0], {**QA[1], "weight": 0.5}]}), "a turn has weight 0.5"),
    Case("choices.jsonl", rows({"question": Q, "choices": ["barn", "tree"], "answer": "A"}), "'choices' is not used"),
    Case("label.jsonl", rows({"messages": QA, "label": "good"}), "'label' is not used .* {label: ignore}"),
    Case("later_label.jsonl", rows(ONE, {**ONE, "label": True}), "later_label.jsonl:2: this is unpaired feedback"),
    Case("narrator.jsonl", rows({"conversations": [post("narrator", Q), post("gpt", A)]}), "a turn is .*narrator"),
    Case("bad_call.jsonl", rows({"conversations": [post("human", Q), post("function_call", "find it")]}),
         "it wants JSON"),
    Case("bad_tools.jsonl", rows({"messages": QA, "tools": "find"}),
         "'tools' is 'find'; it wants a list of JSON schemas"),
    Case("unknown.jsonl", rows({"left": Q, "right": A}),
         "no messages, nor prompt and completion; the columns are left, right"),
    Case("half.jsonl", rows({"question": Q, "reply_text": A}), "{question: prompt, ANSWER: completion}"),
    Case("empty_answer.jsonl", rows({"question": Q, "answer": " "}), "'answer' is empty; it wants text"),
    Case("number.jsonl", rows({"question": Q, "answer": 7}), "'answer' is 7; it wants text"),
    Case("two_answers.jsonl", rows({"instruction": Q, "input": "", "output": [A, BAD]}),
         "a turn is 'Behind the barn.'"),
    Case("null_derived.jsonl", rows({"place": None, "ask": Q, "answer": A}), "the column 'place', which is empty", "",
         {"derived_columns": {"prompt": "At {place}: {ask}"}}),
    Case("twice.csv", f"answer,question,answer\n{A},{Q},{BAD}\n", "the header names the column 'answer' twice"),
    Case("commas.tsv", f"question,answer\n{Q},{A}\n", "that looks separated by commas; save the file with tabs"),
    Case("open_quote.tsv", f'question\tanswer\n{Q}\t"Behind\n{Q}\tbarn"\n', "a quote opens here"),
    Case("lost_quote.csv", f'question,answer\n{Q},"Behind\n{Q},"the barn"\n', r"lost_quote.csv:3: this is no CSV"),
    Case("two_keys.jsonl", f'{{"prompt": "{Q}", "prompt": "Why?", "completion": "{A}"}}\n',
         "two_keys.jsonl:1: this is no JSON .the key 'prompt' is there twice."),
    Case("two_keys.json", f'[\n{{"prompt": "{Q}", "completion": "{A}"}},\n{{"prompt": "a", "prompt": "b"}}]',
         "two_keys.json:3: this is no JSON .the key 'prompt' is there twice."),
    Case("two_keys.csv", f'messages\n"[{{""role"": ""user"", ""role"": ""assistant"", ""content"": ""{Q}""}}]"\n',
         "no JSON: the key 'role' is there twice"),
    Case("nan.jsonl", f'{{"prompt": "{Q}", "completion": "{A}", "system": NaN}}\n', QA),
    Case("nan_answer.jsonl", f'{{"prompt": "{Q}", "completion": NaN}}\n', "'completion' is empty; it wants text"),
    Case("system_list.jsonl", rows({**ONE, "system": ["Be brief."]}), "'system' is .*; it wants text"),
    Case("two_systems.jsonl", rows({"system": "Be kind.", "messages": [SYSTEM, *QA]}),
         "the column 'system' is not used: the messages have another system message"),
    Case("same_system.jsonl", rows({"system": SYSTEM["content"], "messages": [SYSTEM, *QA]}), [SYSTEM, *QA]),
    Case("cases.jsonl", rows({"messages": [turn("User", Q), turn("ASSISTANT", A)]}), QA),
    Case("empty_turn.jsonl", rows({"messages": [QA[0], turn("assistant", ""), *QA]}), "assistant is empty; it wants"),
    Case("empty_user.jsonl", rows({"messages": [turn("user", " "), QA[1]]}), "a turn of the user is empty"),
    Case("untrained_row.jsonl", rows({**ONE, "train": False}), "'train' is not used and changes"),
    Case("cut.jsonl.gz", gzip.compress(rows(*[{**ONE, "n": n} for n in range(2000)]))[:-400], "cannot be decompressed"),
    Case("plain.jsonl.zst", rows(ONE), "cannot be decompressed"),
    Case("cut.arrow", ipc(stream=False)[:-40], "no whole Arrow"),
    Case("object.json", json.dumps({"question": Q}), "a list under data"),
]  # fmt: skip
DPO = [
    Case("pairs.jsonl", rows({"prompt": Q, "chosen": A, "rejected": BAD}), PAIR,
         "read as preference pairs: prompt → prompt"),
    Case("pairs_messages.jsonl", rows({"chosen": QA, "rejected": [QA[0], turn("assistant", BAD)]}), PAIR),
    Case("pairs_scores.jsonl", rows({"prompt": Q, "chosen": A, "rejected": BAD, "score_chosen": 9,
         "score_rejected": 2}), PAIR, "score_chosen → score_chosen"),
    Case("ultra.jsonl", rows({"prompt": Q, "prompt_id": "7", "chosen": QA, "rejected": [QA[0], turn("assistant", BAD)],
         "messages": QA, "score_chosen": 8.5, "score_rejected": 8.5}), PAIR),
    Case("orca.jsonl", rows({"system": "Be brief.", "question": Q, "chosen": A, "rejected": BAD}),
         ([SYSTEM, *PAIR[0]], PAIR[1], PAIR[2])),
    Case("sharegpt_pairs.json", json.dumps([{"conversations": [post("human", Q)], "chosen": post("gpt", A),
         "rejected": post("gpt", BAD)}]), PAIR, "read as ShareGPT preference pairs"),
    Case("alpaca_pairs.jsonl", rows({"instruction": Q, "input": "", "chosen": A, "rejected": BAD}), PAIR),
    Case("hh.jsonl", rows({"chosen": f"{HUMAN} {A}", "rejected": f"{HUMAN} {BAD}"}), PAIR,
         "read as HH-RLHF transcripts: chosen → chosen"),
    Case("hh_turns.jsonl", rows({"chosen": f"\n\nHuman: Hello\n\nAssistant: Hi.{HUMAN} {A}",
         "rejected": f"\n\nHuman: Hello\n\nAssistant: Hi.{HUMAN} {BAD}"}),
         ([turn("user", "Hello"), turn("assistant", "Hi."), *PAIR[0]], PAIR[1], PAIR[2])),
    Case("hh_prompt.jsonl", rows({"prompt": HUMAN, "chosen": f" {A}", "rejected": f" {BAD}"}),
         (PAIR[0], [turn("assistant", f" {A}")], [turn("assistant", f" {BAD}")])),
    Case("reversed.jsonl", rows({"prompt": Q, "chosen": A, "rejected": BAD, "chosen_score": 1, "rejected_score": 5}),
         "'chosen_score' is 1, below the 5 of the rejected answer"),
    Case("reversed.csv", f"prompt,chosen,rejected,score_chosen,score_rejected\n{Q},{A},{BAD},1,5\n",
         "'score_chosen' is 1, below the 5"),
    Case("kto_for_dpo.jsonl", rows({"prompt": Q, "completion": A, "label": True}), "unpaired feedback"),
    Case("no_prompt.jsonl", rows({"chosen": A, "rejected": BAD}), "there is no prompt before it"),
    Case("sft_for_dpo.jsonl", rows({"prompt": Q, "completion": A}), "no chosen and rejected; the columns are"),
    Case("other_prompt.jsonl", rows({"prompt": "Else?", "chosen": QA, "rejected": [QA[0], turn("assistant", BAD)]}),
         "its messages do not hold 'prompt'"),
    Case("third_answer.jsonl", rows({"prompt": Q, "chosen": A, "rejected": BAD, "output": "Over there."}),
         "the column 'output' is not used"),
    Case("pair_images.jsonl", rows({"prompt": Q, "chosen": A, "rejected": BAD, "images": ["a.png"]}),
         "'images' is not used"),
    Case("string_chosen.jsonl", rows({"question": Q, "preferred": A, "response_1": BAD}),
         "{question: prompt, preferred: chosen, WORSE: rejected}"),
]  # fmt: skip
PROSE = "First line.\nSecond line.\n\n\nA new paragraph.\n"
TEXT = [
    Case("text.jsonl", rows({"text": A, "label": 1}), [A], "read as text: text → documents"),
    Case("whole.txt", PROSE, [PROSE], ""), Case("whole.txt.gz", gzip.compress(PROSE.encode()), [PROSE]),
    Case("paragraphs.txt", PROSE, ["First line.\nSecond line.", "A new paragraph."], "", {"sample_by": "paragraph"}),
    Case("lines.txt", PROSE, ["First line.", "Second line.", "A new paragraph."], "", {"sample_by": "line"}),
    Case("body.jsonl", rows({"body": A}), "there is no column 'text'; the columns are body"),
]  # fmt: skip
PARSERS = {"conversations": rows_to_conversations, "pairs": rows_to_pairs, "text": rows_to_documents}
CASES = [(kind, case) for kind, cases in zip(PARSERS, (SFT, DPO, TEXT), strict=True) for case in cases]


def parts(kind: str, item: Any) -> Any:
    if kind == "text":
        return item.text
    if kind == "conversations":
        return list(item.messages)
    return tuple(map(list, (item.prompt, item.chosen, item.rejected)))


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[case.name for _, case in CASES])
def test_a_file_is_read_as_what_it_means_or_refused_by_name(kind: str, case: Case, tmp_path: Path) -> None:
    path = tmp_path / case.name
    path.write_bytes(case.content if isinstance(case.content, bytes) else case.content.encode())
    data = DataConfig(train_file=str(path), **(case.config or {}))
    outcome = Quarantine()
    try:
        items = PARSERS[kind](outcome.count(iter_train_rows(data, tmp_path)), data, outcome)  # type: ignore[operator]
        outcome.raise_if_over_limit()
    except DataError as error:
        assert isinstance(case.expected, str), str(error)
        assert re.search(case.expected, str(error)), str(error)
        return
    assert not isinstance(case.expected, str), f"read as {items}"
    expected = case.expected if kind == "text" else [case.expected]
    assert [parts(kind, item) for item in items][: len(expected)] == expected
    assert case.line in "\n".join(outcome.lines())


def write(path: Path, *values: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(rows(*values))
    return str(path)


def test_the_files_of_a_pattern_and_of_a_folder_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / "set" / name, {"question": name, "answer": A})
    (tmp_path / "set" / "c.jsonl.gz").write_bytes(gzip.compress(rows({"question": "c", "answer": A})))
    for source, names in (
        (str(tmp_path / "set" / "*.jsonl"), ["a.jsonl", "b.jsonl"]),
        ("set/*", ["a.jsonl", "b.jsonl", "c"]),
        ("set", ["a.jsonl", "b.jsonl", "c"]),
    ):
        data = DataConfig(dataset_name=source, test_size=0)
        assert [item.last_user_message for item in load_conversations(data, 1, tmp_path).train] == names
    with pytest.raises(ModelwrightError, match="there is no file, folder or embedded set 'set/x"):
        load_conversations(DataConfig(dataset_name="set/x*.csv"), 1, tmp_path)


def test_the_data_sets_of_llama_factory_are_read_by_its_own_list(tmp_path: Path) -> None:
    info = {
        "plain": {"file_name": "plain.json", "columns": {"prompt": "ask", "query": "more", "response": "say"}},
        "talks": {
            "file_name": "talks.json", "formatting": "sharegpt", "columns": {"messages": "talk"},
            "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "farmer", "assistant_tag": "guide"},
        },
        "pairs": {"file_name": "pairs.json", "ranking": True,
                  "columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"}},
        "votes": {"file_name": "votes.json", "columns": {"prompt": "ask", "response": "say", "kto_tag": "vote"}},
        "far": {"hf_hub_url": "someone/far"},
    }  # fmt: skip
    files = {
        "plain": [{"ask": Q, "more": "At a farm.", "say": A}],
        "talks": [{"talk": [{"who": "farmer", "what": Q}, {"who": "guide", "what": A}]}],
        "pairs": [{"ask": Q, "good": A, "bad": BAD}],
        "votes": [{"ask": Q, "say": BAD, "vote": False}],
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))

    def data(name: str | None) -> DataConfig:
        return DataConfig(dataset_name=str(tmp_path), dataset_config_name=name, test_size=0)

    [plain] = load_conversations(data("plain"), 1, tmp_path).train
    assert plain.messages == (turn("user", f"{Q}\n\nAt a farm."), QA[1])
    assert load_conversations(data("talks"), 1, tmp_path).train[0].messages == tuple(QA)
    [pair] = load_preferences(data("pairs"), 1, tmp_path).train
    assert parts("pairs", pair) == PAIR
    for name, message in {
        "votes": "unpaired feedback", "far": "data.dataset_name: someone/far", "near": "no 'near'",
        None: "dataset_config_name wants one of plain, talks, pairs, votes, far",
    }.items():  # fmt: skip
        with pytest.raises(ModelwrightError, match=message):
            load_conversations(data(name), 1, tmp_path)


@pytest.mark.parametrize(("columns", "kind"), [
    (["messages"], "conversations"), (["Question", "Answer", "text"], "conversations"), (["text", "label"], "text"),
    (["prompt", "chosen", "rejected"], "pairs"), (["prompt", "completion", "label"], "conversations"),
])  # fmt: skip
def test_the_stage_of_data_without_a_recipe_follows_from_its_columns(columns: list[str], kind: str) -> None:
    assert infer_row_format(columns, DataConfig(dataset_name="x")) == kind


MEANINGFUL = {
    **{name: f"{name} text" for name in ("prompt", "question", "Query", "instruction", "input", "completion", "ANSWER",
                                         "response", "output", "context", "system", "chosen", "rejected")},
    "messages": [turn("user", "messages text"), turn("assistant", "messages answer")],
    "conversations": [post("human", "conversations text"), post("gpt", "conversations answer")],
    "history": [["history text", "history answer"]],
    "tools": [TOOL], "label": False, "kto_tag": True, "images": ["a.png"], "weight": 0.5, "choices": ["a", "b"],
}  # fmt: skip
HARMLESS = {"id": 7, "topic": "wells", "source": "here", "weights": 1, "image": None, "Label": None}
ANSWERS = ("completion", "ANSWER", "response", "output", "chosen")


@settings(max_examples=400, deadline=None)
@given(some.lists(some.sampled_from([*MEANINGFUL, *HARMLESS]), unique=True, min_size=1, max_size=6))
def test_no_row_is_trained_whose_meaning_was_dropped(columns: list[str]) -> None:
    values = {name: {**MEANINGFUL, **HARMLESS}[name] for name in columns}
    for kind in ("conversations", "pairs"):
        outcome = Quarantine(1.0)
        items: list[Any] = PARSERS[kind]([Row("a:1", values)], DataConfig(dataset_name="x"), outcome)  # type: ignore[operator]
        for item in items:
            turns = item.messages if isinstance(item, Conversation) else (*item.prompt, *item.chosen, *item.rejected)
            used = json.dumps([turns, item.tools])
            for name in set(columns) & set(MEANINGFUL):
                text = MEANINGFUL[name]
                assert name == "tools" or (isinstance(text, str | list) and name not in ("images", "choices")), name
                assert (f"{name} text" in used) if name != "tools" else item.tools, f"{name} was dropped: {used}"
            spoken = " ".join(message["content"] for message in turns if message["role"] == "assistant")
            prompts = " ".join(message["content"] for message in turns if message["role"] != "assistant")
            for name in set(columns) & set(ANSWERS):
                assert f"{name} text" in spoken and f"{name} text" not in prompts, f"{name} is no answer: {used}"
        assert len(items) + len(outcome.invalid_rows) == 1
