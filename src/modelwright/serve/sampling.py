"""Requests of the decoder, and how their next tokens are sampled on the device of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

WEIGHT_BITS = 40
"""Probabilities are summed as integers of so many bits: exact in any order, where the sum of floats is not."""
MAX_TOP_K = (1 << 31) - 1
UNIFORMS = 256
"""Random numbers of a row that are copied to the device at once."""


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
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0: from all."""


@dataclass(eq=False)
class DecodeRequest:
    """A prompt, how to sample its answer, and the answer as far as it is decoded."""

    prompt: list[int]
    """Token ids of the prompt; at least one."""
    params: SamplingParams
    """How to sample."""
    eos_token_ids: frozenset[int]
    """Tokens that end the answer and are not part of it."""
    sample_index: int = 0
    """Which of several samples of the same prompt this is."""
    should_stop: Callable[[int], bool] | None = None
    """Called with each token; True ends the answer after it."""
    on_progress: Callable[[], None] | None = None
    """Called from the decoding thread after each token and at the end."""
    token_ids: list[int] = field(default_factory=list)
    """The answer so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token of the answer, under the model itself: temperature 1, no top-p or top-k."""
    finish_reason: Literal["stop", "length"] | None = None
    """None until the answer is complete."""
    error: Exception | None = None
    """Why there will be no more tokens."""
    cancelled: bool = False
    """Nobody wants the answer any more; its row is freed before the next step."""
    _uniforms: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)

    @property
    def finished(self) -> bool:
        """Whether no token follows."""
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.params.max_new_tokens

    @cached_property
    def _random(self) -> np.random.Generator:
        """Random numbers as a function of seed, prompt and sample index, whatever else is decoded."""
        key = xxhash.xxh3_64_intdigest(repr((self.params.seed, self.prompt)).encode())
        return np.random.Generator(np.random.Philox(key=[key, self.sample_index]))

    def uniforms(self, first: int, count: int) -> np.ndarray:
        """Random numbers of the tokens from the first on, one for each; zeros for a greedy answer."""
        if self.params.temperature <= 0:
            return np.zeros(count)
        if (missing := first + count - len(self._uniforms)) > 0:
            self._uniforms = np.append(self._uniforms, self._random.random(missing))
        return self._uniforms[first : first + count]

    def add(self, token: int, logprob: float) -> None:
        """Take the next token."""
        if token in self.eos_token_ids:
            self.finish_reason = "stop"
        else:
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if self.should_stop is not None and self.should_stop(token):
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.params.max_new_tokens:
                self.finish_reason = "length"
        self.notify()

    def notify(self) -> None:
        """Say that something changed."""
        if self.on_progress is not None:
            self.on_progress()


class Sampler:
    """Samples the next tokens of some requests, step after step, without waiting for the device.

    Its state is that of the requests when it is made: as many random numbers are taken as there are steps.
    kernel: with our Triton kernel, which does not sort the logits; else with plain torch.
    """

    def __init__(self, requests: Sequence[DecodeRequest], device: torch.device, kernel: bool = False) -> None:
        self._requests, self._device, self._kernel = list(requests), device, kernel
        self._first, self._drawn = [len(request.token_ids) for request in requests], 0
        params = [request.params for request in requests]
        self._has_sampled = any(each.temperature > 0 for each in params)
        self._has_top = any(each.top_p < 1 or each.top_k for each in params if each.temperature > 0)
        self._temperature = torch.tensor([float(each.temperature) for each in params], device=device)
        self._top_k = torch.tensor([each.top_k or MAX_TOP_K for each in params], dtype=torch.int32, device=device)
        self._top_p = torch.tensor([float(each.top_p) for each in params], device=device)
        self._uniforms = torch.zeros(len(params), UNIFORMS, dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each request, greedy or sampled, and its log-prob. logits: [requests, vocab_size]."""
        if self._kernel:
            from modelwright.models.decode_kernels import sample_rows

            return sample_rows(logits, self._temperature, self._top_k, self._top_p, self._next_uniform())
        tokens = logits.argmax(-1)
        logits = logits.float()
        if self._has_sampled:
            tokens = torch.where(self._temperature > 0, self._draw(logits), tokens)
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        return tokens, logprobs

    def _draw(self, logits: Tensor) -> Tensor:
        """Sampled tokens: [requests]. One random number a row chooses by the cumulative probability in the order of the
        vocabulary, so that rounding in the last bits changes a token about once in a million."""
        temperature = self._temperature.where(self._temperature > 0, 1.0)
        probabilities = (logits / temperature[:, None]).softmax(-1)
        if self._has_top:
            ordered, indices = probabilities.sort(descending=True, stable=True)
            ordered = ordered.where(torch.arange(logits.shape[1], device=self._device) < self._top_k[:, None], 0.0)
            weights = _integers(ordered / ordered.sum(-1, keepdim=True))
            limit = self._top_p.double().where(self._top_p < 1, math.inf) * 2.0**WEIGHT_BITS
            # the most likely one always stays
            ordered = ordered.where(weights.cumsum(-1) - weights < limit[:, None], 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(1, indices, ordered)
        cumulative = _integers(probabilities).cumsum(-1)
        thresholds = (self._next_uniform()[:, None] * cumulative[:, -1:]).long()
        return torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp(max=logits.shape[1] - 1)

    def _next_uniform(self) -> Tensor:
        """A random number for each row: [requests] float64."""
        index = self._drawn % UNIFORMS
        if index == 0 and self._has_sampled:
            rows = zip(self._requests, self._first, strict=True)
            numbers = np.stack([request.uniforms(first + self._drawn, UNIFORMS) for request, first in rows])
            self._uniforms = torch.from_numpy(numbers).to(self._device)
        self._drawn += 1
        return self._uniforms[:, index].contiguous()


def _integers(probabilities: Tensor) -> Tensor:
    return (probabilities * 2.0**WEIGHT_BITS).long()


@torch.no_grad()
def kernel_samples_exactly(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernel samples the tokens that plain torch does; rounding may change one of them."""
    choices = [(t, p, k) for t in (0.0, 0.7, 1.5) for p in (1.0, 0.9, 0.3) for k in (0, 1, 40)]
    params = [SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in choices]
    requests = [DecodeRequest([0], each, frozenset(), index) for index, each in enumerate(params)]
    logits = torch.randn(len(params), 20_000, generator=torch.Generator().manual_seed(0)).mul(3).to(device, dtype)
    try:
        tokens, logprobs = Sampler(requests, device, kernel=True)(logits)
    except Exception:  # Triton raises anything
        return False
    expected, expected_logprobs = Sampler(requests, device)(logits)
    equal = tokens == expected
    gaps = (logprobs - expected_logprobs)[equal].abs()
    return bool(equal.sum() >= len(params) - 1 and gaps.max() < 1e-3)
