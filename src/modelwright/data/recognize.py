"""Recognize the format of a row by its columns, and turn its values into messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from modelwright.data.readers import DECODER, LONE_SURROGATE, DuplicateKey, describe_columns, utf8_size
from modelwright.recipe.stage_specs import RowFormatName

Message = dict[str, Any]
"""Role and content of a message, and its tool_calls, tool_call_id, name and reasoning_content, if any."""


class RowError(ValueError):
    """The reason why a row cannot be used."""


class DataFormat(NamedTuple):
    """A format in which people keep training rows."""

    name: str
    """Its usual name."""
    row_format: RowFormatName
    """What its rows become."""
    columns: Mapping[str, str]
    """The names of the column of each role, in any case, separated by spaces."""


PROMPTS = "prompt question query instruction input problem full_question"
COMPLETIONS = "completion answer response output solution"
MESSAGES = "messages conversations conversation"
PAIR = {"chosen": "chosen chosen_response preferred", "rejected": "rejected rejected_response dispreferred"}
FORMATS = (
    DataFormat("messages", "conversations", {"messages": "messages"}),
    DataFormat("ShareGPT", "conversations", {"messages": "conversations conversation"}),
    DataFormat("Alpaca", "conversations", {"prompt": "instruction", "context": "input", "completion": COMPLETIONS}),
    DataFormat("Alpaca", "conversations", {"prompt": "instruction", "completion": "output"}),
    DataFormat("prompt and completion", "conversations", {"prompt": PROMPTS, "completion": COMPLETIONS}),
    DataFormat("text", "conversations", {"text": ""}),
    DataFormat("ShareGPT preference pairs", "pairs", {"prompt": "conversations conversation", **PAIR}),
    DataFormat("Alpaca preference pairs", "pairs", {"prompt": "instruction", "context": "input", **PAIR}),
    DataFormat("preference pairs", "pairs", {"prompt": PROMPTS, **PAIR}),
    DataFormat("preference pairs without a prompt column", "pairs", PAIR),
)
"""The formats that are recognized; the first whose columns are all there is taken."""
OPTIONAL_COLUMNS = {
    "system": "system system_prompt", "tools": "tools functions", "context": "context", "history": "history",
    "score_chosen": "score_chosen chosen_score chosen_rating", "score_rejected": "score_rejected rejected_score "
    "rejected_rating",
}  # fmt: skip
"""Roles that rows of every format may have, with their names."""
MAIN_COLUMNS = {"messages": MESSAGES, "prompt": PROMPTS, "completion": COMPLETIONS, **PAIR}
ROLE_OF = {word: role for role, words in {**MAIN_COLUMNS, **OPTIONAL_COLUMNS}.items() for word in words.split()}
IGNORE = "ignore it: data.columns: {{{column}: ignore}}"
MEANINGFUL_COLUMNS = {
    "label labels kto_tag": "it says what an answer is worth, which this stage does not learn",
    "images image videos video audio audios": "this stage reads text only",
    "weight weights sample_weight loss_weight train training": "every row counts the same here",
    "choices options": "data.derived_columns can write the choices into the prompt",
}
"""Columns that change the meaning of a row though no stage of text uses them, and what to say about them."""
MEANINGS = {word: text for words, text in MEANINGFUL_COLUMNS.items() for word in words.split()}
UNPAIRED = (
    "this is unpaired feedback (prompt, completion, {column}), which KTO learns from and no stage here; for sft, keep "
    "the rows of good answers in a file without {column!r}; for dpo, pair answers as chosen and rejected; if it is no "
    "verdict, data.columns: {{{column}: ignore}}"
)
TEXT_ONLY = (
    "'text' has no prompt and no answer to train on; pretrain trains on text; data.columns: {{{column}: text}} trains "
    "every token of it here, without the chat template"
)


def fold(name: str) -> str:
    """A column name for comparison: lower case, words joined by underscores."""
    return re.sub(r"[\s-]+", "_", str(name).strip().casefold())


@dataclass(frozen=True)
class Recognized:
    """The format of a row, and which of its columns has which role."""

    name: str
    """Name of the format; empty where data.columns gives the roles."""
    columns: Mapping[str, str]
    """Column of each role."""
    other_columns: tuple[str, ...]
    """Columns without a role that repeat what others hold, such as `prompt` beside `messages`; checked in each row."""
    meaningful: tuple[str, ...]
    """Columns that change the meaning of a row where they are not empty."""
    unused: tuple[str, ...]
    """All other columns."""

    def describe(self, values: Mapping[str, Any]) -> str:
        """The line that says how rows are read."""
        is_transcript = "prompt" not in self.columns and isinstance(values.get(self.columns.get("chosen", "")), str)
        name = "HH-RLHF transcripts" if is_transcript else self.name
        roles = ", ".join(f"{column} → {role}" for role, column in self.columns.items())
        unused = (*self.other_columns, *self.meaningful, *self.unused)
        read_as = f"read as {name}" if name else "read by data.columns"
        return f"{read_as}: {roles}" + (f"; not used: {', '.join(unused)}" if unused else "")


def recognize(
    names: Sequence[str], row_format: RowFormatName, columns: Mapping[str, str], known: set[str]
) -> Recognized:
    """The format of a row by the names of its columns; `columns` gives roles by hand, `known` are those of all rows."""
    if missing := [column for column, role in columns.items() if column not in known and role != "ignore"]:
        raise RowError(f"there is no column {missing[0]!r}; {describe_columns(dict.fromkeys(names))}")
    by_hand: dict[str, str] = {}
    for column, role in columns.items():
        if role != "ignore" and (first := by_hand.setdefault(role, column)) != column:
            raise RowError(_two_columns((first, column), role))
    words: dict[str, list[str]] = {}
    for name in names:
        if name not in columns:
            words.setdefault(fold(name), []).append(name)
    for data_format in FORMATS:
        if data_format.row_format != row_format:
            continue
        assigned = {role: _find_columns(role, spellings, by_hand, words)
                    for role, spellings in data_format.columns.items()}  # fmt: skip
        if all(assigned.values()) and not _left_out(by_hand, assigned):
            return _recognized(data_format, assigned, by_hand, words)
    raise RowError(_explain_unknown(names, row_format, words))


BY_HAND_EXCLUDES = {"messages": ("prompt", "completion", "text", "context", "history"), "prompt": ("messages", "text"),
                    "completion": ("messages", "text"), "text": ("messages", "prompt", "completion")}  # fmt: skip


def _find_columns(
    role: str, spellings: str, by_hand: Mapping[str, str], words: Mapping[str, list[str]]
) -> tuple[str, ...]:
    """The columns that could have a role: the one given by hand, else those of its names."""
    if role in by_hand:
        return (by_hand[role],)
    if any(role in BY_HAND_EXCLUDES.get(configured, ()) for configured in by_hand):
        return ()
    return tuple(column for word in spellings.split() for column in words.get(word, ()))


def _left_out(by_hand: Mapping[str, str], assigned: Mapping[str, Any]) -> bool:
    """Whether the format has no place for a main role that was given by hand."""
    other = {"chosen", "rejected"} if "chosen" not in assigned else {"completion", "messages", "text"}
    return bool(set(by_hand) - set(OPTIONAL_COLUMNS) - set(assigned) - other)


def _recognized(
    data_format: DataFormat,
    assigned: dict[str, tuple[str, ...]],
    by_hand: Mapping[str, str],
    words: Mapping[str, list[str]],
) -> Recognized:
    optional = dict(OPTIONAL_COLUMNS)
    for role in ("context", "history") if "prompt" not in assigned else ():
        del optional[role]
    for role in ("score_chosen", "score_rejected") if "chosen" not in assigned else ():
        del optional[role]
    for role, spellings in optional.items() if "text" not in assigned else ():
        candidates = _find_columns(role, spellings, by_hand, words)
        if candidates:
            assigned[role] = (
                *assigned.get(role, ()),
                *(column for column in candidates if column not in assigned.get(role, ())),
            )
    for role, candidates in assigned.items():
        if len(candidates) > 1:
            raise RowError(_two_columns(candidates, role))
    columns = {role: candidates[0] for role, candidates in assigned.items()}
    free = {
        column: word for word, candidates in words.items() for column in candidates if column not in columns.values()
    }
    labels = [column for column, word in free.items() if word in ("label", "kto_tag")]
    if labels and {"prompt", "completion"} <= set(columns):
        raise RowError(UNPAIRED.format(column=labels[0]))
    has_main_by_hand = bool({"messages", "prompt", "completion", "chosen", "text"} & set(by_hand))
    meaningful = [column for column, word in free.items() if word in MEANINGS or word == "chosen"]
    other = [] if has_main_by_hand else [c for c, word in free.items() if word in ROLE_OF and c not in meaningful]
    unused = tuple(column for column in free if column not in other and column not in meaningful)
    return Recognized("" if has_main_by_hand else data_format.name, columns, tuple(other),
                      tuple(meaningful), unused)  # fmt: skip


def _explain_unknown(names: Sequence[str], row_format: RowFormatName, words: Mapping[str, list[str]]) -> str:
    """Why the columns of a row are of no known format, and what would work."""
    present = {role: words[word][0] for word, role in ROLE_OF.items() if word in words}
    listed = describe_columns(dict.fromkeys(names))
    if row_format == "pairs":
        summary = f"no chosen and rejected; {listed}"
        wanted = {"prompt": "QUESTION", "chosen": "BETTER", "rejected": "WORSE"}
        if {"prompt", "completion"} <= set(present) and (label := words.get("label") or words.get("kto_tag")):
            return UNPAIRED.format(column=label[0])
    else:
        if {"chosen", "rejected"} <= set(present):
            roles = f"{present['prompt']}: prompt, chosen: completion" if "prompt" in present else "chosen: messages"
            return (f"these are preference pairs ({present['chosen']!r} and {present['rejected']!r}), which dpo trains "
                    f"on; data.columns: {{{roles}}} trains sft on the chosen answers")  # fmt: skip
        if "text" in words and not {"prompt", "completion"} & set(present):
            return TEXT_ONLY.format(column=words["text"][0])
        summary = f"no messages, nor prompt and completion; {listed}"
        wanted = {"prompt": "QUESTION", "completion": "ANSWER"}
    line = ", ".join(f"{present.get(role, name)}: {role}" for role, name in wanted.items())
    return f"{summary}; say which is which: data.columns: {{{line}}}"


def _two_columns(columns: Sequence[str], role: str) -> str:
    hint = f"say which it is: data.columns: {{{columns[0]}: {role}, {columns[1]}: ignore}}"
    return f"{' and '.join(map(repr, columns))} are {len(columns)} columns for one role, {role}; {hint}"


def is_empty(value: Any) -> bool:
    """Whether a value holds nothing; NaN is how pandas writes a missing one."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or value in ([], {}, ()) or (isinstance(value, float) and value != value)


