"""Say which weights move: all, named parts, or low-rank matrices beside frozen ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from modelwright.errors import ModelError, first_line
from modelwright.models import low_rank
from modelwright.models.recompute import recompute, take_back
from modelwright.recipe.training import Checkpointing, Parts


@dataclass(frozen=True)
class Share:
    """How much of a model moves."""

    trained: int
    """Parameters that move."""
    total: int
    """Parameters in all."""

    def __str__(self) -> str:
        millions = f"{self.trained / 1e6:,.1f} M of {self.total / 1e6:,.1f} M"
        return f"{millions} parameters move ({self.trained / self.total:.2%})"


def set_trainable(model: Any, parts: Parts) -> Any:
    """Freeze what does not move; returns the model to train, wrapped where LoRA is asked for."""
    if parts.trainable.untie_head:
        untie_head(model)
    if parts.trainable.lora:
        return low_rank.shorten(add_lora(model, parts))
    if parts.trainable.partial:
        model.requires_grad_(False)
        for module in _moving_parts(model, parts):
            module.requires_grad_(True)
    return model


def recompute_activations(model: Any, how: Checkpointing) -> None:
    """Recompute activations in the backward pass, all of them or all but products, whatever was said before.

    Where the layers are not found, the library does it. It also makes the embeddings ask for a gradient, which the old,
    reentrant form needed; it would drag the backward pass through every frozen layer, so that is taken back.
    """
    take_back(model)
    if how == "selective" or (how and finds_layers(model)):
        recompute(decoder_layers(model), keep_products=how == "selective")
    elif how:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.disable_input_require_grads()


def share(model: nn.Module) -> Share:
    """Count what moves; weights that are shared count once."""
    weights = list(model.parameters())
    trained = sum(w.numel() for w in weights if w.requires_grad)
    # two weights of four bits stand in one byte
    return Share(trained, sum(w.numel() * (2 if type(w).__name__ == "Params4bit" else 1) for w in weights))


def untie_head(model: Any) -> None:
    """Give the head its own copy of the weights it shares with the embeddings."""
    head = model.get_output_embeddings()
    if head is None or not model.config.tie_word_embeddings:
        return
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The transformer layers, in order."""
    if (found := _layers(model)) is not None:
        return found
    raise ModelError(
        "model: its transformer layers were not found, which last_layers and selective checkpointing ask for; "
        "use trainable: all, and gradient_checkpointing: true or false"
    )


def finds_layers(model: nn.Module) -> bool:
    """Whether the transformer layers are where they are looked for."""
    return _layers(model) is not None


def _layers(model: nn.Module) -> nn.ModuleList | None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    wanted = getattr(config, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    return None


def _moving_parts(model: Any, parts: Parts) -> list[nn.Module]:
    wish = parts.trainable
    moving: list[nn.Module] = []
    if wish.last_layers:
        layers = decoder_layers(model)
        if wish.last_layers > len(layers):
            raise ModelError(
                f"model: trainable.last_layers is {wish.last_layers}, but the model has {len(layers)} layers"
            )
        moving += list(layers[len(layers) - wish.last_layers :])
    if wish.head:
        moving.append(model.get_output_embeddings())
    if wish.norms:
        moving += [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return moving


def add_lora(model: Any, parts: Parts) -> Any:
    """The model with low-rank matrices beside its frozen ones, as peft computes them."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=parts.lora_r,
        lora_alpha=parts.lora_alpha,
        lora_dropout=parts.lora_dropout,
        target_modules=parts.lora_target_modules,
        use_dora=parts.use_dora,
        use_rslora=parts.use_rslora,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        raise ModelError(f"model: LoRA could not be added ({first_line(error)})") from None
