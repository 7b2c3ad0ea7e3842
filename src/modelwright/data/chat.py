"""Turn rows into conversations, and conversations into token ids with a loss mask."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import xxhash
from jinja2 import TemplateError

from modelwright.data.readers import LONE_SURROGATE, Quarantine, Row, describe_columns, utf8_size
from modelwright.data.sources import add_derived_columns, iter_train_rows, iter_validation_rows
from modelwright.errors import DataError, Problem
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import ChatConfig, PairConfig

ROLES = ("system", "user", "assistant", "tool")
CHAT_ROLES = ("messages", "prompt", "completion", "system")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT role names, in messages of {from, value}."""
CHAT_COLUMN_HINTS = {
    "question": "prompt", "instruction": "prompt", "input": "prompt", "query": "prompt", "full-question": "prompt",
    "answer": "completion", "output": "completion", "response": "completion", "conversations": "messages",
}  # fmt: skip
"""The usual role of a column of that name; only used for suggestions in error messages."""
Message = dict[str, str]


class HasSplitKey(Protocol):
    """Anything that group_split can split."""

    @property
    def split_key(self) -> str:
        """Items with equal keys stay in one split."""


Item = TypeVar("Item", bound=HasSplitKey)
RowParser = Callable[[Sequence[Row], DataConfig, Quarantine], list[Item]]


@dataclass(frozen=True)
class Conversation:
    """Messages to train on or to evaluate with."""

    where: str
    """File and line of the row."""
    messages: tuple[Message, ...]
    """Role and content of each message; the last is the assistant's."""
    split_key: str
    """Conversations with equal keys stay in one split."""

    @property
    def last_user_message(self) -> str:
        return next(message["content"] for message in reversed(self.messages) if message["role"] == "user")

    @property
    def content(self) -> Any:
        return self.messages


@dataclass(frozen=True)
class SplitDataset(Generic[Item]):
    """Train and held-out rows, with the statistics of the data manifest."""

    train: list[Item]
    """Rows to train on."""
    held_out: list[Item]
    """Rows for evaluation only."""
    fingerprint: str
    """Hash of every message of both splits, in order."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Rows that cannot be used."""
    counts: dict[str, int] = field(default_factory=dict)
    """Further counts of the manifest."""

    def manifest(self, data: DataConfig) -> dict[str, Any]:
        """Source, row counts and fingerprint."""
        # by prompt, not by split key: a split by row must not hide that a prompt is in both splits
        splits: tuple[Sequence[Any], Sequence[Any]] = (self.train, self.held_out)
        train, held_out = ({normalize_key(item.last_user_message) for item in items} for items in splits)
        return {
            "source": data.source,
            "validation": data.validation_file,
            "train_rows": len(self.train),
            "held_out_rows": len(self.held_out),
            "prompts_in_both_splits": len(train & held_out),
            "quarantined_rows": len(self.quarantine.invalid_rows),
            "fingerprint": self.fingerprint,
            **self.counts,
        }


ConversationDataset = SplitDataset[Conversation]


def normalize_key(text: Any) -> str:
    """A text for comparison: lower case, single spaces."""
    return " ".join(str(text).lower().split())


def load_conversations(data: DataConfig, seed: int, recipe_dir: Path) -> ConversationDataset:
    """Read, check and split the conversations of a recipe; all problems are raised as one error."""
    train, held_out, quarantine = load_splits(data, seed, recipe_dir, rows_to_conversations)
    fingerprint, distinct_rows = hash_splits(train, held_out)
    # many duplicates, if a folder holds one dataset in two formats
    counts = {"duplicate_rows": len(train) - distinct_rows}
    return ConversationDataset(train, held_out, fingerprint, quarantine, counts)


def load_splits(
    data: DataConfig, seed: int, recipe_dir: Path, parse: RowParser[Item], empty_message: str = "there is no row in it"
) -> tuple[list[Item], list[Item], Quarantine]:
    """Read and parse the training and validation rows; without a validation file, hold out part of the former."""
    quarantine = Quarantine(data.max_invalid_fraction)
    train, held_out = (
        parse(list(quarantine.iter_valid(rows)), data, quarantine)
        for rows in (iter_train_rows(data, recipe_dir), iter_validation_rows(data, recipe_dir))
    )
    quarantine.raise_if_over_limit()
    for items, source in ((train, data.source), (held_out, data.validation_file)):
        if source and not items:
            raise DataError([Problem(source, empty_message)])
    if not data.validation_file:
        train, held_out = group_split(train, data, seed)
    return train, held_out, quarantine


