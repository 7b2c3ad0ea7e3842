"""The plan follows the card that is there: what fits is kept, what does not is changed, each change in a line."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from modelwright.plan.choose import StageEstimate, choose_plan, format_table, plan_table
from modelwright.plan.hardware import device_info_of, parse_hardware
from modelwright.plan.model_shape import SHIPPED_CONFIGS, ModelShape, ResNetShape, shape_from_config
from modelwright.plan.stage import plan_stage
from modelwright.recipe.schema import ClassifyConfig, Recipe, SftConfig
from modelwright.recipe.sections import RowStats

LYRICS = {"trainable": {"last_layers": 2}, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4,
          "max_length": 2048, "cache_frozen_layers": "off"}  # fmt: skip


FP32 = {"param_dtype": "fp32"}
LORA = {"trainable": "lora", "per_device_train_batch_size": 1, "max_length": 4096, "torch_compile": True}


def shape(name: str) -> ModelShape:
    return shape_from_config(SHIPPED_CONFIGS[name], name, "a test")


def planned(name: str, on: str, length: int = 1024, **settings: Any) -> StageEstimate:
    wish, where = SftConfig.model_validate(settings), parse_hardware(on)
    rows = RowStats(10_000, length, float(length))
    return choose_plan(
        plan_stage(wish, 10_000, where.world_size, device_info_of(where)), wish, shape(name), rows, where
    )


def test_what_fits_is_left_as_it_was_asked_for() -> None:
    found = planned("pythia-410m", "1xL40S", 512, **LYRICS)
    assert found.fits and (found.plan.micro_batch_size, found.plan.gradient_accumulation_steps) == (16, 4)
    assert not any("instead of" in line for line in found.plan.reasons)


def test_from_l40s_to_l4_the_batch_is_kept_and_each_change_is_a_line() -> None:
    asked = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
    large, small = planned("pythia-410m", "1xL40S", 2048, **asked), planned("pythia-410m", "1xL4", 2048, **asked)
    assert large.fits and small.fits
    assert large.plan.global_batch_size == small.plan.global_batch_size == 64
    assert small.plan.micro_batch_size < large.plan.micro_batch_size or small.plan.gradient_checkpointing
    changed = [line for line in small.plan.reasons if "L4" in line and "for the" in line]
    assert changed and all("\n" not in line for line in changed)
    assert small.memory.required <= small.hardware.gpu.memory


@pytest.mark.parametrize("asked", [False, "selective"])
def test_what_is_computed_again_is_as_little_as_fits(asked: Any) -> None:
    needs = {
        how: planned("llama-7b", "1xH200", 4096, **LORA, gradient_checkpointing=how).memory.required
        for how in (False, "selective", True)
    }
    assert needs[False] > needs["selective"] > needs[True]
    where = parse_hardware("1xH200")
    for how, need in needs.items():
        wish = SftConfig.model_validate({**LORA, "gradient_checkpointing": asked})
        room = replace(where, gpu=replace(where.gpu, memory=need * 1.001))
        plan = plan_stage(wish, 10_000, 1, device_info_of(where))
        found = choose_plan(plan, wish, shape("llama-7b"), RowStats(10_000, 4096, 4096.0), room)
        assert found.fits and found.plan.gradient_checkpointing == (how or asked)
        told = [line for line in found.plan.reasons if "gradient checkpointing: " in line]
        words = {"selective": "selective", True: "full"}.get(how, "")
        assert len(told) == (0 if (how or asked) == asked else 1) and all(line.startswith(words) for line in told)


@pytest.mark.parametrize(
    ("asked", "room", "told"),
    [
        (True, 1e12, "false"),
        (True, "selective", "selective"),
        (True, True, ""),
        ("selective", 1e12, ""),  # compiled, it is as fast
        (True, 1.0, ""),  # nothing fits
    ],
)
def test_a_pinned_checkpointing_is_held_against_a_lighter_that_would_fit(asked: Any, room: Any, told: str) -> None:
    wish, where = SftConfig.model_validate({**LORA, "gradient_checkpointing": asked}), parse_hardware("1xH200")
    if not isinstance(room, float):
        room = 1.001 * planned("llama-7b", "1xH200", 4096, **LORA, gradient_checkpointing=room).memory.required
    plan = plan_stage(wish, 10_000, 1, device_info_of(where))
    place = replace(where, gpu=replace(where.gpu, memory=room))
    found = choose_plan(plan, wish, shape("llama-7b"), RowStats(10_000, 4096, 4096.0), place)
    lines = [line for line in found.plan.reasons if "would fit too" in line]
    assert len(lines) == bool(told) and all(
        re.fullmatch(rf"gradient_checkpointing: {told} would fit too, 1\.[1-5]\d × as fast", line) for line in lines
    ), found.plan.reasons
    assert found.plan.gradient_checkpointing == asked, "the recipe has the word"


def test_a_card_without_bf16_computes_in_fp16() -> None:
    found = planned("pythia-410m", "1xT4", 512, **{**LYRICS, "precision": "bf16"})
    assert found.plan.precision == "fp16"
    assert "fp16 instead of bf16: T4 has no bf16" in found.plan.reasons


def test_seven_billion_fp32_masters_do_not_fit_80_gb_and_what_would_is_said() -> None:
    found = planned("llama-7b", "1xA100-80", 2048, **FP32, per_device_train_batch_size=8)
    assert not found.fits
    assert found.alternatives == ("trainable: lora", "distributed_strategy: fsdp over 2 × A100-80", "1 × H200")


@pytest.mark.parametrize(
    ("on", "sharding", "why"),
    [
        ("8xA100-80", "fsdp", "the weights are split over 8 cards"),
        ("8x1xA100-80", "fsdp", "the weights are split over 8 cards"),
        ("2x8xA100-80", "hsdp", "the weights are split over the 8 cards of each of 2 machines"),
        ("2x2xL40S", "fsdp", "the weights are split over 4 cards"),  # the two of one machine do not hold it
        ("2xH200", "ddp", "each of 2 devices holds a copy"),
        ("1xH200", "ddp", ""),
    ],
)
def test_several_cards_split_what_one_cannot_hold_and_the_plan_says_why(on: str, sharding: str, why: str) -> None:
    found = planned("llama-7b", on, 512, **FP32, per_device_train_batch_size=1)
    assert found.fits and found.plan.sharding == sharding
    told = [line for line in found.plan.reasons if line.startswith(f"{sharding}: ") or "instead of ddp" in line]
    assert (len(told), why in told[0] if told else True) == (1 if why else 0, True), found.plan.reasons


@pytest.mark.parametrize(("on", "way"), [("1xL4", {"trainable": "lora"}), ("8xL4", {"distributed_strategy": "fsdp"})])
def test_weights_that_arrive_whole_in_fp32_must_fit_before_they_are_halved_or_split(on: str, way: Any) -> None:
    found = planned("llama-7b", on, 512, per_device_train_batch_size=1, **way)
    assert not found.fits and found.memory.peak_phase == "loading"
    assert found.memory.total == pytest.approx(4 * found.trainable.total, rel=0.01)


def test_a_way_of_sharing_that_was_written_down_is_kept() -> None:
    for way in ("ddp", "fsdp", "hsdp"):
        assert planned("smollm2-135m", "2x8xL40S", distributed_strategy=way).plan.sharding == way


def test_split_inside_each_machine_what_crosses_the_slow_network_is_less() -> None:
    over_all, inside = (
        planned("llama-7b", "2x8xA100-80", 512, **FP32, distributed_strategy=way) for way in ("fsdp", "hsdp")
    )
    assert inside.time.communication < 0.5 * over_all.time.communication


def test_a_free_micro_batch_is_chosen_by_the_plan() -> None:
    found = planned("smollm2-135m", "1xH200", 512, global_batch_size=64)
    assert found.plan.micro_batch_size * found.plan.gradient_accumulation_steps == 64
    assert found.plan.micro_batch_size > 8, "one that nobody wrote down may grow to what the card does best"


def test_images_are_planned_too() -> None:
    wish, where = ClassifyConfig(per_device_train_batch_size=512, gradient_checkpointing=True), parse_hardware("1xL4")
    plan = plan_stage(wish, 50_000, 1, device_info_of(where))
    found = choose_plan(plan, wish, ResNetShape("resnet18", "a test"), RowStats(50_000, 1, 1.0), where)
    assert found.fits and found.time.tokens_per_second > 1000
    assert found.plan.gradient_checkpointing is False, "nothing of an image is computed again"
    assert len([line for line in found.plan.reasons if "gradient_checkpointing has no effect here" in line]) == 1


def test_the_sheet_shows_machines_side_by_side_with_hours_and_cost() -> None:
    told = {"name": "r", "model": {"model_name_or_path": "pythia-410m"}, "data": {"dataset_name": "x"}, "sft": LYRICS}
    places = (parse_hardware("1xH200"), parse_hardware("4xL40S"))
    rows = RowStats(10_000_000, 512, 300.0, 1.0, "a test")
    sheet = plan_table(Recipe.model_validate(told), "sft", shape("pythia-410m"), rows, places)
    shown = "\n".join(format_table(sheet))
    assert "1xH200" in shown and "4xL40S" in shown and "64 = 16 × 1 × 4" in shown and "256 = 16 × 4 × 4" in shown
    as_json = sheet.as_json()["on"]
    assert as_json[1]["gpu_hours"] == pytest.approx(4 * as_json[1]["hours"], rel=0.01)
    assert as_json[0]["cost"] == pytest.approx(as_json[0]["gpu_hours"] * 4.5, abs=0.01)


def test_more_cards_are_faster_but_never_more_than_their_number() -> None:
    one, four = planned("smollm3-3b", "1xL40S", 512), planned("smollm3-3b", "4xL40S", 512)
    assert one.time.tokens_per_second < four.time.tokens_per_second <= 4 * one.time.tokens_per_second * 1.001
