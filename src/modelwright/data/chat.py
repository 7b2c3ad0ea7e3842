"""Turn rows into conversations, and conversations into token ids with a loss mask."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from os.path import commonprefix
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import xxhash
from jinja2 import TemplateError

from modelwright.data.readers import EXAMPLES_SHOWN, DroppedRow, InvalidRow, Quarantine, Row, describe_columns
from modelwright.data.recognize import (
    Message,
    Recognized,
    RowError,
    add_system_message,
    check_meaning,
    conversation_messages,
    parse_tools,
    recognize,
)
from modelwright.data.sources import (
    add_derived_columns,
    has_validation_rows,
    iter_train_rows,
    iter_validation_rows,
    notes_on_files,
)
from modelwright.errors import DataError, Problem
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.stage_specs import ChatConfig, PairConfig, RowFormatName


class HasSplitKey(Protocol):
    """Anything that group_split can split."""

    @property
    def split_key(self) -> str:
        """Items with equal keys stay in one split."""


Item = TypeVar("Item", bound=HasSplitKey)
RowParser = Callable[[Iterable[Row | InvalidRow], DataConfig, Quarantine], list[Item]]
RowBuilder = Callable[[Row, Recognized, DataConfig], Item]


@dataclass(frozen=True)
class Conversation:
    """Messages to train on or to evaluate with."""

    where: str
    """File and line of the row."""
    messages: tuple[Message, ...]
    """Role and content of each message; the last is the assistant's."""
    split_key: str
    """Conversations with equal keys stay in one split."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that the assistant may call."""
    source: str = ""
    """Its source in a mixture."""

    @property
    def last_user_message(self) -> str:
        return find_prompt(reversed(self.messages))

    @property
    def content(self) -> Any:
        return [self.messages, self.tools] if self.tools else self.messages


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
    config: DataConfig | None = None
    """Where the rows come from; None in tests."""

    def manifest(self, data: DataConfig) -> dict[str, Any]:
        """Source, row counts and fingerprint."""
        # by prompt, not by split key: a split by row must not hide that a prompt is in both splits
        splits: tuple[Sequence[Any], Sequence[Any]] = (self.train, self.held_out)
        train, held_out = ({normalize_key(item.last_user_message) for item in items} for items in splits)
        return {
            "source": data.source,
            "validation": data.validation_file or data.validation_split,
            "train_rows": len(self.train),
            "held_out_rows": len(self.held_out),
            "prompts_in_both_splits": len(train & held_out),
            **self.quarantine.summary(),
            "fingerprint": self.fingerprint,
            **self.counts,
            **({"sources": count_sources(self.train, self.held_out, data)} if data.mix else {}),
        }


ConversationDataset = SplitDataset[Conversation]


def normalize_key(text: Any) -> str:
    """A text for comparison: lower case, single spaces."""
    return " ".join(str(text).lower().split())


def load_conversations(data: DataConfig, seed: int, recipe_dir: Path) -> ConversationDataset:
    """Read, check and split the conversations of a recipe; all problems are raised as one error."""
    train, held_out, quarantine = load_splits(data, seed, recipe_dir, rows_to_conversations)
    fingerprint, distinct_rows = hash_splits(train, held_out, data)
    duplicate_rows = len(train) - distinct_rows  # many, if a folder holds one dataset in two formats
    return ConversationDataset(train, held_out, fingerprint, quarantine, {"duplicate_rows": duplicate_rows}, data)


def load_splits(
    data: DataConfig, seed: int, recipe_dir: Path, parse: RowParser[Item], empty_message: str = "there is no row in it"
) -> tuple[list[Item], list[Item], Quarantine]:
    """Read and parse the training and validation rows; without a validation file, hold out part of the former."""
    train, held_out, quarantine = read_splits(data, recipe_dir, parse)
    with quarantine.raising():
        for items, source in ((train, data.source), (held_out, data.validation_file)):
            if source and not items:
                raise DataError([Problem(source, empty_message)])
        if not has_validation_rows(data, recipe_dir):
            train, held_out = group_split(train, data, seed)
        if lost := [name for name, count in count_sources(train, held_out, data).items() if not count["train_rows"]]:
            raise DataError([Problem(lost[0], f"{empty_message}, or test_size holds out all of them")])
    return train, held_out, quarantine


