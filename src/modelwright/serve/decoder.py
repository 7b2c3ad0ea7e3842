"""Decode many prompts in one batch: continuous batching over a shared KV cache, sampling, log-probs, stop texts."""

from __future__ import annotations

import inspect
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from modelwright.models import attention as attn
from modelwright.models.prefix_sharing import HALF_TOLERANCE

MAX_ROWS = {"cpu": 32, "cuda": 64}
"""Rows that are decoded at once."""
MAX_CACHE_BYTES = 2 << 30
"""Keys and values on a CPU; on a GPU half of the memory that is free."""
PREFILL_TOKENS = 8192
"""Prompt tokens computed in one forward pass on a GPU; on a CPU every prompt is computed alone, since it costs the same
and the result does not depend on its neighbours."""
COLUMNS = 256
"""A shared cache has a multiple of this many columns; a static step is computed over such a multiple, too, so that few
CUDA graphs serve all lengths."""
CACHES = ("past_key_values", "cache_params", "state")
"""Names of the cache of an attention, a state-space model, and RWKV."""
WEIGHT_BITS = 40
"""Probabilities are summed as integers of so many bits: exact in any order, where the sum of floats is not."""


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

    @property
    def finished(self) -> bool:
        """Whether no token follows."""
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.params.max_new_tokens

    @cached_property
    def random(self) -> np.random.Generator:
        """Random numbers as a function of seed, prompt and sample index, whatever else is decoded."""
        key = xxhash.xxh3_64_intdigest(repr((self.params.seed, self.prompt)).encode())
        return np.random.Generator(np.random.Philox(key=[key, self.sample_index]))

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


class Decoder:
    """Decodes requests in batches: a row that is finished is taken by the next request.

    Whoever calls `step` advances all requests, so that several threads may wait for answers; with `in_thread` a thread
    does it that lives as long as there is work.
    """

    def __init__(self, model: Any, cache: DecoderCache | None = None, max_rows: int | None = None) -> None:
        self.cache = choose_cache(model) if cache is None else cache
        device = next(model.parameters()).device.type
        self._max_rows = max_rows or MAX_ROWS.get(device, MAX_ROWS["cpu"])
        rope = attn.rope_limit(model)
        self._rope_limit: float = rope.max_length if rope else math.inf
        self._prefill_tokens = PREFILL_TOKENS if device == "cuda" and isinstance(self.cache, SharedCache) else 0
        self._rows: list[DecodeRequest] = []
        self._waiting: deque[DecodeRequest] = deque()
        self._step_lock, self._queue_lock = threading.Lock(), threading.Lock()
        self._thread_runs = False

    def submit(self, *requests: DecodeRequest, in_thread: bool = False) -> None:
        """Queue requests, in order of arrival."""
        with self._queue_lock:
            self._waiting.extend(requests)
            if in_thread and not self._thread_runs:
                self._thread_runs = True
                threading.Thread(target=self._run, name="decoder").start()

    def _run(self) -> None:
        while True:
            self.step()
            with self._step_lock, self._queue_lock:
                if not self._rows and not self._waiting:
                    self._thread_runs = False
                    return

    def cancel_all(self) -> None:
        """Drop every request."""
        with self._queue_lock:
            requests = [*self._rows, *self._waiting]
        for request in requests:
            request.cancelled = True
            request.notify()

    def step(self) -> None:
        """Decode one token of every row, with waiting requests in the rows that are free."""
        with self._step_lock, torch.inference_mode():
            try:
                self._remove_finished()
                self._admit()
                if self._rows:
                    logits = self._forward()
                    self._extend(self._rows, logits)
                    self._remove_finished()
            except Exception as error:  # such as too little memory: nobody may wait for ever
                self._fail(error)

    def _forward(self) -> Tensor:
        """Logits after the last token of every row; one that exceeds the RoPE limit is alone, and computed anew."""
        first = self._rows[0]
        if len(first.prompt) + len(first.token_ids) == self._rope_limit + 1:
            self.cache.clear()
            return self.cache.admit([[*first.prompt, *first.token_ids]])
        return self.cache.forward([request.token_ids[-1] for request in self._rows])

    def _admit(self) -> None:
        while group := self._next_group():
            self._rows += group
            logits = self.cache.admit([request.prompt for request in group])
            self._extend(group, logits)
            self._remove_finished()

    def _next_group(self) -> list[DecodeRequest]:
        """Waiting requests whose prompts are computed together: on a CPU, those of one prompt."""
        group: list[DecodeRequest] = []
        longest = max((request.max_length for request in self._rows), default=0)
        with self._queue_lock:
            while self._waiting and len(self._rows) + len(group) < self._max_rows:
                request = self._waiting[0]
                if request.finished:
                    self._waiting.popleft()
                    continue
                longest, rows = max(longest, request.max_length), len(self._rows) + len(group)
                if rows and (longest > self._rope_limit or not self.cache.fits(rows + 1, longest)):
                    break
                width = max(len(each.prompt) for each in (*group, request))
                if group and request.prompt != group[0].prompt and width * (len(group) + 1) > self._prefill_tokens:
                    break
                group.append(self._waiting.popleft())
        return group

    def _extend(self, requests: Sequence[DecodeRequest], logits: Tensor) -> None:
        for request, token, logprob in zip(requests, *sample(logits, requests), strict=True):
            request.add(token, logprob)

    def _remove_finished(self) -> None:
        for row in reversed(range(len(self._rows))):
            if self._rows[row].finished:
                self.cache.remove(row)
                last = self._rows.pop()
                if row < len(self._rows):
                    self._rows[row] = last

    def _fail(self, error: Exception) -> None:
        with self._queue_lock:
            requests = [*self._rows, *self._waiting]
            self._waiting.clear()
        self._rows.clear()
        self.cache.clear()
        for request in requests:
            request.error = error
            request.notify()


