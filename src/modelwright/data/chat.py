"""Decide which tokens train: the assistant's words and its end of turn, found by rendering differences.

No generation tags are needed in the chat template, pad never hides eos (masks go by position, not by id),
and a set in which nothing, or no end of turn, is trained is an error before the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from jinja2 import TemplateError

from modelwright.data.conversations import Conversation, Message
from modelwright.errors import DataError, Problem
from modelwright.recipe.training import Text

AT_ONCE = 512
"""Conversations that are tokenized together."""
LEAST_SHARED, TRIALS = 64, 2
"""A shared text of fewer characters is not worth the trial of cutting it off, and so many texts are tried."""
Tokens = np.ndarray[Any, np.dtype[np.int32]]
NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)
Rendered = tuple[str, list[tuple[int, int]]]
"""A conversation as text, and from where to where in it something is trained."""


@dataclass(frozen=True)
class Encoded:
    """One row of tokens and which of them train."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    """Token ids: [length] int32."""
    trained: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether the model learns to say this token: [length] bool."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class EncodedSet:
    """All rows of one side, with what was cut and why."""

    rows: list[Encoded] = field(default_factory=list)
    truncated_rows: int = 0
    divided_rows: int = 0
    lost_tokens: int = 0
    dropped_rows: int = 0

    def add(self, row: Encoded, wish: Text) -> None:
        """Take a row as it fits: whole, cut, or divided; what has nothing to learn is left out."""
        length, split = wish.max_length, wish.packing and wish.packing_strategy == "bfd_split"
        pieces = [row]
        if len(row) > length and split:
            self.divided_rows += 1
            # each piece begins with the last token of the one before, so that every trained token is foretold once
            starts = range(0, len(row) - 1, length - 1)
            pieces = [Encoded(row.tokens[at : at + length], row.trained[at : at + length]) for at in starts]
        elif len(row) > length:
            self.truncated_rows += 1
            self.lost_tokens += len(row) - length
            pieces = [Encoded(row.tokens[:length], row.trained[:length])]
        learnt = [piece for piece in pieces if piece.trained[1:].any()]  # nothing foretells a first token
        self.rows += learnt
        self.dropped_rows += not learnt

    def facts(self) -> dict[str, int]:
        """The numbers of the data manifest."""
        return {
            "rows": len(self.rows),
            "tokens": sum(len(row) for row in self.rows),
            "trained_tokens": int(sum(row.trained.sum() for row in self.rows)),
            "truncated_rows": self.truncated_rows,
            "divided_rows": self.divided_rows,
            "lost_tokens": self.lost_tokens,
            "dropped_rows": self.dropped_rows,
        }


def encode_all(
    conversations: Iterable[Conversation], tokenizer: Any, wish: Text, stop_tokens: Collection[int] = ()
) -> EncodedSet:
    """Encode every conversation; what does not fit is cut or divided, and counted; too many cut rows are an error."""
    stops = {*stop_tokens, tokenizer.eos_token_id} - {None}
    encoded = EncodedSet()
    seen, stopping = 0, 0
    waiting = iter(conversations)
    while group := list(islice(waiting, AT_ONCE)):
        for row in encode_many(group, tokenizer, wish.assistant_only_loss):
            seen += 1
            stopping += bool(np.isin(row.tokens[row.trained], list(stops)).any())
            encoded.add(row, wish)
    if encoded.truncated_rows > (limit := wish.max_truncated.of(seen)):
        letter = (
            f"{encoded.truncated_rows} of {seen} rows are longer than max_length {wish.max_length} and would be cut, "
            f"more than max_truncated allows ({limit}); raise one of them, or pack with packing_strategy: bfd_split"
        )
        raise DataError([Problem("data", letter)])
    if seen and not encoded.rows:
        letter = f"no row has a trained token within max_length {wish.max_length}; raise max_length"
        raise DataError([Problem("data", letter)])
    if seen and not stopping:
        letter = "the chat template ends no answer with an end-of-text token, so the model would never learn to stop"
        raise DataError([Problem("data", letter)])
    return encoded


def encode(conversation: Conversation, tokenizer: Any, assistant_only: bool = True) -> list[Encoded]:
    """Encode one conversation; a template that rewrites earlier turns gives one row for each answer."""
    return encode_many([conversation], tokenizer, assistant_only)


def encode_many(conversations: Sequence[Conversation], tokenizer: Any, assistant_only: bool = True) -> list[Encoded]:
    """Encode conversations with one call of the tokenizer, which then uses all cores."""
    rendered: list[Rendered] = []
    plain: list[Encoded] = []
    for conversation in conversations:
        with _template_told(conversation.messages, conversation.where):
            if tokenizer.chat_template:
                rendered += _render_turns(list(conversation.messages), tokenizer, assistant_only)
            else:
                plain.append(_encode_plain(conversation.messages, conversation.where, tokenizer, assistant_only))
    return plain or _encode_spans(tokenizer, rendered)


def encode_answer(before: Sequence[Message], answer: Sequence[Message], tokenizer: Any, where: str) -> Encoded:
    """Encode a prompt and what answers it; nothing of the prompt is trained, not even earlier answers in it."""
    with _template_told([*before, *answer], where):
        if not tokenizer.chat_template:
            return _encode_plain([*before, *answer], where, tokenizer, assistant_only=True)
        text = _render(tokenizer, [*before, *answer])
        return _encode_spans(tokenizer, [(text, [(_answer_start(tokenizer, before, text), len(text))])])[0]


@contextmanager
def _template_told(messages: Sequence[Message], where: str) -> Iterator[None]:
    try:
        yield
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        letter = f"the model's chat template does not take the turns {roles} ({error})"
        raise DataError([Problem(where, letter)]) from None


def _render_turns(messages: list[Message], tokenizer: Any, assistant_only: bool) -> list[Rendered]:
    whole = _render(tokenizer, messages)
    # a greeting that opens the conversation was not asked for: it is read, not learnt
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn > 0]
    spans: list[tuple[int, int]] = []
    for turn in answers:
        after = whole if turn + 1 == len(messages) else _render(tokenizer, messages[: turn + 1])
        if not whole.startswith(after):
            return [_render_last(tokenizer, messages[: turn + 1], assistant_only) for turn in answers]
        spans.append((_answer_start(tokenizer, messages[:turn], after), len(after)))
    return [(whole, spans if assistant_only else [(0, len(whole))])]


def _render_last(tokenizer: Any, messages: Sequence[Message], assistant_only: bool) -> Rendered:
    text = _render(tokenizer, messages)
    start = _answer_start(tokenizer, messages[:-1], text) if assistant_only else 0
    return text, [(start, len(text))]


def _answer_start(tokenizer: Any, before: Sequence[Message], text: str) -> int:
    """Where the answer begins: the end of what is shared with the prompt that asks for it."""
    return _alike(_render(tokenizer, before, ask=True), text)


def _alike(one: str, other: str) -> int:
    """Characters that both begin with."""
    if other.startswith(one):
        return len(one)
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _render(tokenizer: Any, messages: Sequence[Message], ask: bool = False) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:  # what a template does wrong
        raise TemplateError(str(error)) from None


def _encode_spans(tokenizer: Any, rendered: Sequence[Rendered]) -> list[Encoded]:
    # the template writes its own special tokens: adding more would double the first (alignment-handbook#127)
    texts = [text for text, _ in rendered]
    shared = _shared_text(tokenizer, texts)
    [(first, first_starts)] = _tokenized(tokenizer, [texts[0][:shared]]) if shared else [(NO_TOKENS, NO_TOKENS)]
    rows = []
    found = _tokenized(tokenizer, [text[shared:] for text in texts])
    for (_, spans), (tokens, starts) in zip(rendered, found, strict=True):
        starts = np.concatenate([first_starts, starts + shared])
        trained = np.zeros(len(starts), dtype=np.bool_)
        for begin, end in spans:
            trained |= (starts >= begin) & (starts < end)
        rows.append(Encoded(np.concatenate([first, tokens]), trained))
    return rows


def _tokenized(tokenizer: Any, texts: list[str]) -> Iterator[tuple[Tokens, Tokens]]:
    """The tokens of each text, and where in it each begins."""
    encoding = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    for tokens, offsets in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        starts = np.fromiter((start for start, _ in offsets), dtype=np.int32, count=len(offsets))
        yield np.array(tokens, dtype=np.int32), starts


def _shared_text(tokenizer: Any, texts: Sequence[str]) -> int:
    """Characters that all texts begin with and that may be tokenized once for all of them; 0 where it does not pay.

    Just before a special token a text may be cut: what stands to either side of one is tokenized by itself. Whether
    the tokenizer at hand keeps to that is tried on two texts; what could differ, how it begins one, is alike in all.
    """
    shared = min(texts, default="")
    shared = shared[: _alike(shared, max(texts, default=""))]
    plain = (
        token.content
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if token.special and not (token.lstrip or token.single_word or token.normalized)
    )
    cut = max((shared.rfind(content) for content in plain), default=0)
    if len(texts) <= TRIALS or cut < LEAST_SHARED:
        return 0
    parts = [texts[0][:cut], *(text[cut:] for text in texts[:TRIALS])]
    (first, _), *others = _tokenized(tokenizer, parts)
    wholes = _tokenized(tokenizer, list(texts[:TRIALS]))
    alike = all(np.array_equal(whole, [*first, *other]) for (whole, _), (other, _) in zip(wholes, others, strict=True))
    return cut if alike else 0


def _encode_plain(messages: Sequence[Message], where: str, tokenizer: Any, assistant_only: bool) -> Encoded:
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"]:
        letter = f"the tokenizer has no chat template, which the turns {', '.join(roles)} need; use an instruct model"
        raise DataError([Problem(where, letter)])
    if tokenizer.eos_token_id is None:
        letter = "the tokenizer has neither a chat template nor an end-of-text token; use an instruct model"
        raise DataError([Problem(where, letter)])
    prompt, answer = (message["content"] for message in messages)
    before = tokenizer(prompt)["input_ids"]
    tokens = [*before, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    trained = np.ones(len(tokens), dtype=np.bool_)
    trained[: len(before) if assistant_only else 0] = False
    return Encoded(np.array(tokens, dtype=np.int32), trained)
