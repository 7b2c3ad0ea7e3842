"""Generate text with a model, in batches or as a stream, the same way before and after training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError

from modelwright.data.chat_tokens import appends_eos
from modelwright.errors import Interrupted, UsageError
from modelwright.models.pretrained import eos_token_ids, inference_dtype, load_model, load_tokenizer
from modelwright.recipe.schema import ModelConfig
from modelwright.serve.decoder import Decoder
from modelwright.serve.sampling import DecodeRequest, SamplingParams

Message = dict[str, str]
MAX_TOKEN_CHARS = 32
"""Characters per token of a conversation beyond which it is too long without being tokenized, which takes seconds."""


class ContextLengthExceeded(UsageError):
    """The prompt leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    """The answer without the white space around it, up to a stop text."""
    token_ids: list[int]
    """Its tokens, without the one that ends it."""
    logprobs: list[float]
    """Log-prob of each under the model itself, at temperature 1."""
    finish_reason: Literal["stop", "length"]
    """Whether the model or a stop text ended it, or it came to its maximum length."""


class Detokenizer:
    """The text of an answer as its tokens come; only the last few are decoded again for each."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._token_ids: list[int] = []
        self._context, self._decoded = (
            0,
            0,
        )  # the text holds the tokens before `decoded`; context: where decoding starts
        self._text = ""

    def add(self, token: int) -> bool:
        """Take a token; returns whether the answer ends here, at a stop text."""
        self._token_ids.append(token)
        old = self.decode(self._token_ids[self._context : self._decoded])
        new = self.decode(self._token_ids[self._context :])
        if len(new) > len(old) and not new.endswith("\ufffd"):  # an incomplete character waits for the next token
            self._text = (self._text + new[len(old) :]).lstrip()
            self._context, self._decoded = self._decoded, len(self._token_ids)
        return self._stop_index(self._text) < len(self._text)

    def stable_text(self) -> str:
        """The text so far without white space at its end and what may be the start of a stop text."""
        held_back = max(map(len, self._stop), default=1) - 1
        return self._text[: len(self._text) - held_back].rstrip()

    def final_text(self, token_ids: list[int]) -> str:
        """The text of an answer up to a stop text, without the white space around it."""
        text = self.decode(token_ids).lstrip()
        return text[: self._stop_index(text)].rstrip()

    def _stop_index(self, text: str) -> int:
        return min((index for stop in self._stop if (index := text.find(stop)) >= 0), default=len(text))

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class CompletionStream:
    """One streamed answer: iterate over its pieces; afterwards finish_reason and token counts are set."""

    def __init__(self, decoder: Decoder, request: DecodeRequest, detokenizer: Detokenizer) -> None:
        self.decoder, self.request, self._detokenizer = decoder, request, detokenizer
        self._emitted = 0
        request.should_stop = detokenizer.add

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far, without the one that ends it."""
        return len(self.request.token_ids)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Whether the model or a stop text ended the answer, or its length."""
        return self.request.finish_reason or "length"

    def __iter__(self) -> Iterator[str]:
        """Pieces of the answer, without the white space around it; its row is freed when nobody reads on."""
        self.decoder.submit(self.request)
        try:
            finished = False
            while not finished:
                self.decoder.step()
                finished = self.request.finished  # before reading: another thread may decode, too
                if piece := self.read():
                    yield piece
        finally:
            self.request.cancelled = True

    def start(self, on_progress: Callable[[], None]) -> None:
        """Let the decoder's thread generate the answer; `on_progress` is called there when there is more to read."""
        self.request.on_progress = on_progress
        self.decoder.submit(self.request, in_thread=True)

    def token_texts(self, first: int, end: int) -> list[str]:
        """The texts of single tokens of the answer."""
        return [self._detokenizer.decode([token]) for token in self.request.token_ids[first:end]]

    def read(self) -> str:
        """What is new since the last call; raises the error that ended the answer."""
        if self.request.error is not None:
            raise self.request.error
        detokenizer, request = self._detokenizer, self.request
        text = detokenizer.final_text(request.token_ids) if request.finish_reason else detokenizer.stable_text()
        piece, self._emitted = text[self._emitted :], max(self._emitted, len(text))
        return piece


