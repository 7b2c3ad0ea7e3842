"""Answer questions with a model, the same way before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from modelwright.models.text import load_model, load_tokenizer, stop_tokens

Message = dict[str, str]


class Answerer:
    """A loaded model that answers; the same prompt and decoding for every model."""

    def __init__(self, folder: Path, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_model(folder).eval().to(self._device)
        self._limit, self._temperature, self._seed = max_new_tokens, temperature, seed

    @torch.inference_mode()
    def answer(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """The answers to several conversations, computed together."""
        inputs = self._encode(conversations).to(self._device)
        torch.manual_seed(self._seed)
        sampling: dict[str, Any] = {"do_sample": self._temperature > 0}
        if self._temperature > 0:
            sampling["temperature"] = self._temperature
        produced = self._model.generate(
            **inputs,
            max_new_tokens=self._limit,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=sorted({*stop_tokens(self._model), self._tokenizer.eos_token_id}),
            use_cache=True,
            **sampling,
        )
        answers = produced[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self._tokenizer.batch_decode(answers, skip_special_tokens=True)]

    def _encode(self, conversations: Sequence[Sequence[Message]]) -> Any:
        if self._tokenizer.chat_template:
            texts = [
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
                for messages in conversations
            ]
        else:
            texts = ["".join(message["content"] for message in messages) for messages in conversations]
        chat = bool(self._tokenizer.chat_template)
        return self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chat)
