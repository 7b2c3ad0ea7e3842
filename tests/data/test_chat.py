"""Which tokens are trained, checked against public bugs of other trainers.

Every template here is one that is in use somewhere: ChatML, one with a BOS of its own, one that strips earlier
thinking, one that forgets to end a turn.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelwright.data import chat_tokens
from modelwright.data.chat import Conversation, load_conversations, rows_to_conversations
from modelwright.data.chat_tokens import TokenizedRow, tokenize_batch, tokenize_conversation, tokenize_conversations
from modelwright.data.readers import Row
from modelwright.errors import DataError
from modelwright.recipe.sections import CountOrFraction, DataConfig
from modelwright.recipe.stage_specs import ChatConfig
from tiny import CHATML

BOS_TEMPLATE = "<|endoftext|>" + CHATML
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEVER_ENDS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKS_FOR_THOUGHT = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def conversation(*turns: str, system: str | None = None) -> Conversation:
    """Turns of user and assistant in alternation."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation("rows.jsonl:1", tuple(messages), turns[0])


def with_template(tokenizer: Any, template: str | None) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def trained_text(tokenizer: Any, row: TokenizedRow) -> list[str]:
    """The stretches of text that train."""
    stretches: list[list[int]] = [[]]
    for token, trains in zip(row.input_ids.tolist(), row.loss_mask.tolist(), strict=True):
        if trains:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]


