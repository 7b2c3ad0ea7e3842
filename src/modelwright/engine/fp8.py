"""FP8 through torchao: the linear layers of the transformer multiply in 8 bits, forward and backward."""

from __future__ import annotations

from typing import Any

from torch import nn

from modelwright.engine.shard import layers_of
from modelwright.errors import UsageError

MULTIPLE = 16
"""FP8 products want every side of a matrix to be a multiple of this."""


def convert(module: nn.Module) -> int:
    """Let the linear layers inside the transformer's layers multiply in FP8; returns how many do.

    The head and the embeddings stay as they are: the loss is sensitive to them, and they gain least.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise UsageError("precision fp8 needs torchao: pip install 'modelwright[fp8]'") from None
    count = 0

    def suits(linear: Any, name: str) -> bool:
        nonlocal count
        fits = isinstance(linear, nn.Linear) and linear.in_features % MULTIPLE == linear.out_features % MULTIPLE == 0
        count += fits
        return fits

    for layer in layers_of(module):
        convert_to_float8_training(layer, config=Float8LinearConfig(), module_filter_fn=suits)
    return count