class TextGenerator:
    """A loaded model that generates answers, with the same prompt format and sampling for every model."""

    def __init__(
        self, folder: Path, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0,
        config: ModelConfig | None = None, precision: str = "auto", model: Any = None,
    ) -> None:  # fmt: skip
        """`config`: the model section of a recipe, whose chat template a model before training gets too.

        `precision`: that of the training; on a GPU the model is loaded in bf16 unless it is fp32, on a CPU in fp32.
        `model`: the model of the folder, where it is loaded already.
        """
        self._tokenizer = load_tokenizer(folder, config)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if model is None:
            model = load_model(folder, device=self._device, dtype=inference_dtype(self._device, precision))
        self._model = model.eval().to(self._device)
        self._eos_token_ids = sorted({*eos_token_ids(self._model), self._tokenizer.eos_token_id})
        self.sampling_params = SamplingParams(max_new_tokens, temperature, seed=seed)
        self.decoder = Decoder(self._model)

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and answer together, where the model's config has it."""
        return getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def generate(
        self, conversations: Sequence[Sequence[Message]], stop_requested: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """The answers to several conversations; raises Interrupted once `stop_requested` says so."""
        completions = self.completions(conversations, stop_requested=stop_requested)
        return [completion.text for [completion] in completions]

    def completions(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """Answers to several conversations, decoded in batches: `num_samples` for each.

        An answer depends on the seed, the conversation and its index among the samples. In fp32 the batch changes the
        logits in their last bits only, which changes a token where two are equally likely to 1e-6; in bf16 it may
        change one where they are close. A prompt that leaves no room for an answer gets an empty one.
        """
        params = sampling_params or self.sampling_params
        prompts = [self._tokenize(messages) for messages in conversations]
        requests = [self._request(prompt, params, index) for prompt in prompts for index in range(num_samples)]
        pending = [request for request in requests if request.params.max_new_tokens]
        for request in pending:
            request.should_stop = Detokenizer(self._tokenizer, params.stop).add if params.stop else None
        self.decoder.compile_for(sum(each.params.max_new_tokens for each in pending) / self.decoder.max_rows)
        self.decoder.submit(*pending)
        try:
            while not all(request.finished for request in pending):
                self.decoder.step()
                if stop_requested():
                    raise Interrupted("stopped before every answer was generated")
        finally:
            for request in pending:
                request.cancelled = True
        if error := next((request.error for request in pending if request.error), None):
            raise error
        final_text = Detokenizer(self._tokenizer, params.stop).final_text
        completions = [
            Completion(final_text(each.token_ids), each.token_ids, each.logprobs, each.finish_reason or "length")
            for each in requests
        ]
        return [completions[start : start + num_samples] for start in range(0, len(completions), num_samples)]

    def _request(self, prompt: list[int], params: SamplingParams, sample_index: int = 0) -> DecodeRequest:
        if self.context_length is not None:
            room = max(self.context_length - len(prompt), 0)
            params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        return DecodeRequest(prompt, params, frozenset(self._eos_token_ids), sample_index)

    def stream(
        self, messages: Sequence[Message] | str, sampling_params: SamplingParams | None = None
    ) -> CompletionStream:
        """Start to answer a conversation, or to continue a text; tokens are generated as the stream is read."""
        params = sampling_params or self.sampling_params
        texts = [messages] if isinstance(messages, str) else [message["content"] for message in messages]
        characters = sum(map(len, texts))
        if self.context_length is not None and characters > MAX_TOKEN_CHARS * self.context_length:
            message = f"the conversation has {characters} characters and the model's context length is"
            raise ContextLengthExceeded(f"{message} {self.context_length} tokens; shorten it")
        request = self._request(self._tokenize(messages), params)
        if request.params.max_new_tokens == 0:
            message = f"the conversation takes {len(request.prompt)} tokens and the model's context length is"
            raise ContextLengthExceeded(f"{message} {self.context_length}; shorten it")
        return CompletionStream(self.decoder, request, Detokenizer(self._tokenizer, params.stop))

    def _tokenize(self, messages: Sequence[Message] | str) -> list[int]:
        """The token ids of a prompt, as in training; a text goes without the chat template."""
        chat = bool(self._tokenizer.chat_template) and not isinstance(messages, str)
        text = messages if isinstance(messages, str) else "".join(message["content"] for message in messages)
        if chat:
            try:
                text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                raise UsageError(f"the model's chat template does not take these turns ({error})") from None
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if not chat and appends_eos(self._tokenizer):
            token_ids = token_ids[:-1]
        if not token_ids:
            why = "the model's chat template renders an empty prompt" if chat else "nothing was asked"
            raise UsageError(f"{why}, so there is nothing to answer")
        return token_ids