def test_trl_1623_eos_is_trained_although_pad_is_the_same_token(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    [row] = tokenize_conversation(conversation("Why?", "So."), tokenizer)
    trained = row.input_ids[row.loss_mask].tolist()
    assert trained.count(tokenizer.eos_token_id) == 1
    assert trained_text(tokenizer, row) == ["So.<|im_end|>\n"]


def test_trl_4879_a_template_without_generation_tags_trains_the_assistant_alone(tokenizer: Any) -> None:
    assert "generation %}" not in tokenizer.chat_template
    [row] = tokenize_conversation(conversation("Why?", "So.", system="Be brief."), tokenizer)
    assert tokenizer.decode(row.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\nSo.<|im_end|>\n"
    )
    assert trained_text(tokenizer, row) == ["So.<|im_end|>\n"]


def test_trl_3728_every_assistant_turn_of_a_long_conversation_trains(tokenizer: Any) -> None:
    [row] = tokenize_conversation(conversation("One?", "First.", "Two?", "Second.", "Three?", "Third."), tokenizer)
    assert trained_text(tokenizer, row) == ["First.<|im_end|>\n", "Second.<|im_end|>\n", "Third.<|im_end|>\n"]


def test_trl_3728_the_assistant_only_mask_is_kept_when_rows_are_packed(tokenizer: Any) -> None:
    from modelwright.data.packing import pack_bfd
    from modelwright.tasks.batching import collate_examples

    talks = [conversation(f"Number {n}?", f"It is {n}.") for n in range(5)]
    rows = tokenize_conversations(talks, tokenizer, ChatConfig(max_length=64)).rows
    groups = pack_bfd([len(row) for row in rows], 64)
    assert len(groups) < len(rows)
    for group in groups:
        batch = collate_examples([[rows[member] for member in group]])
        trained = batch.inputs["tokens"].flatten()[batch.inputs["loss_positions"] + 1]
        answers = "".join(tokenizer.decode(rows[member].input_ids[rows[member].loss_mask]) for member in group)
        assert tokenizer.decode(trained) == answers
        assert batch.trained_tokens == sum(int(rows[member].loss_mask.sum()) for member in group)


def test_alignment_handbook_127_the_first_token_is_not_doubled(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    doubling = with_template(tokenizer, BOS_TEMPLATE)
    doubling.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert doubling("x")["input_ids"][0] == 0, "this tokenizer puts a BOS before whatever it reads"
    [row] = tokenize_conversation(conversation("Why?", "So."), doubling)
    assert row.input_ids.tolist().count(0) == 1
    assert row.input_ids[0] == 0


def test_a_question_that_contains_the_answer_does_not_train(tokenizer: Any) -> None:
    [row] = tokenize_conversation(conversation("So.", "So.", "So.", "So."), tokenizer)
    assert trained_text(tokenizer, row) == ["So.<|im_end|>\n", "So.<|im_end|>\n"]


def test_characters_of_many_bytes_are_trained_whole(tokenizer: Any) -> None:
    [row] = tokenize_conversation(conversation("Was? 🏕", "Ähm, 森の火 🔥."), tokenizer)
    assert trained_text(tokenizer, row) == ["Ähm, 森の火 🔥.<|im_end|>\n"]


def test_a_generation_prompt_that_opens_a_thought_does_not_swallow_the_answer(tokenizer: Any) -> None:
    [row] = tokenize_conversation(conversation("Why?", "So."), with_template(tokenizer, ASKS_FOR_THOUGHT))
    assert trained_text(tokenizer, row) == ["So.<|im_end|>\n"]
    [row] = tokenize_conversation(
        conversation("Why?", "<think>\nHm.</think>So."), with_template(tokenizer, ASKS_FOR_THOUGHT)
    )
    assert trained_text(tokenizer, row) == ["Hm.</think>So.<|im_end|>\n"]


def test_a_template_that_rewrites_history_gives_one_row_for_each_answer(tokenizer: Any) -> None:
    strips = with_template(tokenizer, STRIPS_THINKING)
    rows = tokenize_conversation(
        conversation("One?", "<think>a</think>First.", "Two?", "<think>b</think>Second."), strips
    )
    assert [trained_text(strips, row) for row in rows] == [
        ["<think>a</think>First.<|im_end|>\n"],
        ["<think>b</think>Second.<|im_end|>\n"],
    ]
    assert "<think>a" not in strips.decode(rows[1].input_ids), "the second row sees history as it will be shown"


def test_a_template_that_would_rewrite_history_leaves_plain_conversations_whole(tokenizer: Any) -> None:
    assert (
        len(
            tokenize_conversation(
                conversation("One?", "First.", "Two?", "Second."), with_template(tokenizer, STRIPS_THINKING)
            )
        )
        == 1
    )


def test_a_greeting_that_nobody_asked_for_is_not_trained(tokenizer: Any) -> None:
    requests = conversation("Why?", "So.")
    greeting = ({"role": "assistant", "content": "Hello!"}, *requests.messages)
    [row] = tokenize_conversation(Conversation("x", greeting, "why?"), tokenizer)
    assert "Hello!" in tokenizer.decode(row.input_ids)
    assert trained_text(tokenizer, row) == ["So.<|im_end|>\n"]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_template_that_leaves_out_a_role_is_an_error(tokenizer: Any, role: str) -> None:
    """The first template of Phi-3 left out system messages."""
    leaves_out = CHATML.replace("<|im_start|>{{ m", f"{{% if message['role'] != '{role}' %}}<|im_start|>{{{{ m", 1)
    leaves_out = leaves_out.replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
    talk = conversation("One?", "First.", "Two?", "Second.", system="Be brief.")
    with pytest.raises(DataError, match=f"does not render the turns of the {role}; use a model whose template does"):
        tokenize_conversation(talk, with_template(tokenizer, leaves_out))
    assert len(tokenize_conversation(talk, tokenizer)) == 1


def test_a_template_that_refuses_a_role_is_one_error(tokenizer: Any) -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(DataError) as caught:
        tokenize_conversation(
            conversation("Why?", "So.", system="Be brief."), with_template(tokenizer, refuses + CHATML)
        )
    assert str(caught.value) == (
        "rows.jsonl:1: the model's chat template does not take the turns system, user, assistant "
        "(System role not supported)"
    )


def test_without_assistant_only_every_token_trains(tokenizer: Any) -> None:
    [row] = tokenize_conversation(conversation("Why?", "So."), tokenizer, assistant_only=False)
    assert row.loss_mask.all()


def test_a_tokenizer_without_a_template_takes_question_and_answer(tokenizer: Any) -> None:
    plain = with_template(tokenizer, None)
    [row] = tokenize_conversation(conversation("Why? ", "So."), plain)
    assert plain.decode(row.input_ids) == "Why? So.<|im_end|>"
    assert trained_text(plain, row) == ["So.<|im_end|>"]


def test_a_tokenizer_without_a_template_takes_no_other_turns(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"no chat template, which the turns system, user, assistant need"):
        tokenize_conversation(conversation("Why?", "So.", system="Be brief."), with_template(tokenizer, None))


def test_no_end_of_text_token_comes_between_a_prompt_and_its_answer(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    turns = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."})
    [plain] = tokenize_conversation(Conversation("a:1", turns, "a"), bare)
    eos = (bare.eos_token, bare.eos_token_id)
    bare.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    assert bare("Why?")["input_ids"][-1] == bare.eos_token_id
    [appended] = tokenize_conversation(Conversation("a:1", turns, "a"), bare)
    assert appended.input_ids.tolist() == plain.input_ids.tolist()
    assert (appended.input_ids == bare.eos_token_id).sum() == 1


def test_a_tokenizer_without_template_and_end_is_refused(tokenizer: Any) -> None:
    bare = with_template(tokenizer, None)
    bare.eos_token = None
    with pytest.raises(DataError, match="neither a chat template nor an end-of-text token"):
        tokenize_conversation(conversation("Why?", "So."), bare)


def test_a_template_that_never_ends_a_turn_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="the model would never learn to stop"):
        tokenize_conversations(
            [conversation("Why?", "So.")], with_template(tokenizer, NEVER_ENDS), ChatConfig(max_length=64)
        )


def test_a_turn_may_end_with_a_stop_token_that_is_not_eos(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.eos_token = "<|endoftext|>"
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenize_conversations(
        [conversation("Why?", "So.")], other, ChatConfig(max_length=64), stop_tokens=[stop]
    ).rows
    with pytest.raises(DataError, match="never learn to stop"):
        tokenize_conversations([conversation("Why?", "So.")], other, ChatConfig(max_length=64))


def test_truncation_is_counted_and_rows_with_nothing_left_to_learn_are_dropped(tokenizer: Any) -> None:
    talks = [conversation("Why?", "So."), conversation("Why?", "word " * 50), conversation("word " * 50, "So.")]
    full = [len(tokenize_conversation(talk, tokenizer)[0]) for talk in talks]
    with pytest.raises(
        DataError, match=r"2 of 3 rows are longer than max_length 40 and would be cut, more than max_tr"
    ):
        tokenize_conversations(talks, tokenizer, ChatConfig(max_length=40, max_truncated_rows=CountOrFraction("10%")))
    facts = tokenize_conversations(talks, tokenizer, ChatConfig(max_length=40)).stats()
    assert facts["rows"] == 2
    assert facts["dropped_rows"] == 1
    assert facts["truncated_rows"] == 2
    assert facts["truncated_tokens"] == full[1] + full[2] - 80
    assert facts["tokens"] == full[0] + 40


def test_long_rows_are_divided_and_every_trained_token_is_still_trained_once(tokenizer: Any) -> None:
    talks = [conversation("Why?", "So."), conversation("Why?", "word " * 50), conversation("word " * 50, "So.")]
    full = [tokenize_conversation(talk, tokenizer)[0] for talk in talks]
    result = tokenize_conversations(
        talks, tokenizer, ChatConfig(max_length=40, packing=True, packing_strategy="bfd_split")
    )
    facts = result.stats()
    assert (facts["split_rows"], facts["truncated_rows"], facts["truncated_tokens"], facts["dropped_rows"]) == (
        2,
        0,
        0,
        0,
    )
    assert max(map(len, result.rows)) <= 40 and len(result.rows) > 3
    trained = [token for row in result.rows for token in row.input_ids[1:][row.loss_mask[1:]].tolist()]
    assert trained == [token for row in full for token in row.input_ids[1:][row.loss_mask[1:]].tolist()]


def test_no_trained_token_at_all_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="no row has a trained token within max_length 8; raise max_length"):
        tokenize_conversations(
            [conversation("A long question, is it not?", "So.")], tokenizer, ChatConfig(max_length=8)
        )


def test_no_conversation_is_no_error(tokenizer: Any) -> None:
    assert tokenize_conversations([], tokenizer, ChatConfig(max_length=8)).rows == []


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.tokenizer(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


LONG_PROMPT = "Answer step by step, and warn of what is dangerous. " * 20


@pytest.mark.parametrize("begins_with_a_space", [False, True])
def test_a_long_system_prompt_is_tokenized_once_and_every_row_is_as_if_alone(
    tokenizer: Any, begins_with_a_space: bool
) -> None:
    from tokenizers import pre_tokenizers

    counting = Counting(copy.deepcopy(tokenizer))
    counting.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=begins_with_a_space)
    requests = [conversation(f"Why {'so ' * turn}?", "Because.", system=LONG_PROMPT) for turn in range(20)]
    together = tokenize_batch(requests, counting)
    assert counting.characters < 10 * len(LONG_PROMPT)
    for [row], each in zip(together, requests, strict=True):
        [alone] = tokenize_conversation(each, counting)
        assert row.input_ids.tolist() == alone.input_ids.tolist()
        assert row.loss_mask.tolist() == alone.loss_mask.tolist()


def test_a_text_that_may_not_be_cut_before_a_special_token_is_tokenized_whole(tokenizer: Any) -> None:
    from tokenizers import normalizers

    counting = Counting(copy.deepcopy(tokenizer))
    counting.backend_tokenizer.normalizer = normalizers.Prepend("_")  # which stands before each text, cut or not
    requests = [conversation(f"Why {turn}?", "Because.", system=LONG_PROMPT) for turn in range(4)]
    alone = [tokenize_conversation(each, counting)[0].input_ids.tolist() for each in requests]
    assert [row.input_ids.tolist() for [row] in tokenize_batch(requests, counting)] == alone


TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.get('reasoning_content') %}<think>{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "well"}}}


