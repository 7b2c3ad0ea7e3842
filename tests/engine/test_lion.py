"""Lion by the paper's formula, whole and in parts, with a learning rate that is a number or a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelwright.engine import optimizer as optimizer_module
from modelwright.engine.optimizer import TrainerOptimizer, build_optimizer
from modelwright.errors import UsageError
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import SftConfig

STEPS, RATE, DECAY = 40, 1e-3, 0.1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.Linear(64, 8))


def lion(module: nn.Module, **settings: Any) -> TrainerOptimizer:
    return build_optimizer(dict(module.named_parameters()), SftConfig(optim="lion", learning_rate=RATE, **settings))


def set_gradients(module: nn.Module, step: int) -> None:
    """Gradients of other sizes in each step; every third step one parameter has none."""
    draw = torch.Generator().manual_seed(step)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=draw) * 10.0 ** (step % 5 - 2)
    if step % 3 == 0:
        next(module.parameters()).grad = None


def train(module: nn.Module, optimizer: TrainerOptimizer) -> list[Tensor]:
    for step in range(STEPS):
        set_gradients(module, step)
        optimizer.set_learning_rate(RATE * (1 - step / STEPS))
        optimizer.step()
    return [param.detach() for param in module.parameters()]


@pytest.mark.parametrize("beta2", [None, 0.95])
def test_it_steps_by_the_formula_of_the_paper(beta2: float | None) -> None:
    beta1, b2 = 0.9, beta2 or 0.99
    plain, module = network(), network()
    momenta = [torch.zeros_like(param) for param in plain.parameters()]
    for step in range(STEPS):
        set_gradients(plain, step)
        rate = RATE * (1 - step / STEPS)
        for param, momentum in zip(plain.parameters(), momenta, strict=True):
            if param.grad is None:
                continue
            decay = DECAY if param.ndim >= 2 else 0.0
            update = torch.sign(beta1 * momentum + (1 - beta1) * param.grad)
            param.data = param.data - rate * (update + decay * param.data)
            momentum.copy_(b2 * momentum + (1 - b2) * param.grad)
    settings = {} if beta2 is None else {"adam_beta2": beta2}
    optimizer = lion(module, weight_decay=DECAY, **settings)
    for ours, theirs in zip(train(module, optimizer), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)
    assert {key.rpartition(".")[2] for key in optimizer.state_tensors()} == {"exp_avg"}


def test_large_tensors_alone_step_as_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = network(), network()
    expected = train(together, lion(together, weight_decay=DECAY))
    monkeypatch.setattr(optimizer_module, "SHARED_MAX_NUMEL", 100)
    assert all(map(torch.equal, expected, train(apart, lion(apart, weight_decay=DECAY))))


def test_a_learning_rate_that_a_graph_reads_is_the_same() -> None:
    plain, captured = network(), network()
    optimizer = lion(captured)
    optimizer.make_capturable(torch.device("cpu"))
    rate = optimizer.param_groups[0]["lr"]
    assert all(map(torch.equal, train(plain, lion(plain)), train(captured, optimizer)))
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(RATE / STEPS)


def test_a_checkpoint_of_another_optimizer_is_not_loaded() -> None:
    module = network()
    set_gradients(module, 1)
    optimizers = [lion(module), build_optimizer(dict(module.named_parameters()), SftConfig())]
    for optimizer in optimizers:
        optimizer.step()
    saved = [optimizer.state_tensors() for optimizer in optimizers]
    for optimizer, own, other in zip(optimizers, saved, reversed(saved), strict=True):
        with pytest.raises(ValueError, match="another optimizer wrote it, with exp_avg"):
            optimizer.load_state_tensors(other.items())
        optimizer.load_state_tensors(own.items())
        assert all(torch.equal(value, own[name]) for name, value in optimizer.state_tensors().items())


def test_beta2_is_the_optimizers_own_unless_it_is_set() -> None:
    assert [SftConfig(optim=name).adam_beta2 for name in ("adamw_torch", "lion")] == [0.999, 0.99]
    assert SftConfig(optim="lion", adam_beta2=0.98).adam_beta2 == 0.98


def test_settings_of_another_optimizer_are_named_in_the_plan() -> None:
    settings = SftConfig(optim="lion", momentum=0.5, adam_epsilon=1e-6, adam_beta1=0.95)
    reasons = plan_stage(settings, 10, 1, DeviceInfo("cuda", "NVIDIA H200", 10**11, True)).reasons
    unread = [reason for reason in reasons if reason.endswith("has no effect with optim lion")]
    assert [reason.split()[0] for reason in unread] == ["adam_epsilon", "momentum"]
    assert not SftConfig(optim="sgd", momentum=0).ignored_settings()


def test_a_gpu_that_computes_in_bf16_keeps_fp32_weights_for_it() -> None:
    device = DeviceInfo("cuda", "NVIDIA H200", 10**11, True)
    plan = plan_stage(SftConfig(optim="lion"), 10, 1, device)
    assert (plan.precision, plan.param_dtype) == ("bf16", "fp32")
    with pytest.raises(
        UsageError, match="wants precision bf16 or fp8 with optim adamw_torch; here is precision bf16 and optim lion"
    ):
        plan_stage(SftConfig(optim="lion", param_dtype="bf16"), 10, 1, device)
