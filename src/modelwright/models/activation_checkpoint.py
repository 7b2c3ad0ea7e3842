"""Full and selective activation checkpointing of decoder layers, eager and compiled.

Pretraining of a 6.08 B model, 32 × 2048 tokens a step: selective 15,705 tokens/s in 119 GB, full 12,912 in 81 GB, none
16,302 in 139 GB (H200, 2026-11-16, `python -m benchmarks.speed --work 6b`; `benchmarks.ablation --only
selective-checkpointing`). Layers that are not compiled have contexts of our own: torch's are as fast in 111 instead of
107 GB, but with them a layer that changes a product in place has wrong gradients without an error.
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
from modelwright.models.trainable import decoder_layers, has_decoder_layers
from modelwright.recipe.stage_specs import CheckpointingMode


def enable_activation_checkpointing(model: Any, mode: CheckpointingMode) -> None:
    """Set full, selective or no activation checkpointing.

    If the layers are not found, transformers does it. It also makes the embeddings require a gradient, for reentrant
    checkpointing; that would extend the backward pass through all frozen layers, so it is disabled again.
    """
    disable_activation_checkpointing(model)
    if mode == "selective" or (mode and has_decoder_layers(model)):
        checkpoint_layers(decoder_layers(model), selective=mode == "selective")
    elif mode:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.disable_input_require_grads()


CUSTOM_MATMULS = ("modelwright::fused_lora_mlp",)
"""Custom operations that contain matmuls; the names of all other matmuls end in mm."""
DROPOUT_NAMES = ("drop", "jitter", "noise")
"""Name parts of dropout and noise rates of modules, besides torch's p."""
MAX_EXPANSION = 8
"""A matmul whose output is more than so many times as wide as its inner dimension is cheap to recompute: LoRA, or the
scores of eager attention."""


def checkpoint_layers(layers: nn.ModuleList, selective: bool) -> None:
    """Checkpoint each layer in training; which weights are trained must be set before."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_relevant)
    for layer in layers:
        is_trainable = any(weight.requires_grad for weight in layer.parameters())
        dropout = has_dropout(layer)
        saved_matmuls = SavedMatmuls(dropout) if selective else None
        options = (layer, layer.forward, saved_matmuls, is_trainable, dropout)
        layer.__dict__["forward"] = partial(_checkpointed_forward, *options)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Drop torch.compile's warning that context_fn must not mutate: ours does not."""
    return "context_fn" not in str(record.msg)