def read_splits(
    data: DataConfig, recipe_dir: Path, parse: RowParser[Item]
) -> tuple[list[Item], list[Item], Quarantine]:
    """The parsed training and validation rows, and those that cannot be used, for check, audit, show and run."""
    quarantine = Quarantine(data.max_invalid_fraction)
    quarantine.notes += [note for part in data.parts.values() for note in notes_on_files(part, recipe_dir)]
    train: list[Any] = []
    for name, part in data.parts.items():
        items: list[Any] = parse(quarantine.count(iter_train_rows(part, recipe_dir)), part, quarantine)
        if data.mix and (max_rows := data.mix[name].max_rows):
            items = items[: max_rows.resolve(len(items))]
        train += [replace(item, source=name) for item in items] if data.mix else items
        weight, total = data.weights.get(name, 0), sum(data.weights.values())
        share = f", {weight / total:.1%} of the rows of a step" if total else ""
        quarantine.sources += [f"source {name}: {len(items):,} rows{share}"] if data.mix else []
    held_out = parse(quarantine.count(iter_validation_rows(data, recipe_dir)), data, quarantine)
    return train, held_out, quarantine


def count_sources(train: Iterable[Any], held_out: Iterable[Any], data: DataConfig) -> dict[str, dict[str, Any]]:
    """The rows of each source of a mixture, and its weight."""
    rows, held = (Counter(item.source for item in items) if data.mix else {} for items in (train, held_out))
    return {name: {"train_rows": rows[name], "held_out_rows": held[name], "weight": source.weight}
            for name, source in data.mix.items()}  # fmt: skip


def hash_splits(train: Sequence[Any], held_out: Sequence[Any], data: DataConfig) -> tuple[str, int]:
    """Fingerprint of all rows in order and of their weights, and the number of distinct training rows."""
    digest = xxhash.xxh3_128()
    if data.mix:
        digest.update(json.dumps([data.stopping_strategy, count_sources(train, held_out, data)]).encode())
    distinct: list[set[int]] = [set(), set()]
    for items, hashes in zip((train, held_out), distinct, strict=True):
        for item in items:
            serialized = json.dumps(item.content, ensure_ascii=False, sort_keys=True).encode()
            digest.update(serialized)
            hashes.add(xxhash.xxh3_64_intdigest(serialized))
        digest.update(b"\0")
    return digest.hexdigest(), len(distinct[0])


def rows_to_conversations(
    rows: Iterable[Row | InvalidRow], data: DataConfig, quarantine: Quarantine | None = None
) -> list[Conversation]:
    """Parse each row; invalid ones go to the quarantine, or are raised if there is none."""
    return parse_rows(rows, data, "conversations", _build_conversation, quarantine)


def parse_rows(
    rows: Iterable[Row | InvalidRow],
    data: DataConfig,
    row_format: RowFormatName,
    build: RowBuilder[Item],
    quarantine: Quarantine | None,
) -> list[Item]:
    """Add derived columns, recognize the format of each row and build an item of it; the quarantine takes the rest."""
    outcome = Quarantine() if quarantine is None else quarantine
    rows = list(add_derived_columns(rows, data))
    known: set[str] = set().union(*(row.values for row in rows if isinstance(row, Row)))
    recognized: dict[tuple[str, ...], Recognized] = {}
    items: list[Item] = []
    for row in outcome.iter_valid(rows):
        try:
            names = tuple(row.values)
            if names not in recognized:
                recognized[names] = recognize(names, row_format, data.columns, known)
            if data.split_by and data.split_by not in row.values:
                raise RowError(f"there is no column {data.split_by!r} to split by; {describe_columns(row.values)}")
            items.append(build(row, recognized[names], data))
            outcome.count_format(recognized[names].describe(row.values))
        except DroppedRow as reason:
            outcome.drop(row, str(reason))
        except RowError as error:
            outcome.add(row, str(error))
    if quarantine is None:
        outcome.raise_if_over_limit()
    return items


def _build_conversation(row: Row, recognized: Recognized, data: DataConfig) -> Conversation:
    values = {role: row.values.get(column) for role, column in recognized.columns.items()}
    messages = conversation_messages(values, recognized.columns)
    check_meaning(recognized, row.values, messages)
    if "text" not in recognized.columns:
        messages = add_system_message(messages, values, recognized.columns, data.system_prompt)
    return Conversation(
        row.where, tuple(messages), get_split_key(row, messages, data), parse_tools(values.get("tools"))
    )