def check_meaning(recognized: Recognized, values: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Raise if a column that is not used would change what the row means."""
    for column in recognized.meaningful:
        value, word = values[column], fold(column)
        neutral = MEANINGS.get(word) == MEANINGS["weight"] and value in (1, "1", "1.0", True)
        if not is_empty(value) and not neutral:
            reason = MEANINGS.get(word, "it is the preferred answer of a pair, which dpo trains on")
            raise RowError(f"the column {column!r} is not used and changes what the row means: {reason}; to "
                           + IGNORE.format(column=column))  # fmt: skip
    text = ""
    for column in recognized.other_columns:
        text = text or "\n".join(message_text(message) for message in messages)
        if not _repeats(values[column], text):
            role = ROLE_OF[fold(column)]
            used = recognized.columns.get(role) or recognized.columns.get("messages") or next(
                iter(recognized.columns.values()))  # fmt: skip
            raise RowError(f"the column {column!r} is not used: {used!r} is, and does not hold it; to "
                           + IGNORE.format(column=column))  # fmt: skip


def _repeats(value: Any, text: str) -> bool:
    """Whether a text already holds all of a value."""
    if is_empty(value):
        return True
    if isinstance(value, list):
        return all(_repeats(item, text) for item in value)
    if isinstance(value, dict):
        content = value.get("content", value.get("value"))
        return isinstance(content, str | list) and _repeats(content, text)
    return isinstance(value, str) and value.strip() in text


def message_text(message: Message) -> str:
    """All text of a message: its content, reasoning and tool calls."""
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else ""
    return "\n".join(filter(None, (message.get("reasoning_content"), message["content"], calls)))


ROLES = ("system", "user", "assistant", "tool")
ROLE_WORDS = {
    **{role: role for role in ROLES}, "developer": "system", "human": "user", "gpt": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "function_call": "assistant",
    "observation": "tool", "tool_response": "tool", "function": "tool", "function_response": "tool", "ipython": "tool",
}  # fmt: skip
"""The role of a message by its words in OpenAI's, ShareGPT's and other formats."""
MESSAGE_KEYS = {
    *("role", "from", "content", "value", "tool_calls", "function_call", "name", "tool_call_id", "reasoning_content"),
    *("id", "uuid", "message_id", "parent_id", "turn", "turn_identifier", "index", "type", "status", "state", "source"),
    *("model", "timestamp", "created_at", "date", "language", "country", "hashed_ip", "header", "redacted", "toxic"),
    *("finish_reason", "usage", "tokens", "num_tokens", "user_id", "markdown", "text"),
}  # fmt: skip
"""Keys of a message that are used, and those that change nothing; of any other, only 1 and true change nothing."""
TRAIN_KEYS = ("weight", "train", "training", "loss")
"""Keys of a message in which 0 and false mean that an answer is not trained."""
TEXT_PARTS = ("text", "input_text", "output_text")
TRANSCRIPT_RE = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def normalize_message(turn: Any) -> Message:
    """A message with one of our roles and a text content."""
    wanted = f"it wants a role of {', '.join(ROLES)} and a text content"
    if not isinstance(turn, dict):
        raise RowError(f"a turn is {str(turn)[:60]!r}; {wanted}")
    word, content = _role_word(turn), _one_value(turn, "content", "value", "text")
    role = ROLE_WORDS.get(word)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if word == "function_call":
        calls, content = parse_json(content), ""
        if calls is None:
            raise RowError(f"a turn of function_call is {str(turn)[:60]!r}; it wants JSON with name and arguments")
    if isinstance(content, list):
        content = _join_parts(content)
    if isinstance(content, dict) and role == "tool":
        content = json.dumps(content, ensure_ascii=False)
    if role is None or not (isinstance(content, str) or (content is None and calls)):
        raise RowError(f"a turn is {str(turn)[:60]!r}; {wanted}")
    untrained = [key for key in TRAIN_KEYS if turn.get(key) in (0, False) and turn.get(key) is not None]
    for key in sorted(key for key in turn if key not in MESSAGE_KEYS and key not in untrained):
        if turn[key] is not None and turn[key] not in (1, True, [], {}, ""):
            raise RowError(f"a turn has {key} {str(turn[key])[:40]}, which is not used; leave it out of the messages")
    if role != "assistant" and True in (turn.get("train"), turn.get("training")):
        raise RowError(f"a turn of the {role} has train: true, and only answers of the assistant are trained")
    message: Message = {"role": role, "content": content or ""}
    message |= {key: turn[key] for key in ("name", "tool_call_id", "reasoning_content") if turn.get(key)}
    if untrained and role == "assistant":
        message["train"] = False
    if calls:
        message["tool_calls"] = [_normalize_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    for key in message.keys() & {"name", "reasoning_content"}:
        if not isinstance(message[key], str):
            raise RowError(f"{key} is {str(message[key])[:40]!r}; it wants text")
    _require_utf8(message)
    return message


def _one_value(turn: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of the keys that has one, if no other key has another; `text` alone is no content."""
    present = [key for key in keys if turn.get(key) is not None]
    if other := next((key for key in present if turn[key] != turn[present[0]]), None):
        raise RowError(f"a turn has {present[0]} and {other}, which differ; leave one of them out")
    return turn[present[0]] if present and present[0] != "text" else None


def _role_word(turn: Any) -> str:
    """The word for the role of a turn, in lower case."""
    words = [str(turn[key]).casefold() for key in ("role", "from") if turn.get(key) is not None]
    if len({ROLE_WORDS.get(word, word) for word in words}) > 1:
        raise RowError(f"a turn has role {words[0]!r} and from {words[1]!r}, which differ; leave one of them out")
    return words[0] if words else ""


def _require_utf8(value: Any) -> None:
    parts = list(value.values()) if isinstance(value, dict) else [value]
    is_text = all(isinstance(part, str) for part in parts)
    if utf8_size("".join(parts) if is_text else json.dumps(value, ensure_ascii=False, default=str)) is None:
        raise RowError(LONE_SURROGATE)


def _join_parts(parts: list[Any]) -> str:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise RowError(
                f"the content has a part of type {kind!r}, which this stage cannot read; it wants text parts"
            )
        texts.append(text)
    return "".join(texts)


CALL_KEYS = {"function", "name", "arguments", "id", "type", "index"}
"""Keys of a tool call that are used, or change nothing."""


def _normalize_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, as chat templates want it."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call is {str(call)[:60]!r}; it wants a function with name and arguments")
    unread = {key: value for key, value in {**call, **function}.items() if key not in CALL_KEYS and not is_empty(value)}
    if call.get("type", "function") not in ("function", None):
        unread["type"] = call["type"]
    for key, value in unread.items():
        raise RowError(f"a tool call has {key} {str(value)[:40]}, which is not used; leave it out of the call")
    arguments = function.get("arguments")
    arguments = parse_json(arguments) if isinstance(arguments, str) and parse_json(arguments) is not None else arguments
    identity = {"id": call["id"]} if call.get("id") else {}
    call_function = {"name": function["name"], "arguments": without_none({} if arguments is None else arguments)}
    return {**identity, "type": "function", "function": call_function}


