"""The plan of a stage: batch, steps, precision, and the reason for each choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.plan import hardware
from modelwright.plan.hardware import DeviceInfo, available_memory, probe_device
from modelwright.plan.stage import (
    StagePlan,
    choose_fp8_scalings,
    choose_precision,
    eval_samples,
    plan_stage,
    solve_batch,
)
from modelwright.recipe.stage_specs import DpoConfig, SftConfig, TrainingConfig

LAPTOP = DeviceInfo("cpu", "2 CPU threads", 8 << 30, fast_bf16=False)
H100 = DeviceInfo("cuda", "NVIDIA H100", 80 << 30, fast_bf16=True, peak_flops=989e12)
V100 = DeviceInfo("cuda", "Tesla V100", 16 << 30, fast_bf16=False)


def plan(
    rows: int = 100,
    world_size: int = 1,
    resumed_global_batch: int | None = None,
    device_info: DeviceInfo = LAPTOP,
    **settings: Any,
) -> StagePlan:
    return plan_stage(SftConfig(**settings), rows, world_size, device_info, resumed_global_batch)


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        (SftConfig(), ("tensorwise", "rowwise")),
        (SftConfig(trainable="lora", fp8_scaling="rowwise"), ("rowwise",)),
        (DpoConfig(), ("rowwise",)),
        (DpoConfig(fp8_scaling="tensorwise"), ("tensorwise",)),
    ],
)
def test_a_matrix_has_one_scale_in_fp8_and_pairs_have_one_for_each_row(
    settings: TrainingConfig, order: tuple[str, ...]
) -> None:
    assert choose_fp8_scalings(settings) == order
    assert plan_stage(settings, 100, 1, H100).fp8_scaling == order[0]


def test_the_batch_is_a_sum_that_a_person_can_check() -> None:
    planned = plan(world_size=4, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    assert planned.batch_arithmetic == "batch 64 = 8 per device × 4 devices × 2 accumulation"
    assert plan(per_device_train_batch_size=8).batch_arithmetic == "batch 8 = 8 per device × 1 device × 1 accumulation"


@pytest.mark.parametrize(
    ("rows", "epochs", "batch", "steps"),
    [(100, 1, 8, 13), (96, 1, 8, 12), (100, 2, 8, 25), (100, 0.5, 8, 7), (3, 1, 8, 1)],
)
def test_epochs_become_steps(rows: int, epochs: float, batch: int, steps: int) -> None:
    planned = plan(rows, num_train_epochs=epochs, per_device_train_batch_size=batch)
    assert (planned.steps, planned.total_samples) == (steps, round(rows * epochs))


def test_max_steps_says_more_than_epochs() -> None:
    planned = plan(100, max_steps=5, num_train_epochs=9, per_device_train_batch_size=8)
    assert (planned.steps, planned.total_samples) == (5, 40)


def test_a_global_batch_is_solved_for_each_world() -> None:
    shapes = {}
    for world_size in (1, 2, 4, 8):
        planned = plan(world_size=world_size, global_batch_size=32, per_device_train_batch_size=8)
        assert (
            planned.micro_batch_size * planned.gradient_accumulation_steps * world_size
            == planned.global_batch_size
            == 32
        )
        shapes[world_size] = (planned.micro_batch_size, planned.gradient_accumulation_steps)
    assert shapes == {1: (8, 4), 2: (8, 2), 4: (8, 1), 8: (4, 1)}


def test_a_world_size_that_does_not_divide_the_batch_reports_empty_slots() -> None:
    planned = plan(world_size=3, global_batch_size=32, per_device_train_batch_size=8)
    assert planned.global_batch_size == 32
    assert "1 of 33 row slots per step are empty: 3 do not divide 32" in planned.reasons


def test_a_run_keeps_the_batch_it_was_started_with() -> None:
    started = plan(world_size=4, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    resumed = plan(
        world_size=2,
        resumed_global_batch=started.global_batch_size,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    assert (resumed.global_batch_size, resumed.steps, resumed.total_samples) == (
        32,
        started.steps,
        started.total_samples,
    )
    assert (resumed.micro_batch_size, resumed.gradient_accumulation_steps) == (4, 4)
    assert resumed.reasons[0] == "4 rows per device, 4 times, keep the batch of 32 (this run's earlier start)"


@pytest.mark.parametrize("batch", [1, 2, 6, 7, 12, 32])
@pytest.mark.parametrize("per_device", [1, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_solved_batch_holds_every_row_and_no_device_takes_too_many(
    batch: int, per_device: int, world_size: int
) -> None:
    rows, times = solve_batch(batch, per_device, world_size)
    assert 1 <= rows <= per_device
    assert batch <= rows * times * world_size < batch + world_size


def test_shares_of_a_length_become_steps() -> None:
    planned = plan(
        400, per_device_train_batch_size=4, warmup_steps="5%", decay_steps="20%", save_steps="25%", eval_steps=10
    )
    assert (planned.steps, planned.warmup_steps, planned.decay_steps, planned.save_steps, planned.eval_steps) == (
        100,
        5,
        20,
        25,
        10,
    )


def test_a_warm_up_that_outlasts_the_steps_is_said() -> None:
    [reason] = [
        each for each in plan(rows=80, per_device_train_batch_size=8, warmup_steps=500).reasons if "warm" in each
    ]
    assert reason == "warmup_steps 500 are more than 10 steps: the learning rate ends at 4.0e-07 of 2e-05"
    assert not any("warm" in each for each in plan(rows=80, per_device_train_batch_size=8, warmup_steps=8).reasons)


def test_without_eval_steps_a_stage_is_measured_at_its_end() -> None:
    planned = plan(400, per_device_train_batch_size=4)
    assert planned.eval_steps == planned.steps


@pytest.mark.parametrize(
    ("max_samples", "held_out", "expected"),
    [
        (None, (10_000, 1_000_000), 400),  # 100 tokens a row: 5 % of 100 steps of 8 rows of 1,000 tokens
        (None, (10_000, 10_000_000), 256),  # 40 rows of 1,000 tokens would be too few
        (None, (100, 1_000_000), 100),
        (None, (10_000, 0), 10_000),  # images have no tokens
        (50, (10_000, 1_000_000), 50),
        (50_000, (10_000, 1_000_000), 10_000),
        (None, (0, 0), 0),
    ],
)
def test_an_evaluation_has_a_twentieth_of_the_tokens_trained_between_two(
    max_samples: int | None, held_out: tuple[int, int], expected: int
) -> None:
    planned = plan(50_000, per_device_train_batch_size=8, eval_steps=100)
    assert eval_samples(max_samples, planned, 50_000_000, held_out) == expected


def test_a_save_every_zero_steps_is_one_every_step() -> None:
    assert plan(save_steps=0).save_steps == 1


@pytest.mark.parametrize(("device_info", "precision"), [(LAPTOP, "fp32"), (H100, "bf16"), (V100, "fp16")])
def test_precision_is_what_the_device_does_well(device_info: DeviceInfo, precision: str) -> None:
    assert choose_precision(device_info)[0] == precision
    assert choose_precision(device_info)[1].startswith(precision), "the reason says what was chosen"
    assert plan(device_info=device_info).precision == precision


def test_the_reason_says_what_the_weights_are_kept_in() -> None:
    half = plan(device_info=H100)
    assert half.param_dtype == "bf16"
    assert half.reasons == ("bf16: fast on NVIDIA H100; bf16 weights with exact fp32 masters",)
    wide = plan(device_info=H100, param_dtype="fp32")
    assert (wide.param_dtype, wide.reasons) == ("fp32", ("bf16: fast on NVIDIA H100",))


def test_a_precision_set_in_the_recipe_has_no_reason_line() -> None:
    planned = plan(precision="bf16", device_info=H100)
    assert (planned.precision, planned.reasons) == ("bf16", ())


def test_bf16_on_a_processor_that_has_none_is_said_to_be_slow() -> None:
    planned = plan(precision="bf16")
    assert planned.precision == "bf16" and planned.reasons[0].startswith("bf16, as set, is many times slower than fp32")


@pytest.mark.parametrize(
    ("device_info", "settings", "expected", "reason"),
    [
        (H100, {}, True, "fp32 matmuls use tf32 (10 of 23 mantissa bits); tf32: false keeps all"),
        (H100, {"tf32": False}, False, ""),
        (V100, {}, False, ""),
        (LAPTOP, {"tf32": True}, False, "tf32: true has no effect here: 2 CPU threads has no tf32"),
        (H100, {"tf32": True, "precision": "bf16"}, False, "tf32: true has no effect here: it is for precision fp32"),
    ],
)
def test_fp32_products_go_to_tensor_cores_where_there_are_any_and_the_plan_says_so(
    device_info: DeviceInfo, settings: dict[str, Any], expected: bool, reason: str
) -> None:
    planned = plan(device_info=device_info, **{"precision": "fp32", **settings})
    assert planned.tf32 == expected
    assert [line.startswith(reason) for line in planned.reasons] == ([True] if reason else [])


def test_a_plan_is_plain_json() -> None:
    values = json.loads(json.dumps(plan().as_json()))
    assert values["batch_arithmetic"] == plan().batch_arithmetic
    assert values["steps"] == 13


def test_this_machine_is_probed() -> None:
    device_info = probe_device()
    assert device_info.memory > 1 << 28
    assert device_info.name


def test_a_learning_rate_is_scaled_by_the_devices_the_batch_was_made_for_and_says_so() -> None:
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 5e-5}
    assert plan(world_size=4, **settings).learning_rate == 5e-5
    planned = plan(world_size=4, scale_lr_by_world_size=True, **settings)
    assert planned.learning_rate == pytest.approx(2e-4)
    assert "learning rate 0.0002 = 5e-05 × 4 devices (scale_lr_by_world_size)" in planned.reasons
    fewer = plan(world_size=2, resumed_global_batch=64, scale_lr_by_world_size=True, **settings)
    assert fewer.learning_rate == pytest.approx(2e-4), "a run that goes on with two of four devices keeps its rate"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 1\ninactive_file 200\n"}, 700),
        (
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "2900",
                "memory/memory.stat": "cache 5\n",
            },
            100,
        ),
    ],
    ids=["second version", "first version"],
)
def test_memory_is_free_up_to_the_limit_of_the_container(
    files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    without_limit = available_memory()
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="ascii")
    assert available_memory() == left < without_limit
    (tmp_path / next(iter(files))).write_text("max", encoding="ascii")
    assert available_memory() > left
