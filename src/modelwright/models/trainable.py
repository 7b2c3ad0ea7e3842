"""Choose which weights train: freezing, an untied LM head, LoRA, and the fused LoRA MLP.

The fused LoRA MLP, on an 8 B model with 4 × 4096 tokens a step: 16,432 instead of 15,913 tokens/s, 78 instead of 93 GB;
its Triton kernels bring all of the speed, the operation itself all of the memory (H200, 2026-11-17, `python -m
benchmarks.ablation --only fused-lora-mlp`).
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.nn.modules.module import register_module_forward_hook

from modelwright.errors import ModelError, first_line
from modelwright.models import trust
from modelwright.models.attention import hidden_states, probe_tokens
from modelwright.recipe.sections import FUSED_LORA_RANKS, MLP_LINEARS, ParameterCount
from modelwright.recipe.stage_specs import TrainableConfig, matching_paths


def set_trainable(model: Any, parts: TrainableConfig) -> Any:
    """Freeze what is not trained; returns the model to train, a peft wrapper with LoRA."""
    if parts.trainable.untie_lm_head:
        untie_head(model)
    if parts.trainable.lora:
        return install_fused_lora_mlp(add_lora(model, parts))
    if parts.trainable.is_partial:
        model.requires_grad_(False)
        for module in _trainable_modules(model, parts):
            module.requires_grad_(True)
    return model


def disable_dropout(model: nn.Module) -> None:
    """Turn off every dropout in training; the config stays, as it is saved with the model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # functional dropout, as in attention
                setattr(module, name, 0.0)


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count parameters; tied weights count once."""
    weights = list(model.parameters())
    trained = sum(w.numel() for w in weights if w.requires_grad)
    # 4-bit weights are packed two to a byte
    return ParameterCount(trained, sum(w.numel() * (2 if type(w).__name__ == "Params4bit" else 1) for w in weights))


def untie_head(model: Any) -> None:
    """Give the LM head its own copy of the tied weights."""
    head = model.get_output_embeddings()
    if head is None or not model.config.tie_word_embeddings:
        return
    head = getattr(head, "base_layer", head)  # of a LoRA layer, the linear inside
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def merge_lora(model: Any) -> Any:
    """A peft model's adapter merged into its weights; any other model as it is.

    LoRA on one of two tied matrices must not change the other: the head then gets weights of its own.
    """
    if not hasattr(model, "merge_and_unload"):
        return model
    base = model.get_base_model()
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    if base.config.tie_word_embeddings and any(hasattr(module, "lora_A") for module in (head, embeddings)):
        untie_head(base)
    return model.merge_and_unload().requires_grad_(True)  # peft had frozen all of it


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The transformer layers, in order."""
    if (layers := _layers(model)) is not None:
        return layers
    raise ModelError(
        "model: its transformer layers were not found, which last_layers and selective checkpointing ask for; "
        "use trainable: all, and gradient_checkpointing: true or false"
    )


def has_decoder_layers(model: nn.Module) -> bool:
    """Whether `decoder_layers` finds the transformer layers."""
    return _layers(model) is not None