def hash_splits(train: Sequence[Any], held_out: Sequence[Any]) -> tuple[str, int]:
    """Fingerprint of all rows in order, and the number of distinct training rows."""
    digest = xxhash.xxh3_128()
    distinct: list[set[int]] = [set(), set()]
    for items, hashes in zip((train, held_out), distinct, strict=True):
        for item in items:
            serialized = json.dumps(item.content, ensure_ascii=False, sort_keys=True).encode()
            digest.update(serialized)
            hashes.add(xxhash.xxh3_64_intdigest(serialized))
        digest.update(b"\0")
    return digest.hexdigest(), len(distinct[0])


def rows_to_conversations(
    rows: Sequence[Row], data: DataConfig, quarantine: Quarantine | None = None
) -> list[Conversation]:
    """Parse each row; invalid ones go to the quarantine, or are raised if there is none."""
    invalid = Quarantine() if quarantine is None else quarantine
    rows = list(add_derived_columns(rows, data))
    if not rows:
        return []
    role_columns = map_chat_columns(rows[0], data.columns)
    conversations: list[Conversation] = []
    for row in rows:
        messages = _parse_messages(row, role_columns, data.system_prompt)
        if not isinstance(messages, str) and data.split_by and data.split_by not in row.values:
            messages = f"there is no column {data.split_by!r} to split by; {describe_columns(row.values)}"
        if isinstance(messages, str):
            invalid.add(row, messages)
            continue
        conversations.append(Conversation(row.where, tuple(messages), get_split_key(row, messages, data)))
    if quarantine is None:
        invalid.raise_if_over_limit()
    return conversations


def map_chat_columns(row: Row, columns: dict[str, Any]) -> dict[str, str]:
    """Which column has which role: by data.columns, else by column names that are roles."""
    configured = {role: column for column, role in columns.items()}
    named: dict[str, str] = {role: role for role in CHAT_ROLES if role in row.values}
    role_columns = configured or named
    missing = [column for column in role_columns.values() if column not in row.values]
    if missing:
        raise DataError([Problem(row.where, f"there is no column {missing[0]!r}; {describe_columns(row.values)}")])
    if "messages" not in role_columns and not {"prompt", "completion"} <= set(role_columns):
        guessed = {column: CHAT_COLUMN_HINTS[column] for column in row.values if column in CHAT_COLUMN_HINTS}
        complete = {"prompt", "completion"} <= set(guessed.values())
        suggestion = guessed if complete else {"QUESTION": "prompt", "ANSWER": "completion"}
        line = ", ".join(f"{column}: {role}" for column, role in suggestion.items())
        summary = f"no messages, nor prompt and completion; {describe_columns(row.values)}"
        raise DataError([Problem(row.where, f"{summary}; say which is which: data.columns: {{{line}}}")])
    return role_columns


