"""Operations of our own that a compiler takes as they are.

torch's `custom_op` asks so much about each call that it costs the host 24 to 28 microseconds, where the product itself
is launched in 6: in a fine-tune of 3 B, which calls 500 of them a step, a third of the step. These cost 10, and have no
gradient of their own: a `torch.autograd.Function` says how they are learnt from. torch keeps no traces of layers with
such functions between two starts, but what it compiled of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("modelwright", "FRAGMENT")  # type: ignore[no-untyped-call]


def operation(schema: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an operation of a function that changes nothing. like: what it gives, without computing it."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"modelwright::{name}", like, lib=_LIBRARY)
        made: Callable[..., Any] = getattr(torch.ops.modelwright, name).default
        return made

    return make