def parse_json(value: Any) -> Any:
    """A list or an object that is written as JSON; None if it is neither."""
    if isinstance(value, str):
        try:
            is_json = value.lstrip()[:1] in ("[", "{")
            value = DECODER.decode(value) if is_json else None
        except DuplicateKey as error:
            raise RowError(f"{str(value)[:60]!r} is no JSON: {error}") from None
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list | dict) else None


def without_none(value: Any) -> Any:
    """A value without the keys that are null, which Parquet adds to objects of different keys."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a row as JSON schemas."""
    if is_empty(value):
        return ()
    tools = parse_json(value)
    tools = [parse_json(tool) for tool in tools] if isinstance(tools, list) else [tools]
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"'tools' is {str(value)[:60]!r}; it wants a list of JSON schemas of functions")
    _require_utf8(tools)
    return tuple(without_none(tool) for tool in tools)


def split_transcript(text: str) -> list[Message] | None:
    """The turns of a transcript "Human: ... Assistant: ..."; None for any other text."""
    parts = TRANSCRIPT_RE.split(text)
    if parts[0].strip() or len(parts) < 3 or parts[1] != "Human":
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[word], "content": content.strip()}
            for word, content in zip(parts[1::2], parts[2::2], strict=True)]  # fmt: skip


def to_turns(role: str, value: Any) -> list[Any]:
    """The turns of a value: messages, one message, messages as JSON text, or a text of one role."""
    if isinstance(value, str):
        parsed = parse_json(value)
        is_messages = isinstance(parsed, list) and bool(parsed) and all(
            isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in parsed)  # fmt: skip
        return list(parsed) if is_messages else [{"role": role, "content": value}]
    return [value] if isinstance(value, dict) else list(value)


