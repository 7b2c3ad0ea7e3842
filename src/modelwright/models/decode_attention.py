"""Attention of one new token a row to the keys of its row, which are read once for all query heads that share them.

transformers copies the keys for each head: 4 B parameters with 32 rows decode 1,468 tokens/s, and 3,046 with SDPA over
groups of heads (H200, 2026-11-18).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.models.attention import HALF_DTYPES, UNSUPPORTED, unwrap_peft

GROUPED_ATTN, KERNEL_ATTN = "modelwright-grouped", "modelwright-decode-kernel"


@contextmanager
def grouped_attention(model: Any, kernel: bool = False) -> Iterator[None]:
    """Inside, a model with sdpa attention reads its keys once for all query heads that share them.

    kernel: in half precision on a GPU by our Triton kernel, which also leaves out what the mask hides, not by SDPA.
    """
    config = unwrap_peft(model).config.get_text_config()
    if config._attn_implementation != "sdpa":
        yield
        return
    _register_grouped_attention()
    config._attn_implementation = KERNEL_ATTN if kernel else GROUPED_ATTN
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


@cache
def _register_grouped_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        kernel: bool, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """One query position: the heads of a group become the queries of one head. query: [rows, heads, 1, depth]."""
        (_, heads, length, depth), groups = query.shape, key.shape[1]
        is_grouped = length == 1 and (kernel or heads != groups)
        mask = attention_mask
        per_row = mask is not None and mask.shape[1] == 1 and mask.dtype == torch.bool
        if not is_grouped or not per_row or any(options.get(name) is not None for name in UNSUPPORTED):
            return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
        scale = options.get("scaling")
        scale = depth**-0.5 if scale is None else scale
        out = decode_attention(query[:, :, 0], key, value, mask[:, 0, 0], scale, kernel)  # type: ignore[index]
        return out[:, None], None

    for name, kernel in ((GROUPED_ATTN, False), (KERNEL_ATTN, True)):
        AttentionInterface.register(name, partial(forward, kernel))
        AttentionMaskInterface.register(name, sdpa_mask)


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, kernel: bool) -> Tensor:
    """Attention of one token a row: [rows, heads, depth], as the query.

    key, value: [rows, groups, width, depth]; mask: [rows, width] bool.
    """
    if kernel and query.is_cuda and query.dtype in HALF_DTYPES:
        return torch.ops.modelwright.decode_attention(query, key, value, mask, scale)  # type: ignore[no-any-return]
    (rows, heads, _), groups = query.shape, key.shape[1]
    grouped = query.reshape(rows, groups, heads // groups, query.shape[2])
    row_mask = mask[:, None, None].expand(rows, 1, heads // groups, key.shape[2])
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=row_mask, scale=scale)
    return out.reshape(rows, heads, value.shape[3])


@torch.library.custom_op("modelwright::decode_attention", mutates_args=())
def _decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    from modelwright.models.decode_kernels import attend

    return attend(query, key, value, mask, scale)


@_decode_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[3])