def tool_conversation() -> Conversation:
    messages = (
        {"role": "user", "content": "Where is the well?"},
        {"role": "assistant", "content": "", "reasoning_content": "I should look.", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"at": "barn"}'},
        {"role": "assistant", "content": "Behind the barn."},
    )
    return Conversation("rows.jsonl:1", messages, "well", (FIND,))


def test_calls_and_answers_are_trained_and_the_output_of_a_tool_is_not(tokenizer: Any) -> None:
    changed = with_template(tokenizer, TOOLS_TEMPLATE)
    [row] = tokenize_conversation(tool_conversation(), changed)
    call, answer = trained_text(changed, row)
    assert call.startswith("<think>I should look.</think><call>") and '"what": "well"' in call
    assert answer.startswith("Behind the barn.<|im_end|>")
    text = changed.decode(row.input_ids)
    assert '{"at": "barn"}' in text and '"name": "find", "parameters"' in text, "tools and their output are rendered"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML, "does not render tools"),
        (TOOLS_TEMPLATE.replace("m.get('tool_calls') or []", "[]"), "does not render tool_calls"),
        (TOOLS_TEMPLATE.replace("{{ m['content'] }}", "{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}"),
         "does not render the output of tools"),
        (None, "no chat template, which tools need"),
    ],
    ids=["tools", "calls", "output", "no template"],
)  # fmt: skip
def test_a_template_that_leaves_out_tools_is_refused(tokenizer: Any, template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=rf"^rows\.jsonl:1: .*{message}"):
        tokenize_conversation(tool_conversation(), with_template(tokenizer, template))