def prompt_turns(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Any]:
    """The turns of the prompt: history, prompt and context."""
    prompt, context, history = (values.get(role) for role in ("prompt", "context", "history"))
    turns: list[Any] = []
    past = parse_json(history)
    if not is_empty(history) and not isinstance(past, list):
        raise RowError(f"{names['history']!r} is {str(history)[:60]!r}; it wants a list of [question, answer]")
    for turn in past or ():
        is_pair = isinstance(turn, list | tuple) and len(turn) == 2
        turns += to_turns("user", turn[0]) + to_turns("assistant", turn[1]) if is_pair else [turn]
    if isinstance(prompt, str):
        transcript = split_transcript(prompt)
        if transcript and prompt.rstrip().endswith("Assistant:") and not transcript[-1]["content"]:
            return turns + transcript[:-1]
        if not is_empty(context):
            if not isinstance(context, str):
                raise RowError(f"{names['context']!r} is {str(context)[:60]!r}; it wants text")
            prompt = f"{prompt}\n\n{context}"
        return turns + to_turns("user", prompt)
    if not is_empty(context):
        raise RowError(f"{names['context']!r} cannot follow a prompt of messages; put it into the messages, or to "
                       + IGNORE.format(column=names["context"]))  # fmt: skip
    return turns + to_turns("user", prompt)