def disable_activation_checkpointing(model: nn.Module) -> None:
    """Save all activations again."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _checkpointed_forward:
            del module.__dict__["forward"]


def _checkpointed_forward(
    layer: nn.Module, forward: Callable[..., Any], saved_matmuls: SavedMatmuls | None, is_trainable: bool,
    dropout: bool, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """The layer's forward pass, checkpointed if it needs a gradient."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    needs_grad = is_trainable or any(tensor.requires_grad for tensor in tensors)
    if not (needs_grad and layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if kwargs.get("past_key_values") is not None:
        kwargs["past_key_values"] = None  # the recomputation would append to the cache again
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if saved_matmuls is not None:
        options["context_fn"] = _compiled_contexts if torch.compiler.is_compiling() else saved_matmuls.contexts
    return checkpoint(forward, *args, **options, **kwargs)


def has_dropout(model: nn.Module) -> bool:
    """Whether a model has dropout or noise, so that recomputation must restore the RNG state; CUDA graphs cannot."""
    attributes = (attribute for part in model.modules() for attribute in vars(part).items())
    rates = (rate for name, rate in attributes if name == "p" or any(pattern in name for pattern in DROPOUT_NAMES))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


@cache
def op_kind(operation: Any) -> str:
    """The kind of an operation: product, added product (addmm), attention, change (in place), or empty."""
    name = operation.name().partition(".")[0]
    if getattr(getattr(operation, "_schema", None), "is_mutable", False):
        return "change"
    if name.endswith("mm"):
        return "added product" if "add" in name else "product"
    return "attention" if "attention" in name or "attn" in name or name in CUSTOM_MATMULS else ""


def is_saved(operation: Any, args: Any) -> bool:
    """Whether the output of an operation is saved: attention, and matmuls but those with a small inner dimension."""
    kind = op_kind(operation)
    if kind not in ("product", "added product"):
        return kind == "attention"
    first, second = args[1:3] if kind == "added product" else args[:2]
    return bool(second.shape[-1] <= MAX_EXPANSION * first.shape[-1])


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _compiled_contexts() -> Any:
    """The same policy for torch.compile, which saves only those matmuls that the backward pass needs."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


# part of the key of the compile cache: must change with the policy
_compiled_contexts.cache_hash = f"products up to {MAX_EXPANSION} times as wide, attention, {CUSTOM_MATMULS}"  # type: ignore[attr-defined]


class SavedMatmuls:
    """Which matmul outputs one eager layer saves.

    Recomputation stops as soon as all saved tensors exist, in most families before the last matmul. The first step
    assumes that and records how many were needed; later steps save only those.
    """

    def __init__(self, dropout: bool = False) -> None:
        """With dropout attention is recomputed, since it may draw random numbers too."""
        self.last_needed: int | None = None
        self._dropout = dropout

    def saves(self, operation: Any, args: Any) -> bool:
        """Whether the output of an operation is saved."""
        kind = op_kind(operation)
        return bool(kind) and not (self._dropout and kind == "attention") and is_saved(operation, args)

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Contexts of the forward pass and of the recomputation."""
        saved: deque[Any] = deque()
        return _SaveMode(self, saved), _RestoreMode(self, saved)


@dataclass(frozen=True)
class _SavedTensor:
    tensor: Tensor
    version: int

    @classmethod
    def save(cls, tensor: Tensor) -> _SavedTensor:
        """Save a detached alias, since the tensor itself would keep its autograd graph alive."""
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return cls(tensor.detach(), tensor._version)  # the guard shares the version counter

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise ModelError("model: a layer's product was changed outside of it; use gradient_checkpointing: true")
        return self.tensor


class _MatmulMode(TorchDispatchMode):
    """Intercepts every operation of a layer; a compiled part of it is recomputed as one operation."""

    supports_higher_order_operators = True

    def __init__(self, saved_matmuls: SavedMatmuls, saved: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved_matmuls, self._saved, self._restored = saved_matmuls, saved, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping dynamo would wrap every call, and nothing is compiled here


class _SaveMode(_MatmulMode):  # type: ignore[no-untyped-call]
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._saved_matmuls.last_needed is None and self._saved:
            self._saved.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_kind(func) == "change":
            self._copy_before_inplace((*args, *(kwargs or {}).values()))
        out = func(*args, **kwargs) if kwargs else func(*args)
        if self._saved_matmuls.saves(func, args):
            last_needed = self._saved_matmuls.last_needed
            if last_needed is None or len(self._saved) < last_needed:
                self._saved.append(tree_map_only(Tensor, _SavedTensor.save, out))
        return out

    def _copy_before_inplace(self, args: tuple[Any, ...]) -> None:
        """Copy saved tensors whose storage is about to be changed; views do not share their version counter."""
        storages = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}

        def own(saved: _SavedTensor) -> _SavedTensor:
            shared = saved.tensor.untyped_storage()._cdata in storages
            return _SavedTensor.save(saved.tensor.clone()) if shared else saved

        for number, each in enumerate(self._saved):
            self._saved[number] = tree_map_only(_SavedTensor, own, each)


class _RestoreMode(_MatmulMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._saved_matmuls.saves(func, args):
            self._restored += 1
            self._saved_matmuls.last_needed = max(self._saved_matmuls.last_needed or 0, self._restored)
            if self._saved:  # empty if it was not needed before
                return tree_map_only(_SavedTensor, _SavedTensor.unpack, self._saved.popleft())
        return func(*args, **kwargs) if kwargs else func(*args)