def _layers(model: nn.Module) -> nn.ModuleList | None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_layers = getattr(config, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    return None


def _trainable_modules(model: Any, parts: TrainableConfig) -> list[nn.Module]:
    selection = parts.trainable
    modules: list[nn.Module] = []
    if last := selection.last_layers:
        layers = decoder_layers(model)
        if last > len(layers):
            raise ModelError(f"model: trainable.last_layers is {last}, but the model has {len(layers)} layers")
        modules += list(layers[len(layers) - last :])
    if selection.lm_head:
        modules.append(model.get_output_embeddings())
    if selection.norms:
        modules += [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return modules


def add_lora(model: Any, parts: TrainableConfig) -> Any:
    """The model with LoRA by peft."""
    from peft import LoraConfig, get_peft_model

    targets = parts.lora_target_modules
    names = {name: matching_paths(model.named_modules(), name) for name in targets if isinstance(targets, list)}
    settings = LoraConfig(**parts.peft_settings(model))
    try:
        is_meta = next(model.parameters()).is_meta
        adapted = get_peft_model(model, settings, low_cpu_mem_usage=is_meta)
        unused = [] if is_meta else unused_adapters(adapted)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        hint = "; experts want lora_dropout: 0" if "lora_dropout" in str(error) else ""
        raise ModelError(f"model: LoRA could not be added ({first_line(error)}){hint}") from None
    for name, layers in names.items():
        if left_out := set(layers) & set(_unadapted(adapted)):
            raise ModelError(f"model: lora_target_modules names {name}, but peft does not adapt {min(left_out)}")
    parts.require_target_layers(adapted)
    if unused:
        reason = f"LoRA of {unused[0]} would change nothing, since the model reads its weight without calling it"
        raise ModelError(f"model: {reason}; leave it out of lora_target_modules")
    return adapted


def _unadapted(adapted: Any) -> list[str]:
    """Names of linear layers, but the LM head, and of weights of experts that have no adapter."""
    base = adapted.get_base_model()
    head = base.get_output_embeddings()
    linears = [name for name, each in base.named_modules() if isinstance(each, nn.Linear) and each is not head]
    experts = [name for name, weight in base.named_parameters() if weight.ndim == 3 and not name.endswith(".weight")]
    return [name for name in (*linears, *experts) if "base_layer" not in name and LORA_PREFIX not in name]


def describe_lora(folder: Path, parts: TrainableConfig) -> list[str]:
    """A line about what LoRA adapts in the model of a folder; none for a model that cannot be built on meta."""
    from transformers import AutoConfig, AutoModelForCausalLM

    trust.check_model(folder)
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # transformers raises many classes; the stage reports them when it loads the model
        return []
    adapted = add_lora(model, parts)
    targets = [*adapted.base_model.targeted_module_names, *adapted.base_model.targeted_parameter_names]
    left_out = _unadapted(adapted) if parts.lora_target_modules == "all-linear" else []
    names = {f"adapts {len(targets)} weights:": targets, "leaves out": left_out}
    kinds = {verb: dict.fromkeys(re.sub(r"^.*\.\d+\.", "", path) for path in names[verb]) for verb in names}
    return [f"LoRA {verb} {', '.join(kinds[verb])}" for verb in kinds if kinds[verb]]


@torch.no_grad()
def unused_adapters(model: Any) -> list[str]:
    """Names of adapted layers that a forward pass does not call though it calls their parent (dt_proj of Jamba)."""
    called: set[int] = set()
    hook = register_module_forward_hook(lambda module, _inputs, _output: called.add(id(module)))
    tokens = probe_tokens(model)
    try:
        hidden_states(model, tokens, torch.arange(tokens.shape[1], device=tokens.device)[None])
    finally:
        hook.remove()
    parents = (parent for parent in model.modules() if id(parent) in called)
    children = (pair for parent in parents for pair in parent.named_children())
    return [name for name, child in children if hasattr(child, "lora_A") and id(child) not in called]


SILU_GATED_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"}
"""MLP classes that are exactly down(silu(gate(x)) · up(x))."""
LORA_PREFIX = "lora_"
"""Prefix of LoRA module names."""
SILU_ACTIVATIONS = {"SiLU", "SiLUActivation"}
HAS_TRITON = find_spec("triton") is not None
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("modelwright::fused_lora_mlp", mutates_args=())
def fused_lora_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
    gate_a: Tensor, gate_b: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The MLP output without the LoRA of down, the input of down's lora_B, and tensors for the backward pass.

    down's LoRA is added outside: added to an output already rounded to bf16, a small update would be lost (with values
    of 1e-4 in lora_B, a fifth of the updates did not reach the loss).
    """
    lora_inner = linear(x, torch.cat((gate_a, up_a))).mul_(scale)
    gate, up = x @ gate_weight.T, x @ up_weight.T
    act = _swiglu(gate, up, lora_inner, gate_b, up_b)
    return act @ down_weight.T, linear(act, down_a).mul_(scale), gate, up, lora_inner


@torch.library.custom_op("modelwright::fused_lora_mlp_backward", mutates_args=())
def fused_lora_mlp_backward(
    grad_out: Tensor, grad_down_lora_inner: Tensor, x: Tensor, gate: Tensor, up: Tensor, lora_inner: Tensor,
    gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
    gate_a: Tensor, gate_b: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    """The gradients of x and of the five LoRA matrices."""
    rank, scaled_grad = gate_a.shape[0], grad_down_lora_inner * scale
    grad_act = grad_out @ down_weight
    down_a_t = down_a.T.contiguous()
    d_gate, d_up, sums = _swiglu_backward(gate, up, lora_inner, gate_b, up_b, grad_act, scaled_grad, down_a_t)
    grad_lora_inner = torch.cat((d_gate @ gate_b, d_up @ up_b), 1).mul_(scale)
    d_x = d_gate @ gate_weight
    d_x.addmm_(d_up, up_weight)
    d_x.addmm_(grad_lora_inner, torch.cat((gate_a, up_a)))
    d_a = grad_lora_inner.T @ x
    d_gate_b, d_up_b, d_down_a = sums[0].clone(), sums[1].clone(), sums[2].T.contiguous()
    return d_x, d_a[:rank].clone(), d_gate_b, d_a[rank:].clone(), d_up_b, d_down_a


@fused_lora_mlp.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gate_a: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows, wide, rank = x.shape[0], gate.shape[0], gate_a.shape[0]
    widths = (down.shape[0], rank, wide, wide, 2 * rank)
    return tuple(x.new_empty(rows, width) for width in widths)


@fused_lora_mlp_backward.register_fake
def _(out: Tensor, thin: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in (x, *rest[6:11]))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], *output[2:], *inputs[1:9])
    ctx.scale = inputs[9]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad_out: Tensor, grad_down_lora_inner: Tensor, *_: Any) -> tuple[Any, ...]:
    d_x, *d_lora = fused_lora_mlp_backward(
        grad_out.contiguous(), grad_down_lora_inner.contiguous(), *ctx.saved_tensors, ctx.scale
    )
    return d_x, None, None, None, *d_lora, None


fused_lora_mlp.register_autograd(_autograd_backward, setup_context=_save_for_backward)


def _swiglu(gate: Tensor, up: Tensor, lora_inner: Tensor, gate_b: Tensor, up_b: Tensor) -> Tensor:
    if gate.is_cuda:
        from modelwright.models.kernels import swiglu_lora

        return swiglu_lora(gate, up, lora_inner, gate_b, up_b)
    first, second = lora_inner.float().chunk(2, 1)
    return (silu(gate + first @ gate_b.float().T) * (up + second @ up_b.float().T)).to(gate.dtype)


def _swiglu_backward(
    gate: Tensor, up: Tensor, lora_inner: Tensor, gate_b: Tensor, up_b: Tensor,
    grad_act: Tensor, scaled_grad: Tensor, down_a: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of gate and up, and of gate_b, up_b and down_a (here [inner, rank]) as [3, inner, rank]."""
    if gate.is_cuda:
        from modelwright.models.kernels import swiglu_lora_backward

        return swiglu_lora_backward(gate, up, lora_inner, gate_b, up_b, grad_act, scaled_grad, down_a)
    first, second = lora_inner.chunk(2, 1)
    gate, up, grad_act = gate + first @ gate_b.T, up + second @ up_b.T, grad_act + scaled_grad @ down_a.T
    sigmoid = torch.sigmoid(gate)
    act = gate * sigmoid
    d_gate, d_up = grad_act * up * sigmoid * (1 + gate * (1 - sigmoid)), grad_act * act
    return d_gate, d_up, torch.stack((d_gate.T @ first, d_up.T @ second, (act * up).T @ scaled_grad))


def install_fused_lora_mlp(model: Any) -> Any:
    """Use the fused LoRA MLP in all layers that support it; returns the model."""
    from peft.tuners.lora.layer import Linear

    for layer in model.modules():
        is_swiglu = type(layer).__name__ in SILU_GATED_MLPS and type(layer.act_fn).__name__ in SILU_ACTIVATIONS
        if is_swiglu and all(type(getattr(layer, name)) is Linear for name in MLP_LINEARS):
            layer.forward = MethodType(_mlp_forward, layer)
    return model


def _mlp_forward(layer: Any, x: Tensor) -> Tensor:
    linears = [getattr(layer, name) for name in MLP_LINEARS]
    fusable = HAS_TRITON and x.is_cuda and all(is_fusable(each, x.dtype) for each in linears)
    if not fusable or len({(rank_and_scaling(each), each.disable_adapters) for each in linears}) != 1:
        out: Tensor = type(layer).forward(layer, x)
        return out
    frozen = [each.base_layer.weight for each in linears]
    *lora, down_b = [weight for each in linears for weight in lora_weights(each)]
    adapters_off = linears[0].disable_adapters
    if adapters_off:  # zero LoRA: the reference rounds as the policy does, equal to the bit while lora_B is zero
        lora = [torch.zeros_like(weight) for weight in lora]
    rows, down_lora_inner, *_ = fused_lora_mlp(x.flatten(0, -2), *frozen, *lora, rank_and_scaling(linears[0])[1])
    out = rows if adapters_off else rows + linear(down_lora_inner, down_b)
    return out.view(*x.shape[:-1], rows.shape[-1])


def is_fusable(linear: Any, dtype: torch.dtype) -> bool:
    """Whether a linear is a frozen bf16 weight plus plain LoRA in bf16."""
    adapters = getattr(linear, "active_adapters", [])
    if len(adapters) != 1 or adapters[0] not in linear.r or linear.merged or adapters[0] in linear.lora_variant:
        return False
    base, outer = linear.base_layer, linear.lora_B[adapters[0]]
    # linears of an abandoned fp8 trial have a plain forward in their __dict__
    usual = type(base) is nn.Linear or (isinstance(base, nn.Linear) and "forward" in base.__dict__)
    bare = usual and base.bias is None and outer.bias is None and not base.weight.requires_grad
    alone = isinstance(linear.lora_dropout[adapters[0]], nn.Identity) and linear.r[adapters[0]] in FUSED_LORA_RANKS
    weights = (base.weight, *lora_weights(linear))
    return bare and alone and all(weight.dtype == dtype == torch.bfloat16 for weight in weights)


def lora_weights(linear: Any) -> tuple[Tensor, Tensor]:
    """lora_A and lora_B: [rank, in], [out, rank]."""
    adapter = linear.active_adapters[0]
    return linear.lora_A[adapter].weight, linear.lora_B[adapter].weight


def rank_and_scaling(linear: Any) -> tuple[int, float]:
    """Rank and scaling of LoRA."""
    adapter = linear.active_adapters[0]
    return linear.r[adapter], linear.scaling[adapter]
