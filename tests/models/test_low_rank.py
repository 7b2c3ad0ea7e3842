"""The gated part of a layer with low-rank matrices takes a shorter way to the numbers of peft, where it can."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelwright.engine.precision import set_fp8_scaling
from modelwright.models import trainable
from modelwright.plan import model_shape
from modelwright.recipe.schema import LoraStageConfig

RANK, SCALE = 16, 2.0
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run by hand on a GPU machine")


def layer(width: int = 32, inner: int = 96, **settings: Any) -> Any:
    """A gated layer with low-rank matrices that are not zero."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    gated = LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=inner))
    wish = {"r": RANK, "lora_alpha": SCALE * RANK, "target_modules": list(trainable.MLP_LINEARS), **settings}
    model = peft.get_peft_model(nn.Sequential(gated), peft.LoraConfig(**wish, init_lora_weights=False))
    return model.base_model.model[0]


def learnt(answer: Tensor, x: Tensor, gated: Any) -> list[Tensor]:
    """An answer, and the gradients of the input and of all that moves."""
    answer.float().square().sum().backward()
    return [answer.detach(), *(weight.grad for weight in (x, *gated.parameters()) if weight.grad is not None)]


def test_the_short_way_comes_to_the_numbers_of_peft() -> None:
    theirs, ours = layer(), layer()
    rows = torch.randn(7, 32)
    x, y = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    expected = learnt(theirs(x), x, theirs)
    linears = [getattr(ours, name) for name in trainable.MLP_LINEARS]
    frozen = [linear.base_layer.weight for linear in linears]
    *beside, last = [half["default"].weight for linear in linears for half in (linear.lora_A, linear.lora_B)]
    base, thin, *_ = trainable.fused_lora_mlp(y, *frozen, *beside, SCALE)
    found = learnt(base + thin @ last.T, y, ours)
    assert len(found) == 8
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("unusual", "is_plain"),
    [({}, True), ({"use_dora": True}, False), ({"lora_dropout": 0.1}, False), ({"r": 8}, False)],
    ids=["as usual", "DoRA", "dropout", "a rank too small"],
)
def test_what_is_unusual_goes_the_way_of_peft(unusual: dict[str, Any], is_plain: bool) -> None:
    one = layer(**unusual).to(torch.bfloat16).gate_proj
    assert trainable.is_fusable(one, torch.bfloat16) is is_plain
    assert not trainable.is_fusable(copy.deepcopy(one).float(), torch.float32)
    one.merge()
    assert not trainable.is_fusable(one, torch.bfloat16)


def test_a_compiler_sees_which_way_is_taken() -> None:
    one = layer().to(torch.bfloat16).gate_proj
    asked = torch.compile(lambda x: x + trainable.is_fusable(one, x.dtype), fullgraph=True, backend="eager")
    zero = torch.zeros(1, dtype=torch.bfloat16)
    assert asked(zero) == 1
    one.base_layer.__class__ = type("Eighths", (nn.Linear,), {"forward": lambda self, x: x})
    torch._dynamo.reset()
    assert asked(zero) == 0
    set_fp8_scaling([one.base_layer], None)  # as where fp8 was tried and left
    torch._dynamo.reset()
    assert asked(zero) == 1


def test_a_layer_without_a_gpu_computes_what_it_did() -> None:
    gated, x = layer(), torch.randn(2, 5, 32)
    before = gated(x)
    trainable.install_fused_lora_mlp(gated)
    assert "forward" in vars(gated) and torch.equal(gated(x), before)
    for name in trainable.MLP_LINEARS:  # as after merging
        setattr(gated, name, getattr(gated, name).base_layer)
    assert not torch.equal(gated(x), before)


@pytest.mark.parametrize("family", sorted(model_shape.MODEL_FAMILIES))
def test_the_plan_knows_which_families_take_the_short_way(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small, **heads))
    shortened = trainable.set_trainable(model, LoraStageConfig())
    taken = any("forward" in vars(module) for module in shortened.modules() if type(module).__name__.endswith("MLP"))
    assert taken is model_shape.MODEL_FAMILIES[family].silu_gated_mlp
    assert model_shape.FUSED_LORA_RANKS == trainable.FUSED_RANKS and set(model_shape.MLP_LINEARS) == set(
        trainable.MLP_LINEARS
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("rank", "rows"), [(16, 77), (32, 1100), (64, 77), (128, 1100)])
def test_the_kernels_come_to_the_numbers_of_peft(compiled: bool, rank: int, rows: int) -> None:
    theirs = layer(256, 1000, r=rank).to("cuda", torch.bfloat16)
    exact, ours = copy.deepcopy(theirs).float(), copy.deepcopy(theirs)
    trainable.install_fused_lora_mlp(ours)
    if compiled:
        ours.compile()
    given = torch.randn(3, rows, 256, device="cuda").bfloat16()
    results = []
    for gated in (exact, theirs, ours):
        x = given.to(gated.gate_proj.base_layer.weight.dtype, copy=True).requires_grad_()
        results.append([part.float() for part in learnt(gated(x), x, gated)])
    for wanted, peft, found in zip(*results, strict=True):
        near, far = ((part - wanted).norm() / wanted.norm() for part in (found, peft))
        assert near < 1.5 * far + 1e-3, f"{near:.1e} off, peft {far:.1e}"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_reference_without_the_adapter_equals_one_that_has_learnt_nothing(compiled: bool) -> None:
    ours = trainable.install_fused_lora_mlp(layer(256, 1000)).to("cuda", torch.bfloat16)
    for name in trainable.MLP_LINEARS:
        nn.init.zeros_(getattr(ours, name).lora_B["default"].weight)
    if compiled:
        ours.compile()
    x = torch.randn(3, 77, 256, device="cuda").bfloat16()
    with torch.no_grad():
        learnt_nothing = ours(x)
        for name in trainable.MLP_LINEARS:
            getattr(ours, name).enable_adapters(False)
        assert torch.equal(ours(x), learnt_nothing)
