"""Full and selective activation checkpointing leave the gradients the same."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_torchao import use_fake_torchao
from families import FAMILIES, family
from modelwright.engine import precision
from modelwright.errors import ModelError
from modelwright.models import attention
from modelwright.models.activation_checkpoint import (
    SavedMatmuls,
    checkpoint_layers,
    enable_activation_checkpointing,
    has_dropout,
    is_saved,
    op_kind,
)
from modelwright.models.attention import hidden_states
from modelwright.models.pretrained import load_model
from modelwright.models.trainable import decoder_layers, set_trainable
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import TrainableConfig
from modelwright.stages import pipeline
from tests.faults.fork_server import run_fingerprint
from tiny import tiny_dpo_recipe, tiny_recipe

TOKENS = torch.arange(1, 49).view(2, 24)
POSITIONS = torch.arange(24).expand(2, 24)
STARTS = torch.tensor([0, 9, 24, 37, 48], dtype=torch.int32)


def gradients(model: Any, mode: Any, steps: int = 2, **kwargs: Any) -> dict[str, Tensor]:
    """The gradients of a second step, for what was not asked for in the first is not kept in it."""
    enable_activation_checkpointing(model.train(), mode)
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(7)
        hidden = hidden_states(model, TOKENS, POSITIONS, **kwargs)
        # by more than their length, which the last norm makes one: its gradient would be what rounding leaves
        (hidden.square() * torch.arange(hidden.shape[-1]).cos()).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved_matmuls(layer: nn.Module) -> SavedMatmuls:
    return next(each for each in layer.__dict__["forward"].args if isinstance(each, SavedMatmuls))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_gradients_of_none_and_of_full_to_the_last_bit(name: str) -> None:
    plain, *others = (gradients(deepcopy(family(name)), mode) for mode in (False, "selective", True))
    assert len(plain) >= 20
    assert all(same(plain, other) for other in others)


@pytest.mark.parametrize(
    "settings",
    [
        {"trainable": "lora", "lora_dropout": 0.5},
        {"trainable": "lora", "use_dora": True},
        {"trainable": {"last_layers": 1}},
        {"trainable": {"norms": True}},
    ],
)
def test_partially_trained_models_have_the_same_gradients(model_folder: Path, settings: dict[str, Any]) -> None:
    results = []
    for mode in (False, "selective"):
        torch.manual_seed(0)
        model = set_trainable(load_model(model_folder), TrainableConfig.model_validate(settings))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:  # or nothing would reach lora_A
                    weight.normal_()
        results.append(gradients(model, mode, cu_seqlens=STARTS))
    assert same(*results)


def test_documents_and_fp8_layers_have_the_same_gradients(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_torchao(monkeypatch)
    results = []
    for mode in (False, "selective"):
        model = load_model(model_folder)
        attention.register_attention(model)
        assert precision.convert_to_fp8(model)
        results.append(gradients(model, mode, cu_seqlens=STARTS))
    assert same(*results)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_casts_of_fp32_weights_are_made_again_and_the_gradients_are_the_same(model_folder: Path) -> None:
    results = []
    for mode in (False, "selective"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(gradients(load_model(model_folder), mode))
    assert same(*results)


def test_a_layer_saves_only_what_its_recomputation_needs(model_folder: Path) -> None:
    model = load_model(model_folder)
    gradients(model, "selective", steps=1)
    for layer in decoder_layers(model):
        # three before attention, itself, one behind it, gate and up; nothing asks for what down makes
        assert saved_matmuls(layer).last_needed == 7
    gemma = deepcopy(family("gemma3_text"))
    gradients(gemma, "selective", steps=1)
    assert saved_matmuls(decoder_layers(gemma)[0]).last_needed == 8, "the norm behind down asks for what it makes"


def test_random_numbers_are_drawn_again_as_they_were(model_folder: Path) -> None:
    results = []
    for mode in (False, "selective"):
        model = load_model(model_folder)
        assert not has_dropout(model)
        for layer in decoder_layers(model):
            layer.self_attn.attention_dropout = 0.5
        assert has_dropout(model)
        results.append(gradients(model, mode))
    assert same(*results)


def test_frozen_bottom_layers_and_evaluation_are_not_checkpointed(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = set_trainable(load_model(model_folder), TrainableConfig.model_validate({"trainable": {"last_layers": 1}}))
    gradients(model, "selective")
    first, last = decoder_layers(model)
    assert (saved_matmuls(first).last_needed, saved_matmuls(last).last_needed) == (None, 7)
    monkeypatch.setattr("modelwright.models.activation_checkpoint.checkpoint", None)  # would fail if it were called
    with torch.no_grad():
        hidden_states(model, TOKENS, POSITIONS)
    hidden_states(model.eval(), TOKENS, POSITIONS)


def test_a_matmul_with_a_small_inner_dimension_is_recomputed() -> None:
    x, thin, wide = torch.empty(10, 16), torch.empty(4096, 16), torch.empty(64, 16)
    assert not is_saved(torch.ops.aten.mm.default, (x, thin.T)) and is_saved(torch.ops.aten.mm.default, (x, wide.T))


def test_a_later_mode_replaces_an_earlier_one(model_folder: Path) -> None:
    model = load_model(model_folder)
    for mode in ("selective", True, False):
        enable_activation_checkpointing(model, mode)  # type: ignore[arg-type]
        checkpointed = [
            layer.__dict__["forward"].args for layer in decoder_layers(model) if "forward" in layer.__dict__
        ]
        assert len(checkpointed) == (2 if mode else 0)
        assert all(
            any(isinstance(each, SavedMatmuls) for each in args) == (mode == "selective") for args in checkpointed
        )


def test_compiled_layers_have_the_gradients_of_those_that_are_not(model_folder: Path) -> None:
    results = []
    for mode, backend in ((False, None), *((mode, "aot_eager_decomp_partition") for mode in ("selective", True))):
        model = load_model(model_folder)
        attention.register_attention(model)
        enable_activation_checkpointing(model, mode)
        torch._dynamo.reset()
        for layer in decoder_layers(model) if backend else ():
            layer.compile(backend=backend, fullgraph=True)
        results.append(gradients(model, mode))
    plain, *others = results
    for other in others:
        assert plain.keys() == other.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=2e-4)


def test_kinds_of_operations() -> None:
    aten = torch.ops.aten
    for saved in (aten.mm, aten.addmm, aten.bmm, aten._scaled_mm, aten._scaled_dot_product_cudnn_attention,
                 aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.modelwright.fused_lora_mlp,
                 torch.ops.torch_attn._varlen_attn):  # fmt: skip
        assert op_kind(saved.default)
    for recomputed in (aten.mul.Tensor, aten.rsqrt.default, aten.silu.default, aten._to_copy.default, aten.t.default):
        assert not op_kind(recomputed)


class Careless(nn.Linear):
    """Changes its first product in its place, and adds some noise to the second."""

    router_jitter_noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        product = nn.functional.linear(x, self.weight)
        product += x
        product = nn.functional.linear(product.sin(), self.weight)
        return nn.functional.linear((product * torch.rand_like(product)).cos(), self.weight)


@pytest.mark.parametrize("rows", [(4,), (2, 3)])
def test_a_layer_that_changes_a_product_in_its_place_has_the_gradients_it_has_without(rows: tuple[int, ...]) -> None:
    results = []
    for selective in (None, True, False):
        torch.manual_seed(3)
        layers = nn.ModuleList([Careless(8, 8)])
        layers[0].router_jitter_noise = 0.1  # by this it is known to draw
        if selective is not None:
            checkpoint_layers(layers, selective=selective)
        for _ in range(2):
            layers.zero_grad()
            torch.manual_seed(7)
            layers[0](torch.arange(8.0).expand(*rows, 8) / 8).square().sum().backward()
        results.append(layers[0].weight.grad)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_saved_matmul_changed_outside_of_its_layer_raises() -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Identity())])
    checkpoint_layers(layers, selective=True)
    outputs: list[Tensor] = []
    layers[0][0].register_forward_hook(lambda *args: outputs.append(args[-1]))
    summed = layers[0](torch.ones(2, 8)).sum()
    with torch.no_grad():
        outputs[0].add_(1.0)
    with pytest.raises(ModelError, match="use gradient_checkpointing: true"):
        summed.backward()


def test_dropout_after_attention_with_dropout_is_the_same() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            attended = torch.ops.tests.attention_that_draws(self.first(x))
            return self.last(self.dropout(attended).sin())

    results = []
    for selective in (None, True, False):
        torch.manual_seed(3)
        layers = nn.ModuleList([Drawing()])
        if selective is not None:
            checkpoint_layers(layers, selective=selective)
        for _ in range(2):
            layers.zero_grad()
            torch.manual_seed(7)
            layers[0](torch.ones(4, 8)).square().sum().backward()
        results.append(layers[0].first.weight.grad)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@torch.library.custom_op("tests::attention_that_draws", mutates_args=())
def attention_that_draws(x: Tensor) -> Tensor:
    """As kernels of a GPU do: the result and its random numbers in one operation."""
    return x * torch.rand_like(x).round()


@attention_that_draws.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


attention_that_draws.register_autograd(lambda _, gradient: gradient)


def test_a_model_without_known_layers_is_reported(model_folder: Path) -> None:
    model = load_model(model_folder)
    model.config.num_hidden_layers = 5
    with pytest.raises(ModelError, match="selective checkpointing"):
        enable_activation_checkpointing(model, "selective")
    enable_activation_checkpointing(model, True)
    assert model.is_gradient_checkpointing, "the library finds them in its own way"


@pytest.mark.parametrize(
    ("make_recipe", "settings"),
    [
        (tiny_recipe, {"trainable": {"last_layers": 1, "lm_head": True}, "cache_frozen_layers": "memory"}),
        (tiny_dpo_recipe, {"trainable": "lora", "lora_dropout": 0.1}),
    ],
)
def test_a_stage_has_the_same_losses_with_checkpointing(
    model_folder: Path, tmp_path: Path, make_recipe: Any, settings: dict[str, Any]
) -> None:
    results = []
    for mode in (False, "selective"):
        folder = tmp_path / str(mode)
        recipe = make_recipe(folder, model_folder, max_steps=3, gradient_checkpointing=mode, **settings)
        pipeline.run(load(recipe, environ={}), lambda event: None)
        results.append(run_fingerprint(folder / "run", "dpo" if make_recipe is tiny_dpo_recipe else "sft"))
    assert results[0] == results[1]