def validate_messages(value: Any) -> list[Message]:
    """Messages that end with an answer of the assistant."""
    if not isinstance(value, list) or not value:
        raise RowError("messages is empty or no list; it wants a list of {role, content}")
    turns = [normalize_message(turn) for turn in value]
    if turns[-1]["role"] != "assistant" or is_empty(message_text(turns[-1])):
        raise RowError("the last turn is not an answer of the assistant; no assistant message to train on")
    if all(turn.get("train") is False for turn in turns if turn["role"] == "assistant"):
        raise RowError("every answer has weight 0 or train: false; no assistant message to train on")
    if not any(turn["role"] == "user" for turn in turns):
        raise RowError("no turn is the user's; it wants a question before the answer")
    for turn in turns:
        if turn["role"] in ("user", "assistant") and turn.get("train", True) and is_empty(message_text(turn)):
            raise RowError(f"a turn of the {turn['role']} is empty; it wants text, or to be left out")
    return turns


def add_system_message(
    messages: list[Message], values: Mapping[str, Any], names: Mapping[str, str], default: str | None
) -> list[Message]:
    """Prepend the system message of a row, or else the recipe's, unless there is one."""
    system = None if is_empty(values.get("system")) else require_text(values, names, "system")
    if messages[0]["role"] == "system":
        if system is not None and system.strip() != messages[0]["content"].strip():
            raise RowError(f"the column {names['system']!r} is not used: the messages have another system message; to "
                           + IGNORE.format(column=names["system"]))  # fmt: skip
        return messages
    system = system or default
    if is_empty(system):
        return messages
    return [normalize_message({"role": "system", "content": system}), *messages]


