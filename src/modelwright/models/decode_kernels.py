"""Triton kernels of the decoder: attention of one new token a row, and sampling; import only inside GPU functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Keys that a program reads at once."""
VOCAB_BLOCK = 16384
"""Logits that a program reads at once."""
FULL_GPU = 256
"""Programs that keep a GPU busy; with fewer rows the keys of each are split among several."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, mask, out, log_sums, key_row, key_group, value_row, value_group, mask_row, width, split_width,
    scale, groups, shared: tl.constexpr, depth: tl.constexpr, value_depth: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group of heads of one row over one part of its keys. `shared`: query heads of a group."""
    row, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    part, parts = tl.program_id(1), tl.num_programs(1)
    head, inner, inner_value = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    heads = tl.program_id(0) * shared + head  # of all rows
    q = tl.load(
        query + heads[:, None] * depth + inner[None, :], (head < shared)[:, None] & (inner < depth)[None, :], 0.0
    )
    keys = key + row.to(tl.int64) * key_row + group.to(tl.int64) * key_group
    values = value + row.to(tl.int64) * value_row + group.to(tl.int64) * value_group
    highest = tl.full((BLOCK_H,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    sums = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    end = tl.minimum(width, (part + 1) * split_width)
    for start in range(part * split_width, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_valid = (tl.load(mask + row * mask_row + column, column < end, 0) != 0) & (column < end)
        k = tl.load(keys + column[:, None] * depth + inner[None, :], is_valid[:, None] & (inner < depth)[None, :], 0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(is_valid[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights, factor = tl.exp(scores - new_highest[:, None]), tl.exp(highest - new_highest)
        v = tl.load(
            values + column[:, None] * value_depth + inner_value[None, :],
            is_valid[:, None] & (inner_value < value_depth)[None, :], 0.0,
        )  # fmt: skip
        total = total * factor + tl.sum(weights, 1)
        sums = sums * factor[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = new_highest
    result = sums / tl.maximum(total, 1e-30)[:, None]
    index = (heads * parts + part)[:, None] * value_depth + inner_value[None, :]
    is_head = head < shared
    tl.store(out + index, result.to(out.dtype.element_ty), is_head[:, None] & (inner_value < value_depth)[None, :])
    tl.store(log_sums + heads * parts + part, highest + tl.log(total), is_head)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one token a row: [rows, heads, value depth].

    query: [rows, heads, depth]; key, value: [rows, groups, width, depth]; mask: [rows, width] bool.
    """
    (rows, heads, depth), (_, groups, width, value_depth) = query.shape, value.shape
    parts = max(1, min(FULL_GPU // (rows * groups), triton.cdiv(width, 2 * BLOCK)))
    split_width = triton.cdiv(triton.cdiv(width, parts), BLOCK) * BLOCK
    key, value = (each if each.stride()[2:] == (each.shape[3], 1) else each.contiguous() for each in (key, value))
    query, mask = query.contiguous(), mask.contiguous().view(torch.uint8)
    out = query.new_empty(rows, heads, parts, value_depth, dtype=query.dtype if parts == 1 else torch.float32)
    log_sums = query.new_empty(rows, heads, parts, dtype=torch.float32)
    _attend[(rows * groups, parts)](
        query, key, value, mask, out, log_sums, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        mask.stride(0), width, split_width, scale, groups, heads // groups, depth, value_depth,
        max(16, triton.next_power_of_2(heads // groups)), triton.next_power_of_2(depth),
        triton.next_power_of_2(value_depth), BLOCK, num_warps=4, num_stages=3 if depth <= 128 else 2,
    )  # fmt: skip
    if parts == 1:
        return out[:, :, 0]
    return (out * log_sums.softmax(-1)[..., None]).sum(2).to(query.dtype)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _order(logit, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    """An integer that orders as the logit does."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_from(logits, vocab, lowest, highest, inverse, shift: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weight and number of the tokens from an order on."""
    weight, count = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + token, token < vocab, -float("inf")).to(tl.float32)
        is_in = (_order(logit, shift) >= lowest) & (token < vocab)
        weight += tl.where(is_in, tl.exp((logit - highest) * inverse), 0.0)
        count += is_in.to(tl.int32)
    return tl.sum(weight, 0), tl.sum(count, 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _draw(  # type: ignore[no-untyped-def]
    logits, vocab, highest, lowest, inverse, top_k, top_p, uniform, shift: tl.constexpr, BLOCK: tl.constexpr
):
    """A token of the most likely ones: those before a cut in the order, and the first of those at it."""
    top, cut = _order(highest, shift), _order(lowest, shift)
    ties = top_k
    if top_k < vocab:
        end = top + 1
        while end.to(tl.int64) - cut > 1:
            middle = (cut & end) + ((cut ^ end) >> 1)  # half of the sum, which may overflow
            _, count = _sum_from(logits, vocab, middle, highest, inverse, shift, BLOCK)
            if count >= top_k:
                cut = middle
            else:
                end = middle
        _, above = _sum_from(logits, vocab, cut + 1, highest, inverse, shift, BLOCK)
        ties = top_k - above
    if top_p < 1.0:
        above_weight, above = _sum_from(logits, vocab, cut + 1, highest, inverse, shift, BLOCK)
        weight, count = _sum_from(logits, vocab, cut, highest, inverse, shift, BLOCK)
        one = (weight - above_weight) / tl.maximum(count - above, 1)
        target = top_p * (above_weight + one * tl.minimum(ties, count - above))
        first_cut, end = cut, top + 1
        while end.to(tl.int64) - cut > 1:
            middle = (cut & end) + ((cut ^ end) >> 1)
            weight, _ = _sum_from(logits, vocab, middle, highest, inverse, shift, BLOCK)
            if weight >= target:
                cut = middle
            else:
                end = middle
        above_weight, above = _sum_from(logits, vocab, cut + 1, highest, inverse, shift, BLOCK)
        weight, count = _sum_from(logits, vocab, cut, highest, inverse, shift, BLOCK)
        one = tl.maximum((weight - above_weight) / tl.maximum(count - above, 1), 1e-37)
        needed = tl.maximum(tl.ceil(tl.minimum((target - above_weight) / one, 1e9)).to(tl.int32), 1)
        ties = tl.minimum(needed, ties) if cut == first_cut else needed
    total, num_ties = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        weights, is_tie = _top_weights(logits, vocab, start, cut, ties - num_ties, highest, inverse, shift, BLOCK)
        total, num_ties = total + tl.sum(weights, 0), num_ties + tl.sum(is_tie, 0)
    limit = (uniform * total.to(tl.float64)).to(tl.int64)
    drawn, sum_before, num_ties = tl.zeros((), tl.int32), tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        weights, is_tie = _top_weights(logits, vocab, start, cut, ties - num_ties, highest, inverse, shift, BLOCK)
        drawn += tl.sum((sum_before + tl.cumsum(weights, 0) <= limit).to(tl.int32), 0)
        sum_before, num_ties = sum_before + tl.sum(weights, 0), num_ties + tl.sum(is_tie, 0)
    return drawn


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _top_weights(logits, vocab, start, cut, ties, highest, inverse, shift: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of a block as integers, whose sum is exact, zero below the cut, and which tokens lie at it."""
    token = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + token, token < vocab, -float("inf")).to(tl.float32)
    order = _order(logit, shift)
    is_tie = ((order == cut) & (token < vocab)).to(tl.int32)
    is_top = ((order > cut) | ((is_tie > 0) & (tl.cumsum(is_tie, 0) <= ties))) & (token < vocab)
    return tl.where(is_top, tl.exp((logit - highest) * inverse) * 1099511627776.0, 0.0).to(tl.int64), is_tie


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sample(  # type: ignore[no-untyped-def]
    logits, temperatures, top_ks, top_ps, uniforms, tokens, logprobs, row_length, vocab,
    shift: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the most likely token at temperature 0, or a sampled one, and its log-prob."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_length
    best, worst = tl.full((BLOCK,), -float("inf"), tl.float32), tl.full((BLOCK,), float("inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + token, token < vocab, -float("inf")).to(tl.float32)
        index = tl.where(logit > best, token, index)
        best = tl.maximum(best, logit)
        worst = tl.minimum(worst, tl.where(token < vocab, logit, float("inf")))
    highest, lowest = tl.max(best, 0), tl.min(worst, 0)
    choice = tl.min(tl.where(best == highest, index, vocab - 1), 0)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        top = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(uniforms + row)
        drawn = _draw(logits, vocab, highest, lowest, 1.0 / temperature, top[0], top[1], top[2], shift, BLOCK)
        choice = tl.where(drawn < vocab, drawn, choice)
    total, _ = _sum_from(logits, vocab, _order(lowest, shift), highest, 1.0, shift, BLOCK)
    chosen = tl.load(logits + choice).to(tl.float32)
    tl.store(tokens + row, choice.to(tl.int64))
    tl.store(logprobs + row, chosen - highest - tl.log(total))


def sample_rows(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """A token and its log-prob for each row of logits, without sorting them; the most likely one at temperature 0.

    logits: [rows, vocab_size]; temperatures, top_ps: [rows] float32; top_ks: [rows] int32; uniforms: [rows] float64.
    """
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    _sample[(rows,)](
        logits, temperatures, top_ks, top_ps, uniforms, tokens, logprobs, logits.stride(0), vocab, shift, VOCAB_BLOCK,
        num_warps=32,
    )  # fmt: skip
    return tokens, logprobs
