"""bf16 parameters with remainders train exactly as fp32 masters do, and a checkpoint of either loads as either."""

from __future__ import annotations

import copy
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from modelwright.engine.bf16_adamw import VECTOR_BYTES, BF16AdamW, build_pointer_table
from modelwright.engine.precision import PARAM_REMAINDER, join_fp32_master, split_fp32_master, to_bf16_with_remainders
from modelwright.errors import UsageError
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import SftConfig
from modelwright.stages import pipeline
from tests.faults.fork_server import run_fingerprint
from tiny import tiny_recipe

CPU = DeviceInfo("cpu", "2 CPU threads", 10**9, False)
GPU = DeviceInfo("cuda", "NVIDIA H200", 10**11, True)


def test_what_was_split_joins_to_the_very_same_bits() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(50_000) * 10.0 ** torch.randint(-30, 30, (50_000,))
    ties = (torch.randint(0x3F80, 0x4080, (500,)) * 65536 + 0x8000).to(torch.int32).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, 3e38])
    master = torch.cat((numbers, ties, -ties, edges))
    high, remainder = split_fp32_master(master)
    assert (high.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join_fp32_master(high, remainder).view(torch.int32), master.view(torch.int32))
    assert ((high.float() - master).abs() <= 2**-8 * master.abs() + 1e-38).all()


