"""Split a language model at its first moving layer: what the frozen layers below it say never changes.

Both halves run inside the model's own forward pass, with the layers of the other half passed over, so that masks,
rotations and norms stay the family's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from modelwright.models.attention import Paths
from modelwright.models.branches import branch_mask
from modelwright.models.text import bare, hidden_states
from modelwright.models.trainable import decoder_layers


class Trunk:
    """The frozen layers at the bottom of a model."""

    def __init__(self, model: Any, depth: int) -> None:
        """The first `depth` layers, which with everything below them must be frozen (see `frozen_depth`)."""
        self.model, self.depth = model, depth
        self._layers = list(decoder_layers(bare(model)))
        self._in_tuples = False

    @property
    def layers(self) -> int:
        """Layers in the whole model."""
        return len(self._layers)

    @torch.no_grad()
    def states(
        self, tokens: Tensor, positions: Tensor, branches: Tensor | None = None, documents: Paths | None = None
    ) -> Tensor:
        """What leaves the trunk: [rows, length, width]. Shapes as in `hidden_states` and `branch_mask`."""
        left: list[Tensor] = []

        def keep(_layer: nn.Module, _given: Any, output: Any) -> None:
            self._in_tuples = isinstance(output, tuple)
            left.append(output[0] if self._in_tuples else output)

        hook = self._layers[self.depth - 1].register_forward_hook(keep)
        try:
            with _passed_over(self._layers[self.depth :], lambda hidden_states, *_, **__: self._out(hidden_states)):
                hidden_states(self.model, tokens, positions, self._mask(positions, branches), documents)
        finally:
            hook.remove()
        return left[0]

    def above(
        self, states: Tensor, positions: Tensor, branches: Tensor | None = None, documents: Tensor | Paths | None = None
    ) -> Tensor:
        """What the whole model thinks before its head, from what left the trunk. states: [rows, length, width]."""
        with _passed_over(self._layers[: self.depth], lambda *_, **__: self._out(states)):
            return hidden_states(self.model, states, positions, self._mask(positions, branches), documents)

    def is_exact(self) -> bool:
        """Whether the two halves give the whole, to the last bit, on a few tokens."""
        device = next(self.model.parameters()).device
        words = bare(self.model).config.get_text_config().vocab_size
        tokens = torch.arange(3, 19, device=device).remainder(words).unsqueeze(0)
        positions = torch.arange(16, device=device).unsqueeze(0)
        with torch.no_grad():
            whole = hidden_states(self.model, tokens, positions)
            return torch.equal(self.above(self.states(tokens, positions), positions), whole)

    def _mask(self, positions: Tensor, branches: Tensor | None) -> Any:
        return None if branches is None else branch_mask(self.model, positions, branches)

    def _out(self, hidden: Tensor) -> Any:
        return (hidden,) if self._in_tuples else hidden


def frozen_depth(model: Any) -> int:
    """How many layers from the bottom are frozen with everything below them; 0 where something there moves."""
    core = bare(model)
    layers = decoder_layers(core)
    above = _weights_above(core, layers)
    if any(weight.requires_grad and id(weight) not in above for weight in core.parameters()):
        return 0
    moving = (place for place, layer in enumerate(layers) if any(w.requires_grad for w in layer.parameters()))
    return next(moving, len(layers))


def dropout_of(model: Any) -> str | None:
    """The setting by which the layers drop out at random in training, where one does: then nothing can be kept."""
    settings = bare(model).config.get_text_config().to_dict()
    drops = (
        name
        for name, value in settings.items()
        if "drop" in name and not name.startswith("classifier") and isinstance(value, int | float) and value > 0
    )
    return next(drops, None)


def _weights_above(core: Any, layers: nn.ModuleList) -> set[int]:
    """The weights of the layers and of what comes after them, by identity; shared with the embeddings, they do not."""
    parts: list[nn.Module] = [layers]
    for parent in core.modules():
        children = list(parent.children())
        if any(child is layers for child in children):
            place = next(place for place, child in enumerate(children) if child is layers)
            parts += children[place + 1 :]
    if (head := core.get_output_embeddings()) is not None:
        parts.append(head)
    below = {id(weight) for weight in core.get_input_embeddings().parameters()}
    return {id(weight) for part in parts for weight in part.parameters()} - below


@contextmanager
def _passed_over(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Let these layers answer with `forward` for a while, uncompiled; they stay where they are in the model."""
    before = [(layer.__dict__.get("forward"), layer._compiled_call_impl) for layer in layers]
    for layer in layers:
        layer.__dict__["forward"], layer.__dict__["_compiled_call_impl"] = forward, None
    try:
        yield
    finally:
        for layer, (own, call) in zip(layers, before, strict=True):
            del layer.__dict__["forward"]
            layer.__dict__["_compiled_call_impl"] = call
            if own is not None:
                layer.__dict__["forward"] = own
