"""Let several answers grow out of one prompt in one row, unable to see each other: the prompt is computed once."""

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
from modelwright.models.spread import Spread, spread_of
from modelwright.models.text import FORWARD_TOLERANCE, bare, hidden_states

HALF_TOLERANCE = 6e-2
"""Relative difference that two orders of arithmetic may make in bf16; a leak makes 0.3 and more."""
TRUNK = 0
"""The branch that all others grow out of."""


def branch_mask(model: Any, positions: Tensor, branches: Tensor) -> Any:
    """Who sees whom: everyone the trunk and the own branch, up to itself, within the model's window where it has one.

    positions, branches: [rows, length] int64. Returns what the model takes as its attention mask.
    """
    config = bare(model).config.get_text_config()
    if config._attn_implementation == "flex_attention":
        return _by_layer(config, _blocks(positions, branches, None), _blocks(positions, branches, _window(config)))
    seen = torch.ones(tokens := positions.shape[1], tokens, dtype=torch.bool, device=positions.device).tril()
    seen = seen & ((branches[:, None, :] == TRUNK) | (branches[:, None, :] == branches[:, :, None]))
    whole, near = seen.unsqueeze(1), seen.unsqueeze(1)
    if window := _window(config):
        near = (seen & (positions[:, :, None] - positions[:, None, :] < window)).unsqueeze(1)
    if config._attn_implementation == "eager":  # which adds the mask, where sdpa asks it
        whole, near = (_additive(mask, next(model.parameters()).dtype) for mask in (whole, near))
    return _by_layer(config, whole, near)


@torch.no_grad()
def why_not(model: Any) -> str | None:
    """Why this model cannot share a prompt between branches; None where a trial on it came out right."""
    config = bare(model).config.get_text_config()
    if (how := config._attn_implementation) not in ("sdpa", "eager", "flex_attention", attention.NAME):
        return f"{how} attention takes no mask of its own"
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"its layers of {', '.join(sorted(others))} take no mask"
    device = next(model.parameters()).device
    tokens = torch.arange(3, 27, device=device).remainder(min(config.vocab_size, 1000)).unsqueeze(0)
    branches = torch.tensor([[TRUNK] * 8 + [1] * 8 + [2] * 8], device=device)
    positions = torch.tensor([[*range(16), *range(8, 16)]], device=device)
    was_training = model.training
    model.eval()
    try:
        shared = hidden_states(model, tokens, positions, branch_mask(model, positions, branches))[0, 16:]
        alone = hidden_states(model, torch.cat([tokens[:, :8], tokens[:, 16:]], 1), positions[:, :16])[0, 8:]
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        return f"it does not take the mask ({first_line(error)})"
    finally:
        model.train(was_training)
    gap = float((shared.float() - alone.float()).abs().max() / alone.float().abs().max().clamp(min=1e-6))
    return f"in a trial the branches saw each other ({gap:.1e})" if gap > FORWARD_TOLERANCE else None


def paths_of(branches: Tensor) -> attention.Paths:
    """What a branch mask says, for our own attention, which needs none: the trunk and the first branch are one
    document, every later branch is another with the trunk's keys and its own.

    branches: [rows, length] int64, in each row the trunk first and then one branch after the other.
    """
    length = branches.shape[1]
    keys: list[np.ndarray[Any, Any]] = []
    queries, ends = [0], [0]
    for first, line in zip(range(0, branches.numel(), length), branches.numpy(), strict=True):
        edges = [*(np.flatnonzero(np.diff(line)) + 1).tolist(), length]
        for start, stop in pairwise([0, *(edges[1:] or edges)]):
            shared = edges[0] if start else 0
            keys += [np.arange(first, first + shared), np.arange(first + start, first + stop)]
            queries.append(first + stop)
            ends.append(ends[-1] + shared + stop - start)
    starts = torch.tensor([queries, ends], dtype=torch.int32)
    return attention.Paths(torch.from_numpy(np.concatenate(keys)), starts, int(np.diff(ends).max()))


def takes_paths(model: Any, lay_out: Callable[[Tensor], attention.Paths | Spread] = paths_of) -> bool:
    """Whether paths in place of a mask do for this model, by a trial of both; on a GPU in half precision, which alone
    takes them there. Answers that are laid apart attend to everything before them, so that no layer may see less."""
    device, config = next(model.parameters()).device, bare(model).config
    if config._attn_implementation != attention.NAME or (lay_out is spread_of and _window(config.get_text_config())):
        return False
    on_gpu = device.type == "cuda"
    half: Any = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()
    tokens = torch.arange(3, 27, device=device).unsqueeze(0)
    branches = torch.tensor([[TRUNK] * 8 + [1] * 8 + [2] * 8])
    positions = torch.tensor([[*range(16), *range(8, 16)]], device=device)
    laid: Any = lay_out(branches)
    paths = type(laid)(*(each.to(device) if isinstance(each, Tensor) else each for each in laid))
    branches = branches.to(device)
    try:
        with torch.no_grad(), half:
            masked = hidden_states(model, tokens, positions, branch_mask(model, positions, branches))
            found = hidden_states(model, tokens, positions, documents=paths)
    except (TypeError, ValueError, RuntimeError) as error:
        warnings.warn(f"branches are masked: {first_line(error)}", stacklevel=2)
        return False
    gap = float((masked - found).float().abs().max() / masked.float().abs().max())
    return gap < (HALF_TOLERANCE if on_gpu else FORWARD_TOLERANCE)


def _by_layer(config: Any, whole: Any, near: Any) -> Any:
    """Masks for families whose layers see differently far; one mask for the others."""
    if kinds := set(getattr(config, "layer_types", None) or ()):
        return {"full_attention": whole, **({"sliding_attention": near} if "sliding_attention" in kinds else {})}
    return near


def _window(config: Any) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _blocks(positions: Tensor, branches: Tensor, window: int | None) -> Any:
    """The same as blocks, of which flex attention leaves out those in which nobody sees anybody."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, who: Tensor, whom: Tensor) -> Tensor:
        theirs = branches[row, whom]
        seen = (who >= whom) & ((theirs == TRUNK) | (theirs == branches[row, who]))
        return seen & (positions[row, who] - positions[row, whom] < window) if window else seen

    rows, length = positions.shape
    return create_block_mask(sees, rows, None, length, length, device=positions.device.type)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
