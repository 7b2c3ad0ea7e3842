"""Masks and varlen layouts for rows whose continuations share one prefix, so that the prefix is computed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.errors import first_line
from modelwright.models import attention
from modelwright.models.attention import FORWARD_TOLERANCE, UnsharedLayout, hidden_states, unshared_layout, unwrap_peft

HALF_TOLERANCE = 6e-2
"""Relative difference that two orders of arithmetic may make in bf16; a leak makes 0.3 and more."""
PREFIX_SEGMENT = 0
"""The branch that all others grow out of."""


def shared_prefix_mask(model: Any, positions: Tensor, segment_ids: Tensor) -> Any:
    """Who sees whom: everyone the trunk and the own branch, up to itself, within the model's window where it has one.

    positions, branches: [rows, length] int64. Returns what the model takes as its attention mask.
    """
    config = unwrap_peft(model).config.get_text_config()
    if config._attn_implementation == "flex_attention":
        return _mask_by_layer_type(
            config,
            _flex_block_mask(positions, segment_ids, None),
            _flex_block_mask(positions, segment_ids, _sliding_window(config)),
        )
    visible = torch.ones(num_tokens := positions.shape[1], num_tokens, dtype=torch.bool, device=positions.device).tril()
    visible = visible & (
        (segment_ids[:, None, :] == PREFIX_SEGMENT) | (segment_ids[:, None, :] == segment_ids[:, :, None])
    )
    full, sliding = visible.unsqueeze(1), visible.unsqueeze(1)
    if window := _sliding_window(config):
        sliding = (visible & (positions[:, :, None] - positions[:, None, :] < window)).unsqueeze(1)
    if config._attn_implementation == "eager":  # which adds the mask, where sdpa asks it
        full, sliding = (_additive_mask(mask, next(model.parameters()).dtype) for mask in (full, sliding))
    return _mask_by_layer_type(config, full, sliding)


@torch.no_grad()
def prefix_sharing_blocker(model: Any) -> str | None:
    """Why this model cannot share a prompt between branches; None where a trial on it came out right."""
    config = unwrap_peft(model).config.get_text_config()
    if (attn_implementation := config._attn_implementation) not in (
        "sdpa",
        "eager",
        "flex_attention",
        attention.ATTN_NAME,
    ):
        return f"{attn_implementation} attention takes no mask of its own"
    if unsupported := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"its layers of {', '.join(sorted(unsupported))} take no mask"
    device = next(model.parameters()).device
    tokens = torch.arange(3, 27, device=device).remainder(min(config.vocab_size, 1000)).unsqueeze(0)
    segment_ids = torch.tensor([[PREFIX_SEGMENT] * 8 + [1] * 8 + [2] * 8], device=device)
    positions = torch.tensor([[*range(16), *range(8, 16)]], device=device)
    was_training = model.training
    model.eval()
    try:
        shared = hidden_states(model, tokens, positions, shared_prefix_mask(model, positions, segment_ids))[0, 16:]
        alone = hidden_states(model, torch.cat([tokens[:, :8], tokens[:, 16:]], 1), positions[:, :16])[0, 8:]
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        return f"it does not take the mask ({first_line(error)})"
    finally:
        model.train(was_training)
    relative_gap = float((shared.float() - alone.float()).abs().max() / alone.float().abs().max().clamp(min=1e-6))
    return (
        f"in a probe the continuations attended to each other ({relative_gap:.1e})"
        if relative_gap > FORWARD_TOLERANCE
        else None
    )


def shared_prefix_layout(segment_ids: Tensor) -> attention.SharedPrefixLayout:
    """What a branch mask says, for our own attention, which needs none: the trunk and the first branch are one
    document, every later branch is another with the trunk's keys and its own.

    branches: [rows, length] int64, in each row the trunk first and then one branch after the other.
    """
    length = segment_ids.shape[1]
    kv_index: list[np.ndarray[Any, Any]] = []
    query_ends, key_ends = [0], [0]
    for first, row_segments in zip(range(0, segment_ids.numel(), length), segment_ids.numpy(), strict=True):
        edges = [*(np.flatnonzero(np.diff(row_segments)) + 1).tolist(), length]
        for start, stop in pairwise([0, *(edges[1:] or edges)]):
            prefix_length = edges[0] if start else 0
            kv_index += [np.arange(first, first + prefix_length), np.arange(first + start, first + stop)]
            query_ends.append(first + stop)
            key_ends.append(key_ends[-1] + prefix_length + stop - start)
    cu_seqlens_qk = torch.tensor([query_ends, key_ends], dtype=torch.int32)
    return attention.SharedPrefixLayout(
        torch.from_numpy(np.concatenate(kv_index)), cu_seqlens_qk, int(np.diff(key_ends).max())
    )


def supports_layout(
    model: Any, make_layout: Callable[[Tensor], attention.SharedPrefixLayout | UnsharedLayout] = shared_prefix_layout
) -> bool:
    """Whether paths in place of a mask do for this model, by a trial of both; on a GPU in half precision, which alone
    takes them there. Answers that are laid apart attend to everything before them, so that no layer may see less."""
    device, config = next(model.parameters()).device, unwrap_peft(model).config
    if config._attn_implementation != attention.ATTN_NAME or (
        make_layout is unshared_layout and _sliding_window(config.get_text_config())
    ):
        return False
    on_gpu = device.type == "cuda"
    autocast: Any = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()
    tokens = torch.arange(3, 27, device=device).unsqueeze(0)
    segment_ids = torch.tensor([[PREFIX_SEGMENT] * 8 + [1] * 8 + [2] * 8])
    positions = torch.tensor([[*range(16), *range(8, 16)]], device=device)
    cpu_layout: Any = make_layout(segment_ids)
    layout = type(cpu_layout)(*(each.to(device) if isinstance(each, Tensor) else each for each in cpu_layout))
    segment_ids = segment_ids.to(device)
    try:
        with torch.no_grad(), autocast:
            masked = hidden_states(model, tokens, positions, shared_prefix_mask(model, positions, segment_ids))
            unmasked = hidden_states(model, tokens, positions, cu_seqlens=layout)
    except (TypeError, ValueError, RuntimeError) as error:
        warnings.warn(f"prefix sharing uses a mask: {first_line(error)}", stacklevel=2)
        return False
    relative_gap = float((masked - unmasked).float().abs().max() / masked.float().abs().max())
    return relative_gap < (HALF_TOLERANCE if on_gpu else FORWARD_TOLERANCE)


def _mask_by_layer_type(config: Any, full: Any, sliding: Any) -> Any:
    """Masks for families whose layers see differently far; one mask for the others."""
    if kinds := set(getattr(config, "layer_types", None) or ()):
        return {"full_attention": full, **({"sliding_attention": sliding} if "sliding_attention" in kinds else {})}
    return sliding


def _sliding_window(config: Any) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _flex_block_mask(positions: Tensor, segment_ids: Tensor, window: int | None) -> Any:
    """The same as blocks, of which flex attention leaves out those in which nobody sees anybody."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(row: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        kv_segment = segment_ids[row, kv_index]
        visible = (q_index >= kv_index) & ((kv_segment == PREFIX_SEGMENT) | (kv_segment == segment_ids[row, q_index]))
        return visible & (positions[row, q_index] - positions[row, kv_index] < window) if window else visible

    rows, length = positions.shape
    return create_block_mask(mask_mod, rows, None, length, length, device=positions.device.type)


def _additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
