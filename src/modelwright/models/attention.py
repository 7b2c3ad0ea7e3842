"""Attention on a GPU: packed documents kept apart at full speed, without a mask of length × length.

Registered with transformers under a name of its own, through its public door for attention functions. A name without
a mask function gets no mask made for it, so that nothing in the forward pass waits for the device.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from modelwright.models.spread import Spread, apart, together

NAME = "modelwright"
# cuDNN first: 415 TFLOP/s forward and backward at length 2048 on an H200, against 225 of FlashAttention-2
PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
TOLD_OF_FEWER_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
HALVES = (torch.bfloat16, torch.float16)


class Paths(NamedTuple):
    """Answers that grow out of one prompt: each is a document whose keys are the prompt's and its own."""

    keys: Tensor
    """[keys] int64, where in the flattened rows each key of each document stands."""
    starts: Tensor
    """[2, count + 1] int32, where each document begins among queries and among keys, and where the last one ends."""
    longest: int | None = None
    """Keys of the longest document; where it says nothing, one may be as long as a row."""


def install(model: Any) -> None:
    """Let a model attend this way."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


def documents_as_arguments(documents: Tensor | Paths | Spread, length: int) -> dict[str, Any]:
    """What a model's forward hands down to attend, by the names transformers has for it.

    documents: [count + 1] int32, where each document begins in the flattened rows, and where the last one ends; or
    paths, or how two answers to one prompt are laid apart. length: tokens in a row.
    """
    if isinstance(documents, Spread):
        return {f"spread_{name}": each for name, each in documents._asdict().items()}
    if isinstance(documents, Paths):
        same = documents_as_arguments(documents.starts[0], documents.longest or length)
        return {**same, "cu_seq_lens_k": documents.starts[1], "key_places": documents.keys}
    # that a batch has more documents is no reason to compile a layer again: 17 CPU-seconds of LoRA in fp8
    torch._dynamo.maybe_mark_dynamic(documents, 0)
    return {"cu_seq_lens_q": documents, "cu_seq_lens_k": documents, "max_length_q": length, "max_length_k": length}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents. query: [rows, heads, length, depth]; key, value: heads may be fewer."""
    if torch.is_autocast_enabled(query.device.type):
        compute = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(compute), key.to(compute), value.to(compute)
    if "spread_places" in more:
        spread = Spread(*(more[f"spread_{name}"] for name in Spread._fields))
        answers = (apart(query, spread), apart(key, spread), apart(value, spread))
        return together(_dense(answers, None, dropout, scaling), spread, len(query)), None
    length = query.shape[2]
    longest = int(more.get("max_length_k") or length)
    documents: Tensor | None = more.get("cu_seq_lens_q")
    window: int | None = more.get("sliding_window")
    window = window if window is not None and window < length else None
    places: Tensor | None = more.get("key_places")
    if places is not None:
        assert documents is not None
        starts = (documents, more["cu_seq_lens_k"])
        parts = (query, _taken(key, places), _taken(value, places))
        if not query.is_cuda:
            return _one_by_one(parts, starts, window, scaling), None
        return _by_lengths(parts, starts, longest, window, scaling), None
    is_plain = documents is None and window is None
    if attention_mask is None and not is_plain:
        if query.is_cuda and query.dtype in HALVES and dropout == 0.0:
            if documents is None:
                ends = (len(query) + 1) * length
                documents = torch.arange(0, ends, length, dtype=torch.int32, device=query.device)
            parts = (query, _flat(key), _flat(value))
            return _by_lengths(parts, (documents, documents), longest, window, scaling), None
        attention_mask = _mask(query, documents, window)
    return _dense((query, key, value), attention_mask, dropout, scaling).transpose(1, 2), None


def _dense(
    parts: tuple[Tensor, Tensor, Tensor], attention_mask: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """Attention in rows of one length, causal where no mask says otherwise: [rows, heads, length, depth]."""
    query, key, value = parts
    # by a branch: to the compiler lengths may be symbols, and so is what compares them, which the kernel does not take
    alike = attention_mask is None and query.shape[2] == key.shape[2]
    seen: dict[str, Any] = {"is_causal": True} if alike else {"attn_mask": attention_mask}
    if query.is_cuda and query.dtype not in HALVES and (times := query.shape[1] // key.shape[1]) > 1:
        # in fp32 the kernel that saves memory wants as many heads everywhere: 14 GB instead of 35 at length 2048
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    with sdpa_kernel(PREFERRED, set_priority=True):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1], **seen
        )


def _by_lengths(
    parts: tuple[Tensor, Tensor, Tensor], starts: tuple[Tensor, Tensor], longest: int, window: int | None,
    scaling: float | None,
) -> Tensor:  # fmt: skip
    """FlashAttention over documents: [rows, length, heads, depth]. parts: queries, keys and values, the latter two
    [keys, heads, depth]; longest: no document has more queries or keys.

    A document with fewer queries than keys has the queries of its last keys.
    """
    query, key, value = parts
    rows, heads, length, depth = query.shape
    window_size = (-1 if window is None else window - 1, 0)
    # torch 2.11 takes fewer key heads as they are; later versions want to be told
    fewer: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != heads and TOLD_OF_FEWER_HEADS else {}
    attended = varlen_attn(
        _flat(query), key, value, *starts, longest, longest, scale=scaling, window_size=window_size, **fewer
    )
    assert isinstance(attended, Tensor)
    return attended.view(rows, length, heads, depth)


def _one_by_one(
    parts: tuple[Tensor, Tensor, Tensor], starts: tuple[Tensor, Tensor], window: int | None, scaling: float | None
) -> Tensor:
    """The same on a processor, document by document: a mask over all of them took two fifths of the time of a model of
    135 M weights whose rows share 260 tokens."""
    query, key, value = parts
    rows, heads, length, depth = query.shape
    flat, times = _flat(query), heads // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    attended: list[Tensor] = []
    for (first, last), (start, stop) in zip(*(pairwise(each.tolist()) for each in starts), strict=True):
        queries, keys = last - first, stop - start
        behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
        seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        q, k, v = (part.transpose(0, 1)[None] for part in (flat[first:last], key[start:stop], value[start:stop]))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None], scale=scaling)
        attended.append(found[0].transpose(0, 1))
    return torch.cat(attended).view(rows, length, heads, depth)


def _flat(part: Tensor) -> Tensor:
    """All rows in one line: [rows × length, heads, depth]."""
    rows, heads, length, depth = part.shape
    return part.transpose(1, 2).reshape(rows * length, heads, depth)


def _taken(part: Tensor, places: Tensor) -> Tensor:
    return _flat(part).index_select(0, places)


def _mask(query: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """Who sees whom, written out: [rows, 1, length, length] bool. For devices and types without the fast way."""
    rows, _, length, _ = query.shape
    places = torch.arange(length, device=query.device)
    behind = places[:, None] - places[None, :]
    sees = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    if documents is None:
        return sees[None, None].expand(rows, 1, length, length)
    flat = torch.arange(rows * length, dtype=documents.dtype, device=query.device)
    owner = torch.bucketize(flat, documents, right=True).view(rows, length)
    return (sees[None] & (owner[:, :, None] == owner[:, None, :]))[:, None]