def group_split(items: Sequence[Item], data: DataConfig, seed: int) -> tuple[list[Item], list[Item]]:
    """Hold out whole groups, chosen by a hash of seed and split key, so that no group is in both splits."""

    def group_hash(group: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{seed}:{group}".encode("utf-8", "surrogatepass"))

    groups = sorted({item.split_key for item in items}, key=lambda group: (group_hash(group), group))
    chosen = set(groups[: held_out_count(data, len(groups))])
    return [i for i in items if i.split_key not in chosen], [i for i in items if i.split_key in chosen]


def held_out_count(data: DataConfig, num_groups: int) -> int:
    """Number of groups to hold out by test_size."""
    count = data.test_size.resolve(num_groups)
    if count >= num_groups:
        message = f"test_size holds out {count} of {num_groups} distinct groups, which leaves none to train on"
        raise DataError([Problem(data.source, message)])
    return count


def build_prompt_messages(question: str, system_prompt: str | None) -> list[Message]:
    """The messages of a prompt, the same in training and in generation."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def _parse_messages(row: Row, role_columns: dict[str, str], system_prompt: str | None) -> list[Message] | str:
    """The messages of a row, or the reason why it is invalid."""
    if "messages" in role_columns:
        messages = validate_messages(row.values.get(role_columns["messages"]))
    else:
        context = row.values.get(role_columns["context"]) if "context" in role_columns else None
        prompt = append_context(row.values.get(role_columns["prompt"]), context)
        completion = row.values.get(role_columns["completion"])
        for name, value in (("prompt", prompt), ("completion", completion)):
            if value is None or value == [] or (isinstance(value, str) and not value.strip()):
                return f"{role_columns[name]!r} is empty; it wants text"
            if not isinstance(value, str | list):
                return f"{role_columns[name]!r} is {value!r}; it wants text"
        messages = validate_messages([*to_messages("user", prompt), *to_messages("assistant", completion)])
    if isinstance(messages, str):
        return messages
    system = row.values.get(role_columns["system"]) if "system" in role_columns else system_prompt
    return add_system_message(messages, system)


def to_messages(role: str, value: Any) -> Any:
    """A text as a list of one message; anything else unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def add_system_message(messages: list[Message], system: Any) -> list[Message] | str:
    """Prepend a system message unless there is one; or the reason why it is invalid."""
    if system and utf8_size(str(system)) is None:
        return LONE_SURROGATE
    wanted = system and messages[0]["role"] != "system"
    return [{"role": "system", "content": str(system)}, *messages] if wanted else messages


def get_split_key(row: Row, messages: Iterable[Message], data: DataConfig) -> str:
    """The value of data.split_by, else the first user message: equal in SFT and DPO, so they hold out the same."""
    first_prompt = next(message["content"] for message in messages if message["role"] == "user")
    return normalize_key(row.values[data.split_by] if data.split_by else first_prompt)


def append_context(prompt: Any, context: Any) -> Any:
    """Append the context column of an instruction dataset to the prompt."""
    return f"{prompt}\n\n{context}" if isinstance(prompt, str) and isinstance(context, str) and context else prompt


def validate_messages(value: Any) -> list[Message] | str:
    """Messages that end with an assistant message, or the reason why they are invalid."""
    if not isinstance(value, list) or not value:
        return "messages is empty or no list; it wants a list of {role, content}"
    turns: list[Message] = []
    for turn in map(_from_sharegpt, value):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str) or turn.get("role") not in ROLES:
            return f"a turn is {str(turn)[:60]!r}; it wants a role of {', '.join(ROLES)} and a text content"
        if utf8_size(turn["content"]) is None:
            return LONE_SURROGATE
        turns.append({"role": turn["role"], "content": turn["content"]})
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"].strip():
        return "the last turn is not an answer of the assistant; no assistant message to train on"
    if not any(turn["role"] == "user" for turn in turns):
        return "no turn is the user's; it wants a question before the answer"
    return turns


def _from_sharegpt(turn: Any) -> Any:
    """Convert a ShareGPT message to role and content; any other is unchanged."""
    if not isinstance(turn, dict) or set(turn) < {"from", "value"} or "role" in turn:
        return turn
    role = SHAREGPT_ROLES.get(str(turn.get("from")), turn.get("from"))
    return {"role": role, "content": turn.get("value")} if role in ROLES else turn


TOKENIZE_BATCH = 512
"""Conversations tokenized in one call."""
MIN_PREFIX_CHARS, PREFIX_CHECKS = 64, 2
"""Shortest common prefix worth tokenizing once, and the number of texts on which that is checked."""
TokenIds = np.ndarray[Any, np.dtype[np.int32]]
EMPTY_IDS: TokenIds = np.zeros(0, dtype=np.int32)
RenderedText = tuple[str, list[tuple[int, int]]]
"""The rendered text, and the character ranges that are trained."""


@dataclass(frozen=True)
class TokenizedRow:
    """Token ids and loss mask of one row."""

    input_ids: TokenIds
    """Token ids: [length] int32."""
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether the loss includes this token: [length] bool."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass
class TokenizedDataset:
    """All rows of one split, with truncation counts."""

    rows: list[TokenizedRow] = field(default_factory=list)
    truncated_rows: int = 0
    split_rows: int = 0
    truncated_tokens: int = 0
    dropped_rows: int = 0

    def append(self, row: TokenizedRow, config: ChatConfig) -> None:
        """Add a row: whole, truncated, or split (bfd_split); a row without trained tokens is dropped."""
        length, split_long_rows = config.max_length, config.packing and config.packing_strategy == "bfd_split"
        pieces = [row]
        if len(row) > length and split_long_rows:
            self.split_rows += 1
            # pieces overlap by one token, so that every trained token is predicted once
            ranges = [slice(start, start + length) for start in range(0, len(row) - 1, length - 1)]
            pieces = [TokenizedRow(row.input_ids[part], row.loss_mask[part]) for part in ranges]
        elif len(row) > length:
            self.truncated_rows += 1
            self.truncated_tokens += len(row) - length
            pieces = [TokenizedRow(row.input_ids[:length], row.loss_mask[:length])]
        trained_pieces = [piece for piece in pieces if piece.loss_mask[1:].any()]  # the first token is never predicted
        self.rows += trained_pieces
        self.dropped_rows += not trained_pieces

    def stats(self) -> dict[str, int]:
        """The numbers of the data manifest."""
        return {
            **vars(self),
            "rows": len(self.rows),
            "tokens": sum(len(row) for row in self.rows),
            "trained_tokens": int(sum(row.loss_mask.sum() for row in self.rows)),
        }


