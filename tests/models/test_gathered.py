"""Gradients that are added up by the products that make them are the sums that torch makes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelwright.bench import speed
from modelwright.bench.speed_works import WORKS, Way, rows_of
from modelwright.engine import loop
from modelwright.models import gathered, joined
from modelwright.models.gathered import Gathering, install


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Nothing compiled before is found, and nothing compiled here is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """Two linear layers, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.biased = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.biased(torch.tanh(self.plain(x)))
        return made


def sums(model: nn.Module, gathering: Gathering | None, batches: list[Tensor]) -> list[Tensor | None]:
    """The gradients of a step of several micro-batches."""
    model.zero_grad()
    for number, batch in enumerate(batches):
        with (gathering.more if number else gathering.first)() if gathering else nullcontext():
            model(batch).square().mean().backward()
    return [weight.grad for weight in model.parameters()]


def micro_batches(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 5, 8) for _ in range(count)]


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_sums_are_those_of_torch(backend: str | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer(), Layer())
    ours = copy.deepcopy(plain)
    gathering = Gathering(ours)
    for layer in ours if backend else ():
        layer.compile(backend=backend, fullgraph=True)
    for batches in (micro_batches(), micro_batches(1), micro_batches(2)):  # what stood there before is written over
        torch.testing.assert_close(sums(ours, gathering, batches), sums(plain, None, batches))


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_product_of_ours_is_learnt_from_as_one_of_torch(
    backend: str | None, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer()).requires_grad_(not frozen)
    ours = copy.deepcopy(plain)
    install(ours)
    made: list[Any] = []
    usual = gathered.products.mm
    monkeypatch.setattr(gathered.products, "mm", lambda *given: made.append(given) or usual(*given))
    # of the layers, which ask for themselves: the product they come to is small and on a processor
    monkeypatch.setattr(gathered.products, "is_large", lambda first, second: second.dim() == 2 and first.dim() == 3)
    for layer in ours if backend else ():
        layer.compile(backend=backend, fullgraph=True)
    for rows in (5, 4, 3):
        x, theirs = (torch.ones(2, rows, 8, requires_grad=True) for _ in range(2))
        torch.testing.assert_close(ours(x), plain(theirs))
        ours(x).square().sum().backward()
        plain(theirs).square().sum().backward()
        torch.testing.assert_close(x.grad, theirs.grad)
    assert made
    for weight, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (weight.grad is None) == frozen
        torch.testing.assert_close(weight.grad, other.grad)


def test_a_layer_that_is_gone_through_twice_has_the_sum_of_both() -> None:
    torch.manual_seed(0)
    once = Layer()
    plain = nn.Sequential(once, nn.Tanh(), once)
    ours = copy.deepcopy(plain)
    expected = sums(plain, None, micro_batches())
    gathering = Gathering([ours[0]])
    torch.testing.assert_close(sums(ours, gathering, micro_batches()), expected)
    ours[0].compile(backend="aot_eager")
    with pytest.raises(RuntimeError) as error:  # a compiler sees each pass for itself
        sums(ours, gathering, micro_batches())
    assert gathering.give_up(error.value)
    torch.testing.assert_close(sums(ours, gathering, micro_batches()), expected)
    assert not gathering.give_up(error.value)


def test_a_weight_that_two_layers_share_has_the_sum_of_both() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer())
    plain[1].plain.weight = plain[0].plain.weight
    ours = copy.deepcopy(plain)
    assert ours[1].plain.weight is ours[0].plain.weight
    expected = sums(plain, None, micro_batches())
    torch.testing.assert_close(sums(ours, Gathering(ours), micro_batches()), expected)


def test_a_weight_that_is_made_of_others_and_a_single_row_are_taken() -> None:
    torch.manual_seed(0)
    plain = Layer()
    torch.nn.utils.parametrizations.weight_norm(plain.plain)
    one = torch.randn(8)
    ours = copy.deepcopy(plain)
    gathering = Gathering([ours, layer := Layer()])
    torch.testing.assert_close(sums(ours, gathering, micro_batches()), sums(plain, None, micro_batches()))
    with gathering.first():
        assert layer(one).shape == one.shape


def test_frozen_and_other_layers_are_left_alone() -> None:
    layer = Layer()
    layer.plain.requires_grad_(False)
    Gathering([layer])
    assert "forward" not in layer.plain.__dict__ and "forward" not in layer.biased.__dict__


def test_sums_are_let_go_of_between_steps() -> None:
    layer = Layer()
    gathering = Gathering([layer])
    sums(layer, gathering, micro_batches())
    layer.zero_grad()
    assert layer.plain.into is None and layer.plain.weight.grad is None
    with torch.no_grad():
        layer(micro_batches()[0])


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_checkpointing": "selective"}, {"torch_compile": True, "gradient_checkpointing": True}],
    ids=["eager", "selective", "compiled, full"],
)
def test_the_engine_learns_the_same_from_several_micro_batches(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = replace(WORKS["tiny"], accumulation=3)
    rows = rows_of(work, 6)
    way = Way("ours", {"precision": "fp32", **settings})
    usual = speed.train_ours(work, way, rows).losses
    seen: list[int] = []
    usual_first = Gathering.first

    def first(self: Any) -> Any:
        seen.append(len(self._linears))
        return usual_first(self)

    monkeypatch.setattr(loop, "GATHERS", ("cpu",))
    monkeypatch.setattr(Gathering, "first", first)
    build = speed.build
    monkeypatch.setattr(speed, "build", lambda work: joined.install(build(work)))
    assert speed.train_ours(work, way, rows).losses == pytest.approx(usual, rel=1e-4)
    assert seen == [14] * 6