def test_split_weights_move_as_adamw_moves_fp32_masters() -> None:
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    bf16 = copy.deepcopy(exact)
    remainders = to_bf16_with_remainders(bf16)
    weights = dict(bf16.named_parameters())
    theirs = torch.optim.AdamW(exact.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    ours = BF16AdamW(
        [{"params": list(weights.values()), "weight_decay": 0.1}],
        {weights[name]: remainder for name, remainder in remainders.items()},
        torch.float32, lr=1e-3, betas=(0.9, 0.999), eps=1e-8,
    )  # fmt: skip
    for _ in range(50):
        for master, weight in zip(exact.parameters(), bf16.parameters(), strict=True):
            weight.grad = torch.randn_like(master).bfloat16()
            master.grad = weight.grad.float()
        theirs.step()
        ours.step()
    for master, weight in zip(exact.parameters(), bf16.parameters(), strict=True):
        assert weight.dtype is torch.bfloat16
        torch.testing.assert_close(
            join_fp32_master(weight.data, ours.state[weight][PARAM_REMAINDER]), master.data, rtol=1e-5, atol=1e-6
        )


def test_a_gradient_that_is_too_long_is_read_shortened() -> None:
    ends = []
    for max_norm in (1.0, float("inf")):
        weight = nn.Parameter(torch.ones(4).bfloat16())
        optimizer = BF16AdamW(
            [{"params": [weight], "weight_decay": 0.0}], {weight: torch.zeros(4, dtype=torch.int16)}, torch.float32,
            lr=1e-3, betas=(0.9, 0.999), eps=1.0,
        )  # fmt: skip
        weight.grad = torch.full((4,), 2.0 if max_norm == 1.0 else 0.5).bfloat16()
        assert float(optimizer.clip_grad_norm(max_norm)) == pytest.approx(4.0 if max_norm == 1.0 else 1.0)
        optimizer.step()
        assert float(weight.grad[0]) == (2.0 if max_norm == 1.0 else 0.5), "the gradient itself stays as it is"
        ends.append(join_fp32_master(weight.data, optimizer.state[weight][PARAM_REMAINDER]))
    torch.testing.assert_close(*ends)


def weights_and_optimizer(*sizes: int) -> tuple[list[nn.Parameter], BF16AdamW]:
    """Parameters of ones with gradients of ones, and an optimizer that changes them by about 0.1."""
    weights = [nn.Parameter(torch.ones(size).bfloat16()) for size in sizes]
    remainders: dict[torch.Tensor, torch.Tensor] = {
        weight: torch.zeros(len(weight), dtype=torch.int16) for weight in weights
    }
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    groups = [{"params": weights, "weight_decay": 0.0}]
    return weights, BF16AdamW(groups, remainders, torch.float32, lr=0.1, betas=(0.9, 0.999), eps=1e-8)


def test_a_step_that_was_got_ready_reads_the_gradients_that_came_since() -> None:
    (first, second, third), optimizer = weights_and_optimizer(4, 4, 4)
    optimizer.clip_grad_norm(10.0)
    first.grad, second.grad = -torch.ones_like(first), None
    optimizer.step()
    assert [float(weight.detach()[0]) for weight in (first, second, third)] == pytest.approx([1.1, 1.0, 0.9], abs=0.01)


def test_gradients_of_which_copies_are_read_are_refused_by_every_recording() -> None:
    (weight,), optimizer = weights_and_optimizer(16)
    weight.grad = torch.ones(16, 2).bfloat16()[:, 0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="copies"):
            optimizer.prepare_step(static_grads=True)
        optimizer.clip_grad_norm(10.0)
    weight.grad = torch.ones_like(weight)
    optimizer.clip_grad_norm(10.0)
    assert optimizer.prepare_step(static_grads=True) is optimizer.prepare_step()


def test_a_step_that_was_got_ready_and_skipped_keeps_no_gradients() -> None:
    (weight,), optimizer = weights_and_optimizer(4)
    gradient = weakref.ref(weight.grad)
    optimizer.clip_grad_norm(10.0)
    optimizer.zero_grad()
    assert gradient() is None
    optimizer.step()
    assert bool((weight == 1).all())


def test_moments_that_a_restart_has_replaced_are_read() -> None:
    (weight, other), optimizer = weights_and_optimizer(4, 4)
    optimizer.clip_grad_norm(10.0)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.full((4,), -1e3)
    optimizer.clip_grad_norm(10.0)
    optimizer.step()
    assert float(weight.detach()[0]) > 2 > 1 > float(other.detach()[0])
    assert float(optimizer.state[weight]["exp_avg"][0]) == pytest.approx(-900, abs=1)


@pytest.mark.parametrize(("sizes", "aligned"), [((4096, 16, 1024, 48), VECTOR_BYTES), ((4096, 17, 1, 1025), 1)])
def test_every_number_of_many_tensors_is_moved_by_one_program(sizes: tuple[int, ...], aligned: int) -> None:
    tensors = [
        (torch.zeros(size).bfloat16(), torch.zeros(size).bfloat16(), torch.zeros(size, dtype=torch.int16), *twice)
        for size in sizes
        for twice in [(torch.zeros(size), torch.zeros(size))]
    ]
    pointers, block_owner, alignment = build_pointer_table(tensors, 1024)
    assert pointers.shape == (len(sizes), 7) and alignment == aligned
    moved = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    for program, owner in enumerate(block_owner.tolist()):
        *addresses, count, begins = pointers[owner].tolist()
        assert addresses == [part.data_ptr() for part in tensors[owner]] and count == sizes[owner]
        start = (program - begins) * 1024
        assert 0 <= start < count
        moved[owner][start : start + 1024] += 1
    assert all(bool((times == 1).all()) for times in moved)


@pytest.mark.parametrize(("device", "expected"), [(CPU, "fp32"), (GPU, "bf16")])
def test_a_gpu_that_computes_in_bf16_keeps_bf16_weights_by_itself(device: DeviceInfo, expected: str) -> None:
    assert plan_stage(SftConfig(precision="bf16"), 10, 1, device).param_dtype == expected
    assert plan_stage(SftConfig(precision="fp32"), 10, 1, device).param_dtype == "fp32"


def test_bf16_weights_without_bf16_arithmetic_are_refused() -> None:
    with pytest.raises(UsageError, match="param_dtype: bf16 wants precision bf16 or fp8"):
        plan_stage(SftConfig(precision="fp32", param_dtype="bf16"), 10, 1, CPU)


BRIEF = {"max_steps": 4, "save_steps": 2, "eval_steps": 4, "per_device_train_batch_size": 1, "max_length": 32}
"""Short, because a processor without bf16 takes a hundred times as long for it."""


def run(folder: Path, model: Path, weights: str, **settings: Any) -> list[float]:
    recipe = tiny_recipe(folder, model, precision="bf16", param_dtype=weights, **{**BRIEF, **settings})
    pipeline.run(load(recipe, environ={}), lambda event: None)
    return [loss for loss, *_ in run_fingerprint(folder / "run")["steps"].values()]


def test_bf16_weights_learn_what_fp32_weights_learn_and_go_on_exactly(model_folder: Path, tmp_path: Path) -> None:
    exact, bf16 = (run(tmp_path / weights, model_folder, weights) for weights in ("fp32", "bf16"))
    assert bf16 == pytest.approx(exact, rel=5e-3)
    stage = tmp_path / "bf16/run/stages/sft"
    shutil.rmtree(max((stage / "checkpoints").glob("step-*")))
    (stage / "result.json").unlink()
    assert run(tmp_path / "bf16", model_folder, "bf16") == bf16


def test_few_weights_resume_exactly_from_a_checkpoint_with_parameter_remainders(
    untied_model_folder: Path, tmp_path: Path
) -> None:
    few: dict[str, Any] = {"trainable": {"norms": True}, "max_steps": 2, "save_steps": 1, "eval_steps": 2}
    losses = run(tmp_path, untied_model_folder, "bf16", **few)
    stage = tmp_path / "run/stages/sft"
    newest, older = sorted((stage / "checkpoints").glob("step-*"), reverse=True)
    files = run_fingerprint(tmp_path / "run")["files"]
    with safe_open(older / "optimizer.safetensors", "pt") as stored:
        assert {name.rpartition(".")[2] for name in stored.keys()} == {"step", "exp_avg", "exp_avg_sq", PARAM_REMAINDER}  # noqa: SIM118
    shutil.rmtree(newest)
    (stage / "result.json").unlink()
    assert run(tmp_path, untied_model_folder, "bf16", **few) == losses
    assert run_fingerprint(tmp_path / "run")["files"] == files
