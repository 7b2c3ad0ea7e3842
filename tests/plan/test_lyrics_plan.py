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


def test_the_same_batch_fits_an_l4_too_since_the_fp16_loss_is_computed_in_chunks() -> None:
    large, small = planned("1xL40S"), planned("1xL4")
    assert large.plan.precision == small.plan.precision == "fp16"
    assert large.plan.batch_arithmetic == "batch 64 = 16 per device × 1 device × 4 accumulation"
    assert small.plan.batch_arithmetic == large.plan.batch_arithmetic
    assert large.fits and small.fits
    (batch_change,) = [line for line in small.plan.reasons if "instead of" in line]
    assert batch_change == "16 rows per device instead of 24, 4 times, keep the batch of 64 (global_batch_size)"
    longer = planned("1xL4", "sft.max_length=16384", "sft.per_device_eval_batch_size=1")
    memory_change = "micro-batch 1 × 64 accumulation instead of 16 × 4, for the 22 GiB of L4; the batch of 64 is kept"
    assert longer.fits and longer.plan.reasons[-1] == memory_change


def test_if_only_evaluation_does_not_fit_a_smaller_eval_batch_is_suggested() -> None:
    """The batch of training is kept: the first suggestion halves the other one until it fits."""
    for length, rows, fitting in ((2048, 256, 128), (16384, 48, 24)):
        settings = (f"sft.max_length={length}", f"sft.per_device_eval_batch_size={rows}")
        too_large = planned("1xL4", *settings)
        assert (too_large.fits, too_large.alternatives[0]) == (False, f"per_device_eval_batch_size: {fitting}")
        assert planned("1xL4", settings[0], f"sft.per_device_eval_batch_size={fitting}").fits


def test_a_gpu_without_bf16_gets_fp16_and_the_same_batch() -> None:
    estimate = planned("1xT4", "precision=bf16")
    assert estimate.fits and estimate.plan.precision == "fp16"
    assert estimate.plan.global_batch_size == 64
    assert "fp16 instead of bf16: T4 has no bf16" in estimate.plan.reasons