def sample(logits: Tensor, requests: Sequence[DecodeRequest]) -> tuple[list[int], list[float]]:
    """The next token of each request, greedy or sampled, and its log-prob. logits: [requests, vocab_size]."""
    logits = logits.float()
    tokens = logits.argmax(-1)
    if sampled := [row for row, request in enumerate(requests) if request.params.temperature > 0]:
        tokens[sampled] = _draw(logits[sampled], [requests[row] for row in sampled])
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs.tolist()


def _draw(logits: Tensor, requests: Sequence[DecodeRequest]) -> Tensor:
    """Sampled tokens: [requests]. One random number a row chooses by the cumulative probability in the order of the
    vocabulary, so that rounding in the last bits changes a token about once in a million."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    params = [request.params for request in requests]
    probabilities = (logits / column([each.temperature for each in params], logits.dtype)).softmax(-1)
    if any(each.top_p < 1 or each.top_k for each in params):
        ordered, indices = probabilities.sort(descending=True, stable=True)
        top_k = column([each.top_k or logits.shape[1] for each in params], torch.int64)
        ordered[torch.arange(logits.shape[1], device=logits.device) >= top_k] = 0.0
        weights = _integers(ordered / ordered.sum(-1, keepdim=True))
        top_p = column([each.top_p * 2**WEIGHT_BITS if each.top_p < 1 else math.inf for each in params], torch.float64)
        ordered[weights.cumsum(-1) - weights >= top_p] = 0.0  # the most likely one always stays
        probabilities = torch.zeros_like(probabilities).scatter(1, indices, ordered)
    cumulative = _integers(probabilities).cumsum(-1)
    uniform = column([request.random.random() for request in requests], torch.float64)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1:]).long(), right=True)
    return drawn[:, 0].clamp(max=logits.shape[1] - 1)


def _integers(probabilities: Tensor) -> Tensor:
    return (probabilities * 2.0**WEIGHT_BITS).long()


class SeparateCaches:
    """One cache for each row, or none, for models that cannot be batched: recurrent ones and those with odd caches."""

    def __init__(self, model: Any, use_cache: bool) -> None:
        self.model, self.use_cache = model, use_cache
        self._rows: list[tuple[list[int], dict[str, Any]]] = []

    def admit(self, prompts: Sequence[list[int]]) -> Tensor:
        """Add a row for each prompt."""
        self._rows += [(list(prompt), {}) for prompt in prompts]
        return torch.cat([self._forward(row) for row in range(len(self._rows) - len(prompts), len(self._rows))])

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every row."""
        for row, token in enumerate(tokens):
            text, caches = self._rows[row]
            self._rows[row] = ([token] if caches else [*text, token]), caches
        return torch.cat([self._forward(row) for row in range(len(tokens))])

    def _forward(self, row: int) -> Tensor:
        text, caches = self._rows[row]
        tokens = torch.tensor([text], device=self.model.device)
        output = self.model(input_ids=tokens, use_cache=self.use_cache, **caches)
        self._rows[row] = text, output_cache(output) if self.use_cache else {}
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its index."""
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def clear(self) -> None:
        """Remove every row."""
        self._rows.clear()

    def fits(self, rows: int, columns: int) -> bool:
        """Their memory is small or does not grow in one block."""
        return True


class SharedCache:
    """Rows of different lengths in one cache: all end at the same column and are padded on the left, as in `generate`,
    so that the model's own masks for padding and windows hold. A prompt is computed by itself; its keys and values are
    copied into the columns before the common end.

    With `static` a step has one of few shapes and depends on no number in Python, so that it can be replayed as a CUDA
    graph (`graphs`).
    """

    def __init__(self, model: Any, static: bool = False, graphs: bool = False) -> None:
        self.model, self.static, self._graphs = model, static, graphs
        parameters = inspect.signature(attn.unwrap_peft(model).forward).parameters
        self._takes_positions, self._keeps_logits = "position_ids" in parameters, "logits_to_keep" in parameters
        self.column = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.clear()

    def clear(self) -> None:
        """Remove every row and free the memory."""
        self._caches: dict[str, Any] = {}
        self._attention: list[Any] = []
        self._recurrent: list[Any] = []
        self._starts: list[int] = []
        self.end = self._max_rows = self.columns = self.width = 0
        self._replays: dict[tuple[int, int], Callable[[dict[str, Tensor]], Tensor]] = {}

    def fits(self, rows: int, columns: int) -> bool:
        """Whether there is memory for so many rows of this length."""
        bytes_per_token = sum(each[0, :, 0].nbytes for layer in self._attention for each in (layer.keys, layer.values))
        limit = MAX_CACHE_BYTES
        if self.model.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.model.device)[0]
            limit = (free + self._max_rows * self.columns * bytes_per_token) // 2
        return bool(rows * columns * bytes_per_token <= limit)

    def admit(self, prompts: Sequence[list[int]]) -> Tensor:
        """Compute the prompts, equal ones once, and add their rows."""
        texts = list(dict.fromkeys(map(tuple, prompts)))
        width = max(map(len, texts))
        inputs = self._inputs([[0] * (width - len(text)) + list(text) for text in texts],
                              [width - len(text) for text in texts], width)  # fmt: skip
        if min(map(len, texts)) == width:  # nothing is padded: the plain forward pass
            inputs = {"input_ids": inputs["input_ids"]}
        last = {"logits_to_keep": 1} if self._keeps_logits else {}
        output = self.model(**inputs, **last, use_cache=True)
        [(name, prefilled)] = output_cache(output).items()
        index = [texts.index(tuple(prompt)) for prompt in prompts]
        self._insert(name, prefilled, index, [len(prompt) for prompt in prompts])
        return output.logits[index, -1]  # type: ignore[no-any-return]

    def _inputs(self, tokens: list[list[int]], starts: list[int], width: int) -> dict[str, Tensor]:
        """Arguments of a forward pass over tokens that end at column `width`, or at our end for a single column."""
        input_ids = torch.tensor(tokens, device=self.model.device)
        first = torch.tensor(starts, device=self.model.device)[:, None]
        columns = torch.arange(width, device=self.model.device)
        positions = columns[None] if input_ids.shape[1] > 1 else torch.full_like(first, self.end)
        inputs = {"input_ids": input_ids, "attention_mask": (columns >= first).long()}
        if self._takes_positions:
            inputs["position_ids"] = (positions - first).clamp(min=0)
        return inputs

    def _insert(self, name: str, prefilled: Any, index: list[int], lengths: list[int]) -> None:
        """Append rows of another cache, those of the index."""
        attention = [layer for layer in prefilled.layers if hasattr(layer, "keys")]
        recurrent = [layer for layer in prefilled.layers if not hasattr(layer, "keys")]
        if not self._caches:
            self._create(name, prefilled)
        rows, width = len(self._starts), max(lengths)
        self.end = self.end if rows else width
        self._grow(rows + len(index), max(self.end, width))
        if width > self.end:
            self._shift(width - self.end)
        for layer, source in zip(self._attention, attention, strict=True):
            columns = slice(self.end - source.keys.shape[2], self.end)  # a window holds the last columns only
            layer.keys[rows : rows + len(index), :, columns] = source.keys[index]
            layer.values[rows : rows + len(index), :, columns] = source.values[index]
        for layer, source in zip(self._recurrent, recurrent, strict=True):
            _update_states(layer, lambda state, new: torch.cat([state[:rows], new[index]]), source)
        self._starts += [self.end - length for length in lengths]

    def _create(self, name: str, prefilled: Any) -> None:
        """Take over the kinds of layers of a cache; raises TypeError for one that we do not know."""
        from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

        layers: list[Any] = []
        for source in prefilled.layers:
            if type(source) in (DynamicLayer, DynamicSlidingWindowLayer) and source.is_initialized:
                self._attention.append(_shared_layer_class()(self, source.keys[:0, :, :0], source.values[:0, :, :0]))
                layers.append(self._attention[-1])
            elif type(source) is LinearAttentionLayer and not self.static:
                self._recurrent.append(source)
                layers.append(source)
            else:
                raise TypeError(f"a cache of {type(source).__name__}")
        self._caches = {name: Cache(layers=layers)}

    def _grow(self, rows: int, columns: int) -> None:
        """Memory for so many rows and columns; one more grows by half, so that the copies do not add up."""
        if rows <= self._max_rows and columns <= self.columns:
            return
        if columns > self.columns:
            self.columns = _round_up(max(columns, self.columns * 3 // 2), COLUMNS)
        self._max_rows = max(_power_of_two(rows), self._max_rows)
        for layer in self._attention:
            for name, old in (("keys", layer.keys), ("values", layer.values)):
                new = old.new_zeros(self._max_rows, old.shape[1], self.columns, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                setattr(layer, name, new)
        self._replays.clear()

    def _shift(self, columns: int) -> None:
        """Move all rows to the right."""
        rows, first = len(self._starts), min(self._starts)
        for layer in self._attention:
            for buffer in (layer.keys, layer.values):
                buffer[:rows, :, first + columns : self.end + columns] = buffer[:rows, :, first : self.end].clone()
        self._starts = [start + columns for start in self._starts]
        self.end += columns

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every row."""
        if self.end == self.columns:
            if (first := min(self._starts)) * 4 > self.columns:
                self._shift(-first)
            else:
                self._grow(len(tokens), self.end + 1)
        rows, width = len(tokens), self.end + 1
        if self.static:
            rows, width = _power_of_two(rows), _round_up(width, COLUMNS)
            self._grow(rows, width)
            self.column.fill_(self.end)
        padding = [0] * (rows - len(tokens))
        inputs = self._inputs(
            [[token] for token in (*tokens, *padding)], [*self._starts, *(self.end for _ in padding)], width
        )
        if not self._attention:
            del inputs["attention_mask"]
        logits = self._replay(inputs, width) if self._graphs else self._step(inputs, width)
        self.end += 1
        return logits[: len(tokens)]

    def _step(self, inputs: dict[str, Tensor], width: int) -> Tensor:
        self.width = width
        with attn.grouped_attention(self.model) if self.static else nullcontext():
            return self.model(**inputs, **self._caches, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    def _replay(self, inputs: dict[str, Tensor], width: int) -> Tensor:
        """A step as a CUDA graph, captured at the first use of its shape."""
        key = inputs["input_ids"].shape[0], width
        if key not in self._replays:
            static_inputs = {name: values.clone() for name, values in inputs.items()}
            self._step(static_inputs, width)  # libraries allocate their work spaces before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._step(static_inputs, width)

            def replay(inputs: dict[str, Tensor]) -> Tensor:
                for name, values in inputs.items():
                    static_inputs[name].copy_(values)
                graph.replay()
                return logits

            self._replays[key] = replay
        return self._replays[key](inputs)

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its index."""
        last = len(self._starts) - 1
        if row < last:
            for layer in self._attention:
                for buffer in (layer.keys, layer.values):
                    buffer[row, :, : self.end] = buffer[last, :, : self.end]
            self._starts[row] = self._starts[last]
        rows = [*range(row), last, *range(row + 1, last)][:last]
        for layer in self._recurrent:
            _update_states(layer, lambda state, _: state[rows], layer)
        self._starts.pop()
        if self._starts and min(self._starts) > self.end // 2:
            self._shift(-min(self._starts))


DecoderCache: TypeAlias = SharedCache | SeparateCaches


@cache
def _shared_layer_class() -> Any:
    """A layer of a SharedCache for transformers, whose import takes a second."""
    from transformers.cache_utils import CacheLayerMixin

    class SharedLayer(CacheLayerMixin):  # type: ignore[misc,no-untyped-call,unused-ignore]
        is_sliding = False

        def __init__(self, owner: SharedCache, keys: Tensor, values: Tensor) -> None:
            super().__init__()
            self.owner, self.keys, self.values, self.is_initialized = owner, keys, values, True
            self.is_compileable = owner.static

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            pass

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """Write the next column; returns the columns to attend to. key_states: [rows, heads, 1, head_dim]."""
            rows = key_states.shape[0]
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                if self.owner.static:
                    buffer[:rows].index_copy_(2, self.owner.column, states)
                else:
                    buffer[:rows, :, self.owner.end : self.owner.end + 1] = states
            return self.keys[:rows, :, : self.owner.width], self.values[:rows, :, : self.owner.width]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.owner.width, 0

        def get_seq_length(self) -> Any:  # static: as a tensor, as in transformers' StaticCache
            return self.owner.column[0] if self.owner.static else self.owner.end

        def get_max_length(self) -> int:
            return -1

    return SharedLayer


def _update_states(layer: Any, update: Callable[[Tensor, Tensor], Tensor], source: Any) -> None:
    """Change the rows of the states of a recurrent layer."""
    for states, others in ((layer.conv_states, source.conv_states), (layer.recurrent_states, source.recurrent_states)):
        for key, state in states.items():
            if state is not None:
                states[key] = update(state, others[key])


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def output_cache(output: Any) -> dict[str, Any]:
    """The cache of a forward pass, as arguments of the next one; empty if the model has none."""
    return {name: output[name] for name in CACHES if output.get(name) is not None}


def choose_cache(model: Any) -> DecoderCache:
    """The fastest cache that gives the logits of the model without one."""
    candidates = [SharedCache(model)]
    if model.device.type == "cuda":
        candidates.insert(0, SharedCache(model, static=True, graphs=True))
    for candidate in candidates:
        if decodes_exactly(model, candidate):
            return candidate
    return SeparateCaches(model, decodes_exactly(model, SeparateCaches(model, use_cache=True)))


@torch.inference_mode()
def decodes_exactly(model: Any, decoder_cache: DecoderCache) -> bool:
    """Whether rows that come and go get the logits that each text gives alone without a cache.

    Not so for MiniMax in transformers 5.22 if the prompt is longer than its block.
    """
    prompt_lengths = [4, 9 + min(int(getattr(model.config, "block_size", None) or 0), 512), 3]
    vocabulary = min(1000, model.config.get_text_config().vocab_size)
    texts = [
        [(index + row) % vocabulary for index in range(3, length + 6)] for row, length in enumerate(prompt_lengths)
    ]
    prompts = [text[:length] for text, length in zip(texts, prompt_lengths, strict=True)]
    expected = [model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0] for text in texts]
    lengths, gaps = list(prompt_lengths), []

    def check(logits: Tensor, rows: list[int]) -> None:
        for row, row_logits in zip(rows, logits, strict=True):
            gaps.append(attn.relative_gap(expected[row][lengths[row] - 1], row_logits))
            lengths[row] += 1

    try:
        check(decoder_cache.admit(prompts[:1]), [0])
        check(decoder_cache.forward([texts[0][lengths[0] - 1]]), [0])
        check(decoder_cache.admit(prompts[1:]), [1, 2])
        for rows in ([0, 1, 2], [2, 1]):
            check(decoder_cache.forward([texts[row][lengths[row] - 1] for row in rows]), rows)
            decoder_cache.remove(0)
    except Exception:  # a family that cannot do this raises anything
        return False
    finally:
        decoder_cache.clear()
    if model.dtype in attn.HALF_DTYPES:  # 36 layers round by 2 %; a wrong cache is off by 30 % and more
        return max(gaps) < HALF_TOLERANCE
    return max(gaps) < attn.tolerance(model)
