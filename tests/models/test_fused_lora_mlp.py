"""The fused LoRA MLP gives the outputs and gradients of peft, and is used only where it can."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelwright.engine.precision import set_fp8_scaling
from modelwright.models import trainable
from modelwright.plan import model_shape
from modelwright.recipe.stage_specs import LoraStageConfig

RANK, SCALE = 16, 2.0
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run by hand on a GPU machine")


def layer(width: int = 32, inner: int = 96, **settings: Any) -> Any:
    """A gated layer with low-rank matrices that are not zero."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    gated = LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=inner))
    config = {"r": RANK, "lora_alpha": SCALE * RANK, "target_modules": list(trainable.MLP_LINEARS), **settings}
    model = peft.get_peft_model(nn.Sequential(gated), peft.LoraConfig(**config, init_lora_weights=False))
    return model.base_model.model[0]


def output_and_gradients(answer: Tensor, x: Tensor, gated: Any) -> list[Tensor]:
    """An answer, and the gradients of the input and of all that moves."""
    answer.float().square().sum().backward()
    return [answer.detach(), *(weight.grad for weight in (x, *gated.parameters()) if weight.grad is not None)]


def test_the_fused_mlp_equals_peft() -> None:
    theirs, ours = layer(), layer()
    rows = torch.randn(7, 32)
    x, y = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    expected = output_and_gradients(theirs(x), x, theirs)
    linears = [getattr(ours, name) for name in trainable.MLP_LINEARS]
    frozen = [linear.base_layer.weight for linear in linears]
    *lora, down_b = [half["default"].weight for linear in linears for half in (linear.lora_A, linear.lora_B)]
    base, lora_inner, *_ = trainable.fused_lora_mlp(y, *frozen, *lora, SCALE)
    actual = output_and_gradients(base + lora_inner @ down_b.T, y, ours)
    assert len(actual) == 8
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("unusual", "is_plain"),
    [({}, True), ({"use_dora": True}, False), ({"lora_dropout": 0.1}, False), ({"r": 8}, False)],
    ids=["as usual", "DoRA", "dropout", "a rank too small"],
)
def test_unsupported_lora_settings_use_peft(unusual: dict[str, Any], is_plain: bool) -> None:
    one = layer(**unusual).to(torch.bfloat16).gate_proj
    assert trainable.is_fusable(one, torch.bfloat16) is is_plain
    assert not trainable.is_fusable(copy.deepcopy(one).float(), torch.float32)
    one.merge()
    assert not trainable.is_fusable(one, torch.bfloat16)


def test_torch_compile_can_trace_is_fusable() -> None:
    one = layer().to(torch.bfloat16).gate_proj
    check = torch.compile(lambda x: x + trainable.is_fusable(one, x.dtype), fullgraph=True, backend="eager")
    zero = torch.zeros(1, dtype=torch.bfloat16)
    assert check(zero) == 1
    one.base_layer.__class__ = type("Eighths", (nn.Linear,), {"forward": lambda self, x: x})
    torch._dynamo.reset()
    assert check(zero) == 0
    set_fp8_scaling([one.base_layer], None)  # as where fp8 was tried and left
    torch._dynamo.reset()
    assert check(zero) == 1


def test_a_layer_without_a_gpu_computes_what_it_did() -> None:
    gated, x = layer(), torch.randn(2, 5, 32)
    before = gated(x)
    trainable.install_fused_lora_mlp(gated)
    assert "forward" in vars(gated) and torch.equal(gated(x), before)
    for name in trainable.MLP_LINEARS:  # as after merging
        setattr(gated, name, getattr(gated, name).base_layer)
    assert not torch.equal(gated(x), before)


@pytest.mark.parametrize("family", sorted(model_shape.MODEL_FAMILIES))
def test_the_plan_knows_which_families_use_the_fused_mlp(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small, **heads))
    prepared = trainable.set_trainable(model, LoraStageConfig())
    fused = any("forward" in vars(module) for module in prepared.modules() if type(module).__name__.endswith("MLP"))
    assert fused is model_shape.MODEL_FAMILIES[family].silu_gated_mlp


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("rank", "rows"), [(16, 77), (32, 1100), (64, 77), (128, 1100)])
def test_the_kernels_equal_peft(compiled: bool, rank: int, rows: int) -> None:
    theirs = layer(256, 1000, r=rank).to("cuda", torch.bfloat16)
    exact, ours = copy.deepcopy(theirs).float(), copy.deepcopy(theirs)
    trainable.install_fused_lora_mlp(ours)
    if compiled:
        ours.compile()
    inputs = torch.randn(3, rows, 256, device="cuda").bfloat16()
    results = []
    for gated in (exact, theirs, ours):
        x = inputs.to(gated.gate_proj.base_layer.weight.dtype, copy=True).requires_grad_()
        results.append([part.float() for part in output_and_gradients(gated(x), x, gated)])
    for expected, peft, actual in zip(*results, strict=True):
        near, far = ((part - expected).norm() / expected.norm() for part in (actual, peft))
        assert near < 1.5 * far + 1e-3, f"{near:.1e} off, peft {far:.1e}"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_disabled_adapters_equal_an_untrained_adapter(compiled: bool) -> None:
    ours = trainable.install_fused_lora_mlp(layer(256, 1000)).to("cuda", torch.bfloat16)
    for name in trainable.MLP_LINEARS:
        nn.init.zeros_(getattr(ours, name).lora_B["default"].weight)
    if compiled:
        ours.compile()
    x = torch.randn(3, 77, 256, device="cuda").bfloat16()
    with torch.no_grad():
        untrained = ours(x)
        for name in trainable.MLP_LINEARS:
            getattr(ours, name).enable_adapters(False)
        assert torch.equal(ours(x), untrained)
