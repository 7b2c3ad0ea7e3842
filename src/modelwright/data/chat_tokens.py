"""Turn conversations into token ids with a loss mask; keep those of many rows for the next start."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice, pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import xxhash
from jinja2 import TemplateError

from modelwright import __version__
from modelwright.data.array_cache import Arrays, load_or_compute
from modelwright.data.chat import Conversation
from modelwright.data.readers import EXAMPLES_SHOWN
from modelwright.data.recognize import Message
from modelwright.errors import DataError, Problem
from modelwright.recipe.stage_specs import ChatConfig, PairConfig

TOKENIZE_BATCH = 512
"""Conversations tokenized in one call."""
MIN_CACHED_ITEMS, TOKEN_CACHE_VERSION = 2000, 1
"""Fewer are tokenized in less than a second; raise the version when tokenization changes."""
TOKENIZER_PATHS = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file")
"""Where the files of a tokenizer are, which changes no token."""
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
    conversations: Sequence[Conversation],
    tokenizer: Any,
    config: ChatConfig,
    stop_tokens: Collection[int] = (),
    cache_key: str = "",
) -> TokenizedDataset:
    """Tokenize all conversations; long ones are truncated or split; more than max_truncated_rows is an error."""
    stop_ids = {*stop_tokens, tokenizer.eos_token_id} - {None}
    dataset, row_count, has_stop = TokenizedDataset(), 0, False
    tokenize = partial(tokenize_batch, tokenizer=tokenizer, assistant_only=config.assistant_only_loss)
    cache_key = cache_key and f"{cache_key}:{config.assistant_only_loss}"
    for rows in tokenize_items(conversations, tokenizer, tokenize, cache_key):
        for row in rows:
            row_count += 1
            has_stop = has_stop or bool(np.isin(row.input_ids[row.loss_mask], list(stop_ids)).any())
            dataset.append(row, config)
    hint = ", or pack with packing_strategy: bfd_split"
    check_tokenized(dataset, row_count, "rows", has_stop, config, hint)
    return dataset


def tokenize_items(
    items: Sequence[Any], tokenizer: Any, tokenize: Callable[[Sequence[Any]], list[list[TokenizedRow]]], cache_key: str
) -> Iterator[list[TokenizedRow]]:
    """The rows of each item, tokenized in batches; those of many items are kept in the cache for the next start.

    200,000 rows take 115 s, from the cache 1.7 s (two cores, 2026-11-19).
    """

    def tokenized() -> Iterator[list[TokenizedRow]]:
        for start in range(0, len(items), TOKENIZE_BATCH):
            yield from tokenize(items[start : start + TOKENIZE_BATCH])

    rows_by_item = tokenized()
    key = tokenizer_key(tokenizer) if cache_key and len(items) >= MIN_CACHED_ITEMS else None
    if key is not None:
        kind, key = f"tokens-v{TOKEN_CACHE_VERSION}", xxhash.xxh3_128_hexdigest(f"{key}:{cache_key}".encode())
        arrays, _ = load_or_compute(kind, key, lambda: (_to_arrays(list(tokenized())), {}))
        rows_by_item = _from_arrays(arrays)
    for item, rows in zip(items, rows_by_item, strict=True):
        yield [TokenizedRow(row.input_ids, row.loss_mask, item.where, item.source) for row in rows]


def _to_arrays(tokenized: Sequence[Sequence[TokenizedRow]]) -> Arrays:
    flat = [row for rows in tokenized for row in rows]
    return {
        "input_ids": np.concatenate([row.input_ids for row in flat]),
        "loss_mask": np.concatenate([row.loss_mask for row in flat]),
        "lengths": np.array([len(row) for row in flat], dtype=np.int64),
        "counts": np.array([len(rows) for rows in tokenized], dtype=np.int64),
    }


def _from_arrays(arrays: Arrays) -> Iterator[list[TokenizedRow]]:
    """The rows of each item."""
    input_ids, loss_mask = arrays["input_ids"], arrays["loss_mask"]
    bounds = pairwise(np.concatenate([[0], np.cumsum(arrays["lengths"])]).tolist())
    for count in arrays["counts"].tolist():
        yield [TokenizedRow(input_ids[start:stop], loss_mask[start:stop]) for start, stop in islice(bounds, count)]


def tokenizer_key(tokenizer: Any) -> str | None:
    """What the tokens of a row depend on besides the row; None for a tokenizer in Python."""
    if not (backend := getattr(tokenizer, "backend_tokenizer", None)):
        return None
    libraries = [__version__, *(version(name) for name in ("tokenizers", "transformers", "jinja2"))]
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name not in TOKENIZER_PATHS}
    state = [backend.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map, settings, libraries]
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True, default=str).encode())


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
    return tokenize_batch([conversation], tokenizer, assistant_only)[0]


def tokenize_batch(
    conversations: Sequence[Conversation], tokenizer: Any, assistant_only: bool = True
) -> list[list[TokenizedRow]]:
    """The rows of each conversation, from one call of the tokenizer, which uses all cores."""

    def render(item: Conversation) -> TokenizedRow | list[RenderedText]:
        if item.messages[0]["role"] == "text":
            return _tokenize_text(str(item.messages[0]["content"]), item.where, tokenizer)
        if not tokenizer.chat_template:
            return _tokenize_without_template(item.messages, item.where, tokenizer, assistant_only, item.tools)
        return _render_with_spans(list(item.messages), tokenizer, assistant_only, item.tools)

    return _tokenize_rendered(conversations, render, tokenizer)


class PromptCompletion(NamedTuple):
    """A completion, which alone is trained, after its prompt."""

    prompt: Sequence[Message]
    completion: Sequence[Message]
    tools: Tools
    where: str

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *self.completion]


def tokenize_completions(completions: Sequence[PromptCompletion], tokenizer: Any) -> list[list[TokenizedRow]]:
    """One row for each completion, its prompt before it."""

    def render(item: PromptCompletion) -> TokenizedRow | list[RenderedText]:
        messages = item.messages
        if not tokenizer.chat_template:
            return _tokenize_without_template(messages, item.where, tokenizer, True, item.tools)
        text = _render(tokenizer, messages, item.tools)
        _check_rendered(tokenizer, text, messages, item.tools)
        return [(text, [(_completion_start(tokenizer, item.prompt, text, item.tools), len(text))])]

    return _tokenize_rendered(completions, render, tokenizer)


def _tokenize_rendered(
    items: Sequence[Any], render: Callable[[Any], TokenizedRow | list[RenderedText]], tokenizer: Any
) -> list[list[TokenizedRow]]:
    rendered = []
    for item in items:
        with _template_errors(item.messages, item.where):
            rendered.append(render(item))
    texts = [text for each in rendered if isinstance(each, list) for text in each]
    tokenized = iter(_tokenize_with_mask(tokenizer, texts) if texts else ())
    return [[each] if isinstance(each, TokenizedRow) else [*islice(tokenized, len(each))] for each in rendered]


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
