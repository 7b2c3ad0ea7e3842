"""Answer questions with a model, the same way before and after training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor

from modelwright.errors import UsageError
from modelwright.models.text import load_model, load_tokenizer, stop_tokens

Message = dict[str, str]
NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0}
"""What a model's own generation settings may not change, so that two models are asked alike."""


@dataclass(frozen=True)
class Decoding:
    """How an answer is drawn from a model."""

    max_new_tokens: int = 128
    """Longest answer."""
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this share."""
    seed: int = 0
    """Decides the draws."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""


class Reply:
    """One answer as it comes: iterate for its pieces; afterwards it knows how it ended and what it took."""

    def __init__(self, drawn: Iterator[int], most: int, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._drawn, self._most, self._tokenizer, self._stops = drawn, most, tokenizer, stops
        self.prompt_tokens, self.tokens = 0, 0
        self.finish: Literal["stop", "length"] = "length"

    def __iter__(self) -> Iterator[str]:
        """Pieces that together are the answer, without the white space around it."""
        found: list[int] = []
        said, text = 0, ""
        hold = max((len(stop) for stop in self._stops), default=1) - 1
        for token in self._drawn:
            self.tokens += 1
            found.append(token)
            text = self._tokenizer.decode(found, skip_special_tokens=True).lstrip()
            if cut := [place for stop in self._stops if stop and (place := text.find(stop)) >= 0]:
                text, self.finish = text[: min(cut)], "stop"
                break
            sure = text[: len(text) - hold].rstrip("\ufffd").rstrip()  # half a letter, or the beginning of a stop
            if len(sure) > said:
                yield sure[said:]
                said = len(sure)
        else:
            self.finish = "stop" if self.tokens < self._most else "length"
        if rest := text.rstrip()[said:]:
            yield rest


class Answerer:
    """A loaded model that answers; the same prompt and decoding for every model."""

    def __init__(self, folder: Path, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.padding_side = "left"
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_model(folder).eval().to(self._device)
        self._stops = sorted({*stop_tokens(self._model), self._tokenizer.eos_token_id})
        self.decoding = Decoding(max_new_tokens, temperature, seed=seed)

    @property
    def room(self) -> int | None:
        """Tokens that question and answer may have together, where the model says so."""
        return getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    @torch.inference_mode()
    def answer(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """The answers to several conversations, computed together."""
        inputs, wish = self._encode(conversations).to(self._device), self.decoding
        torch.manual_seed(wish.seed)
        sampling: dict[str, Any] = {"do_sample": wish.temperature > 0, "repetition_penalty": 1.0}
        if wish.temperature > 0:
            sampling |= {"temperature": wish.temperature, **NEUTRAL}
        produced = self._model.generate(
            **inputs,
            max_new_tokens=wish.max_new_tokens,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=self._stops,
            use_cache=True,
            **sampling,
        )
        answers = produced[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self._tokenizer.batch_decode(answers, skip_special_tokens=True)]

    def reply(self, messages: Sequence[Message], decoding: Decoding | None = None) -> Reply:
        """Begin to answer one conversation; the model works as the reply is read."""
        wish = decoding or self.decoding
        tokens = self._encode([messages], padding=False)["input_ids"].to(self._device)
        length = tokens.shape[1]
        if self.room is not None and length >= self.room:
            found = f"the conversation takes {length} tokens and the model has room for {self.room}"
            raise UsageError(f"{found}; shorten it")
        most = min(wish.max_new_tokens, self.room - length) if self.room else wish.max_new_tokens
        reply = Reply(self._draw(tokens, wish, most), most, self._tokenizer, wish.stop)
        reply.prompt_tokens = length
        return reply

    def _draw(self, tokens: Tensor, wish: Decoding, most: int) -> Iterator[int]:
        """Token by token until one ends the answer, which is not given out."""
        cache, draw = None, torch.Generator(device=self._device).manual_seed(wish.seed)
        for _ in range(most):
            with torch.inference_mode():
                seen = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
                cache = seen.past_key_values
                token = int(_choose(seen.logits[0, -1].float(), wish, draw))
            if token in self._stops:
                return
            yield token
            tokens = torch.tensor([[token]], device=self._device)

    def _encode(self, conversations: Sequence[Sequence[Message]], padding: bool = True) -> Any:
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
        if not encoded["input_ids"].shape[1]:
            why = "the model's chat template makes no word of these turns" if chat else "nothing was asked"
            raise UsageError(f"{why}, so there is nothing to answer")
        return encoded


def _choose(logits: Tensor, wish: Decoding, draw: torch.Generator) -> Tensor:
    """The next token: the likeliest, or one drawn. logits: [words]."""
    if wish.temperature <= 0:
        return logits.argmax()
    shares = (logits / wish.temperature).softmax(-1)
    if wish.top_p < 1:
        ordered, places = shares.sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= wish.top_p] = 0.0  # the first is always kept
        shares = torch.zeros_like(shares).scatter(0, places, ordered)
    return torch.multinomial(shares, 1, generator=draw)