def tokenize_conversations(
    conversations: Iterable[Conversation], tokenizer: Any, config: ChatConfig, stop_tokens: Collection[int] = ()
) -> TokenizedDataset:
    """Tokenize all conversations; long ones are truncated or split; more than max_truncated_rows is an error."""
    stop_ids = {*stop_tokens, tokenizer.eos_token_id} - {None}
    dataset = TokenizedDataset()
    row_count, rows_with_stop = 0, 0
    remaining = iter(conversations)
    while batch := list(islice(remaining, TOKENIZE_BATCH)):
        for row in tokenize_batch(batch, tokenizer, config.assistant_only_loss):
            row_count += 1
            rows_with_stop += bool(np.isin(row.input_ids[row.loss_mask], list(stop_ids)).any())
            dataset.append(row, config)
    hint = ", or pack with packing_strategy: bfd_split"
    check_tokenized(dataset, row_count, "rows", bool(rows_with_stop), config, hint)
    return dataset


def check_tokenized(
    dataset: Any, count: int, noun: str, has_stop: bool, config: ChatConfig | PairConfig, hint: str = ""
) -> None:
    """Raise if too many rows are truncated, none has a trained token, or no answer ends with a stop token."""
    if dataset.truncated_rows > (limit := config.max_truncated_rows.resolve(count)):
        summary = f"{dataset.truncated_rows} of {count} {noun} are longer than max_length {config.max_length}"
        allowed = f"more than max_truncated_rows allows ({limit})"
        message = f"{summary} and would be cut, {allowed}; raise one of them{hint}"
    elif count and not dataset.rows:
        message = f"no row has a trained token within max_length {config.max_length}; raise max_length"
    elif count and not has_stop:
        message = "the chat template ends no answer with an end-of-text token, so the model would never learn to stop"
    else:
        return
    raise DataError([Problem("data", message)])


def tokenize_conversation(
    conversation: Conversation, tokenizer: Any, assistant_only: bool = True
) -> list[TokenizedRow]:
    """Tokenize one conversation; a template that rewrites earlier turns gives one row per answer."""
    return tokenize_batch([conversation], tokenizer, assistant_only)


def tokenize_batch(
    conversations: Sequence[Conversation], tokenizer: Any, assistant_only: bool = True
) -> list[TokenizedRow]:
    """Tokenize conversations in one call of the tokenizer, which uses all cores."""
    rendered: list[RenderedText] = []
    untemplated: list[TokenizedRow] = []
    for conversation in conversations:
        with _template_errors(conversation.messages, conversation.where):
            if tokenizer.chat_template:
                rendered += _render_with_spans(list(conversation.messages), tokenizer, assistant_only)
            else:
                args = (conversation.messages, conversation.where, tokenizer, assistant_only)
                untemplated.append(_tokenize_without_template(*args))
    return untemplated or _tokenize_with_mask(tokenizer, rendered)


def tokenize_completion(
    prompt_messages: Sequence[Message], completion: Sequence[Message], tokenizer: Any, where: str
) -> TokenizedRow:
    """Tokenize a prompt and its completion; only the completion is trained."""
    with _template_errors([*prompt_messages, *completion], where):
        if not tokenizer.chat_template:
            return _tokenize_without_template([*prompt_messages, *completion], where, tokenizer, assistant_only=True)
        text = _render(tokenizer, [*prompt_messages, *completion])
        span = (_completion_start(tokenizer, prompt_messages, text), len(text))
        return _tokenize_with_mask(tokenizer, [(text, [span])])[0]


@contextmanager
def _template_errors(messages: Sequence[Message], where: str) -> Iterator[None]:
    try:
        yield
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        problem = f"the model's chat template does not take the turns {roles} ({error})"
        raise DataError([Problem(where, problem)]) from None


def _render_with_spans(messages: list[Message], tokenizer: Any, assistant_only: bool) -> list[RenderedText]:
    full_text = _render(tokenizer, messages)
    # an assistant message that opens the conversation has no prompt: it is not trained
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn > 0]
    spans: list[tuple[int, int]] = []
    for turn in answers:
        prefix_text = full_text if turn + 1 == len(messages) else _render(tokenizer, messages[: turn + 1])
        if not full_text.startswith(prefix_text):
            return [_render_last(tokenizer, messages[: turn + 1], assistant_only) for turn in answers]
        spans.append((_completion_start(tokenizer, messages[:turn], prefix_text), len(prefix_text)))
    return [(full_text, spans if assistant_only else [(0, len(full_text))])]


