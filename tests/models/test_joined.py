"""Queries, keys and values come out of one product where a layer is compiled, and are what three would be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters

from modelwright.models import joined, trainable
from modelwright.recipe.schema import Lora

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "query_pre_attn_scalar": 8,
}  # fmt: skip
FAMILIES = {
    "llama": "LlamaAttention", "mistral": "MistralAttention", "qwen2": "Qwen2Attention", "qwen3": "Qwen3Attention",
    "smollm3": "SmolLM3Attention", "gemma": "GemmaAttention", "gemma2": "Gemma2Attention",
    "gemma3_text": "Gemma3Attention",
}  # fmt: skip
TOKENS = torch.arange(48).reshape(2, 24) % 64


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Nothing compiled before is found, and nothing compiled here is left."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    how = "eager" if family == "gemma2" else "sdpa"  # which does more than sdpa can
    config = AutoConfig.for_model(family, **SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation=how).train()


def compiled(model: Any) -> list[str]:
    """Compile each layer as the engine does; returns where the graphs will be told."""
    seen: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        seen.append(graph.print_readable(print_output=False))
        return aot_eager(graph, inputs)

    layers = model.get_base_model().model.layers if hasattr(model, "get_base_model") else model.model.layers
    for layer in layers:
        layer.compile(backend=keep)
    return seen


def learnt(model: Any) -> list[Tensor]:
    """The loss, and all gradients."""
    loss = model(input_ids=TOKENS.to(model.device), labels=TOKENS.to(model.device), use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def test_every_family_that_is_known_is_tried_here() -> None:
    assert set(FAMILIES.values()) == joined.KNOWN


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_one_product_is_what_three_are(family: str, name: str) -> None:
    plain = model_of(family)
    ours = joined.install(copy.deepcopy(plain))
    assert type(ours.model.layers[0].self_attn).__name__ == name
    seen = compiled(ours)
    torch.testing.assert_close(learnt(ours), learnt(plain), rtol=1e-5, atol=1e-6)
    assert seen and all(graph.count("modelwright.joined.default") == 1 for graph in seen)
    kinds = set(getattr(plain.config, "layer_types", None) or ["full_attention"])
    assert len(seen) <= len(kinds) + 1, "each layer is compiled anew"


def test_rows_of_another_length_are_no_reason_to_compile_again() -> None:
    ours = joined.install(model_of("llama"))
    seen = compiled(ours)
    for length in (24, 20, 16, 12, 7):
        ours(input_ids=TOKENS[:, :length], labels=TOKENS[:, :length], use_cache=False).loss.backward()
    assert len(seen) <= 2, "one length, then any"


def test_a_layer_that_is_not_compiled_is_left_as_it_is() -> None:
    plain = model_of("llama")
    ours = joined.install(copy.deepcopy(plain))
    for one, other in zip(learnt(ours), learnt(plain), strict=True):
        assert torch.equal(one, other)


def test_a_forward_that_others_have_given_is_left() -> None:
    ours = model_of("llama")
    linear = ours.model.layers[1].self_attn.q_proj
    theirs = linear.forward = lambda x: x[..., :32] * 2.0
    joined.install(ours)
    assert linear.forward is theirs and "forward" not in ours.model.layers[1].self_attn.__dict__
    assert "forward" in ours.model.layers[0].self_attn.__dict__


def test_weights_that_lie_together_are_multiplied_without_a_copy() -> None:
    plain = model_of("llama")
    ours = joined.install(copy.deepcopy(plain))
    joined.lay_together(ours.model.layers)
    attention = ours.model.layers[1].self_attn
    weights = [getattr(attention, name).weight for name in joined.NAMES]
    whole = joined._together(weights)
    assert whole.data_ptr() == weights[0].data_ptr() and torch.equal(whole, torch.cat(weights))
    weights[1].data.zero_()
    plain.model.layers[1].self_attn.k_proj.weight.data.zero_()
    assert not whole[len(weights[0]) : len(weights[0]) + len(weights[1])].any(), "it is no copy"
    joined.lay_together(ours.model.layers)
    assert joined._together(weights).data_ptr() == whole.data_ptr(), "what lies together is left there"
    compiled(ours)
    torch.testing.assert_close(learnt(ours), learnt(plain), rtol=1e-4, atol=1e-6)
    weights[2].data = weights[2].data.clone()
    assert joined._as_one(weights) is None and joined._as_one(weights[::-1]) is None


def test_frozen_weights_beside_low_rank_ones_lie_together_too(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    plain = trainable.add_lora(model_of("llama"), Lora.model_validate({"lora_target_modules": "all-linear"}))
    ours = joined.install(copy.deepcopy(plain))
    joined.lay_together(ours.modules())
    attention = ours.get_base_model().model.layers[0].self_attn
    assert joined._as_one([getattr(attention, name).base_layer.weight for name in joined.NAMES]) is not None
    ours.get_base_model().save_pretrained(tmp_path / "ours")
    plain.get_base_model().save_pretrained(tmp_path / "plain")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "plain"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("checkpointing", ["selective", True])
def test_what_is_computed_again_is_one_product_too(checkpointing: Any) -> None:
    plain = model_of("llama")
    ours = joined.install(copy.deepcopy(plain))
    trainable.recompute_activations(ours, checkpointing)
    seen = compiled(ours)
    torch.testing.assert_close(learnt(ours), learnt(plain), rtol=1e-5, atol=1e-6)
    assert all("modelwright.joined" in graph for graph in seen)


def test_low_rank_matrices_beside_are_joined_too() -> None:
    pytest.importorskip("peft")
    settings = Lora.model_validate({"lora_r": 16, "lora_target_modules": "all-linear", "lora_dropout": 0.0})
    plain = trainable.add_lora(model_of("llama"), settings).bfloat16()
    for name, weight in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ours = joined.install(copy.deepcopy(plain))
    seen = compiled(ours)
    found, expected = learnt(ours), learnt(plain)
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-3)
    # before the first layer nothing moves, so that it is compiled apart
    assert len(seen) <= 2 and all("modelwright.joined" in graph for graph in seen)
    with ours.disable_adapter(), plain.disable_adapter(), torch.no_grad():
        base = ours(input_ids=TOKENS, use_cache=False).logits
        torch.testing.assert_close(base, plain(input_ids=TOKENS, use_cache=False).logits, rtol=5e-2, atol=5e-2)


def test_weights_that_are_cast_on_the_way_are_joined_too() -> None:
    plain = model_of("llama")
    ours = joined.install(copy.deepcopy(plain))
    seen = compiled(ours)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(learnt(ours), learnt(plain), rtol=5e-2, atol=5e-3)
    assert "modelwright.joined" in seen[0]


def test_frozen_matrices_have_no_gradient() -> None:
    ours = joined.install(model_of("llama"))
    ours.model.layers[0].requires_grad_(False)
    ours.model.layers[1].self_attn.requires_grad_(False)
    compiled(ours)
    learnt(ours)
    assert ours.model.layers[0].self_attn.q_proj.weight.grad is None
    assert ours.model.layers[1].self_attn.k_proj.weight.grad is None
    assert ours.model.layers[2].self_attn.v_proj.weight.grad is not None
