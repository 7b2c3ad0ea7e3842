"""Masks and varlen layouts for rows whose continuations share one prefix, so that the prefix is computed once.

SFT of a 3 B model, 32 rows a step under a system prompt of 279 tokens: 301 instead of 80 rows/s in 45 instead of 80 GB
(H200, 2026-11-17, `python -m benchmarks.ablation --only prefix-sharing`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.errors import ModelError, first_line
from modelwright.models import attention
from modelwright.models.attention import SharedPrefixLayout, UnsharedLayout, hidden_states, relative_gap, unwrap_peft

HALF_TOLERANCE = 6e-2
"""Largest relative difference by rounding in bf16; a wrong mask makes 0.3 and more."""
PREFIX_SEGMENT = 0
"""Segment id of the shared prefix."""


def shared_prefix_mask(model: Any, positions: Tensor, segment_ids: Tensor) -> Any:
    """Causal mask where each token attends to the prefix and its own segment, within the model's sliding window.

    positions, segment_ids: [rows, length] int64. Returns what the model takes as its attention mask.
    """
    config = unwrap_peft(model).config.get_text_config()
    window = _sliding_window(config)
    length, kv_segments = positions.shape[1], segment_ids[:, None, :]
    visible = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    visible = visible & ((kv_segments == PREFIX_SEGMENT) | (kv_segments == segment_ids[:, :, None]))
    full = sliding = visible.unsqueeze(1)
    if window:
        sliding = (visible & (positions[:, :, None] - positions[:, None, :] < window)).unsqueeze(1)
    if config._attn_implementation == "eager":  # eager attention adds the mask
        full, sliding = (_additive_mask(mask, next(model.parameters()).dtype) for mask in (full, sliding))
    return _mask_by_layer_type(config, full, sliding)


@torch.no_grad()
def prefix_sharing_blocker(model: Any) -> str | None:
    """Why this model cannot share a prefix between continuations; None if a probe gives the right hidden states."""
    config = unwrap_peft(model).config.get_text_config()
    if (implementation := config._attn_implementation) not in ("sdpa", "eager", attention.ATTN_NAME):
        return f"{implementation} attention takes no mask of this form"
    if unsupported := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"its layers of {', '.join(sorted(unsupported))} take no mask"
    if not attention.takes_positions(model):
        return "it takes no positions, and would count those of a continuation from the beginning of the row"
    tokens, segment_ids, positions = _probe(model)
    was_training, second, window = model.training, slice(16, None), _sliding_window(config)
    try:
        if window and implementation != attention.ATTN_NAME:  # shorter than the probe, in case it is ignored
            config.sliding_window = 4
        if attention.is_random(model, lambda: hidden_states(model, tokens[:, :16], positions[:, :16])):
            return "it draws random numbers in training (dropout or jitter), which would be shared too"
        model.eval()
        mask = shared_prefix_mask(model, positions, segment_ids)
        shared, grad = attention.hidden_with_grad(model, second, tokens, positions, mask)
        alone = hidden_states(model, torch.cat([tokens[:, :8], tokens[:, second]], 1), positions[:, :16])[0, 8:]
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, ModelError) as error:
        return f"it does not take the mask ({first_line(error)})"
    finally:
        model.train(was_training)
        if window:
            config.sliding_window = window
    gap = relative_gap(alone, shared[0, second])
    if bool((grad[:, 8:16] != 0).any()) or not gap <= attention.tolerance(model):
        return f"in a probe the continuations attended to each other ({gap:.1e})"
    return None


def _probe(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, segment ids and positions of a prefix with two continuations, 8 tokens each."""
    tokens = attention.probe_tokens(model)
    segment_ids = torch.tensor([[PREFIX_SEGMENT] * 8 + [1] * 8 + [2] * 8], device=tokens.device)
    return tokens, segment_ids, torch.tensor([[*range(16), *range(8, 16)]], device=tokens.device)


