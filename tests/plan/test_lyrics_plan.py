"""The lyrics recipe on another GPU keeps its batch of 64, with a line per change."""

from __future__ import annotations

from modelwright.plan.choose import StageEstimate, choose_plan
from modelwright.plan.hardware import device_info_of, parse_hardware
from modelwright.plan.model_shape import SHIPPED_CONFIGS, shape_from_config
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import RowStats


def planned(on: str, *sets: str) -> StageEstimate:
    sft = load("lyrics-pythia", sets, environ={}).recipe.sft
    assert sft is not None
    hardware = parse_hardware(on)
    rows = RowStats(10_000, sft.max_length, float(sft.max_length))
    shape = shape_from_config(SHIPPED_CONFIGS["pythia-410m"], "pythia-410m", "a test")
    return choose_plan(
        plan_stage(sft, 10_000, hardware.world_size, device_info_of(hardware)), sft, shape, rows, hardware
    )


def test_from_an_l40s_to_an_l4_the_recipe_goes_from_16_times_4_to_8_times_8() -> None:
    large, small = planned("1xL40S"), planned("1xL4")
    assert large.plan.precision == small.plan.precision == "fp16"
    assert large.plan.batch_arithmetic == "batch 64 = 16 per device × 1 device × 4 accumulation"
    assert small.plan.batch_arithmetic == "batch 64 = 8 per device × 1 device × 8 accumulation"
    assert large.fits and small.fits
    batch_change, memory_change = [line for line in small.plan.reasons if "instead of" in line]
    assert batch_change == "16 rows per device instead of 24, 4 times, keep the batch of 64 (global_batch_size)"
    assert (
        memory_change
        == "micro-batch 8 × 8 accumulation instead of 16 × 4, for the 22 GiB of L4; the batch of 64 is kept"
    )
    longer = planned("1xL4", "sft.max_length=16384", "sft.per_device_eval_batch_size=1")
    assert longer.fits and "micro-batch 1 × 64 accumulation instead of 16 × 4" in longer.plan.reasons[-1]


def test_if_only_evaluation_does_not_fit_a_smaller_eval_batch_is_suggested() -> None:
    too_large = planned("1xL4", "sft.max_length=5000")
    assert (too_large.fits, too_large.alternatives[0]) == (False, "per_device_eval_batch_size: 4")
    assert planned("1xL4", "sft.max_length=5000", "sft.per_device_eval_batch_size=4").fits


def test_a_gpu_without_bf16_gets_fp16_a_smaller_micro_batch_and_the_same_batch() -> None:
    estimate = planned("1xT4", "precision=bf16")
    changed = [line for line in estimate.plan.reasons if "T4" in line]
    assert estimate.plan.precision == "fp16"
    assert estimate.plan.global_batch_size == 64
    assert estimate.plan.micro_batch_size < 16
    assert "fp16 instead of bf16: T4 has no bf16" in estimate.plan.reasons
    assert len(changed) >= 2
    assert all("\n" not in line for line in changed)
