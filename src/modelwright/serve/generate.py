"""Generate text with a model, in batches or as a stream, the same way before and after training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor

from modelwright.data.chat import appends_eos
from modelwright.errors import UsageError
from modelwright.models.attention import FORWARD_TOLERANCE, relative_gap
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.recipe.schema import ModelConfig

Message = dict[str, str]
NEUTRAL_SAMPLING: dict[str, Any] = {"repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0}
"""Overrides a model's own generation settings, so that two models are sampled in the same way."""
MAX_TOKEN_CHARS = 32
"""Characters per token of a conversation beyond which it is too long without being tokenized, which takes seconds."""


CACHES = ("past_key_values", "cache_params", "state")
"""Names of the cache of an attention, a state-space model, and RWKV."""


class ContextLengthExceeded(UsageError):
    """The prompt leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is sampled."""

    max_new_tokens: int = 128
    """Maximum tokens of an answer."""
    temperature: float = 0.0
    """0 always takes the most likely token (greedy)."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    seed: int = 0
    """Seed of the sampling."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""


class CompletionStream:
    """One streamed answer: iterate over its pieces; afterwards finish_reason and token counts are set."""

    def __init__(
        self, token_ids: Iterator[int], max_new_tokens: int, tokenizer: Any, stop_texts: tuple[str, ...]
    ) -> None:
        self._token_ids, self._max_new_tokens = token_ids, max_new_tokens
        self._tokenizer, self._stop_texts = tokenizer, stop_texts
        self.prompt_tokens, self.completion_tokens = 0, 0
        self.finish_reason: Literal["stop", "length"] = "length"

    def __iter__(self) -> Iterator[str]:
        """Pieces of the answer, without the white space around it."""
        token_ids: list[int] = []
        emitted, text = 0, ""
        held_back = max((len(stop) for stop in self._stop_texts), default=1) - 1
        for token in self._token_ids:
            self.completion_tokens += 1
            token_ids.append(token)
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True).lstrip()
            if cut := [index for stop in self._stop_texts if stop and (index := text.find(stop)) >= 0]:
                text, self.finish_reason = text[: min(cut)], "stop"
                break
            stable = (
                text[: len(text) - held_back].rstrip("\ufffd").rstrip()
            )  # an incomplete character, or the start of a stop text
            if len(stable) > emitted:
                yield stable[emitted:]
                emitted = len(stable)
        else:
            self.finish_reason = "stop" if self.completion_tokens < self._max_new_tokens else "length"
        if rest := text.rstrip()[emitted:]:
            yield rest