def conversation_messages(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Message]:
    """The messages of a conversation by the roles of its values; `names` are the columns, for error messages."""
    if "text" in names:
        text = require_text(values, names, "text")
        return [{"role": "text", "content": text}]
    if "messages" in names:
        value = values.get("messages")
        if isinstance(value, str):
            value = split_transcript(value) or parse_json(value)
        return validate_messages(value)
    for role in ("prompt", "completion"):
        value = values.get(role)
        if is_empty(value):
            raise RowError(f"{names[role]!r} is empty; it wants text")
        if not isinstance(value, str | list | dict):
            raise RowError(f"{names[role]!r} is {value!r}; it wants text")
    return validate_messages([*prompt_turns(values, names), *to_turns("assistant", values["completion"])])


def require_text(values: Mapping[str, Any], names: Mapping[str, str], role: str) -> str:
    """The text of a role."""
    value = values.get(role)
    if is_empty(value):
        raise RowError(f"{names[role]!r} is empty; it wants text")
    if not isinstance(value, str):
        raise RowError(f"{names[role]!r} is {str(value)[:40]!r}; it wants text")
    if utf8_size(value) is None:
        raise RowError(LONE_SURROGATE)
    return value


def pair_messages(values: Mapping[str, Any], names: Mapping[str, str], answer_role: str) -> list[Message]:
    """Prompt and answer of a pair as messages; an answer that begins with the prompt needs no prompt."""
    answer = values.get(answer_role)
    if is_empty(answer):
        raise RowError(f"{names[answer_role]!r} is empty; it wants text")
    if not isinstance(answer, str | list | dict):
        raise RowError(f"{names[answer_role]!r}: prompt and answer want text or messages")
    turns = (split_transcript(answer) if isinstance(answer, str) else None) or to_turns("assistant", answer)
    try:
        if not isinstance(turns[0], dict) or ROLE_WORDS.get(_role_word(turns[0])) != "assistant":
            messages = _pair_turns(turns)
            text = "\n".join(map(message_text, messages))
            for role in ("prompt", "context", "history"):
                if not _repeats(values.get(role), text):
                    raise RowError(f"its messages do not hold {names[role]!r}, which is not used; to "
                                   + IGNORE.format(column=names[role]))  # fmt: skip
            return messages
        if is_empty(values.get("prompt")):
            raise RowError("there is no prompt before it; it wants a prompt, or messages that begin with the question")
        if not isinstance(values["prompt"], str | list | dict):
            raise RowError("prompt and answer want text or messages")
        return _pair_turns([*prompt_turns(values, names), *turns])
    except RowError as error:
        raise RowError(f"{names[answer_role]!r}: {error}") from None


def _pair_turns(value: Any) -> list[Message]:
    """Messages of a pair, of which the last is always trained and the others never."""
    turns = validate_messages(value)
    if not turns[-1].get("train", True):
        raise RowError("the answer has weight 0 or train: false; leave the pair out")
    return [{key: value for key, value in turn.items() if key != "train"} for turn in turns]