def test_a_template_that_leaves_out_the_reasoning_of_the_answer_is_refused(tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "Behind the barn.", "reasoning_content": "Barns have wells."}
    item = Conversation("rows.jsonl:1", ({"role": "user", "content": "Where?"}, answer), "where")
    assert tokenize_conversation(item, with_template(tokenizer, TOOLS_TEMPLATE))
    with pytest.raises(DataError, match="does not render reasoning_content"):
        tokenize_conversation(item, with_template(tokenizer, CHATML))


def test_a_text_is_trained_whole_and_ends(tokenizer: Any) -> None:
    item = Conversation("rows.jsonl:1", ({"role": "text", "content": "The well is old."},), "well")
    [row] = tokenize_conversation(item, tokenizer)
    assert row.loss_mask.all() and row.input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row.input_ids[:-1]).endswith("The well is old.")


def test_the_first_rows_that_are_cut_or_dropped_are_named(tokenizer: Any) -> None:
    items = [conversation("Why?", "word " * 60), conversation("word " * 60, "So.")]
    dataset = tokenize_conversations(items, tokenizer, ChatConfig(max_length=40))
    assert (dataset.truncated_rows, dataset.dropped_rows) == (2, 1)
    assert all(example.startswith("rows.jsonl:1 (") for example in dataset.truncated_examples)
    assert dataset.stats()["dropped_examples"] == ["rows.jsonl:1"]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False, "weight": None}])