class TextGenerator:
    """A loaded model that generates answers, with the same prompt format and sampling for every model."""

    def __init__(
        self, folder: Path, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0,
        config: ModelConfig | None = None,
    ) -> None:  # fmt: skip
        """`config`: the model section of a recipe, whose chat template a model before training gets too."""
        self._tokenizer = load_tokenizer(folder, config)
        self._tokenizer.padding_side = "left"
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_model(folder).eval().to(self._device)
        self._eos_token_ids = sorted({*eos_token_ids(self._model), self._tokenizer.eos_token_id})
        self.sampling_params = SamplingParams(max_new_tokens, temperature, seed=seed)
        self._use_cache = cache_is_exact(self._model)

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and answer together, where the model's config has it."""
        return getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    @torch.inference_mode()
    def generate(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """The answers to several conversations, generated as one batch."""
        if self._model.config.model_type == "rwkv":  # its state has no mask for padding
            return ["".join(self.stream(messages)).strip() for messages in conversations]
        inputs, params = self._tokenize(conversations).to(self._device), self.sampling_params
        torch.manual_seed(params.seed)
        sampling: dict[str, Any] = {"do_sample": params.temperature > 0, "repetition_penalty": 1.0}
        if params.temperature > 0:
            sampling |= {"temperature": params.temperature, **NEUTRAL_SAMPLING}
        produced = self._model.generate(
            **inputs,
            max_new_tokens=params.max_new_tokens,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=self._eos_token_ids,
            use_cache=self._use_cache,
            **sampling,
        )
        answers = produced[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self._tokenizer.batch_decode(answers, skip_special_tokens=True)]

    def stream(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> CompletionStream:
        """Start to answer one conversation; tokens are generated as the stream is read."""
        params = sampling_params or self.sampling_params
        characters = sum(len(message["content"]) for message in messages)
        if self.context_length is not None and characters > MAX_TOKEN_CHARS * self.context_length:
            message = f"the conversation has {characters} characters and the model's context length is"
            raise ContextLengthExceeded(f"{message} {self.context_length} tokens; shorten it")
        tokens = self._tokenize([messages], padding=False)["input_ids"].to(self._device)
        length = tokens.shape[1]
        if self.context_length is not None and length >= self.context_length:
            message = f"the conversation takes {length} tokens and the model's context length is {self.context_length}"
            raise ContextLengthExceeded(f"{message}; shorten it")
        max_new_tokens = (
            min(params.max_new_tokens, self.context_length - length) if self.context_length else params.max_new_tokens
        )
        stream = CompletionStream(
            self._generate_tokens(tokens, params, max_new_tokens), max_new_tokens, self._tokenizer, params.stop
        )
        stream.prompt_tokens = length
        return stream

    def _generate_tokens(self, tokens: Tensor, sampling: SamplingParams, max_new_tokens: int) -> Iterator[int]:
        """Token ids up to the EOS token, which is not included."""
        cache: dict[str, Any] = {}
        rng = torch.Generator(device=self._device).manual_seed(sampling.seed)
        for _ in range(max_new_tokens):
            with torch.inference_mode():
                output = self._model(input_ids=tokens, use_cache=self._use_cache, **cache)
                cache = output_cache(output) if self._use_cache else {}
                token = int(_sample(output.logits[0, -1].float(), sampling, rng))
            if token in self._eos_token_ids:
                return
            yield token
            last = torch.tensor([[token]], device=self._device)
            tokens = last if cache else torch.cat([tokens, last], 1)

    def _tokenize(self, conversations: Sequence[Sequence[Message]], padding: bool = True) -> Any:
        if self._tokenizer.chat_template:
            try:
                texts = [
                    self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
                    for messages in conversations
                ]
            except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                raise UsageError(f"the model's chat template does not take these turns ({error})") from None
        else:
            texts = ["".join(message["content"] for message in messages) for messages in conversations]
        chat = bool(self._tokenizer.chat_template)
        encoded = self._tokenizer(texts, return_tensors="pt", padding=padding, add_special_tokens=not chat)
        if not chat and appends_eos(self._tokenizer):  # padding is on the left, so that it is last in every row
            encoded = type(encoded)({name: values[:, :-1] for name, values in encoded.items()})
        if not encoded["input_ids"].shape[1]:
            why = "the model's chat template renders an empty prompt" if chat else "nothing was asked"
            raise UsageError(f"{why}, so there is nothing to answer")
        return encoded


def output_cache(output: Any) -> dict[str, Any]:
    """The cache of a forward pass, as arguments of the next one; empty if the model has none."""
    return {name: output[name] for name in CACHES if output.get(name) is not None}


@torch.inference_mode()
def cache_is_exact(model: Any) -> bool:
    """Whether three tokens after a cached prompt get the logits that the whole text gives without a cache.

    Not so for Bamba and MiniMax in transformers 5.22, the latter if the prompt is longer than its block.
    """
    tokens = torch.arange(3, 12 + min(int(getattr(model.config, "block_size", None) or 0), 512), device=model.device)
    tokens = tokens.remainder(min(1000, model.config.get_text_config().vocab_size))[None]
    expected = model(input_ids=tokens, use_cache=False).logits[0, -3:]
    output, logits = model(input_ids=tokens[:, :-3], use_cache=True), []
    for index in range(tokens.shape[1] - 3, tokens.shape[1]):
        if not (cache := output_cache(output)):
            return False
        output = model(input_ids=tokens[:, index : index + 1], use_cache=True, **cache)
        logits.append(output.logits[0, -1])
    return relative_gap(expected, torch.stack(logits)) < FORWARD_TOLERANCE


def _sample(logits: Tensor, params: SamplingParams, rng: torch.Generator) -> Tensor:
    """The next token, greedy or sampled. logits: [vocab_size]."""
    if params.temperature <= 0:
        return logits.argmax()
    probabilities = (logits / params.temperature).softmax(-1)
    if params.top_p < 1:
        ordered, indices = probabilities.sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= params.top_p] = 0.0  # the most likely one always stays
        probabilities = torch.zeros_like(probabilities).scatter(0, indices, ordered)
    return torch.multinomial(probabilities, 1, generator=rng)