def group_split(items: Sequence[Item], data: DataConfig, seed: int) -> tuple[list[Item], list[Item]]:
    """Hold out whole groups, chosen by a hash of seed and split key, so that no group is in both splits."""

    def group_hash(group: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{seed}:{group}".encode("utf-8", "surrogatepass"))

    groups = sorted({item.split_key for item in items}, key=lambda group: (group_hash(group), group))
    count, chosen = held_out_count(data, len(groups)), set()
    for name in data.mix or ("",):  # the same share of each source; a group is held out of all of them or of none
        own = {item.split_key for item in items if not name or getattr(item, "source", "") == name}
        own_count = round(count * len(own) / len(groups)) if not name else max(1, round(count * len(own) / len(groups)))
        chosen.update([group for group in groups if group in own][: own_count if count else 0])
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


def find_prompt(messages: Iterable[Message]) -> str:
    """The first message of the user; a text without messages is its own prompt."""
    return next(str(message["content"]) for message in messages if message["role"] in ("user", "text"))


def get_split_key(row: Row, messages: Iterable[Message], data: DataConfig) -> str:
    """The value of data.split_by, else the first user message: equal in SFT and DPO, so they hold out the same."""
    return normalize_key(row.values[data.split_by] if data.split_by else find_prompt(messages))


TOKENIZE_BATCH = 512
"""Conversations tokenized in one call."""
MIN_PREFIX_CHARS, PREFIX_CHECKS = 64, 2
"""Shortest common prefix worth tokenizing once, and the number of texts on which that is checked."""
TokenIds = np.ndarray[Any, np.dtype[np.int32]]
EMPTY_IDS: TokenIds = np.zeros(0, dtype=np.int32)
Tools = Sequence[dict[str, Any]]
RenderedText = tuple[str, list[tuple[int, int]]]
"""The rendered text, and the character ranges that are trained."""


@dataclass(frozen=True)
class TokenizedRow:
    """Token ids and loss mask of one row."""

    input_ids: TokenIds
    """Token ids: [length] int32."""
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether the loss includes this token: [length] bool."""
    where: str = ""
    """File and line of the row."""
    source: str = ""
    """Its source in a mixture."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, part: slice) -> TokenizedRow:
        return replace(self, input_ids=self.input_ids[part], loss_mask=self.loss_mask[part])


@dataclass
class TokenizedDataset:
    """All rows of one split, with truncation counts and the first rows that were truncated or dropped."""

    rows: list[TokenizedRow] = field(default_factory=list)
    truncated_rows: int = 0
    split_rows: int = 0
    truncated_tokens: int = 0
    longest_row: int = 0
    dropped_rows: int = 0
    truncated_examples: list[str] = field(default_factory=list)
    dropped_examples: list[str] = field(default_factory=list)

    def append(self, row: TokenizedRow, config: ChatConfig) -> None:
        """Add a row: whole, truncated, or split (bfd_split); a row without trained tokens is dropped."""
        length, split_long_rows = config.max_length, config.packing and config.packing_strategy == "bfd_split"
        pieces, self.longest_row = [row], max(self.longest_row, len(row))
        if len(row) > length and split_long_rows:
            self.split_rows += 1
            # pieces overlap by one token, so that every trained token is predicted once
            pieces = [row[start : start + length] for start in range(0, len(row) - 1, length - 1)]
        elif len(row) > length:
            self.truncated_rows += 1
            self.truncated_tokens += len(row) - length
            add_example(self.truncated_examples, f"{row.where} ({len(row):,} tokens)")
            pieces = [row[:length]]
        trained_pieces = [piece for piece in pieces if piece.loss_mask[1:].any()]  # the first token is never predicted
        self.rows += trained_pieces
        if not trained_pieces:
            self.dropped_rows += 1
            add_example(self.dropped_examples, row.where)

    def stats(self) -> dict[str, Any]:
        """The numbers of the data manifest."""
        return {
            **vars(self),
            "rows": len(self.rows),
            "tokens": sum(len(row) for row in self.rows),
            "trained_tokens": int(sum(row.loss_mask.sum() for row in self.rows)),
        }


def add_example(examples: list[str], example: str) -> None:
    """Keep the first examples."""
    if len(examples) < EXAMPLES_SHOWN:
        examples.append(example)


def tokenize_conversations(
    conversations: Iterable[Conversation], tokenizer: Any, config: ChatConfig, stop_tokens: Collection[int] = ()
) -> TokenizedDataset:
    """Tokenize all conversations; long ones are truncated or split; more than max_truncated_rows is an error."""
    stop_ids = {*stop_tokens, tokenizer.eos_token_id} - {None}
    dataset = TokenizedDataset()
    row_count, has_stop = 0, False
    remaining = iter(conversations)
    while batch := list(islice(remaining, TOKENIZE_BATCH)):
        for row in tokenize_batch(batch, tokenizer, config.assistant_only_loss):
            row_count += 1
            has_stop = has_stop or bool(np.isin(row.input_ids[row.loss_mask], list(stop_ids)).any())
            dataset.append(row, config)
    hint = ", or pack with packing_strategy: bfd_split"
    check_tokenized(dataset, row_count, "rows", has_stop, config, hint)
    return dataset


def check_tokenized(
    dataset: Any, count: int, noun: str, has_stop: bool, config: ChatConfig | PairConfig, hint: str = ""
) -> None:
    """Raise if too many rows are truncated, none has a trained token, or no answer ends with a stop token."""
    if dataset.truncated_rows > (limit := config.max_truncated_rows.resolve(count)):
        summary = f"{dataset.truncated_rows} of {count} {noun} are longer than max_length {config.max_length}"
        allowed = f"more than max_truncated_rows allows ({limit})"
        examples = f"the first are {', '.join(dataset.truncated_examples)}"
        message = f"{summary} and would be cut, {allowed}; raise one of them{hint}; {examples}"
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
    rows: list[tuple[Conversation, TokenizedRow | None]] = []
    for conversation in conversations:
        messages, where, tools = conversation.messages, conversation.where, conversation.tools
        with _template_errors(messages, where):
            if messages[0]["role"] == "text":
                rows.append((conversation, _tokenize_text(str(messages[0]["content"]), where, tokenizer)))
            elif tokenizer.chat_template:
                texts = _render_with_spans(list(messages), tokenizer, assistant_only, tools)
                rendered += texts
                rows += [(conversation, None)] * len(texts)
            else:
                row = _tokenize_without_template(messages, where, tokenizer, assistant_only, tools)
                rows.append((conversation, row))
    templated = iter(_tokenize_with_mask(tokenizer, rendered) if rendered else ())
    return [replace(row or next(templated), where=item.where, source=item.source) for item, row in rows]


def tokenize_completion(
    prompt_messages: Sequence[Message], completion: Sequence[Message], tokenizer: Any, where: str, tools: Tools = ()
) -> TokenizedRow:
    """Tokenize a prompt and its completion; only the completion is trained."""
    messages = [*prompt_messages, *completion]
    with _template_errors(messages, where):
        if not tokenizer.chat_template:
            return _tokenize_without_template(messages, where, tokenizer, True, tools)
        text = _render(tokenizer, messages, tools)
        _check_rendered(tokenizer, text, messages, tools)
        span = (_completion_start(tokenizer, prompt_messages, text, tools), len(text))
        return replace(_tokenize_with_mask(tokenizer, [(text, [span])])[0], where=where)


class _NotRendered(Exception):
    """The chat template leaves out a part of a conversation."""


@contextmanager
def _template_errors(messages: Sequence[Message], where: str) -> Iterator[None]:
    try:
        yield
    except _NotRendered as error:
        raise DataError([Problem(where, str(error))]) from None
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        problem = f"the model's chat template does not take the turns {roles} ({error})"
        raise DataError([Problem(where, problem)]) from None


def _check_rendered(tokenizer: Any, text: str, messages: Sequence[Message], tools: Tools) -> None:
    """Raise if the text is the same without the tools, a turn, a tool call or the last message's reasoning."""
    variants: list[tuple[str, Sequence[Message], Tools]] = [("tools", messages, ())] if tools else []
    for turn, message in enumerate(messages):
        keys = ["tool_calls"] if message.get("tool_calls") else []
        keys += ["reasoning_content"] if message.get("reasoning_content") and message is messages[-1] else []
        content = message["content"].strip()  # beside tool calls, some templates leave it out
        unseen = message["role"] == "tool" or (content not in text and not message.get("tool_calls"))
        keys += ["content"] if content and unseen else []
        for key in keys:
            without = {**message, key: "" if key == "content" else None}
            name = "the output of tools" if message["role"] == "tool" else f"the turns of the {message['role']}"
            name = name if key == "content" else key
            variants.append((name, [*messages[:turn], without, *messages[turn + 1 :]], tools))
    for name, variant, variant_tools in variants:
        with suppress(TemplateError):  # a template that wants it renders it
            if _render(tokenizer, variant, variant_tools) == text:
                raise _NotRendered(f"the model's chat template does not render {name}; use a model whose template does")


def _render_with_spans(
    messages: list[Message], tokenizer: Any, assistant_only: bool, tools: Tools = ()
) -> list[RenderedText]:
    full_text = _render(tokenizer, messages, tools)
    _check_rendered(tokenizer, full_text, messages, tools)
    # an assistant message that opens the conversation has no prompt: it is not trained
    answers = [turn for turn, message in enumerate(messages)
               if message["role"] == "assistant" and turn > 0 and message.get("train", True)]  # fmt: skip
    if not assistant_only and not all(message.get("train", True) for message in messages):
        raise _NotRendered("an answer has weight 0 or train: false, and assistant_only_loss: false trains all turns")
    spans: list[tuple[int, int]] = []
    for turn in answers:
        prefix_text = full_text if turn + 1 == len(messages) else _render(tokenizer, messages[: turn + 1], tools)
        if not full_text.startswith(prefix_text):
            return [_render_last(tokenizer, messages[: turn + 1], assistant_only, tools) for turn in answers]
        spans.append((_completion_start(tokenizer, messages[:turn], prefix_text, tools), len(prefix_text)))
    return [(full_text, spans if assistant_only else [(0, len(full_text))])]


def _render_last(tokenizer: Any, messages: Sequence[Message], assistant_only: bool, tools: Tools) -> RenderedText:
    text = _render(tokenizer, messages, tools)
    _check_rendered(tokenizer, text, messages, tools)
    start = _completion_start(tokenizer, messages[:-1], text, tools) if assistant_only else 0
    return text, [(start, len(text))]


def _completion_start(tokenizer: Any, prompt_messages: Sequence[Message], text: str, tools: Tools = ()) -> int:
    """Start of the completion: the end of the common prefix with the prompt rendered for generation."""
    return _common_prefix(_render(tokenizer, prompt_messages, tools, add_generation_prompt=True), text)


def _common_prefix(one: str, other: str) -> int:
    """Length of the common prefix: mostly all of the first, which is compared faster than by characters."""
    return len(one) if other.startswith(one) else len(commonprefix((one, other)))  # noqa: RUF071 - by characters is right here


def _render(tokenizer: Any, messages: Sequence[Message], tools: Tools = (), add_generation_prompt: bool = False) -> str:
    try:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        options |= {"tools": list(tools)} if tools else {}
        turns = [{key: value for key, value in message.items() if key != "train"} for message in messages]
        return str(tokenizer.apply_chat_template(turns, **options))
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
        bounds = np.fromiter(chain.from_iterable(offsets), dtype=np.int32, count=2 * len(offsets))
        yield np.array(input_ids, dtype=np.int32), bounds[::2]


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


def _tokenize_text(text: str, where: str, tokenizer: Any) -> TokenizedRow:
    """Tokenize a text that is trained whole, with an end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise DataError([Problem(where, "the tokenizer has no end-of-text token, which text needs at its end")])
    input_ids = [*tokenizer(text)["input_ids"]]
    input_ids += [tokenizer.eos_token_id] if input_ids[-1:] != [tokenizer.eos_token_id] else []
    return TokenizedRow(np.array(input_ids, dtype=np.int32), np.ones(len(input_ids), dtype=np.bool_))


def appends_eos(tokenizer: Any) -> bool:
    """Whether the tokenizer's post-processor ends a text with an end-of-text token, which belongs in no prompt."""
    plain, ids = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    return len(ids) > len(plain) and bool(ids[-1] == tokenizer.eos_token_id)


def _tokenize_without_template(
    messages: Sequence[Message], where: str, tokenizer: Any, assistant_only: bool, tools: Tools = ()
) -> TokenizedRow:
    roles = [message["role"] for message in messages]
    extras = ["tools"] if tools else [key for key in ("tool_calls", "reasoning_content") if messages[-1].get(key)]
    if roles != ["user", "assistant"] or extras:
        needed_by = extras[0] if extras else f"the turns {', '.join(roles)}"
        problem = f"the tokenizer has no chat template, which {needed_by} need; use an instruct model"
        raise DataError([Problem(where, problem)])
    if tokenizer.eos_token_id is None:
        problem = "the tokenizer has neither a chat template nor an end-of-text token; use an instruct model"
        raise DataError([Problem(where, problem)])
    prompt, answer = (message["content"] for message in messages)
    prompt_ids = tokenizer(prompt)["input_ids"]
    prompt_ids = prompt_ids[:-1] if appends_eos(tokenizer) else prompt_ids
    input_ids = [*prompt_ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    loss_mask = np.ones(len(input_ids), dtype=np.bool_)
    loss_mask[: len(prompt_ids) if assistant_only else 0] = False
    return TokenizedRow(np.array(input_ids, dtype=np.int32), loss_mask)