def shared_prefix_layout(segment_ids: Tensor) -> SharedPrefixLayout:
    """The same as varlen layout for our attention: prefix and first continuation are one document, and each later
    continuation is another one with the keys of the prefix and its own.

    segment_ids: [rows, length] int64, in each row the prefix and then one continuation after the other.
    """
    length, tokens = segment_ids.shape[1], segment_ids.numel()
    kv_index: list[np.ndarray[Any, Any]] = []
    later_uses: list[np.ndarray[Any, Any]] = []
    first_use, prefix_number = np.zeros(tokens, np.int64), np.full(tokens, -1)
    query_ends, key_ends = [0], [0]
    for first, row_segments in zip(range(0, tokens, length), segment_ids.numpy(), strict=True):
        edges = [*(np.flatnonzero(np.diff(row_segments)) + 1).tolist(), length]
        copies: list[int] = []
        for start, stop in pairwise([0, *(edges[1:] or edges)]):
            prefix_length = edges[0] if start else 0
            copies += [key_ends[-1]] if start else []
            kv_index += [np.arange(first, first + prefix_length), np.arange(first + start, first + stop)]
            query_ends.append(first + stop)
            key_ends.append(key_ends[-1] + prefix_length + stop - start)
            first_use[first + start : first + stop] = np.arange(key_ends[-1] - stop + start, key_ends[-1])
        if copies:
            prefix_number[first : first + edges[0]] = sum(map(len, later_uses)) + np.arange(edges[0])
            later_uses.append(np.arange(edges[0])[:, None] + copies)
    uses = np.full((max(1, sum(map(len, later_uses))), max((each.shape[1] for each in later_uses), default=1)), -1)
    for each, begin in zip(later_uses, np.cumsum([0, *map(len, later_uses)]), strict=False):
        uses[begin : begin + len(each), : each.shape[1]] = each
    cu_seqlens_qk = torch.tensor([query_ends, key_ends], dtype=torch.int32)
    keys, *others = map(torch.from_numpy, (np.concatenate(kv_index), first_use, uses, prefix_number))
    return SharedPrefixLayout(keys, cu_seqlens_qk, others[0], others[1], others[2], int(np.diff(key_ends).max()))


def supports_layout(
    model: Any, make_layout: Callable[[Tensor], SharedPrefixLayout | UnsharedLayout] = shared_prefix_layout
) -> bool:
    """Whether a layout gives the same hidden states as a mask in a probe, on a GPU in bf16 as varlen attention needs.
    An unshared layout has no sliding window."""
    config = unwrap_peft(model).config
    is_windowed = make_layout is attention.unshared_layout and _sliding_window(config.get_text_config())
    if config._attn_implementation != attention.ATTN_NAME or is_windowed:
        return False
    tokens, segment_ids, positions = _probe(model)
    on_gpu = tokens.is_cuda
    autocast: Any = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()
    cpu_layout: Any = make_layout(segment_ids.cpu())
    layout = type(cpu_layout)(*(each.to(tokens.device) if isinstance(each, Tensor) else each for each in cpu_layout))
    try:
        with torch.no_grad(), autocast:
            masked = hidden_states(model, tokens, positions, shared_prefix_mask(model, positions, segment_ids))
            unmasked = hidden_states(model, tokens, positions, cu_seqlens=layout)
    except (TypeError, ValueError, RuntimeError, ModelError) as error:
        warnings.warn(f"prefix sharing uses a mask: {first_line(error)}", stacklevel=2)
        return False
    return relative_gap(masked, unmasked) < (HALF_TOLERANCE if on_gpu else attention.FORWARD_TOLERANCE)


def _mask_by_layer_type(config: Any, full: Any, sliding: Any) -> Any:
    """A mask per layer type for models with sliding-window layers, else one mask."""
    if kinds := set(getattr(config, "layer_types", None) or ()):
        return {"full_attention": full, **({"sliding_attention": sliding} if "sliding_attention" in kinds else {})}
    return sliding


def _sliding_window(config: Any) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