def test_an_answer_of_weight_zero_is_not_trained(tokenizer: Any, mark: dict[str, Any]) -> None:
    turns = [
        {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because.", **mark},
        {"role": "user", "content": "Really?"}, {"role": "assistant", "content": "So.", "weight": 1},
    ]  # fmt: skip
    marked = rows_to_conversations([Row("a.jsonl:1", {"messages": turns})], DataConfig(train_file="a.jsonl"))
    [[row]] = tokenize_batch(marked, tokenizer)
    assert "".join(trained_text(tokenizer, row)) == "So.<|im_end|>\n"
    plain = [{key: turn[key] for key in ("role", "content")} for turn in turns]
    [[unmarked]] = tokenize_batch([Conversation("", tuple(plain), "")], tokenizer)
    assert row.input_ids.tolist() == unmarked.input_ids.tolist(), "the mark is not rendered"
    with pytest.raises(DataError, match="assistant_only_loss: false trains all turns"):
        tokenize_batch(marked, tokenizer, assistant_only=False)


@pytest.mark.parametrize(
    ("one", "other", "length"), [("", "ab", 0), ("ab", "ab", 2), ("ab", "abc", 2), ("abc", "ab", 2), ("abd", "abc", 2)]
)
def test_the_common_prefix_of_two_texts(one: str, other: str, length: int) -> None:
    assert chat_tokens._common_prefix(one, other) == length


@pytest.fixture
def token_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, for few rows too."""
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(chat_tokens, "MIN_CACHED_ITEMS", 4)
    return tmp_path / "cache"


def test_a_second_start_tokenizes_nothing(tokenizer: Any, token_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = [replace(conversation(f"Why {n}?", "So. " * n), where=f"a:{n}", source="s") for n in range(2, 40, 8)]
    talks.append(conversation("One?", "<think>Hm</think>First.", "Two?", "Second."))  # two rows
    config, template = ChatConfig(max_length=60), with_template(tokenizer, STRIPS_THINKING)
    first = tokenize_conversations(talks, template, config, [], "rows:train")
    assert len(first.rows) == len(talks) + 1
    monkeypatch.setattr(chat_tokens, "_tokenize_rendered", None)
    second = tokenize_conversations(talks, template, config, [], "rows:train")
    as_lists = [[(row.input_ids.tolist(), row.loss_mask.tolist(), row.where, row.source) for row in each.rows]
                for each in (first, second)]  # fmt: skip
    assert as_lists[0] == as_lists[1]
    assert first.stats() | {"rows": 0} == second.stats() | {"rows": 0}
    assert second.truncated_rows > 0, "rows are cut after they are read, so that max_length may change"


def test_other_rows_templates_and_masks_have_entries_of_their_own(tokenizer: Any, token_cache: Path) -> None:
    talks = [conversation(f"Why {n}?", "So.") for n in range(4)]
    all_turns = ChatConfig(max_length=64, assistant_only_loss=False)
    answers, with_bos = ChatConfig(max_length=64), with_template(tokenizer, BOS_TEMPLATE)
    for key, each, config in (
        ("a:train", tokenizer, answers), ("b:train", tokenizer, answers), ("a:train", with_bos, answers),
        ("a:train", tokenizer, all_turns), ("a:train", tokenizer, ChatConfig(max_length=32)),
    ):  # fmt: skip
        tokenize_conversations(talks, each, config, [], key)
    assert len(list(token_cache.glob("tokens-*"))) == 4, "max_length alone needs no other entry"


def test_few_rows_and_rows_without_a_fingerprint_are_not_kept(tokenizer: Any, token_cache: Path) -> None:
    talks = [conversation(f"Why {n}?", "So.") for n in range(4)]
    tokenize_conversations(talks, tokenizer, ChatConfig(max_length=64))
    tokenize_conversations(talks[:3], tokenizer, ChatConfig(max_length=64), [], "rows:train")
    assert not token_cache.exists()


def test_the_order_of_keys_in_a_tool_call_is_another_entry(tokenizer: Any, token_cache: Path, tmp_path: Path) -> None:
    decoded = []
    for order in (1, -1):
        arguments = dict([("city", "Rome"), ("unit", "C")][::order])
        calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        rows = [{"messages": [{"role": "user", "content": f"Warm {n}?"}, call]} for n in range(5)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = load_conversations(DataConfig(train_file="rows.jsonl", test_size=CountOrFraction(0)), 1, tmp_path)
        calling = with_template(tokenizer, TOOLS_TEMPLATE)
        first = tokenize_conversations(data.train, calling, ChatConfig(max_length=200), [], data.cache_key("train"))
        decoded.append(tokenizer.decode(first.rows[0].input_ids))
    assert decoded[0].index("city") < decoded[0].index("unit")
    assert decoded[1].index("unit") < decoded[1].index("city")
