"""Compute a layer again in its backward pass: all of it, or all but its matrix products and its attention.

Norms, rotations, activations and casts are most of what a layer keeps, and next to none of its arithmetic. The
checkpoint is inside the layer's own forward, so that a compiler sees the layer and its checkpoint as one piece (the
last product, which nothing asks for, is not done again), and whatever gathers the layer's weights does so around both.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from modelwright.errors import ModelError

OF_OUR_OWN = ("modelwright::low_rank_gate",)
"""Products under other names, of a layer's whole gated part; the names of all others end in mm."""
RANDOM = ("drop", "jitter", "noise")
"""How modules call the rates of what they draw at random, beside torch's own p."""
THIN = 8
"""A product whose result is more than so many times as wide as what it adds up is thin: that of a low-rank matrix, or
the scores of attention that is written out."""


def recompute(layers: nn.ModuleList, keep_products: bool) -> None:
    """Let each layer be computed again in training; what moves in them must have been said before."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    for layer in layers:
        moves = any(weight.requires_grad for weight in layer.parameters())
        random = draws(layer)
        products = Products(random) if keep_products else None
        layer.__dict__["forward"] = partial(_forward, layer, layer.forward, products, moves, random)


def _is_news(record: logging.LogRecord) -> bool:
    """The compiler says that nothing may be changed in its place, whether anything is or not; here nothing is."""
    return "context_fn" not in str(record.msg)


def take_back(model: nn.Module) -> None:
    """Let every layer keep all again."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _forward:
            del module.__dict__["forward"]


def _forward(
    layer: nn.Module, forward: Callable[..., Any], products: Products | None, moves: bool, random: bool,
    *given: Any, **more: Any,
) -> Any:  # fmt: skip
    """The layer's forward pass; where nothing is learnt from it, as it always was."""
    asks = moves or any(isinstance(each, Tensor) and each.requires_grad for each in (*given, *more.values()))
    if not (asks and layer.training and torch.is_grad_enabled()):
        return forward(*given, **more)
    if more.get("past_key_values") is not None:
        more["past_key_values"] = None  # what is remembered would be remembered twice, and nobody asks for it here
    wishes: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if products is not None:
        wishes["context_fn"] = _for_the_compiler if torch.compiler.is_compiling() else products.contexts
    return checkpoint(forward, *given, **wishes, **more)


def draws(model: nn.Module) -> bool:
    """Whether a model drops out or adds noise: then that is done again as it was, which recorded steps cannot do."""
    told = (fact for part in model.modules() for fact in vars(part).items())
    rates = (rate for name, rate in told if name == "p" or any(word in name for word in RANDOM))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


@cache
def kind_of(operation: Any) -> str:
    """Whether an operation is a product or attention, whichever kernel computes it, or changes what it is given."""
    name = operation.name().partition(".")[0]
    if getattr(getattr(operation, "_schema", None), "is_mutable", False):
        return "change"
    if name.endswith("mm"):
        return "added product" if "add" in name else "product"
    return "attention" if "attention" in name or "attn" in name or name in OF_OUR_OWN else ""


def is_kept(operation: Any, args: Any) -> bool:
    """Whether the result of an operation is kept: a product that adds up next to nothing is had again for less."""
    kind = kind_of(operation)
    if kind not in ("product", "added product"):
        return kind == "attention"
    first, second = args[1:3] if kind == "added product" else args[:2]
    return bool(second.shape[-1] <= THIN * first.shape[-1])


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _for_the_compiler() -> Any:
    """The same in the compiler's terms; it keeps only those products that the backward pass asks for."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


# what is compiled is kept under this name, which has to change where the policy does
_for_the_compiler.cache_hash = f"products up to {THIN} times as wide, attention, {OF_OUR_OWN}"  # type: ignore[attr-defined]


class Products:
    """What one layer keeps of its products, where it is not compiled.

    Going over a layer again ends where nothing more is needed, which is before its last product in most families. That
    is taken for granted in the first step, and known afterwards: what was asked for is kept, and no more.
    """

    def __init__(self, random: bool = False) -> None:
        """random: whether the layer draws; attention may too, and must do so again for what is drawn after it."""
        self.asked: int | None = None
        self._random = random

    def keeps(self, operation: Any, args: Any) -> bool:
        """Whether the result of an operation is kept."""
        kind = kind_of(operation)
        return bool(kind) and not (self._random and kind == "attention") and is_kept(operation, args)

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """One for the forward pass, one for going over it again."""
        kept: deque[Any] = deque()
        return _Keeping(self, kept), _Giving(self, kept)


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor
    version: int

    @classmethod
    def of(cls, made: Tensor) -> _Kept:
        """An alias: the tensor itself will know what it was made of, and that knows of what is kept."""
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return cls(made.detach(), made._version)  # whose count of changes, without the guard, would be its own

    def as_it_was(self) -> Tensor:
        if self.tensor._version != self.version:
            raise ModelError("model: a layer's product was changed outside of it; use gradient_checkpointing: true")
        return self.tensor


class _Watching(TorchDispatchMode):
    """Sees every operation of a layer; a compiled piece inside of it is computed again as a whole."""

    supports_higher_order_operators = True

    def __init__(self, products: Products, kept: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._kept, self._given = products, kept, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every call, against a compiler that is not at work here


class _Keeping(_Watching):  # type: ignore[no-untyped-call]
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._products.asked is None and self._kept:
            self._kept.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind_of(func) == "change":
            self._set_apart((*args, *(kwargs or {}).values()))
        made = func(*args, **kwargs) if kwargs else func(*args)
        if self._products.keeps(func, args):
            asked = self._products.asked
            if asked is None or len(self._kept) < asked:
                self._kept.append(tree_map_only(Tensor, _Kept.of, made))
        return made

    def _set_apart(self, given: tuple[Any, ...]) -> None:
        """Copy what is kept in a place that is about to be changed; views of it do not count their changes together."""
        places = {each.untyped_storage()._cdata for each in given if isinstance(each, Tensor)}

        def own(kept: _Kept) -> _Kept:
            shared = kept.tensor.untyped_storage()._cdata in places
            return _Kept.of(kept.tensor.clone()) if shared else kept

        for number, each in enumerate(self._kept):
            self._kept[number] = tree_map_only(_Kept, own, each)


class _Giving(_Watching):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._products.keeps(func, args):
            self._given += 1
            self._products.asked = max(self._products.asked or 0, self._given)
            if self._kept:  # or it was never asked for before
                return tree_map_only(_Kept, _Kept.as_it_was, self._kept.popleft())
        return func(*args, **kwargs) if kwargs else func(*args)