def _render_last(tokenizer: Any, messages: Sequence[Message], assistant_only: bool) -> RenderedText:
    text = _render(tokenizer, messages)
    start = _completion_start(tokenizer, messages[:-1], text) if assistant_only else 0
    return text, [(start, len(text))]


def _completion_start(tokenizer: Any, prompt_messages: Sequence[Message], text: str) -> int:
    """Start of the completion: the end of the common prefix with the prompt rendered for generation."""
    return _common_prefix(_render(tokenizer, prompt_messages, add_generation_prompt=True), text)


def _common_prefix(one: str, other: str) -> int:
    """Length of the common prefix."""
    if other.startswith(one):
        return len(one)
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _render(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    try:
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:  # errors inside the template
        raise TemplateError(str(error)) from None


def _tokenize_with_mask(tokenizer: Any, rendered: Sequence[RenderedText]) -> list[TokenizedRow]:
    # the template writes the special tokens; adding more would double BOS (alignment-handbook#127)
    texts = [text for text, _ in rendered]
    prefix_chars = _shareable_prefix(tokenizer, texts)
    prefix_ids = prefix_starts = EMPTY_IDS
    if prefix_chars:
        [(prefix_ids, prefix_starts)] = _tokenize_with_offsets(tokenizer, [texts[0][:prefix_chars]])
    rows = []
    tokenized = _tokenize_with_offsets(tokenizer, [text[prefix_chars:] for text in texts])
    for (_, spans), (input_ids, starts) in zip(rendered, tokenized, strict=True):
        starts = np.concatenate([prefix_starts, starts + prefix_chars])
        loss_mask = np.zeros(len(starts), dtype=np.bool_)
        for begin, end in spans:
            loss_mask |= (starts >= begin) & (starts < end)
        rows.append(TokenizedRow(np.concatenate([prefix_ids, input_ids]), loss_mask))
    return rows


def _tokenize_with_offsets(tokenizer: Any, texts: list[str]) -> Iterator[tuple[TokenIds, TokenIds]]:
    """Token ids of each text, and the character offset of each token."""
    encoding = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    for input_ids, offsets in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        starts = np.fromiter((start for start, _ in offsets), dtype=np.int32, count=len(offsets))
        yield np.array(input_ids, dtype=np.int32), starts


def _shareable_prefix(tokenizer: Any, texts: Sequence[str]) -> int:
    """Length of the common prefix (system prompt) that can be tokenized once; 0 if that is not worth it.

    The cut is just before a special token, since tokenizers encode the text on either side of one separately; whether
    this tokenizer does is checked on two texts.
    """
    prefix = min(texts, default="")
    prefix = prefix[: _common_prefix(prefix, max(texts, default=""))]
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = [t.content for t in added if t.special and not (t.lstrip or t.single_word or t.normalized)]
    cut = max((prefix.rfind(content) for content in special), default=0)
    if len(texts) <= PREFIX_CHECKS or cut < MIN_PREFIX_CHARS:
        return 0
    parts = [texts[0][:cut], *(text[cut:] for text in texts[:PREFIX_CHECKS])]
    (first, _), *others = _tokenize_with_offsets(tokenizer, parts)
    full_ids = _tokenize_with_offsets(tokenizer, list(texts[:PREFIX_CHECKS]))
    pairs = zip(full_ids, others, strict=True)
    return cut if all(np.array_equal(full, [*first, *other]) for (full, _), (other, _) in pairs) else 0


def _tokenize_without_template(
    messages: Sequence[Message], where: str, tokenizer: Any, assistant_only: bool
) -> TokenizedRow:
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"]:
        problem = f"the tokenizer has no chat template, which the turns {', '.join(roles)} need; use an instruct model"
        raise DataError([Problem(where, problem)])
    if tokenizer.eos_token_id is None:
        problem = "the tokenizer has neither a chat template nor an end-of-text token; use an instruct model"
        raise DataError([Problem(where, problem)])
    prompt, answer = (message["content"] for message in messages)
    prompt_ids = tokenizer(prompt)["input_ids"]
    input_ids = [*prompt_ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    loss_mask = np.ones(len(input_ids), dtype=np.bool_)
    loss_mask[: len(prompt_ids) if assistant_only else 0] = False
    return TokenizedRow(np.array(input_ids, dtype=np.int32), loss_mask)
