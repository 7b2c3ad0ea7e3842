"""Keys and values of the rows that a decoder decodes at once, in one cache, and the decoding step as a CUDA graph."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.errors import ModelError, first_line
from modelwright.models import attention as attn
from modelwright.models.decode_attention import grouped_attention
from modelwright.models.prefix_sharing import HALF_TOLERANCE
from modelwright.models.trainable import decoder_layers

MAX_CACHE_BYTES = 2 << 30
"""Keys and values on a CPU; on a GPU half of the memory that is free."""
COLUMNS = 256
"""A shared cache has a multiple of this many columns; a static step is computed over such a multiple, too, so that few
CUDA graphs serve all lengths."""
SPARE_COLUMNS = 8
"""Makes the columns of a cache differ from those of every static step: torch.compile takes equal sizes for the same."""
CACHES = ("past_key_values", "cache_params", "state")
"""Names of the cache of an attention, a state-space model, and RWKV."""
RECOMPILE_LIMIT = 32
"""Compiled variants of a decoder layer: one row or several, each kind of layer."""


class SeparateCaches:
    """One cache for each row, or none, for models that cannot be batched: recurrent ones and those with odd caches."""

    def __init__(self, model: Any, use_cache: bool) -> None:
        self.model, self.use_cache = model, use_cache
        self._rows: list[tuple[list[int], dict[str, Any]]] = []

    def admit(self, prompts: Sequence[list[int]]) -> Tensor:
        """Add a row for each prompt."""
        self._rows += [(list(prompt), {}) for prompt in prompts]
        return torch.cat([self._forward(row) for row in range(len(self._rows) - len(prompts), len(self._rows))])

    def forward(self, tokens: Tensor) -> Tensor:
        """Append one token to every row. tokens: [rows]."""
        for row, token in enumerate(tokens.tolist()):
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
    graph (`graphs`): the rows' tokens, their first columns and the current column are tensors that stay in place. The
    device waits for the host only after rows have come or gone. With `compiled` the decoder layers are compiled, which
    takes seconds, and attention is our own kernel.
    """

    def __init__(self, model: Any, static: bool = False, graphs: bool = False, compiled: bool = False) -> None:
        self.model, self.static, self.graphs, self.compiled = model, static, graphs, compiled
        self._layers = CompiledDecodeLayers(model) if compiled else None
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
        self._replays: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._is_moved = True

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
        tokens = torch.tensor([[0] * (width - len(text)) + list(text) for text in texts], device=self.model.device)
        first = torch.tensor([width - len(text) for text in texts], device=self.model.device)
        inputs = self._inputs(tokens, first, width)
        if min(map(len, texts)) == width:  # nothing is padded: the plain forward pass
            inputs = {"input_ids": inputs["input_ids"]}
        last = {"logits_to_keep": 1} if self._keeps_logits else {}
        output = self.model(**inputs, **last, use_cache=True)
        [(name, prefilled)] = output_cache(output).items()
        index = [texts.index(tuple(prompt)) for prompt in prompts]
        self._insert(name, prefilled, index, [len(prompt) for prompt in prompts])
        return output.logits[index, -1]  # type: ignore[no-any-return]

    def _inputs(self, tokens: Tensor, starts: Tensor, width: int) -> dict[str, Tensor]:
        """Arguments of a forward pass over tokens that end at column `width`, or at our end for a single column.

        tokens: [rows, length]; starts: [rows], the first column of each row.
        """
        first, columns = starts[:, None], torch.arange(width, device=starts.device)
        inputs = {"input_ids": tokens, "attention_mask": (columns >= first).long()}
        if self._takes_positions:
            end: Tensor | int = self.column if self.static else self.end
            positions = columns if tokens.shape[1] > 1 else end
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
        self._is_moved = True

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
            self.columns = _round_up(max(columns, self.columns * 3 // 2), COLUMNS) + SPARE_COLUMNS
        self._max_rows = max(_power_of_two(rows), self._max_rows)
        for layer in self._attention:
            for name, old in (("keys", layer.keys), ("values", layer.values)):
                new = old.new_zeros(self._max_rows, old.shape[1], self.columns, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                setattr(layer, name, new)
        self._tokens, self._first = (
            torch.zeros(self._max_rows, dtype=torch.int64, device=self.model.device) for _ in range(2)
        )
        self._is_moved = True
        if self._replays:
            torch.cuda.synchronize()  # the last one may still be running
            self._replays.clear()

    def _shift(self, columns: int) -> None:
        """Move all rows to the right."""
        rows, first = len(self._starts), min(self._starts)
        for layer in self._attention:
            for buffer in (layer.keys, layer.values):
                buffer[:rows, :, first + columns : self.end + columns] = buffer[:rows, :, first : self.end].clone()
        self._starts = [start + columns for start in self._starts]
        self.end += columns
        self._is_moved = True

    def forward(self, tokens: Tensor) -> Tensor:
        """Append one token to every row. tokens: [rows]."""
        if self.end == self.columns:
            if (first := min(self._starts)) * 4 > self.columns:
                self._shift(-first)
            else:
                self._grow(len(tokens), self.end + 1)
        logits = self._static_step(tokens) if self.static else self._plain_step(tokens)
        self.end += 1
        return logits[: len(tokens)]

    def _plain_step(self, tokens: Tensor) -> Tensor:
        self.width = self.end + 1
        inputs = self._inputs(tokens[:, None], torch.tensor(self._starts, device=tokens.device), self.width)
        if not self._attention:
            del inputs["attention_mask"]
        return self.model(**inputs, **self._caches, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    def _static_step(self, tokens: Tensor) -> Tensor:
        rows, width = _power_of_two(len(tokens)), _round_up(self.end + 1, COLUMNS)
        self._grow(rows, width)
        if self._is_moved:
            starts = [*self._starts, *[self.end] * (self._max_rows - len(self._starts))]
            self._first.copy_(torch.tensor(starts))
            self.column.fill_(self.end)
            self._is_moved = False
        self._tokens[: len(tokens)] = tokens
        logits = self._replay(rows, width) if self.graphs else self._compute(rows, width)
        self.column += 1
        return logits

    def _compute(self, rows: int, width: int) -> Tensor:
        """A static step: a function of the tensors that stay in place."""
        self.width = width
        inputs = self._inputs(self._tokens[:rows, None], self._first[:rows], width)
        [past] = self._caches.values()
        layers = self._layers.use(past, [layer.view(rows) for layer in self._attention]) if self._layers else None
        with grouped_attention(self.model, self.compiled), layers or nullcontext():
            return self.model(**inputs, **self._caches, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    def _replay(self, rows: int, width: int) -> Tensor:
        """A step as a CUDA graph, captured at the first use of its shape; without graphs once a capture has failed."""
        if (rows, width) not in self._replays:
            logits = self._compute(rows, width)  # libraries allocate their work spaces before the capture
            try:
                self._replays[rows, width] = self._capture(rows, width)
            except RuntimeError as error:
                torch.cuda.synchronize()
                self.graphs = False
                print(f"note: answers are decoded without CUDA graphs: {first_line(error)}", file=sys.stderr)
                return logits
        return self._replays[rows, width]()

    def _capture(self, rows: int, width: int) -> Callable[[], Tensor]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # relaxed: other threads may copy the trained weights to the CPU meanwhile, and an older graph may be freed
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            logits = self._compute(rows, width)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

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
        self._is_moved = True
        if self._starts and min(self._starts) > self.end // 2:
            self._shift(-min(self._starts))


class LayerView:
    """Keys and values of one layer for a static step; a compiled layer takes it in place of the whole cache, so that
    it does not read its own number, for which it would be compiled again for each layer."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor, columns: Tensor) -> None:
        self.keys, self.values, self.column, self.columns = keys, values, column, columns

    def mark_dynamic(self) -> None:
        """Other numbers of rows and columns must not recompile a layer; one row is a kind of its own."""
        for buffer in (self.keys, self.values):
            torch._dynamo.maybe_mark_dynamic(buffer, (0, 2) if len(buffer) > 1 else 2)
        torch._dynamo.maybe_mark_dynamic(self.columns, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the next column; returns the columns to attend to. key_states: [rows, heads, 1, head_dim]."""
        width = self.columns.shape[0]
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys[:, :, :width], self.values[:, :, :width]


class CompiledDecodeLayers:
    """The decoder layers of a model, compiled for one new token a row: one compilation for all layers of a kind.

    The weights must not change while it lives: queries, keys and values are one product with a copy of their weights,
    17 instead of 28 µs for 32 rows of a 4 B model (H200, 2026-11-18).
    """

    def __init__(self, model: Any) -> None:
        self._layers = list(decoder_layers(attn.unwrap_peft(model)))
        self._projections = [each for layer in self._layers for each in _fused_projections(layer)]
        self._compiled = [torch.compile(layer._call_impl, fullgraph=True) for layer in self._layers]
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)

    @contextmanager
    def use(self, past: Any, views: Sequence[LayerView]) -> Iterator[None]:
        """Inside, the layers are called compiled, each with its own view in place of the cache."""
        before = [layer.__dict__.get("_compiled_call_impl") for layer in self._layers]
        for layer, compiled, view in zip(self._layers, self._compiled, views, strict=True):
            layer.__dict__["_compiled_call_impl"] = partial(_call_compiled, compiled, past, view)
        for module, attributes in self._projections:
            attributes["fused"][2].clear()  # what an error has left
            module.__dict__.update(attributes)
        try:
            yield
        finally:
            for layer, call in zip(self._layers, before, strict=True):
                layer.__dict__["_compiled_call_impl"] = call
            for module, attributes in self._projections:
                for name in attributes:
                    del module.__dict__[name]


def _fused_projections(layer: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Queries, keys and values of attention modules that compute them by three plain linear modules.

    Yields each linear module and the attributes with which it returns its part of the fused product, which the first
    of the three computes.
    """
    for module in layer.modules():
        linears: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if any(type(each) is not nn.Linear or "forward" in each.__dict__ for each in linears):
            continue
        weights, biases = [each.weight.detach() for each in linears], [each.bias for each in linears]
        kinds = {(weight.dtype, weight.shape[1], bias is None) for weight, bias in zip(weights, biases, strict=True)}
        if len(kinds) > 1:
            continue
        weight, bias = torch.cat(weights), None if biases[0] is None else torch.cat([each.detach() for each in biases])
        last, product = 0, dict[str, Tensor]()
        for linear in linears:
            part = slice(last, last := last + linear.out_features)
            yield linear, {"forward": MethodType(_fused_part, linear), "fused": (weight, bias, product), "part": part}


def _fused_part(linear: Any, inputs: Tensor) -> Tensor:
    weight, bias, product = linear.fused
    if not product:
        parts = F.linear(inputs, weight, bias)
        product.update(q=parts, k=parts, v=parts)
    part: Tensor = product.popitem()[1][..., linear.part]
    return part


def _call_compiled(compiled: Callable[..., Any], past: Any, view: LayerView, *args: Any, **kwargs: Any) -> Any:
    view.mark_dynamic()
    for each in (*args, *kwargs.values()):
        for tensor in each if isinstance(each, tuple) else (each,):
            if isinstance(tensor, Tensor) and tensor.dim() > 1:
                sizes = [0] * (len(tensor) > 1) + [3] * (tensor.dim() == 4)  # rows, and columns of the mask
                torch._dynamo.maybe_mark_dynamic(tensor, sizes)
    named = {name: view if each is past else each for name, each in kwargs.items()}
    return compiled(*[view if each is past else each for each in args], **named)


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
            if self.owner.static:
                return self.view(rows).update(key_states, value_states)
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                buffer[:rows, :, self.owner.end : self.owner.end + 1] = states
            return self.keys[:rows, :, : self.owner.width], self.values[:rows, :, : self.owner.width]

        def view(self, rows: int) -> LayerView:
            """The first rows for a static step."""
            columns = self.keys.new_empty(self.owner.width, 0)
            return LayerView(self.keys[:rows], self.values[:rows], self.owner.column, columns)

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


def compiled_cache(decoder_cache: SharedCache) -> SharedCache:
    """A static cache with compiled layers, or the one given where they do not compile or give other logits."""
    try:
        candidate = SharedCache(decoder_cache.model, static=True, graphs=decoder_cache.graphs, compiled=True)
    except (ModelError, torch.OutOfMemoryError):  # its layers are not found, or their fused weights do not fit
        return decoder_cache
    return candidate if decodes_exactly(decoder_cache.model, candidate) else decoder_cache


@torch.no_grad()
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

    def next_tokens(rows: list[int]) -> Tensor:
        return torch.tensor([texts[row][lengths[row] - 1] for row in rows], device=model.device)

    try:
        check(decoder_cache.admit(prompts[:1]), [0])
        check(decoder_cache.forward(next_tokens([0])), [0])
        check(decoder_cache.admit(prompts[1:]), [1, 2])
        for rows in ([0, 1, 2], [2, 1]):
            check(decoder_cache.forward(next_tokens(rows)), rows)
            decoder_cache.remove(0)
    except Exception:  # a family that cannot do this raises anything
        return False
    finally:
        decoder_cache.clear()
    if model.dtype in attn.HALF_DTYPES:  # 36 layers round by 2 %; a wrong cache is off by 30 % and more
        return max(gaps) < HALF_TOLERANCE
    return max(gaps) < attn.tolerance(model)
